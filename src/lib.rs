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
//! | [`start`] | a run in the making: lock, sweep, pid namespace, cgroup, service |
//! | [`guard`] | the process above the supervisor, that outlives it; the way in which the two talk |
//! | [`supervisor`] | DECISIONS: `(time, event) → actions`, pure |
//! | [`event_loop`] | what happens → events, in a fixed order |
//! | [`effects`] | actions → system calls |
//! | [`process`] | making, waiting for, reading about and signalling processes; the terminal; descriptors |
//! | [`containment`] | who is in the tree, ending it, proving it empty |
//! | [`aftermath`] | what is said when all is over |
//! | [`report`] | the line for people, the file for programs, the masking of secrets |
//! | [`named`] | a named run: the only one of its name, after what earlier ones left is gone |
//! | [`runtime`] | the lock of a named run, and the record of what may be left of earlier ones |
//! | [`doctor`] | what can be had here, and what that promises |
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
pub mod doctor;
pub mod effects;
pub mod event_loop;
pub mod guard;
pub mod log;
pub mod named;
pub mod process;
pub mod report;
pub mod runtime;
pub mod signal;
pub mod start;
pub mod supervisor;

use aftermath::unable;
use cli::{Asked, GuardMode, Refused, Request};
use guard::{Group, Role};
use process::signals::Inherited;
use process::spawn::{Plan, replace_ourselves};
use process::{descriptors, oom};
use start::{Found, Making, sweep_by_hand};
use std::ffi::OsString;
use std::io::{self, Write};
use tracing::{Level, error};

/// Does what the arguments ask for and gives the exit code. `inherited` is to be taken before anything else.
pub fn run(inherited: Inherited, arguments: &[OsString]) -> u8 {
    descriptors::occupy_closed_standard_descriptors();
    let done = match cli::read(arguments) {
        Ok(Asked::Run(request)) => guarded(inherited, request),
        Ok(Asked::Check(request)) => request.settings().map(|settings| print(&settings.in_force().to_string())),
        Ok(Asked::Keep(command)) => Ok(keep(inherited, command)),
        Ok(Asked::Sweep(request)) => request.settings().map(|settings| {
            let config = settings.in_force();
            log::start(config.log_format, config.log_level);
            sweep_by_hand(inherited, config)
        }),
        Ok(Asked::Doctor { json }) => Ok(print(&doctor::examine(json))),
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

/// Becomes a command that is marked to be left alone.
fn keep(inherited: Inherited, argv: Vec<OsString>) -> u8 {
    let environment = vec![(process::marks::KEEP.to_owned(), "1".to_owned())];
    let command = process::spawn::Command { argv, working_directory: None, environment };
    let error = replace_ourselves(Plan::new(command, oom::Score::default()), &inherited);
    log::start(config::LogFormat::default(), Level::INFO);
    error!("{error}");
    cli::start_failure(error.kind)
}

/// Splits into guard and supervisor, where there is to be a guard.
fn guarded(inherited: Inherited, request: Request) -> Result<u8, Refused> {
    let found = Found::now(inherited, oom::lower());
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
    if let (Some(why), true) = (&why_not, must) {
        return Ok(unable("make the guard", why));
    }
    Ok(Making::new(found, guarded, why_not, config).and_then(Making::run).unwrap_or_else(|code| code))
}
