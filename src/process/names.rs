//! The names of processes.

use super::Pid;
use super::proc::{Proc, Process, Stat};
use super::reader;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

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
    let told = reader::ask(proc, processes, Instant::now() + limit, limit, answer);
    let records = told.map_or(vec![], |told| told.records).into_iter();
    records.filter_map(|(pid, answer)| Some((pid, decode(&answer?)?))).collect()
}

/// The reader's side: uid (or -1), then the command line.
fn answer(process: &Process) -> Vec<u8> {
    let uid = process.uid().map_or(-1, i64::from);
    let mut line = process.command_line();
    line.truncate(LONGEST);
    [&uid.to_ne_bytes()[..], &line].concat()
}

fn decode(answer: &[u8]) -> Option<Name> {
    let (uid, line) = answer.split_first_chunk()?;
    Some(Name { uid: u32::try_from(i64::from_ne_bytes(*uid)).ok(), arguments: arguments(line) })
}

/// None when the process gave its memory up already.
fn arguments(line: &[u8]) -> Vec<String> {
    let line = line.strip_suffix(&[0]).unwrap_or(line);
    if line.is_empty() {
        return vec![];
    }
    line.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}
