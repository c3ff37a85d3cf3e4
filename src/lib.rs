//! `supervise` runs one service and leaves nothing of it behind.
//!
//! When the service ends, by itself, by a crash, or because it was asked to, every process that it started and that is
//! still alive is ended, that none is left is proven, and what happened is reported by name.
//!
//! ```text
//!  by hand, cron, ssh, CI, systemd        PID 1 of a container
//!  supervise                              supervise (PID 1)
//!    └ service (main process)               └ service (main process)
//!        └ … the tree                           └ … the tree
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
//! | [`supervisor`] | DECISIONS: `(time, event) → actions`, pure |
//! | [`event_loop`] | what happens → events, in a fixed order |
//! | [`effects`] | actions → system calls |
//! | [`process`] | making, waiting for, reading about and signalling processes; the terminal; descriptors |
//! | [`containment`] | who is in the tree, ending it, proving it empty |
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

pub mod cli;
pub mod config;
pub mod containment;
pub mod effects;
pub mod event_loop;
pub mod log;
pub mod process;
pub mod report;
pub mod signal;
pub mod supervisor;

use cli::Asked;
use config::Config;
use containment::lineage::Lineage;
use effects::{Clock, Effects};
use event_loop::EventLoop;
use process::descriptors;
use process::signals::Inherited;
use process::spawn::Plan;
use process::terminal::Terminal;
use report::{Destination, Run};
use std::ffi::OsString;
use std::io::Write;
use std::time::SystemTime;
use supervisor::{Supervisor, Time};
use tracing::{Level, error, info, warn};

/// Does what the arguments ask for and gives the exit code. `inherited` is to be taken before anything else.
pub fn run(inherited: Inherited, arguments: Vec<OsString>) -> u8 {
    descriptors::occupy_closed_standard_descriptors();
    match cli::read(arguments) {
        Ok(Asked::Run(settings)) => {
            let config = settings.in_force();
            log::start(config.log_format, config.log_level);
            supervise(inherited, config)
        }
        Ok(Asked::Check(settings)) => print(&settings.in_force().to_string()),
        Ok(Asked::Print(text)) => print(&text),
        Err(refused) => {
            log::start(refused.log_format, Level::INFO);
            error!("{}", refused.text);
            cli::WRONG_USE
        }
    }
}

/// What was asked for goes to standard output.
fn print(text: &str) -> u8 {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => cli::SUCCESS,
        Err(_) => cli::UNABLE,
    }
}

fn supervise(inherited: Inherited, config: Config) -> u8 {
    let clock = Clock::start();
    let (lineage, mut events) = match (Lineage::enter(), EventLoop::open(clock)) {
        (Ok(lineage), Ok(events)) => (lineage, events),
        (Err(why), _) => {
            return unable("become the process that orphans fall to (PR_SET_CHILD_SUBREAPER, waitid)", &why);
        }
        (_, Err(why)) => return unable("open the sources of events (epoll, signalfd)", &why),
    };
    let began = SystemTime::now();
    let command = config.command.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let mut report = find_report(&config);
    let terminal = Terminal::find();
    let policy = supervisor::Policy { job_control: terminal.has_job_control(), ..config.policy };
    let mut effects = Effects::new(clock, inherited, terminal, lineage, Plan::new(config.command), config.signal_map);
    let ours = events.descriptors().into_iter().chain(report.as_ref().and_then(Destination::descriptor));
    ours.for_each(|descriptor| effects.keep(descriptor));

    let verdict = events.run(&mut Supervisor::new(policy), &mut effects);

    let whole_time = clock.now();
    let (outcome, lineage) = effects.finish();
    let (leftovers, unnamed) = lineage.into_leftovers().into_list();
    let kind = outcome.start_error.as_ref().map(|error| error.kind);
    let run = Run {
        command,
        // Who could not execute the command never was the service.
        pid: outcome.pid.filter(|_| verdict.started),
        began,
        service_time: outcome.service_ended.unwrap_or(Time::default()).0,
        whole_time: whole_time.0,
        verdict,
        success: verdict.exit.is_some_and(|exit| cli::is_success(exit, &config.success_exit_status)),
        start_error: outcome.start_error.map(|error| error.to_string()),
        leftovers,
        unnamed,
        exit_code: cli::exit_code(&verdict, kind, &config.success_exit_status),
    };
    tell(&run, &config.policy, report.as_mut());
    run.exit_code
}

fn unable(what: &str, why: &std::io::Error) -> u8 {
    error!("cannot {what}: {}; nothing was started", log::reason(why));
    cli::UNABLE
}

fn find_report(config: &Config) -> Option<Destination> {
    let path = config.report.as_deref()?;
    Destination::find(path)
        .map_err(|why| warn!("no report will be written to {}: {}", path.display(), log::reason(&why)))
        .ok()
}

/// Says how it ended: the cause first.
fn tell(run: &Run, policy: &supervisor::Policy, report: Option<&mut Destination>) {
    if let Some(why) = &run.start_error {
        error!("{why}");
    }
    if let Some(limit) = policy.run_timeout.filter(|_| run.verdict.timed_out) {
        warn!("the service was stopped: it ran longer than {}", humantime::format_duration(limit));
    }
    if let Some(line) = run.summary() {
        info!("{line}");
    }
    if let Some(line) = run.survivors() {
        error!("{line}");
    }
    if let Some(report) = report
        && let Err(why) = report.write(&run.to_json())
    {
        warn!("the report could not be written to {}: {}", report.path().display(), log::reason(&why));
    }
}
