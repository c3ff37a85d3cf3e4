//! The signals of a node: what it ignores and blocks, and what it does when it catches one.
//!
//! All that a handler does is done in the handler, with nothing but system calls, so that it works at any moment and
//! leaves no window between the signal and its effect.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering::SeqCst};

use crate::spec::{Act, Born};

struct Slot {
    kind: AtomicI32,
    code: AtomicI32,
    ignored: AtomicU64,
    setsid: AtomicBool,
}

static SLOTS: [Slot; 65] = [const {
    Slot {
        kind: AtomicI32::new(0),
        code: AtomicI32::new(0),
        ignored: AtomicU64::new(0),
        setsid: AtomicBool::new(false),
    }
}; 65];
static TELL: AtomicI32 = AtomicI32::new(-1);
static NAME: AtomicPtr<String> = AtomicPtr::new(std::ptr::null_mut());

/// A line of at most PIPE_BUF bytes, written at once; no allocation.
pub(crate) struct Line {
    bytes: [u8; 1024],
    len: usize,
}

impl Line {
    pub(crate) fn new() -> Self {
        Self { bytes: [0; 1024], len: 0 }
    }

    pub(crate) fn write_to(&self, fd: i32) {
        // SAFETY: the buffer is as long as said.
        unsafe { libc::write(fd, self.bytes.as_ptr().cast(), self.len) };
    }
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let rest = self.bytes.get_mut(self.len..self.len + text.len()).ok_or(std::fmt::Error)?;
        rest.copy_from_slice(text.as_bytes());
        self.len += text.len();
        Ok(())
    }
}

/// Who tells, and where.
pub(crate) fn set_teller(tell: i32, name: &str) {
    TELL.store(tell, SeqCst);
    NAME.store(Box::into_raw(Box::new(name.to_owned())), SeqCst);
}

fn name() -> &'static str {
    // SAFETY: null or a leaked string.
    unsafe { NAME.load(SeqCst).as_ref() }.map_or("", String::as_str)
}

pub(crate) fn ignore(signal: i32) {
    set(signal, libc::SIG_IGN, false);
}

pub(crate) fn default(signal: i32) {
    set(signal, libc::SIG_DFL, false);
}

/// Back to the default for all 64; the two libc keeps for itself can be inherited as ignored like any other.
pub(crate) fn all_default() {
    // handler, flags, restorer, mask
    let kernel_action = [0_u64; 4];
    for signal in 1..=64 {
        // SAFETY: the action is long enough, and the default needs no more.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, kernel_action.as_ptr(), 0, 8) };
    }
}

fn set(signal: i32, handler: usize, alone: bool) {
    // SAFETY: all zero is a valid sigaction; the handler is SIG_DFL, SIG_IGN or our async-signal-safe function.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        if alone {
            libc::sigfillset(&raw mut action.sa_mask);
        }
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut());
    }
}

pub(crate) fn block(signals: &[i32], how: i32) {
    // SAFETY: the set is ours.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in signals {
            libc::sigaddset(&raw mut set, *signal);
        }
        libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut());
    }
}

pub(crate) fn on(signal: i32, act: Act) {
    let slot = &SLOTS[usize::try_from(signal).unwrap()];
    let (kind, code, born) = match act {
        Act::Report => (1, 0, Born::default()),
        Act::Exit(code) => (2, code, Born::default()),
        Act::Newborn(born) => (3, 0, born),
        Act::NewbornThenExit(born, code) => (4, code, born),
        Act::DrainThenExit(code) => (5, code, Born::default()),
    };
    slot.code.store(code, SeqCst);
    slot.ignored.store(born.ignored, SeqCst);
    slot.setsid.store(born.setsid, SeqCst);
    slot.kind.store(kind, SeqCst);
    // Handlers that interrupt each other would tell of the last signal first; those that wait must not hold others up.
    set(signal, handle as extern "C" fn(i32) as usize, matches!(act, Act::Report));
}

extern "C" fn handle(signal: i32) {
    // SAFETY: errno of this thread.
    let errno = unsafe { *libc::__errno_location() };
    let tell = TELL.load(SeqCst);
    let mut line = Line::new();
    let _ = writeln!(line, "got {} {signal}", name());
    line.write_to(tell);
    let slot = &SLOTS[usize::try_from(signal).unwrap_or(0)];
    let code = slot.code.load(SeqCst);
    match slot.kind.load(SeqCst) {
        2 => exit(code),
        3 => newborn(slot, tell),
        4 => {
            newborn(slot, tell);
            exit(code);
        }
        5 => {
            // SAFETY: no status is asked for.
            while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) } > 0 {}
            exit(code);
        }
        _ => {}
    }
    // SAFETY: errno of this thread.
    unsafe { *libc::__errno_location() = errno };
}

pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(code) }
}

fn newborn(slot: &Slot, tell: i32) {
    // SAFETY: the newborn makes nothing but system calls.
    if unsafe { libc::fork() } != 0 {
        return;
    }
    let ignored = slot.ignored.load(SeqCst);
    for signal in 1..=64 {
        if ignored & (1 << (signal - 1)) != 0 {
            ignore(signal);
        } else if SLOTS[usize::try_from(signal).unwrap_or(0)].kind.load(SeqCst) != 0 {
            default(signal);
        }
    }
    // SAFETY: no memory but the line is involved.
    unsafe {
        if slot.setsid.load(SeqCst) {
            libc::setsid();
        }
        libc::prctl(libc::PR_SET_NAME, c"newborn".as_ptr());
        let mut line = Line::new();
        let (pid, ppid, pgid, sid) = (libc::getpid(), libc::getppid(), libc::getpgid(0), libc::getsid(0));
        let _ = writeln!(line, "born {} {pid} {ppid} {pgid} {sid}", name());
        line.write_to(tell);
        block(&[], libc::SIG_SETMASK);
        loop {
            libc::pause();
        }
    }
}
