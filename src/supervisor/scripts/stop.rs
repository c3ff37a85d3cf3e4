//! From the request to the end of the main process.

use super::*;

#[test]
fn term_becomes_the_stop_signal_but_int_stays_int() {
    Script::up(policy()).on(1, comes(Signal::TERM), stop_by(STOP_SIGNAL));
    Script::up(policy()).on(1, comes(Signal::INT), stop_by(Signal::INT));
    Script::up(policy()).on(1, comes(Signal::QUIT), stop_by(Signal::QUIT));
}

#[test]
fn a_stop_that_the_map_turns_into_another_signal_is_a_stop() {
    let verdict = Verdict { stop: Some(Signal::TERM), ..RAN };
    let mut script = Script::up(policy());
    script.on(1, mapped(Signal::TERM, Signal::PIPE), stop_by(Signal::PIPE)).sleeps_until(7_001);
    script.on(2, Exited(DONE), []).on(2, TreeEmpty, [End(verdict)]);
}

#[test]
fn a_signal_that_the_map_turns_into_a_stop_is_a_stop_and_is_not_turned_again() {
    let mut script = Script::up(policy());
    script.on(1, mapped(Signal::PIPE, Signal::TERM), stop_by(Signal::TERM)).sleeps_until(7_001);
}

#[test]
fn the_stop_goes_to_whom_the_operator_chose_and_lets_the_stopped_go_on() {
    for target in [Target::Main, Target::Group, Target::Tree] {
        let mut script = Script::up(Policy { stop_target: target, ..policy() });
        let actions = [Action::Signal(target, STOP_SIGNAL), Action::Signal(target, Signal::CONT)];
        script.on(1, comes(Signal::TERM), actions).on(7_001, Tick, [main_gets(Signal::KILL)]);
    }
}

#[test]
fn sigkill_of_the_main_process_waits_for_the_stop_timeout_and_comes_once() {
    let mut script = Script::up(policy());
    script.on(100, comes(Signal::TERM), stop_by(STOP_SIGNAL)).sleeps_until(7_100).on(7_099, Tick, []);
    script.on(7_100, Tick, [main_gets(Signal::KILL)]).sleeps_until(12_100).on(12_099, Tick, []);
}

#[test]
fn a_main_process_that_survives_sigkill_is_given_up_by_name() {
    let verdict = Verdict { exit: None, stop: Some(Signal::TERM), survivors: true, ..RAN };
    let mut script = Script::up(policy());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(7_000, Tick, [main_gets(Signal::KILL)]);
    script.on(12_000, Tick, [look_until(14_000)]).sleeps_until(12_005).on(14_000, Tick, [kill_from(14_000)]);
    script
        .on(18_999, Tick, [kill_from(14_000)])
        .on(19_000, Tick, [NameSurvivors])
        .on(19_000, SurvivorsNamed, [End(verdict)])
        .sleeps();
}

#[test]
fn a_main_process_that_was_given_up_and_ends_all_the_same_has_an_exit() {
    let killed = Exit::Signal { signal: Signal::KILL, core_dumped: false };
    let verdict = Verdict { exit: Some(killed), stop: Some(Signal::TERM), ..RAN };
    let mut script = Script::up(policy());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(7_000, Tick, [main_gets(Signal::KILL)]);
    script.on(12_000, Tick, [look_until(14_000)]).on(12_001, Exited(killed), []).on(12_001, TreeEmpty, [End(verdict)]);
}

#[test]
fn a_burst_within_a_second_is_one_request() {
    let mut script = Script::up(policy());
    script.on(100, comes(Signal::TERM), stop_by(STOP_SIGNAL));
    script.on(100, comes(Signal::TERM), []).on(500, comes(Signal::INT), []).on(1_099, comes(Signal::QUIT), []);
    script.sleeps_until(7_100);
}

#[test]
fn a_second_request_kills_the_tree() {
    let verdict = Verdict { stop: Some(Signal::INT), ..RAN };
    let mut script = Script::up(policy());
    script.on(100, comes(Signal::INT), stop_by(Signal::INT));
    script.on(1_100, comes(Signal::TERM), [kill_from(1_100)]).sleeps_until(1_105);
    script.on(1_101, Exited(DONE), []).on(1_101, TreeEmpty, [End(verdict)]);
}

#[test]
fn a_second_request_may_come_by_way_of_the_map() {
    for request in [mapped(Signal::TERM, Signal::PIPE), mapped(Signal::PIPE, Signal::TERM)] {
        let mut script = Script::up(policy());
        script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(1_000, request, [kill_from(1_000)]);
    }
}

#[test]
fn a_time_out_is_followed_by_the_request_as_it_came() {
    let verdict = Verdict { stop: Some(Signal::TERM), timed_out: true, ..RAN };
    let mut script = Script::up(with_run_timeout());
    script.on(60_000, Tick, stop_by(STOP_SIGNAL)).on(60_001, mapped(Signal::TERM, Signal::PIPE), []);
    script.on(60_002, Exited(DONE), []).on(60_002, TreeEmpty, [End(verdict)]);
}

#[test]
fn the_second_of_the_second_request_counts_from_the_first() {
    let mut script = Script::up(policy());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(900, comes(Signal::TERM), []);
    script.on(1_000, comes(Signal::TERM), [kill_from(1_000)]);
}

#[test]
fn a_second_request_does_not_wait_for_a_main_process_that_survives_sigkill() {
    let mut script = Script::up(policy());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(7_000, Tick, [main_gets(Signal::KILL)]);
    script.on(7_001, comes(Signal::TERM), [kill_from(7_001)]).sleeps_until(7_006);
}

#[test]
fn the_first_request_after_a_time_out_is_no_second() {
    let verdict = Verdict { stop: Some(Signal::TERM), timed_out: true, ..RAN };
    let mut script = Script::up(with_run_timeout());
    script.on(60_000, Tick, stop_by(STOP_SIGNAL)).on(62_000, comes(Signal::TERM), []);
    script.on(62_999, comes(Signal::INT), []).on(63_000, comes(Signal::INT), [kill_from(63_000)]);
    script.on(63_001, Exited(DONE), []).on(63_001, TreeEmpty, [End(verdict)]);
}

#[test]
fn a_service_on_its_way_out_still_gets_its_signals() {
    let mut script = Script::up(policy());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(1, comes(Signal::HUP), [main_gets(Signal::HUP)]);
    script.on(2, comes(Signal::CONT), [Resume]).sleeps_until(7_000);
}

#[test]
fn a_service_on_its_way_out_is_not_stopped_nor_are_we() {
    let mut script = Script::up(with_job_control());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL));
    script.on(1, comes(Signal::TSTP), []).on(1, mapped(Signal::HUP, Signal::TSTP), []);
    script.on(2, MainStopped, []).sleeps_until(7_000);
}
