//! Actions of the core carried out as system calls. A failure becomes an event; nothing here decides.

use crate::containment::lineage::Lineage;
use crate::process::reap::{Change, Left, reap};
use crate::process::signals::{Inherited, Received};
use crate::process::spawn::{Plan, Progress, StartError, spawn};
use crate::process::terminal::Terminal;
use crate::process::{Pid, descriptors};
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use crate::supervisor::{Action, Event, Target, Time, Verdict};
use std::collections::BTreeMap;
use std::os::fd::RawFd;
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

/// The hands of the core, and what they hold.
#[derive(Debug)]
pub struct Effects {
    clock: Clock,
    inherited: Inherited,
    terminal: Terminal,
    lineage: Lineage,
    signal_map: BTreeMap<Signal, Signal>,
    /// Taken by the start.
    plan: Option<Plan>,
    /// The start, while it goes on.
    progress: Option<Progress>,
    /// Descriptors that outlive the start.
    kept: Vec<RawFd>,
    main: Option<Pid>,
    /// What stopped the main process last.
    stopped_by: Signal,
    /// Whether the service was told that no terminal will come.
    hung_up: bool,
    outcome: Outcome,
}

/// What is known when all is over.
#[derive(Debug, Default)]
pub struct Outcome {
    /// How it ended; there once the core said so.
    pub verdict: Option<Verdict>,
    /// The number that the main process had.
    pub pid: Option<Pid>,
    /// Why there was no service.
    pub start_error: Option<StartError>,
    /// When the main process ended.
    pub service_ended: Option<Time>,
}

impl Effects {
    /// Hands that hold all a run needs.
    pub fn new(
        clock: Clock,
        inherited: Inherited,
        terminal: Terminal,
        lineage: Lineage,
        plan: Plan,
        signal_map: BTreeMap<Signal, Signal>,
    ) -> Effects {
        let kept = terminal.descriptor().into_iter().collect();
        Effects {
            clock,
            inherited,
            terminal,
            lineage,
            signal_map,
            plan: Some(plan),
            progress: None,
            kept,
            main: None,
            stopped_by: Signal::STOP,
            hung_up: false,
            outcome: Outcome::default(),
        }
    }

    /// Adds a descriptor that must stay open.
    pub fn keep(&mut self, descriptor: RawFd) {
        self.kept.push(descriptor);
    }

    /// How it ended, once it has.
    pub fn verdict(&self) -> Option<Verdict> {
        self.outcome.verdict
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
            Action::TerminateLeftovers(until) => self.lineage.terminate_leftovers(self.clock.instant(until)),
            Action::KillTree(until) => self.lineage.kill_tree(self.clock.instant(until)),
            Action::NameSurvivors => self.lineage.name_survivors(),
            Action::End(verdict) => self.outcome.verdict = Some(verdict),
        }
        None
    }

    fn signal(&self, target: Target, signal: Signal) {
        let whom = match target {
            Target::Main => "the main process",
            Target::Group => "the service's group",
            Target::Tree => "the whole service",
        };
        debug!("{signal} to {whom}");
        match target {
            Target::Main => self.lineage.signal_main(signal),
            Target::Group => self.lineage.signal_group(signal),
            Target::Tree => self.lineage.signal_tree(signal),
        }
    }

    fn spawn(&mut self) -> Option<Event> {
        let plan = self.plan.take()?;
        let placement = self.terminal.placement();
        match spawn(plan, &self.inherited, placement) {
            Ok(spawned) => {
                self.lineage.started(spawned.pid, placement);
                self.main = Some(spawned.pid);
                self.outcome.pid = Some(spawned.pid);
                debug!("the service starts as pid {}", spawned.pid);
                self.progress = Some(spawned.progress);
                None
            }
            Err(error) => Some(self.start_failed(error)),
        }
    }

    fn start_failed(&mut self, error: StartError) -> Event {
        self.outcome.start_error = Some(error);
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
        self.kept.extend(self.lineage.descriptor());
        descriptors::raise_limit();
        descriptors::release(&self.kept);
        Some(event)
    }

    /// What the core is to know of a signal that came in.
    pub fn signal_event(&self, received: Received) -> Option<Event> {
        let Received { signal, by_kernel } = received;
        // Deaths are seen by waiting; a closed pipe by EPIPE.
        if [Signal::CHLD, Signal::PIPE].contains(&signal) {
            return None;
        }
        // A key that the service gets, too, without our help.
        if by_kernel && self.terminal.reaches_the_service(signal) {
            return None;
        }
        // A key that was meant for the service, and came to us while the terminal was on its way to it.
        if by_kernel && signal.asks_for_a_stop() && self.main.is_some() && self.terminal.has_job_control() {
            self.lineage.signal_group(signal);
            return None;
        }
        let wanted = self.signal_map.get(&signal).copied().unwrap_or(signal);
        Some(Event::Signal { received: signal, wanted })
    }

    /// Reaps what can be reaped, and closes the batch with what is left.
    pub fn reap(&mut self, events: &mut Vec<Event>) -> Left {
        let now = self.clock.now();
        let mut changed = false;
        let Effects { lineage, terminal, main, stopped_by, outcome, .. } = self;
        let left = reap(|change| match change {
            Change::Ended(pid, exit) => {
                changed = true;
                lineage.reaped(pid, exit);
                if *main == Some(pid) {
                    // Before the clean-up: an impatient key is for us now.
                    terminal.take_back(main.take());
                    outcome.service_ended = Some(now);
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
        if main.is_none() && self.lineage.is_empty(left) {
            events.push(Event::TreeEmpty);
        } else if changed {
            events.push(Event::TreeChanged);
        }
        left
    }

    fn suspend(&mut self) {
        self.terminal.take_back(self.main);
        if self.terminal.suspend(self.stopped_by) || !self.terminal.has_job_control() {
            return;
        }
        // Nobody could have continued us, so nobody will continue the service.
        let has_terminal = self.main.is_some_and(|main| self.terminal.lend_again(main));
        if !has_terminal && [Signal::TTIN, Signal::TTOU].contains(&self.stopped_by) {
            // It would stop again at once. What the kernel does to a stopped group that nobody will continue: a hang-up.
            if self.hung_up {
                return warn!("the service waits for the terminal, and there is no shell that could give it");
            }
            self.hung_up = true;
            self.lineage.signal_group(Signal::HUP);
        }
        self.lineage.signal_group(Signal::CONT);
    }

    fn resume(&mut self) {
        if let Some(main) = self.main {
            self.terminal.lend(main);
        }
        self.lineage.signal_group(Signal::CONT);
    }

    /// Gives the terminal back and tells what became of the run.
    pub fn finish(self) -> (Outcome, Lineage) {
        self.terminal.take_back(self.outcome.pid);
        if matches!(self.outcome.verdict.and_then(|verdict| verdict.exit), Some(Exit::Signal { .. })) {
            self.terminal.put_modes_back();
        }
        (self.outcome, self.lineage)
    }
}
