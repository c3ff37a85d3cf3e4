//! With a guard it is as if there were one process: for who signals it, for a shell, for the service, for the kernel.
//!
//! What a service is passed and how it ends is claimed in `life`, `end` and `terminal`, all of it with a guard.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use libc::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGQUIT, SIGSTOP, SIGTERM, SIGTSTP, SIGUSR1};
use serde_json::json;

use crate::support::fault::Fault;
use crate::support::{Act, Ended, Io, Running, Supervise, need_root, node, sys};

/// The limit of every wait of ours.
const LIMIT: Duration = Duration::from_secs(30);

/// What no run may wait for.
const NEVER_SPENT: [&str; 4] = ["--stop-timeout", "1m", "--leftover-timeout", "1m"];

fn state(pid: i32) -> char {
    sys::stat(pid).map_or('-', |stat| stat.state)
}

fn wait_state(pid: i32, wanted: char) {
    assert!(sys::spin(LIMIT, || state(pid) == wanted), "{pid} is {}, not {wanted}", state(pid));
}

/// What comes behind all that was sent before.
fn wait_marker(run: &mut Running, times: usize) {
    run.signal(SIGUSR1);
    run.wait_got("main", SIGUSR1, times);
}

fn stop(mut run: Running) -> Ended {
    run.signal(SIGTERM);
    run.finish()
}

// Who is there.

#[test]
fn the_other_process_has_another_name_and_another_group() {
    let mut run = Supervise::new().options(NEVER_SPENT).tree(node("main")).start();
    run.wait_up();
    let (guard, supervisor) = (sys::stat(run.pid()).unwrap(), sys::stat(run.supervisor()).unwrap());
    assert_eq!((guard.comm.as_str(), guard.pgid), ("supervise", run.pid()));
    assert!(sys::command(guard.pid).contains("supervise --stop-timeout 1m"));
    assert_eq!((supervisor.comm.as_str(), supervisor.pgid), ("supervisor", supervisor.pid));
    assert_eq!((supervisor.ppid, supervisor.sid), (guard.pid, guard.sid));
    assert_eq!((run.node("main").ppid, run.processes().len()), (supervisor.pid, 3));
    assert_eq!(sys::command(supervisor.pid), "supervisor");
    assert_eq!(stop(run).code, Some(143));
}

#[test]
fn in_a_list_of_processes_the_other_name_stands_alone() {
    // And as a leftover of one that is above: no word of what the program was called with.
    let ours = env!("CARGO_BIN_EXE_supervise");
    let script = format!("setsid {ours} -- sh -c 'echo up; exec sleep 1000' & read line; exit 0");
    let mut run = Supervise::new().options(NEVER_SPENT).command(["sh", "-c", &script]).stdin(Io::Pipe).start();
    run.expect_stdout("up\n");
    let inner = run.processes().into_iter().filter(|stat| stat.comm == "supervisor" && stat.pgid == stat.pid);
    let outer = run.supervisor();
    let inner = inner.map(|stat| stat.pid).find(|pid| *pid != outer).unwrap();
    sys::kill(inner, SIGSTOP).unwrap();
    wait_state(inner, 'T');
    run.write_stdin("end\n");
    let ended = run.finish();
    let all = ended.report["leftovers"].as_array().unwrap();
    let told = all.iter().find(|one| one["pid"] == inner).unwrap_or_else(|| panic!("{ended}"));
    assert_eq!(told["command"], "supervisor", "{ended}");
}

#[test]
fn without_a_guard_there_is_one_process_less() {
    let mut run = Supervise::new().options(["--guard", "off"]).tree(node("main")).start();
    run.wait_up();
    assert_eq!((run.node("main").ppid, run.processes().len()), (run.pid(), 2));
    assert_eq!(sys::stat(run.pid()).unwrap().comm, "supervise");
    assert_eq!(stop(run).code, Some(143));
}

#[test]
fn pid_one_has_a_guard_when_it_is_told_to() {
    if !need_root() {
        return;
    }
    for (guard, count) in [("auto", 2), ("off", 2), ("on", 3)] {
        let tree = node("main").with(node("w").setsid().ignores([SIGTERM])).with(node("o").daemonized()).exit_on_go(3);
        let options = ["--guard", guard, "--leftover-timeout", "100ms"];
        let mut run = Supervise::new().options(options).pid_one().tree(tree).start();
        run.wait_up();
        assert_eq!(run.processes().len(), count + 2, "{guard}: {:?}", run.processes());
        run.let_go("main");
        let ended = run.finish();
        assert_eq!((ended.code, ended.fell), (Some(3), 0), "{guard}: {ended}");
        assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 2, "{guard}: {ended}");
    }
    let mut run = Supervise::new().options(["--guard", "on"]).pid_one().tree(node("main").with(node("w"))).start();
    run.wait_up();
    let supervisor = sys::children(run.pid())[0];
    sys::kill(supervisor, SIGKILL).unwrap();
    let ended = run.finish();
    assert_eq!((ended.code, &ended.report["result"]), (Some(125), &json!("supervisor-lost")), "{ended}");
}

// Where there can be none.

/// What the guard needs and a service does not.
fn no_guard() -> Supervise {
    Supervise::new().fault(Fault::new().fails(libc::SYS_socketpair, libc::EMFILE))
}

#[test]
fn where_the_kernel_has_no_guard_to_give_the_run_goes_on_and_says_so() {
    let mut run = no_guard().tree(node("main").with(node("w").setsid()).exit_on_go(3)).start();
    run.wait_up();
    assert_eq!(run.node("main").ppid, run.pid());
    run.let_go("main");
    let ended = run.finish();
    assert_eq!((ended.code, ended.stderr.lines().count()), (Some(3), 2), "{ended}");
    let said = "supervise: warning: there is no guard, so nobody cleans up if supervise is killed: Too many open files";
    assert!(ended.stderr.starts_with(said), "{ended}");
    assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 1, "{ended}");
}

#[test]
fn where_there_must_be_a_guard_and_is_none_nothing_is_started() {
    let run = no_guard().options(["--guard", "on"]);
    let sign = run.dir().join("started");
    let ended = run.command(["touch", sign.to_str().unwrap()]).run();
    assert_eq!((ended.code, sign.exists(), ended.stderr.lines().count()), (Some(125), false, 1), "{ended}");
    let said = "supervise: error: cannot make the guard: Too many open files";
    assert!(ended.stderr.starts_with(said) && ended.stderr.contains("nothing was started"), "{ended}");
}

#[test]
fn what_is_refused_is_refused_once_and_with_its_own_code() {
    let refused = [
        (Supervise::new().command(["/does/not/exist"]), 127),
        (Supervise::new().command(["/"]), 126),
        (Supervise::new().config("[service]\nno-such-key = 1\n").command(["true"]), 2),
        (Supervise::new().options(["-c", "/does/not/exist"]).command(["true"]), 2),
        (Supervise::new(), 2),
        (Supervise::new().options(["--stop-timeout", "never"]).command(["true"]), 2),
    ];
    for (run, code) in refused {
        let ended = run.options(["--guard", "on"]).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!(ended.stderr.matches("supervise: error: ").count(), 1, "{ended}");
        assert!(code == 2 || ended.stderr.lines().count() == 1, "{ended}");
    }
}

// Signals.

#[test]
fn a_stop_of_the_whole_control_group_is_one_stop() {
    // systemd's KillMode=control-group: whoever is in it gets SIGTERM, in no known order.
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]] {
        let main = node("main").reports([SIGTERM, SIGUSR1]).exit_on_go(6);
        let mut run = Supervise::new().options(NEVER_SPENT).tree(main).start();
        run.wait_up();
        let all = [run.pid(), run.supervisor(), run.node("main").pid];
        for one in order {
            sys::kill(all[one], SIGTERM).unwrap();
        }
        run.wait_got("main", SIGTERM, 1);
        wait_marker(&mut run, 1);
        // Its own, and ours.
        assert!(run.got("main", SIGTERM) <= 2);
        run.let_go("main");
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["stop_signal"]), (Some(6), &json!("SIGTERM")), "{order:?} {ended}");
        assert_eq!((&ended.report["result"], &ended.report["leftovers"]), (&json!("exit-code"), &json!([])), "{ended}");
    }
}

#[test]
fn a_signal_to_all_of_us_at_once_reaches_the_service_once() {
    let main = node("main").reports([SIGHUP, SIGUSR1]).on(SIGTERM, Act::Exit(0));
    let mut run = Supervise::new().guard(Duration::from_secs(10)).tree(main).start();
    run.wait_up();
    let supervisor = run.supervisor();
    for times in 1..=20 {
        // Either may be the first.
        if times % 2 == 0 {
            sys::kill(supervisor, SIGHUP).unwrap();
        }
        run.signal(SIGHUP);
        if times % 2 != 0 {
            sys::kill(supervisor, SIGHUP).unwrap();
        }
        run.wait_got("main", SIGHUP, times);
        wait_marker(&mut run, times);
        assert_eq!(run.got("main", SIGHUP), times);
    }
    assert_eq!(stop(run).code, Some(0));
}

#[test]
fn what_is_sent_past_the_guard_is_not_passed_on() {
    let not_caught = [SIGKILL, SIGSTOP, SIGCHLD, SIGPIPE, SIGTERM, SIGINT, SIGQUIT, SIGUSR1, 32, 33];
    let signals: Vec<i32> = (1..=64).filter(|signal| !not_caught.contains(signal)).collect();
    let main = node("main").reports(signals.clone()).reports([SIGUSR1]).on(SIGTERM, Act::Exit(0));
    let mut run = Supervise::new().tree(main).start();
    run.wait_up();
    let (supervisor, main) = (run.supervisor(), run.node("main").pid);
    for signal in signals.iter().copied().chain([32, 33, SIGCHLD, SIGPIPE]) {
        sys::kill(supervisor, signal).unwrap();
    }
    wait_marker(&mut run, 1);
    for pid in [run.pid(), supervisor, main] {
        wait_state(pid, 'S');
    }
    // A stop brings a SIGCONT of its own.
    assert!(signals.iter().all(|signal| run.got("main", *signal) == 0));
    let ended = stop(run);
    assert_eq!((ended.code, ended.got("main", SIGUSR1)), (Some(0), 1), "{ended}");
}

#[test]
fn a_stop_past_the_guard_is_a_stop() {
    for (signal, name) in [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT"), (SIGQUIT, "SIGQUIT")] {
        let tree = node("main").on(signal, Act::Exit(5)).with(node("w").setsid());
        let mut run = Supervise::new().options(NEVER_SPENT).tree(tree).start();
        run.wait_up();
        let supervisor = run.supervisor();
        sys::kill(supervisor, signal).unwrap();
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["stop_signal"]), (Some(5), &json!(name)), "{ended}");
        assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 1, "{ended}");
    }
}

#[test]
fn a_flood_of_signals_arrives_whole_and_in_order() {
    // More than one read of either process takes.
    const COUNT: usize = 3000;
    let mut run = Supervise::new().tree(node("main").reports([40, SIGUSR1]).on(SIGTERM, Act::Exit(0))).start();
    run.wait_up();
    for _ in 0..COUNT {
        run.signal(40);
    }
    run.wait_got("main", 40, COUNT);
    wait_marker(&mut run, 1);
    let ended = stop(run);
    assert_eq!((ended.code, ended.got("main", 40)), (Some(0), COUNT), "{ended}");
}

// Stopped and continued.

#[test]
fn a_stop_and_a_continue_in_quick_succession_never_leave_one_stopped_and_the_other_not() {
    for (at_terminal, guard) in [(false, "on"), (true, "on"), (false, "off"), (true, "off")] {
        let tree = node("main").reports([SIGUSR1]).on(SIGTERM, Act::Exit(4));
        let run = Supervise::new().options(NEVER_SPENT).options(["--guard", guard]).tree(tree);
        let mut run = if at_terminal { run.at_terminal() } else { run }.start();
        run.wait_up();
        let (ours, main) = (run.pid(), run.node("main").pid);
        for times in 1..=60 {
            run.signal(SIGTSTP);
            let until = Instant::now() + Duration::from_micros(20 * times);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            run.signal(SIGCONT);
            // Through all of us, to a service that goes on.
            run.signal(SIGUSR1);
            let goes_on = sys::spin(Duration::from_secs(10), || {
                // Who stops itself after a look at what is pending loses a SIGCONT that comes in between, as every program
                // does that stops itself. Then both have to be stopped.
                if [ours, main].map(state) == ['T', 'T'] {
                    run.signal(SIGCONT);
                }
                run.got("main", SIGUSR1) >= usize::try_from(times).unwrap()
            });
            let how = [ours, main].map(state);
            assert!(
                goes_on,
                "guard {guard}, at a terminal {at_terminal}, {times}: we are {}, the service {}",
                how[0], how[1]
            );
        }
        let settled = sys::spin(Duration::from_secs(10), || [ours, main].map(state) == ['S', 'S']);
        let how = [ours, main].map(state);
        assert!(settled, "guard {guard}, at a terminal {at_terminal}, in the end: {how:?}");
        let ended = stop(run);
        assert_eq!(ended.code, Some(4), "{ended}");
    }
}

#[test]
fn the_supervisor_itself_is_never_stopped_with_the_service() {
    let mut run = Supervise::new().options(NEVER_SPENT).tree(node("main")).start();
    run.wait_up();
    let (supervisor, main) = (run.supervisor(), run.node("main").pid);
    run.signal(SIGTSTP);
    assert_eq!(run.wait_stopped().signal, SIGSTOP);
    wait_state(main, 'T');
    // What would end it is heard while the guard hears nothing.
    wait_state(supervisor, 'S');
    sys::kill(supervisor, SIGTERM).unwrap();
    wait_state(supervisor, 'Z');
    run.signal(SIGCONT);
    assert_eq!(run.finish().code, Some(143));
}

// In a shell.

fn script(text: &str) -> Supervise {
    let run = Supervise::program("sh").options(["-c", text]);
    run.env("S", &format!("{} --report report.json --", env!("CARGO_BIN_EXE_supervise")))
}

#[test]
fn a_shell_s_background_process_is_the_one_to_wait_for_and_to_kill() {
    let ended = script("$S sh -c 'exit 7' & wait $!").run();
    assert_eq!(ended.code, Some(7), "{ended}");
    let text = r#"mkfifo up; $S sh -c 'trap "exit 9" TERM; echo >up; while :; do read x <never; done' & read x <up; kill $!; wait $!"#;
    let ended = script(&format!("mkfifo never; {text}")).run();
    assert_eq!((ended.code, &ended.report["stop_signal"]), (Some(9), &json!("SIGTERM")), "{ended}");
    let ended = script("mkfifo up; $S sh -c 'echo >up; exec sleep 1000' & read x <up; kill -HUP $!; wait $!").run();
    assert_eq!(ended.code, Some(128 + SIGHUP), "{ended}");
}

#[test]
fn a_shell_that_becomes_us_is_the_guard() {
    let mut run = script("echo $$; exec $S sh -c 'echo up; exec sleep 1000'").start();
    let shell: i32 = run.expect_stdout("\n").trim().parse().unwrap();
    run.expect_stdout("up\n");
    assert_eq!((shell, sys::stat(shell).unwrap().comm.as_str()), (run.pid(), "supervise"));
    assert_eq!(run.processes().len(), 3);
    assert_eq!(stop(run).code, Some(143));
}

// What we hold.

/// The numbers of its descriptors, and where each leads.
fn descriptors(pid: i32) -> Vec<(i32, String)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let mut all: Vec<(i32, String)> = entries
        .filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?.to_str()?.to_owned();
            Some((entry.file_name().to_str()?.parse().ok()?, target))
        })
        .collect();
    all.sort();
    all
}

#[test]
fn the_guard_holds_standard_error_its_two_ears_and_the_cgroup() {
    let run = Supervise::new().stdin(Io::Pipe).command(["sh", "-c", "echo up; read line; exit 0"]);
    let (_read, write) = crate::support::supervise::pipe();
    let mut run = run.fd(3, write.try_clone().unwrap()).fd(200, write).start();
    run.expect_stdout("up\n");
    let guard = run.pid();
    // A cgroup there is where one can be made.
    let is_other = |target: &str| target != "/dev/null" && !target.contains("/supervise-");
    let held = || descriptors(guard).into_iter().filter(|(_, target)| is_other(target)).collect::<Vec<_>>();
    assert!(sys::spin(LIMIT, || held().len() == 3), "{:?}", held());
    let held = held();
    assert!(held.iter().any(|(number, target)| *number == 2 && target.starts_with("pipe:")), "{held:?}");
    for kind in ["socket:[", "anon_inode:[signalfd]"] {
        assert!(held.iter().any(|(_, target)| target.starts_with(kind)), "{kind} {held:?}");
    }
    run.write_stdin("end\n");
    assert_eq!(run.finish().code, Some(0));
}

// When memory runs out.

fn oom_score(pid: i32) -> i32 {
    fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim().parse().unwrap()
}

/// Whether a process of this user may lower its score.
fn may_lower(user: Option<u32>) -> bool {
    let run = Supervise::program("sh").options(["-c", "echo -900 2>/dev/null >/proc/self/oom_score_adj"]);
    let run = if let Some(uid) = user { run.user(uid, uid) } else { run };
    run.run().code == Some(0)
}

#[test]
fn we_go_last_when_memory_runs_out_and_the_service_goes_when_it_would_have_gone_without_us() {
    let first = oom_score(std::process::id().cast_signed());
    let users = [None, Some(4711)].into_iter().filter(|user| user.is_none() || need_root());
    for user in users {
        let lowers = may_lower(user);
        for raised in [first, 100, 900] {
            for guard in ["on", "off"] {
                let service = "echo up; read line; exit 0";
                let text = format!(
                    "echo {raised} >/proc/self/oom_score_adj; exec {} --guard {guard} -- sh -c '{service}'",
                    env!("CARGO_BIN_EXE_supervise")
                );
                let run = Supervise::program("sh").options(["-c", &text]).stdin(Io::Pipe);
                let mut run = if let Some(uid) = user { run.user(uid, uid) } else { run }.start();
                run.expect_stdout("up\n");
                let expected = if lowers { -900 } else { raised };
                let ours: BTreeSet<i32> = match guard {
                    "on" => [run.pid(), run.supervisor()].into(),
                    _ => [run.pid()].into(),
                };
                let service: Vec<i32> =
                    run.processes().iter().map(|stat| stat.pid).filter(|pid| !ours.contains(pid)).collect();
                assert!(ours.iter().all(|pid| oom_score(*pid) == expected), "{user:?} {raised} {guard}");
                assert_eq!(service.iter().map(|pid| oom_score(*pid)).collect::<Vec<_>>(), [raised], "{user:?} {guard}");
                run.write_stdin("end\n");
                assert_eq!(run.finish().code, Some(0));
            }
        }
    }
}

#[test]
fn a_pid_namespace_that_was_made_for_the_next_child_is_the_supervisor_s() {
    if !need_root() {
        return;
    }
    let script = "unshare -p \"$0\" --report report.json -- sh -c 'echo up; exit 8'";
    let ended = Supervise::program("sh").options(["-c", script, env!("CARGO_BIN_EXE_supervise")]).run();
    assert_eq!((ended.code, &*ended.stdout), (Some(8), "up\n"), "{ended}");
}

#[test]
fn a_stop_ends_one_that_waits_for_its_configuration() {
    for signal in [SIGTERM, SIGINT] {
        let run = Supervise::new().without_report();
        let fifo = run.dir().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let mut run = run.options(["-c", fifo.to_str().unwrap()]).command(["touch", "started"]).start();
        run.supervisor();
        run.signal(signal);
        let ended = run.finish_empty_within(LIMIT);
        assert_eq!(ended.code, Some(128 + signal), "{ended}");
        assert!(ended.stderr.contains("nothing was started"), "{ended}");
        assert!(!ended.dir.path().join("started").exists(), "{ended}");
    }
}
