//! From the end of the main process to the end of all.

use super::*;

#[test]
fn a_service_that_leaves_nothing_costs_no_look() {
    Script::up(policy()).on(1, Exited(DONE), []).on(1, TreeEmpty, [End(RAN)]).sleeps();
}

#[test]
fn what_is_left_is_told_at_once() {
    Script::up(policy()).on(1, Exited(DONE), []).on(1, TreeChanged, [look_until(2_001)]).sleeps_until(6);
}

#[test]
fn newborns_are_looked_for_with_doubling_pauses_until_the_leftovers_are_killed() {
    let mut script = Script::emptying();
    for look in [5, 15, 35, 75, 155, 315, 635, 1_135, 1_635] {
        script.sleeps_until(look).on(look - 1, Tick, []).on(look, Tick, [look_until(2_000)]);
    }
    script.sleeps_until(2_000).on(1_999, Tick, []).on(2_000, Tick, [kill_from(2_000)]);
}

#[test]
fn a_death_brings_the_next_look_forward() {
    let mut script = Script::emptying();
    script.on(5, Tick, [look_until(2_000)]).on(15, Tick, [look_until(2_000)]).sleeps_until(35);
    script.on(20, TreeChanged, []).sleeps_until(25).on(25, Tick, [look_until(2_000)]).sleeps_until(65);
}

#[test]
fn many_deaths_put_the_next_look_off_no_further() {
    let mut script = Script::emptying();
    script.on(5, Tick, [look_until(2_000)]).sleeps_until(15);
    script.on(8, TreeChanged, []).sleeps_until(13).on(9, TreeChanged, []).on(12, TreeChanged, []).sleeps_until(13);
    script.on(13, TreeChanged, [look_until(2_000)]);
}

#[test]
fn a_look_that_took_long_is_followed_by_as_long_a_pause_up_to_a_limit() {
    let mut script = Script::emptying();
    for look in [5, 15, 35, 75, 155] {
        script.on(look, Tick, [look_until(2_000)]);
    }
    script.sleeps_until(315).on(195, TreeChanged, []).sleeps_until(235).on(235, Tick, [look_until(2_000)]);
    script.sleeps_until(555).on(440, TreeChanged, []).sleeps_until(540).on(540, TreeChanged, [look_until(2_000)]);
    script.sleeps_until(1_040).on(541, TreeChanged, []).sleeps_until(546);
}

#[test]
fn how_long_a_look_took_counts_from_when_it_began_not_from_when_it_was_due() {
    let mut script = Script::emptying();
    for look in [5, 15, 35, 75, 155, 400] {
        script.on(look, Tick, [look_until(2_000)]);
    }
    script.sleeps_until(720).on(450, TreeChanged, []).sleeps_until(500);
}

#[test]
fn when_killing_every_death_brings_a_look_at_once() {
    let mut script = Script::emptying();
    script.on(2_000, Tick, [kill_from(2_000)]).sleeps_until(2_005).on(2_001, TreeChanged, [kill_from(2_000)]);
    script.on(2_001, TreeChanged, [kill_from(2_000)]).on(2_002, TreeEmpty, [End(RAN)]);
}

#[test]
fn killing_that_gets_on_no_more_ends_with_the_survivors_named() {
    let mut script = Script::emptying();
    script.on(2_000, Tick, [kill_from(2_000)]).on(3_000, TreeChanged, [kill_from(2_000)]);
    script.on(7_999, Tick, [kill_from(2_000)]).sleeps_until(8_000);
    script.on(8_000, Tick, [NameSurvivors]).on(8_000, SurvivorsNamed, [End(Verdict { survivors: true, ..RAN })]);
}

#[test]
fn killing_that_gets_on_is_given_more_time_but_not_without_end() {
    let mut script = Script::emptying();
    script.on(2_000, Tick, [kill_from(2_000)]);
    for death in 1..=55 {
        let ms = 2_000 + 1_000 * death;
        script.on(ms, TreeChanged, [kill_from(2_000)]);
    }
    script.on(58_000, TreeChanged, [kill_from(2_000)]).on(61_999, TreeChanged, [kill_from(2_000)]);
    script
        .on(62_000, TreeChanged, [NameSurvivors])
        .on(62_000, SurvivorsNamed, [End(Verdict { survivors: true, ..RAN })])
        .sleeps();
}

#[test]
fn killing_is_repeated_with_doubling_pauses_until_the_survivors_are_named() {
    let mut script = Script::emptying();
    script.on(2_000, Tick, [kill_from(2_000)]);
    for look in [2_005, 2_010, 2_020, 2_040, 2_080, 2_160, 2_320, 2_640, 3_140, 3_640, 4_140] {
        script.sleeps_until(look).on(look - 1, Tick, []).on(look, Tick, [kill_from(2_000)]);
    }
    script.on(6_999, Tick, [kill_from(2_000)]).sleeps_until(7_000);
    script
        .on(7_000, Tick, [NameSurvivors])
        .on(7_000, SurvivorsNamed, [End(Verdict { survivors: true, ..RAN })])
        .sleeps();
}

#[test]
fn with_no_time_for_leftovers_they_are_killed_at_once() {
    let mut script = Script::up(Policy { leftover_timeout: Duration::ZERO, ..policy() });
    script.on(1, Exited(DONE), []).on(1, TreeChanged, [kill_from(1)]).on(1, TreeEmpty, [End(RAN)]);
}

#[test]
fn the_first_exit_is_the_verdict() {
    let mut script = Script::up(policy());
    script.on(1, Exited(DONE), []).on(1, Exited(Exit::Code(0)), []).on(1, TreeEmpty, [End(RAN)]);
}

#[test]
fn a_second_request_while_emptying_kills() {
    let mut script = Script::up(policy());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(10, Exited(DONE), []);
    script.on(10, TreeChanged, [look_until(2_010)]).on(999, comes(Signal::TERM), []);
    script.on(1_000, comes(Signal::TERM), [kill_from(1_000)]).sleeps_until(1_005);
}

#[test]
fn a_second_request_while_emptying_may_come_by_way_of_the_map() {
    for request in [mapped(Signal::TERM, Signal::PIPE), mapped(Signal::PIPE, Signal::TERM)] {
        let mut script = Script::emptying();
        script.on(100, request.clone(), []).on(1_100, request, [kill_from(1_100)]);
    }
}

#[test]
fn the_first_request_while_emptying_kills_nobody() {
    let mut script = Script::emptying();
    script.on(100, comes(Signal::TERM), []).on(1_099, comes(Signal::INT), []).on(
        1_100,
        comes(Signal::INT),
        [kill_from(1_100)],
    );
}

#[test]
fn a_request_after_the_end_of_the_main_process_is_not_why_it_ended() {
    Script::emptying().on(100, comes(Signal::TERM), []).on(101, TreeEmpty, [End(RAN)]);
}

#[test]
fn a_third_request_buys_no_time() {
    let mut script = Script::up(policy());
    script.on(0, comes(Signal::TERM), stop_by(STOP_SIGNAL)).on(1_000, comes(Signal::TERM), [kill_from(1_000)]);
    script.on(5_999, comes(Signal::TERM), []).on(5_999, Tick, [kill_from(1_000)]).sleeps_until(6_000);
}

#[test]
fn a_signal_for_a_service_that_is_gone_goes_to_nobody() {
    for signal in every_signal().filter(|signal| !signal.asks_for_a_stop()) {
        Script::emptying().on(1, comes(signal), []).on(2, MainStopped, []);
    }
}

#[test]
fn nothing_follows_the_end() {
    let mut script = Script::emptying();
    script.on(1, TreeEmpty, [End(RAN)]);
    for event in [Started, StartFailed, Exited(DONE), MainStopped, TreeChanged, TreeEmpty, Tick] {
        script.on(2, event, []).sleeps();
    }
    every_signal().for_each(|signal| _ = script.on(3, comes(signal), []).sleeps());
}
