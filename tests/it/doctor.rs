//! `supervise doctor`: what it finds, what it promises, and that the promises are true: somebody is really killed.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use libc::{ENOSYS, EPERM, SIGKILL, SIGSTOP, SIGTERM};
use serde_json::Value;

use crate::support::fault::Fault;
use crate::support::{Ended, Io, Running, Supervise, need_program, need_root, node, sys};

const PRODUCT: &str = env!("CARGO_BIN_EXE_supervise");
const USER: u32 = 4242;
const SOON: Duration = Duration::from_secs(20);

/// What a doctor said.
struct Said(Value, String);

impl Said {
    fn of(ended: &Ended) -> Said {
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended}");
        let said: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}\n{ended}"));
        assert_eq!(said["schema"], 1, "{ended}");
        Said(said, ended.to_string())
    }

    fn has(&self, name: &str) -> bool {
        self.finding(name)["available"].as_bool().unwrap()
    }

    fn detail(&self, name: &str) -> &str {
        self.finding(name)["detail"].as_str().unwrap()
    }

    fn finding(&self, name: &str) -> &Value {
        let all = self.0["findings"].as_array().unwrap();
        all.iter().find(|finding| finding["name"] == name).unwrap_or_else(|| panic!("{name}\n{}", self.1))
    }

    /// Promise and means, or nothing where that containment cannot be had.
    fn promise(&self, case: &str, containment: &str) -> Option<(&str, &str)> {
        let all = self.0["promises"].as_array().unwrap();
        let it = all.iter().find(|one| one["case"] == case && one["containment"] == containment)?;
        Some((it["promise"].as_str().unwrap(), it["by"].as_str().unwrap()))
    }

    fn promises(&self, case: &str, containment: &str, expected: &str) {
        assert_eq!(self.promise(case, containment).map(|(promise, _)| promise), Some(expected), "{case}\n{}", self.1);
    }
}

fn asked(run: Supervise) -> Said {
    Said::of(&doctor(run).run())
}

fn doctor(run: Supervise) -> Supervise {
    run.without_report().options(["doctor", "--json"])
}

fn by_user() -> Supervise {
    let run = Supervise::new().user(USER, USER);
    let dir = run.dir().to_str().unwrap().to_owned();
    run.env("XDG_RUNTIME_DIR", &dir)
}

/// `sh` runs this, in which `doctor` asks the doctor.
fn script(text: &str) -> Supervise {
    let text = text.replace("doctor", &format!("{PRODUCT} doctor --json"));
    Supervise::program("sh").options(["-c", &text])
}

/// A cgroup of a test's own, that belongs to the user; nothing where there is no cgroup v2.
struct Delegated(PathBuf);

impl Delegated {
    fn make(name: &str) -> Option<Delegated> {
        if !need_root() || !need_program("setpriv") {
            return None;
        }
        let said = asked(Supervise::new());
        let Some(own) = said.detail("cgroup").strip_prefix("can be made in ") else {
            assert!(!crate::support::need::need("cgroup v2", false));
            return None;
        };
        let directory = Path::new(own).join(format!("doctor-{name}-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        for path in [directory.clone(), directory.join("cgroup.procs")] {
            chown(path, Some(USER), Some(USER)).unwrap();
        }
        Some(Delegated(directory))
    }

    /// A script that becomes the product in this cgroup, as the user.
    fn enter(&self, options: &str) -> String {
        let procs = self.0.join("cgroup.procs");
        let user = format!("setpriv --reuid {USER} --regid {USER} --clear-groups");
        format!("echo $$ >{} && exec {user} {PRODUCT} {options}", procs.display())
    }

    fn subdirectories(&self) -> usize {
        fs::read_dir(&self.0).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count()
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(entry.path());
        }
        let removed = sys::spin(SOON, || fs::remove_dir(&self.0).is_ok());
        assert!(removed || std::thread::panicking(), "{}", self.0.display());
    }
}

/// A run of the user's in its cgroup.
fn delegated(cgroup: &Delegated, options: &str) -> Supervise {
    let run = Supervise::program("sh");
    let dir = run.dir().to_str().unwrap().to_owned();
    chown(run.dir(), Some(USER), Some(USER)).unwrap();
    run.env("XDG_RUNTIME_DIR", &dir).options(["-c", &cgroup.enter(options)])
}

#[test]
fn root_is_told_what_can_be_had() {
    if !need_root() {
        return;
    }
    let ended = doctor(Supervise::new()).run();
    assert!(ended.wall < Duration::from_millis(500) * 4, "quick, on a busy machine too: {ended}");
    let said = Said::of(&ended);
    for name in ["root", "subreaper", "emptiness-proof", "guard", "proc", "signal-other-users", "pid-namespace"] {
        assert!(said.has(name), "{name}: {}", said.1);
    }
    assert!(!said.has("pid-one"), "{}", said.1);
    let best = if said.has("cgroup") { "cgroup" } else { "lineage" };
    assert_eq!(said.0["auto"], best, "{}", said.1);
    for containment in ["lineage", best, "pid-namespace"] {
        for case in ["service-killed", "supervisor-killed", "guard-killed", "fork-bomb", "other-user"] {
            said.promises(case, containment, "nothing-left");
        }
    }
    said.promises("both-killed", "pid-namespace", "nothing-left");
}

#[test]
fn an_ordinary_user_is_told_why_not() {
    if !need_root() {
        return;
    }
    let said = asked(Supervise::new().user(USER, USER));
    assert!(!said.has("root") && !said.has("cgroup") && !said.has("signal-other-users"), "{}", said.1);
    assert!(said.detail("cgroup").contains("Permission denied"), "{}", said.1);
    assert!(said.detail("runtime-directory").contains("XDG_RUNTIME_DIR is not set"), "{}", said.1);
    assert_eq!(said.0["auto"], "lineage", "{}", said.1);
    said.promises("other-user", "lineage", "named-exit-123");
    said.promises("both-killed", "lineage", "may-live-on");
    assert_eq!(said.promise("service-killed", "cgroup"), None, "{}", said.1);
}

#[test]
fn people_are_told_on_one_screen() {
    let ended = Supervise::new().without_report().options(["doctor"]).run();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended}");
    assert!(ended.stdout.lines().count() <= 50, "{ended}");
    for text in ["--containment auto is: ", "\nboth at once ", "\nyes subreaper ", " pid-one "] {
        assert!(ended.stdout.contains(text), "{text}: {ended}");
    }
}

#[test]
fn what_cannot_be_printed_is_no_success() {
    let run = Supervise::new().without_report().options(["doctor"]);
    assert_eq!(run.stdout(Io::File("/dev/full".into())).run().code, Some(125));
}

#[test]
fn a_call_that_is_refused_is_found_and_changes_the_promise() {
    if !need_root() {
        return;
    }
    let whole = asked(Supervise::new());
    let cases: [(&str, Fault, &str, &str); 4] = [
        ("pidfd-send-signal", Fault::new().fails(libc::SYS_pidfd_send_signal, EPERM), "service-killed", "lineage"),
        ("pidfd-open", Fault::new().fails(libc::SYS_pidfd_open, ENOSYS), "both-killed", "lineage"),
        ("clone-into-cgroup", Fault::new().fails(libc::SYS_clone3, ENOSYS), "service-killed", "cgroup"),
        ("private-proc", Fault::new().fails(libc::SYS_unshare, EPERM), "both-killed", "pid-namespace"),
    ];
    for (name, fault, case, containment) in cases {
        if whole.promise(case, containment).is_none() {
            assert!(!crate::support::need::need(containment, false));
            continue;
        }
        let said = asked(Supervise::new().fault(fault));
        assert!(whole.has(name) && !said.has(name), "{name}: {}", said.1);
        assert!(said.detail(name).contains("not "), "{name}: {}", said.1);
        assert_ne!(said.promise(case, containment), whole.promise(case, containment), "{name}: {}", said.1);
    }
    let said = asked(Supervise::new().fault(Fault::new().fails(libc::SYS_close_range, ENOSYS)));
    assert!(!said.has("close-range"), "{}", said.1);
    assert_eq!(said.0["promises"], whole.0["promises"], "it only saves effort: {}", said.1);
}

#[test]
fn without_what_it_cannot_do_without_it_promises_that_nothing_is_started() {
    let subreaper = libc::PR_SET_CHILD_SUBREAPER.cast_unsigned();
    for (name, fault) in [
        ("subreaper", Fault::new().fails_with(libc::SYS_prctl, 0, subreaper, EPERM)),
        ("emptiness-proof", Fault::new().fails(libc::SYS_waitid, ENOSYS)),
        ("events", Fault::new().fails(libc::SYS_epoll_create1, EPERM)),
    ] {
        let said = asked(Supervise::new().fault(fault.clone()));
        assert!(!said.has(name), "{}", said.1);
        said.promises("service-killed", "lineage", "nothing-started");
        assert_eq!(Supervise::new().fault(fault).command(["true"]).run().code, Some(125));
    }
}

#[test]
fn without_a_guard_the_death_of_the_supervisor_is_that_of_both() {
    let said = asked(Supervise::new().fault(Fault::new().fails(libc::SYS_socketpair, EPERM)));
    assert!(!said.has("guard"), "{}", said.1);
    said.promises("supervisor-killed", "lineage", "may-live-on");
    assert_eq!(said.promise("both-killed", "pid-namespace"), None, "{}", said.1);
}

#[test]
fn a_cgroup_that_is_read_only_is_said_to_be() {
    if !need_root() || !need_program("unshare") {
        return;
    }
    let whole = asked(Supervise::new());
    let Some(own) = whole.detail("cgroup").strip_prefix("can be made in ") else {
        assert!(!crate::support::need::need("cgroup v2", false));
        return;
    };
    // As a bind mount: else it would be read-only for the whole machine.
    let text = format!("mount --bind {own} {own} && mount -o remount,bind,ro {own} && exec {PRODUCT} doctor --json");
    let said = Said::of(&Supervise::program("unshare").options(["-m", "sh", "-c", &text]).run());
    assert!(!said.has("cgroup") && said.detail("cgroup").contains("read-only"), "{}", said.1);
    assert_eq!((&said.0["auto"], said.promise("other-user", "cgroup")), (&"lineage".into(), None), "{}", said.1);
}

#[test]
fn as_pid_one_the_kernel_promises() {
    if !need_root() {
        return;
    }
    for run in [Supervise::new().pid_one(), Supervise::new().pid_one_without_proc()] {
        let said = asked(run);
        assert!(said.has("pid-one"), "{}", said.1);
        assert_eq!(said.0["auto"], "pid-namespace", "{}", said.1);
        for case in ["service-killed", "supervisor-killed", "guard-killed", "both-killed", "fork-bomb", "other-user"] {
            said.promises(case, "pid-namespace", "nothing-left");
        }
    }
}

#[test]
fn nothing_is_left_behind() {
    let Some(cgroup) = Delegated::make("nothing") else { return };
    let ended = delegated(&cgroup, "doctor --json").run();
    let said = Said::of(&ended);
    assert!(said.has("cgroup") && said.has("runtime-directory"), "{}", said.1);
    said.promises("other-user", "cgroup", "nothing-left");
    said.promises("both-killed", "cgroup", "nothing-left-after-next-start");
    assert_eq!((cgroup.subdirectories(), fs::read_dir(ended.dir.path()).unwrap().count()), (0, 1), "{ended}");
}

// The promises are true.

/// Deaf ones near and far.
fn with_leftovers(run: Supervise) -> Running {
    let far = node("far").setsid().daemonized().ignores([SIGTERM]);
    let mut run = run.tree(node("main").with(far).with(node("near").ignores([SIGTERM]))).start();
    run.wait_up();
    run
}

/// The supervisor: what has made the service. (Below the guard there may still be one that has handed over.)
fn supervisor(run: &Running) -> i32 {
    let all = run.processes();
    let below = |pid: i32| all.iter().filter(move |stat| stat.ppid == pid);
    let has_child = |stat: &&sys::Stat| below(stat.pid).count() > 0;
    below(run.pid()).find(has_child).map(|stat| stat.pid).expect("a supervisor with its service")
}

/// Neither sees the other's death.
fn kill_both(run: &Running) {
    let (guard, supervisor) = (run.pid(), supervisor(run));
    for (pid, signal) in [(guard, SIGSTOP), (supervisor, SIGKILL), (guard, SIGKILL)] {
        sys::kill(pid, signal).unwrap();
    }
}

type Run = fn() -> Supervise;

const USERS: [(&str, Run); 2] = [("root", Supervise::new), ("user", by_user)];

#[test]
fn what_is_promised_of_one_death_is_true() {
    if !need_root() {
        return;
    }
    for (who, run) in USERS {
        let said = asked(run());
        for (containment, option) in [("lineage", "lineage"), ("cgroup", "cgroup"), ("pid-namespace", "pidns")] {
            for case in ["supervisor-killed", "guard-killed"] {
                let Some((promise, _)) = said.promise(case, containment) else { continue };
                assert_eq!(promise, "nothing-left", "{who} {case} {containment}");
                let run = with_leftovers(run().options(["--containment", option]));
                let victim = if case == "guard-killed" { run.pid() } else { supervisor(&run) };
                sys::kill(victim, SIGKILL).unwrap();
                run.finish_empty_within(SOON);
            }
        }
    }
}

#[test]
fn what_is_promised_of_both_deaths_is_true() {
    if !need_root() {
        return;
    }
    for (who, run) in USERS {
        let said = asked(run());
        said.promises("both-killed", "lineage", "may-live-on");
        let lineage = with_leftovers(run().options(["--containment", "lineage"]));
        kill_both(&lineage);
        let ended = lineage.finish_with_leftovers();
        assert!(ended.left.len() >= 2, "{who}: {ended}");
        if said.promise("both-killed", "pid-namespace").is_some() {
            said.promises("both-killed", "pid-namespace", "nothing-left");
            let inside = with_leftovers(run().options(["--containment", "pidns"]));
            kill_both(&inside);
            inside.finish_empty_within(SOON);
        }
    }
}

#[test]
fn the_next_start_of_the_same_name_keeps_its_promise() {
    let Some(cgroup) = Delegated::make("next") else { return };
    let said = Said::of(&delegated(&cgroup, "doctor --json").run());
    said.promises("both-killed", "cgroup", "nothing-left-after-next-start");
    // A set-uid process is in it, too.
    let options =
        "--containment cgroup --name it -- sh -c './root --reuid 0 sleep 1000 & setsid sleep 2000 & sleep 3000'";
    let run = delegated(&cgroup, options);
    way_to_root(&run);
    let dir = run.dir().to_str().unwrap().to_owned();
    let mut run = run.start();
    for seconds in ["1000", "2000", "3000"] {
        wait_for(&run, &format!("sleep {seconds}"));
    }
    kill_both(&run);
    run.wait_end();
    wait_for(&run, "sleep 1000");
    let next = cgroup.enter("--containment cgroup --name it -- true");
    let next = Command::new("sh").args(["-c", &next]).env("XDG_RUNTIME_DIR", &dir).output().unwrap();
    assert_eq!(next.status.code(), Some(0), "{next:?}");
    run.finish_empty_within(SOON);
    assert_eq!(cgroup.subdirectories(), 0);
}

/// A copy of setpriv with the set-uid bit: `./root --reuid 0 COMMAND`.
fn way_to_root(run: &Supervise) {
    let path = std::env::var_os("PATH").unwrap();
    let setpriv = std::env::split_paths(&path).map(|dir| dir.join("setpriv")).find(|file| file.is_file()).unwrap();
    fs::copy(setpriv, run.dir().join("root")).unwrap();
    fs::set_permissions(run.dir().join("root"), fs::Permissions::from_mode(0o4755)).unwrap();
}

fn wait_for(run: &Running, command: &str) -> i32 {
    let mut pid = 0;
    let found = || {
        pid = run.processes().iter().find(|stat| sys::command(stat.pid) == command).map_or(0, |stat| stat.pid);
        pid > 0
    };
    assert!(sys::spin(SOON, found), "{command}");
    pid
}

#[test]
fn what_is_promised_of_another_uid_is_true() {
    let Some(cgroup) = Delegated::make("uid") else { return };
    let said = Said::of(&delegated(&cgroup, "doctor --json").run());
    let ways = [
        ("lineage", "lineage", "named-exit-123"),
        ("cgroup", "cgroup", "nothing-left"),
        ("pid-namespace", "pidns", "nothing-left"),
    ];
    for (containment, option, promise) in ways {
        if said.promise("other-user", containment).is_none() {
            assert!(!crate::support::need::need(containment, false));
            continue;
        }
        said.promises("other-user", containment, promise);
        let stop = "--leftover-timeout 200ms -c stop.toml";
        let options = format!(
            "--containment {option} {stop} -- sh -c '(./root --reuid 0 sleep 1000 || exec sleep 1000) & read line; exit 3'"
        );
        let run = delegated(&cgroup, &options);
        way_to_root(&run);
        fs::write(run.dir().join("stop.toml"), "[stop]\nkill-timeout = \"1s\"\n").unwrap();
        let mut run = run.stdin(Io::Pipe).start();
        let pid = wait_for(&run, "sleep 1000");
        let uid = fs::metadata(format!("/proc/{pid}")).unwrap().uid();
        // In a user namespace the set-uid bit has no effect.
        assert_eq!(uid == 0, containment != "pid-namespace", "{containment}");
        run.write_stdin("end\n");
        if promise == "nothing-left" {
            assert_eq!(run.finish().code, Some(3), "{containment}");
        } else {
            let ended = run.finish_with_leftovers();
            assert_eq!((ended.code, ended.left.len()), (Some(123), 1), "{ended}");
            assert!(ended.stderr.contains(&pid.to_string()), "{ended}");
        }
    }
}

#[test]
fn what_is_promised_without_a_proc_is_true() {
    if !need_root() {
        return;
    }
    // Not PID 1: the shell is.
    let said = Said::of(&script("doctor; exit $?").pid_one_without_proc().run());
    assert!(!said.has("proc") && !said.has("pid-one") && !said.has("cgroup"), "{}", said.1);
    said.promises("service-killed", "lineage", "may-live-on");
    let options = "--containment lineage --leftover-timeout 100ms -c stop.toml";
    let text = format!(
        "{PRODUCT} {options} -- sh -c 'setsid sleep 1000 & sleep 0.3; exit 3'; echo code $?; kill -0 -1 && echo left"
    );
    let run = Supervise::program("sh").options(["-c", &text]);
    fs::write(run.dir().join("stop.toml"), "[stop]\nkill-timeout = \"500ms\"\n").unwrap();
    let ended = run.pid_one_without_proc().run();
    assert!(ended.stdout.contains("code 123") && ended.stdout.contains("left"), "{ended}");
}
