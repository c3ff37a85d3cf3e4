//! The start, the time of a run, and what a running service gets.

use super::*;

#[test]
fn a_service_that_cannot_be_started_ends_without_an_exit() {
    let verdict = Verdict { exit: None, started: false, ..RAN };
    Script::starting(policy()).on(1, StartFailed, []).on(1, TreeEmpty, [End(verdict)]);
}

#[test]
fn what_a_failed_start_left_is_ended() {
    Script::starting(policy()).on(1, StartFailed, []).on(1, TreeChanged, [look_until(2_001)]).sleeps_until(6);
}

#[test]
fn a_stop_while_starting_is_passed_on() {
    let verdict = Verdict { stop: Some(Signal::TERM), ..RAN };
    let mut script = Script::starting(policy());
    script.on(1, comes(Signal::TERM), stop_by(STOP_SIGNAL)).sleeps_until(7_001);
    script.on(2, Started, []).on(3, Exited(DONE), []).on(3, TreeEmpty, [End(verdict)]);
}

#[test]
fn a_stop_of_what_then_fails_to_start_ends() {
    let verdict = Verdict { exit: None, started: false, stop: Some(Signal::INT), ..RAN };
    let mut script = Script::starting(policy());
    script.on(1, comes(Signal::INT), stop_by(Signal::INT)).on(2, StartFailed, []).on(2, TreeEmpty, [End(verdict)]);
}

#[test]
fn a_start_that_is_told_after_the_death_was_one() {
    let mut script = Script::starting(policy());
    script.on(1, Exited(DONE), []).on(1, Started, []).on(1, TreeEmpty, [End(RAN)]);
}

#[test]
fn a_slow_start_wakes_nobody() {
    Script::starting(policy()).sleeps().on(3_600_000, Tick, []).sleeps();
}

// The time of a run.

#[test]
fn time_out_while_starting() {
    let mut script = Script::starting(with_run_timeout());
    script.sleeps_until(60_000).on(59_999, Tick, []).on(60_000, Tick, stop_by(STOP_SIGNAL)).sleeps_until(67_000);
}

#[test]
fn the_time_of_a_run_counts_from_its_start() {
    let verdict = Verdict { timed_out: true, ..RAN };
    let mut script = Script(Supervisor::new(with_run_timeout()));
    script.sleeps().on(500, Start, [Spawn]).on(900, Started, []).sleeps_until(60_500);
    script.on(60_499, Tick, []).on(60_500, Tick, stop_by(STOP_SIGNAL));
    script.on(60_600, Exited(DONE), []).on(60_600, TreeEmpty, [End(verdict)]);
}

#[test]
fn a_run_that_was_asked_to_end_in_time_is_not_over_its_time() {
    let verdict = Verdict { stop: Some(Signal::TERM), ..RAN };
    let mut script = Script::up(with_run_timeout());
    script.on(59_000, comes(Signal::TERM), stop_by(STOP_SIGNAL)).sleeps_until(66_000).on(60_500, Tick, []);
    script.on(61_000, Exited(DONE), []).on(61_000, TreeChanged, [look_until(63_000)]).sleeps_until(61_005);
    script.on(61_001, TreeEmpty, [End(verdict)]);
}

// While it runs.

#[test]
fn a_running_service_wakes_nobody() {
    let mut script = Script::up(policy());
    script.sleeps().on(1, TreeChanged, []).on(2, TreeEmpty, []).on(3, comes(Signal::HUP), [main_gets(Signal::HUP)]);
    script.sleeps().on(3_600_000, Tick, []).sleeps();
}

#[test]
fn every_signal_stops_suspends_resumes_or_is_passed_on_as_itself() {
    for signal in every_signal() {
        let mut script = Script::up(with_job_control());
        match signal {
            Signal::TERM => script.on(1, comes(signal), stop_by(STOP_SIGNAL)),
            Signal::INT | Signal::QUIT => script.on(1, comes(signal), stop_by(signal)),
            Signal::CONT => script.on(1, comes(signal), [Resume]),
            Signal::STOP | Signal::TSTP | Signal::TTIN | Signal::TTOU => {
                script.on(1, comes(signal), [group_gets(signal)])
            }
            _ => script.on(1, comes(signal), [main_gets(signal)]),
        };
    }
}

#[test]
fn a_signal_is_passed_on_as_what_the_map_makes_of_it() {
    let mut script = Script::up(policy());
    script.on(1, mapped(Signal::HUP, Signal::PIPE), [main_gets(Signal::PIPE)]).sleeps();
}
