//! The report of a run: one line for people, and a file for programs.

mod file;
mod left;
pub mod mask;
mod record;

pub use file::Destination;
pub use left::Left;
pub use record::Record;

use crate::supervisor::Verdict;
use crate::supervisor::exit::Exit;
use left::LeftoverFields;
use serde::Serialize;
use std::time::{Duration, SystemTime};

/// The version of the form of the file. It rises when a field changes its meaning or goes away.
const SCHEMA: u32 = 1;

/// Everything that is known about a run at its end.
#[derive(Debug)]
pub struct Run {
    /// What was known of it before.
    pub record: Record,
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
    pub left: Left,
    /// Who was left of earlier invocations, before the start.
    pub swept: Left,
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
    swept: Vec<LeftoverFields>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ExitFields {
    Code { code: u8 },
    Signal { signal: String, number: i32, core_dumped: bool },
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

impl Run {
    fn result(&self) -> &'static str {
        match self.verdict.exit {
            _ if self.verdict.survivors => "survivors",
            _ if self.lost == Some(Lost::Supervisor) => "supervisor-lost",
            _ if self.lost == Some(Lost::Guard) => "guard-lost",
            _ if self.start_error.is_some() => "start-failed",
            None if self.verdict.stop.is_some() => "stopped",
            _ if self.verdict.timed_out => "timeout",
            _ if self.success => "success",
            Some(Exit::Code(_)) => "exit-code",
            Some(Exit::Signal { core_dumped: true, .. }) => "core-dump",
            Some(Exit::Signal { .. }) => "signal",
            None => "swept",
        }
    }

    /// The line about who could not be ended.
    pub fn survivors(&self) -> Option<String> {
        if !self.verdict.survivors {
            return None;
        }
        let named = [self.swept.survivors(), self.left.survivors()].concat();
        if named.is_empty() {
            return Some("something could not be ended, and without a readable /proc it has no name".to_owned());
        }
        Some(format!("could not end {}", named.join(", ")))
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        let record = &self.record;
        let file = ReportFile {
            schema: SCHEMA,
            supervise: env!("CARGO_PKG_VERSION"),
            invocation: &record.invocation,
            name: record.name.as_deref(),
            command: &record.command,
            containment: &record.containment,
            // Who could not execute the command never was the service.
            pid: record.pid.filter(|_| self.verdict.started),
            started: humantime::format_rfc3339_millis(record.began).to_string(),
            ended: humantime::format_rfc3339_millis(record.began + self.whole_time).to_string(),
            duration: self.whole_time.as_secs_f64(),
            exit: self.verdict.exit.map(ExitFields::from),
            result: self.result(),
            exit_code: self.exit_code,
            stop_signal: self.verdict.stop.map(|signal| signal.to_string()),
            start_error: self.start_error.as_deref(),
            leftovers: self.left.fields(),
            leftovers_unnamed: self.left.unnamed(),
            swept: self.swept.fields(),
        };
        // Nothing in it can fail to be JSON: no map with keys that are not strings, no float that is not finite.
        serde_json::to_string_pretty(&file).unwrap_or_default() + "\n"
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
