//! The only place where a wait status is read.
//!
//! `libc::waitid`, not nix: nix gives EINVAL for a child that a real-time signal killed, after the kernel has already
//! forgotten it. `__WALL` because without it a child whose exit signal is not SIGCHLD is not seen, and ECHILD would lie.

use super::Pid;
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use std::io;
use std::mem::MaybeUninit;

/// What happened to one direct child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It ended, and is reaped: its number may be another's from now on.
    Ended(Pid, Exit),
    /// It was stopped by this signal.
    Stopped(Pid, Signal),
}

/// What is left after all that waited was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// ECHILD: no child is left, not even a zombie. For a subreaper that is no descendant at all.
    Nobody,
    /// Somebody lives.
    Somebody,
    /// There are more dead to be taken.
    More,
}

/// The most that one call takes. A chain of processes that fork and exit leaves the dead as fast as they are taken, and there
/// is more to do.
const MOST: usize = 1000;

/// Takes every change of a child that waits to be taken; SIGCHLD counts for any number of them. Never blocks, and
/// takes no more than a thousand at once.
pub fn reap(mut take: impl FnMut(Change)) -> Left {
    for _ in 0..MOST {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
        // SAFETY: `info` is ours and zeroed, which is a valid siginfo_t. WNOHANG leaves it untouched when nothing waits.
        let result = unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), options) };
        if result != 0 {
            // Nothing but ECHILD proves that nobody is left; a filter of system calls may give any other.
            let is_proof = io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD);
            return if is_proof { Left::Nobody } else { Left::Somebody };
        }
        // SAFETY: zeroed at the start, so initialised whether or not the kernel wrote it; si_pid and si_status are the
        // fields that waitid fills.
        let (pid, code, status) = unsafe {
            let info = info.assume_init();
            (info.si_pid(), info.si_code, info.si_status())
        };
        if pid == 0 {
            return Left::Somebody;
        }
        match (code, Signal::from_number(status)) {
            (libc::CLD_KILLED | libc::CLD_DUMPED, Some(signal)) => {
                take(Change::Ended(pid, Exit::Signal { signal, core_dumped: code == libc::CLD_DUMPED }));
            }
            (libc::CLD_STOPPED, Some(signal)) => take(Change::Stopped(pid, signal)),
            (libc::CLD_TRAPPED, stopped_by) => let_go(pid, stopped_by),
            // waitid gives the low eight bits of what was passed to exit (wait(2)); glibc fills si_status from it.
            _ => take(Change::Ended(pid, Exit::Code(u8::try_from(status & 0xff).unwrap_or(u8::MAX)))),
        }
    }
    Left::More
}

/// Lets a child go on that made us its tracer (PTRACE_TRACEME): nobody but its tracer can. It gets the signal that it was
/// about to take, except for the trap that only tells a tracer of an exec.
fn let_go(pid: Pid, stopped_by: Option<Signal>) {
    let signal = stopped_by.map_or(0, Signal::number);
    let passed_on = if signal == libc::SIGTRAP { 0 } else { libc::c_long::from(signal) };
    // SAFETY: no memory of ours is read or written: the address is not used, and the data is a signal. It fails when the
    // child was killed meanwhile.
    unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, std::ptr::null_mut::<libc::c_void>(), passed_on) };
}

/// Whether this child has stopped or gone on since its last stop was taken; takes nothing.
pub fn has_stopped_or_gone_on(pid: Pid) -> bool {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WSTOPPED | libc::WCONTINUED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: as in `reap`; zeroed at the start, so initialised whether or not the kernel wrote it.
    libc::id_t::try_from(pid).is_ok_and(|id| unsafe {
        libc::waitid(libc::P_PID, id, info.as_mut_ptr(), options) == 0 && info.assume_init().si_pid() != 0
    })
}

/// Whether this process has a child at all; takes nothing.
///
/// # Errors
/// When a filter refuses the call, without which no end can be seen and no emptiness proven.
pub fn has_children() -> io::Result<bool> {
    has_child_of(libc::P_ALL, 0)
}

/// Whether a child of ours that is not reaped is in this group, which also pins the group's number; takes nothing.
pub fn has_child_in_group(group: Pid) -> bool {
    libc::id_t::try_from(group).is_ok_and(|group| has_child_of(libc::P_PGID, group).unwrap_or(false))
}

fn has_child_of(kind: libc::idtype_t, id: libc::id_t) -> io::Result<bool> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: as in `reap`.
    if unsafe { libc::waitid(kind, id, info.as_mut_ptr(), options) } == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ECHILD) { Ok(false) } else { Err(error) }
}
