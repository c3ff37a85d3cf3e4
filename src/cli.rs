//! The command line: argv → what was asked; how a run ended → exit code. The only place that knows `128+n`.

use crate::config::{
    ConfigError, ContainmentMode, LogFormat, Settings, SuccessStatus, duration, mapping, success_status,
};
use crate::process::spawn::StartErrorKind;
use crate::report::mask;
use crate::runtime::Name;
use crate::signal::Signal;
use crate::supervisor::Verdict;
use crate::supervisor::exit::Exit;
use clap::error::{ContextKind, ContextValue};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use tracing::Level;

/// All went well.
pub const SUCCESS: u8 = 0;
/// Wrong use or wrong configuration; nothing was started.
pub const WRONG_USE: u8 = 2;
/// Something could not be ended.
pub const SURVIVORS: u8 = 123;
/// The run was over its time.
pub const TIMED_OUT: u8 = 124;
/// We could not do our work.
pub const UNABLE: u8 = 125;
/// The command cannot be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub const NOT_FOUND: u8 = 127;

const AFTER_HELP: &str = "\
Everything after \"--\" belongs to COMMAND.

Exit codes: the service's own, 128+n when signal n killed it; 2 wrong use or configuration, nothing was started;
123 something could not be ended; 124 --timeout ran out; 125 supervise could not do its work; 126 the command cannot be
executed; 127 it was not found.";

/// What was typed.
#[derive(Debug, Parser)]
#[command(
    name = "supervise",
    version,
    about = "Runs a service and leaves nothing of it behind",
    override_usage = "supervise [OPTIONS] -- COMMAND [ARG]...\n       supervise [OPTIONS] -c FILE [-- COMMAND [ARG]...]\n       supervise check [-c FILE]\n       supervise sweep NAME\n       supervise keep -- COMMAND [ARG]...\n       supervise doctor [--json]",
    after_help = AFTER_HELP,
    disable_help_subcommand = true
)]
struct Typed {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    verb: Option<Verb>,
    /// The service's command and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Read the configuration, say what is wrong with it, print what is in force
    Check {
        /// The command that would be run in place of the file's
        #[arg(last = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Execute COMMAND, and have it and all below it left alone when the service has ended, if the operator allows that
    Keep {
        /// The command to execute in place of this one
        #[arg(last = true, required = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// End what earlier runs of NAME left
    Sweep {
        /// The name that was given with --name
        #[arg(value_name = "NAME")]
        whose: Name,
    },
    /// Say what this kernel, container and user can offer, and what is left when something is killed
    Doctor {
        /// As data, for programs
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args, Debug)]
struct Options {
    /// Read the service's description from FILE
    #[arg(short, long, value_name = "FILE", global = true)]
    config: Option<PathBuf>,
    /// What asks the service to stop [default: TERM]
    #[arg(long, value_name = "SIGNAL", global = true)]
    stop_signal: Option<Signal>,
    /// From the stop signal to SIGKILL [default: 7s]
    #[arg(long, value_name = "TIME", value_parser = duration, global = true)]
    stop_timeout: Option<Duration>,
    /// From SIGTERM of what the service left to SIGKILL [default: 2s]
    #[arg(long, value_name = "TIME", value_parser = duration, global = true)]
    leftover_timeout: Option<Duration>,
    /// The longest that the whole run may take; then it is stopped
    #[arg(long, value_name = "TIME", value_parser = duration, global = true)]
    timeout: Option<Duration>,
    /// What people call the service: it runs once at a time, and a start ends what earlier runs of NAME left
    #[arg(short, long, value_name = "NAME", global = true)]
    name: Option<Name>,
    /// Whether a second process of ours cleans up when the first is killed [default: auto]
    #[arg(long, value_name = "MODE", value_enum, global = true)]
    guard: Option<GuardMode>,
    /// What holds the processes of the service together [default: auto]
    #[arg(long, value_name = "MODE", value_enum, global = true)]
    containment: Option<ContainmentMode>,
    /// Pass the signal FROM on to the service as TO
    #[arg(long, value_name = "FROM=TO", value_parser = mapping, global = true)]
    map_signal: Vec<(Signal, Signal)>,
    /// Take this exit code, or death by this signal, for success: end with 0
    #[arg(long, value_name = "STATUS", value_parser = success_status, value_delimiter = ',', global = true)]
    success_exit_status: Vec<SuccessStatus>,
    /// Write what happened to FILE, as JSON
    #[arg(long, value_name = "FILE", global = true)]
    report: Option<PathBuf>,
    /// How the log on standard error looks [default: auto]
    #[arg(long, value_name = "FORMAT", value_enum, global = true)]
    log_format: Option<LogFormat>,
    /// Say more; twice, everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true, conflicts_with = "quiet")]
    verbose: u8,
    /// Say errors only
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    quiet: u8,
}

/// Whether there is a guard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum GuardMode {
    /// Unless we are PID 1, with which all others end.
    #[default]
    Auto,
    /// Yes, or nothing is started.
    On,
    /// No.
    Off,
}

/// What was asked for.
#[derive(Debug)]
pub enum Asked {
    /// Run a service.
    Run(Request),
    /// Print what is in force.
    Check(Request),
    /// Execute a command that is to be left alone.
    Keep(Vec<OsString>),
    /// End what earlier runs left.
    Sweep(Request),
    /// Say what can be had here.
    Doctor {
        /// For programs.
        json: bool,
    },
    /// Nothing more to do than to print this on standard output (help, version).
    Print(String),
}

/// What was typed, before the file is read that it may name.
#[derive(Debug)]
pub struct Request {
    options: Options,
    command: Vec<OsString>,
}

/// Why nothing is done.
#[derive(Debug)]
pub struct Refused {
    /// What to tell the user.
    pub text: String,
    /// How the log is to look, as far as that was understood.
    pub log_format: LogFormat,
}

/// Reads the arguments, the program's own name first.
///
/// # Errors
/// What to tell the user.
pub fn read(arguments: &[OsString]) -> Result<Asked, Refused> {
    match Typed::try_parse_from(arguments) {
        Ok(Typed { options, verb: Some(Verb::Check { command }), .. }) => {
            Ok(Asked::Check(Request { options, command }))
        }
        Ok(Typed { verb: Some(Verb::Keep { command }), .. }) => Ok(Asked::Keep(command)),
        Ok(Typed { options, verb: Some(Verb::Sweep { whose }), .. }) => {
            let options = Options { name: Some(whose), ..options };
            Ok(Asked::Sweep(Request { options, command: vec![] }))
        }
        Ok(Typed { verb: Some(Verb::Doctor { json }), .. }) => Ok(Asked::Doctor { json }),
        Ok(Typed { options, command, verb: None }) => Ok(Asked::Run(Request { options, command })),
        Err(error) if error.use_stderr() => {
            Err(Refused { text: explain(&error, arguments), log_format: LogFormat::default() })
        }
        Err(help) => Ok(Asked::Print(help.to_string())),
    }
}

impl Request {
    /// Whether there is to be a guard, which is made before the file is read.
    pub fn guard(&self) -> GuardMode {
        self.options.guard.unwrap_or_default()
    }

    /// Reads the file, if one is named, and puts the options on top.
    ///
    /// # Errors
    /// What to tell the user.
    pub fn settings(self) -> Result<Settings, Refused> {
        let log_format = self.options.log_format.unwrap_or_default();
        let path = self.options.config.as_deref();
        let file = path.map_or_else(|| Ok(Settings::default()), Settings::from_file);
        let file = file.map_err(|error| Refused { text: error.to_string(), log_format })?;
        let settings = file.overridden_by(self.options.settings(self.command));
        match settings.contradiction() {
            None => Ok(settings),
            Some(text) => Err(Refused { text, log_format }),
        }
    }

    /// The same, and there is a command to run.
    ///
    /// # Errors
    /// What to tell the user.
    pub fn settings_to_run(self) -> Result<Settings, Refused> {
        let log_format = self.options.log_format.unwrap_or_default();
        let path = self.options.config.clone();
        let settings = self.settings()?;
        let text = match settings.command.first() {
            None => ConfigError::NoCommand(path).to_string(),
            Some(program) if program.is_empty() => {
                "the command is an empty word; write supervise -- COMMAND".to_owned()
            }
            Some(_) => return Ok(settings),
        };
        Err(Refused { text, log_format })
    }
}

/// What clap found wrong, or, where a command stands without "--" before it, the right form.
fn explain(error: &clap::Error, arguments: &[OsString]) -> String {
    if let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg)
        && !word.starts_with('-')
        && let Some(at) = arguments.iter().skip(1).position(|argument| argument == word.as_str())
    {
        let words: Vec<String> = arguments[at + 1..].iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let line = mask::command_line(&words);
        let word = mask::command_line(&words[..1]);
        return format!("{word} is no command of supervise; to run it as the service, write: supervise -- {line}");
    }
    // clap begins with "error: ", as our log does by itself.
    let text = error.to_string();
    text.strip_prefix("error: ").unwrap_or(&text).trim_end().to_owned()
}

impl Options {
    fn settings(self, command: Vec<OsString>) -> Settings {
        let level = match (self.quiet, self.verbose) {
            (0, 0) => None,
            (0, 1) => Some(Level::DEBUG),
            (0, _) => Some(Level::TRACE),
            _ => Some(Level::ERROR),
        };
        Settings {
            name: self.name,
            command,
            success_exit_status: self.success_exit_status,
            timeout: self.timeout,
            stop_signal: self.stop_signal,
            stop_timeout: self.stop_timeout,
            leftover_timeout: self.leftover_timeout,
            signal_map: self.map_signal.into_iter().collect(),
            containment: self.containment,
            report: self.report,
            log_format: self.log_format,
            log_level: level,
            ..Settings::default()
        }
    }
}

/// Whether the operator takes this end for a success.
pub fn is_success(exit: Exit, also: &[SuccessStatus]) -> bool {
    exit == Exit::Code(0)
        || also.iter().any(|status| match (status, exit) {
            (SuccessStatus::Code(code), exit) => *code == shell_code(exit),
            (SuccessStatus::Signal(wanted), Exit::Signal { signal, .. }) => *wanted == signal,
            (SuccessStatus::Signal(_), Exit::Code(_)) => false,
        })
}

/// What a shell gives for it: 128+n for death by signal n.
fn shell_code(exit: Exit) -> u8 {
    match exit {
        Exit::Code(code) => code,
        Exit::Signal { signal, .. } => u8::try_from(128 + signal.number()).unwrap_or(u8::MAX),
    }
}

/// What the program ends with when it was stopped before there was a service.
pub fn stopped_by(signal: Signal) -> u8 {
    shell_code(Exit::Signal { signal, core_dumped: false })
}

/// What the program ends with when there was no service.
pub fn start_failure(kind: StartErrorKind) -> u8 {
    match kind {
        StartErrorKind::NotFound => NOT_FOUND,
        StartErrorKind::NotExecutable => NOT_EXECUTABLE,
        StartErrorKind::Unable => UNABLE,
    }
}

/// What the program ends with.
pub fn exit_code(verdict: &Verdict, start_error: Option<StartErrorKind>, also_success: &[SuccessStatus]) -> u8 {
    match (verdict.exit, start_error) {
        _ if verdict.survivors => SURVIVORS,
        _ if verdict.guard_lost => UNABLE,
        (_, Some(kind)) => start_failure(kind),
        // A stop may have come before anything was started.
        (None, None) => verdict.stop.map_or(UNABLE, stopped_by),
        _ if verdict.timed_out => TIMED_OUT,
        (Some(exit), None) if is_success(exit, also_success) => SUCCESS,
        (Some(exit), None) => shell_code(exit),
    }
}
