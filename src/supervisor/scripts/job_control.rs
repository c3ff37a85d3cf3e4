//! Stopped by a key, continued by the shell.

use super::*;

#[test]
fn with_job_control_a_service_that_stops_stops_us_too() {
    let mut script = Script::up(with_job_control());
    script.on(1, MainStopped, [Suspend]).on(2, comes(Signal::CONT), [Resume]).on(3, MainStopped, [Suspend]).sleeps();
}

#[test]
fn a_key_stops_the_service_before_it_executes_its_command() {
    let mut script = Script::starting(with_job_control());
    script.on(1, MainStopped, [Suspend]).on(2, comes(Signal::CONT), [Resume]).on(3, Started, []).sleeps();
}

#[test]
fn without_job_control_a_stop_is_passed_on_as_the_one_that_has_an_effect() {
    for signal in [Signal::TSTP, Signal::TTIN, Signal::TTOU] {
        let mut script = Script::up(policy());
        script.on(1, comes(signal), [group_gets(Signal::STOP)]).on(2, MainStopped, [Suspend]);
    }
}

#[test]
fn without_job_control_a_service_that_stops_by_itself_does_not_stop_us() {
    Script::up(policy()).on(1, MainStopped, []);
}

#[test]
fn a_stop_that_was_asked_for_once_stops_us_once() {
    let mut script = Script::up(policy());
    script.on(1, comes(Signal::TSTP), [group_gets(Signal::STOP)]).on(2, MainStopped, [Suspend]).on(3, MainStopped, []);
}

#[test]
fn a_stop_that_was_taken_back_does_not_stop_us() {
    let mut script = Script::up(policy());
    script.on(1, comes(Signal::TSTP), [group_gets(Signal::STOP)]).on(2, comes(Signal::CONT), [Resume]);
    script.on(3, MainStopped, []);
}
