//! The name under which `ps`, `pkill` and `killall` find a process.

use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// The name of a supervisor beside its guard's.
pub const SUPERVISOR: &str = "supervisor";

/// Where the arguments lie that `/proc/PID/cmdline` shows, and how long they are.
static ARGUMENTS: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static LENGTH: AtomicUsize = AtomicUsize::new(0);

/// Notes where the arguments lie. The kernel puts them one behind the other (execve(2)).
///
/// # Safety
/// `argv` has `count` pointers to null-terminated strings that are writable and live as long as the program, and that
/// nobody else reads or writes after [`become_supervisor`].
pub unsafe fn remember(count: usize, argv: *const *const libc::c_char) {
    if count == 0 {
        return;
    }
    // SAFETY: as the caller promises.
    let (first, last) = unsafe { (*argv, *argv.add(count - 1)) };
    // SAFETY: likewise.
    let end = last.addr() + unsafe { CStr::from_ptr(last) }.to_bytes_with_nul().len();
    if first.addr() < end {
        ARGUMENTS.store(first.cast_mut().cast(), Ordering::Relaxed);
        LENGTH.store(end - first.addr(), Ordering::Relaxed);
    }
}

/// Takes the supervisor's name and command line, as far as there is room for it: who kills us by our name is not to kill both.
pub fn become_supervisor() {
    const NAME: &CStr = c"supervisor";
    debug_assert_eq!(NAME.to_str(), Ok(SUPERVISOR));
    change(NAME);
}

fn change(name: &CStr) {
    // SAFETY: PR_SET_NAME copies up to 15 bytes and the NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    let (start, length) = (ARGUMENTS.load(Ordering::Relaxed), LENGTH.load(Ordering::Relaxed));
    if start.is_null() {
        return;
    }
    // SAFETY: `remember` was promised so much memory, writable and read by nobody.
    let place = unsafe { std::slice::from_raw_parts_mut(start, length) };
    place.fill(0);
    let text = name.to_bytes();
    let shown = &text[..text.len().min(length.saturating_sub(1))];
    place[..shown.len()].copy_from_slice(shown);
    // A last byte that is not 0 says that there is a title, which ends at its first 0; else all of this would be arguments, most
    // of them empty (proc_pid_cmdline(5)). Without room for both the kernel would go on into the environment.
    if length > shown.len() + 1 {
        place[length - 1] = b'.';
    }
}
