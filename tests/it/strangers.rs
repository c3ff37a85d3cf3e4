//! Children that were ours before the service was: a shell that becomes us by exec leaves them to us. They are not of the
//! service; nobody signals them, nobody waits for them. With a guard they are the guard's, without one the supervisor's.
//! And those of the service that are hard to see.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::time::Duration;

use libc::{SIGKILL, SIGTERM};
use serde_json::{Value, json};

use crate::start::program;
use crate::support::{Ended, Running, Supervise, need_program, need_root, sys};

const GUARD: Duration = Duration::from_secs(60);

/// Whose the strangers are.
const GUARDS: [&str; 2] = ["on", "off"];

/// A shell that makes a stranger, tells its pid, and becomes us; `$OURS` is our program with `--report`.
fn shell_becomes_us(kind: &str, guard: &str, script: &str) -> Supervise {
    let run = Supervise::program(kind);
    let ours = format!("{} --guard {guard} --report {}/report.json", program(), run.dir().display());
    run.env("OURS", &ours).options(["-c", script])
}

/// Ends a run after which one stranger, and nobody else, is alive.
fn finish(run: Running, stranger: i32) -> Ended {
    let ended = run.finish_with_leftovers();
    let left: Vec<(i32, char)> = ended.left.iter().map(|left| (left.pid, left.state)).collect();
    assert_eq!(left, [(stranger, 'S')], "{ended}");
    assert_eq!(ended.stderr, "", "{ended}");
    ended
}

fn told_pid(run: &mut Running) -> i32 {
    run.expect_stdout("\n").trim().parse().unwrap()
}

#[test]
fn a_child_from_before_the_service_is_neither_signalled_nor_waited_for() {
    for guard in GUARDS {
        let mut run = shell_becomes_us("sh", guard, "sleep 1000 & echo $!; exec $OURS -- sh -c 'exit 6'").start();
        let stranger = told_pid(&mut run);
        let ended = finish(run, stranger);
        assert_eq!((ended.code, &ended.report["leftovers"]), (Some(6), &json!([])), "{ended}");
    }
}

#[test]
fn a_stop_does_not_reach_a_child_from_before_the_service() {
    for guard in GUARDS {
        let script = "sleep 1000 & echo $!; exec $OURS --leftover-timeout 100ms -- sh -c 'echo up; exec sleep 1000'";
        let mut run = shell_becomes_us("sh", guard, script).start();
        let stranger = told_pid(&mut run);
        run.expect_stdout("up\n");
        run.signal(SIGTERM);
        assert_eq!(finish(run, stranger).code, Some(128 + SIGTERM));
    }
}

#[test]
fn what_the_service_leaves_is_ended_and_the_child_from_before_is_not() {
    for guard in GUARDS {
        // One that goes by SIGTERM, and one for which the whole ladder is needed.
        let service = r#"sleep 1000 & (trap "" TERM; echo up; exec setsid sleep 1001) & read line; exit 5"#;
        let script =
            format!("sleep 1000 </dev/null & echo $!; exec $OURS --leftover-timeout 100ms -- sh -c '{service}'");
        let mut run = shell_becomes_us("sh", guard, &script).stdin(crate::support::Io::Pipe).start();
        let stranger = told_pid(&mut run);
        run.expect_stdout("up\n");
        run.write_stdin("end\n");
        let ended = run.finish_with_leftovers();
        assert_eq!(ended.left.iter().map(|left| left.pid).collect::<Vec<_>>(), [stranger], "{ended}");
        let how = |index: usize| ended.report["leftovers"][index]["ended"].as_str().unwrap_or("").to_owned();
        let mut all = [how(0), how(1)];
        all.sort();
        assert_eq!((all, ended.code), (["SIGKILL".to_owned(), "SIGTERM".to_owned()], Some(5)), "{ended}");
        assert_eq!(ended.report["leftovers"][2], Value::Null, "{ended}");
    }
}

#[test]
fn a_child_from_before_that_ends_while_the_service_runs_is_reaped() {
    for guard in GUARDS {
        let script = "sleep 1000 & echo $!; exec $OURS -- sh -c 'echo up; read line; exit 0'";
        let mut run = shell_becomes_us("sh", guard, script).stdin(crate::support::Io::Pipe).start();
        let stranger = told_pid(&mut run);
        run.expect_stdout("up\n");
        sys::kill(stranger, SIGKILL).unwrap();
        assert!(sys::spin(GUARD, || sys::stat(stranger).is_none()), "a zombie");
        run.write_stdin("end\n");
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["leftovers"]), (Some(0), &json!([])), "{ended}");
    }
}

#[test]
fn what_a_child_from_before_makes_and_leaves_is_not_ours_either() {
    for guard in GUARDS {
        // The stranger makes another one after the service has started, and ends.
        let stranger = "exec 3<&0; (read line <&3; sleep 1000 3<&- & echo $!) &";
        let script = format!("{stranger} exec $OURS -- sh -c 'echo up; exec sleep 1001' 3<&- </dev/null");
        let mut run = shell_becomes_us("sh", guard, &script).stdin(crate::support::Io::Pipe).start();
        run.expect_stdout("up\n");
        run.write_stdin("go\n");
        let late = told_pid(&mut run);
        let ours = run.pid();
        assert!(sys::spin(GUARD, || sys::stat(late).is_some_and(|stat| stat.ppid == ours)), "it does not fall to us");
        run.signal(SIGTERM);
        assert_eq!(finish(run, late).code, Some(128 + SIGTERM));
    }
}

/// Without a guard its orphan could not be told from one of the service's.
#[test]
fn with_a_guard_what_a_child_from_before_leaves_may_even_have_a_session_of_its_own() {
    let stranger = "exec 3<&0; (read line <&3; setsid sleep 1000 3<&- & echo $!) &";
    let service = r#"setsid sleep 1002 & echo up; exec sleep 1001"#;
    let script = format!("{stranger} exec $OURS --leftover-timeout 100ms -- sh -c '{service}' 3<&- </dev/null");
    let mut run = shell_becomes_us("sh", "on", &script).stdin(crate::support::Io::Pipe).start();
    run.expect_stdout("up\n");
    run.write_stdin("go\n");
    let late = told_pid(&mut run);
    let ours = run.pid();
    let has_gone = || sys::stat(late).is_some_and(|stat| stat.ppid == ours && stat.sid == late);
    assert!(sys::spin(GUARD, has_gone), "it does not fall to the guard");
    run.signal(SIGTERM);
    let ended = run.finish_with_leftovers();
    assert_eq!(ended.left.iter().map(|left| left.pid).collect::<Vec<_>>(), [late], "{ended}");
    assert_eq!(ended.code, Some(128 + SIGTERM), "{ended}");
    assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 1, "{ended}");
}

#[test]
fn a_process_substitution_gets_all_of_the_output_and_is_left_alone() {
    if !need_program("bash") {
        return;
    }
    for guard in GUARDS {
        let reader = "trap 'echo signalled' TERM HUP; cat; echo end of file; exec sleep 1000 >/dev/null 2>&1";
        let script = format!("exec $OURS -- sh -c 'echo hello; exec setsid sleep 1001 & exit 4' > >({reader})");
        let mut run = shell_becomes_us("bash", guard, &script).start();
        let ours = run.pid();
        run.wait_end();
        // `sleep 1001` held the pipe until it was ended.
        let text = run.expect_stdout("end of file\n");
        let ended = run.finish_with_leftovers();
        assert_eq!(text, "hello\nend of file\n", "{ended}");
        assert_eq!(ended.code, Some(4), "{ended}");
        // The shell of the substitution, perhaps with its `cat`; the service's have another session.
        assert!(!ended.left.is_empty() && ended.left.iter().all(|left| left.sid == ours), "{ended}");
        assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 1, "{ended}");
    }
}

#[test]
fn a_process_substitution_sees_the_end_of_file_while_the_service_lives() {
    if !need_program("bash") {
        return;
    }
    for guard in GUARDS {
        // bash passes the pipe on under the number 63, too.
        let service = "exec $OURS -- bash -c 'echo hello; exec sleep 1000 >/dev/null 63>&-'";
        let script = format!("{service} > >(cat; echo end of file)");
        let mut run = shell_becomes_us("bash", guard, &script).start();
        assert_eq!(run.expect_stdout("end of file\n"), "hello\nend of file\n");
        // We and the service: who came before has ended, and is reaped.
        let all = if guard == "on" { 3 } else { 2 };
        assert!(sys::spin(GUARD, || run.processes().len() == all));
        run.signal(SIGTERM);
        assert_eq!(run.finish().code, Some(128 + SIGTERM));
    }
}

#[test]
fn a_set_id_process_that_hides_its_environment_is_found_and_ended() {
    if !need_root() {
        return;
    }
    let (uid, gid, other_gid) = (4711, 4711, 4712);
    let run = Supervise::new().user(uid, gid).stdin(crate::support::Io::Pipe);
    let hidden = run.dir().join("hidden");
    let path = std::env::var_os("PATH").unwrap();
    let sleep = std::env::split_paths(&path).map(|dir| dir.join("sleep")).find(|path| path.is_file()).unwrap();
    fs::copy(sleep, &hidden).unwrap();
    chown(&hidden, Some(0), Some(other_gid)).unwrap();
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o2755)).unwrap();
    let mut run = run.command(["sh", "-c", "setsid ./hidden 1000 </dev/null & echo $!; read line; exit 3"]).start();
    let pid = told_pid(&mut run);
    // The kernel gives the /proc files of such a process to root.
    let owner = || fs::metadata(format!("/proc/{pid}/environ")).unwrap().uid();
    assert!(sys::spin(GUARD, || sys::command(pid) == "./hidden 1000" && owner() == 0), "it is not hidden");
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!((ended.code, &ended.report["leftovers"][0]["pid"]), (Some(3), &json!(pid)), "{ended}");
}

#[test]
fn an_agent_that_goes_to_the_background_is_ended() {
    if !need_program("ssh-agent") {
        return;
    }
    let run = Supervise::new();
    let socket = run.dir().join("agent");
    let ended = run.command(["ssh-agent", "-a", socket.to_str().unwrap()]).run();
    assert_eq!(ended.code, Some(0), "{ended}");
    assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 1, "{ended}");
}
