//! Runs above the program under test: a subreaper of the run's own, so that nothing can fall past it.
//!
//! It reaps all the time, tells the harness what it sees, and at the end what is still alive. It never signals what is
//! not below it. When the harness is gone (its end of the socket is closed), or with its thread (PDEATHSIG), it ends
//! everything and itself.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::launch;
use crate::signals;
use crate::sys::{self, check};
use crate::wire::{Event, Launch, Left, Order, Space, Wire};

struct Warden {
    wire: Wire,
    signals: OwnedFd,
    launch: Launch,
    /// 0 when it has been reaped.
    program: i32,
    /// Who took part by `Order::Enter`.
    entered: Vec<i32>,
    /// Orphans that reached us while the program lived.
    fell: u32,
}

pub(crate) fn run() -> ! {
    let (wire, signals) = prepare().unwrap_or_else(|e| panic!("warden: {e}"));
    let mut warden = Warden { wire, signals, launch: Launch::default(), program: 0, entered: Vec::new(), fell: 0 };
    if warden.start().is_ok() {
        warden.watch();
    }
    let _ = warden.clear();
    signals::exit(0)
}

fn prepare() -> io::Result<(Wire, OwnedFd)> {
    // SAFETY: no memory but the set is involved; descriptor 0 is the socket and from here on nobody else's.
    unsafe {
        check(libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1))?;
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM))?;
        check(libc::setsid())?;
        // Whatever those who started the tests have left open.
        check(libc::close_range(3, u32::MAX, 0))?;
        let socket = check(libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 400))?;
        let null = sys::open("/dev/null", libc::O_RDWR)?;
        check(libc::dup2(null.as_raw_fd(), 0))?;
        check(libc::dup2(null.as_raw_fd(), 1))?;
        signals::ignore(libc::SIGTTOU);
        signals::block(&[libc::SIGCHLD, libc::SIGTERM, libc::SIGHUP], libc::SIG_SETMASK);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        let signals = check(libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        Ok((Wire::new(OwnedFd::from_raw_fd(socket)), OwnedFd::from_raw_fd(signals)))
    }
}

impl Warden {
    fn start(&mut self) -> io::Result<()> {
        self.launch = loop {
            if let Some(launch) = self.wire.next() {
                break launch;
            }
            if !self.wire.read(0)? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        };
        let fds: Vec<OwnedFd> = std::iter::from_fn(|| self.wire.take_fd()).collect();
        if let Some(number) = self.launch.terminal {
            let index = self.launch.fds.iter().position(|n| *n == number).unwrap();
            // Kept as our descriptor 0: a shell has its terminal open.
            // SAFETY: no memory is involved.
            unsafe {
                check(libc::dup2(fds[index].as_raw_fd(), 0))?;
                check(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
            }
        }
        let (read, write) = sys::pipe()?;
        self.program = launch::fork(&self.launch, &fds, &write);
        let pidfd = sys::pidfd_open(self.program)?;
        drop((write, fds));
        let mut text = [0; 256];
        let size = sys::read(read.as_raw_fd(), &mut text)?;
        let at = sys::now_micros();
        if size > 0 {
            let what = String::from_utf8_lossy(&text[..size]).into_owned();
            return self.wire.send(&Event::Failed { what }, &[]);
        }
        if let Some((micros, signal)) = self.launch.signal_at {
            while sys::now_micros() < at + micros {
                std::hint::spin_loop();
            }
            let _ = sys::pidfd_send(&pidfd, signal);
            self.wire.send(&Event::Signalled { at: sys::now_micros() }, &[])?;
        }
        self.wire.send(&Event::Started { pid: self.program, at }, &[pidfd.as_raw_fd()])
    }

    /// Until the harness is gone.
    fn watch(&mut self) {
        loop {
            if self.news().and_then(|()| self.orders()).is_err() {
                return;
            }
            let fds = [self.wire.fd(), self.signals.as_raw_fd()];
            let ready = sys::wait_readable(&fds, None).unwrap_or_default();
            if ready.contains(&fds[1]) && self.told_to_end() {
                return;
            }
            if ready.contains(&fds[0]) && !self.wire.read(libc::MSG_DONTWAIT).unwrap_or(false) {
                return;
            }
        }
    }

    /// Takes the signals; the hang-up of the terminal is passed on as a shell does it.
    fn told_to_end(&mut self) -> bool {
        let mut info = [0_u8; size_of::<libc::signalfd_siginfo>()];
        let mut told = false;
        while sys::read(self.signals.as_raw_fd(), &mut info).is_ok_and(|n| n > 0) {
            match i32::from_ne_bytes([info[0], info[1], info[2], info[3]]) {
                libc::SIGTERM => told = true,
                libc::SIGHUP if self.launch.terminal.is_some() => {
                    let _ = self.wire.send(&Event::HungUp, &[]);
                    self.signal_group(libc::SIGHUP);
                    self.signal_group(libc::SIGCONT);
                }
                _ => {}
            }
        }
        told
    }

    /// All deaths and stops until now.
    fn news(&mut self) -> io::Result<()> {
        let turns = libc::WSTOPPED | libc::WCONTINUED | libc::WNOHANG;
        // A program of 0 has been reaped: waitid would take it for any child of our group.
        let program = (self.program > 0).then_some(self.program);
        while let Some((_, how, signal)) = program.and_then(|pid| wait(libc::P_PID, pid, turns)) {
            let event = if how == libc::CLD_CONTINUED {
                Event::Continued
            } else {
                let foreground = self.reclaim();
                Event::Stopped { signal, foreground }
            };
            self.wire.send(&event, &[])?;
        }
        while let Some((pid, how, value)) = wait(libc::P_ALL, 0, libc::WEXITED | libc::WNOHANG | libc::__WALL) {
            if pid == self.program {
                self.program = 0;
                self.ended(how, value)?;
            } else if self.program > 0 && !self.entered.contains(&pid) {
                self.fell += 1;
            }
        }
        Ok(())
    }

    fn ended(&mut self, how: i32, value: i32) -> io::Result<()> {
        let at = sys::now_micros();
        let empty = nothing_left();
        let left = if empty { Vec::new() } else { left() };
        let foreground = self.reclaim();
        let (code, signal) = if how == libc::CLD_EXITED { (Some(value), None) } else { (None, Some(value)) };
        let fell = self.fell;
        self.wire.send(&Event::Ended { code, signal, foreground, fell, at, empty, left }, &[])
    }

    /// Takes the terminal back; whose it was.
    fn reclaim(&self) -> i32 {
        if self.launch.terminal.is_none() {
            return 0;
        }
        // SAFETY: no memory is involved.
        unsafe {
            let foreground = libc::tcgetpgrp(0);
            libc::tcsetpgrp(0, libc::getpid());
            foreground
        }
    }

    fn signal_group(&self, signal: i32) {
        if self.program > 0 {
            let _ = sys::kill(-self.program, signal);
        }
    }

    fn orders(&mut self) -> io::Result<()> {
        while let Some(order) = self.wire.next() {
            match order {
                Order::Settle(millis) => {
                    let empty = self.settle(Instant::now() + Duration::from_millis(millis))?;
                    let left = if empty { Vec::new() } else { left() };
                    self.wire.send(&Event::Settled { empty, left, at: sys::now_micros() }, &[])?;
                }
                Order::Clear => {
                    let empty = self.clear()?;
                    self.wire.send(&Event::Cleared { empty }, &[])?;
                }
                Order::Foreground => {
                    // SAFETY: no memory is involved.
                    unsafe { libc::tcsetpgrp(0, self.program) };
                    self.signal_group(libc::SIGCONT);
                }
                Order::Background => self.signal_group(libc::SIGCONT),
                Order::Reclaim => drop(self.reclaim()),
                Order::Enter { argv, env } => {
                    let pid = launch::enter(self.program, &argv, &env).unwrap_or(-1);
                    self.entered.push(pid);
                    self.wire.send(&Event::Entered { pid }, &[])?;
                }
            }
        }
        Ok(())
    }

    /// Waits until nothing is left; false when it is not so at `end`.
    fn settle(&mut self, end: Instant) -> io::Result<bool> {
        loop {
            self.news()?;
            if nothing_left() {
                return Ok(true);
            }
            if Instant::now() > end {
                return Ok(false);
            }
            if !sys::wait_readable(&[self.signals.as_raw_fd()], Some(end))?.is_empty() {
                self.told_to_end();
            }
        }
    }

    /// Ends all that is below. Our children first and again: whoever lost its parent is one.
    fn clear(&mut self) -> io::Result<bool> {
        let end = Instant::now() + Duration::from_secs(30);
        if self.launch.space != Space::Ours && self.program > 0 {
            let _ = sys::kill(self.program, libc::SIGKILL);
        }
        while !nothing_left() && Instant::now() < end {
            kill_uid(self.launch.bomb_uid);
            let children = children();
            for pid in &children {
                let _ = sys::kill(*pid, libc::SIGKILL);
            }
            while wait(libc::P_ALL, 0, libc::WEXITED | libc::WNOHANG | libc::__WALL).is_some() {}
            let soon = Instant::now() + Duration::from_millis(1);
            sys::wait_readable(&[self.signals.as_raw_fd()], Some(soon))?;
            self.told_to_end();
        }
        self.program = 0;
        Ok(nothing_left())
    }
}

/// Pid, how, value. None when there is no news.
fn wait(kind: libc::idtype_t, id: i32, how: i32) -> Option<(i32, i32, i32)> {
    // SAFETY: all zero is a valid siginfo, and after waitid its child fields are set.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let done = libc::waitid(kind, id.cast_unsigned(), &raw mut info, how);
        (done == 0 && info.si_pid() != 0).then(|| (info.si_pid(), info.si_code, info.si_status()))
    }
}

/// ECHILD: no descendant, not even a zombie.
fn nothing_left() -> bool {
    let how = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: all zero is a valid siginfo, and it is ours.
    let done = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &raw mut info, how)
    };
    done < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD)
}

fn children() -> Vec<i32> {
    let me = std::process::id();
    match std::fs::read_to_string(format!("/proc/{me}/task/{me}/children")) {
        Ok(text) => text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect(),
        Err(_) => below().iter().map(|s| s.pid).collect(),
    }
}

fn below() -> Vec<sys::Stat> {
    sys::descendants(std::process::id().cast_signed())
}

fn left() -> Vec<Left> {
    let left = |s: sys::Stat| Left {
        command: sys::command(s.pid),
        pid: s.pid,
        ppid: s.ppid,
        pgid: s.pgid,
        sid: s.sid,
        state: s.state,
        comm: s.comm,
    };
    below().into_iter().map(left).collect()
}

/// A bomb has a uid of its own: one kill reaches all of it at once.
fn kill_uid(uid: Option<u32>) {
    let Some(uid) = uid.filter(|uid| *uid > 0) else { return };
    // SAFETY: the warden has one thread; kill(-1) happens only after the uid was changed for good.
    unsafe {
        let killer = libc::fork();
        if killer == 0 {
            if libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresuid(uid, uid, uid) == 0
                && libc::getuid() == uid
                && libc::geteuid() == uid
            {
                libc::kill(-1, libc::SIGKILL);
            }
            signals::exit(0);
        }
        libc::waitpid(killer, std::ptr::null_mut(), 0);
    }
}
