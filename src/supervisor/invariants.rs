//! What holds in every world, each with its name. They are checked after every event, against what was seen before it.

use super::exit::Exit;
use super::{Action, Event, Policy, Target, Time, Verdict};
use crate::signal::Signal;
use std::time::Duration;

/// One event and what came of it.
pub(super) struct Step<'s> {
    pub(super) now: Time,
    pub(super) event: &'s Event,
    pub(super) actions: &'s [Action],
    /// The deadline before the event.
    pub(super) due: Option<Time>,
    /// The deadline after it.
    pub(super) next: Option<Time>,
    /// The truth about the tree.
    pub(super) nobody_left: bool,
    /// How long after a deadline, at the most, somebody looks at the clock.
    pub(super) lateness: Duration,
}

/// What was seen so far.
pub(super) struct Past {
    policy: Policy,
    started_at: Option<Time>,
    executed: bool,
    exit: Option<Exit>,
    /// The first request before the end of the main process.
    stop: Option<Signal>,
    /// The first request at any time.
    asked_at: Option<Time>,
    timed_out: bool,
    /// The request or the time-out.
    stopping_since: Option<Time>,
    main_killed_at: Option<Time>,
    /// The main process gone, or given up.
    emptying_since: Option<Time>,
    last_look: Option<Time>,
    killing_since: Option<Time>,
    /// The last time that killing got on.
    last_death: Option<Time>,
    impatient: bool,
    suspend_asked: bool,
    guard_lost: bool,
    ended: bool,
}

const HALF_A_SECOND: Duration = Duration::from_millis(500);

type Invariant = (&'static str, fn(&Past, &Step<'_>) -> bool);

const INVARIANTS: [Invariant; 26] = [
    ("the main process is made once, at the start, alone", |past, step| {
        let first = past.started_at.is_none() && *step.event == Event::Start;
        if first { step.actions == [Action::Spawn] } else { !step.actions.contains(&Action::Spawn) }
    }),
    ("nothing is done before the start or after the end", |past, step| {
        let over = past.ended || past.started_at.is_none() && *step.event != Event::Start;
        !over || step.actions.is_empty() && step.next.is_none()
    }),
    ("an end without survivors comes straight on the proof, and it is true", |_, step| {
        step.verdict().is_none_or(|end| end.survivors || *step.event == Event::TreeEmpty && step.nobody_left)
    }),
    ("the proof is the end of a run that is on its last way, at once", |past, step| {
        let proven = *step.event == Event::TreeEmpty && past.is_emptying();
        !proven || step.actions.len() == 1 && step.verdict().is_some()
    }),
    ("an end with survivors comes straight on their names, and never else", |past, step| {
        let told = *step.event == Event::SurvivorsNamed && past.killing_since.is_some() && !past.ended;
        told == step.verdict().is_some_and(|end| end.survivors)
    }),
    ("survivors are named after the kill timeout without a death, or many times over", |past, step| {
        let over = past.killing_since.is_some() && past.patience_ends(step) <= step.now;
        let names = step.actions == [Action::NameSurvivors];
        if *step.event == Event::Tick { names == (over && !past.ended) } else { !names || over }
    }),
    ("the verdict tells what happened", |past, step| {
        step.verdict().is_none_or(|end| Verdict { survivors: end.survivors, ..past.verdict() } == end)
    }),
    ("SIGKILL of the main process waits for the stop timeout and comes once", |past, step| {
        let time = past.stopping_since.map(|since| since.after(past.policy.stop_timeout));
        !step.kills_main()
            || *step.event == Event::Tick
                && past.emptying_since.is_none()
                && past.main_killed_at.is_none()
                && time.is_some_and(|time| time <= step.now)
    }),
    ("the first request is a stop, by the right signal, and lets the service go on", |past, step| {
        let Some((received, wanted)) = step.request().filter(|_| past.is_wanted_up()) else { return true };
        let as_itself = received != Signal::TERM || wanted != Signal::TERM;
        past.is_stop(step, if as_itself { wanted } else { past.policy.stop_signal })
    }),
    ("a run over its time is stopped, and no other", |past, step| {
        let over = past.is_over_time(step);
        !over && (*step.event != Event::Tick || !past.is_wanted_up())
            || past.is_stop(step, past.policy.stop_signal) == over
    }),
    ("a burst is one request, and an early one in the end is none", |past, step| {
        past.is_wanted_up() || step.request().is_none() || past.is_second(step) || step.actions.is_empty()
    }),
    ("a second request, or the loss of the guard, kills the tree at once", |past, step| {
        let kills = past.is_hurried(step) && past.killing_since.is_none();
        !kills || matches!(step.actions, [Action::KillTree(_)])
    }),
    ("without impatience leftovers have their time before they are killed", |past, step| {
        let since = past.emptying_since.or(past.is_given_up(step).then_some(step.now));
        let time = since.map(|since| since.after(past.policy.leftover_timeout));
        !step.kills_tree() || past.impatient || past.is_hurried(step) || time.is_some_and(|time| time <= step.now)
    }),
    ("without impatience leftovers are told before they are killed", |past, step| {
        let no_time = past.policy.leftover_timeout == Duration::ZERO;
        !step.kills_tree() || past.impatient || past.is_hurried(step) || no_time || past.last_look.is_some()
            // A clock that nobody looked at in time.
            || past.killing_since.is_some() || step.due.is_some_and(|due| due < step.now)
    }),
    ("leftovers are told only when the main process is gone or given up", |past, step| {
        step.look().is_none() || past.is_emptying() || past.is_given_up(step)
    }),
    ("who is being killed is not asked", |past, step| step.look().is_none() || past.killing_since.is_none()),
    ("two looks for leftovers are no closer than the shortest pause", |past, step| {
        let pause = past.last_look.map(|last| last.until(step.now));
        step.look().is_none() || pause.is_none_or(|pause| pause >= Duration::from_millis(5))
    }),
    ("a look breaks off at the end of its rung", |past, step| {
        let told = past.emptying_since.unwrap_or(step.now).after(past.policy.leftover_timeout);
        step.actions.iter().all(|action| match action {
            Action::TerminateLeftovers(until) => *until == told,
            Action::KillTree(until) => *until == past.all_patience_ends(step),
            _ => true,
        })
    }),
    ("what has just ended is looked after by the closing event", |past, step| {
        let closed = *step.event == Event::TreeChanged && past.is_emptying() && past.last_look.is_none();
        !closed || !step.actions.is_empty()
    }),
    ("nothing but the time of the run wakes a running service", |past, step| {
        let goes_down =
            step.is_an_end() || step.request().is_some() || past.is_over_time(step) || past.is_hurried(step);
        let stays_up = past.is_wanted_up() && !goes_down;
        !stays_up || step.next == past.run_ends()
    }),
    ("on the way out there is a deadline, and a look at least every half second", |past, step| {
        let way_out = past.stopping_since.is_some() || past.is_emptying();
        let at_most = if past.is_emptying() { HALF_A_SECOND } else { past.longest_rung().max(HALF_A_SECOND) };
        !way_out
            || past.ended
            || step.verdict().is_some()
            || step.next.is_some_and(|next| next <= step.now.after(at_most))
    }),
    ("a tick at the deadline gets us on, and an early one does nothing", |_, step| {
        let due = step.due.is_some_and(|due| due <= step.now);
        match (step.event, due) {
            (Event::Tick, true) => !step.actions.is_empty(),
            (Event::Tick, false) => step.actions.is_empty() && step.next == step.due,
            _ => true,
        }
    }),
    ("we stop only when the service stopped, with job control or because we were asked to", |past, step| {
        let stopped = *step.event == Event::MainStopped && past.is_wanted_up();
        let suspends = stopped && (past.policy.job_control || past.suspend_asked);
        if suspends { step.actions == [Action::Suspend] } else { !step.actions.contains(&Action::Suspend) }
    }),
    ("a signal that asks for nothing is passed on, once, while there is somebody to get it", |past, step| {
        let Event::Signal { wanted, .. } = *step.event else { return true };
        step.request().is_some() || step.actions == past.passed_on(wanted)
    }),
    ("signals are sent on a signal or a deadline only", |_, step| {
        let sends = step.actions.iter().any(|action| matches!(action, Action::Signal(..) | Action::Resume));
        !sends || matches!(step.event, Event::Signal { .. } | Event::Tick)
    }),
    ("the end comes in time", |past, step| {
        let Policy { stop_timeout, kill_timeout, leftover_timeout, .. } = past.policy;
        let patience = stop_timeout + kill_timeout + leftover_timeout + 12 * kill_timeout + 5 * step.lateness;
        let since = past.stopping_since.or(past.emptying_since);
        past.ended || since.is_none_or(|since| step.now <= since.after(patience))
    }),
];

impl Step<'_> {
    fn verdict(&self) -> Option<Verdict> {
        self.actions.iter().find_map(|action| if let Action::End(verdict) = action { Some(*verdict) } else { None })
    }

    fn request(&self) -> Option<(Signal, Signal)> {
        let Event::Signal { received, wanted } = *self.event else { return None };
        let asks = [received, wanted].iter().any(|signal| [Signal::TERM, Signal::INT, Signal::QUIT].contains(signal));
        asks.then_some((received, wanted))
    }

    fn kills_main(&self) -> bool {
        self.actions.contains(&Action::Signal(Target::Main, Signal::KILL))
    }

    fn kills_tree(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, Action::KillTree(_)))
    }

    fn look(&self) -> Option<Time> {
        self.actions.iter().any(|action| matches!(action, Action::TerminateLeftovers(_))).then_some(self.now)
    }

    /// The main process is no more, or never was.
    fn is_an_end(&self) -> bool {
        matches!(self.event, Event::Exited(_) | Event::StartFailed)
    }
}

impl Past {
    pub(super) fn new(policy: Policy) -> Past {
        Past {
            policy,
            started_at: None,
            executed: false,
            exit: None,
            stop: None,
            asked_at: None,
            timed_out: false,
            stopping_since: None,
            main_killed_at: None,
            emptying_since: None,
            last_look: None,
            killing_since: None,
            last_death: None,
            impatient: false,
            suspend_asked: false,
            guard_lost: false,
            ended: false,
        }
    }

    /// Says which invariant the step broke, or takes it in.
    pub(super) fn take(&mut self, step: &Step<'_>) -> Result<(), &'static str> {
        for (name, holds) in INVARIANTS {
            if !holds(self, step) {
                return Err(name);
            }
        }
        if self.started_at.is_some() && !self.ended {
            self.note(step);
        }
        if *step.event == Event::Start {
            self.started_at.get_or_insert(step.now);
        }
        Ok(())
    }

    fn note(&mut self, step: &Step<'_>) {
        let was_up = self.is_wanted_up();
        if self.is_over_time(step) {
            self.timed_out = true;
            self.stopping_since = Some(step.now);
        }
        if let Some((received, _)) = step.request() {
            self.impatient |= self.is_second(step);
            self.asked_at.get_or_insert(step.now);
            if !self.is_emptying() {
                self.stop.get_or_insert(received);
                self.stopping_since.get_or_insert(step.now);
            }
        }
        self.impatient |= self.is_hurried(step);
        self.guard_lost |= *step.event == Event::GuardLost;
        if step.is_an_end() || self.is_given_up(step) || step.kills_tree() {
            self.emptying_since.get_or_insert(step.now);
        }
        if *step.event == Event::TreeChanged && self.killing_since.is_some() {
            self.last_death = Some(step.now);
        }
        if step.kills_tree() {
            self.killing_since.get_or_insert(step.now);
        }
        match *step.event {
            Event::Started => self.executed = true,
            Event::Exited(exit) => _ = self.exit.get_or_insert(exit),
            Event::Signal { wanted: Signal::CONT, .. } | Event::MainStopped if was_up => self.suspend_asked = false,
            Event::Signal { wanted, .. } if was_up && wanted.stops_a_process() => self.suspend_asked = true,
            _ => {}
        }
        self.main_killed_at = self.main_killed_at.or(step.kills_main().then_some(step.now));
        self.last_look = step.look().or(self.last_look);
        self.ended = step.verdict().is_some();
    }

    fn is_wanted_up(&self) -> bool {
        self.started_at.is_some() && self.stopping_since.is_none() && self.emptying_since.is_none()
    }

    fn is_emptying(&self) -> bool {
        self.emptying_since.is_some() && !self.ended
    }

    fn run_ends(&self) -> Option<Time> {
        Some(self.started_at?.after(self.policy.run_timeout?))
    }

    fn is_over_time(&self, step: &Step<'_>) -> bool {
        let over = self.run_ends().is_some_and(|ends| ends <= step.now);
        over && self.is_wanted_up() && *step.event == Event::Tick
    }

    fn is_second(&self, step: &Step<'_>) -> bool {
        let second = self.asked_at.is_some_and(|first| first.until(step.now) >= Duration::from_secs(1));
        second && step.request().is_some() && !self.ended
    }

    /// There is no time to ask.
    fn is_hurried(&self, step: &Step<'_>) -> bool {
        let lost = *step.event == Event::GuardLost && self.started_at.is_some() && !self.ended;
        lost || self.is_second(step)
    }

    /// Until when killing goes on.
    fn patience_ends(&self, step: &Step<'_>) -> Time {
        let death = (*step.event == Event::TreeChanged).then_some(step.now).or(self.last_death).or(self.killing_since);
        death.unwrap_or(step.now).after(self.policy.kill_timeout).min(self.all_patience_ends(step))
    }

    /// Until when killing that gets on goes on.
    fn all_patience_ends(&self, step: &Step<'_>) -> Time {
        self.killing_since.unwrap_or(step.now).after(12 * self.policy.kill_timeout)
    }

    /// SIGKILL had its time with the main process.
    fn is_given_up(&self, step: &Step<'_>) -> bool {
        let time = self.main_killed_at.map(|at| at.after(self.policy.kill_timeout));
        *step.event == Event::Tick && self.emptying_since.is_none() && time.is_some_and(|time| time <= step.now)
    }

    fn is_stop(&self, step: &Step<'_>, signal: Signal) -> bool {
        let target = self.policy.stop_target;
        step.actions == [Action::Signal(target, signal), Action::Signal(target, Signal::CONT)]
    }

    fn longest_rung(&self) -> Duration {
        self.policy.stop_timeout.max(self.policy.kill_timeout)
    }

    fn passed_on(&self, wanted: Signal) -> Vec<Action> {
        if self.started_at.is_none() || self.ended || self.is_emptying() {
            return vec![];
        }
        match wanted {
            Signal::CONT => vec![Action::Resume],
            stop if stop.stops_a_process() && !self.is_wanted_up() => vec![],
            stop if stop.stops_a_process() && self.policy.job_control => vec![Action::Signal(Target::Group, stop)],
            stop if stop.stops_a_process() => vec![Action::Signal(Target::Group, Signal::STOP)],
            other => vec![Action::Signal(Target::Main, other)],
        }
    }

    fn verdict(&self) -> Verdict {
        Verdict {
            exit: self.exit,
            started: self.executed,
            stop: self.stop,
            timed_out: self.timed_out,
            guard_lost: self.guard_lost,
            survivors: false,
        }
    }
}
