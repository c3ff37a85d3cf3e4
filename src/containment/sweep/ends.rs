//! Tells when one of those that are not our children ended.

use crate::containment::walk::hold;
use crate::process::Pid;
use crate::process::proc::{Proc, Stat};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The most that are watched at once: a limit on open files is 1,024 by habit. Whoever is left is watched when one of these
/// has ended.
const MOST_WATCHED: usize = 256;

/// How many ends are taken at once.
const TAKEN: usize = 64;

/// An epoll descriptor with the pidfds of the living in it.
#[derive(Debug)]
pub(super) struct Ends {
    epoll: OwnedFd,
    watched: BTreeMap<Pid, OwnedFd>,
    /// There is no such call (before Linux 5.3), or a filter refuses it.
    cannot_watch: bool,
}

impl Ends {
    pub(super) fn new() -> io::Result<Ends> {
        // SAFETY: a constant flag.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: new, and owned by nobody else.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        Ok(Ends { epoll, watched: BTreeMap::new(), cannot_watch: false })
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Watches those that are not watched yet.
    pub(super) fn watch(&mut self, proc: &Proc, living: &[Stat]) {
        for stat in living {
            if self.cannot_watch || self.watched.len() >= MOST_WATCHED {
                return;
            }
            if self.watched.contains_key(&stat.pid) {
                continue;
            }
            let Some((process, _)) = hold(proc, stat.pid).filter(|(_, now)| now.start == stat.start) else { continue };
            match process.pidfd(stat.pid) {
                Ok(pidfd) => self.add(stat.pid, pidfd),
                Err(why) => self.cannot_watch |= matches!(why.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)),
            }
        }
    }

    fn add(&mut self, pid: Pid, pidfd: OwnedFd) {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: u64::try_from(pid).unwrap_or(0) };
        // SAFETY: both descriptors are ours, and the kernel copies the event.
        let added =
            unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, pidfd.as_raw_fd(), &raw mut event) };
        if added == 0 {
            self.watched.insert(pid, pidfd);
        }
    }

    /// Lets go of those that ended. True when there were any.
    pub(super) fn drain(&mut self) -> bool {
        let mut any = false;
        loop {
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; TAKEN];
            let room = i32::try_from(TAKEN).unwrap_or(1);
            // SAFETY: there is room for that many; without a time-out it does not wait.
            let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), room, 0) };
            let count = usize::try_from(count).unwrap_or(0);
            for event in &events[..count] {
                self.forget(event.u64);
            }
            any |= count > 0;
            if count < TAKEN {
                return any;
            }
        }
    }

    fn forget(&mut self, pid: u64) {
        let Some(pidfd) = Pid::try_from(pid).ok().and_then(|pid| self.watched.remove(&pid)) else { return };
        // A forked reader may have a copy of it open still, so closing it would not take it out.
        // SAFETY: both descriptors are ours; no event is needed to remove one (since Linux 2.6.9).
        unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, pidfd.as_raw_fd(), std::ptr::null_mut());
        }
    }
}
