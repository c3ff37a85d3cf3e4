//! What a test needs of the machine. Where it is missing the test is skipped, with a line that says so; in CI (the
//! environment variable CI is set) that is a failure, so that no test is skipped for ever.
//!
//!     if !need_root() {
//!         return;
//!     }

use std::io::Write as _;

/// Root with the rights to make namespaces and change users.
#[must_use]
pub(crate) fn need_root() -> bool {
    // SAFETY: no memory is involved.
    need("root", unsafe { libc::geteuid() } == 0)
}

/// A program of the system.
#[must_use]
pub(crate) fn need_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    need(name, std::env::split_paths(&path).any(|dir| dir.join(name).is_file()))
}

#[must_use]
pub(crate) fn need(what: &str, there: bool) -> bool {
    if !there {
        assert!(std::env::var_os("CI").is_none(), "this test needs {what}, and in CI nothing is skipped");
        let thread = std::thread::current();
        // Not `eprintln!`, which libtest keeps to itself.
        let _ = writeln!(std::io::stderr(), "skipped: {}: no {what}", thread.name().unwrap_or("test"));
    }
    there
}
