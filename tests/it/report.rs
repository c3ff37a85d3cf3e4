//! What a run says of itself at its end: the report for programs, and the one line for people. Where the report goes is
//! in `report_file.rs`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant, SystemTime};

use libc::{SIGINT, SIGKILL, SIGTERM};
use serde_json::{Value, json};

use crate::support::fault::Fault;
use crate::support::need::need;
use crate::support::{Act, Ended, Io, Proc, Supervise, need_root, node, node_program, sys};

/// Long enough for SIGTERM to do its work on a busy machine, and for nobody to be killed meanwhile.
const PATIENT: [&str; 2] = ["--leftover-timeout", "1m"];

/// Short, for those that wait for SIGKILL.
const HASTY: [&str; 2] = ["--leftover-timeout", "100ms"];

fn shell(script: &str) -> Supervise {
    Supervise::new().command(["sh", "-c", script])
}

/// The entry of this process among the leftovers; there must be exactly one.
fn leftover(ended: &Ended, pid: i32) -> &Value {
    let all = ended.report["leftovers"].as_array().unwrap();
    let of_pid: Vec<&Value> = all.iter().filter(|one| one["pid"] == pid).collect();
    assert_eq!(of_pid.len(), 1, "pid {pid} in\n{ended}");
    of_pid[0]
}

/// The line for people about what had to be ended.
fn line_for_people(ended: &Ended) -> &str {
    let lines: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("leftover")).collect();
    assert_eq!(lines.len(), 1, "{ended}");
    lines[0]
}

#[test]
fn a_clean_end_is_told() {
    let before = SystemTime::now();
    let ended = Supervise::new().look().run();
    let after = SystemTime::now();
    let report = &ended.report;
    assert_eq!(report["schema"], 1, "{ended}");
    assert_eq!(report["supervise"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["command"], format!("{} look", node_program().display()));
    assert_eq!(report["pid"], ended.look()["pid"]);
    assert_eq!(report["exit"], json!({ "code": 0 }));
    assert_eq!((&report["result"], &report["exit_code"]), (&json!("success"), &json!(0)));
    assert_eq!((&report["stop_signal"], &report["start_error"]), (&Value::Null, &Value::Null));
    assert_eq!((&report["leftovers"], &report["leftovers_unnamed"]), (&json!([]), &json!(0)));
    let time = |key: &str| humantime::parse_rfc3339(report[key].as_str().unwrap()).unwrap();
    // The report has milliseconds.
    let began = before - Duration::from_millis(1);
    assert!(began <= time("started") && time("started") <= time("ended") && time("ended") <= after, "{ended}");
    let took = time("ended").duration_since(time("started")).unwrap().as_secs_f64();
    assert!((report["duration"].as_f64().unwrap() - took).abs() < 0.002, "{ended}");
}

#[test]
fn every_run_has_an_invocation_of_its_own() {
    // Also where the kernel gives no random numbers.
    for fault in [Fault::new(), Fault::new().fails(libc::SYS_getrandom, libc::ENOSYS)] {
        let invocation = || {
            let ended = Supervise::new().fault(fault.clone()).command(["true"]).run();
            uuid::Uuid::parse_str(ended.report["invocation"].as_str().unwrap()).unwrap()
        };
        let (first, second) = (invocation(), invocation());
        assert_eq!(first.get_version_num(), 4);
        assert_ne!(first, second);
    }
}

#[test]
fn every_exit_code_is_told_as_one() {
    // 126 and 127 of the service's own are no failed start, and 137 is no signal.
    for code in [1, 2, 42, 123, 126, 127, 137, 255] {
        let ended = shell(&format!("exit {code}")).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!(ended.report["exit"], json!({ "code": code }), "{ended}");
        assert_eq!((&ended.report["result"], &ended.report["exit_code"]), (&json!("exit-code"), &json!(code)));
        assert_eq!(ended.report["start_error"], Value::Null, "{ended}");
    }
}

#[test]
fn death_by_a_signal_is_told_by_its_name() {
    let signals = [(SIGKILL, "SIGKILL"), (SIGTERM, "SIGTERM"), (libc::SIGUSR1, "SIGUSR1"), (libc::SIGPIPE, "SIGPIPE")];
    for (signal, name) in signals.into_iter().chain([(34, "SIGRTMIN"), (40, "SIGRTMIN+6"), (64, "SIGRTMIN+30")]) {
        let ended = Supervise::new().tree(node("main").killed_by(signal)).run();
        assert_eq!(ended.code, Some(128 + signal), "{ended}");
        let exit = json!({ "signal": name, "number": signal, "core_dumped": false });
        assert_eq!(ended.report["exit"], exit, "{ended}");
        assert_eq!((&ended.report["result"], &ended.report["exit_code"]), (&json!("signal"), &json!(128 + signal)));
    }
}

#[test]
fn a_core_dump_is_told() {
    const DUMP: &str = "kill -ABRT $$";
    let here = tempfile::tempdir().unwrap();
    let probe = std::process::Command::new("sh")
        .args(["-c", &format!("ulimit -c unlimited; {DUMP}")])
        .current_dir(here.path())
        .status()
        .unwrap();
    if !need("core dumps", probe.core_dumped()) {
        return;
    }
    let ended = shell(DUMP).rlimit(libc::RLIMIT_CORE, libc::RLIM_INFINITY, libc::RLIM_INFINITY).run();
    assert_eq!(ended.code, Some(134), "{ended}");
    assert_eq!(ended.report["exit"], json!({ "signal": "SIGABRT", "number": 6, "core_dumped": true }), "{ended}");
    assert_eq!(ended.report["result"], "core-dump");
}

#[test]
fn a_run_over_its_time_is_told() {
    let ended = Supervise::new().options(["--timeout", "100ms"]).command(["sleep", "1000"]).run();
    assert_eq!(ended.code, Some(124), "{ended}");
    assert_eq!((&ended.report["result"], &ended.report["exit_code"]), (&json!("timeout"), &json!(124)));
    assert_eq!(ended.report["exit"]["signal"], "SIGTERM", "{ended}");
    // Nobody asked.
    assert_eq!(ended.report["stop_signal"], Value::Null);
    assert!(ended.report["duration"].as_f64().unwrap() >= 0.1, "{ended}");
}

#[test]
fn a_stop_that_was_asked_for_is_told() {
    for (signal, name) in [(SIGTERM, "SIGTERM"), (SIGINT, "SIGINT"), (libc::SIGQUIT, "SIGQUIT")] {
        let mut run = Supervise::new().tree(node("main").on(signal, Act::Exit(3))).start();
        run.wait_up();
        run.signal(signal);
        let ended = run.finish();
        assert_eq!(ended.code, Some(3), "{ended}");
        assert_eq!(ended.report["stop_signal"], name, "{ended}");
        assert_eq!((&ended.report["result"], &ended.report["exit"]), (&json!("exit-code"), &json!({ "code": 3 })));
    }
}

#[test]
fn an_exit_that_counts_as_success_is_told_as_it_was() {
    let ended = shell("exit 143").options(["--success-exit-status", "143"]).run();
    assert_eq!(ended.code, Some(0), "{ended}");
    assert_eq!((&ended.report["result"], &ended.report["exit_code"]), (&json!("success"), &json!(0)));
    assert_eq!(ended.report["exit"], json!({ "code": 143 }));
}

#[test]
fn a_start_that_failed_is_told_with_its_reason() {
    let starts = [
        ("no-such-program", 127, "not found"),
        ("/etc/passwd", 126, "Permission denied"),
        ("/", 126, "is a directory"),
    ];
    for (program, code, reason) in starts {
        let ended = Supervise::new().command([program]).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!((&ended.report["result"], &ended.report["exit_code"]), (&json!("start-failed"), &json!(code)));
        // The process that tried never was the service.
        assert_eq!((&ended.report["exit"], &ended.report["pid"]), (&Value::Null, &Value::Null), "{ended}");
        let why = ended.report["start_error"].as_str().unwrap();
        assert!(why.contains(program) && why.contains(reason), "{ended}");
        assert!(ended.stderr.contains(why), "{ended}");
        assert_eq!(ended.report["leftovers"], json!([]));
    }
}

/// What the report must say of a process that has not moved, `by` whatever ended it.
fn assert_told(ended: &Ended, proc: &Proc, parent: i32, by: &str, exit: &Value) {
    let told = leftover(ended, proc.pid);
    let numbers = json!([proc.pid, parent, proc.pgid, proc.sid]);
    assert_eq!(json!([told["pid"], told["ppid"], told["pgid"], told["sid"]]), numbers, "{}\n{ended}", proc.name);
    assert_eq!((&told["ended"], &told["exit"]), (&json!(by), exit), "{}\n{ended}", proc.name);
    assert!(told.get("not_permitted").is_none() && told.get("state").is_none(), "{ended}");
}

#[test]
fn each_leftover_is_told_with_its_numbers_and_what_ended_it() {
    let main = node("main")
        .with(node("soft").with(node("below").own_group()))
        .with(node("drains").setsid().on(SIGTERM, Act::Exit(9)))
        .with(node("deaf").setsid().ignores([SIGTERM]).with(node("held").own_group()))
        .on(SIGTERM, Act::Exit(4));
    let mut run = Supervise::new().options(PATIENT).tree(main).start();
    run.wait_up();
    let [soft, below, drains, deaf, held] = ["soft", "below", "drains", "deaf", "held"].map(|name| run.node(name));
    assert!(deaf.ignores(SIGTERM));
    let uid = json!(run.dir().metadata().unwrap().uid());
    let (supervisor, asked) = (run.supervisor(), Instant::now());
    run.signal(SIGTERM);
    // Those that listen are given all the time that they need; then a second request, a second after the first.
    // `held` stays a zombie of the deaf one, and gets SIGKILL when it is dead.
    let dead = |proc: &Proc| sys::stat(proc.pid).is_none_or(|stat| stat.state == 'Z');
    let gone = || [&soft, &below, &drains, &held].into_iter().all(dead);
    assert!(sys::spin(Duration::from_secs(50), || gone() && asked.elapsed() > Duration::from_millis(1100)));
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(4), "{ended}");
    let by_signal = |name: &str, number| json!({ "signal": name, "number": number, "core_dumped": false });
    assert_told(&ended, &soft, supervisor, "SIGTERM", &by_signal("SIGTERM", SIGTERM));
    assert_told(&ended, &below, soft.pid, "SIGTERM", &by_signal("SIGTERM", SIGTERM));
    assert_told(&ended, &drains, supervisor, "SIGTERM", &json!({ "code": 9 }));
    assert_told(&ended, &deaf, supervisor, "SIGKILL", &by_signal("SIGKILL", SIGKILL));
    assert_told(&ended, &held, deaf.pid, "SIGTERM", &by_signal("SIGTERM", SIGTERM));
    assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 5, "{ended}");
    assert!(ended.report["leftovers"].as_array().unwrap().iter().all(|one| one["uid"] == uid), "{ended}");
    assert_eq!((&ended.report["result"], &ended.report["exit"]), (&json!("exit-code"), &json!({ "code": 4 })));
    let line = line_for_people(&ended);
    assert!(
        line.contains("ended 5 leftovers of the service in ") && line.contains("(4 by SIGTERM, 1 by SIGKILL)"),
        "{line}"
    );
}

#[test]
fn a_leftover_is_told_with_its_user_and_its_command() {
    if !need_root() {
        return;
    }
    let words = ["/opt/backup", "--to", "a b", "it's", ""];
    let main = node("main").with(node("user").setsid().uid(4711)).with(node("named").argv(words)).exit_on_go(0);
    let mut run = Supervise::new().options(PATIENT).tree(main).start();
    run.wait_up();
    let (user, named) = (run.node("user").pid, run.node("named").pid);
    run.let_go("main");
    let ended = run.finish();
    assert_eq!((&leftover(&ended, user)["uid"], &leftover(&ended, named)["uid"]), (&json!(4711), &json!(0)), "{ended}");
    assert_eq!(leftover(&ended, named)["command"], r"/opt/backup --to 'a b' 'it'\''s' ''", "{ended}");
    assert!(leftover(&ended, user)["command"].as_str().unwrap().contains("node user"), "{ended}");
}

#[test]
fn three_hundred_leftovers_are_all_named_and_the_line_for_people_has_the_first_few() {
    let main = node("main").with(node("w").setsid().copies(300)).exit_on_go(0);
    let mut run = Supervise::new().options(PATIENT).tree(main).start();
    run.wait_up();
    let there: BTreeSet<i64> = run.nodes().filter(|proc| proc.name != "main").map(|proc| proc.pid.into()).collect();
    run.signal_node("main", SIGKILL);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    let told = ended.report["leftovers"].as_array().unwrap();
    assert_eq!(told.len(), 300);
    assert_eq!(told.iter().map(|one| one["pid"].as_i64().unwrap()).collect::<BTreeSet<_>>(), there);
    for one in told {
        assert_eq!(one["ended"], "SIGTERM", "{one}");
        assert!(one["command"].as_str().unwrap().contains("node w#"), "{one}");
    }
    assert_eq!(ended.report["leftovers_unnamed"], 0);
    let line = line_for_people(&ended);
    assert!(line.contains("ended 300 leftovers of the service in ") && line.contains("(300 by SIGTERM)"), "{line}");
    assert!(line.ends_with(", and 295 more") && line.matches("(pid ").count() == 5, "{line}");
}

#[test]
fn a_background_process_that_was_ended_is_said_though_the_service_succeeded() {
    let main = node("main").with(node("background").argv(["backup", "--all"])).exit_when_up(0);
    let mut run = Supervise::new().options(PATIENT).tree(main).start();
    let pid = run.node("background").pid;
    let ended = run.finish();
    assert_eq!(ended.code, Some(0), "{ended}");
    assert_eq!(leftover(&ended, pid)["command"], "backup --all");
    let line = line_for_people(&ended);
    assert!(line.starts_with("supervise: ended 1 leftover of the service in "), "{line}");
    assert!(line.ends_with(&format!(" s (1 by SIGTERM): backup --all (pid {pid})")), "{line}");
}

#[test]
fn nothing_is_said_when_nothing_had_to_be_ended() {
    for script in ["exit 0", "exit 3", "kill -9 $$", "sleep 0 & wait"] {
        let ended = shell(script).run();
        assert_eq!(ended.stderr, "", "{ended}");
        assert_eq!(ended.report["leftovers"], json!([]));
    }
}

/// A set-user-ID copy of the node program is the one process that an unprivileged `supervise` may not signal. The shell
/// that starts it ends with 4 when a line comes in.
pub(crate) fn with_one_that_may_not_be_signalled(stop: &str) -> Supervise {
    let run = Supervise::new().user(4711, 4711).stdin(Io::Pipe).options(HASTY).options(["-vv"]);
    let set_uid = run.dir().join("set-uid");
    // By another process: a fork of a test beside us would hold ours open for writing, and then it cannot be executed.
    let copied = std::process::Command::new("cp").arg(node_program()).arg(&set_uid).status().unwrap();
    assert!(copied.success());
    chown(&set_uid, Some(0), Some(0)).unwrap();
    fs::set_permissions(&set_uid, fs::Permissions::from_mode(0o4755)).unwrap();
    let script = r#""$0" tree "$1" & read line; exit 4"#;
    let command = format!("command = ['sh', '-c', '{script}', '{{dir}}/set-uid', '{{dir}}']");
    run.config(&format!("[service]\n{command}\n[stop]\n{stop}\n"))
}

#[test]
fn what_could_not_be_ended_is_named_with_the_reason() {
    if !need_root() {
        return;
    }
    let run = with_one_that_may_not_be_signalled("kill-timeout = '200ms'");
    let mut run = run.bare_tree(node("immune").setsid().uid(0)).start();
    run.wait_up();
    let (immune, supervisor) = (run.node("immune"), run.supervisor());
    run.write_stdin("go\n");
    let ended = run.finish_with_leftovers();
    assert_eq!(ended.left.iter().map(|left| left.pid).collect::<Vec<_>>(), [immune.pid], "{ended}");
    assert_eq!(ended.code, Some(123), "{ended}");
    assert_eq!((&ended.report["result"], &ended.report["exit_code"]), (&json!("survivors"), &json!(123)));
    assert_eq!(ended.report["exit"], json!({ "code": 4 }));
    let told = leftover(&ended, immune.pid);
    let numbers = json!([immune.pid, supervisor, immune.pgid, immune.sid]);
    assert_eq!(json!([told["pid"], told["ppid"], told["pgid"], told["sid"]]), numbers, "{ended}");
    assert_eq!((&told["ended"], &told["exit"]), (&json!("survived"), &Value::Null), "{ended}");
    assert_eq!(
        (&told["uid"], &told["state"], &told["not_permitted"]),
        (&json!(0), &json!("S"), &json!(true)),
        "{ended}"
    );
    let said = format!("pid {}, state S, uid 0", immune.pid);
    let line = ended.stderr.lines().find(|line| line.contains("could not end")).unwrap();
    assert!(line.starts_with("supervise: error: ") && line.contains(&said), "{ended}");
    assert!(line.contains("not permitted to signal it") && line.contains("node immune"), "{ended}");
}

#[test]
fn a_leftover_that_ended_by_itself_is_told_so() {
    if !need_root() {
        return;
    }
    let run = with_one_that_may_not_be_signalled("kill-timeout = '1m'");
    let mut run = run.bare_tree(node("immune").setsid().uid(0).exit_on_go(5)).start();
    run.wait_up();
    let (immune, supervisor) = (run.node("immune"), run.supervisor());
    run.write_stdin("go\n");
    // All was tried on it that can be.
    run.expect_stderr("KillTree");
    run.let_go("immune");
    let ended = run.finish();
    assert_eq!(ended.code, Some(4), "{ended}");
    assert_told(&ended, &immune, supervisor, "by itself", &json!({ "code": 5 }));
    assert_eq!(ended.report["result"], "exit-code", "{ended}");
    let line = line_for_people(&ended);
    assert!(line.contains("ended 1 leftover ") && line.contains("(1 by itself)"), "{line}");
}

#[test]
fn a_secret_is_nowhere_in_the_report_and_the_log() {
    const SECRET: &str = "hunter2";
    let words =
        ["backup", "--password", SECRET, "--token=hunter2", "AWS_SECRET_ACCESS_KEY=hunter2", "ftp://me:hunter2@host/"];
    let run = Supervise::new().options(HASTY).options(["-vv"]);
    let tree = [node_program().to_str().unwrap(), "tree", run.dir().to_str().unwrap(), "--password", SECRET];
    let tree = tree.map(str::to_owned);
    let deaf = node("leftover").setsid().ignores([SIGTERM]).argv(words);
    let mut run = run.tree(node("main").exit_on_go(0).with(deaf)).command(tree).start();
    run.wait_up();
    let pid = run.node("leftover").pid;
    assert_eq!(sys::command(pid), words.join(" "));
    run.let_go("main");
    let ended = run.finish();
    let told = leftover(&ended, pid)["command"].as_str().unwrap();
    let masked = "backup --password *** --token=*** AWS_SECRET_ACCESS_KEY=*** ftp://***:***@host/";
    assert_eq!(told, masked, "{ended}");
    assert!(ended.report["command"].as_str().unwrap().ends_with(" --password ***"), "{ended}");
    assert!(line_for_people(&ended).contains("backup --password *** --token=***"), "{ended}");
    assert!(!ended.report.to_string().contains(SECRET) && !ended.stderr.contains(SECRET), "{ended}");
}

#[test]
fn a_secret_is_nowhere_in_a_refusal_and_in_what_check_prints() {
    let config = "[service]\ncommand = ['backup', '--password', 'hunter2', 'TOKEN=hunter2']\nenvironment = { DB_PASSWORD = 'hunter2' }\n";
    let refused: [Supervise; 4] = [
        Supervise::new().options(["backup", "--password", "hunter2"]).without_report(),
        Supervise::new().command(["no-such-program", "--password", "hunter2"]),
        Supervise::new().options(["--password=hunter2"]).command(["true"]),
        Supervise::new().options(["check"]).config(config).without_report(),
    ];
    for (run, code) in refused.into_iter().zip([2, 127, 2, 0]) {
        let ended = run.run();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert!(!ended.stderr.contains("hunter2") && !ended.stdout.contains("hunter2"), "{ended}");
        assert!(!ended.report.to_string().contains("hunter2"), "{ended}");
    }
}
