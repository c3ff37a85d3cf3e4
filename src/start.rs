//! A run in the making: from a configuration to the loop that runs it. What stands in the way ends in an exit code.
//!
//! The order is the contract: the lock of the name; what earlier runs left; the pid namespace, into which the rest is
//! made; the cgroup; the record; and the service last.

use crate::aftermath::{self, unable};
use crate::config::{Config, ContainmentMode};
use crate::containment::cgroup::Cgroup;
use crate::containment::lineage::Lineage;
use crate::containment::{Containment, pid_namespace};
use crate::effects::{AfterSweep, Clock, Effects, Means};
use crate::event_loop::EventLoop;
use crate::guard::{self, Group, Guard, Guarded, Role};
use crate::named::Named;
use crate::process::oom;
use crate::process::signals::Inherited;
use crate::process::spawn::Plan;
use crate::process::terminal::{Caller, Terminal};
use crate::report::{self, Destination, Left, Record, Run};
use crate::supervisor::{Event, Policy, Supervisor, Verdict};
use crate::{cli, log};
use std::io;
use tracing::{debug, error, info, warn};

/// What we were started with, and what is to be known of it later.
#[derive(Debug)]
pub struct Found {
    clock: Clock,
    inherited: Inherited,
    caller: Caller,
    oom_score: oom::Score,
}

impl Found {
    /// Looks around. To be called before the guard is made.
    pub fn now(inherited: Inherited, oom_score: oom::Score) -> Found {
        Found { clock: Clock::start(), inherited, caller: Caller::ourselves(), oom_score }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Making {
    found: Found,
    guarded: Option<Guarded>,
    /// Why there is no guard, though there should be one.
    why_no_guard: Option<io::Error>,
    config: Config,
    record: Record,
    report: Option<Destination>,
    named: Option<Named>,
    swept: Left,
}

/// Who goes on after the pid namespace was made.
enum Side {
    Inside(Box<Making>),
    /// This process is the guard, and has nothing of the run any more.
    Outside(Box<Guard>),
}

impl Making {
    /// Finds the place of the report, and takes the lock of the name.
    ///
    /// # Errors
    /// The exit code, when the name is taken.
    pub fn new(
        found: Found,
        guarded: Option<Guarded>,
        why_no_guard: Option<io::Error>,
        config: Config,
    ) -> Result<Making, u8> {
        let report = find_report(&config);
        let record = record(&config, report.as_ref());
        let announced = guarded.as_ref().map_or_else(|| nix::unistd::getpid().as_raw(), |guarded| guarded.pid);
        let named = config.name.as_ref().map(|name| Named::enter(name, announced)).transpose();
        let named = named.map_err(|refused| {
            error!("{refused}; nothing was started");
            cli::UNABLE
        })?;
        Ok(Making { found, guarded, why_no_guard, config, record, report, named, swept: Left::default() })
    }

    /// Sweeps, starts and supervises the service to its end.
    ///
    /// # Errors
    /// The exit code, when it did not come to a service.
    pub fn run(mut self) -> Result<u8, u8> {
        self.sweep()?;
        if self.config.containment != ContainmentMode::Pidns {
            return self.supervise();
        }
        match self.enter_pid_namespace()? {
            Side::Inside(making) => making.supervise(),
            Side::Outside(guard) => Ok(aftermath::mirror(guard.watch())),
        }
    }

    /// Ends what earlier runs of this name left, before anything is started. False when nobody could be looked for.
    fn sweep(&mut self) -> Result<bool, u8> {
        let Some(named) = self.named.take() else { return Ok(true) };
        self.outlive_the_guard();
        let guard = self.guarded.as_ref().map(|guarded| guarded.pid);
        let sweep = named.sweep(&self.record.invocation, guard, self.config.allow_keep);
        let Some(sweep) = sweep.map_err(|why| unable("look for leftovers", &why))? else {
            self.named = Some(named);
            return Ok(false);
        };
        let clock = self.found.clock;
        let mut events = self.open_events()?;
        let began = clock.now();
        let means = self.means(contain()?, Some(named));
        let mut effects = Effects::for_sweep(means, sweep);
        effects.brief_the_guard(self.report.as_ref().and_then(Destination::descriptor));
        let verdict = events.run(Event::Sweep, &mut Supervisor::new(self.config.policy), &mut effects);
        let AfterSweep { guarded, mut named, leftovers, is_blind } = effects.finish_sweep();
        self.guarded = guarded;
        self.swept = Left::new(leftovers, began.until(clock.now()));
        if !verdict.permits_a_start() {
            return Err(self.tell_of_the_sweep(verdict));
        }
        // Now: the service may live for weeks.
        aftermath::tell_what_was_swept(&self.swept, false).into_iter().for_each(|line| info!("{line}"));
        if let Some(named) = named.as_mut().filter(|_| !is_blind) {
            named.swept();
        }
        self.named = named;
        Ok(!is_blind)
    }

    fn tell_of_the_sweep(&mut self, verdict: Verdict) -> u8 {
        let swept = std::mem::take(&mut self.swept);
        let whole_time = self.found.clock.now().0;
        let run = aftermath::swept_only(self.record.clone(), swept, verdict, whole_time);
        let lines = aftermath::tell_what_was_swept(&run.swept, verdict.survivors);
        lines.into_iter().for_each(|line| info!("{line}"));
        aftermath::tell(&run, None, self.report.as_mut());
        run.exit_code
    }

    fn outlive_the_guard(&self) {
        if self.guarded.is_some() {
            guard::outlive();
        }
    }

    fn open_events(&self) -> Result<EventLoop, u8> {
        let opened = EventLoop::open(self.found.clock, self.guarded.as_ref());
        opened.map_err(|why| unable("open the sources of events (epoll, signalfd)", &why))
    }

    fn means(&mut self, containment: Containment, named: Option<Named>) -> Means {
        Means {
            clock: self.found.clock,
            inherited: self.found.inherited,
            terminal: Terminal::find(self.found.caller),
            containment,
            guarded: self.guarded.take(),
            named,
            record: self.record.clone(),
            signal_map: self.config.signal_map.clone(),
            kill_timeout: self.config.policy.kill_timeout,
        }
    }

    /// Goes on as PID 1 of a new pid namespace, below the guard that there is, or below this process as one.
    fn enter_pid_namespace(mut self) -> Result<Side, u8> {
        let refused = |why: pid_namespace::Unavailable| {
            let remedy = "--containment auto takes the best that there is";
            error!("cannot contain the service in a pid namespace: {why}; nothing was started ({remedy})");
            cli::UNABLE
        };
        let forked = |why: io::Error| unable("make PID 1 of the pid namespace", &why);
        pid_namespace::make().map_err(refused)?;
        let guarded = match self.guarded.take() {
            Some(guarded) => guard::hand_over(guarded, self.found.caller.group).map_err(forked)?,
            None => match guard::fork(Group::Callers).map_err(forked)? {
                // What the other one has of the run is its own copy.
                Role::Guard(guard) => return Ok(Side::Outside(guard)),
                Role::Supervisor(guarded) => guarded,
            },
        };
        pid_namespace::settle().map_err(refused)?;
        let found = Found { caller: self.found.caller.from_inside(), ..self.found };
        Ok(Side::Inside(Box::new(Making { found, guarded: Some(guarded), ..self })))
    }

    fn supervise(mut self) -> Result<u8, u8> {
        // Before there is anything that would be left behind.
        self.outlive_the_guard();
        let mut containment = contain()?;
        let mut events = self.open_events()?;
        self.hold(&mut containment)?;
        self.say_what_the_guard_lacks();
        if self.config.allow_keep {
            containment.allow_keep();
        }
        self.record.containment = containment.name().to_owned();
        let mut named = self.named.take();
        let mut command = self.config.command.clone();
        if let Some(named) = &mut named {
            let cgroup = containment.cgroup().map(|cgroup| cgroup.path().to_owned());
            command.set_environment(named.begin(&self.record.invocation, cgroup));
        }
        let plan = Plan::new(command, self.found.oom_score.clone());
        let means = self.means(containment, named);
        let policy = Policy { job_control: means.terminal.has_job_control(), ..self.config.policy };
        let mut effects = Effects::new(means, Some(plan));
        events.descriptors().into_iter().for_each(|descriptor| effects.keep(descriptor));
        effects.brief_the_guard(self.report.as_ref().and_then(Destination::descriptor));

        let verdict = events.run(Event::Start, &mut Supervisor::new(policy), &mut effects);

        let whole_time = self.found.clock.now().0;
        let ended = aftermath::Ended { outcome: effects.finish(), verdict, swept: self.swept, whole_time };
        let run = ended.into_run(&self.config.success_exit_status);
        aftermath::tell(&run, self.config.policy.run_timeout, self.report.as_mut());
        Ok(run.exit_code)
    }

    /// Makes the cgroup that the mode asks for.
    fn hold(&self, containment: &mut Containment) -> Result<(), u8> {
        let must = self.config.containment == ContainmentMode::Cgroup;
        // As PID 1 the kernel holds everybody. Kept ones would be killed with the others.
        let is_wanted = self.config.containment == ContainmentMode::Auto && !self.config.allow_keep;
        if !must && (!is_wanted || containment.is_init()) {
            return Ok(());
        }
        match Cgroup::make(&self.record.invocation) {
            Ok(cgroup) => containment.hold(cgroup, must),
            Err(why) if must => {
                error!("cannot contain the service in a cgroup: {why}; nothing was started");
                return Err(cli::UNABLE);
            }
            Err(why) => debug!("there is no cgroup for the service: {why}"),
        }
        Ok(())
    }

    fn say_what_the_guard_lacks(&self) {
        if let Some(why) = &self.why_no_guard {
            warn!("there is no guard, so nobody cleans up if supervise is killed: {}", log::reason(why));
        }
        let shares_the_group = nix::unistd::getpgrp().as_raw() == self.found.caller.group;
        if self.guarded.is_some() && shares_the_group && self.config.containment != ContainmentMode::Pidns {
            warn!(
                "the supervisor could not get a process group of its own: SIGKILL to our group kills it with its guard"
            );
        }
    }
}

/// Ends what earlier runs left, and starts nothing afterwards. Gives the exit code.
pub fn sweep_by_hand(inherited: Inherited, config: Config) -> u8 {
    let found = Found::now(inherited, oom::Score::default());
    let mut making = match Making::new(found, None, None, config) {
        Ok(making) => making,
        Err(code) => return code,
    };
    if !making.named.as_ref().is_some_and(Named::is_alone) {
        error!("nothing is swept: without a lock another run of this name may be alive");
        return cli::UNABLE;
    }
    match making.sweep() {
        Ok(could_look) => {
            let swept = std::mem::take(&mut making.swept);
            let whole_time = making.found.clock.now().0;
            let exit_code = if could_look { cli::SUCCESS } else { cli::UNABLE };
            if let Some(name) = making.config.name.filter(|_| could_look && swept.is_nothing()) {
                info!("nothing was left of earlier runs of \"{name}\"");
            }
            let run = aftermath::swept_only(making.record, swept, Verdict::default(), whole_time);
            let run = Run { exit_code, ..run };
            aftermath::tell(&run, None, making.report.as_mut());
            run.exit_code
        }
        Err(code) => code,
    }
}

fn contain() -> Result<Containment, u8> {
    let refused = |why| unable("become the process that orphans fall to (PR_SET_CHILD_SUBREAPER, waitid)", &why);
    Lineage::enter().map(Containment::new).map_err(refused)
}

fn record(config: &Config, report: Option<&Destination>) -> Record {
    let command: Vec<String> = config.command.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let mut record = Record::new(report::invocation(), &command, config.log_format, config.log_level);
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
