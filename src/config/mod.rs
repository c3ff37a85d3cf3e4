//! The configuration: TOML → [`Settings`], and with the options of the command line → [`Config`]. Parse, don't validate:
//! what comes out can be acted on without another look.

mod in_force;
mod reader;
mod value;

pub use reader::Refusal;
pub use value::{SuccessStatus, duration, mapping, success_status};

use crate::process::spawn::Command;
use crate::runtime::Name;
use crate::signal::Signal;
use crate::supervisor::{Policy, Target};
use reader::{Refusals, Section};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::de::DeTable;
use tracing::Level;
use value::{
    TARGETS, boolean, choice, command, duration_value, name, path, signal, signal_map, success_statuses, time_to_die,
    variables,
};

/// A configuration is written by people; more than this is another file, or one that has no end.
const MOST_BYTES: u64 = 1 << 20;

/// How the log looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
pub enum LogFormat {
    /// Text; with levels for the journal when standard error goes there.
    #[default]
    Auto,
    /// Text for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What holds the tree together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ContainmentMode {
    /// The best that there is.
    #[default]
    Auto,
    /// Descent alone.
    Lineage,
    /// A cgroup v2 of its own, and descent.
    Cgroup,
    /// A pid namespace.
    Pidns,
}

/// What was said, in the file or on the command line; `None` and empty where nothing was.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// What people call the service.
    pub name: Option<Name>,
    /// The service's command.
    pub command: Vec<OsString>,
    /// Where it starts.
    pub working_directory: Option<PathBuf>,
    /// What its environment has on top of ours.
    pub environment: Vec<(String, String)>,
    /// What counts as success beside 0.
    pub success_exit_status: Vec<SuccessStatus>,
    /// The longest that a whole run may take.
    pub timeout: Option<Duration>,
    /// What asks it to stop.
    pub stop_signal: Option<Signal>,
    /// Who gets the stop signal.
    pub stop_target: Option<Target>,
    /// From the stop signal to SIGKILL.
    pub stop_timeout: Option<Duration>,
    /// From SIGTERM of the leftovers to their SIGKILL.
    pub leftover_timeout: Option<Duration>,
    /// From SIGKILL to the end of patience.
    pub kill_timeout: Option<Duration>,
    /// What a signal that comes in is passed on as.
    pub signal_map: BTreeMap<Signal, Signal>,
    /// What holds the tree together.
    pub containment: Option<ContainmentMode>,
    /// Whether kept processes are left alone.
    pub allow_keep: Option<bool>,
    /// Where the report goes.
    pub report: Option<PathBuf>,
    /// How the log looks.
    pub log_format: Option<LogFormat>,
    /// How much is logged.
    pub log_level: Option<Level>,
}

/// What is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What people call the service.
    pub name: Option<Name>,
    /// What to run.
    pub command: Command,
    /// What counts as success beside 0.
    pub success_exit_status: Vec<SuccessStatus>,
    /// The times and signals of the ladder.
    pub policy: Policy,
    /// What a signal that comes in is passed on as.
    pub signal_map: BTreeMap<Signal, Signal>,
    /// What holds the tree together.
    pub containment: ContainmentMode,
    /// Whether kept processes are left alone.
    pub allow_keep: bool,
    /// Where the report goes.
    pub report: Option<PathBuf>,
    /// How the log looks.
    pub log_format: LogFormat,
    /// How much is logged.
    pub log_level: Level,
}

/// The configuration cannot be used.
#[derive(Debug)]
pub enum ConfigError {
    /// The file cannot be read.
    Unreadable(PathBuf, io::Error),
    /// What is in it is refused.
    Refused(PathBuf, Vec<Refusal>),
    /// Nothing says what to run.
    NoCommand(Option<PathBuf>),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigError::Unreadable(path, error) => {
                write!(f, "cannot read the configuration {}: {}", path.display(), crate::log::reason(error))
            }
            ConfigError::Refused(path, refusals) => {
                let lines: Vec<String> = refusals.iter().map(|one| format!("{}: {one}", path.display())).collect();
                f.write_str(&lines.join("\n"))
            }
            ConfigError::NoCommand(Some(path)) => {
                let path = path.display();
                write!(
                    f,
                    "{path}: service.command is missing; write it under [service], or put -- COMMAND behind the options"
                )
            }
            ConfigError::NoCommand(None) => {
                f.write_str("nothing to run; write supervise -- COMMAND [ARG…], or supervise -c FILE")
            }
        }
    }
}

impl std::error::Error for ConfigError {}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, or anything in it is refused.
    pub fn from_file(path: &Path) -> Result<Settings, ConfigError> {
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut bytes));
        read.map_err(|error| ConfigError::Unreadable(path.to_owned(), error))?;
        if bytes.len() as u64 > MOST_BYTES {
            let error = io::Error::from_raw_os_error(libc::EFBIG);
            return Err(ConfigError::Unreadable(path.to_owned(), error));
        }
        let read = match std::str::from_utf8(&bytes) {
            Ok(text) => Settings::from_text(text),
            Err(error) => Err(vec![Refusal::not_utf8(&bytes[..error.valid_up_to()])]),
        };
        read.map_err(|refusals| ConfigError::Refused(path.to_owned(), refusals))
    }

    /// Reads a text.
    ///
    /// # Errors
    /// All that is refused.
    pub fn from_text(text: &str) -> Result<Settings, Vec<Refusal>> {
        let mut refusals = Refusals::new(text);
        let table = match DeTable::parse(text) {
            Ok(table) => table.into_inner(),
            Err(error) => {
                let why = error.message().replace('\n', ", ");
                refusals.add(error.span().unwrap_or_default(), format!("not TOML: {why}"));
                return Err(refusals.list);
            }
        };
        let settings = read_sections(Section::new(String::new(), table), &mut refusals);
        refusals.list.sort_by_key(|refusal| refusal.line);
        if refusals.list.is_empty() { Ok(settings) } else { Err(refusals.list) }
    }

    /// The same, with everything that `above` says in its place.
    #[must_use]
    pub fn overridden_by(self, above: Settings) -> Settings {
        let either = |above: Vec<SuccessStatus>, below| if above.is_empty() { below } else { above };
        let mut signal_map = self.signal_map;
        signal_map.extend(above.signal_map);
        Settings {
            name: above.name.or(self.name),
            command: if above.command.is_empty() { self.command } else { above.command },
            working_directory: above.working_directory.or(self.working_directory),
            environment: self.environment.into_iter().chain(above.environment).collect(),
            success_exit_status: either(above.success_exit_status, self.success_exit_status),
            timeout: above.timeout.or(self.timeout),
            stop_signal: above.stop_signal.or(self.stop_signal),
            stop_target: above.stop_target.or(self.stop_target),
            stop_timeout: above.stop_timeout.or(self.stop_timeout),
            leftover_timeout: above.leftover_timeout.or(self.leftover_timeout),
            kill_timeout: above.kill_timeout.or(self.kill_timeout),
            signal_map,
            containment: above.containment.or(self.containment),
            allow_keep: above.allow_keep.or(self.allow_keep),
            report: above.report.or(self.report),
            log_format: above.log_format.or(self.log_format),
            log_level: above.log_level.or(self.log_level),
        }
    }

    /// What cannot be had together, with the remedy.
    pub fn contradiction(&self) -> Option<String> {
        let spares_nobody = matches!(self.containment, Some(ContainmentMode::Cgroup | ContainmentMode::Pidns));
        (self.allow_keep == Some(true) && spares_nobody).then(|| {
            let mode = in_force::CONTAINMENTS.iter().find(|(_, mode)| Some(*mode) == self.containment);
            let mode = mode.map_or("", |(word, _)| *word);
            format!(
                "containment.allow-keep cannot be had with the containment {mode:?}, which ends all that is in it; take \
                 \"auto\" or \"lineage\", or leave allow-keep out"
            )
        })
    }

    /// What is in force: what was said, and the defaults for the rest.
    pub fn in_force(self) -> Config {
        Config {
            name: self.name,
            command: Command {
                argv: self.command,
                working_directory: self.working_directory,
                environment: self.environment,
            },
            success_exit_status: self.success_exit_status,
            policy: Policy {
                stop_signal: self.stop_signal.unwrap_or(Signal::TERM),
                stop_target: self.stop_target.unwrap_or(Target::Main),
                // Together under the ten seconds that `docker stop` gives.
                stop_timeout: self.stop_timeout.unwrap_or(Duration::from_secs(7)),
                leftover_timeout: self.leftover_timeout.unwrap_or(Duration::from_secs(2)),
                kill_timeout: self.kill_timeout.unwrap_or(Duration::from_secs(5)),
                // As timeout(1) has it: nothing is no limit.
                run_timeout: self.timeout.filter(|limit| !limit.is_zero()),
                job_control: false,
            },
            signal_map: self.signal_map,
            containment: self.containment.unwrap_or_default(),
            allow_keep: self.allow_keep.unwrap_or(false),
            report: self.report,
            log_format: self.log_format.unwrap_or_default(),
            log_level: self.log_level.unwrap_or(Level::INFO),
        }
    }
}

fn read_sections(mut root: Section<'_>, refusals: &mut Refusals<'_>) -> Settings {
    let name = root.read("name", refusals, name);
    let mut settings = Settings { name, ..Settings::default() };

    let mut service = root.section("service", refusals);
    settings.command = service.read("command", refusals, command).unwrap_or_default();
    settings.working_directory = service.read("working-directory", refusals, path);
    settings.environment = service.read("environment", refusals, variables).unwrap_or_default();
    settings.success_exit_status = service.read("success-exit-status", refusals, success_statuses).unwrap_or_default();
    settings.timeout = service.read("timeout", refusals, duration_value);
    service.finish(refusals);

    let mut stop = root.section("stop", refusals);
    settings.stop_signal = stop.read("signal", refusals, signal);
    settings.stop_target = stop.read("target", refusals, |value| choice(value, &TARGETS));
    settings.stop_timeout = stop.read("timeout", refusals, duration_value);
    settings.leftover_timeout = stop.read("leftover-timeout", refusals, duration_value);
    settings.kill_timeout = stop.read("kill-timeout", refusals, time_to_die);
    stop.finish(refusals);

    let mut signals = root.section("signals", refusals);
    settings.signal_map = signals.read("map", refusals, signal_map).unwrap_or_default();
    signals.finish(refusals);

    let mut containment = root.section("containment", refusals);
    settings.containment = containment.read("mode", refusals, |value| choice(value, &in_force::CONTAINMENTS));
    settings.allow_keep = containment.read("allow-keep", refusals, boolean);
    containment.finish(refusals);

    let mut report = root.section("report", refusals);
    settings.report = report.read("file", refusals, path);
    report.finish(refusals);

    let mut log = root.section("log", refusals);
    settings.log_format = log.read("format", refusals, |value| choice(value, &in_force::LOG_FORMATS));
    settings.log_level = log.read("level", refusals, |value| choice(value, &in_force::LOG_LEVELS));
    log.finish(refusals);

    root.finish(refusals);
    settings
}
