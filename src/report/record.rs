//! What the guard is told of a run while it goes on, so that there is a report also when the supervisor is lost.

use super::{Destination, Left, Lost, Run, mask};
use crate::cli;
use crate::config::LogFormat;
use crate::containment::leftover::{Fate, Leftovers};
use crate::signal::Signal;
use crate::supervisor::Verdict;
use crate::supervisor::exit::Exit;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};
use tracing::Level;

/// The most of a command line that is kept, in characters: a record has to fit into one message.
const LONGEST_COMMAND: usize = 2048;

/// A run that is not over.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The name of the run that no other has.
    pub invocation: String,
    /// What people call it.
    pub name: Option<String>,
    /// The service's command, without its secrets.
    pub command: String,
    /// What holds the tree together.
    pub containment: String,
    /// The number of the main process.
    pub pid: Option<i32>,
    /// When the run began, by the wall clock.
    pub began: SystemTime,
    /// Where the report goes; a descriptor goes with the first record, if it is one.
    pub report: Option<PathBuf>,
    /// How the log looks.
    pub log_format: LogFormat,
    /// How much is logged.
    pub log_level: String,
    exit: Option<RecordedExit>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum RecordedExit {
    Code(u8),
    Signal { number: i32, core_dumped: bool },
}

impl Record {
    /// What is known before the start.
    pub fn new(invocation: String, command: &[String], log_format: LogFormat, log_level: Level) -> Record {
        let command: String = mask::command_line(command).chars().take(LONGEST_COMMAND).collect();
        Record {
            invocation,
            name: None,
            command,
            containment: String::new(),
            pid: None,
            began: SystemTime::now(),
            report: None,
            log_format,
            log_level: log_level.to_string(),
            exit: None,
        }
    }

    /// Notes how the main process ended.
    pub fn ended(&mut self, exit: Exit) {
        self.exit = Some(match exit {
            Exit::Code(code) => RecordedExit::Code(code),
            Exit::Signal { signal, core_dumped } => RecordedExit::Signal { number: signal.number(), core_dumped },
        });
    }

    fn exit(&self) -> Option<Exit> {
        match self.exit? {
            RecordedExit::Code(code) => Some(Exit::Code(code)),
            RecordedExit::Signal { number, core_dumped } => {
                Signal::from_number(number).map(|signal| Exit::Signal { signal, core_dumped })
            }
        }
    }

    /// As the guard gets it.
    pub fn to_text(&self) -> Vec<u8> {
        // Nothing in it can fail to be JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// What the guard got; nothing when the supervisor was lost before it had told anything.
    pub fn from_text(text: &[u8]) -> Option<Record> {
        serde_json::from_slice(text).ok()
    }

    /// The level of the log, as it was set.
    pub fn log_level(&self) -> Level {
        self.log_level.parse().unwrap_or(Level::INFO)
    }

    /// Where the report goes.
    pub fn destination(&self, descriptor: Option<OwnedFd>) -> Option<Destination> {
        Some(Destination::known(self.report.clone()?, descriptor))
    }

    /// The run as it ended when the supervisor was lost. The main process may be among those that were left.
    pub fn lost(self, leftovers: Leftovers, survivors: bool) -> Run {
        let whole_time = self.began.elapsed().unwrap_or(Duration::ZERO);
        let mut left = Left::new(leftovers, Duration::ZERO);
        let mut exit = self.exit();
        if exit.is_none()
            && let Some(Fate::Ended(how)) = self.pid.and_then(|pid| left.take(pid))
        {
            exit = how;
        }
        let verdict = Verdict { exit, started: self.pid.is_some(), survivors, ..Verdict::default() };
        let exit_code = if survivors { cli::SURVIVORS } else { cli::UNABLE };
        Run { lost: Some(Lost::Supervisor), left, exit_code, ..self.run(verdict, whole_time) }
    }

    /// A run in which nobody was left.
    pub fn run(self, verdict: Verdict, whole_time: Duration) -> Run {
        Run {
            record: self,
            verdict,
            whole_time,
            lost: None,
            success: false,
            start_error: None,
            left: Left::default(),
            swept: Left::default(),
            exit_code: cli::SUCCESS,
        }
    }
}
