//! The random world: a clock, a main process and others of its tree that do as they please, signals at any moment, and
//! hands that fail. Every action may have its effect at once, late, twice or never; every event may come late or twice.
//!
//! The world holds to the contract at the head of `mod.rs` and to nothing else. What must hold in all of them is in
//! `invariants.rs`. A failure prints its seed, which `PROPTEST_RNG_SEED` brings back; `PROPTEST_CASES` makes more.

use super::exit::Exit;
use super::invariants::{Past, Step};
use super::{Action, Event, Policy, Supervisor, Target, Time};
use crate::signal::Signal;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};
use std::collections::BTreeMap;
use std::time::Duration;

/// How late somebody looks at the clock, at the most.
const LATENESS: u64 = 200;

/// Events that one world may take. The longest way has some hundred looks.
const MOST_EVENTS: usize = 2_000;

/// Due ticks at one moment: each rung may have no time at all.
const MOST_TICKS_AT_ONCE: usize = 5;

/// What a world is made of. It shrinks towards a service that runs and heeds.
#[derive(Clone, Debug)]
struct Plan {
    policy: Policy,
    start: Start,
    main: Nature,
    others: Vec<(u64, Nature)>,
    signals: Vec<(u64, (Signal, Signal))>,
    stops_of_main: Vec<u64>,
    guard_dies: Option<u64>,
    dice: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum Start {
    Executes(u64),
    Hangs,
    CannotBeExecuted(u64),
    CannotBeMade,
}

/// One process. Times are milliseconds, nothing is never.
#[derive(Clone, Copy, Debug)]
struct Nature {
    /// From its birth to its end by itself.
    lives: Option<u64>,
    /// From a request to its end.
    heeds: Option<u64>,
    /// From SIGKILL to its end.
    dies: Option<u64>,
}

#[test]
fn a_random_world_holds_every_invariant() {
    let fixed = match Config::default().rng_seed {
        RngSeed::Fixed(seed) => vec![seed],
        RngSeed::Random => vec![1, std::process::id().into()],
    };
    for seed in fixed {
        let config = Config { rng_seed: RngSeed::Fixed(seed), failure_persistence: None, ..Config::default() };
        let cases = config.cases.max(1_000);
        let outcome = TestRunner::new(Config { cases, ..config }).run(&plan(), |plan| World::new(plan).run());
        if let Err(TestError::Fail(why, plan)) = outcome {
            panic!("PROPTEST_RNG_SEED={seed}: {why}\n{plan:#?}");
        }
    }
}

fn plan() -> impl Strategy<Value = Plan> {
    let start = prop_oneof![
        8 => (0..20_u64).prop_map(Start::Executes),
        1 => (0..9_000_u64).prop_map(Start::Executes),
        1 => Just(Start::Hangs),
        1 => (0..20_u64).prop_map(Start::CannotBeExecuted),
        1 => Just(Start::CannotBeMade),
    ];
    let received = || select(vec![Signal::TERM, Signal::INT, Signal::QUIT, Signal::HUP, Signal::TSTP, Signal::CONT]);
    let signal = prop_oneof![
        8 => received().prop_map(|signal| (signal, signal)),
        1 => (received(), received()),
    ];
    let parts = (
        policy(),
        start,
        nature(),
        vec((moment(), nature()), 0..5),
        vec((moment(), signal), 0..6),
        vec(moment(), 0..3),
        prop_oneof![4 => Just(None), 1 => moment().prop_map(Some)],
        vec(any::<u8>(), 0..64),
    );
    parts.prop_map(|(policy, start, main, others, signals, stops_of_main, guard_dies, dice)| Plan {
        policy,
        start,
        main,
        others,
        signals,
        stops_of_main,
        guard_dies,
        dice,
    })
}

fn policy() -> impl Strategy<Value = Policy> {
    let time = || {
        prop_oneof![
            4 => (100..9_000_u64).prop_map(Duration::from_millis),
            1 => (0..100_u64).prop_map(Duration::from_millis),
            1 => Just(Duration::ZERO),
        ]
    };
    let stop_signal = select(vec![Signal::TERM, Signal::HUP, Signal::QUIT]);
    let target = select(vec![Target::Main, Target::Group, Target::Tree]);
    let parts = (stop_signal, target, time(), time(), time(), option::of(time()), any::<bool>());
    parts.prop_map(
        |(stop_signal, stop_target, stop_timeout, leftover_timeout, kill_timeout, run_timeout, job_control)| Policy {
            stop_signal,
            stop_target,
            stop_timeout,
            leftover_timeout,
            kill_timeout,
            run_timeout,
            job_control,
        },
    )
}

fn nature() -> impl Strategy<Value = Nature> {
    let quick = || (0..30_u64).prop_map(Some);
    let slow = || (0..9_000_u64).prop_map(Some);
    (
        prop_oneof![3 => Just(None), 2 => slow(), 1 => quick()],
        prop_oneof![3 => quick(), 2 => slow(), 2 => Just(None)],
        prop_oneof![8 => quick(), 1 => slow(), 1 => Just(None)],
    )
        .prop_map(|(lives, heeds, dies)| Nature { lives, heeds, dies })
}

/// Close together at the beginning, or anywhere.
fn moment() -> impl Strategy<Value = u64> {
    prop_oneof![0..40_u64, 0..15_000_u64]
}

/// What happens at a moment that is set.
#[derive(Clone, Copy, Debug)]
enum Occurrence {
    Executed,
    CannotBeExecuted,
    Birth(Nature),
    Death(usize, Exit),
    MainStops,
    GuardDies,
    Signal(Signal, Signal),
    /// Once more.
    Again(fn(Exit) -> Event),
}

struct Process {
    nature: Nature,
    alive: bool,
    told: bool,
}

struct World {
    now: Time,
    supervisor: Supervisor,
    past: Past,
    plan: Plan,
    rolled: usize,
    /// In the order of time, then of entry.
    to_come: BTreeMap<(Time, usize), Occurrence>,
    set_so_far: usize,
    /// The main process is the first.
    processes: Vec<Process>,
    /// The failure of the start makes the child that tried nobody's main process.
    start_failed: bool,
    ended: bool,
    history: Vec<String>,
}

impl World {
    fn new(plan: Plan) -> World {
        let mut world = World {
            now: Time::default(),
            supervisor: Supervisor::new(plan.policy),
            past: Past::new(plan.policy),
            plan: plan.clone(),
            rolled: 0,
            to_come: BTreeMap::new(),
            set_so_far: 0,
            processes: vec![],
            start_failed: false,
            ended: false,
            history: vec![],
        };
        plan.others.iter().for_each(|(at, nature)| world.set(*at, Occurrence::Birth(*nature)));
        plan.signals.iter().for_each(|(at, (received, wanted))| world.set(*at, Occurrence::Signal(*received, *wanted)));
        plan.stops_of_main.iter().for_each(|at| world.set(*at, Occurrence::MainStops));
        plan.guard_dies.iter().for_each(|at| world.set(*at, Occurrence::GuardDies));
        world
    }

    fn run(mut self) -> Result<(), TestCaseError> {
        self.hand_in(Event::Tick)?;
        self.hand_in(Event::Start)?;
        let mut ticks_at_once = 0;
        let mut patient_for_ever = true;
        while !self.ended {
            let due = self.supervisor.deadline().map(|due| due.after(self.delay()));
            let first = self.to_come.keys().next().map(|(at, _)| *at);
            let Some(next) = due.into_iter().chain(first).min() else {
                self.holds(patient_for_ever, "a stop that was asked for goes on by itself")?;
                patient_for_ever = false;
                self.set(3_600_000, Occurrence::Signal(Signal::TERM, Signal::TERM));
                continue;
            };
            ticks_at_once = if next > self.now { 0 } else { ticks_at_once };
            self.now = next.max(self.now);
            self.batch()?;
            if self.supervisor.deadline().is_some_and(|due| due <= self.now) {
                ticks_at_once += 1;
                self.hand_in(Event::Tick)?;
            }
            self.holds(ticks_at_once <= MOST_TICKS_AT_ONCE, "the loop is not busy")?;
            self.holds(self.history.len() < MOST_EVENTS, "the world ends")?;
        }
        self.after_the_end()
    }

    fn after_the_end(&mut self) -> Result<(), TestCaseError> {
        self.now = self.now.after(Duration::from_secs(2));
        let term = Event::Signal { received: Signal::TERM, wanted: Signal::TERM };
        let exited = Event::Exited(Exit::Code(0));
        let all = [Event::Started, Event::StartFailed, exited, Event::MainStopped, term.clone(), term];
        all.into_iter()
            .chain([Event::TreeChanged, Event::TreeEmpty, Event::SurvivorsNamed, Event::GuardLost, Event::Tick])
            .try_for_each(|event| self.hand_in(event))
    }

    /// All that has happened up to now, in the order of the event loop, and the word on who is left.
    fn batch(&mut self) -> Result<(), TestCaseError> {
        let mut events: [Vec<Event>; 3] = Default::default();
        let mut changed = self.start_failed;
        while let Some(next) = self.to_come.first_entry().filter(|next| next.key().0 <= self.now) {
            match next.remove() {
                Occurrence::Executed => {
                    events[0].push(Event::Started);
                    self.twice(|_| Event::Started);
                }
                Occurrence::CannotBeExecuted => {
                    events[0].push(Event::StartFailed);
                    self.start_failed = true;
                    changed = true;
                    self.dies(0, Some(1), Exit::Code(1));
                }
                Occurrence::Signal(received, wanted) => events[1].push(Event::Signal { received, wanted }),
                Occurrence::Birth(nature) if self.somebody_left() => self.is_born(nature),
                Occurrence::Death(index, exit) if self.processes[index].alive => {
                    self.processes[index].alive = false;
                    changed = true;
                    if index == 0 && !self.start_failed {
                        events[2].push(Event::Exited(exit));
                        self.twice(|_| Event::Exited(Exit::Code(99)));
                    }
                }
                Occurrence::MainStops if self.main_is_alive() => events[2].push(Event::MainStopped),
                Occurrence::GuardDies => events[0].push(Event::GuardLost),
                Occurrence::Again(event) => events[2].push(event(Exit::Code(99))),
                Occurrence::Birth(_) | Occurrence::Death(..) | Occurrence::MainStops => {}
            }
        }
        for event in events.into_iter().flatten() {
            self.hand_in(event)?;
        }
        let main_is_gone = self.start_failed || !self.main_is_alive();
        if main_is_gone && !self.somebody_left() {
            return self.hand_in(Event::TreeEmpty);
        }
        if changed || self.roll(6) { self.hand_in(Event::TreeChanged) } else { Ok(()) }
    }

    fn hand_in(&mut self, event: Event) -> Result<(), TestCaseError> {
        let due = self.supervisor.deadline();
        let actions = self.supervisor.handle(self.now, event.clone());
        self.history.push(format!("{:?} {event:?} → {actions:?}", self.now.0));
        let step = Step {
            now: self.now,
            event: &event,
            actions: &actions,
            due,
            next: self.supervisor.deadline(),
            nobody_left: !self.somebody_left(),
            lateness: Duration::from_millis(LATENESS),
        };
        let taken = self.past.take(&step);
        self.holds(taken.is_ok(), taken.err().unwrap_or_default())?;
        for action in actions {
            if let Some(failure) = self.perform(action) {
                self.hand_in(failure)?;
            }
        }
        Ok(())
    }

    fn perform(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Spawn => return self.spawn(),
            Action::Signal(target, signal) => self.send(target, signal),
            Action::Suspend => {
                // A shell brings us back some time later.
                self.now = self.now.after(25 * self.delay());
                self.set(0, Occurrence::Signal(Signal::CONT, Signal::CONT));
            }
            Action::Resume => {}
            Action::NameSurvivors => return self.somebody_left().then_some(Event::SurvivorsNamed),
            Action::TerminateLeftovers(_) => {
                for index in 1..self.processes.len() {
                    if !self.processes[index].told && !self.roll(4) {
                        self.processes[index].told = true;
                        self.dies(index, self.processes[index].nature.heeds, Exit::Code(0));
                    }
                }
            }
            Action::KillTree(_) => (0..self.processes.len()).for_each(|index| self.kill(index)),
            Action::End(_) => self.ended = true,
        }
        None
    }

    fn spawn(&mut self) -> Option<Event> {
        match self.plan.start {
            Start::CannotBeMade => {
                self.start_failed = true;
                return Some(Event::StartFailed);
            }
            Start::Executes(after) => self.set(after, Occurrence::Executed),
            Start::CannotBeExecuted(after) => self.set(after, Occurrence::CannotBeExecuted),
            Start::Hangs => {}
        }
        self.is_born(self.plan.main);
        None
    }

    fn send(&mut self, target: Target, signal: Signal) {
        if self.roll(5) {
            return;
        }
        let reached = if target == Target::Main { 1 } else { self.processes.len() };
        match signal {
            Signal::KILL => (0..reached).for_each(|index| self.kill(index)),
            Signal::CONT => {}
            _ if signal.stops_a_process() => self.set(0, Occurrence::MainStops),
            _ => (0..reached).for_each(|index| self.dies(index, self.processes[index].nature.heeds, Exit::Code(0))),
        }
    }

    fn kill(&mut self, index: usize) {
        let missed = self.roll(5);
        let killed = Exit::Signal { signal: Signal::KILL, core_dumped: false };
        self.dies(index, self.processes[index].nature.dies.filter(|_| !missed), killed);
    }

    fn is_born(&mut self, nature: Nature) {
        self.processes.push(Process { nature, alive: true, told: false });
        self.dies(self.processes.len() - 1, nature.lives, Exit::Code(7));
    }

    fn dies(&mut self, index: usize, after: Option<u64>, exit: Exit) {
        if let Some(after) = after
            && self.processes[index].alive
        {
            self.set(after, Occurrence::Death(index, exit));
        }
    }

    fn twice(&mut self, event: fn(Exit) -> Event) {
        if self.roll(4) {
            self.set(0, Occurrence::Again(event));
        }
    }

    fn set(&mut self, after: u64, occurrence: Occurrence) {
        let at = self.now.after(Duration::from_millis(after));
        self.set_so_far += 1;
        self.to_come.insert((at, self.set_so_far), occurrence);
    }

    fn somebody_left(&self) -> bool {
        self.processes.iter().any(|process| process.alive)
    }

    fn main_is_alive(&self) -> bool {
        self.processes.first().is_some_and(|main| main.alive)
    }

    /// One in so many times, as the dice have it. Without dice nothing is odd.
    fn roll(&mut self, one_in: u8) -> bool {
        self.die() % one_in == one_in - 1
    }

    fn delay(&mut self) -> Duration {
        let late = self.roll(4);
        Duration::from_millis(if late { u64::from(self.die()) % LATENESS } else { 0 })
    }

    fn die(&mut self) -> u8 {
        self.rolled += 1;
        let count = self.plan.dice.len();
        if count == 0 { 0 } else { self.plan.dice[self.rolled % count] }
    }

    fn holds(&self, it: bool, claim: &str) -> Result<(), TestCaseError> {
        if it {
            return Ok(());
        }
        Err(TestCaseError::fail(format!("broken: {claim}\n{}", self.history.join("\n"))))
    }
}
