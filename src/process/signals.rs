//! Signals come in through one descriptor, and nothing of ours runs in a handler.
//!
//! All signals are blocked from the first instructions on and read from a signalfd. A blocked signal is kept even for
//! PID 1, for which the kernel drops those without a handler (signal(7), pid_namespaces(7)); a real-time signal keeps its
//! place in the queue and its count, which a handler that sets a flag would lose; and we learn whether the kernel or a
//! process sent it. The service gets back exactly the mask and the dispositions that we were started with.

use crate::signal::Signal;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// What we found at our start and the service is to find at its own.
#[derive(Clone, Copy)]
pub struct Inherited {
    mask: libc::sigset_t,
    sigchld: libc::sighandler_t,
}

impl std::fmt::Debug for Inherited {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inherited").field("sigchld_ignored", &(self.sigchld == libc::SIG_IGN)).finish_non_exhaustive()
    }
}

impl Inherited {
    /// Blocks every signal and resets SIGCHLD: with SIGCHLD ignored the kernel would reap by itself, and waiting would
    /// never tell how a process ended.
    pub fn take() -> Inherited {
        let mut all = MaybeUninit::uninit();
        let mut mask = MaybeUninit::uninit();
        // SAFETY: both sets are ours; sigfillset writes the first, sigprocmask the second (with a valid `how` it
        // cannot fail). No other thread exists.
        let mask = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::sigemptyset(mask.as_mut_ptr());
            libc::sigprocmask(libc::SIG_SETMASK, all.as_ptr(), mask.as_mut_ptr());
            mask.assume_init()
        };
        // SAFETY: SIG_DFL is a valid disposition, and no handler of ours is replaced.
        let sigchld = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
        Inherited { mask, sigchld }
    }

    /// Puts back what was found. Async-signal-safe; for the child, last before exec.
    pub(crate) fn restore(&self) {
        // SAFETY: signal and sigprocmask are async-signal-safe; exec resets all but "ignored", so a handler that we
        // could have inherited does not exist.
        unsafe {
            if self.sigchld == libc::SIG_IGN {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &raw const self.mask, std::ptr::null_mut());
        }
    }
}

/// A signal that came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Which.
    pub signal: Signal,
    /// Sent by the kernel (a key at the terminal, a hang-up), not by a process.
    pub by_kernel: bool,
}

/// The descriptor that all our signals come through.
#[derive(Debug)]
pub struct SignalSource(OwnedFd);

/// How many signals one read takes. A short read says that no more wait.
const BATCH: usize = 32;

impl SignalSource {
    /// Opens the descriptor for every signal that can be blocked.
    ///
    /// # Errors
    /// When the kernel has no descriptor to give, or no signalfd.
    pub fn open() -> io::Result<SignalSource> {
        let mut all = MaybeUninit::uninit();
        // SAFETY: sigfillset initialises the set; signalfd reads it and gives a new descriptor or -1.
        let fd = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::signalfd(-1, all.as_ptr(), libc::SFD_NONBLOCK | libc::SFD_CLOEXEC)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and owned by nobody else.
        Ok(SignalSource(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Hands every waiting signal to `take`, in the order in which the kernel gives them.
    pub fn drain(&self, mut take: impl FnMut(Received)) {
        let mut batch = [const { MaybeUninit::<libc::signalfd_siginfo>::uninit() }; BATCH];
        loop {
            // SAFETY: the buffer is as long as said. Interrupted it cannot be: every signal is blocked.
            let size = unsafe { libc::read(self.0.as_raw_fd(), batch.as_mut_ptr().cast(), size_of_val(&batch)) };
            let count = usize::try_from(size).unwrap_or(0) / size_of::<libc::signalfd_siginfo>();
            for info in &batch[..count] {
                // SAFETY: the kernel wrote the first `count` of them.
                let info = unsafe { info.assume_init_ref() };
                let number = i32::try_from(info.ssi_signo).ok().and_then(Signal::from_number);
                if let Some(signal) = number {
                    take(Received { signal, by_kernel: info.ssi_code > 0 });
                }
            }
            if count < BATCH {
                return;
            }
        }
    }
}

impl AsRawFd for SignalSource {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
