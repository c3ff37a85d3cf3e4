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
pub mod supervisor;

use aftermath::unable;
use cli::{Asked, GuardMode, Refused, Request};
use config::{Config, ContainmentMode};
use containment::cgroup::Cgroup;
use containment::lineage::Lineage;
use containment::{Containment, pid_namespace};
use effects::{Clock, Effects, Means};
use event_loop::EventLoop;
use guard::{Group, Guarded, Role};
use named::Named;
use process::signals::Inherited;
use process::spawn::{Plan, replace_ourselves};
use process::terminal::{Caller, Terminal};
use process::{descriptors, oom};
use report::{Destination, Left, Record, Run};
use std::ffi::OsString;
use std::io::{self, Write};
use supervisor::{Event, Supervisor};
use tracing::{Level, debug, error, warn};

/// Does what the arguments ask for and gives the exit code. `inherited` is to be taken before anything else.
pub fn run(inherited: Inherited, arguments: &[OsString]) -> u8 {
    descriptors::occupy_closed_standard_descriptors();
    let done = match cli::read(arguments) {
        Ok(Asked::Run(request)) => guarded(inherited, request),
        Ok(Asked::Check(request)) => request.settings().map(|settings| print(&settings.in_force().to_string())),
        Ok(Asked::Keep(command)) => Ok(keep(inherited, command)),
        Ok(Asked::Sweep(request)) => request.settings().map(|settings| sweep_by_hand(inherited, settings.in_force())),
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

/// What we were started with, and what is to be known of it later.
struct Found {
    clock: Clock,
    inherited: Inherited,
    caller: Caller,
    oom_score: oom::Score,
    /// Why there is none, though there should be.
    why_no_guard: Option<io::Error>,
}

impl Found {
    fn now(inherited: Inherited, oom_score: oom::Score) -> Found {
        Found { clock: Clock::start(), inherited, caller: Caller::ourselves(), oom_score, why_no_guard: None }
    }
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
    let found = Found { why_no_guard: why_not, ..found };
    Ok(begin(found, guarded, config).unwrap_or_else(|code| code))
}

/// Makes room for the service, and supervises it. Gives an exit code, in whichever way it comes to one.
fn begin(found: Found, mut guarded: Option<Guarded>, config: Config) -> Result<u8, u8> {
    let invocation = report::invocation();
    let mut report = find_report(&config);
    let record = record(&config, &invocation, report.as_ref());
    let mut named = match &config.name {
        Some(name) => Some(enter(name, guarded.as_ref())?),
        None => None,
    };
    let mut swept = Left::default();
    if let Some(mine) = named.take() {
        (guarded, named, swept) = sweep(&found, guarded, mine, &config, &record, report.as_mut())?;
    }
    let found = if config.containment == ContainmentMode::Pidns {
        guarded = Some(enter_pid_namespace(guarded, found.caller)?);
        Found { caller: found.caller.from_inside(), ..found }
    } else {
        found
    };
    supervise(found, guarded, named, config, record, report, swept)
}

/// Takes the lock of a name.
fn enter(name: &runtime::Name, guarded: Option<&Guarded>) -> Result<Named, u8> {
    let announced = guarded.map_or_else(|| nix::unistd::getpid().as_raw(), |guarded| guarded.pid);
    Named::enter(name, announced).map_err(|refused| {
        error!("{refused}; nothing was started");
        cli::UNABLE
    })
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

/// Ends what earlier runs of this name left, before anything is started.
fn sweep(
    found: &Found,
    guarded: Option<Guarded>,
    named: Named,
    config: &Config,
    record: &Record,
    report: Option<&mut Destination>,
) -> Result<(Option<Guarded>, Option<Named>, Left), u8> {
    let guard = guarded.as_ref().map(|guarded| guarded.pid);
    let sweep =
        named.sweep(&record.invocation, guard, config.allow_keep).map_err(|why| unable("look for leftovers", &why))?;
    let Some(sweep) = sweep else { return Ok((guarded, Some(named), Left::default())) };
    let mut events = open_events(found.clock, guarded.as_ref())?;
    let began = found.clock.now();
    let means = Means {
        clock: found.clock,
        inherited: found.inherited,
        terminal: Terminal::find(found.caller),
        containment: contain()?,
        guarded,
        named: Some(named),
        record: record.clone(),
        signal_map: config.signal_map.clone(),
    };
    let mut effects = Effects::for_sweep(means, sweep);
    effects.brief_the_guard(report.as_ref().and_then(|report| report.descriptor()));
    let verdict = events.run(Event::Sweep, &mut Supervisor::new(config.policy), &mut effects);
    let (guarded, mut named, leftovers) = effects.finish_sweep();
    let swept = Left::new(leftovers, began.until(found.clock.now()));
    let goes_on = !verdict.survivors && !verdict.guard_lost && verdict.stop.is_none();
    if !goes_on {
        let run = aftermath::swept_only(record.clone(), swept, verdict, found.clock.now().0);
        aftermath::tell(&run, None, report);
        return Err(run.exit_code);
    }
    if let Some(named) = &mut named {
        named.swept();
    }
    Ok((guarded, named, swept))
}

/// The same, and nothing is started afterwards.
fn sweep_by_hand(inherited: Inherited, config: Config) -> u8 {
    log::start(config.log_format, config.log_level);
    let found = Found::now(inherited, oom::Score::default());
    let mut report = find_report(&config);
    let record = record(&config, &report::invocation(), report.as_ref());
    let swept = config.name.as_ref().ok_or(cli::WRONG_USE).and_then(|name| enter(name, None)).and_then(|named| {
        if !named.is_alone() {
            error!("nothing is swept: without a lock another run of this name may be alive");
            return Err(cli::UNABLE);
        }
        sweep(&found, None, named, &config, &record, report.as_mut())
    });
    match swept {
        Ok((_, _, swept)) => {
            let verdict = supervisor::Verdict::default();
            let run =
                Run { exit_code: cli::SUCCESS, ..aftermath::swept_only(record, swept, verdict, found.clock.now().0) };
            aftermath::tell(&run, None, report.as_mut());
            run.exit_code
        }
        Err(code) => code,
    }
}

fn open_events(clock: Clock, guarded: Option<&Guarded>) -> Result<EventLoop, u8> {
    EventLoop::open(clock, guarded).map_err(|why| unable("open the sources of events (epoll, signalfd)", &why))
}

fn contain() -> Result<Containment, u8> {
    let refused = |why| unable("become the process that orphans fall to (PR_SET_CHILD_SUBREAPER, waitid)", &why);
    Lineage::enter().map(Containment::new).map_err(refused)
}

/// Makes the cgroup that the mode asks for.
fn hold(containment: &mut Containment, config: &Config, invocation: &str) -> Result<(), u8> {
    let must = config.containment == ContainmentMode::Cgroup;
    // As PID 1 the kernel holds everybody. Kept ones would be killed with the others.
    let may = config.containment == ContainmentMode::Auto && !containment.is_init() && !config.allow_keep;
    if !must && !may {
        return Ok(());
    }
    match Cgroup::make(invocation) {
        Ok(cgroup) => containment.hold(cgroup, must),
        Err(why) if must => {
            error!("cannot contain the service in a cgroup: {why}; nothing was started");
            return Err(cli::UNABLE);
        }
        Err(why) => debug!("there is no cgroup for the service: {why}"),
    }
    Ok(())
}

fn supervise(
    found: Found,
    guarded: Option<Guarded>,
    mut named: Option<Named>,
    mut config: Config,
    mut record: Record,
    mut report: Option<Destination>,
    swept: Left,
) -> Result<u8, u8> {
    let Found { clock, inherited, caller, oom_score, why_no_guard } = found;
    let mut containment = contain()?;
    let mut events = open_events(clock, guarded.as_ref())?;
    hold(&mut containment, &config, &record.invocation)?;
    if let Some(why) = why_no_guard {
        warn!("there is no guard, so nobody cleans up if supervise is killed: {}", log::reason(&why));
    }
    if config.allow_keep {
        containment.allow_keep();
    }
    record.containment = containment.name().to_owned();
    if let Some(named) = &mut named {
        let cgroup = containment.cgroup().map(|cgroup| cgroup.path().to_owned());
        config.command.set_environment(named.begin(&record.invocation, cgroup));
    }
    let terminal = Terminal::find(caller);
    let policy = supervisor::Policy { job_control: terminal.has_job_control(), ..config.policy };
    let plan = Plan::new(config.command, oom_score);
    let signal_map = config.signal_map;
    let means = Means { clock, inherited, terminal, containment, guarded, named, record, signal_map };
    let mut effects = Effects::new(means, Some(plan));
    events.descriptors().into_iter().for_each(|descriptor| effects.keep(descriptor));
    effects.brief_the_guard(report.as_ref().and_then(Destination::descriptor));

    let verdict = events.run(Event::Start, &mut Supervisor::new(policy), &mut effects);

    let ended = aftermath::Ended { outcome: effects.finish(), verdict, swept, whole_time: clock.now().0 };
    let run = ended.into_run(&config.success_exit_status);
    aftermath::tell(&run, config.policy.run_timeout, report.as_mut());
    Ok(run.exit_code)
}

fn record(config: &Config, invocation: &str, report: Option<&Destination>) -> Record {
    let command: Vec<String> = config.command.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let mut record = Record::new(invocation.to_owned(), &command, config.log_format, config.log_level);
    record.name = config.name.as_ref().map(ToString::to_string);
    record.report = report.map(|report| report.file().unwrap_or(report.path()).to_owned());
    record
}

fn find_report(config: &Config) -> Option<Destination> {
    let path = config.report.as_deref()?;
    Destination::find(path)
        .map_err(|why| warn!("no report will be written to {}: {}", path.display(), log::reason(&why)))
        .ok()
}
