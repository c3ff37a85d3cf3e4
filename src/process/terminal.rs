//! Job control: the service in the foreground of the terminal, stopped and continued together with us.
//!
//! The theory. A shell knows one process group: ours. At a terminal the service gets a group of its own, so that the
//! ladder can signal it without signalling us, and while the shell has us in the foreground the terminal is lent to that
//! group. When the service stops, the terminal is taken back and we stop, too, so that the shell sees its command
//! stop; SIGCONT goes the other way. Whether a stop of ours has an effect (it has none in an orphaned group, nor for
//! PID 1) is for the kernel to say: we try, and look whether somebody had to continue us.
//!
//! Where others are in our group the service stays in it, too, and the keys reach it by themselves: a pipeline's other
//! members must keep the terminal (`supervise -- a | less`), a script that runs us in its background wants to read
//! (`supervise -- a & read line`), and one that waits for us ends with the service at Ctrl-C. A shell with job control
//! makes a command the leader of its group; so who is not the leader has company, and a leader has when its standard input
//! or output is a pipe.

use super::Pid;
use crate::signal::Signal;
use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};

/// In which session and process group the service starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// A session of its own: there is no terminal.
    OwnSession,
    /// A group of its own in our session.
    OwnGroup {
        /// The controlling terminal.
        terminal: RawFd,
        /// Whether the terminal is lent to it at once.
        foreground: bool,
    },
    /// The group that we were started in: others of a pipeline or script are in it.
    CallersGroup(Pid),
}

/// What a shell knows of us: the process that it started, which is the guard where there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its process group. 0, as tcgetpgrp(3) has it, when it is none of our pid namespace.
    pub group: Pid,
    leads_group: bool,
    leads_session: bool,
}

impl Caller {
    /// What is known of this process.
    pub fn ourselves() -> Caller {
        let (us, group) = (nix::unistd::getpid(), nix::unistd::getpgrp());
        let leads_session = nix::unistd::getsid(None).is_ok_and(|session| session == us);
        Caller { group: group.as_raw(), leads_group: group == us, leads_session }
    }

    /// The same, as seen from inside a new pid namespace.
    #[must_use]
    pub fn from_inside(self) -> Caller {
        Caller { group: 0, leads_group: false, ..self }
    }
}

/// The controlling terminal, or that there is none.
#[derive(Debug)]
pub struct Terminal {
    controlling: Option<File>,
    caller: Caller,
    shares_callers_group: bool,
    /// How it was when it was lent.
    modes: Option<Termios>,
}

impl Terminal {
    /// Looks for the controlling terminal.
    pub fn find(caller: Caller) -> Terminal {
        let open = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open("/dev/tty");
        // A terminal that hung up can still be opened, and knows no foreground group.
        let controlling = open.ok().filter(|terminal| foreground_group(terminal).is_some());
        let has_company = !caller.leads_group || is_pipe(libc::STDIN_FILENO) || is_pipe(libc::STDOUT_FILENO);
        let shares_callers_group = controlling.is_some() && has_company;
        Terminal { controlling, caller, shares_callers_group, modes: None }
    }

    /// Where the service is to start.
    pub fn placement(&mut self) -> Placement {
        match &self.controlling {
            None => Placement::OwnSession,
            Some(_) if self.shares_callers_group => Placement::CallersGroup(self.caller.group),
            Some(terminal) => {
                let foreground = foreground_group(terminal) == Some(self.caller.group);
                if foreground {
                    self.modes = tcgetattr(terminal).ok();
                }
                Placement::OwnGroup { terminal: terminal.as_raw_fd(), foreground }
            }
        }
    }

    /// Whether the service is in the caller's group, and so continued by whoever continues that.
    pub fn shares_callers_group(&self) -> bool {
        self.shares_callers_group
    }

    /// Whether a shell may stop and continue us.
    pub fn has_job_control(&self) -> bool {
        self.controlling.is_some()
    }

    /// Whether this signal of the kernel reaches the service by itself: a key does, when it is in the caller's group. A hang-up
    /// is told to the session's leader alone.
    pub fn reaches_the_service(&self, signal: Signal) -> bool {
        self.shares_callers_group && !(signal == Signal::HUP && self.caller.leads_session)
    }

    /// The descriptor that has to stay open.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.controlling.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Lends the terminal to the service's group, if it is ours to lend.
    pub fn lend(&mut self, group: Pid) {
        let Some(terminal) = &self.controlling else { return };
        if !self.shares_callers_group && foreground_group(terminal) == Some(self.caller.group) {
            self.modes = tcgetattr(terminal).ok();
            set_foreground_group(terminal, group);
        }
    }

    /// Lends it again after a stop that had no effect. False when it is not ours to lend.
    pub fn lend_again(&self, group: Pid) -> bool {
        let Some(terminal) = &self.controlling else { return false };
        if self.shares_callers_group {
            return true;
        }
        if foreground_group(terminal) == Some(self.caller.group) {
            set_foreground_group(terminal, group);
        }
        foreground_group(terminal) == Some(group)
    }

    /// Puts the modes back that it had when it was lent, if we have it. A shell does so for a program that was killed, and
    /// takes our end for that of a program that meant what it left.
    pub fn put_modes_back(&self) {
        let (Some(terminal), Some(modes)) = (&self.controlling, &self.modes) else { return };
        if foreground_group(terminal) == Some(self.caller.group) {
            // It fails when the terminal hung up.
            let _ = tcsetattr(terminal, SetArg::TCSANOW, modes);
        }
    }

    /// Takes the terminal back from `group`, or from a group that is no more.
    pub fn take_back(&self, group: Option<Pid>) {
        let Some(terminal) = &self.controlling else { return };
        if self.shares_callers_group {
            return;
        }
        let Some(foreground) = foreground_group(terminal) else { return };
        if Some(foreground) == group || is_gone(foreground) {
            set_foreground_group(terminal, self.caller.group);
        }
    }

    /// The signal by which a service that was stopped by `stopped_by` is to stop us, too.
    pub fn suspending(&self, stopped_by: Signal) -> Signal {
        match stopped_by {
            // There is no shell that the kernel would ask about.
            _ if self.controlling.is_none() => Signal::STOP,
            // It would stop us also where nobody is there to continue us.
            Signal::STOP => Signal::TSTP,
            other => other,
        }
    }
}

/// Stops this process until SIGCONT, which is taken: left in the queue, the next key that stops would throw it away
/// (signal(7)). False when it had no effect: in an orphaned group, or for PID 1.
pub fn suspend(signal: Signal) -> bool {
    // A stop would throw it away, and nobody would send another.
    if take(Signal::CONT) {
        return true;
    }
    // Who is in the namespace with PID 1 cannot stop it, itself included.
    if nix::unistd::getpid().as_raw() == 1 {
        return false;
    }
    // Others in our group had the key themselves.
    // SAFETY: our own number, and a valid signal.
    unsafe { libc::kill(libc::getpid(), signal.number()) };
    if signal != Signal::STOP {
        take_stop(signal);
    }
    take(Signal::CONT)
}

/// Lets a pending stop signal stop us.
fn take_stop(signal: Signal) {
    let mut stop = MaybeUninit::uninit();
    // SAFETY: the set is ours and initialised by sigemptyset before it is used.
    unsafe {
        libc::sigemptyset(stop.as_mut_ptr());
        libc::sigaddset(stop.as_mut_ptr(), signal.number());
        libc::sigprocmask(libc::SIG_UNBLOCK, stop.as_ptr(), std::ptr::null_mut());
        libc::sigprocmask(libc::SIG_BLOCK, stop.as_ptr(), std::ptr::null_mut());
    }
}

/// Takes a pending signal out of the queue. False when there is none.
fn take(signal: Signal) -> bool {
    let mut set = MaybeUninit::uninit();
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the set is ours and initialised by sigemptyset before it is used; what is told of the signal is not wanted.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), signal.number());
        libc::sigtimedwait(set.as_ptr(), std::ptr::null_mut(), &raw const at_once) == signal.number()
    }
}

fn foreground_group(terminal: &File) -> Option<Pid> {
    nix::unistd::tcgetpgrp(terminal).ok().map(nix::unistd::Pid::as_raw)
}

fn set_foreground_group(terminal: &File, group: Pid) {
    // It fails when the terminal hung up or the group just ended: nothing is lent then. SIGTTOU is blocked.
    let _ = nix::unistd::tcsetpgrp(terminal, nix::unistd::Pid::from_raw(group));
}

fn is_gone(group: Pid) -> bool {
    // SAFETY: signal 0 only asks.
    unsafe { libc::kill(-group, 0) != 0 && *libc::__errno_location() == libc::ESRCH }
}

fn is_pipe(fd: RawFd) -> bool {
    // SAFETY: the descriptor is borrowed for this call only; a closed one gives an error, not a pipe.
    let file = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().map(File::from);
    file.and_then(|file| file.metadata()).is_ok_and(|meta| meta.file_type().is_fifo() || meta.file_type().is_socket())
}
