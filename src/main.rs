//! argv → run → exit code; nothing else.
//!
//! This is the C entry point, not Rust's. What Rust's does before `main` would change what the service inherits: it
//! ignores SIGPIPE, and opens /dev/null in place of closed standard descriptors. And it comes earlier: a signal that
//! reaches PID 1 before it is blocked is lost. (The very first instructions are in `entry`.)

#![no_main]

mod entry;

use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

/// Where the C library enters.
///
/// # Safety
/// `argv` has `argc` pointers to null-terminated, writable strings that live as long as the program: so says the C library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let inherited = supervise::process::signals::Inherited::take(entry::former_mask());
    let count = usize::try_from(argc).unwrap_or(0);
    let arguments = (0..count).map(|index| {
        // SAFETY: as the caller promises.
        let argument = unsafe { CStr::from_ptr(*argv.add(index)) };
        OsStr::from_bytes(argument.to_bytes()).to_os_string()
    });
    let arguments: Vec<OsString> = arguments.collect();
    // SAFETY: as the caller promises; what is read of them was just copied.
    unsafe { supervise::process::title::remember(count, argv) };
    c_int::from(supervise::run(inherited, &arguments))
}
