//! Which descriptors are whose: the service gets those that we were started with, all of them and unchanged; ours are
//! close-on-exec and never stand on 0, 1 or 2.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

/// Fills closed standard descriptors with a place holder that reads and writes nothing and does not survive exec, so
/// that nothing of ours is opened there and written to by mistake. The service finds them closed, as we did.
pub fn occupy_closed_standard_descriptors() {
    for fd in 0..=2 {
        // SAFETY: F_GETFD only asks.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0 {
            continue;
        }
        // SAFETY: a constant path; the lowest free number is `fd`, since those below are open.
        let opened = unsafe { libc::open(c"/".as_ptr(), libc::O_PATH | libc::O_CLOEXEC) };
        if opened > 2 {
            // SAFETY: just opened and not handed on.
            drop(unsafe { OwnedFd::from_raw_fd(opened) });
        }
    }
}

/// Lets go of all that the service now holds: standard input and output, every descriptor that is not in `ours`, and the
/// working directory. A reader of a pipe gets its end of file when the service closes it, and what the caller stood in
/// can be unmounted. Standard error stays: it is where the log goes.
pub fn release(ours: &[RawFd]) {
    if let Ok(null) = fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        for standard in 0..=1 {
            // SAFETY: dup3 closes what is there and puts the same open file in its place; CLOEXEC as all of ours.
            unsafe { libc::dup3(null.as_raw_fd(), standard, libc::O_CLOEXEC) };
        }
    } else {
        // Without a /dev/null (an empty image) a descriptor that reads and writes nothing serves as well.
        for standard in 0..=1 {
            // SAFETY: both belong to nobody in this process any more: nothing of ours reads or prints from here on.
            unsafe { libc::close(standard) };
        }
        occupy_closed_standard_descriptors();
    }
    open_terminal_of_our_own();
    let mut keep: Vec<RawFd> = ours.iter().copied().filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep {
        close_between(first, fd - 1);
        first = fd + 1;
    }
    close_between(first, RawFd::MAX);
    // `/` always exists; if it cannot be entered we stay where we are, which harms nothing but an unmount.
    let _ = std::env::set_current_dir("/");
}

/// A terminal says that it can be written to when it has room for one character, and a longer write waits for whoever reads
/// it. Opened once more it has flags of its own, not the service's, and does not wait. Where that is refused (a terminal of
/// another user, no /proc) it stays as it is.
fn open_terminal_of_our_own() {
    // SAFETY: isatty only asks.
    if unsafe { libc::isatty(libc::STDERR_FILENO) } != 1 {
        return;
    }
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    if let Ok(terminal) = fs::OpenOptions::new().write(true).custom_flags(flags).open("/proc/self/fd/2") {
        // SAFETY: as above; the service keeps the one that it got.
        unsafe { libc::dup3(terminal.as_raw_fd(), libc::STDERR_FILENO, libc::O_CLOEXEC) };
    }
}

/// Lets us open as many files as we may: the service has its own limit by now, and cleaning up takes a few at a time.
pub fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is ours; raising the soft one to the hard one is always allowed.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 && limit.rlim_cur < limit.rlim_max.min(ENOUGH) {
            limit.rlim_cur = limit.rlim_max.min(ENOUGH);
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// More than a walk holds open.
const ENOUGH: libc::rlim_t = 1024;

/// Closes the descriptors `first` to `last`, both included.
fn close_between(first: RawFd, last: RawFd) {
    let (Ok(from), Ok(to)) = (u32::try_from(first), u32::try_from(last)) else { return };
    if from > to {
        return;
    }
    // SAFETY: no descriptor in the range has an owner in this program (see the caller).
    if unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) } == 0 {
        return;
    }
    // Before Linux 5.9, or refused: close what /proc names, or failing that what the limit allows.
    for fd in open_descriptors() {
        if (first..=last).contains(&fd) {
            // SAFETY: as above. The descriptor that listed them may be among them: it is closed by now (EBADF).
            unsafe { libc::close(fd) };
        }
    }
}

/// Whether many can be closed by one call (close_range(2)).
///
/// # Errors
/// ENOSYS before Linux 5.9; EPERM, or another, when a filter refuses it.
pub fn can_close_ranges() -> io::Result<()> {
    // SAFETY: no descriptor has such a number.
    match unsafe { libc::syscall(libc::SYS_close_range, u32::MAX, u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn open_descriptors() -> Vec<RawFd> {
    let listed = fs::read_dir("/proc/self/fd").map(|entries| {
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect::<Vec<RawFd>>()
    });
    listed.unwrap_or_else(|_| {
        // SAFETY: sysconf only asks.
        let limit = unsafe { libc::sysconf(libc::_SC_OPEN_MAX) };
        (3..RawFd::try_from(limit).unwrap_or(RawFd::MAX).clamp(3, 65_536)).collect()
    })
}
