//! The marks that a service's processes carry in their environment, and what tells whose they are.
//!
//! What a process was given at its last exec stays readable as long as it does not write over it (proc_pid_environ(5)), and
//! goes on to all that it makes: over a double fork, a new session, and the death of every parent.

use super::Pid;
use super::proc::{Proc, Process, Stat};
use super::reader;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The variable that names the invocation, by its UUID.
pub const INVOCATION: &str = "SUPERVISE_INVOCATION";

/// The variable that names a named run: its user's number, a slash, its name.
pub const NAME: &str = "SUPERVISE_NAME";

/// The variable that asks for its process, and all below, to be left alone.
pub const KEEP: &str = "SUPERVISE_KEEP";

/// The variable that says where a user's runtime directory is.
pub const RUNTIME: &str = "XDG_RUNTIME_DIR";

/// Where root's runtime directories are.
pub const ROOTS_BASE: &str = "/run";

/// The most of one entry that is kept, in bytes; a path is no longer.
const LONGEST: usize = 4096;

/// The most entries that are kept: each variable stands there once, unless somebody plays with us.
const MOST: usize = 16;

/// How long we wait for one process that waits in the kernel. Far more than a reading takes, and short beside the time there
/// is for all of them.
const PATIENCE: Duration = Duration::from_millis(200);

/// What one process carries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marks {
    /// Whether there was an environment to be read. A process in the middle of an exec has none for a moment.
    pub has_environment: bool,
    /// The entries of our variables, as they are: `NAME=value`.
    pub entries: Vec<String>,
    /// Its real, effective and saved user id.
    pub uids: Option<[u32; 3]>,
    /// The number of its pid namespace.
    pub pid_namespace: Option<u64>,
    /// Its root directory, as device and inode.
    pub root: Option<(u64, u64)>,
    /// The device of what is the base of its runtime directories: each mount of a tmpfs has one of its own.
    pub place: Option<u64>,
}

/// What was read of many.
#[derive(Debug, Default)]
pub struct Read {
    /// Those that are still who they were.
    pub marks: BTreeMap<Pid, Marks>,
    /// Those that kept the reader waiting.
    pub stuck: Vec<Pid>,
    /// Whether all were asked, those that were stuck included.
    pub finished: bool,
}

impl Marks {
    /// What is known of one process. May wait for it: only a reader of its own, or ourselves about ourselves, calls this.
    pub fn of(process: &Process) -> Marks {
        let environment = process.environment();
        let ours = environment.split(|byte| *byte == 0).filter(|entry| is_ours(entry)).take(MOST);
        let entries: Vec<String> =
            ours.map(|entry| String::from_utf8_lossy(&entry[..entry.len().min(LONGEST)]).into_owned()).collect();
        let marks = Marks { has_environment: !environment.is_empty(), entries, ..Marks::default() };
        if marks.values(INVOCATION).next().is_none() && marks.values(NAME).next().is_none() {
            return marks;
        }
        let uids = process.uids();
        let base = if uids == Some([0; 3]) { Some(ROOTS_BASE) } else { marks.values(RUNTIME).next() };
        let place = base.and_then(|base| process.device_of(base));
        Marks { uids, pid_namespace: process.pid_namespace(), root: process.root(), place, ..marks }
    }

    /// Whether it asks to be left alone.
    pub fn is_kept(&self) -> bool {
        self.values(KEEP).any(|value| value == "1")
    }

    /// The values of one of our variables.
    pub fn values<'a>(&'a self, variable: &'a str) -> impl Iterator<Item = &'a str> {
        self.entries.iter().filter_map(move |entry| entry.strip_prefix(variable)?.strip_prefix('='))
    }
}

fn is_ours(entry: &[u8]) -> bool {
    [INVOCATION, NAME, KEEP, RUNTIME]
        .iter()
        .any(|name| entry.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'=')))
}

/// Reads the marks of those processes that are still who they were. One that keeps the reader waiting is passed over, so
/// that it hides no other.
pub fn read(proc: &Proc, processes: &[Stat], until: Instant) -> Read {
    ask(proc, processes, until, answer)
}

fn ask(proc: &Proc, mut processes: &[Stat], until: Instant, answer: fn(&Process) -> Vec<u8>) -> Read {
    let mut read = Read { finished: true, ..Read::default() };
    while !processes.is_empty() {
        let Some(told) = reader::ask(proc, processes, until, PATIENCE, answer) else {
            read.finished = false;
            break;
        };
        let count = told.records.len();
        let decode = |answer: Vec<u8>| serde_json::from_slice(&answer).ok();
        let records = told.records.into_iter();
        read.marks.extend(records.filter_map(|(pid, answer)| Some((pid, decode(answer?)?))));
        if told.finished {
            break;
        }
        if Instant::now() >= until {
            read.finished = false;
            break;
        }
        read.stuck.extend(processes.get(count).map(|stat| stat.pid));
        processes = processes.get(count + 1..).unwrap_or_default();
    }
    read
}

fn answer(process: &Process) -> Vec<u8> {
    serde_json::to_vec(&Marks::of(process)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn sleeper(environment: &[(&str, &str)]) -> Child {
        Command::new("sleep").arg("1000").env_clear().envs(environment.iter().copied()).spawn().unwrap()
    }

    /// Once it is past its exec.
    fn stat(proc: &Proc, child: &Child) -> Stat {
        let process = proc.process(child.id().try_into().unwrap()).unwrap();
        process.stat().unwrap()
    }

    fn end(mut children: Vec<Child>) {
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn only_our_variables_are_read_and_only_from_who_is_still_the_same() {
        let proc = Proc::open().unwrap();
        let marked = sleeper(&[(INVOCATION, "id"), (NAME, "0/web"), ("SUPERVISE_NAMES", "x"), ("SECRET", "y")]);
        let other = sleeper(&[("SECRET", "y")]);
        let (marked_stat, other_stat) = (stat(&proc, &marked), stat(&proc, &other));
        let someone_else = Stat { start: other_stat.start + 1, ..other_stat.clone() };
        let until = Instant::now() + Duration::from_secs(10);

        let all = read(&proc, &[marked_stat.clone(), other_stat.clone()], until);
        let reused = read(&proc, &[someone_else], until);
        end(vec![marked, other]);

        let marks = &all.marks[&marked_stat.pid];
        assert_eq!(marks.entries, ["SUPERVISE_INVOCATION=id", "SUPERVISE_NAME=0/web"]);
        let us = Marks::of(&proc.process(nix::unistd::getpid().as_raw()).unwrap());
        let uid = nix::unistd::getuid().as_raw();
        assert_eq!((marks.uids, marks.root.is_some()), (Some([uid; 3]), true), "{us:?}");
        assert!(all.marks[&other_stat.pid].has_environment && all.marks[&other_stat.pid].entries.is_empty());
        assert!(reused.marks.is_empty() && reused.finished);
    }

    #[test]
    fn who_keeps_the_reader_waiting_hides_no_other() {
        let proc = Proc::open().unwrap();
        let children = vec![sleeper(&[(NAME, "a")]), sleeper(&[(NAME, "stuck")]), sleeper(&[(NAME, "c")])];
        let stats: Vec<Stat> = children.iter().map(|child| stat(&proc, child)).collect();

        let read = ask(&proc, &stats, Instant::now() + Duration::from_secs(10), |process| {
            while Marks::of(process).values(NAME).any(|name| name == "stuck") {
                nix::unistd::pause();
            }
            answer(process)
        });
        let in_no_time = ask(&proc, &stats, Instant::now(), answer);
        end(children);

        assert!(read.finished);
        assert_eq!(read.stuck, [stats[1].pid]);
        assert_eq!(read.marks.keys().copied().collect::<Vec<_>>(), [stats[0].pid, stats[2].pid]);
        assert!(!in_no_time.finished);
    }
}
