//! Processes that come and go: fork-and-exit chains, the wide fork bomb, short-lived orphans.

use crate::place::patiently;
use crate::signals::{all_default, block, exit};
use crate::spec::Burst;

/// Starts it and comes back; only churn is done when this returns.
pub(crate) fn burst(burst: Burst) {
    match burst {
        Burst::Chains { count, sessions } => {
            for _ in 0..count {
                if fork() == 0 {
                    plain();
                    chain(sessions);
                }
            }
        }
        Burst::Wide { uid, cap } => {
            if fork() == 0 {
                plain();
                wide(uid, cap);
            }
        }
        Burst::Churn { total, batch } => {
            let mut made = 0;
            while made < total {
                let now = batch.clamp(1, total - made);
                churn(now);
                made += now;
            }
        }
    }
}

fn fork() -> i32 {
    // SAFETY: this process has one thread, the child may do anything.
    unsafe { libc::fork() }
}

fn plain() {
    all_default();
    block(&[], libc::SIG_SETMASK);
}

fn chain(sessions: bool) -> ! {
    loop {
        match fork() {
            0 if sessions => new_session(),
            0 => {}
            // No room for a moment: the chain must not end by itself.
            ..0 => {
                // SAFETY: no memory is involved.
                unsafe { libc::sched_yield() };
            }
            1.. => exit(0),
        }
    }
}

fn new_session() {
    // SAFETY: no memory is involved.
    unsafe { libc::setsid() };
}

fn wide(uid: u32, cap: u64) -> ! {
    assert!(uid > 0 && cap > 0 && cap < 10_000, "a bomb has a uid of its own and a cap");
    let limit = libc::rlimit { rlim_cur: cap, rlim_max: cap };
    // SAFETY: the limit is ours.
    unsafe {
        let done = libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) == 0
            && libc::setgroups(0, std::ptr::null()) == 0
            && libc::setgid(uid) == 0
            && libc::setuid(uid) == 0;
        if !done || libc::getuid() == 0 || libc::geteuid() == 0 {
            exit(99);
        }
    }
    loop {
        match fork() {
            0 => new_session(),
            ..0 => {
                // SAFETY: no memory is involved.
                unsafe { libc::sched_yield() };
            }
            1.. => {}
        }
    }
}

fn churn(count: u32) {
    let between = patiently(fork);
    if between == 0 {
        for _ in 0..count {
            if patiently(fork) == 0 {
                exit(0);
            }
        }
        exit(0);
    }
    // SAFETY: no status is asked for.
    unsafe { libc::waitpid(between, std::ptr::null_mut(), 0) };
}
