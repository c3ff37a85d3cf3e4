//! What has to be read out of the memory of other processes, read by a process of our own.
//!
//! `/proc/PID/cmdline` and `environ` are read out of the memory of that process, and the kernel waits for the lock on its
//! memory map. A process that sits in the kernel with that lock held makes every reader wait with it. The supervisor waits
//! for nobody that it supervises: a forked reader does the reading, and is killed when its time is up. (That wait is
//! killable since Linux 5.8.) What it has told until then is used.

use super::Pid;
use super::proc::{Proc, Process, Stat};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a reader that was killed may take to be gone.
const TIME_TO_DIE: Duration = Duration::from_millis(200);

/// In place of a length: the process was not who it had been.
const GONE: u32 = u32::MAX;

/// What a reader told, in the order in which it was asked.
pub(super) struct Told {
    /// One for each process that it came to; nothing for one that was gone.
    pub(super) records: Vec<(Pid, Option<Vec<u8>>)>,
    /// True when it came to its end by itself.
    pub(super) finished: bool,
}

/// Has `answer` asked of those processes that are still who they were, one after another. Takes no longer than `until`, and
/// waits for one of them no longer than `patience`. Nothing when no reader could be made.
pub(super) fn ask(
    proc: &Proc,
    processes: &[Stat],
    until: Instant,
    patience: Duration,
    answer: fn(&Process) -> Vec<u8>,
) -> Option<Told> {
    if processes.is_empty() {
        return Some(Told { records: vec![], finished: true });
    }
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return None;
    }
    // SAFETY: both are new and ours.
    let (mut told, teller) = unsafe { (File::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    // SAFETY: there is one thread, so the child finds every lock free.
    match unsafe { libc::fork() } {
        -1 => None,
        0 => {
            tell(proc, processes, &mut File::from(teller), answer);
            // SAFETY: ends this process at once; nothing of the parent's is flushed twice.
            unsafe { libc::_exit(0) }
        }
        reader => {
            drop(teller);
            let mut text = Vec::new();
            let mut finished = listen(&mut told, &mut text, until, patience);
            // On a loaded machine it may not have had its turn: then nobody keeps it waiting.
            while !finished && Instant::now() < until && is_waiting_its_turn(proc, reader) {
                finished = listen(&mut told, &mut text, until, patience);
            }
            // SAFETY: our direct child, not reaped.
            unsafe { libc::kill(reader, libc::SIGKILL) };
            let mut ended = finished;
            if !ended {
                ended = listen(&mut told, &mut text, Instant::now() + TIME_TO_DIE, TIME_TO_DIE);
            }
            // One that SIGKILL does not end either is left to the ladder, which names it.
            let patience = if ended { 0 } else { libc::WNOHANG };
            // SAFETY: this takes our direct child only. It has closed its files, and is as good as gone.
            unsafe { libc::waitpid(reader, std::ptr::null_mut(), libc::__WALL | patience) };
            let records = decode(&text);
            // Whoever killed the reader, it is not at its end before it has told of everyone.
            finished &= records.len() == processes.len();
            Some(Told { records, finished })
        }
    }
}

fn is_waiting_its_turn(proc: &Proc, reader: Pid) -> bool {
    proc.process(reader).and_then(|process| process.stat()).is_ok_and(|stat| stat.state == 'R')
}

/// The reader's side. Each record: pid, length, and what was answered.
fn tell(proc: &Proc, processes: &[Stat], out: &mut File, answer: fn(&Process) -> Vec<u8>) {
    // SAFETY: a constant option. A reader without a supervisor reads for nobody.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    for known in processes {
        let process = proc.process(known.pid).ok();
        let process = process.filter(|process| process.stat().is_ok_and(|stat| stat.start == known.start));
        let text = process.map(|process| answer(&process));
        let length = text.as_ref().map_or(GONE, |text| u32::try_from(text.len()).unwrap_or(GONE));
        let text = text.filter(|_| length != GONE).unwrap_or_default();
        let record = [&known.pid.to_ne_bytes()[..], &length.to_ne_bytes(), &text].concat();
        if out.write_all(&record).is_err() {
            return;
        }
    }
}

/// Takes what is told. True when the reader has come to its end.
fn listen(told: &mut File, text: &mut Vec<u8>, until: Instant, patience: Duration) -> bool {
    let mut piece = [0; 16_384];
    loop {
        let left = until.saturating_duration_since(Instant::now()).min(patience).as_millis();
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

fn decode(mut text: &[u8]) -> Vec<(Pid, Option<Vec<u8>>)> {
    let mut records = Vec::new();
    while let Some((pid, rest)) = text.split_first_chunk() {
        let Some((length, rest)) = rest.split_first_chunk() else { break };
        let length = Some(u32::from_ne_bytes(*length)).filter(|length| *length != GONE);
        let size = length.map_or(0, |length| usize::try_from(length).unwrap_or(0));
        // The last record may be cut short.
        let Some((answer, rest)) = rest.split_at_checked(size) else { break };
        records.push((Pid::from_ne_bytes(*pid), length.map(|_| answer.to_vec())));
        text = rest;
    }
    records
}
