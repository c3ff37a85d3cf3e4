//! At a terminal, and not alone: in a pipeline, in a script, in a script's background, with no shell above.

use std::fs;
use std::time::Duration;

use libc::{SIGCONT, SIGINT, SIGTERM, SIGTSTP, SIGUSR1};

use crate::support::tree::Node;
use crate::support::{Act, Io, Running, Supervise, need_program, node, node_program, sys};

const CTRL_C: &str = "\x03";
const CTRL_Z: &str = "\x1a";

/// A shell script in which `$S` is the product with `--`, and `$T` the tree's command.
fn script(text: &str, tree: Node) -> Supervise {
    let supervise = format!("{} --", env!("CARGO_BIN_EXE_supervise"));
    let run = Supervise::program("sh").options(["-c", text]).env("S", &supervise).bare_tree(tree);
    let tree = format!("{} tree {}", node_program().display(), run.dir().display());
    run.env("T", &tree)
}

fn state(pid: i32) -> char {
    sys::stat(pid).map_or('-', |stat| stat.state)
}

fn wait_state(pid: i32, wanted: char) {
    assert!(sys::spin(Duration::from_secs(30), || state(pid) == wanted), "{} not {wanted}", state(pid));
}

/// The product, which is not the program that was started here: its guard, which is what a shell knows.
fn supervise_pid(run: &mut Running) -> i32 {
    let supervisor = run.node("main").ppid;
    assert!(sys::is_supervisor(supervisor));
    let guard = sys::stat(sys::stat(supervisor).unwrap().ppid).unwrap();
    assert_eq!(guard.comm, "supervise");
    guard.pid
}

#[test]
fn the_reader_of_a_pipeline_has_the_terminal() {
    let pipeline = "$S sh -c 'echo data; head -n 1 >&2' | sh -c 'read d; echo got $d; read l </dev/tty; echo typed $l'";
    let mut run = script(pipeline, node("unused")).at_terminal().start();
    run.expect_stdout("got data");
    // Both read the terminal, a line each, and neither is stopped by it.
    run.type_in("one\ntwo\n");
    run.expect_stdout("typed ");
    assert_eq!(run.finish().code, Some(0));
}

#[test]
fn in_a_pipeline_a_key_reaches_the_service_once() {
    let tree = node("main").reports([SIGINT, SIGUSR1]).on(SIGTERM, Act::Exit(0));
    let mut run = script("$S $T | cat", tree).at_terminal().start();
    run.wait_up();
    let supervise = supervise_pid(&mut run);
    run.type_in(CTRL_C);
    run.wait_got("main", SIGINT, 1);
    sys::kill(supervise, SIGUSR1).unwrap();
    run.wait_got("main", SIGUSR1, 1);
    assert_eq!(run.got("main", SIGINT), 1);
    sys::kill(supervise, SIGTERM).unwrap();
    let ended = run.finish();
    assert_eq!(ended.signal, Some(SIGINT), "the shell of the pipeline: {ended}");
}

#[test]
fn a_pipeline_and_a_script_stop_and_go_on_as_a_whole() {
    for text in ["$S $T | cat; echo after", "$S $T; echo after", "exec $S $T </dev/null"] {
        let mut run = script(text, node("main").with(node("w"))).at_terminal().start();
        run.wait_up();
        let (main, w, supervise) = (run.node("main").pid, run.node("w").pid, supervise_pid(&mut run));
        for _ in 0..2 {
            run.type_in(CTRL_Z);
            assert_eq!(run.wait_stopped().signal, SIGTSTP, "{text}");
            [main, w, supervise].into_iter().for_each(|pid| wait_state(pid, 'T'));
            run.fg();
            run.wait_continued();
            [main, w, supervise].into_iter().for_each(|pid| wait_state(pid, 'S'));
            let foreground = if text.starts_with("exec") { main } else { run.pid() };
            assert!(sys::spin(Duration::from_secs(30), || run.foreground() == foreground), "{text}");
        }
        sys::kill(supervise, SIGTERM).unwrap();
        let ended = run.finish();
        let code = if text.starts_with("exec") { 143 } else { 0 };
        assert_eq!((ended.code, ended.foreground), (Some(code), ended.pid), "{ended}");
        assert!(ended.stdout.contains("after") || code == 143, "{ended}");
    }
}

#[test]
fn ctrl_c_ends_a_script_with_the_service_that_it_waits_for() {
    // Not every shell: bash goes on after a command that ended with 130 and was not killed.
    if !need_program("dash") {
        return;
    }
    let tree = node("main").with(node("w").setsid()).on(SIGINT, Act::Exit(0));
    let run = script("exec dash -c \"$SCRIPT\"", tree).env("SCRIPT", "$S $T; echo after");
    let mut run = run.at_terminal().start();
    run.wait_up();
    run.type_in(CTRL_C);
    let ended = run.finish();
    assert_eq!((ended.signal, ended.got("main", SIGINT)), (Some(SIGINT), 1), "{ended}");
    assert!(!ended.stdout.contains("after"), "{ended}");
}

#[test]
fn a_script_keeps_the_terminal_from_what_it_runs_in_its_background() {
    let tree = node("main").on(SIGTERM, Act::Exit(6));
    let text = "$S $T & read line; echo got $line; kill $!; wait $!";
    let mut run = script(text, tree).at_terminal().start();
    run.wait_up();
    assert_eq!(run.foreground(), run.pid());
    run.type_in("line\n");
    run.expect_stdout("got line");
    let ended = run.finish();
    assert_eq!(ended.code, Some(6), "{ended}");
}

// No shell above: what a shell would have to continue cannot be stopped.

/// Below `script`, which makes a terminal and starts the leader of a session at it.
fn session(leader: &str, tree: Node) -> Supervise {
    let run = script("exec script -qec \"$LEADER\" /dev/null", tree).env("SHELL", "/bin/sh").env("LEADER", leader);
    run.stdin(Io::Pipe)
}

#[test]
fn with_no_shell_above_stops_have_no_effect_and_nothing_hangs() {
    if !need_program("script") {
        return;
    }
    let tree = node("main").reports([SIGINT]).on(SIGTERM, Act::Exit(6));
    let mut run = session("exec $S $T", tree).start();
    run.wait_up();
    let supervise = supervise_pid(&mut run);
    assert_eq!(run.node("main").sid, supervise, "the leader");
    for times in 1..=3 {
        run.write_stdin(CTRL_Z);
        run.write_stdin(CTRL_C);
        run.wait_got("main", SIGINT, times);
    }
    sys::kill(supervise, SIGTSTP).unwrap();
    run.write_stdin(CTRL_C);
    run.wait_got("main", SIGINT, 4);
    sys::kill(supervise, SIGTERM).unwrap();
    assert_eq!(run.finish().code, Some(6));
}

#[test]
fn the_session_leader_is_hung_up_and_leaves_nothing() {
    if !need_program("script") {
        return;
    }
    for leader in ["exec $S $T", "mkfifo pipe; exec $S $T <>pipe"] {
        let mut run = session(leader, node("main").reports([SIGCONT]).with(node("w").setsid())).start();
        run.wait_up();
        let supervise = supervise_pid(&mut run);
        // The end of `script` closes the terminal.
        run.signal(libc::SIGKILL);
        run.wait_end();
        let gone = || [state(supervise), state(run.node("w").pid)].iter().all(|state| ['-', 'Z'].contains(state));
        assert!(sys::spin(Duration::from_secs(30), gone), "{leader}");
        run.finish_empty_within(Duration::from_secs(30));
    }
}

#[test]
fn an_orphan_in_the_background_that_reads_the_terminal_ends_and_does_not_spin() {
    if !need_program("script") {
        return;
    }
    let service = "$S sh -c 'echo up; read go <go; read line; echo read; exit 5'";
    let leader = format!("mkfifo go; sh -c 'set -m; {} & echo $!'; read wait <end", service.replace('\'', "\""));
    let mut run = session(&format!("mkfifo end; {leader}"), node("unused")).start();
    run.expect_stdout("up");
    fs::write(run.dir().join("go"), "\n").unwrap();
    let supervised = || run.processes().iter().any(|stat| stat.comm == "supervise" && stat.state != 'Z');
    assert!(sys::spin(Duration::from_secs(30), || !supervised()), "it never ends");
    fs::write(run.dir().join("end"), "\n").unwrap();
    run.finish_empty_within(Duration::from_secs(30));
}
