//! The one clock, which every process of a measure shares, so that one may say when something happened in another.

use std::mem::MaybeUninit;
use std::time::Duration;

/// Nanoseconds of CLOCK_MONOTONIC.
pub(crate) fn now() -> u64 {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the pointer is valid for the write; with a known clock the call can't fail, and so fills it.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, time.as_mut_ptr());
        time.assume_init()
    };
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// The time from `then` until `now`, none if the two came in another order.
pub(crate) fn seconds(then: u64, now: u64) -> f64 {
    Duration::from_nanos(now.saturating_sub(then)).as_secs_f64()
}

/// Burns CPU until `then`: a sleep would come back 50 µs late, and by another amount each time.
pub(crate) fn spin_until(then: u64) {
    while now() < then {
        std::hint::spin_loop();
    }
}
