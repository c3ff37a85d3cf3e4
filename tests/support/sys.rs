//! The few raw calls both the harness and the node program need.
#![allow(dead_code, reason = "each of the two uses its half")]

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// -1 is an error, all else the value.
pub(crate) fn check(value: i32) -> io::Result<i32> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// CLOCK_MONOTONIC, the same for all processes.
pub(crate) fn now_micros() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours to fill.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec * 1_000_000 + time.tv_nsec / 1_000).cast_unsigned()
}

/// Read end, write end.
pub(crate) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for the two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: both are new and nobody else's.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

pub(crate) fn open(path: &str, flags: i32) -> io::Result<OwnedFd> {
    let path = CString::new(path)?;
    // SAFETY: a valid C string; the result is checked before it is owned.
    let fd = check(unsafe { libc::open(path.as_ptr(), flags, 0o666) })?;
    // SAFETY: new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sets O_NONBLOCK. Only for descriptions that are the test's alone.
pub(crate) fn nonblocking(fd: RawFd) -> io::Result<()> {
    // SAFETY: no memory is involved.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: no memory is involved.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

/// Bytes read; 0 at the end.
pub(crate) fn read(fd: RawFd, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is as long as said.
    let got = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Waits until one of `fds` is readable or at its end. Which ones are; none when the time is over.
pub(crate) fn wait_readable(fds: &[RawFd], until: Option<Instant>) -> io::Result<Vec<RawFd>> {
    let mut polled: Vec<libc::pollfd> =
        fds.iter().map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 }).collect();
    let millis = match until {
        Some(end) => {
            let rest = end.saturating_duration_since(Instant::now());
            i32::try_from(rest.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        }
        None => -1,
    };
    // SAFETY: the array is as long as said.
    let ready = unsafe { libc::poll(polled.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::EINTR) { Ok(Vec::new()) } else { Err(error) };
    }
    Ok(polled.iter().filter(|p| p.revents != 0).map(|p| p.fd).collect())
}

pub(crate) fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = check(i32::try_from(fd).map_err(io::Error::other)?)?;
    // SAFETY: new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(crate) fn pidfd_send(pidfd: &OwnedFd, signal: i32) -> io::Result<()> {
    // SAFETY: no siginfo is passed.
    let done = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, 0, 0) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    assert!(!(-1..=1).contains(&pid), "no test signals {pid}");
    // SAFETY: no memory is involved.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Calls `done` until it is true; for states the kernel tells of by no event (a stop not by our child). False when it
/// was not in `limit`.
pub(crate) fn spin(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !done() {
        if Instant::now() > end {
            return false;
        }
        // SAFETY: no memory is involved.
        unsafe { libc::sched_yield() };
    }
    true
}

/// A line of /proc/PID/stat.
#[derive(Clone, Debug)]
pub(crate) struct Stat {
    pub(crate) pid: i32,
    pub(crate) comm: String,
    pub(crate) state: char,
    pub(crate) ppid: i32,
    pub(crate) pgid: i32,
    pub(crate) sid: i32,
}

pub(crate) fn stat(pid: i32) -> Option<Stat> {
    let bytes = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let open = bytes.iter().position(|b| *b == b'(')?;
    let close = bytes.iter().rposition(|b| *b == b')')?;
    let comm = String::from_utf8_lossy(bytes.get(open + 1..close)?).into_owned();
    let rest = String::from_utf8_lossy(bytes.get(close + 1..)?).into_owned();
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let mut number = || fields.next()?.parse::<i32>().ok();
    Some(Stat { pid, comm, state, ppid: number()?, pgid: number()?, sid: number()? })
}

/// All processes of this pid namespace.
pub(crate) fn processes() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// The children of a process now, by its list of them: quick, for races.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Whether this is the process between a guard and a service, by name, command line and group.
pub(crate) fn is_supervisor(pid: i32) -> bool {
    stat(pid).is_some_and(|stat| stat.comm == "supervisor" && stat.pgid == pid) && command(pid) == "supervisor"
}

/// All that descend from `pid` now.
pub(crate) fn descendants(pid: i32) -> Vec<Stat> {
    let mut all: Vec<Stat> = processes().into_iter().filter_map(stat).collect();
    let mut found = Vec::new();
    let mut parents = std::collections::HashSet::from([pid]);
    loop {
        let (below, rest): (Vec<Stat>, Vec<Stat>) = all.into_iter().partition(|s| parents.contains(&s.ppid));
        if below.is_empty() {
            return found;
        }
        parents.extend(below.iter().map(|s| s.pid));
        found.extend(below);
        all = rest;
    }
}

/// The command line with spaces; for people.
pub(crate) fn command(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    text.trim_end().to_owned()
}
