//! How a service ends, and what becomes of that: the exit code, the ladder, and nothing left.
//!
//! Each test waits for what it needs to know (a signal that was caught, a process that is up). The timeouts that must not
//! be spent are half a minute long: a run that is over sooner did not wait for them.

use std::time::{Duration, Instant};

use libc::{RLIMIT_CORE, SIGCONT, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGUSR1};
use serde_json::Value;

use crate::support::need::need;
use crate::support::tree::ignoring;
use crate::support::{Act, Ended, Supervise, need_program, node, sys};

/// Far more than any of these runs needs by itself, and less than the timeouts that it must not spend.
const WITHOUT_WAITING: Duration = Duration::from_secs(25);

/// What no run may wait for.
const NEVER_SPENT: [&str; 4] = ["--stop-timeout", "30s", "--leftover-timeout", "30s"];

/// Soon up every rung; on a busy machine there is still time to take down everybody's name.
pub(crate) const IMPATIENT: [&str; 4] = ["--stop-timeout", "100ms", "--leftover-timeout", "400ms"];

/// The report quotes a word that has a space in it, as the only word of a node's command line has.
pub(crate) fn is_called(leftover: &Value, command: &str) -> bool {
    leftover["command"].as_str().is_some_and(|text| text.trim_matches('\'') == command)
}

/// What the report says became of the leftover with this command line.
#[track_caller]
pub(crate) fn fate<'e>(ended: &'e Ended, command: &str) -> &'e str {
    let leftovers = ended.report["leftovers"].as_array().unwrap();
    let named: Vec<_> = leftovers.iter().filter(|one| is_called(one, command)).collect();
    assert_eq!(named.len(), 1, "{command:?} is not named once\n{ended}");
    named[0]["ended"].as_str().unwrap()
}

#[track_caller]
fn nothing_had_to_be_ended(ended: &Ended) {
    assert_eq!(ended.report["leftovers"], serde_json::json!([]), "{ended}");
    assert_eq!(ended.stderr, "", "{ended}");
}

// By itself.

/// From the program's own start: the harness's clock for `wall` starts when it has heard of that.
fn took(ended: &Ended) -> Duration {
    Duration::from_secs_f64(ended.report["duration"].as_f64().unwrap())
}

#[test]
fn the_service_s_exit_code_is_ours() {
    for code in [0, 1, 2, 42, 123, 124, 125, 126, 127, 128, 137, 255] {
        let ended = Supervise::new().options(NEVER_SPENT).tree(node("main").exit(code)).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!(ended.report["exit"]["code"], code, "{ended}");
        assert_eq!(ended.report["result"], if code == 0 { "success" } else { "exit-code" }, "{ended}");
        assert_eq!(ended.report["start_error"], Value::Null, "{ended}");
        nothing_had_to_be_ended(&ended);
        assert!(ended.wall < WITHOUT_WAITING, "{ended}");
    }
}

#[test]
fn the_exit_code_is_kept_when_leftovers_had_to_be_killed() {
    for code in [0, 1, 127, 255] {
        let main = node("main").with(node("deaf").setsid().ignores([SIGTERM])).exit_on_go(code);
        let mut run = Supervise::new().options(IMPATIENT).tree(main).start();
        run.wait_up();
        assert!(run.node("deaf").ignores(SIGTERM));
        run.let_go("main");
        let ended = run.finish();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!(ended.report["exit"]["code"], code, "{ended}");
        assert_eq!(fate(&ended, "node deaf"), "SIGKILL");
    }
}

#[test]
fn death_by_signal_n_gives_128_plus_n_for_every_fatal_signal() {
    let harmless = [
        libc::SIGCHLD,
        SIGCONT,
        libc::SIGSTOP,
        libc::SIGTSTP,
        libc::SIGTTIN,
        libc::SIGTTOU,
        libc::SIGURG,
        libc::SIGWINCH,
    ];
    for signal in (1..=64).filter(|signal| !harmless.contains(signal)) {
        let main = node("main").killed_by(signal);
        let ended = Supervise::new().options(NEVER_SPENT).rlimit(RLIMIT_CORE, 0, 0).tree(main).run();
        assert_eq!((ended.code, ended.signal), (Some(128 + signal), None), "signal {signal}\n{ended}");
        assert_eq!(ended.report["exit"]["number"], signal, "{ended}");
        assert_eq!(ended.report["result"], "signal", "{ended}");
        nothing_had_to_be_ended(&ended);
        assert!(ended.wall < WITHOUT_WAITING, "{ended}");
    }
}

#[test]
fn the_tree_of_a_service_that_crashed_is_ended() {
    for signal in [SIGKILL, libc::SIGSEGV, libc::SIGABRT, 34, 64] {
        let main = node("main").with(node("w").setsid().with(node("x").own_group())).killed_by(signal);
        let ended = Supervise::new().options(NEVER_SPENT).rlimit(RLIMIT_CORE, 0, 0).tree(main).run();
        assert_eq!(ended.code, Some(128 + signal), "{ended}");
        assert_eq!((fate(&ended, "node w"), fate(&ended, "node x")), ("SIGTERM", "SIGTERM"), "{ended}");
        assert!(ended.wall < WITHOUT_WAITING, "{ended}");
    }
}

#[test]
fn a_service_killed_from_outside_leaves_nothing() {
    let mut run = Supervise::new().options(NEVER_SPENT).tree(node("main").with(node("w").setsid().copies(20))).start();
    run.wait_up();
    run.signal_node("main", SIGKILL);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 20, "{ended}");
    assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
}

#[test]
fn a_service_that_leaves_nothing_costs_no_timeout() {
    let ended = Supervise::new().options(NEVER_SPENT).tree(node("main").with(node("w").exit(0)).exit(3)).run();
    assert_eq!(ended.code, Some(3), "{ended}");
    assert!(ended.wall < WITHOUT_WAITING, "{ended}");

    let mut run = Supervise::new().options(NEVER_SPENT).tree(node("main")).start();
    run.wait_up();
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(143), "{ended}");
    nothing_had_to_be_ended(&ended);
    assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
    let took = ended.after_signal;
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("stop, nothing left: {took:?}\n"));
}

// A stop.

#[test]
fn a_service_that_dies_of_the_stop_signal_gives_its_number() {
    for (signal, code) in [(SIGTERM, 143), (SIGINT, 130), (SIGQUIT, 131)] {
        let run = Supervise::new().options(NEVER_SPENT).rlimit(RLIMIT_CORE, 0, 0);
        let mut run = run.tree(node("main").with(node("w").setsid())).start();
        run.wait_up();
        run.signal(signal);
        let ended = run.finish();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!(fate(&ended, "node w"), "SIGTERM");
    }
}

#[test]
fn a_service_that_exits_on_the_stop_signal_gives_its_code() {
    for code in [0, 5, 143] {
        let mut run = Supervise::new().options(NEVER_SPENT).tree(node("main").on(SIGTERM, Act::Exit(code))).start();
        run.wait_up();
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!(ended.got("main", SIGTERM), 1, "{ended}");
        assert_eq!(ended.report["stop_signal"], "SIGTERM", "{ended}");
    }
}

#[test]
fn a_code_or_signal_that_the_operator_takes_for_success_gives_zero() {
    let exits = || node("main").on(SIGTERM, Act::Exit(143));
    for (status, main, code) in [
        ("143", exits(), 0),
        ("143", node("main"), 0),
        ("TERM", node("main"), 0),
        ("1,SIGTERM", node("main"), 0),
        ("142", node("main"), 143),
        ("INT", node("main"), 143),
        ("TERM", exits(), 143),
    ] {
        let mut run = Supervise::new().options(["--success-exit-status", status]).tree(main).start();
        run.wait_up();
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!(ended.code, Some(code), "{status}\n{ended}");
        assert_eq!(ended.report["result"] == "success", code == 0, "{status}\n{ended}");
    }
}

#[test]
fn a_main_process_that_ignores_the_stop_signal_is_killed() {
    let main = node("main").ignores([SIGTERM]).with(node("w").setsid());
    let mut run = Supervise::new().options(["--stop-timeout", "100ms", "--leftover-timeout", "30s"]).tree(main).start();
    run.wait_up();
    assert!(run.node("main").ignores(SIGTERM));
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    assert_eq!(fate(&ended, "node w"), "SIGTERM");
    assert!(ended.after_signal >= Duration::from_millis(100), "{ended}");
    assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
}

#[test]
fn a_main_process_that_is_stopped_takes_the_stop_signal_all_the_same() {
    let mut run = Supervise::new().options(NEVER_SPENT).tree(node("main").on(SIGTERM, Act::Exit(6))).start();
    let pid = run.node("main").pid;
    run.signal_node("main", libc::SIGSTOP);
    assert!(sys::spin(Duration::from_secs(30), || sys::stat(pid).is_some_and(|stat| stat.state == 'T')));
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(6), "{ended}");
    assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
}

#[test]
fn a_stop_that_comes_while_we_start_ends_the_run() {
    for micros in [0, 200, 500, 1_000, 2_000, 4_000, 8_000] {
        for signal in [SIGTERM, SIGINT] {
            let run = Supervise::new().options(NEVER_SPENT).signal_at(Duration::from_micros(micros), signal);
            let ended = run.command(["sleep", "1000"]).run();
            // The loader of a dynamic program is not ours; then nothing was started.
            let before_us = ended.signal == Some(signal) && ended.report.is_null();
            assert!(before_us || ended.code == Some(128 + signal), "after {micros} µs\n{ended}");
            assert!(ended.wall < WITHOUT_WAITING, "{ended}");
        }
    }
}

#[test]
fn a_stop_that_comes_while_leftovers_are_ended_does_not_change_the_exit_code() {
    let main = node("main").with(node("slow").setsid().reports([SIGTERM]).exit_on_go(0)).exit_on_go(9);
    let mut run = Supervise::new().options(NEVER_SPENT).tree(main).start();
    run.wait_up();
    run.let_go("main");
    run.wait_got("slow", SIGTERM, 1);
    run.signal(SIGTERM);
    run.signal(SIGINT);
    run.let_go("slow");
    let ended = run.finish();
    assert_eq!(ended.code, Some(9), "{ended}");
    assert_eq!(ended.report["stop_signal"], Value::Null, "{ended}");
    assert!(ended.wall < WITHOUT_WAITING, "{ended}");
}

// A second stop, and a burst.

/// The one thing that is waited for here is the time itself.
fn let_a_second_go_by() {
    let end = Instant::now() + Duration::from_millis(1_050);
    while Instant::now() < end {
        sys::wait_readable(&[], Some(end)).unwrap();
    }
}

#[test]
fn a_second_stop_signal_kills_at_once() {
    for second in [SIGTERM, SIGINT, SIGQUIT] {
        let main = node("main").reports([SIGTERM]).with(node("w").setsid().reports([SIGTERM]));
        let mut run = Supervise::new().options(NEVER_SPENT).tree(main).start();
        run.wait_up();
        run.signal(SIGTERM);
        run.wait_got("main", SIGTERM, 1);
        let_a_second_go_by();
        run.signal(second);
        let ended = run.finish();
        assert_eq!(ended.code, Some(137), "{ended}");
        assert_eq!(fate(&ended, "node w"), "SIGKILL");
        assert_eq!((ended.got("main", SIGTERM), ended.got("w", SIGTERM)), (1, 0), "{ended}");
        assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
    }
}

#[test]
fn a_second_stop_signal_kills_the_leftovers_at_once() {
    let main = node("main").on(SIGTERM, Act::Exit(4)).with(node("slow").setsid().reports([SIGTERM]));
    let mut run = Supervise::new().options(NEVER_SPENT).tree(main).start();
    run.wait_up();
    run.signal(SIGTERM);
    run.wait_got("slow", SIGTERM, 1);
    let_a_second_go_by();
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(4), "{ended}");
    assert_eq!(fate(&ended, "node slow"), "SIGKILL");
    assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
}

#[test]
fn the_first_stop_signal_after_the_end_of_the_service_is_not_the_second() {
    let slow = node("slow").setsid().reports([SIGTERM]).exit_on_go(0);
    let mut run = Supervise::new().options(NEVER_SPENT).tree(node("main").with(slow).exit_on_go(4)).start();
    run.wait_up();
    run.let_go("main");
    run.wait_got("slow", SIGTERM, 1);
    let_a_second_go_by();
    run.signal(SIGTERM);
    run.let_go("slow");
    let ended = run.finish();
    assert_eq!((ended.code, fate(&ended, "node slow")), (Some(4), "SIGTERM"), "{ended}");
    assert_eq!(ended.report["leftovers"][0]["exit"]["code"], 0, "{ended}");
}

#[test]
fn a_burst_of_stop_signals_counts_once() {
    // On a busy machine the burst may have taken a second; then nothing is said by it, and it is tried again.
    for _ in 0..20 {
        let main = node("main").reports([SIGTERM, SIGINT, SIGQUIT, SIGUSR1]).exit_on_go(3);
        let mut run = Supervise::new().options(NEVER_SPENT).tree(main).start();
        run.wait_up();
        let first = Instant::now();
        run.signal(SIGTERM);
        run.wait_got("main", SIGTERM, 1);
        for signal in [SIGINT, SIGQUIT, SIGINT, SIGTERM] {
            run.signal(signal);
        }
        // Passed on after those that are waiting with it.
        run.signal(SIGUSR1);
        run.wait_got("main", SIGUSR1, 1);
        run.signal(SIGTERM);
        let took = first.elapsed();
        run.let_go("main");
        let ended = run.finish();
        if took > Duration::from_millis(900) {
            continue;
        }
        assert_eq!(ended.code, Some(3), "{ended}");
        let got = [SIGTERM, SIGINT, SIGQUIT].map(|signal| ended.got("main", signal));
        assert_eq!(got, [1, 0, 0], "{ended}");
        return;
    }
    panic!("no burst was short enough");
}

// Too long.

#[test]
fn a_run_that_is_over_its_time_is_stopped_and_gives_124() {
    let dies = node("main").with(node("w").setsid());
    let exits = node("main").on(SIGTERM, Act::Exit(0)).with(node("w").setsid());
    for main in [dies, exits] {
        let run = Supervise::new().options(NEVER_SPENT).options(["--timeout", "300ms"]).tree(main);
        let ended = run.run();
        assert_eq!(ended.code, Some(124), "{ended}");
        assert_eq!(ended.report["result"], "timeout", "{ended}");
        assert!(took(&ended) >= Duration::from_millis(300) && ended.wall < WITHOUT_WAITING, "{ended}");
        assert!(ended.stderr.contains("ran longer than 300ms"), "{ended}");
    }
}

#[test]
fn a_run_that_is_over_its_time_goes_up_the_whole_ladder() {
    let main = node("main").reports([SIGTERM]).with(node("deaf").setsid().ignores([SIGTERM])).says("up");
    let run = Supervise::new().options(IMPATIENT).options(["--timeout", "1s"]).tree(main);
    let mut run = run.start();
    run.wait_up();
    assert!(run.node("deaf").ignores(SIGTERM));
    run.wait_got("main", SIGTERM, 1);
    let ended = run.finish();
    assert_eq!(ended.code, Some(124), "{ended}");
    assert_eq!(ended.report["exit"]["signal"], "SIGKILL", "{ended}");
    assert_eq!(fate(&ended, "node deaf"), "SIGKILL");
    assert!(took(&ended) >= Duration::from_millis(1_500), "{ended}");
}

#[test]
fn a_run_that_is_in_time_is_not_touched() {
    let ended = Supervise::new().options(["--timeout", "50s"]).tree(node("main").exit(5)).run();
    assert_eq!((ended.code, &ended.report["result"]), (Some(5), &"exit-code".into()), "{ended}");
    // Leftovers of a service that ended in time do not make it late.
    let main = node("main").with(node("deaf").setsid().ignores([SIGTERM])).exit_when_up(5);
    let ended = Supervise::new().options(["--timeout", "2s", "--leftover-timeout", "2200ms"]).tree(main).run();
    assert_eq!(fate(&ended, "node deaf"), "SIGKILL");
    // On a machine that is very busy it was late.
    let in_time = ended.report["exit"]["code"] == 5;
    assert_eq!(ended.code, Some(if in_time { 5 } else { 124 }), "{ended}");
}

#[test]
fn the_timeouts_of_the_file_are_in_force_and_flags_win() {
    let file =
        |all: &str| format!("[stop]\ntimeout = \"{all}\"\nleftover-timeout = \"{all}\"\nkill-timeout = \"1s\"\n");
    let deaf = || node("main").ignores([SIGTERM]).with(node("deaf").setsid().ignores([SIGTERM]));
    for (config, options) in [(file("150ms"), &[][..]), (file("30s"), &IMPATIENT[..])] {
        let mut run = Supervise::new().config(&config).options(options.iter().copied()).tree(deaf()).start();
        run.wait_up();
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!((ended.code, fate(&ended, "node deaf")), (Some(137), "SIGKILL"), "{ended}");
        assert!(ended.after_signal >= Duration::from_millis(200), "both rungs were waited for\n{ended}");
        assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
    }
}

#[test]
fn a_clock_that_is_set_back_holds_nothing_up() {
    if !need_program("cc") {
        return;
    }
    let run = Supervise::new().options(IMPATIENT).options(["--timeout", "300ms"]);
    let library = run.dir().join("back.so");
    let source = run.dir().join("back.c");
    std::fs::write(&source, BACKWARD_CLOCK).unwrap();
    let made = std::process::Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(made.unwrap().success());
    let main = node("main").ignores([SIGTERM]).with(node("deaf").setsid().ignores([SIGTERM]));
    let ended = run.env("LD_PRELOAD", library.to_str().unwrap()).tree(main).run();
    let fooled = ended.report["started"].as_str().unwrap().starts_with("2001");
    if !need("a dynamically linked supervise", fooled) {
        return;
    }
    assert_eq!(ended.code, Some(124), "{ended}");
    assert!(took(&ended) >= Duration::from_millis(300) && ended.wall < WITHOUT_WAITING, "{ended}");
    assert!(ended.report["duration"].as_f64().unwrap() >= 0.3, "{ended}");
}

/// An hour back each time that somebody asks.
const BACKWARD_CLOCK: &str = r"
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static time_t back(void) { static time_t now = 1000000000; return now -= 3600; }
int clock_gettime(clockid_t id, struct timespec *t) {
    if (id != CLOCK_REALTIME) return syscall(SYS_clock_gettime, id, t);
    t->tv_sec = back(); t->tv_nsec = 0; return 0;
}
int gettimeofday(struct timeval *t, void *zone) { t->tv_sec = back(); t->tv_usec = 0; return 0; }
time_t time(time_t *t) { time_t now = back(); if (t) *t = now; return now; }
";

// The main process first.

#[test]
fn a_graceful_drain_is_not_cut() {
    let main = node("main").on(SIGTERM, Act::DrainThenExit(0)).with(node("w").reports([SIGTERM]).exit_on_go(0));
    let mut run = Supervise::new().options(NEVER_SPENT).tree(main).start();
    run.wait_up();
    run.signal(SIGTERM);
    run.wait_got("main", SIGTERM, 1);
    run.let_go("w");
    let ended = run.finish();
    assert_eq!((ended.code, ended.got("w", SIGTERM)), (Some(0), 0), "{ended}");
    nothing_had_to_be_ended(&ended);
}

#[test]
fn the_stop_signal_reaches_its_target_and_nobody_else() {
    for (target, expected) in [("main", [1, 0, 0]), ("group", [1, 1, 0]), ("tree", [1, 1, 1])] {
        let other = |name| node(name).reports([SIGTERM]).exit_on_go(0);
        let main = node("main").on(SIGTERM, Act::DrainThenExit(0)).with(other("near")).with(other("far").setsid());
        let config = format!("[stop]\ntarget = \"{target}\"\ntimeout = \"30s\"\n");
        let mut run = Supervise::new().config(&config).tree(main).start();
        run.wait_up();
        run.signal(SIGTERM);
        for (name, times) in [("main", expected[0]), ("near", expected[1]), ("far", expected[2])] {
            run.wait_got(name, SIGTERM, times);
        }
        run.let_go("near");
        run.let_go("far");
        let ended = run.finish();
        let got = ["main", "near", "far"].map(|name| ended.got(name, SIGTERM));
        assert_eq!(got, expected, "{target}\n{ended}");
        assert_eq!(ended.code, Some(0), "{ended}");
        nothing_had_to_be_ended(&ended);
    }
}

#[test]
fn a_newborn_of_the_end_gets_the_same_signals() {
    let born = Act::NewbornThenExit(ignoring(&[]), 0);
    let deaf = Act::NewbornThenExit(ignoring(&[SIGTERM]), 0);
    for (act, expected) in [(born, "SIGTERM"), (deaf, "SIGKILL")] {
        let options = if expected == "SIGTERM" { NEVER_SPENT } else { IMPATIENT };
        let mut run = Supervise::new().options(options).tree(node("main").on(SIGTERM, act)).start();
        run.wait_up();
        run.signal(SIGTERM);
        let pid = run.wait_born(1)[0].pid;
        let ended = run.finish();
        assert_eq!(ended.code, Some(0), "{ended}");
        assert_eq!(ended.report["leftovers"][0]["pid"], pid, "{ended}");
        assert_eq!(ended.report["leftovers"][0]["ended"], expected, "{ended}");
        assert!(ended.after_signal < WITHOUT_WAITING, "{ended}");
    }
}
