//! Signals by number, in one place. The number is a direct child that is not reaped, a group that such a child is in, or, as
//! PID 1, everybody. Never our own group, never PID 1.

use crate::process::Pid;
use crate::signal::Signal;
use std::io;

/// Signals where nothing has to be known of the failure: it is seen by the next look, and of a group success would prove
/// nothing either.
pub(super) fn kill(target: Pid, signal: Signal) {
    let _ = send(target, signal);
}

/// Signals, or gives the errno.
pub(super) fn send(target: Pid, signal: Signal) -> Result<(), i32> {
    let everybody_of_ours = target == -1 && nix::unistd::getpid().as_raw() == 1;
    let ourselves = target.abs() <= 1 || target == -nix::unistd::getpgrp().as_raw();
    if ourselves && !everybody_of_ours {
        return Err(libc::EPERM);
    }
    // SAFETY: kill takes any number; see above for whose this is.
    let sent = unsafe { libc::kill(target, signal.number()) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
}

/// ESRCH of a signal to everybody: as PID 1 the kernel counts all others in the namespace for it, zombies included.
pub(super) fn nobody_else_in_the_namespace() -> bool {
    // SAFETY: signal 0 sends nothing.
    unsafe { libc::kill(-1, 0) != 0 && *libc::__errno_location() == libc::ESRCH }
}
