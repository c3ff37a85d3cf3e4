//! The names of processes, read by a process of our own.
//!
//! `/proc/PID/cmdline` is read out of the memory of that process, and the kernel waits for the lock on its memory map. A
//! process that sits in the kernel with that lock held makes every reader wait with it. The supervisor waits for nobody that
//! it supervises: a forked reader does the reading, and is killed when its time is up. (That wait is killable since
//! Linux 5.8.) What it has told until then is used.

use super::Pid;
use super::proc::{Proc, Stat};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a reader that was killed may take to be gone.
const TIME_TO_DIE: Duration = Duration::from_millis(200);

/// The most of a command line that is kept, in bytes.
const LONGEST: usize = 4096;

/// Who a process is beyond its `stat`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Name {
    /// Its real user id, if it was to be seen.
    pub uid: Option<u32>,
    /// Its arguments as they are, passwords and all; to be masked before anybody sees them.
    pub arguments: Vec<String>,
}

/// Reads the names of those processes that are still who they were. Takes no longer than `limit`; whoever is not in the
/// answer could not be read in that time, or not at all.
pub fn read(proc: &Proc, processes: &[Stat], limit: Duration) -> BTreeMap<Pid, Name> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    if processes.is_empty() || unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return BTreeMap::new();
    }
    // SAFETY: both are new and ours.
    let (mut told, teller) = unsafe { (File::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    // SAFETY: there is one thread, so the child finds every lock free.
    match unsafe { libc::fork() } {
        -1 => BTreeMap::new(),
        0 => {
            tell(proc, processes, &mut File::from(teller));
            // SAFETY: ends this process at once; nothing of the parent's is flushed twice.
            unsafe { libc::_exit(0) }
        }
        reader => {
            drop(teller);
            let mut text = Vec::new();
            let mut ended = listen(&mut told, &mut text, limit);
            // SAFETY: our direct child, not reaped.
            unsafe { libc::kill(reader, libc::SIGKILL) };
            if !ended {
                ended = listen(&mut told, &mut text, TIME_TO_DIE);
            }
            // One that SIGKILL does not end either is left to the ladder, which names it.
            let patience = if ended { 0 } else { libc::WNOHANG };
            // SAFETY: this takes our direct child only. It has closed its files, and is as good as gone.
            unsafe { libc::waitpid(reader, std::ptr::null_mut(), libc::__WALL | patience) };
            decode(&text)
        }
    }
}

/// The reader's side. Each record: pid, uid (or -1), length, and the command line.
fn tell(proc: &Proc, processes: &[Stat], out: &mut File) {
    // SAFETY: a constant option. A reader without a supervisor reads for nobody.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    for known in processes {
        let Ok(process) = proc.process(known.pid) else { continue };
        if process.stat().map(|stat| stat.start).ok() != Some(known.start) {
            continue;
        }
        let uid = process.uid().map_or(-1, i64::from);
        let mut text = process.command_line();
        text.truncate(LONGEST);
        let length = u32::try_from(text.len()).unwrap_or(0);
        let record = [&known.pid.to_ne_bytes()[..], &uid.to_ne_bytes(), &length.to_ne_bytes(), &text].concat();
        if out.write_all(&record).is_err() {
            return;
        }
    }
}

/// Takes what is told. True when the reader has come to its end.
fn listen(told: &mut File, text: &mut Vec<u8>, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    let mut piece = [0; 16_384];
    loop {
        let left = until.saturating_duration_since(Instant::now()).as_millis();
        let mut poll = libc::pollfd { fd: told.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        if unsafe { libc::poll(&raw mut poll, 1, i32::try_from(left).unwrap_or(i32::MAX)) } != 1 {
            return false;
        }
        match told.read(&mut piece) {
            Ok(length) if length > 0 => text.extend_from_slice(&piece[..length]),
            _ => return true,
        }
    }
}

fn decode(mut text: &[u8]) -> BTreeMap<Pid, Name> {
    let mut names = BTreeMap::new();
    while let Some((pid, rest)) = text.split_first_chunk() {
        let Some((uid, rest)) = rest.split_first_chunk() else { break };
        let Some((length, rest)) = rest.split_first_chunk() else { break };
        let length = usize::try_from(u32::from_ne_bytes(*length)).unwrap_or(0);
        // The last record may be cut short.
        let Some((line, rest)) = rest.split_at_checked(length) else { break };
        let name = Name { uid: u32::try_from(i64::from_ne_bytes(*uid)).ok(), arguments: arguments(line) };
        names.insert(Pid::from_ne_bytes(*pid), name);
        text = rest;
    }
    names
}

/// None when the process gave its memory up already.
fn arguments(line: &[u8]) -> Vec<String> {
    let line = line.strip_suffix(&[0]).unwrap_or(line);
    if line.is_empty() {
        return vec![];
    }
    line.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}
