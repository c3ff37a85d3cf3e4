//! What a service may leave, of every kind, and that nothing is left of it, that each is told once, and named.

use std::time::Duration;

use libc::{SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1};
use serde_json::Value;

use crate::end::{IMPATIENT, fate, is_called};
use crate::support::tree::{Node, bomb_uid, ignoring};
use crate::support::{Act, Born, Ended, Supervise, need_program, need_root, node, node_program, sys};

/// Not spent where a death is waited for.
const PATIENT: [&str; 2] = ["--leftover-timeout", "30s"];
const WITHOUT_WAITING: Duration = Duration::from_secs(25);

/// Runs a service that leaves `leftovers`, ends with 7 when they are all up, and asserts that they are ended and named.
fn leave(options: &[&str], leftovers: impl IntoIterator<Item = Node>) -> Ended {
    let main = leftovers.into_iter().fold(node("main"), Node::with).exit_when_up(7);
    let mut run = Supervise::new().options(options.iter().copied()).tree(main).start();
    run.wait_up();
    let ended = run.finish();
    assert_eq!(ended.code, Some(7), "{ended}");
    assert_eq!(ended.fell, 0, "{ended}");
    ended
}

/// What became of each, by pid and never by name twice.
fn fates(ended: &Ended) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let leftovers = ended.report["leftovers"].as_array().unwrap();
    let mut all: Vec<_> = leftovers.iter().map(|one| (text(&one["command"]), text(&one["ended"]))).collect();
    all.sort();
    all
}

fn all_ended_by(ended: &Ended, how: &str, count: usize) {
    let fates = fates(ended);
    assert_eq!(fates.len(), count, "{ended}");
    assert!(fates.iter().all(|(_, fate)| fate == how), "{ended}");
    assert_eq!(ended.report["leftovers_unnamed"], 0, "{ended}");
    let noun = if count == 1 { "leftover" } else { "leftovers" };
    assert!(ended.stderr.contains(&format!("ended {count} {noun}")), "{ended}");
    assert!(ended.stderr.contains(&format!("{count} by {how}")), "{ended}");
}

/// TERM is enough for these.
fn terminated(leftovers: impl IntoIterator<Item = Node>, count: usize) -> Ended {
    let ended = leave(&PATIENT, leftovers);
    all_ended_by(&ended, "SIGTERM", count);
    assert!(ended.wall < WITHOUT_WAITING, "{ended}");
    ended
}

/// Only KILL ends these.
fn killed(leftovers: impl IntoIterator<Item = Node>, count: usize) -> Ended {
    let ended = leave(&IMPATIENT, leftovers);
    all_ended_by(&ended, "SIGKILL", count);
    ended
}

fn deaf(name: &str) -> Node {
    node(name).ignores([SIGTERM, SIGHUP, SIGINT])
}

/// A chain of processes below each other, each in a session of its own.
fn sessions_below_each_other(depth: u32, link: &dyn Fn(&str) -> Node) -> Node {
    let last = link("s0").setsid();
    (1..depth).fold(last, |below, level| link(&format!("s{level}")).setsid().with(below))
}

// How it is placed.

#[test]
fn members_of_the_service_s_group_are_ended() {
    terminated([node("w").copies(10).with(node("x"))], 20);
}

#[test]
fn groups_of_their_own_are_ended() {
    terminated([node("w").own_group().copies(10).with(node("x").own_group().with(node("y")))], 30);
}

#[test]
fn processes_that_called_setsid_are_ended() {
    terminated([node("w").setsid().copies(10).with(node("x").copies(2))], 30);
}

#[test]
fn chains_of_sessions_of_any_depth_are_ended() {
    for depth in [3, 40] {
        terminated([sessions_below_each_other(depth, &|name| node(name))], depth as usize);
        killed([sessions_below_each_other(depth, &|name| deaf(name))], depth as usize);
    }
}

#[test]
fn orphans_and_processes_that_daemonized_themselves_are_ended() {
    terminated([node("o").orphaned(), node("d").daemonized().with(node("x").daemonized()), node("p").orphaned()], 4);
    killed([deaf("o").orphaned(), deaf("d").daemonized().with(deaf("x").setsid())], 3);
}

#[test]
fn background_members_of_a_pipeline_are_ended_without_a_word_about_pid_one() {
    let script = "sleep 1000 | cat & (sleep 2000 &); read line; exit 3";
    let run = Supervise::new().options(PATIENT).stdin(crate::support::Io::Pipe).command(["sh", "-c", script]);
    let mut run = run.start();
    let members = ["sleep 1000", "cat", "sleep 2000"];
    let all_there = || {
        let commands: Vec<String> = run.processes().iter().map(|stat| sys::command(stat.pid)).collect();
        members.iter().all(|member| commands.iter().any(|command| command == member))
    };
    assert!(sys::spin(Duration::from_secs(50), all_there));
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    all_ended_by(&ended, "SIGTERM", 3);
    assert!(members.iter().all(|member| fate(&ended, member) == "SIGTERM"), "{ended}");
    // The line that names them, and no other.
    assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
}

// What it is.

#[test]
fn leftovers_that_ignore_sigterm_are_killed() {
    let main = node("main").with(deaf("near")).with(deaf("far").setsid()).exit_on_go(7);
    let mut run = Supervise::new().options(IMPATIENT).tree(main).start();
    run.wait_up();
    assert!(run.node("near").ignores(SIGTERM) && run.node("far").ignores(SIGTERM));
    run.let_go("main");
    let ended = run.finish();
    assert_eq!(ended.code, Some(7), "{ended}");
    all_ended_by(&ended, "SIGKILL", 2);
}

#[test]
fn leftovers_that_block_sigterm_are_killed() {
    killed([node("near").blocks([SIGTERM]), node("far").setsid().blocks([SIGTERM])], 2);
}

#[test]
fn stopped_leftovers_take_sigterm() {
    terminated([node("w").setsid().stopped().copies(5)], 5);
    let exits = node("polite").setsid().stopped().on(SIGTERM, Act::Exit(3));
    let ended = terminated([exits], 1);
    assert_eq!(ended.report["leftovers"][0]["exit"]["code"], 3, "{ended}");
    assert_eq!(ended.got("polite", SIGTERM), 1, "{ended}");
    killed([deaf("w").setsid().stopped()], 1);
}

#[test]
fn traced_leftovers_are_ended() {
    // A tracer is told first of each signal to its tracee, and these pass nothing on.
    killed([deaf("tracer").setsid().with(deaf("tracee").traced())], 2);
    let younger = node("p").setsid().with(deaf("tracee").traced_by_younger()).with(deaf("tracer").traces_elder());
    let ended = leave(&IMPATIENT, [younger]);
    assert_eq!((fate(&ended, "node tracee"), fate(&ended, "node tracer")), ("SIGKILL", "SIGKILL"), "{ended}");
}

#[test]
fn renamed_leftovers_are_ended() {
    let names = ["a) S b", ") Z 1 1 1", "((", "x\ny", " "];
    let renamed = |name: &&str| node("w").setsid().comm(name).with(node("x").comm(name));
    terminated(names.iter().map(renamed), 10);
    killed(names.iter().map(|name| deaf("w").setsid().comm(name)), 5);
}

#[test]
fn nested_subreapers_are_ended_with_what_fell_to_them() {
    let reaper = |name: &str, below: Node| node(name).setsid().subreaper().with(node("between").with(below));
    let inner = reaper("inner", deaf("fallen").orphaned());
    let ended = leave(&IMPATIENT, [reaper("outer", inner.orphaned())]);
    assert_eq!(fates(&ended).len(), 5, "{ended}");
    assert_eq!((fate(&ended, "node inner"), fate(&ended, "node fallen")), ("SIGTERM", "SIGKILL"), "{ended}");
}

#[test]
fn the_tree_of_a_nested_supervise_is_ended() {
    let ours = env!("CARGO_BIN_EXE_supervise").to_owned();
    let nested = |tree: Node| {
        let node = node_program().to_str().unwrap();
        let command = [&ours, "--leftover-timeout", "30s", "--", node, "tree"].map(str::to_owned);
        let run = Supervise::new().options(IMPATIENT);
        let dir = run.dir().to_str().unwrap().to_owned();
        run.bare_tree(tree).command(command.into_iter().chain([dir]))
    };
    // The inner one is killed: all of its tree falls to us.
    let mut run = nested(node("main").with(deaf("w").setsid().copies(3).with(node("x").daemonized()))).start();
    run.wait_up();
    let (supervisor, main) = (run.node("main").ppid, run.node("main").pid);
    let inner = sys::stat(supervisor).unwrap().ppid;
    assert!(sys::is_supervisor(supervisor) && sys::children(run.supervisor()) == [inner]);
    run.mark();
    // Both of its processes, and neither has the time to clean up after the other.
    sys::kill(inner, SIGSTOP).unwrap();
    sys::kill(supervisor, SIGKILL).unwrap();
    assert!(sys::spin(Duration::from_secs(30), || sys::stat(supervisor).is_some_and(|stat| stat.state == 'Z')));
    sys::kill(inner, SIGKILL).unwrap();
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    assert_eq!(ended.report["pid"], inner, "{ended}");
    assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 7, "{ended}");
    assert!(ended.report["leftovers"].as_array().unwrap().iter().any(|one| one["pid"] == main), "{ended}");
    // It is left over itself, and has a tree of its own to end.
    let mut run = nested(node("main").on(SIGTERM, Act::Exit(5)).with(node("w").setsid())).start();
    run.wait_up();
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(5), "{ended}");
    assert_eq!(ended.report["leftovers"], serde_json::json!([]), "{ended}");
}

#[test]
fn members_of_another_uid_are_ended() {
    if !need_root() {
        return;
    }
    let ended = terminated([node("other").uid(4711).with(node("x").setsid()), node("w")], 3);
    let uid = |command: &str| {
        let leftovers = ended.report["leftovers"].as_array().unwrap();
        leftovers.iter().find(|one| is_called(one, command)).unwrap()["uid"].clone()
    };
    assert_eq!((uid("node other"), uid("node x"), uid("node w")), (4711.into(), 4711.into(), 0.into()), "{ended}");
    killed([deaf("other").setsid().uid(4711).with(deaf("x").setsid())], 2);
}

#[test]
fn a_process_whose_leader_thread_exited_is_ended() {
    terminated([node("headless").leader_exits(), node("far").setsid().leader_exits().with(node("x"))], 3);
    killed([deaf("headless").leader_exits(), deaf("far").setsid().leader_exits()], 2);
}

#[test]
fn a_main_process_whose_leader_thread_exited_has_not_ended() {
    let main = node("main").leader_exits().with(node("w").reports([SIGTERM]).exit_on_go(0)).exit_on_go(6);
    let mut run = Supervise::new().options(PATIENT).tree(main).start();
    run.wait_up();
    let pid = run.node("main").pid;
    assert!(sys::spin(Duration::from_secs(30), || sys::stat(pid).is_some_and(|stat| stat.state == 'Z')));
    run.let_go("w");
    run.let_go("main");
    let ended = run.finish();
    assert_eq!((ended.code, ended.got("w", SIGTERM) <= 1), (Some(6), true), "{ended}");
}

// How it is made.

#[test]
fn processes_made_in_every_way_are_ended() {
    let ways: [fn(Node) -> Node; 6] = [
        |node| node.cloned(),
        |node| node.clone_parent(),
        |node| node.exit_signal(0),
        |node| node.exit_signal(SIGUSR1),
        |node| node.exit_signal(0).setsid(),
        |node| node.clone_parent().setsid(),
    ];
    for way in ways {
        terminated([way(node("w")), node("p").setsid().with(way(node("x")))], 3);
        killed([way(deaf("w")), deaf("p").setsid().with(way(deaf("x")))], 3);
    }
}

#[test]
fn a_vforked_process_and_the_parent_it_suspends_are_ended() {
    terminated([node("p").setsid().with(node("leaf").vforked())], 2);
    let ended = leave(&IMPATIENT, [deaf("p").setsid().with(deaf("leaf").vforked())]);
    assert_eq!(fates(&ended).len(), 2, "{ended}");
}

#[test]
fn newborns_of_leftovers_get_the_same_signals() {
    let session = Born { setsid: true, ..ignoring(&[]) };
    let deaf_session = Born { setsid: true, ..ignoring(&[SIGTERM]) };
    let acts = [session, ignoring(&[]), deaf_session, ignoring(&[SIGTERM])];
    for (born, how) in acts.into_iter().zip(["SIGTERM", "SIGTERM", "SIGKILL", "SIGKILL"]) {
        let options = if how == "SIGTERM" { &PATIENT[..] } else { &IMPATIENT[..] };
        let breeder = node("breeder").setsid().on(SIGTERM, Act::NewbornThenExit(born, 0));
        let ended = leave(options, [breeder.copies(3), node("w")]);
        let mut newborns = ended.told.iter().filter_map(|told| match told {
            crate::support::told::Told::Born(proc) => Some(proc.pid),
            _ => None,
        });
        let leftovers = ended.report["leftovers"].as_array().unwrap();
        assert_eq!(leftovers.len(), 7, "{ended}");
        let as_expected = |pid: i32| leftovers.iter().any(|one| one["pid"] == pid && one["ended"] == how);
        assert!(newborns.all(as_expected), "{ended}");
    }
}

#[test]
fn members_that_move_between_groups_and_sessions_are_ended() {
    if !need_program("perl") {
        return;
    }
    let script = r#"
        use POSIX; $| = 1; $SIG{TERM} = "IGNORE";
        my ($near, $far) = (fork // die, fork // die);
        for (my $turn = 0;; $turn++) {
            setpgrp(0, 0); setpgrp(0, getppid()); setpgrp(0, getpgrp(getppid()));
            if ($turn % 50 == 0) { my $next = fork; if ($next) { POSIX::_exit(0) } elsif (defined $next) { POSIX::setsid() } }
            print "moving\n" if $turn == 100;
        }"#;
    let run = Supervise::new().options(IMPATIENT);
    let uid = bomb_uid();
    let run = if need_root() { run.user(uid, uid).bomb_uid(uid).rlimit(libc::RLIMIT_NPROC, 200, 200) } else { run };
    let run = run.command(["sh", "-c", "\"$@\" & read line", "sh", "perl", "-e", script]);
    let mut run = run.stdin(crate::support::Io::Pipe).start();
    (0..4).for_each(|_| drop(run.expect_stdout("moving\n")));
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(0), "{ended}");
    let count = ended.report["leftovers"].as_array().unwrap().len();
    assert!(count + usize::try_from(ended.report["leftovers_unnamed"].as_u64().unwrap()).unwrap() >= 4, "{ended}");
}

#[test]
fn targets_that_vanish_all_the_time_end_no_sweep() {
    // Each sweep finds processes that are gone before their turn comes.
    let busy = |name: &str| node(name).setsid().churn(u32::MAX, 5);
    let ended = leave(&IMPATIENT, [busy("a"), busy("b"), deaf("w").setsid().copies(30), node("x").copies(30)]);
    let deaf_ones = (0..30).filter(|copy| fate(&ended, &format!("node w#{copy}")) == "SIGKILL");
    assert_eq!(deaf_ones.count(), 30, "{ended}");
    assert!((0..30).all(|copy| fate(&ended, &format!("node x#{copy}")) == "SIGTERM"), "{ended}");
}

// Each is told once, and nobody else.

#[test]
fn every_leftover_gets_sigterm_once_and_sigcont() {
    let hears = |name: &str| node(name).reports([SIGTERM, SIGCONT]);
    let main = node("main")
        .with(hears("near").copies(3).with(hears("below")))
        .with(hears("group").own_group().with(hears("member").copies(2)))
        .with(hears("far").setsid().copies(3).with(hears("deep").with(hears("own").setsid())))
        .with(hears("fallen").daemonized().with(hears("low")));
    let (hearing, names) = (main.count() - 1, ["near#0", "group", "far#1", "fallen"]);
    // Long enough for several looks.
    let mut run = Supervise::new().options(["--leftover-timeout", "1500ms"]).tree(main.exit_when_up(0)).start();
    run.wait_up();
    let all: Vec<String> = run.nodes().map(|proc| proc.name.clone()).filter(|name| name != "main").collect();
    assert!(all.len() == hearing && names.iter().all(|name| all.iter().any(|one| one == name)));
    let ended = run.finish();
    for name in all {
        assert_eq!(ended.got(&name, SIGTERM), 1, "{name}\n{ended}");
        assert!(ended.got(&name, SIGCONT) >= 1, "{name}\n{ended}");
        assert_eq!(fate(&ended, &format!("node {name}")), "SIGKILL");
    }
}

/// A shell that shares its session and group with `supervise`, and says so if it is signalled.
const BYSTANDER: &str = r#"
    for signal in HUP INT QUIT USR1 TERM CONT; do trap "echo signalled by $signal" $signal; done
    "$@" &
    supervise=$!
    echo "$(($(ps -o pgid= -p $$))) $(($(ps -o pgid= -p $supervise)))"
    wait $supervise
    echo "ended with $?""#;

#[test]
fn our_own_group_is_never_signalled() {
    if !need_program("ps") {
        return;
    }
    for code in [137, 143] {
        let main = node("main").with(deaf("w").copies(3)).with(node("x").setsid().copies(3));
        let main = if code == 137 { main.killed_by(SIGKILL) } else { main };
        let run = Supervise::program("sh");
        let shell = ["-c", BYSTANDER, "sh", env!("CARGO_BIN_EXE_supervise"), "--report", "{dir}/report.json"];
        let service = ["--", node_program().to_str().unwrap(), "tree", "{dir}"];
        let run = run.options(shell).options(IMPATIENT).options(service).bare_tree(main);
        let mut run = run.start();
        run.wait_up();
        if code == 143 {
            let ours = run.node("main").ppid;
            sys::kill(ours, SIGTERM).unwrap();
        }
        let ended = run.finish();
        assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 6, "{ended}");
        let lines: Vec<&str> = ended.stdout.lines().collect();
        let groups: Vec<&str> = lines[0].split(' ').collect();
        assert_eq!(groups[0], groups[1], "they share a group\n{ended}");
        assert_eq!(lines[1..], [format!("ended with {code}")], "{ended}");
    }
}

#[test]
fn children_that_were_there_before_us_are_not_touched() {
    let run = Supervise::program("sh");
    let script = "sleep 1000 & exec \"$@\"";
    let shell = ["-c", script, "sh", env!("CARGO_BIN_EXE_supervise"), "--report", "{dir}/report.json"];
    let service = ["--", node_program().to_str().unwrap(), "tree", "{dir}"];
    let main = node("main").with(deaf("w").setsid()).with(node("x")).exit_when_up(8);
    let run = run.options(shell).options(IMPATIENT).options(service).bare_tree(main).start();
    let ended = run.finish_with_leftovers();
    assert_eq!(ended.code, Some(8), "{ended}");
    assert_eq!(fates(&ended).len(), 2, "{ended}");
    let left: Vec<&str> = ended.left.iter().map(|left| left.command.as_str()).collect();
    assert_eq!(left, ["sleep 1000"], "{ended}");
}

#[test]
fn a_leftover_that_holds_stdout_is_ended_first_so_that_its_reader_sees_the_end() {
    let (read, write) = crate::support::supervise::pipe();
    let main = node("main").says("hello\n").with(deaf("holder").setsid()).exit_when_up(0);
    let run = Supervise::new().options(IMPATIENT).stdout(crate::support::Io::Fd(write)).tree(main);
    let mut run = run.start();
    run.wait_end();
    // Everything is still to be cleared away by the harness: whoever was left would hold it.
    let mut text = String::new();
    std::io::Read::read_to_string(&mut std::fs::File::from(read), &mut text).unwrap();
    assert_eq!(text, "hello\n");
    assert_eq!(fate(&run.finish(), "node holder"), "SIGKILL");
}

#[test]
fn everything_that_was_ended_is_named_with_all_its_numbers() {
    let main = node("main").with(node("w").setsid().with(deaf("x").own_group())).exit_on_go(0);
    let mut run = Supervise::new().options(IMPATIENT).tree(main).start();
    run.wait_up();
    let expected = ["w", "x"].map(|name| run.node(name));
    run.let_go("main");
    let ended = run.finish();
    for (proc, how) in expected.into_iter().zip(["SIGTERM", "SIGKILL"]) {
        let leftovers = ended.report["leftovers"].as_array().unwrap();
        let named = leftovers.iter().find(|one| one["pid"] == proc.pid).unwrap();
        assert_eq!((&named["pgid"], &named["sid"]), (&proc.pgid.into(), &proc.sid.into()), "{ended}");
        assert!(is_called(named, &format!("node {}", proc.name)), "{ended}");
        assert_eq!(named["ended"], how, "{ended}");
        assert!(ended.stderr.contains(&format!("'node {}' (pid {})", proc.name, proc.pid)), "{ended}");
    }
}
