//! What earlier invocations left, and the death of the guard.

use super::*;

#[test]
fn a_sweep_asks_then_kills_and_starts_nothing() {
    let mut script = Script(Supervisor::new(policy()));
    script.on(0, Sweep, [Action::TerminateLeftovers(at(2_000))]);
    script.on(2_000, Tick, [Action::KillTree(at(62_000))]);
    script.on(2_010, TreeEmpty, [End(Verdict::default())]);
}

#[test]
fn a_sweep_that_finds_nobody_is_over_at_once() {
    let mut script = Script(Supervisor::new(policy()));
    script.on(0, Sweep, [Action::TerminateLeftovers(at(2_000))]);
    script.on(0, TreeEmpty, [End(Verdict::default())]);
}

#[test]
fn survivors_of_a_sweep_are_named() {
    let mut script = Script(Supervisor::new(policy()));
    script.on(0, Sweep, [Action::TerminateLeftovers(at(2_000))]);
    script.on(2_000, Tick, [Action::KillTree(at(62_000))]);
    script.on(7_000, Tick, [NameSurvivors]).on(
        7_000,
        SurvivorsNamed,
        [End(Verdict { survivors: true, ..Verdict::default() })],
    );
}

#[test]
fn a_stop_during_the_sweep_is_in_its_verdict_and_a_second_one_kills() {
    let mut script = Script(Supervisor::new(policy()));
    script.on(0, Sweep, [Action::TerminateLeftovers(at(2_000))]);
    script.on(10, comes(Signal::TERM), []);
    script.on(1_500, comes(Signal::INT), [Action::KillTree(at(61_500))]);
    script.on(1_600, TreeEmpty, [End(Verdict { stop: Some(Signal::TERM), ..Verdict::default() })]);
}

#[test]
fn a_hang_up_during_the_sweep_is_a_stop_and_other_signals_are_not() {
    let mut script = Script(Supervisor::new(policy()));
    script.on(0, Sweep, [Action::TerminateLeftovers(at(2_000))]);
    script.on(10, comes(Signal::from_number(10).unwrap()), []);
    assert!(script.0.verdict.permits_a_start());
    script.on(20, comes(Signal::HUP), []);
    script.on(30, TreeEmpty, [End(Verdict { stop: Some(Signal::HUP), ..Verdict::default() })]);
    assert!(!script.0.verdict.permits_a_start());
}

#[test]
fn without_a_guard_nobody_is_asked() {
    let mut script = Script::up(policy());
    script.on(10, GuardLost, [Action::KillTree(at(60_010))]);
    script.on(20, Exited(DONE), []);
    script.on(20, TreeEmpty, [End(Verdict { guard_lost: true, ..RAN })]);
}
