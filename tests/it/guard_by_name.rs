//! Guard and supervisor killed by name and by group, as people do it: in a pid namespace with a `/proc` of its own, so that
//! nobody else is found there.

use std::collections::BTreeSet;

use serde_json::json;

use crate::guard::{LIMIT, everything, is_dead};
use crate::support::{Io, Running, Supervise, need_program, need_root, node, node_program, sys};

/// A shell as PID 1 starts `$S` with the tree below, kills when it is told to, and lives on.
fn in_a_namespace(start: &str, kill: &str) -> (Running, BTreeSet<i32>) {
    let script = format!("{start} & read line; {kill}; echo killed $?; exec cat");
    let run = Supervise::program("unshare").options(["-pf", "--mount-proc", "sh", "-c", &script]);
    let supervise = format!("{} --report report.json --", env!("CARGO_BIN_EXE_supervise"));
    let tree = format!("{} tree {}", node_program().display(), run.dir().display());
    let run = run.env("S", &supervise).env("T", &tree).bare_tree(everything(node("main"))).stdin(Io::Pipe);
    let mut run = run.start();
    run.wait_up();
    // Ours are unshare and the shell.
    let all = run.processes().into_iter().map(|stat| stat.pid).collect::<Vec<_>>();
    let init = sys::children(run.pid());
    let below: BTreeSet<i32> = all.into_iter().filter(|pid| *pid != run.pid() && !init.contains(pid)).collect();
    assert!(below.len() >= 30 && below.iter().any(|pid| sys::is_supervisor(*pid)), "{:?}", run.processes());
    run.write_stdin("kill\n");
    run.expect_stdout("killed 0\n");
    (run, below)
}

/// Everybody goes while PID 1 lives, which would end them with itself.
fn assert_all_gone(start: &str, kill: &str, result: &str) {
    let (mut run, below) = in_a_namespace(start, kill);
    let left = || below.iter().filter(|pid| !is_dead(**pid)).count();
    assert!(sys::spin(LIMIT, || left() == 0), "{kill}: {} are left: {:?}", left(), run.processes());
    assert!(sys::children(run.pid()).iter().all(|init| !is_dead(*init)));
    run.close_stdin();
    let ended = run.finish();
    assert_eq!((&ended.report["result"], &ended.report["exit_code"]), (&json!(result), &json!(125)), "{kill}: {ended}");
}

#[test]
fn pkill_by_our_name_leaves_nothing() {
    if !need_root() || !need_program("unshare") || !need_program("pkill") {
        return;
    }
    assert_all_gone("$S $T", "pkill -9 supervise", "guard-lost");
    assert_all_gone("$S $T", "pkill -9 -x supervise", "guard-lost");
    // By the command line: the other one shows nothing of it.
    assert_all_gone("$S $T", "pkill -9 -f supervise", "guard-lost");
    assert_all_gone("$S $T", "pkill -9 supervisor", "supervisor-lost");
}

#[test]
fn killall_by_our_name_leaves_nothing() {
    if !need_root() || !need_program("unshare") || !need_program("killall") {
        return;
    }
    assert_all_gone("$S $T", "killall -9 supervise", "guard-lost");
    assert_all_gone("$S $T", "killall -9 supervisor", "supervisor-lost");
}

#[test]
fn a_kill_of_the_group_that_we_were_started_in_leaves_nothing() {
    if !need_root() || !need_program("unshare") || !need_program("setsid") {
        return;
    }
    assert_all_gone("setsid $S $T", "env kill -9 -- -$!", "guard-lost");
    assert_all_gone("setsid sh -c '$S $T; :'", "env kill -9 -- -$!", "guard-lost");
    assert_all_gone("setsid sh -c '$S $T </dev/null | cat; :'", "env kill -9 -- -$!", "guard-lost");
}
