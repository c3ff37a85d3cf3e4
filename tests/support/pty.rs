//! A terminal, and what a person does at a shell with job control.
//!
//!     let mut run = Supervise::new().at_terminal().tree(node("main")).start();
//!     run.wait_up();
//!     run.type_in("\x1a");                       // Ctrl-Z
//!     let stop = run.wait_stopped();             // the shell has taken the terminal back
//!     run.fg();
//!     run.wait_continued();
//!     run.type_in("\x03");                       // Ctrl-C
//!     let ended = run.finish();                  // ended.foreground: whose the terminal was at the end
//!
//! The shell is the warden: leader of the terminal's session, it starts the program in a foreground group of its own,
//! waits for stops as for the end, takes the terminal back at both, and passes a hang-up on to the program's group.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::running::Running;
use super::sys::{self, check};
use super::wire::{Event, Order};

/// Our side of it.
#[derive(Debug)]
pub(crate) struct Terminal {
    master: OwnedFd,
}

/// The program stopped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    pub(crate) signal: i32,
    /// The terminal's foreground group at that moment.
    pub(crate) foreground: i32,
}

impl Terminal {
    /// With the other side.
    pub(super) fn open() -> (Self, OwnedFd) {
        let (mut master, mut slave) = (-1, -1);
        let null = std::ptr::null_mut();
        // SAFETY: the numbers are ours to fill; no name, modes or size are asked for.
        check(unsafe { libc::openpty(&raw mut master, &raw mut slave, null, null.cast(), null.cast()) }).unwrap();
        for fd in [master, slave] {
            // SAFETY: no memory is involved.
            check(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) }).unwrap();
        }
        sys::nonblocking(master).unwrap();
        // SAFETY: both are new and nobody else's.
        unsafe { (Self { master: OwnedFd::from_raw_fd(master) }, OwnedFd::from_raw_fd(slave)) }
    }

    pub(super) fn reader(&self) -> OwnedFd {
        self.master.try_clone().unwrap()
    }
}

impl Running {
    fn master(&self) -> &OwnedFd {
        &self.terminal.as_ref().expect("at_terminal").master
    }

    /// `\x03` is Ctrl-C, `\x1a` Ctrl-Z, `\x1c` Ctrl-\. Sets the mark.
    pub(crate) fn type_in(&mut self, text: &str) {
        self.mark();
        File::from(self.master().try_clone().unwrap()).write_all(text.as_bytes()).unwrap();
    }

    /// Closes the terminal's window. Sets the mark.
    pub(crate) fn hang_up(&mut self) {
        self.mark();
        self.terminal = None;
        self.drop_stdout();
    }

    /// Changes the size of the window, which sends SIGWINCH to the foreground group.
    pub(crate) fn resize(&mut self, rows: u16, columns: u16) {
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the size is ours.
        check(unsafe { libc::ioctl(self.master().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }).unwrap();
    }

    /// The group the terminal belongs to now.
    pub(crate) fn foreground(&self) -> i32 {
        // SAFETY: no memory is involved.
        unsafe { libc::tcgetpgrp(self.master().as_raw_fd()) }
    }

    /// The shell itself: its pid, group and session.
    pub(crate) fn shell(&self) -> i32 {
        self.warden_pid()
    }

    pub(crate) fn wait_stopped(&mut self) -> Stop {
        self.until("the program to stop", |run| {
            run.take_event(|event| match event {
                Event::Stopped { signal, foreground } => Some(Stop { signal: *signal, foreground: *foreground }),
                _ => None,
            })
        })
    }

    /// Not told by the kernel when a stop follows at once.
    pub(crate) fn wait_continued(&mut self) {
        self.until("the program to go on", |run| {
            run.take_event(|event| matches!(event, Event::Continued).then_some(()))
        });
    }

    /// The terminal to the program, then SIGCONT to its group.
    pub(crate) fn fg(&mut self) {
        self.order(&Order::Foreground);
    }

    /// SIGCONT only.
    pub(crate) fn bg(&mut self) {
        self.order(&Order::Background);
    }

    /// The terminal to the shell while the program runs, as if it had been started with `&`.
    pub(crate) fn take_terminal(&mut self) {
        self.order(&Order::Reclaim);
        let shell = self.shell();
        let done = sys::spin(super::running::GUARD, || self.foreground() == shell);
        assert!(done, "the shell could not take the terminal");
    }
}
