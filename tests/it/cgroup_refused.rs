//! Where there can be no cgroup of the service's own: `auto` takes the next best in silence, `cgroup` is refused.

use std::fs;

use serde_json::Value;

use crate::cgroup::{Scratch, start};
use crate::end::{IMPATIENT, fate};
use crate::support::{Ended, Supervise, node};

/// Says how each refusal is worded.
fn places_without(scratch: &Scratch) -> Vec<(Supervise, &'static str)> {
    let path = scratch.path.display();
    let mount = scratch.mount.display();
    let own =
        |script: &str| scratch.run_after(&format!("set -- unshare -m sh -c '{script}; exec \"$@\"' sh \"$@\" &&"));
    vec![
        (scratch.run_as_user(), "Permission denied (delegate it: Delegate=yes)"),
        (own(&format!("mount --bind {path} {path} && mount -o remount,bind,ro {path}")), "is read-only"),
        (own(&format!("umount -l {mount}")), "no cgroup2 file system is mounted"),
        (own(&format!("mount -t tmpfs none {path}")), "is hidden under another mount"),
    ]
}

#[test]
fn where_there_can_be_none_auto_goes_on_with_descent_and_says_nothing() {
    let Some(scratch) = Scratch::new() else { return };
    for (run, why) in places_without(&scratch) {
        let mut run = start(run.options(IMPATIENT), "setsid sleep 1001 &");
        run.wait_command("sleep 1001");
        run.write_stdin("end\n");
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["containment"]), (Some(3), &"lineage".into()), "{why}: {ended}");
        assert_eq!(ended.stderr.lines().filter(|line| line.contains("cgroup")).count(), 0, "{why}: {ended}");
        assert_eq!(fate(&ended, "sleep 1001"), "SIGTERM", "{ended}");
    }
    scratch.is_clean();
}

#[test]
fn where_there_can_be_none_the_wish_for_one_is_refused_and_nothing_is_started() {
    let Some(scratch) = Scratch::new() else { return };
    for (run, why) in places_without(&scratch) {
        let ended = run.options(["--containment", "cgroup"]).command(["touch", "started"]).run();
        assert_eq!(ended.code, Some(125), "{why}: {ended}");
        assert!(!ended.dir.path().join("started").exists(), "{why}: {ended}");
        assert!(ended.stderr.contains("cannot contain the service in a cgroup: "), "{ended}");
        assert!(ended.stderr.contains(why) && ended.stderr.contains("nothing was started"), "{why}: {ended}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
    }
    fs::write(scratch.path.join("cgroup.max.descendants"), "0").unwrap();
    let ended = scratch.run().options(["--containment", "cgroup"]).command(["touch", "started"]).run();
    assert_eq!(ended.code, Some(125), "{ended}");
    assert!(ended.stderr.contains("cgroup.max.descendants"), "{ended}");
    scratch.is_clean();
}

#[test]
fn a_kept_process_in_a_cgroup_is_a_contradiction() {
    for mode in ["cgroup", "pidns"] {
        let config = "[containment]\nallow-keep = true\n";
        let run = Supervise::new().config(config).options(["--containment", mode]);
        let ended: Ended = run.command(["touch", "started"]).run();
        assert_eq!((ended.code, &ended.report), (Some(2), &Value::Null), "{ended}");
        assert!(ended.stderr.contains("allow-keep") && ended.stderr.contains(mode), "{ended}");
        assert!(!ended.dir.path().join("started").exists(), "{ended}");
    }
}

#[test]
fn where_kept_ones_are_allowed_auto_makes_no_cgroup() {
    let Some(scratch) = Scratch::new() else { return };
    let ended = scratch.run().config("[containment]\nallow-keep = true\n").tree(node("main").exit(3)).run();
    assert_eq!((ended.code, &ended.report["containment"]), (Some(3), &"lineage".into()), "{ended}");
    scratch.is_clean();
}
