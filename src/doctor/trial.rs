//! Something tried in a forked child, where it changes nothing of ours.
//!
//! The child's answer comes through a pipe, the end of which says that nobody of the trial is left. What takes too long is
//! killed, and what a child has forked is killed with it (PDEATHSIG): a doctor does not hang.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// How long one trial may take; it takes about a millisecond.
const PATIENCE: Duration = Duration::from_secs(2);

/// What it says for people, whether it went well or not.
pub(super) type Tried = Result<String, String>;

/// Tries it in a child.
pub(super) fn attempt(act: impl FnOnce() -> Tried) -> Tried {
    let no_process = |error: io::Error| Err(format!("cannot be tried: no process: {}", crate::log::reason(&error)));
    let mut ends: [RawFd; 2] = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return no_process(io::Error::last_os_error());
    }
    // SAFETY: both are new and ours.
    let (mut told, teller) = unsafe { (File::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    // SAFETY: there is one thread, so the child finds every lock free.
    match unsafe { libc::fork() } {
        -1 => no_process(io::Error::last_os_error()),
        0 => {
            // SAFETY: a constant option. Where it is refused, a trial that hangs is no worse than one that never ends.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let text = act().map_or_else(|why| format!("-{why}"), |what| format!("+{what}"));
            // Nobody listens any more when this fails.
            let _ = File::from(teller).write_all(text.as_bytes());
            // SAFETY: ends this process at once; nothing of the parent's is flushed twice.
            unsafe { libc::_exit(0) }
        }
        child => {
            drop(teller);
            let answer = listen(&mut told, Instant::now() + PATIENCE);
            // SAFETY: our direct child, not reaped. One that is still there after SIGKILL is not waited for.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                let patience = if answer.is_some() { 0 } else { libc::WNOHANG };
                libc::waitpid(child, std::ptr::null_mut(), libc::__WALL | patience);
            }
            decode(answer)
        }
    }
}

/// The whole answer; nothing when it did not come in time.
fn listen(told: &mut File, until: Instant) -> Option<Vec<u8>> {
    let mut answer = Vec::new();
    let mut piece = [0; 1024];
    loop {
        let left = i32::try_from(until.saturating_duration_since(Instant::now()).as_millis()).unwrap_or(0);
        let mut pipe = libc::pollfd { fd: told.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one, as said.
        if unsafe { libc::poll(&raw mut pipe, 1, left) } < 1 {
            return None;
        }
        match told.read(&mut piece) {
            Ok(0) => return Some(answer),
            Ok(length) => answer.extend(&piece[..length]),
            Err(_) => return None,
        }
    }
}

fn decode(answer: Option<Vec<u8>>) -> Tried {
    let Some(answer) = answer else { return Err("nothing came of it in 2 s".to_owned()) };
    match answer.split_first() {
        Some((b'+', what)) => Ok(String::from_utf8_lossy(what).into_owned()),
        Some((_, why)) => Err(String::from_utf8_lossy(why).into_owned()),
        // A filter may kill instead of refusing.
        None => Err("whoever tries it is killed".to_owned()),
    }
}

/// Forks a child that does nothing, and waits for its end: whether a process can be made at all.
pub(super) fn fork_once() -> io::Result<()> {
    // SAFETY: the child ends at once; the parent takes this child only.
    unsafe {
        match libc::fork() {
            -1 => Err(io::Error::last_os_error()),
            0 => libc::_exit(0),
            child => {
                libc::waitpid(child, std::ptr::null_mut(), libc::__WALL);
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_child_says_is_heard() {
        assert_eq!(attempt(|| Ok("well".to_owned())), Ok("well".to_owned()));
        assert_eq!(attempt(|| Err("x".repeat(3000))), Err("x".repeat(3000)));
    }

    #[test]
    fn a_child_that_is_killed_or_hangs_is_no_success() {
        // SAFETY: ends the child only.
        assert!(attempt(|| unsafe { libc::_exit(0) }).is_err());
        let began = Instant::now();
        let hung = attempt(|| {
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        });
        assert!(hung.is_err() && began.elapsed() < PATIENCE * 5);
    }
}
