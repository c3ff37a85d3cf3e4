//! Wanted survivors: `supervise keep -- CMD` marks them, and where the operator allows it they are left alone, with all
//! below them, by everybody who ends the others. Each test ends the kept ones by itself.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use libc::{SIGHUP, SIGKILL, SIGTERM, SIGUSR1};
use serde_json::json;

use crate::end::{IMPATIENT, fate};
use crate::start::program;
use crate::support::{Ended, Io, Running, Supervise, node_program, sys};

/// The limit of every wait of ours.
const LIMIT: Duration = Duration::from_secs(30);

const ALLOWED: &str = "[containment]\nallow-keep = true\n";

/// Kept ones that go, and all below them; others beside them, in the same group and session, that stay with the service. The
/// first numbers are kept, those from 2000 on are not.
const FAMILY: &str = "
    $KEEP sleep 1001 & sleep 2001 &
    $KEEP setsid sh -c 'sleep 1002 & env -i /bin/sleep 1003 & setsid sleep 1004 & sleep 1005; :' &
    setsid sh -c '$KEEP sleep 1006 & sleep 2002 & (trap \"\" TERM; exec sleep 2003) & wait' &
    ($KEEP sh -c 'setsid sleep 1007 & exit 0') &";

const KEPT: [&str; 7] =
    ["sleep 1001", "sleep 1002", "/bin/sleep 1003", "sleep 1004", "sleep 1005", "sleep 1006", "sleep 1007"];
const OTHERS: [&str; 3] = ["sleep 2001", "sleep 2002", "sleep 2003"];

/// A service that starts these, tells, and ends with 7 when a line comes.
fn service(script: &str) -> Supervise {
    let script = format!("{script} echo up; read line; exit 7");
    let keep = format!("{} keep --", program());
    Supervise::new().env("KEEP", &keep).command(["sh", "-c", &script]).stdin(Io::Pipe)
}

/// Started, and all of the family is there.
fn with_family(run: Supervise) -> Running {
    let mut run = run.start();
    run.expect_stdout("up\n");
    for command in KEPT.iter().chain(&OTHERS) {
        run.wait_command(command);
    }
    run
}

/// All that live below the harness.
fn living(run: &Running) -> BTreeSet<String> {
    let living = run.processes().into_iter().filter(|stat| stat.state != 'Z');
    living.map(|stat| sys::command(stat.pid)).collect()
}

fn all_kept() -> BTreeSet<String> {
    let shell = "sh -c sleep 1002 & env -i /bin/sleep 1003 & setsid sleep 1004 & sleep 1005; :";
    KEPT.into_iter().chain([shell]).map(str::to_owned).collect()
}

/// The kept ones alone are alive, and the report has named them.
#[track_caller]
fn kept_ones_live(ended: &Ended) {
    let left: BTreeSet<String> = ended.left.iter().map(|left| left.command.clone()).collect();
    assert_eq!(left, all_kept(), "{ended}");
    assert!(ended.left.iter().all(|left| left.state == 'S'), "{ended}");
}

#[track_caller]
fn kept_ones_are_named(ended: &Ended) {
    for command in KEPT {
        assert_eq!(fate(ended, command), "kept", "{ended}");
    }
    assert_eq!(ended.stderr.matches("left 8 kept processes alone: ").count(), 1, "{ended}");
}

#[test]
fn where_it_is_not_allowed_kept_ones_are_ended_like_all_others() {
    for config in ["", "[containment]\nallow-keep = false\n"] {
        let mut run = with_family(service(FAMILY).config(config).options(IMPATIENT));
        run.write_stdin("end\n");
        let ended = run.finish();
        assert_eq!(ended.code, Some(7), "{ended}");
        for command in KEPT {
            assert_ne!(fate(&ended, command), "kept", "{ended}");
        }
    }
}

#[test]
fn kept_ones_outlive_the_service_and_the_kill_and_the_others_do_not() {
    let mut run = with_family(service(FAMILY).config(ALLOWED).options(IMPATIENT));
    run.write_stdin("end\n");
    let ended = run.finish_with_leftovers();
    assert_eq!((ended.code, &ended.report["exit_code"]), (Some(7), &7.into()), "{ended}");
    kept_ones_live(&ended);
    kept_ones_are_named(&ended);
    assert_eq!(fate(&ended, "sleep 2003"), "SIGKILL", "{ended}");
    OTHERS.iter().for_each(|command| assert_ne!(fate(&ended, command), "kept", "{ended}"));
}

#[test]
fn kept_ones_outlive_a_stop_whoever_gets_the_signal() {
    for target in ["main", "group", "tree"] {
        let config = format!("{ALLOWED}[stop]\ntarget = \"{target}\"\n");
        let mut run = with_family(service(FAMILY).config(&config).options(IMPATIENT));
        run.signal(SIGTERM);
        let ended = run.finish_with_leftovers();
        assert_eq!((ended.code, &ended.report["stop_signal"]), (Some(143), &"SIGTERM".into()), "{target}: {ended}");
        kept_ones_live(&ended);
        kept_ones_are_named(&ended);
    }
}

#[test]
fn when_only_kept_ones_are_left_nobody_waits_for_them() {
    let options = ["--stop-timeout", "30s", "--leftover-timeout", "30s"];
    let mut run = service("$KEEP sleep 1001 &").config(ALLOWED).options(options).start();
    run.wait_command("sleep 1001");
    run.write_stdin("end\n");
    let ended = run.finish_with_leftovers();
    assert_eq!((ended.code, fate(&ended, "sleep 1001")), (Some(7), "kept"), "{ended}");
    assert!(ended.wall < Duration::from_secs(20), "{ended}");
    assert_eq!(ended.left.len(), 1, "{ended}");
}

#[test]
fn a_kept_one_that_ends_by_itself_is_reaped_and_not_in_the_way() {
    let mut run = service("$KEEP sleep 1001 & sleep 2001 &").config(ALLOWED).start();
    let pid = run.wait_command("sleep 1001");
    run.wait_command("sleep 2001");
    sys::kill(pid, SIGKILL).unwrap();
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!((ended.code, fate(&ended, "sleep 2001")), (Some(7), "SIGTERM"), "{ended}");
}

#[test]
fn the_guard_leaves_kept_ones_alone_when_the_supervisor_is_lost() {
    let mut run = with_family(service(FAMILY).config(ALLOWED));
    sys::kill(run.inner(), SIGKILL).unwrap();
    let ended = run.finish_with_leftovers();
    assert_eq!((ended.code, &ended.report["result"]), (Some(125), &"supervisor-lost".into()), "{ended}");
    kept_ones_live(&ended);
    kept_ones_are_named(&ended);
}

#[test]
fn the_supervisor_leaves_kept_ones_alone_when_the_guard_is_lost() {
    let mut run = with_family(service(FAMILY).config(ALLOWED));
    let supervisor = run.inner();
    run.signal(SIGKILL);
    run.wait_end();
    assert!(sys::spin(LIMIT, || sys::stat(supervisor).is_none()));
    // What the supervisor left, not what the guard's end found.
    let left = living(&run);
    let ended = run.finish_with_leftovers();
    assert_eq!((left, &ended.report["result"]), (all_kept(), &"guard-lost".into()), "{ended}");
    kept_ones_are_named(&ended);
}

// Later starts.

/// A run that keeps, and whose kept ones live on as long as it is held; then another of the same name.
fn again(allowed: &str, lose_both: bool) -> (Running, Ended) {
    let name = format!("keep-{}-{}", std::process::id(), sys::now_micros());
    let runtime = tempfile::tempdir().unwrap();
    let place = runtime.path().to_str().unwrap().to_owned();
    let named = |run: Supervise| run.options(["--name", &name]).options(IMPATIENT).env("XDG_RUNTIME_DIR", &place);
    let mut first = with_family(named(service(FAMILY)).config(ALLOWED));
    if lose_both {
        first.kill_both();
    } else {
        first.write_stdin("end\n");
        first.wait_end();
    }
    let second = named(Supervise::new()).config(allowed).command(["true"]).run();
    let _ = fs::remove_dir_all(format!("/run/supervise/{name}"));
    (first, second)
}

#[test]
fn the_next_start_leaves_kept_ones_alone_and_names_them() {
    for lose_both in [false, true] {
        let (first, second) = again(ALLOWED, lose_both);
        assert_eq!(second.code, Some(0), "{second}");
        assert_eq!(living(&first), all_kept(), "{second}");
        first.finish_with_leftovers();
        let swept = second.report["swept"].as_array().unwrap();
        let kept = swept.iter().filter(|one| one["ended"] == "kept").count();
        let others = swept.iter().filter(|one| one["command"].as_str().unwrap().starts_with("sleep 2")).count();
        // Whoever threw its environment away and lost its parents is not known any more.
        assert!((7..=8).contains(&kept), "{second}");
        assert_eq!(others, if lose_both { 3 } else { 0 }, "{second}");
        assert!(second.stderr.contains("kept processes alone: "), "{second}");
    }
}

#[test]
fn the_next_start_ends_kept_ones_when_they_are_not_allowed_any_more() {
    let (first, second) = again("", false);
    assert_eq!(second.code, Some(0), "{second}");
    assert_eq!(second.report["swept"].as_array().unwrap().len(), 8, "{second}");
    first.finish_empty_within(LIMIT);
}

// What `keep` is.

#[test]
fn keep_is_an_exec_and_changes_nothing_but_its_mark() {
    let look = format!("{} look", node_program().display());
    let script = |command: &str| format!("echo $$; exec {command} one 'two three'");
    let seen = |command: &str| {
        let run = Supervise::program("sh").options(["-c", &script(command)]).umask(0o027);
        let run = run.ignoring([SIGHUP]).blocking([SIGUSR1]).fd(7, fs::File::open("/etc/passwd").unwrap().into());
        let ended = run.run();
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{ended}");
        let (pid, _) = ended.stdout.split_once('\n').unwrap();
        // `look` takes its second argument for a file to write to.
        let text = fs::read_to_string(ended.dir.path().join("one")).unwrap();
        let mut look: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(look["pid"].to_string(), pid, "{ended}");
        for own in ["pid", "ppid", "pgid", "sid", "cwd"] {
            look.as_object_mut().unwrap().remove(own);
        }
        for standard in ["1", "2"] {
            look["fds"][standard].as_object_mut().unwrap().remove("file");
        }
        let directory = ended.dir.path().to_str().unwrap();
        serde_json::from_str::<serde_json::Value>(&look.to_string().replace(directory, "DIR")).unwrap()
    };
    let mut kept = seen(&format!("{} keep -- {look}", program()));
    let mark = kept["env"].as_object_mut().unwrap().remove("SUPERVISE_KEEP");
    assert_eq!((mark, kept), (Some(json!("1")), seen(&look)));
}

#[test]
fn keep_outside_of_a_run_is_just_the_command() {
    for (command, code) in [("exit 5", 5), ("kill -KILL $$", 128 + SIGKILL)] {
        let script = format!("{} keep -- sh -c '{command}'; exit $?", program());
        assert_eq!(Supervise::program("sh").options(["-c", &script]).run().code, Some(code));
    }
}

#[test]
fn what_keep_cannot_execute_gives_126_and_127_and_is_said() {
    for (command, code) in [("/nowhere/at-all", 127), ("no-such-program", 127), ("/etc/passwd", 126), ("/tmp", 126)] {
        let ended = Supervise::program(program()).options(["keep", "--", command]).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert!(ended.stderr.contains(command) && ended.stderr.lines().count() == 1, "{ended}");
    }
    for wrong in [&["keep"][..], &["keep", "--"], &["keep", "true"]] {
        let ended = Supervise::program(program()).options(wrong.iter().copied()).run();
        assert_eq!(ended.code, Some(2), "{ended}");
    }
}

#[test]
fn a_master_that_goes_to_the_background_as_ssh_s_does_is_kept() {
    // ssh -f with ControlPersist: two forks, a session of its own, standard streams closed.
    let script = "$KEEP sh -c '(setsid sh -c \"exec sleep 1001 </dev/null >/dev/null 2>&1\" &)'; setsid sleep 2001 &";
    let mut run = service(script).config(ALLOWED).start();
    let (master, other) = (run.wait_command("sleep 1001"), run.wait_command("sleep 2001"));
    let stat = sys::stat(master).unwrap();
    assert_eq!((stat.sid, stat.ppid), (master, run.inner()));
    run.write_stdin("end\n");
    run.wait_end();
    assert!(sys::stat(other).is_none());
    let ended = run.finish_with_leftovers();
    assert_eq!(ended.left.iter().map(|left| left.pid).collect::<Vec<_>>(), [master], "{ended}");
    assert_eq!((ended.code, fate(&ended, "sleep 1001")), (Some(7), "kept"), "{ended}");
    assert!(ended.stderr.contains("left 1 kept process alone: sleep 1001"), "{ended}");
}

#[test]
fn a_run_that_is_kept_itself_keeps_nothing_for_that() {
    let run = Supervise::new().config(ALLOWED).env("SUPERVISE_KEEP", "1");
    let ended = run.command(["sh", "-c", "setsid sleep 1001 & exit 4"]).run();
    assert_eq!(ended.code, Some(4), "{ended}");
    assert!(ended.report["leftovers"].as_array().unwrap().iter().all(|one| one["ended"] == "SIGTERM"), "{ended}");
}
