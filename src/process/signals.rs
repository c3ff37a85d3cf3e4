//! Signals come in through one descriptor, and nothing of ours runs in a handler.
//!
//! All signals are blocked from the first instructions on and read from a signalfd. A blocked signal is kept even for
//! PID 1, for which the kernel drops those without a handler (signal(7), pid_namespaces(7)); a real-time signal keeps its
//! place in the queue and its count, which a handler that sets a flag would lose; and we learn whether the kernel or a
//! process sent it. The service gets back exactly the mask and the dispositions that we were started with.

use super::Pid;
use crate::signal::Signal;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A set of signals as the kernel has it: one bit each, 64 of them. Not the C library's set: that one leaves out 32 and 33,
/// which it keeps for threads, and a process may send those, too.
type Mask = u64;

const ALL: Mask = Mask::MAX;

/// What we found at our start and the service is to find at its own.
#[derive(Clone, Copy, Debug)]
pub struct Inherited {
    mask: Mask,
    sigchld_ignored: bool,
}

impl Inherited {
    /// Blocks every signal and resets SIGCHLD: with SIGCHLD ignored the kernel would reap by itself, and waiting would
    /// never tell how a process ended. `former` is the mask we were started with, if all were blocked already.
    pub fn take(former: Option<u64>) -> Inherited {
        let found = set_mask(ALL);
        let mask = former.unwrap_or(found);
        // SAFETY: SIG_DFL is a valid disposition, and no handler of ours is replaced.
        let sigchld_ignored = unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_IGN;
        Inherited { mask, sigchld_ignored }
    }

    /// Puts back what was found. Async-signal-safe; for the child, last before exec.
    pub(crate) fn restore(&self) {
        if self.sigchld_ignored {
            // SAFETY: signal is async-signal-safe; exec keeps "ignored" and resets everything else by itself.
            unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        }
        set_mask(self.mask);
    }
}

/// Sets the mask of this thread and gives the former one. Async-signal-safe.
fn set_mask(mask: Mask) -> Mask {
    let mut former: Mask = 0;
    // SAFETY: both sets are ours and have the size that is told. The call has no way to fail with a valid `how`.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, &raw mut former, size_of::<Mask>());
    }
    former
}

/// A signal that came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Which.
    pub signal: Signal,
    /// Sent by the kernel (a key at the terminal, a hang-up), not by a process.
    pub by_kernel: bool,
    /// Sent past the guard, to which it would have gone had it been meant for the service.
    pub past_the_guard: bool,
}

/// The signal in which the guard passes all others on. A standard signal would be one with its like that is pending already,
/// one that came past the guard perhaps, and the sender of the first would be all that is seen.
const CARRIER: libc::c_int = 64;

/// Passes a signal on to the supervisor, and whether the kernel sent it. In the queue of signals it keeps its place and its
/// count. `supervisor` must be a child of ours that is not reaped.
pub fn queue(supervisor: Pid, received: Received) {
    let number = received.signal.number();
    let carried = usize::try_from(number).unwrap_or(0) << 1 | usize::from(received.by_kernel);
    let value = libc::sigval { sival_ptr: std::ptr::without_provenance_mut(carried) };
    // SAFETY: a number that is still our child's. When the queue is full (EAGAIN; it is one for all processes of a user), or a
    // filter refuses this call, it gets there as itself.
    unsafe {
        if libc::sigqueue(supervisor, CARRIER, value) != 0 {
            libc::kill(supervisor, number);
        }
    }
}

/// Tells a former supervisor that no more come to it. As `queue`.
pub fn queue_no_more(former: Pid) {
    let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
    // SAFETY: as in `queue`. Were it refused, the other would not wait for ever.
    unsafe { libc::sigqueue(former, CARRIER, value) };
}

/// How long a former supervisor waits for the word that no more come.
static LONGEST_WAIT: libc::timespec = libc::timespec { tv_sec: 2, tv_nsec: 0 };

/// Passes on to our successor, a child of ours, what came to us and what still comes, until the guard says that no more come.
/// False when it does not say so.
#[must_use]
pub fn pass_on_to(successor: Pid, guard: Pid) -> bool {
    let mut all = MaybeUninit::uninit();
    // SAFETY: the set is ours and initialised by sigfillset before it is used; the siginfo is written when a signal is taken.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
            let taken = libc::sigtimedwait(all.as_ptr(), info.as_mut_ptr(), &raw const LONGEST_WAIT);
            let info = info.assume_init();
            let is_passed_on = taken == CARRIER && info.si_code == libc::SI_QUEUE && info.si_pid() == guard;
            match (taken, is_passed_on.then(|| info.si_value())) {
                (-1, _) => return false,
                (_, Some(value)) if value.sival_ptr.is_null() => return true,
                (_, Some(value)) => _ = libc::sigqueue(successor, CARRIER, value),
                // Past the guard, and too early to mean anything.
                (_, None) => {}
            }
        }
    }
}

/// The descriptor that all our signals come through.
#[derive(Debug)]
pub struct SignalSource {
    descriptor: OwnedFd,
    /// The guard that passes signals on to us, by the number that it has in our pid namespace: 0 outside of it.
    guard: Option<Pid>,
}

/// How many signals one read takes. A short read says that no more wait.
const BATCH: usize = 32;

/// How often it is read before something else is done.
const MOST_READS: usize = 64;

impl SignalSource {
    /// Opens the descriptor for every signal that can be blocked.
    ///
    /// # Errors
    /// When the kernel has no descriptor to give, or no signalfd.
    pub fn open(guard: Option<Pid>) -> io::Result<SignalSource> {
        let all = ALL;
        let flags = libc::SFD_NONBLOCK | libc::SFD_CLOEXEC;
        // SAFETY: the set is ours and has the size that is told; the call gives a new descriptor or -1.
        let fd = unsafe { libc::syscall(libc::SYS_signalfd4, -1, &raw const all, size_of::<Mask>(), flags) };
        let fd = RawFd::try_from(fd).unwrap_or(-1);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and owned by nobody else.
        Ok(SignalSource { descriptor: unsafe { OwnedFd::from_raw_fd(fd) }, guard })
    }

    /// Hands the waiting signals to `take`, in the order in which the kernel gives them. True when all were taken; never more
    /// than some thousand at once, since a flood of real-time signals may come in as fast as it is read.
    #[must_use]
    pub fn drain(&self, mut take: impl FnMut(Received)) -> bool {
        let mut batch = [const { MaybeUninit::<libc::signalfd_siginfo>::uninit() }; BATCH];
        for _ in 0..MOST_READS {
            // SAFETY: the buffer is as long as said. Interrupted it cannot be: every signal is blocked.
            let size =
                unsafe { libc::read(self.descriptor.as_raw_fd(), batch.as_mut_ptr().cast(), size_of_val(&batch)) };
            let count = usize::try_from(size).unwrap_or(0) / size_of::<libc::signalfd_siginfo>();
            for info in &batch[..count] {
                // SAFETY: the kernel wrote the first `count` of them.
                let info = unsafe { info.assume_init_ref() };
                if let Some(received) = self.received(info) {
                    take(received);
                }
            }
            if count < BATCH {
                return true;
            }
        }
        false
    }
}

impl SignalSource {
    fn received(&self, info: &libc::signalfd_siginfo) -> Option<Received> {
        let sender = Pid::try_from(info.ssi_pid).ok();
        let number = i32::try_from(info.ssi_signo).ok();
        let is_carried = number == Some(CARRIER) && info.ssi_code == libc::SI_QUEUE && sender == self.guard;
        if self.guard.is_some() && is_carried {
            let signal = Signal::from_number(info.ssi_int >> 1)?;
            return Some(Received { signal, by_kernel: info.ssi_int & 1 != 0, past_the_guard: false });
        }
        let signal = number.and_then(Signal::from_number)?;
        // Sent by 0 it lost its sender, as one for which the queue had no room does. In a pid namespace of our own everybody
        // outside is 0, and our group is the caller's: what is sent to that is no word of the guard.
        let is_from_it = sender == self.guard || sender == Some(0);
        let may_be_the_guards = info.ssi_code == libc::SI_USER && is_from_it && self.guard != Some(0);
        let past_the_guard = self.guard.is_some() && !may_be_the_guards;
        Some(Received { signal, by_kernel: info.ssi_code > 0, past_the_guard })
    }
}

impl AsRawFd for SignalSource {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}
