//! The report of a run: one line for people, and a file for programs.

mod file;
pub mod mask;
mod record;

pub use file::Destination;
pub use record::Record;

use crate::containment::leftover::{Fate, Leftover};
use crate::signal::Signal;
use crate::supervisor::Verdict;
use crate::supervisor::exit::Exit;
use serde::Serialize;
use std::time::{Duration, SystemTime};

/// The version of the form of the file. It rises when a field changes its meaning or goes away.
const SCHEMA: u32 = 1;

/// How many leftovers the line for people names.
const NAMED_IN_LINE: usize = 5;

/// Everything that is known about a run at its end.
#[derive(Debug)]
pub struct Run {
    /// The name of the run that no other has.
    pub invocation: String,
    /// What people call it.
    pub name: Option<String>,
    /// The service's command, without its secrets.
    pub command: String,
    /// What held the tree together.
    pub containment: String,
    /// The number that the main process had.
    pub pid: Option<i32>,
    /// When the run began, by the wall clock.
    pub began: SystemTime,
    /// How long it took until the main process ended.
    pub service_time: Duration,
    /// How long it took in all.
    pub whole_time: Duration,
    /// How it ended.
    pub verdict: Verdict,
    /// Which of our own processes was killed, if one was.
    pub lost: Option<Lost>,
    /// Whether that counts as success.
    pub success: bool,
    /// Why there was no service.
    pub start_error: Option<String>,
    /// Who was left.
    pub leftovers: Vec<Leftover>,
    /// How many more were left than are named.
    pub unnamed: usize,
    /// What we end with.
    pub exit_code: u8,
}

/// One of our own processes, that was killed before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The supervisor; the guard ended what it left.
    Supervisor,
    /// The guard; the supervisor ended everything.
    Guard,
}

#[derive(Serialize)]
struct ReportFile<'r> {
    schema: u32,
    supervise: &'static str,
    invocation: &'r str,
    name: Option<&'r str>,
    command: &'r str,
    containment: &'r str,
    pid: Option<i32>,
    started: String,
    ended: String,
    /// Seconds.
    duration: f64,
    exit: Option<ExitFields>,
    result: &'static str,
    exit_code: u8,
    stop_signal: Option<String>,
    start_error: Option<&'r str>,
    leftovers: Vec<LeftoverFields>,
    leftovers_unnamed: usize,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ExitFields {
    Code { code: u8 },
    Signal { signal: String, number: i32, core_dumped: bool },
}

#[derive(Serialize)]
struct LeftoverFields {
    pid: i32,
    ppid: i32,
    pgid: i32,
    sid: i32,
    uid: Option<u32>,
    command: String,
    ended: String,
    exit: Option<ExitFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<char>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wchan: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    not_permitted: bool,
}

impl From<Exit> for ExitFields {
    fn from(exit: Exit) -> ExitFields {
        match exit {
            Exit::Code(code) => ExitFields::Code { code },
            Exit::Signal { signal, core_dumped } => {
                ExitFields::Signal { signal: signal.to_string(), number: signal.number(), core_dumped }
            }
        }
    }
}

impl From<&Leftover> for LeftoverFields {
    fn from(leftover: &Leftover) -> LeftoverFields {
        let (exit, state, wchan) = match &leftover.fate {
            Fate::Ended(exit) => (exit.map(ExitFields::from), None, None),
            Fate::Survived { state, wchan } => (None, Some(*state), wchan.clone()),
            Fate::Alive => (None, None, None),
        };
        LeftoverFields {
            pid: leftover.stat.pid,
            ppid: leftover.stat.ppid,
            pgid: leftover.stat.pgid,
            sid: leftover.stat.sid,
            uid: leftover.name.uid,
            command: name(leftover),
            ended: ended(leftover),
            exit,
            state,
            wchan,
            not_permitted: leftover.denied && state.is_some(),
        }
    }
}

/// Its command line; its name in brackets, as `ps` has it, when it gave its memory up.
fn name(leftover: &Leftover) -> String {
    if leftover.name.arguments.is_empty() {
        return mask::command_line(&[format!("[{}]", leftover.stat.comm)]);
    }
    mask::command_line(&leftover.name.arguments)
}

fn ended(leftover: &Leftover) -> String {
    match leftover.fate {
        Fate::Survived { .. } => "survived".to_owned(),
        _ => leftover.ended_by().map_or_else(|| "by itself".to_owned(), |signal| signal.to_string()),
    }
}

impl Run {
    fn result(&self) -> &'static str {
        match self.verdict.exit {
            _ if self.verdict.survivors => "survivors",
            _ if self.lost == Some(Lost::Supervisor) => "supervisor-lost",
            _ if self.lost == Some(Lost::Guard) => "guard-lost",
            _ if self.start_error.is_some() => "start-failed",
            _ if self.verdict.timed_out => "timeout",
            _ if self.success => "success",
            Some(Exit::Code(_)) => "exit-code",
            Some(Exit::Signal { core_dumped: true, .. }) => "core-dump",
            Some(Exit::Signal { .. }) => "signal",
            None => "unknown",
        }
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        let file = ReportFile {
            schema: SCHEMA,
            supervise: env!("CARGO_PKG_VERSION"),
            invocation: &self.invocation,
            name: self.name.as_deref(),
            command: &self.command,
            containment: &self.containment,
            pid: self.pid,
            started: humantime::format_rfc3339_millis(self.began).to_string(),
            ended: humantime::format_rfc3339_millis(self.began + self.whole_time).to_string(),
            duration: self.whole_time.as_secs_f64(),
            exit: self.verdict.exit.map(ExitFields::from),
            result: self.result(),
            exit_code: self.exit_code,
            stop_signal: self.verdict.stop.map(|signal| signal.to_string()),
            start_error: self.start_error.as_deref(),
            leftovers: self.leftovers.iter().map(LeftoverFields::from).collect(),
            leftovers_unnamed: self.unnamed,
        };
        // Nothing in it can fail to be JSON: no map with keys that are not strings, no float that is not finite.
        serde_json::to_string_pretty(&file).unwrap_or_default() + "\n"
    }

    /// The line for people; nothing when nothing had to be ended.
    pub fn summary(&self) -> Option<String> {
        let counted = |label: &str| self.leftovers.iter().filter(|one| ended(one) == label).count();
        let (term, kill, itself) =
            (counted(&Signal::TERM.to_string()), counted(&Signal::KILL.to_string()), counted("by itself"));
        let total = term + kill + itself + self.unnamed;
        if total == 0 {
            return None;
        }
        let parts = [(term, "by SIGTERM"), (kill, "by SIGKILL"), (itself, "by itself"), (self.unnamed, "unnamed")];
        let how: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, how)| format!("{count} {how}")).collect();
        let gone = self.leftovers.iter().filter(|one| !matches!(one.fate, Fate::Survived { .. }));
        let took = self.whole_time.saturating_sub(self.service_time).as_secs_f64();
        let plural = if total == 1 { "leftover" } else { "leftovers" };
        let by_name = if self.leftovers.is_empty() { String::new() } else { format!(": {}", names(gone)) };
        Some(format!("ended {total} {plural} of the service in {took:.2} s ({}){by_name}", how.join(", ")))
    }

    /// The line about who could not be ended.
    pub fn survivors(&self) -> Option<String> {
        if !self.verdict.survivors {
            return None;
        }
        let named: Vec<String> = self
            .leftovers
            .iter()
            .filter_map(|one| match &one.fate {
                Fate::Survived { state, wchan } => {
                    let uid = one.name.uid.map_or_else(|| "?".to_owned(), |uid| uid.to_string());
                    let wchan = wchan.as_ref().map(|wchan| format!(", waiting in {wchan}")).unwrap_or_default();
                    let denied = if one.denied { ", not permitted to signal it" } else { "" };
                    Some(format!("{} (pid {}, state {state}, uid {uid}{wchan}{denied})", name(one), one.stat.pid))
                }
                _ => None,
            })
            .collect();
        if named.is_empty() {
            return Some("something could not be ended, and without a readable /proc it has no name".to_owned());
        }
        Some(format!("could not end {}", named.join(", ")))
    }
}

/// A name for this run that no other has. The kernel is asked by us: what the uuid crate asks looks for `/dev/urandom` in a
/// static build, and ends us where there is none.
pub fn invocation() -> String {
    let mut random = [0; 16];
    // SAFETY: the buffer is as long as said.
    let got = unsafe { libc::syscall(libc::SYS_getrandom, random.as_mut_ptr(), random.len(), libc::GRND_NONBLOCK) };
    if got != 16 {
        // Early after boot, or refused by a filter. No other run of this machine has both this moment and this number.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        random = (now << 64 | u128::from(std::process::id())).to_be_bytes();
    }
    uuid::Builder::from_random_bytes(random).into_uuid().to_string()
}

fn names<'l>(leftovers: impl Iterator<Item = &'l Leftover>) -> String {
    let mut named: Vec<String> = Vec::new();
    let mut more = 0_usize;
    for leftover in leftovers {
        if named.len() < NAMED_IN_LINE {
            let short: String = name(leftover).chars().take(60).collect();
            named.push(format!("{short} (pid {})", leftover.stat.pid));
        } else {
            more += 1;
        }
    }
    if more > 0 {
        named.push(format!("and {more} more"));
    }
    named.join(", ")
}
