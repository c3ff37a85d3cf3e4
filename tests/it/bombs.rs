//! Processes that multiply faster than they are looked at: fork-and-exit chains, and wide fork bombs.
//!
//! Each as a uid of its own under RLIMIT_NPROC, without which its zombies would fill the machine. The seconds are printed.

use std::io::Write as _;
use std::time::Duration;

use libc::{RLIMIT_NPROC, SIGTERM};

use crate::support::tree::{Node, bomb_uid};
use crate::support::{Ended, Supervise, need_program, need_root, node, node_program, sys};

const CAP: u64 = 1_500;

/// As long as a busy machine may need.
const PATIENCE: Duration = Duration::from_secs(150);

fn told(what: &str, ended: &Ended) {
    let count = ended.report["leftovers"].as_array().unwrap().len();
    let unnamed = &ended.report["leftovers_unnamed"];
    let seconds = ended.after_signal.as_secs_f64();
    let mut out = std::io::stderr();
    let _ = writeln!(out, "{what}: ended in {seconds:.2} s, {count} leftovers named, {unnamed} not");
    assert!(count > 0, "{ended}");
}

/// A run with a bomb of this uid somewhere below, and how many processes are there before it is let go.
fn run(run: Supervise, uid: u32, bomb: Node, at_least: usize) -> Ended {
    let main = node("main").with(bomb).with(node("w").setsid()).exit_on_go(7);
    let run = run.bomb_uid(uid).guard(PATIENCE).rlimit(RLIMIT_NPROC, CAP, CAP).tree(main);
    let mut run = run.start();
    run.wait_up();
    assert!(sys::spin(PATIENCE, || run.processes().len() >= at_least));
    run.let_go("main");
    let ended = run.finish();
    assert_eq!((ended.code, ended.fell), (Some(7), 0), "{ended}");
    ended
}

#[test]
fn fork_and_exit_chains_in_one_session_are_ended() {
    if !need_root() {
        return;
    }
    let uid = bomb_uid();
    let ended = run(Supervise::new(), uid, node("chains").setsid().uid(uid).chains(64), 40);
    told("64 fork-and-exit chains in one session", &ended);
}

#[test]
fn fork_and_exit_chains_each_in_its_own_session_are_ended() {
    if !need_root() {
        return;
    }
    let uid = bomb_uid();
    let ended = run(Supervise::new(), uid, node("chains").uid(uid).chains_of_sessions(64), 40);
    told("64 fork-and-exit chains, each process in a session of its own", &ended);
}

#[test]
fn fork_and_exit_chains_are_ended_when_a_stop_is_asked() {
    if !need_root() {
        return;
    }
    let uid = bomb_uid();
    let main = node("main").ignores([SIGTERM]).with(node("chains").uid(uid).chains_of_sessions(16));
    let run = Supervise::new().options(["--stop-timeout", "200ms", "--leftover-timeout", "200ms"]);
    let run = run.bomb_uid(uid).guard(PATIENCE).rlimit(RLIMIT_NPROC, CAP, CAP);
    let mut run = run.tree(main).start();
    run.wait_up();
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    told("16 chains below a main process that ignores SIGTERM", &ended);
}

#[test]
fn a_wide_fork_bomb_is_ended() {
    if !need_root() {
        return;
    }
    let uid = bomb_uid();
    let ended = run(Supervise::new(), uid, node("bomb").bomb(uid, CAP), 1_000);
    told("a wide fork bomb", &ended);
}

#[test]
fn a_wide_fork_bomb_below_pid_one_is_ended() {
    if !need_root() {
        return;
    }
    let uid = bomb_uid();
    let ended = run(Supervise::new().pid_one(), uid, node("bomb").bomb(uid, CAP), 1_000);
    told("a wide fork bomb below PID 1", &ended);
}

/// Every process forks for ever, each in a session of its own.
const BOMB: &str = "use POSIX; for (;;) { my $pid = fork; POSIX::setsid() if defined $pid && $pid == 0 }";

#[test]
fn a_wide_fork_bomb_of_our_own_unprivileged_uid_is_ended() {
    if !need_root() || !need_program("perl") {
        return;
    }
    let uid = bomb_uid();
    let run = Supervise::new().user(uid, uid).rlimit(RLIMIT_NPROC, CAP, CAP).bomb_uid(uid).guard(PATIENCE);
    let script = "perl -e \"$0\" & read line; exit 7";
    let mut run = run.stdin(crate::support::Io::Pipe).command(["sh", "-c", script, BOMB]).start();
    assert!(sys::spin(PATIENCE, || run.processes().len() >= 1_000));
    run.mark();
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(7), "{ended}");
    told("a wide fork bomb of our own uid", &ended);
}

#[test]
fn a_wide_fork_bomb_is_ended_inside_a_namespace_in_which_we_are_not_pid_one() {
    if !need_root() || !need_program("unshare") {
        return;
    }
    let uid = bomb_uid();
    let main = node("main").with(node("bomb").bomb(uid, CAP)).exit_on_go(7);
    // PID 1 is the shell, which waits: a command follows.
    let script = "\"$@\"; code=$?; ls /proc | grep -c '^[0-9]'; exit $code";
    let space = ["-pf", "--kill-child", "--mount-proc", "sh", "-c", script, "sh"];
    let ours = [env!("CARGO_BIN_EXE_supervise"), "--report", "{dir}/report.json"];
    let service = ["--", node_program().to_str().unwrap(), "tree", "{dir}"];
    let run = Supervise::program("unshare").options(space).options(ours).options(service).bare_tree(main);
    let mut run = run.bomb_uid(uid).guard(PATIENCE).start();
    run.wait_up();
    assert_ne!(run.node("main").ppid, 1);
    assert!(sys::spin(PATIENCE, || run.processes().len() >= 1_000));
    run.let_go("main");
    let ended = run.finish();
    assert_eq!(ended.code, Some(7), "{ended}");
    // The shell, `ls`, `grep`, and perhaps the shell's fork for one of them.
    let left: u32 = ended.stdout.trim().parse().unwrap();
    assert!(left <= 4, "{ended}");
    told("a wide fork bomb in a namespace, not as PID 1", &ended);
}
