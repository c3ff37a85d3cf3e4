//! A service while it runs: signals are passed on, orphans are reaped, stops and continues go through, and when nothing
//! happens nothing wakes up.

use std::fs;
use std::time::{Duration, Instant};

use libc::{SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU};
use libc::{SIGCHLD, SIGPIPE, SIGUSR1, SIGUSR2, SIGWINCH};
use serde_json::json;

use crate::support::told::Told;
use crate::support::{Act, Ended, Running, Supervise, need_root, node, sys};

/// The limit of every wait of ours.
const GUARD: Duration = Duration::from_secs(60);

/// Signals are the same with and without one.
const GUARDS: [&str; 2] = ["on", "off"];

fn state(pid: i32) -> char {
    sys::stat(pid).map_or('-', |stat| stat.state)
}

fn wait_state(pid: i32, wanted: char) {
    assert!(sys::spin(GUARD, || state(pid) == wanted), "{pid} is {}, not {wanted}", state(pid));
}

/// Which signals `main` got, in its order.
fn got(ended: &Ended) -> Vec<i32> {
    let of_main = |told: &Told| match told {
        Told::Got { name, signal } if name == "main" => Some(*signal),
        _ => None,
    };
    ended.told.iter().filter_map(of_main).collect()
}

fn stop(mut run: Running) -> Ended {
    run.signal(SIGTERM);
    run.finish()
}

// Signals.

#[test]
fn every_signal_that_asks_for_no_stop_is_passed_on_once_and_to_the_main_process_only() {
    for guard in GUARDS {
        let kept = [SIGTERM, SIGINT, SIGQUIT, SIGCHLD, SIGPIPE, SIGKILL, SIGSTOP, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU];
        // 32 and 33 are the C library's; the node cannot catch them.
        let signals: Vec<i32> =
            (1..=64).filter(|signal| !kept.contains(signal) && ![32, 33].contains(signal)).collect();
        assert!([SIGHUP, SIGUSR1, SIGUSR2, SIGWINCH, SIGALRM, 34, 64].iter().all(|signal| signals.contains(signal)));
        let other = node("other").reports(signals.clone());
        let main = node("main").reports(signals.clone()).on(SIGTERM, Act::Exit(4)).with(other);
        let mut run = Supervise::new().options(["--guard", guard]).tree(main).start();
        run.wait_up();
        for signal in &signals {
            run.signal(*signal);
            run.wait_got("main", *signal, 1);
        }
        let ended = stop(run);
        assert_eq!(ended.code, Some(4), "{ended}");
        assert_eq!(got(&ended), [signals.clone(), vec![SIGTERM]].concat(), "{ended}");
        assert!(signals.iter().all(|signal| ended.got("other", *signal) == 0), "{ended}");
    }
}

#[test]
fn a_signal_that_the_c_library_hides_is_passed_on() {
    for guard in GUARDS {
        for signal in [32, 33] {
            let mut run = Supervise::new().options(["--guard", guard]).tree(node("main")).start();
            run.wait_up();
            run.signal(signal);
            assert_eq!(run.finish().code, Some(128 + signal));
        }
    }
}

#[test]
fn queued_real_time_signals_keep_their_count_and_order() {
    for guard in GUARDS {
        let queued = [(34, 70), (35, 1), (40, 3), (63, 2), (64, 5)];
        let main = queued.iter().fold(node("main"), |main, (signal, _)| main.reports([*signal]));
        let mut run = Supervise::new()
            .options(["--guard", guard])
            .tree(main.reports([SIGUSR1]).on(SIGTERM, Act::Exit(0)))
            .start();
        run.wait_up();
        // All of them wait for us at once, sent from the last to the first; a standard signal counts once.
        run.signal(SIGSTOP);
        wait_state(run.pid(), 'T');
        for (signal, count) in queued.into_iter().rev().chain([(SIGUSR1, 10)]) {
            (0..count).for_each(|_| run.signal(signal));
        }
        run.signal(SIGCONT);
        for (signal, count) in queued {
            run.wait_got("main", signal, count);
        }
        let ended = stop(run);
        let real_time = queued.iter().flat_map(|(signal, count)| vec![*signal; *count]);
        let expected: Vec<i32> = [SIGUSR1].into_iter().chain(real_time).chain([SIGTERM]).collect();
        assert_eq!(got(&ended), expected, "{ended}");
    }
}

#[test]
fn term_int_and_quit_are_passed_on_as_themselves() {
    for guard in GUARDS {
        for (signal, name) in [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT"), (SIGQUIT, "SIGQUIT")] {
            let main = node("main").reports([SIGTERM, SIGINT, SIGQUIT]).on(signal, Act::Exit(5));
            let mut run = Supervise::new().options(["--guard", guard]).tree(main).start();
            run.wait_up();
            run.signal(signal);
            let ended = run.finish();
            assert_eq!((ended.code, got(&ended)), (Some(5), vec![signal]), "{ended}");
            assert_eq!(ended.report["stop_signal"], json!(name), "{ended}");
        }
    }
}

#[test]
fn a_stop_signal_of_ones_own_answers_term_and_nothing_else() {
    for (written, number) in [("USR1", SIGUSR1), ("SIGRTMIN+3", 37), ("2", SIGINT)] {
        let main = || node("main").reports([SIGTERM, SIGQUIT]).on(number, Act::Exit(6));
        let configured = format!("[service]\ncommand = {{command}}\n[stop]\nsignal = \"{written}\"\n");
        let runs = [
            Supervise::new().options(["--stop-signal", written]).tree(main()),
            Supervise::new().config(&configured).tree(main()),
        ];
        for run in runs {
            let mut run = run.start();
            run.wait_up();
            run.signal(SIGTERM);
            let ended = run.finish();
            assert_eq!((ended.code, got(&ended)), (Some(6), vec![number]), "{ended}");
        }
        let mut run =
            Supervise::new().options(["--stop-signal", written]).tree(main().on(SIGQUIT, Act::Exit(7))).start();
        run.wait_up();
        run.signal(SIGQUIT);
        let ended = run.finish();
        assert_eq!((ended.code, got(&ended)), (Some(7), vec![SIGQUIT]), "{ended}");
    }
}

#[test]
fn a_mapped_signal_is_passed_on_as_the_other_and_mapped_once() {
    let options = ["--map-signal", "HUP=USR1", "--map-signal", "USR1=USR2", "--map-signal", "USR2=RTMIN+1"];
    let reported = [SIGHUP, SIGUSR1, SIGUSR2, 35];
    let main = || node("main").reports(reported).on(SIGTERM, Act::Exit(0));
    let config =
        "[service]\ncommand = {command}\n[signals]\nmap = { HUP = \"USR1\", USR1 = \"USR2\", USR2 = \"RTMIN+1\" }\n";
    for run in [Supervise::new().options(options), Supervise::new().config(config)] {
        let mut run = run.tree(main()).start();
        run.wait_up();
        for (sent, expected) in [(SIGHUP, SIGUSR1), (SIGUSR1, SIGUSR2), (SIGUSR2, 35)] {
            run.signal(sent);
            run.wait_got("main", expected, 1);
        }
        let ended = stop(run);
        assert_eq!(got(&ended), [SIGUSR1, SIGUSR2, 35, SIGTERM], "{ended}");
    }
}

#[test]
fn a_signal_mapped_to_a_stop_or_from_one_asks_for_a_stop() {
    for (map, sent, expected) in
        [("HUP=TERM", SIGHUP, SIGTERM), ("TERM=QUIT", SIGTERM, SIGQUIT), ("INT=USR1", SIGINT, SIGUSR1)]
    {
        let main = node("main").reports([SIGHUP, SIGTERM, SIGINT, SIGQUIT, SIGUSR1]).on(expected, Act::Report);
        let options = ["--map-signal", map, "--stop-timeout", "200ms"];
        let mut run = Supervise::new().options(options).tree(main).start();
        run.wait_up();
        run.signal(sent);
        // It only tells of the signal, so the ladder has to end it: that was a stop.
        let ended = run.finish();
        assert_eq!((ended.code, got(&ended)), (Some(128 + SIGKILL), vec![expected]), "{map} {ended}");
    }
}

#[test]
fn a_signal_between_start_and_exec_reaches_the_service() {
    // Real-time, so that each one counts; the last one must find the service, or what becomes it.
    for round in 0..50 {
        let run = Supervise::new().command(["sleep", "1000"]).signal_at(Duration::from_micros(round * 60), 50);
        let ended = run.run();
        let ended_by_it = ended.code == Some(128 + 50) || ended.signal == Some(50);
        assert!(ended_by_it, "after {} us: {ended}", round * 60);
    }
}

#[test]
fn stopped_without_a_terminal_both_stop_and_both_go_on() {
    for signal in [SIGTSTP, SIGTTIN, SIGTTOU] {
        let main = node("main").reports([SIGCONT]).on(SIGTERM, Act::Exit(3)).with(node("w"));
        let mut run = Supervise::new().tree(main).start();
        run.wait_up();
        let (main, w) = (run.node("main").pid, run.node("w").pid);
        for times in 1..=2 {
            run.signal(signal);
            run.wait_stopped();
            [main, w].into_iter().for_each(|pid| wait_state(pid, 'T'));
            run.signal(SIGCONT);
            run.wait_continued();
            run.wait_got("main", SIGCONT, times);
            [run.pid(), main, w].into_iter().for_each(|pid| wait_state(pid, 'S'));
        }
        assert_eq!(stop(run).code, Some(3));
    }
}

#[test]
fn a_stop_asked_of_the_stopped_is_done_when_we_go_on() {
    let mut run = Supervise::new().tree(node("main")).start();
    run.wait_up();
    run.signal(SIGTSTP);
    run.wait_stopped();
    run.signal(SIGTERM);
    run.signal(SIGCONT);
    assert_eq!(run.finish().code, Some(128 + SIGTERM));
}

#[test]
fn a_service_that_stops_by_itself_without_a_terminal_does_not_stop_us() {
    let mut run = Supervise::new().tree(node("main").reports([SIGCONT]).on(SIGTERM, Act::Exit(3))).start();
    run.wait_up();
    let main = run.node("main").pid;
    run.signal_node("main", SIGSTOP);
    wait_state(main, 'T');
    // We live on: what comes in is passed on, and a stop continues the service so that it can end.
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!((ended.code, ended.got("main", SIGTERM)), (Some(3), 1), "{ended}");
}

// Orphans.

fn zombies(run: &Running) -> usize {
    let supervisor = sys::children(run.pid());
    run.processes().iter().filter(|stat| stat.state == 'Z' && supervisor.contains(&stat.ppid)).count()
}

#[test]
fn orphans_are_reaped_while_the_service_runs() {
    let mut run = Supervise::new().tree(node("main").churn(20_000, 20).on(SIGTERM, Act::Exit(0))).start();
    run.wait_done("main");
    assert!(sys::spin(GUARD, || zombies(&run) == 0), "{} zombies", zombies(&run));
    let ended = stop(run);
    assert_eq!((ended.code, ended.fell), (Some(0), 0), "{ended}");
    assert_eq!(ended.report["leftovers"], json!([]), "{ended}");
}

#[test]
fn zombies_do_not_pile_up_under_a_limit_on_processes() {
    if !need_root() {
        return;
    }
    // The churn waits patiently for room, of which there is none unless the dead are reaped.
    let run = Supervise::new().user(899_002, 899_002).rlimit(libc::RLIMIT_NPROC, 100, 100);
    let mut run = run.tree(node("main").churn(5_000, 20).on(SIGTERM, Act::Exit(0))).start();
    run.wait_done("main");
    assert_eq!(stop(run).code, Some(0));
}

#[test]
fn many_deaths_at_once_are_all_reaped_whatever_signal_tells_of_them() {
    let main = node("main")
        .with(node("o").orphaned().copies(200))
        .with(node("d").daemonized().copies(100))
        .with(node("child").with(node("silent").exit_signal(0).copies(50)))
        .on(SIGTERM, Act::Exit(0));
    let mut run = Supervise::new().tree(main).start();
    run.wait_up();
    let pids: Vec<i32> =
        run.nodes().filter(|proc| proc.name != "main" && proc.name != "child").map(|p| p.pid).collect();
    assert_eq!(pids.len(), 350);
    // Stopped, we get one SIGCHLD for all of them.
    run.signal_node("child", SIGKILL);
    run.signal(SIGSTOP);
    wait_state(run.pid(), 'T');
    pids.iter().for_each(|pid| sys::kill(*pid, SIGKILL).unwrap());
    run.signal(SIGCONT);
    let child = run.node("child").pid;
    // The child is its parent's to reap; nobody else is left.
    assert!(sys::spin(GUARD, || pids.iter().all(|pid| state(*pid) == '-')), "{} zombies", zombies(&run));
    assert_eq!(state(child), 'Z');
    assert_eq!(stop(run).report["leftovers"], json!([]));
}

#[test]
fn orphans_are_reaped_while_a_stop_is_waited_for() {
    let main = node("main").reports([SIGTERM]).on(SIGINT, Act::Report).with(node("o").orphaned()).exit_on_go(0);
    let mut run = Supervise::new().options(["--stop-timeout", "1h"]).tree(main).start();
    run.wait_up();
    run.signal(SIGTERM);
    run.wait_got("main", SIGTERM, 1);
    let o = run.node("o").pid;
    run.signal_node("o", SIGKILL);
    assert!(sys::spin(GUARD, || state(o) == '-'));
    run.let_go("main");
    assert_eq!(run.finish().code, Some(0));
}

// Silence.

/// How often the process was put to sleep or interrupted, and the time it ran, by the kernel.
fn switches(pid: i32) -> (String, Vec<String>) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let counts = status.lines().filter(|line| line.contains("ctxt_switches")).map(str::to_owned).collect();
    (fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default(), counts)
}

/// Nothing is to come in this time.
fn pass(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        sys::wait_readable(&[], Some(end)).unwrap();
    }
}

fn assert_silent(ours: [i32; 2], what: &str) {
    // They may still be busy with what has just happened.
    let settled = sys::spin(GUARD, || {
        let before = ours.map(switches);
        pass(Duration::from_millis(200));
        // On a busy machine one may be awake and wait for its turn.
        ours.map(state) == ['S', 'S'] && ours.map(switches) == before
    });
    assert!(settled, "{what}: they never rest");
    let before = ours.map(switches);
    pass(Duration::from_secs(3));
    assert_eq!(ours.map(switches), before, "{what}");
}

#[test]
fn nothing_wakes_us_while_nothing_happens() {
    let main =
        node("main").reports([SIGTERM, SIGHUP]).with(node("w").setsid()).with(node("o").orphaned()).exit_on_go(0);
    let options = ["--timeout", "1h", "--stop-timeout", "1h", "--leftover-timeout", "1h"];
    let mut run = Supervise::new().options(options).tree(main).start();
    run.wait_up();
    // Guard and supervisor.
    let ours = [run.pid(), run.supervisor()];
    assert_silent(ours, "up");
    run.signal(SIGHUP);
    run.wait_got("main", SIGHUP, 1);
    run.signal(SIGTERM);
    run.wait_got("main", SIGTERM, 1);
    assert_silent(ours, "stopping");
    run.let_go("main");
    assert_eq!(run.finish().code, Some(0));
}
