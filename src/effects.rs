//! Actions of the core carried out as system calls. A failure becomes an event; nothing here decides.

use crate::containment::Containment;
use crate::containment::leftover::Leftovers;
use crate::containment::sweep::{Found, Sweep};
use crate::guard::Guarded;
use crate::guard::link::{Answer, Contained};
use crate::named::Named;
use crate::process::reap::{Change, Left, has_stopped_or_gone_on, reap};
use crate::process::signals::{Inherited, Received};
use crate::process::spawn::{Plan, Progress, StartError, spawn};
use crate::process::terminal::{Placement, Terminal, suspend};
use crate::process::{Pid, descriptors};
use crate::report::Record;
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use crate::supervisor::{Action, Event, Target, Time, Verdict};
use mio::Interest;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};
use tracing::{debug, trace, warn};

/// The one clock: monotonic, counted from the start of the program.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    began: Instant,
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock { began: Instant::now() }
    }

    /// Time since the start.
    pub fn now(self) -> Time {
        Time(self.began.elapsed())
    }

    /// The moment that the core means; a day from now at the latest.
    fn instant(self, time: Time) -> Instant {
        Instant::now() + self.now().until(time).min(Duration::from_secs(86_400))
    }
}

/// How long a look at all processes of the machine may take.
const LOOKING_TIME: Duration = Duration::from_secs(10);

/// What a run is done with.
#[derive(Debug)]
pub struct Means {
    /// The one clock.
    pub clock: Clock,
    /// What the service is to find.
    pub inherited: Inherited,
    /// The terminal, or that there is none.
    pub terminal: Terminal,
    /// What holds the tree together.
    pub containment: Containment,
    /// What is kept on record for the next run of this name.
    pub named: Option<Named>,
    /// The guard, while there is one.
    pub guarded: Option<Guarded>,
    /// What the guard is told.
    pub record: Record,
    /// What a signal that comes in is passed on as.
    pub signal_map: BTreeMap<Signal, Signal>,
    /// How long after SIGKILL, and after each death, the guard is to have patience.
    pub kill_timeout: Duration,
}

/// The hands of the core, and what they hold.
#[derive(Debug)]
pub struct Effects {
    means: Means,
    /// Taken by the start.
    plan: Option<Plan>,
    /// The start, while it goes on.
    progress: Option<Progress>,
    /// Descriptors that outlive the start.
    kept: Vec<RawFd>,
    main: Option<Pid>,
    /// What stopped the main process last.
    stopped_by: Signal,
    /// How often the guard was asked to stop and has not answered.
    suspending: u32,
    /// Whether the service was told that no terminal will come.
    hung_up: bool,
    /// The leftovers of earlier invocations, while they are what the core is about.
    sweep: Option<Sweep>,
    /// Whether there was no way to look for anybody.
    is_blind: bool,
    /// Whether survivors were looked for and nobody was found.
    looked_in_vain: bool,
    verdict: Option<Verdict>,
    start_error: Option<StartError>,
    service_ended: Option<Time>,
}

/// What is known when all is over.
#[derive(Debug)]
pub struct Outcome {
    /// Who the service was.
    pub record: Record,
    /// Who was left.
    pub leftovers: Leftovers,
    /// Why there was no service.
    pub start_error: Option<StartError>,
    /// When the main process ended.
    pub service_ended: Option<Time>,
}

/// What a sweep leaves to the run after it.
#[derive(Debug)]
pub struct AfterSweep {
    /// The guard.
    pub guarded: Option<Guarded>,
    /// The name.
    pub named: Option<Named>,
    /// Who was left of earlier invocations.
    pub leftovers: Leftovers,
    /// Whether nobody could be looked for: then it is not known that nobody is left.
    pub is_blind: bool,
}

impl Effects {
    /// Hands that hold all a run needs.
    pub fn new(means: Means, plan: Option<Plan>) -> Effects {
        let link = means.guarded.as_ref().map(|guarded| guarded.link.as_raw_fd());
        let named = means.named.iter().flat_map(Named::descriptors);
        let kept = means.terminal.descriptor().into_iter().chain(link).chain(named).collect();
        Effects {
            means,
            plan,
            progress: None,
            kept,
            main: None,
            stopped_by: Signal::STOP,
            suspending: 0,
            hung_up: false,
            sweep: None,
            is_blind: false,
            looked_in_vain: false,
            verdict: None,
            start_error: None,
            service_ended: None,
        }
    }

    /// Adds a descriptor that must stay open.
    pub fn keep(&mut self, descriptor: RawFd) {
        self.kept.push(descriptor);
    }

    /// Hands for a sweep: nothing is to be started.
    pub fn for_sweep(means: Means, sweep: Sweep) -> Effects {
        let clock = means.clock;
        let mut effects = Effects::new(means, None);
        effects.sweep = Some(sweep);
        // Who keeps others waiting is told of before that matters.
        effects.look_around(clock.now());
        effects
    }

    /// Tells the guard what it needs if it has to end the tree, and what is to be reported, and where to if that is a
    /// descriptor.
    pub fn brief_the_guard(&mut self, report: Option<BorrowedFd<'_>>) {
        self.kept.extend(report.as_ref().map(AsRawFd::as_raw_fd));
        let Means { guarded, containment, named, .. } = &self.means;
        if let Some(Guarded { link, .. }) = guarded {
            let own_session = !self.means.terminal.has_job_control();
            let kill_timeout = self.means.kill_timeout;
            let contained = Contained { own_session, allow_keep: containment.allows_keep(), kill_timeout };
            link.contained(contained, containment.for_the_guard());
            named.as_ref().and_then(Named::lock).into_iter().for_each(|lock| link.hold(lock));
        }
        self.tell_guard(report);
    }

    fn tell_guard(&self, report: Option<BorrowedFd<'_>>) {
        if let Some(guarded) = &self.means.guarded {
            guarded.link.record(&self.means.record.to_text(), report);
        }
    }

    /// How it ended, once it has.
    pub fn verdict(&self) -> Option<Verdict> {
        self.verdict
    }

    /// The start that goes on, to be watched.
    pub fn progress(&self) -> Option<&Progress> {
        self.progress.as_ref()
    }

    /// Carries an action out.
    pub fn perform(&mut self, action: Action) -> Option<Event> {
        trace!(?action);
        match action {
            Action::Spawn => return self.spawn(),
            Action::Signal(target, signal) => self.signal(target, signal),
            Action::Suspend => self.suspend(),
            Action::Resume => self.resume(),
            Action::TerminateLeftovers(until) => self.terminate_leftovers(self.means.clock.instant(until)),
            Action::KillTree(until) => self.kill_tree(self.means.clock.instant(until)),
            Action::NameSurvivors => return self.name_survivors(),
            Action::End(verdict) => self.verdict = Some(verdict),
        }
        None
    }

    fn terminate_leftovers(&mut self, until: Instant) {
        match &mut self.sweep {
            Some(sweep) => sweep.terminate(until),
            None => self.means.containment.terminate_leftovers(until),
        }
    }

    fn kill_tree(&mut self, until: Instant) {
        match &mut self.sweep {
            Some(sweep) => sweep.kill(until),
            None => self.means.containment.kill_tree(until),
        }
    }

    /// Nothing the first time that nobody is found: who was there a moment ago may have gone, and the proof of that is next.
    fn name_survivors(&mut self) -> Option<Event> {
        let found = match &mut self.sweep {
            Some(sweep) => sweep.name_survivors(),
            None => self.means.containment.name_survivors(),
        };
        let looked_in_vain = !found && !std::mem::replace(&mut self.looked_in_vain, true);
        (!looked_in_vain).then_some(Event::SurvivorsNamed)
    }

    fn signal(&mut self, target: Target, signal: Signal) {
        let whom = match target {
            Target::Main => "the main process",
            Target::Group => "the service's group",
            Target::Tree => "the whole service",
        };
        debug!("{signal} to {whom}");
        match target {
            Target::Main => self.means.containment.signal_main(signal),
            Target::Group => self.means.containment.signal_group(signal),
            Target::Tree => self.means.containment.signal_tree(signal),
        }
    }

    fn spawn(&mut self) -> Option<Event> {
        let plan = self.plan.take()?;
        let placement = self.means.terminal.placement();
        let destined = self.means.containment.destined();
        match spawn(plan, &self.means.inherited, placement, destined) {
            Ok(spawned) => {
                self.means.containment.started(spawned.pid, placement);
                if let Some(named) = &mut self.means.named {
                    named.started(spawned.pid, placement == Placement::OwnSession);
                }
                self.main = Some(spawned.pid);
                self.means.record.pid = Some(spawned.pid);
                self.tell_guard(None);
                debug!("the service starts as pid {}", spawned.pid);
                self.progress = Some(spawned.progress);
                None
            }
            Err(error) => Some(self.start_failed(error)),
        }
    }

    fn start_failed(&mut self, error: StartError) -> Event {
        self.start_error = Some(error);
        // The child that could not become the service ends by itself; that end is not the service's.
        self.main = None;
        Event::StartFailed
    }

    /// How the start goes, if that has been decided.
    pub fn check_start(&mut self) -> Option<Event> {
        let result = self.progress.as_mut()?.check()?;
        self.progress = None;
        let event = match result {
            Ok(()) => Event::Started,
            Err(error) => self.start_failed(error),
        };
        self.kept.extend(self.means.containment.descriptors());
        descriptors::raise_limit();
        descriptors::release(&self.kept);
        Some(event)
    }

    /// What the guard has said.
    pub fn hear_guard(&mut self) -> Option<Event> {
        loop {
            match self.means.guarded.as_ref()?.link.answer()? {
                answer @ (Answer::WasStopped | Answer::NoEffect) => {
                    self.suspending = self.suspending.saturating_sub(1);
                    // It has stopped again since, and the guard was asked again.
                    match answer {
                        _ if self.suspending > 0 => {}
                        Answer::WasStopped => self.resume_after_a_stop(),
                        _ => self.suspended_in_vain(),
                    }
                }
                Answer::Lost => {
                    self.means.guarded = None;
                    return Some(Event::GuardLost);
                }
            }
        }
    }

    /// What the core is to know of a signal that came in.
    pub fn signal_event(&mut self, received: Received) -> Option<Event> {
        let Received { signal, by_kernel, past_the_guard } = received;
        // Deaths are seen by waiting; a closed pipe by EPIPE.
        if [Signal::CHLD, Signal::PIPE].contains(&signal) {
            return None;
        }
        // Whoever means the service signals the guard. A whole control group that gets a signal has it there already.
        if past_the_guard && !signal.asks_for_a_stop() {
            debug!("{signal} came past the guard and is not passed on");
            return None;
        }
        // A key that the service gets, too, without our help.
        if by_kernel && self.main.is_some() && self.means.terminal.reaches_the_service(signal) {
            return None;
        }
        // A key that was meant for the service, and came to us while the terminal was on its way to it.
        if by_kernel && signal.asks_for_a_stop() && self.main.is_some() && self.means.terminal.has_job_control() {
            self.means.containment.signal_group(signal);
            return None;
        }
        let wanted = self.means.signal_map.get(&signal).copied().unwrap_or(signal);
        Some(Event::Signal { received: signal, wanted })
    }

    /// Reaps what can be reaped, and closes the batch with what is left.
    pub fn reap(&mut self, events: &mut Vec<Event>) -> Left {
        let now = self.means.clock.now();
        let mut changed = false;
        let Effects { means: Means { containment, terminal, record, .. }, main, stopped_by, service_ended, .. } = self;
        let mut main_ended = false;
        let left = reap(|change| match change {
            Change::Ended(pid, exit) => {
                changed = true;
                containment.reaped(pid, exit);
                if *main == Some(pid) {
                    // Before the clean-up: an impatient key is for us now.
                    terminal.take_back(main.take());
                    *service_ended = Some(now);
                    record.ended(exit);
                    main_ended = true;
                    debug!("the service {exit}");
                    events.push(Event::Exited(exit));
                }
                trace!(pid, %exit, "reaped");
            }
            Change::Stopped(pid, signal) if *main == Some(pid) => {
                *stopped_by = signal;
                events.push(Event::MainStopped);
            }
            Change::Stopped(..) => {}
        });
        let (is_empty, changed) = match self.sweep {
            Some(_) => self.look_around(now),
            None => (self.main.is_none() && self.means.containment.is_empty(left), changed),
        };
        self.looked_in_vain &= !changed;
        if main_ended && !is_empty {
            self.tell_guard(None);
        }
        if is_empty {
            events.push(Event::TreeEmpty);
        } else if changed {
            events.push(Event::TreeChanged);
        }
        left
    }

    /// Looks for leftovers of earlier invocations: whether nobody is left, and whether somebody has gone.
    fn look_around(&mut self, now: Time) -> (bool, bool) {
        let Some(sweep) = &mut self.sweep else { return (true, false) };
        let changed = sweep.drain();
        let found = sweep.look(self.means.clock.instant(now.after(LOOKING_TIME)));
        sweep.take_warnings().into_iter().for_each(|warning| warn!("{warning}"));
        self.is_blind |= found == Found::Blind;
        (matches!(found, Found::Nobody | Found::Blind), changed)
    }

    fn suspend(&mut self) {
        self.means.terminal.take_back(self.main);
        let signal = self.means.terminal.suspending(self.stopped_by);
        match &self.means.guarded {
            Some(guard) => {
                guard.link.suspend(signal);
                self.suspending += 1;
            }
            None if suspend(signal) => self.resume_after_a_stop(),
            None => self.suspended_in_vain(),
        }
    }

    /// Somebody continued us.
    fn resume_after_a_stop(&mut self) {
        // In the caller's group it goes on with us by itself, and may have stopped again since: that is heard next.
        if !self.main.is_some_and(has_stopped_or_gone_on) {
            self.resume();
        }
    }

    /// A request to go on and a stop that are heard at the same time: which came first?
    pub fn put_in_order(&self, events: &mut Vec<Event>) {
        let is_continued = |event: &Event| matches!(event, Event::Signal { wanted: Signal::CONT, .. });
        if !events.contains(&Event::MainStopped) || !events.iter().any(is_continued) {
            return;
        }
        if self.means.terminal.shares_callers_group() {
            // It went on with the caller's group, and stopped again.
            events.retain(|event| !is_continued(event));
        } else {
            // Only we continue it, and have not yet.
            events.retain(|event| *event != Event::MainStopped);
        }
    }

    /// Nobody could have continued us, so nobody will continue the service.
    fn suspended_in_vain(&mut self) {
        // One that went on and stopped again is heard next, and whether that can be followed.
        if !self.means.terminal.has_job_control() || self.main.is_some_and(has_stopped_or_gone_on) {
            return;
        }
        let has_terminal = self.main.is_some_and(|main| self.means.terminal.lend_again(main));
        if !has_terminal && [Signal::TTIN, Signal::TTOU].contains(&self.stopped_by) {
            // It would stop again at once. What the kernel does to a stopped group that nobody will continue: a hang-up.
            if self.hung_up {
                return warn!("the service waits for the terminal, and there is no shell that could give it");
            }
            self.hung_up = true;
            self.means.containment.signal_group(Signal::HUP);
        }
        self.means.containment.signal_group(Signal::CONT);
    }

    fn resume(&mut self) {
        if std::mem::take(&mut self.suspending) > 0
            && let Some(guard) = &self.means.guarded
        {
            // This SIGCONT went through the guard before our request came to it.
            guard.resume();
        }
        if let Some(main) = self.main {
            self.means.terminal.lend(main);
        }
        self.means.containment.signal_group(Signal::CONT);
    }

    /// The descriptor that tells of ends beside that of deaths, once they matter: of the cgroup, or of those that are swept.
    pub fn more_ends(&mut self) -> Option<(RawFd, Interest)> {
        match &self.sweep {
            Some(sweep) => Some((sweep.descriptor(), Interest::READABLE)),
            None if self.service_ended.is_none() || self.progress.is_some() => None,
            None => self.means.containment.events().map(|events| (events, Interest::PRIORITY)),
        }
    }

    /// Gives back what is needed after a sweep, and tells who was left.
    pub fn finish_sweep(self) -> AfterSweep {
        let Means { guarded, mut named, record, .. } = self.means;
        let leftovers = self.sweep.map(Sweep::into_leftovers).unwrap_or_default();
        if let Some(named) = named.as_mut().filter(|_| leftovers.survivors().next().is_some()) {
            named.survived(&record.invocation, leftovers.survivors());
        }
        AfterSweep { guarded, named, leftovers, is_blind: self.is_blind }
    }

    /// Gives the terminal back and tells what became of the run.
    pub fn finish(self) -> Outcome {
        let Means { terminal, containment, record, named, .. } = self.means;
        terminal.take_back(record.pid);
        if matches!(self.verdict.and_then(|verdict| verdict.exit), Some(Exit::Signal { .. })) {
            terminal.put_modes_back();
        }
        let leftovers = containment.into_leftovers();
        match named {
            Some(mut named) if self.verdict.is_some_and(|verdict| verdict.survivors) => {
                named.survived(&record.invocation, leftovers.survivors());
            }
            Some(mut named) => named.ended(),
            None => {}
        }
        Outcome { record, leftovers, start_error: self.start_error, service_ended: self.service_ended }
    }
}
