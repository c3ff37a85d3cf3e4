//! A claim made in a process of its own, for what would change this one: a limit, the umask, a mount, a user.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::FromRawFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Makes the claim in a forked process. True when it came to its end there without a panic.
#[must_use]
pub(crate) fn holds_apart(claim: impl FnOnce()) -> bool {
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: both are new and ours.
    let (mut told, mut teller) = unsafe { (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1])) };
    // SAFETY: the C library keeps its own locks over a fork, and the claim takes none that another test holds.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        if catch_unwind(AssertUnwindSafe(claim)).is_ok() {
            let _ = teller.write_all(b"y");
        }
        // SAFETY: ends this process at once.
        unsafe { libc::_exit(0) };
    }
    drop(teller);
    let mut text = Vec::new();
    let _ = told.read_to_end(&mut text);
    // SAFETY: our direct child.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    text == b"y"
}
