//! Event scripts: what is claimed of the decisions, one claim a test. `table.rs` has every pair of state and event, the
//! random world the long ways.

mod emptying;
mod job_control;
mod start;
mod stop;
mod sweep;
mod table;

use super::exit::Exit;
use super::{Action, Event, Policy, Supervisor, Target, Time, Verdict};
use crate::signal::Signal;
use Action::{End, NameSurvivors, Resume, Spawn, Suspend};
use Event::{
    Exited, GuardLost, MainStopped, Start, StartFailed, Started, SurvivorsNamed, Sweep, Tick, TreeChanged, TreeEmpty,
};
use std::time::Duration;

/// The stop signal of the scripts, which no service would take for another.
const STOP_SIGNAL: Signal = Signal::HUP;

/// How the service of most scripts ends.
const DONE: Exit = Exit::Code(3);

/// The verdict on a service that ran and was killed by nobody.
const RAN: Verdict =
    Verdict { exit: Some(DONE), started: true, stop: None, timed_out: false, guard_lost: false, survivors: false };

fn policy() -> Policy {
    Policy {
        stop_signal: STOP_SIGNAL,
        stop_target: Target::Main,
        stop_timeout: Duration::from_secs(7),
        leftover_timeout: Duration::from_secs(2),
        kill_timeout: Duration::from_secs(5),
        run_timeout: None,
        job_control: false,
    }
}

fn with_run_timeout() -> Policy {
    Policy { run_timeout: Some(Duration::from_secs(60)), ..policy() }
}

fn with_job_control() -> Policy {
    Policy { job_control: true, ..policy() }
}

/// One service in the hands of a test. Times are milliseconds since the start.
struct Script(Supervisor);

impl Script {
    fn starting(policy: Policy) -> Script {
        let mut script = Script(Supervisor::new(policy));
        script.on(0, Start, [Spawn]);
        script
    }

    fn up(policy: Policy) -> Script {
        let mut script = Script::starting(policy);
        script.on(0, Started, []);
        script
    }

    /// At 0 ms the main process ended and left something that has been told.
    fn emptying() -> Script {
        let mut script = Script::up(policy());
        script.on(0, Exited(DONE), []).on(0, TreeChanged, [look_until(2_000)]);
        script
    }

    #[track_caller]
    fn on<const N: usize>(&mut self, ms: u64, event: Event, expected: [Action; N]) -> &mut Script {
        let told = format!("{event:?} at {ms} ms");
        assert_eq!(self.0.handle(at(ms), event), expected, "{told}");
        self
    }

    #[track_caller]
    fn sleeps_until(&mut self, ms: u64) -> &mut Script {
        assert_eq!(self.0.deadline(), Some(at(ms)));
        self
    }

    #[track_caller]
    fn sleeps(&mut self) -> &mut Script {
        assert_eq!(self.0.deadline(), None);
        self
    }
}

fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

fn comes(signal: Signal) -> Event {
    mapped(signal, signal)
}

fn mapped(received: Signal, wanted: Signal) -> Event {
    Event::Signal { received, wanted }
}

fn main_gets(signal: Signal) -> Action {
    Action::Signal(Target::Main, signal)
}

fn group_gets(signal: Signal) -> Action {
    Action::Signal(Target::Group, signal)
}

fn stop_by(signal: Signal) -> [Action; 2] {
    [main_gets(signal), main_gets(Signal::CONT)]
}

fn look_until(ms: u64) -> Action {
    Action::TerminateLeftovers(at(ms))
}

/// The kill that began at this time. It breaks off when twelve kill timeouts have passed.
fn kill_from(ms: u64) -> Action {
    Action::KillTree(at(ms + 60_000))
}

fn every_signal() -> impl Iterator<Item = Signal> {
    (1..).map_while(Signal::from_number)
}

#[test]
fn a_time_that_cannot_be_counted_never_comes() {
    let endless = Duration::MAX;
    let patient = Policy { stop_timeout: endless, run_timeout: Some(endless), ..policy() };
    let mut script = Script(Supervisor::new(patient));
    script.on(5, Start, [Spawn]).on(6, Tick, []).on(7, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(8, Tick, []);
    assert_eq!(script.0.deadline(), Some(Time(endless)));
}

#[test]
fn what_has_passed_is_not_waited_for() {
    assert_eq!(at(5).until(at(7)), Duration::from_millis(2));
    assert_eq!(at(7).until(at(5)), Duration::ZERO);
}
