//! The first instructions: every signal is blocked before the C library has begun.
//!
//! The kernel drops a signal to PID 1 that is neither blocked nor handled, and between exec and `main` a program relocates
//! itself and sets the C library up, which is long enough to lose the SIGTERM of a container that is stopped as it starts.
//! `build.rs` makes the linker enter here; where it does not, `Inherited::take` is the first to block.

#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The mask that we were started with.
#[cfg(target_arch = "x86_64")]
static FORMER: AtomicU64 = AtomicU64::new(0);

/// Whether the program was entered here.
#[cfg(target_arch = "x86_64")]
static ENTERED: AtomicBool = AtomicBool::new(false);

#[cfg(target_arch = "x86_64")]
unsafe extern "C" {
    /// Where the C library's start-up code enters.
    fn _start();
}

/// What all is set to.
#[cfg(target_arch = "x86_64")]
static ALL: u64 = u64::MAX;

/// rt_sigprocmask(SIG_SETMASK, &ALL, &FORMER, 8), and on to the C library. What it finds in rsp and rdx must be what the
/// kernel, or the dynamic loader, has put there; every other register is free at this point (System V ABI, "Process
/// Initialization"). Addresses are relative to the instruction, as nothing is relocated yet.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn supervise_entry() -> ! {
    std::arch::naked_asm!(
        "mov r12, rdx",
        "mov eax, 14",
        "mov edi, 2",
        "lea rsi, [rip + {all}]",
        "lea rdx, [rip + {former}]",
        "mov r10d, 8",
        "syscall",
        "mov byte ptr [rip + {entered}], 1",
        "mov rdx, r12",
        "jmp {start}",
        all = sym ALL,
        former = sym FORMER,
        entered = sym ENTERED,
        start = sym _start,
    )
}

/// The mask that we were started with, if it was taken here.
pub(crate) fn former_mask() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    return ENTERED.load(Ordering::Relaxed).then(|| FORMER.load(Ordering::Relaxed));
    #[cfg(not(target_arch = "x86_64"))]
    None
}
