//! Odd things that are done in and to the cgroup of a service: frozen members, nested runs, cgroups of root, deaths while it
//! is made.

use std::time::Duration;

use libc::{SIGKILL, SIGTERM};

use crate::cgroup::{Guest, Scratch, start, way_to_root};
use crate::end::{IMPATIENT, fate};
use crate::start::program;
use crate::support::{Supervise, need_program, node, sys};
use crate::sweep::Frozen;

const LIMIT: Duration = Duration::from_secs(30);

const SHORT: &str = "[stop]\ntimeout = \"200ms\"\nleftover-timeout = \"200ms\"\n";

#[test]
fn what_the_service_froze_is_ended_and_the_service_itself_too() {
    let Some(scratch) = Scratch::new() else { return };
    let part = "mkdir $own/a; (echo 0 >$own/a/cgroup.procs; exec setsid sleep 1001) &
        until [ \"$(cat /proc/$!/comm)\" = sleep ]; do :; done; echo 1 >$own/a/cgroup.freeze;";
    let mut run = start(scratch.run().config(SHORT), part);
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    assert_ne!(fate(&ended, "sleep 1001"), "survived", "{ended}");
    scratch.is_clean();

    let mut run =
        start(scratch.run().config(SHORT), "(exec setsid sleep 1001) & (sleep 0.1; echo 1 >$own/cgroup.freeze) &");
    run.wait_command("sleep 1001");
    let own = scratch.only_one();
    let frozen = || std::fs::read_to_string(own.join("cgroup.events")).is_ok_and(|text| text.contains("frozen 1"));
    assert!(sys::spin(LIMIT, frozen));
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(128 + SIGTERM), "{ended}");
    scratch.is_clean();
}

#[test]
fn who_was_put_in_and_cannot_be_ended_is_named() {
    let Some(scratch) = Scratch::new() else { return };
    let mut run = start(scratch.run().config(&format!("{SHORT}kill-timeout = \"300ms\"\n")), "");
    let guest = Guest::enter(&scratch.only_one(), "exec sleep 1001");
    let pid = guest.pid();
    let Some(frozen) = Frozen::new(pid) else { return };
    run.write_stdin("end\n");
    let ended = run.finish();
    drop(frozen);
    assert_eq!((ended.code, &ended.report["result"]), (Some(123), &"survivors".into()), "{ended}");
    assert!(ended.stderr.contains(&format!("could not end sleep 1001 (pid {pid}, state D")), "{ended}");
    assert_eq!(fate(&ended, "sleep 1001"), "survived", "{ended}");
}

#[test]
fn a_run_within_a_run_has_its_cgroup_within_the_other_s() {
    let Some(scratch) = Scratch::new() else { return };
    let script = format!(
        "{} --containment cgroup -- sh -c 'cat /proc/self/cgroup; (trap \"\" TERM; exec setsid sleep 1001) & exec sleep 1002' &",
        program()
    );
    let mut run = start(scratch.run().options(IMPATIENT), &script);
    run.wait_command("sleep 1001");
    run.wait_command("sleep 1002");
    let inner = std::fs::read_dir(scratch.only_one()).unwrap().flatten().filter(|entry| entry.path().is_dir()).count();
    assert_eq!(inner, 1);
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    scratch.is_clean();
}

#[test]
fn a_cgroup_that_cannot_be_removed_is_said_and_changes_no_exit_code() {
    let Some(scratch) = Scratch::new() else { return };
    if !need_program("setpriv") {
        return;
    }
    scratch.delegate(4711);
    let run = scratch.run_as_user();
    let root = way_to_root(&run);
    let mut run = start(run, &format!("{root} mkdir -p $own/a/b;"));
    let path = scratch.only_one();
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    let said = format!("the cgroup {} stays: Permission denied", path.display());
    assert_eq!(ended.stderr.matches(&said).count(), 1, "{ended}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
}

#[test]
fn a_guard_or_supervisor_that_is_killed_at_any_moment_of_the_start_leaves_no_cgroup() {
    let Some(scratch) = Scratch::new() else { return };
    for round in 0..40 {
        let tree = node("main").with(node("w").setsid().ignores([SIGTERM]));
        let run = scratch.run().tree(tree).signal_at(Duration::from_micros(round * 100), SIGKILL);
        run.start().finish_empty_within(LIMIT);
        scratch.is_clean();
    }
    for round in 0..20 {
        let mut run = scratch.run().tree(node("main").with(node("w").setsid().ignores([SIGTERM]))).start();
        let supervisor = run.inner();
        std::thread::sleep(Duration::from_micros(round * 100));
        sys::kill(supervisor, SIGKILL).unwrap();
        let ended = run.finish();
        assert_eq!(ended.code, Some(125), "{ended}");
        scratch.is_clean();
    }
}

#[test]
fn without_a_guard_the_next_start_of_the_name_finds_the_cgroup() {
    let Some(scratch) = Scratch::new() else { return };
    let named = crate::sweep::Named::new();
    let run = || -> Supervise { scratch.run().options(["--name", &named.name]).config(SHORT) };
    let tree = node("main").with(node("w").setsid().ignores([SIGTERM]));
    let mut first = run().options(["--guard", "off"]).tree(tree).start();
    first.wait_up();
    first.signal(SIGKILL);
    first.wait_end();
    let second = run().command(["true"]).run();
    assert_eq!((second.code, second.report["swept"].as_array().unwrap().len()), (Some(0), 2), "{second}");
    first.finish_empty_within(LIMIT);
    scratch.is_clean();
}

#[test]
fn a_service_that_puts_us_into_its_cgroup_does_not_hang_us() {
    let Some(scratch) = Scratch::new() else { return };
    let script =
        "read a b c guard rest </proc/$PPID/stat; echo $PPID >$own/cgroup.procs; echo $guard >$own/cgroup.procs;
        (trap '' TERM; exec setsid sleep 1001) &";
    let run = scratch.run().config(&format!("{SHORT}kill-timeout = \"300ms\"\n")).guard(Duration::from_secs(15));
    let mut run = start(run, script);
    run.wait_command("sleep 1001");
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!((ended.code, fate(&ended, "sleep 1001")), (Some(3), "SIGKILL"), "{ended}");
}
