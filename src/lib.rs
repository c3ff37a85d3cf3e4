//! `supervise` runs one service and leaves nothing of it behind.
//!
//! When the service ends, by itself, by a crash, or because it was asked to, every process that it started and that is
//! still alive is ended, that none is left is proven, and what happened is reported by name.
//!
//! ```text
//!  by hand, cron, ssh, CI, systemd        PID 1 of a container         --containment pidns
//!  supervise (guard; the pid you see)     supervise (PID 1)            supervise (guard)
//!    └ supervisor                           └ service                    └ supervisor (PID 1 of its namespace)
//!        └ service (main process)               └ … the tree                 └ service
//!            └ … the tree                                                        └ … the tree
//!
//!  descriptors ─→ event_loop ─Event→ supervisor ─Action→ effects ─→ process, containment
//!                     ↑                (pure)                │
//!                     └───────────── Event (a failure) ──────┘
//! ```
//!
//! # Code map
//!
//! | room | what it holds |
//! | --- | --- |
//! | `main`, `entry` | the program: argv → run → exit code; its first instructions, which block every signal |
//! | [`cli`] | argv → what was asked; how it ended → exit code |
//! | [`config`] | TOML → what is in force; every refusal names line, key and remedy |
//! | [`guard`] | the process above the supervisor, that outlives it; the way in which the two talk |
//! | [`supervisor`] | DECISIONS: `(time, event) → actions`, pure |
//! | [`event_loop`] | what happens → events, in a fixed order |
//! | [`effects`] | actions → system calls |
//! | [`process`] | making, waiting for, reading about and signalling processes; the terminal; descriptors |
//! | [`containment`] | who is in the tree, ending it, proving it empty |
//! | [`aftermath`] | what is said when all is over |
//! | [`report`] | the line for people, the file for programs, the masking of secrets |
//! | [`log`] | the log, which never blocks |
//! | [`signal`] | the names of signals |
//!
//! The way of a datum, "the service died by SIGKILL": SIGCHLD → [`process::reap`] → `Exit::Signal` → `Event::Exited` →
//! [`supervisor`] → `Event::TreeChanged` → `Action::TerminateLeftovers` → [`containment`] → `Event::TreeEmpty` →
//! `Action::End` → [`cli::exit_code`].
//!
//! # Invariants
//!
//! * The core does no I/O and cannot fail.
//! * The supervisor never blocks on what it supervises, nor on who reads its log.
//! * Down means empty: the end comes after ECHILD, or with the survivors named.
//! * Nothing wakes up without an event or a deadline.
//! * No process is signalled by a bare number that could be another's.
//! * After start-up, no error ends the supervisor.
//! * The service's exit code is never replaced by a clean-up's; 123 says that something is left.
//! * What could not be done is said, with a name.

pub mod aftermath;
pub mod cli;
pub mod config;
pub mod containment;
pub mod effects;
pub mod event_loop;
pub mod guard;
pub mod log;
pub mod process;
pub mod report;
pub mod signal;
pub mod supervisor;

use aftermath::unable;
use cli::{Asked, GuardMode, Refused, Request};
use config::{Config, ContainmentMode};
use containment::lineage::Lineage;
use containment::pid_namespace;
use effects::{Clock, Effects, Means};
use event_loop::EventLoop;
use guard::{Group, Guarded, Role};
use process::signals::Inherited;
use process::spawn::Plan;
use process::terminal::{Caller, Terminal};
use process::{descriptors, oom};
use report::{Destination, Record};
use std::ffi::OsString;
use std::io::{self, Write};
use supervisor::Supervisor;
use tracing::{Level, error, warn};

/// Does what the arguments ask for and gives the exit code. `inherited` is to be taken before anything else.
pub fn run(inherited: Inherited, arguments: &[OsString]) -> u8 {
    descriptors::occupy_closed_standard_descriptors();
    let done = match cli::read(arguments) {
        Ok(Asked::Run(request)) => guarded(inherited, request),
        Ok(Asked::Check(request)) => request.settings().map(|settings| print(&settings.in_force().to_string())),
        Ok(Asked::Print(text)) => Ok(print(&text)),
        Err(refused) => Err(refused),
    };
    done.unwrap_or_else(|refused| {
        log::start(refused.log_format, Level::INFO);
        error!("{}", refused.text);
        cli::WRONG_USE
    })
}

/// What was asked for goes to standard output.
fn print(text: &str) -> u8 {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => cli::SUCCESS,
        Err(_) => cli::UNABLE,
    }
}

/// Splits into guard and supervisor, where there is to be a guard.
fn guarded(inherited: Inherited, request: Request) -> Result<u8, Refused> {
    let caller = Caller::ourselves();
    let oom_score = oom::lower();
    let must = request.guard() == GuardMode::On;
    let is_wanted = must || request.guard() == GuardMode::Auto && nix::unistd::getpid().as_raw() != 1;
    let (guarded, why_not) = match is_wanted.then(|| guard::fork(Group::Own)) {
        Some(Ok(Role::Guard(guard))) => {
            // Of what was typed the guard needs nothing.
            drop(request);
            return Ok(aftermath::mirror(guard.watch()));
        }
        Some(Ok(Role::Supervisor(guarded))) => (Some(guarded), None),
        Some(Err(why)) => (None, Some(why)),
        None => (None, None),
    };
    let config = request.settings_to_run()?.in_force();
    log::start(config.log_format, config.log_level);
    if let Some(why) = why_not {
        if must {
            return Ok(unable("make the guard", &why));
        }
        warn!("there is no guard, so nobody cleans up if supervise is killed: {}", log::reason(&why));
    }
    let found = Found { inherited, caller, oom_score };
    Ok(if config.containment == ContainmentMode::Pidns {
        match enter_pid_namespace(guarded, found.caller) {
            Ok(guarded) => supervise(Found { caller: caller.from_inside(), ..found }, Some(guarded), config),
            Err(code) => code,
        }
    } else {
        supervise(found, guarded, config)
    })
}

/// What we were started with, and what is to be known of it later.
struct Found {
    inherited: Inherited,
    caller: Caller,
    oom_score: oom::Score,
}

/// Goes on as PID 1 of a new pid namespace, below the guard that there is or below this process as one. An exit code when we
/// are that, or when it cannot be done.
fn enter_pid_namespace(guarded: Option<Guarded>, caller: Caller) -> Result<Guarded, u8> {
    let refused = |why: pid_namespace::Unavailable| {
        error!(
            "cannot contain the service in a pid namespace: {why}; nothing was started (--containment auto takes the best that there is)"
        );
        cli::UNABLE
    };
    let forked = |why: io::Error| unable("make PID 1 of the pid namespace", &why);
    pid_namespace::make().map_err(refused)?;
    let guarded = match guarded {
        Some(guarded) => guard::hand_over(guarded, caller.group).map_err(forked)?,
        None => match guard::fork(Group::Callers).map_err(forked)? {
            Role::Guard(guard) => return Err(aftermath::mirror(guard.watch())),
            Role::Supervisor(guarded) => guarded,
        },
    };
    pid_namespace::settle().map_err(refused)?;
    Ok(guarded)
}

fn supervise(found: Found, guarded: Option<Guarded>, config: Config) -> u8 {
    let Found { inherited, caller, oom_score } = found;
    let clock = Clock::start();
    let (lineage, mut events) = match (Lineage::enter(), EventLoop::open(clock, guarded.as_ref())) {
        (Ok(lineage), Ok(events)) => (lineage, events),
        (Err(why), _) => {
            return unable("become the process that orphans fall to (PR_SET_CHILD_SUBREAPER, waitid)", &why);
        }
        (_, Err(why)) => return unable("open the sources of events (epoll, signalfd)", &why),
    };
    let mut report = find_report(&config);
    let record = record(&config, report.as_ref());
    let terminal = Terminal::find(caller);
    let policy = supervisor::Policy { job_control: terminal.has_job_control(), ..config.policy };
    let plan = Plan::new(config.command, oom_score);
    let means = Means { clock, inherited, terminal, lineage, guarded, record, signal_map: config.signal_map };
    let mut effects = Effects::new(means, plan);
    events.descriptors().into_iter().for_each(|descriptor| effects.keep(descriptor));
    effects.open_record(report.as_ref().and_then(Destination::descriptor));

    let verdict = events.run(&mut Supervisor::new(policy), &mut effects);

    let ended = aftermath::Ended { outcome: effects.finish(), verdict, whole_time: clock.now().0 };
    let run = ended.into_run(&config.success_exit_status);
    aftermath::tell(&run, config.policy.run_timeout, report.as_mut());
    run.exit_code
}

fn record(config: &Config, report: Option<&Destination>) -> Record {
    let command: Vec<String> = config.command.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let mut record = Record::new(report::invocation(), &command, config.log_format, config.log_level);
    record.report = report.map(|report| report.file().unwrap_or(report.path()).to_owned());
    record.containment = "lineage".to_owned();
    record
}

fn find_report(config: &Config) -> Option<Destination> {
    let path = config.report.as_deref()?;
    Destination::find(path)
        .map_err(|why| warn!("no report will be written to {}: {}", path.display(), log::reason(&why)))
        .ok()
}
