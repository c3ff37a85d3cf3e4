//! One process becomes two: the guard, and the supervisor below it.

use super::Guard;
use super::link::{self, Link};
use crate::containment::Containment;
use crate::containment::lineage::Lineage;
use crate::process::signals::{SignalSource, pass_on_to};
use crate::process::{Pid, title};
use std::io;

/// Which of the two this process is.
#[derive(Debug)]
pub enum Role {
    /// The guard; to be told to watch.
    Guard(Box<Guard>),
    /// The supervisor, and its link to the guard.
    Supervisor(Guarded),
}

/// What the supervisor has of its guard.
#[derive(Debug)]
pub struct Guarded {
    /// The way to it.
    pub link: Link,
    /// Its number; 0 when it is outside of our pid namespace.
    pub pid: Pid,
}

impl Guarded {
    /// Lets a guard go on that stops when nobody is to continue it any more. Out of our pid namespace it cannot be reached.
    pub fn resume(&self) {
        let is_ours = self.pid > 1 && nix::unistd::getppid().as_raw() == self.pid;
        // SAFETY: our parent, which cannot be another's number while it is that.
        unsafe { if is_ours { libc::kill(self.pid, libc::SIGCONT) } else { 0 } };
    }
}

/// In which process group the supervisor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Its own: who kills our group does not kill both of us.
    Own,
    /// The caller's: as PID 1 of a namespace it takes all with it, and outside of ours no group of that can be named.
    Callers,
}

/// Makes the supervisor; both go on from here.
///
/// # Errors
/// When the kernel has no process or no descriptors for it, or a filter refuses.
pub fn fork(group: Group) -> io::Result<Role> {
    let signals = SignalSource::open(None)?;
    let tree = Containment::new(Lineage::enter()?);
    let (link, supervisors_end) = link::pair()?;
    let guard = nix::unistd::getpid().as_raw();
    // SAFETY: there is one thread, so the child finds every lock free.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop((link, signals, tree));
            become_supervisor(group, guard);
            // 0 when the caller had made a pid namespace for its next child, or we had.
            let pid = nix::unistd::getppid().as_raw();
            Ok(Role::Supervisor(Guarded { link: supervisors_end, pid }))
        }
        supervisor => Ok(Role::Guard(Box::new(Guard::over(supervisor, link, signals, tree)))),
    }
}

fn become_supervisor(group: Group, guard: Pid) {
    title::become_supervisor();
    if group == Group::Own {
        // SAFETY: our own group, which is refused to nobody but a session's leader, and that a new process is not.
        unsafe { libc::setpgid(0, 0) };
        // Until something is started, there is nothing to do after the guard's death, and a supervisor that waits for its
        // configuration (a FIFO) would not see it.
        die_with(guard);
    }
}

/// Has the kernel kill us when the guard dies, which may have happened already. (Out of our pid namespace it has no number.)
fn die_with(guard: Pid) {
    // SAFETY: a constant option; the end of a process of which nobody waits for more.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        if ![guard, 0].contains(&libc::getppid()) {
            libc::_exit(125);
        }
    }
}

/// From here on there is something to do after the guard's death, of which the link tells. A stopped process would not see
/// that; a SIGCONT past the guard is dropped.
pub fn outlive() {
    // SAFETY: a constant option.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT) };
}

/// Makes a child of ours the supervisor that the guard watches over; we are gone afterwards. The child goes on from here.
///
/// # Errors
/// When the kernel has no process.
pub fn hand_over(guarded: Guarded, callers_group: Pid) -> io::Result<Guarded> {
    // SAFETY: it moves us alone, and may be refused when nobody is in that group any more; then we stay where we are. There
    // is one thread, so the child finds every lock free.
    let child = unsafe {
        libc::setpgid(0, callers_group);
        libc::fork()
    };
    match child {
        -1 => Err(io::Error::last_os_error()),
        // Seen from inside a new pid namespace, what is outside has no number.
        0 => Ok(Guarded { link: guarded.link, pid: 0 }),
        successor => {
            die_with(guarded.pid);
            guarded.link.successor(successor);
            let is_handed_over = pass_on_to(successor, guarded.pid);
            // A guard that has not heard of it takes this for the end.
            // SAFETY: ends this process at once; nothing of the child's is flushed twice.
            unsafe { libc::_exit(if is_handed_over { 0 } else { 125 }) }
        }
    }
}
