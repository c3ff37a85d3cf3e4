//! Who cannot be ended: named, exit 123, in a bounded time. And who only seems so.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use libc::{SIGKILL, SIGTERM};
use serde_json::Value;

use crate::end::{fate, is_called};
use crate::support::need::need;
use crate::support::tree::Node;
use crate::support::{Ended, Io, Running, Supervise, need_program, need_root, node, sys};

/// A ladder of which every rung is short.
const SHORT: &str = "[stop]\ntimeout = \"200ms\"\nleftover-timeout = \"300ms\"\nkill-timeout = \"400ms\"\n";

/// A kernel thread of patience more than the ladder has: no rung was waited for twice, none for ever.
const BOUNDED: Duration = Duration::from_secs(25);

fn named(ended: &Ended, pid: i32) -> &Value {
    let leftovers = ended.report["leftovers"].as_array().unwrap();
    leftovers.iter().find(|one| one["pid"] == pid).unwrap_or_else(|| panic!("{pid} is not named\n{ended}"))
}

#[track_caller]
fn survived(ended: &Ended, pid: i32) {
    assert_eq!((ended.code, &ended.report["result"]), (Some(123), &"survivors".into()), "{ended}");
    assert_eq!(named(ended, pid)["ended"], "survived", "{ended}");
    assert!(ended.stderr.contains("could not end ") && ended.stderr.contains(&format!("(pid {pid}, ")), "{ended}");
    assert!(ended.after_signal < BOUNDED, "{ended}");
}

/// Frozen by the cgroup v1 freezer: not even SIGKILL has an effect until it is thawed.
struct Frozen(PathBuf);

impl Frozen {
    fn new(pid: i32) -> Option<Self> {
        let freezer = PathBuf::from("/sys/fs/cgroup/freezer");
        if !need_root() || !need("cgroup v1 freezer", freezer.join("cgroup.procs").exists()) {
            return None;
        }
        let frozen = Self(freezer.join(format!("supervise-test-{pid}")));
        fs::create_dir(&frozen.0).unwrap();
        fs::write(frozen.0.join("cgroup.procs"), pid.to_string()).unwrap();
        fs::write(frozen.0.join("freezer.state"), "FROZEN").unwrap();
        let state = || fs::read_to_string(frozen.0.join("freezer.state")).is_ok_and(|state| state.trim() == "FROZEN");
        assert!(sys::spin(Duration::from_secs(30), state));
        Some(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        sys::spin(Duration::from_secs(30), || fs::remove_dir(&self.0).is_ok());
    }
}

fn start(main: Node) -> Running {
    let mut run = Supervise::new().config(SHORT).tree(main).start();
    run.wait_up();
    run
}

#[test]
fn a_frozen_leftover_is_named_at_the_deadline() {
    let mut run = start(node("main").with(node("frozen").setsid()).with(node("w").setsid()).exit_on_go(3));
    let pid = run.node("frozen").pid;
    let Some(frozen) = Frozen::new(pid) else { return };
    run.let_go("main");
    run.wait_end();
    assert!(sys::stat(pid).is_some());
    drop(frozen);
    let ended = run.finish_with_leftovers();
    survived(&ended, pid);
    assert_eq!(named(&ended, pid)["state"], "D", "{ended}");
    assert!(is_called(named(&ended, pid), "node frozen"), "{ended}");
    assert_eq!(fate(&ended, "node w"), "SIGTERM");
    assert_eq!(ended.report["exit"]["code"], 3, "{ended}");
}

#[test]
fn a_frozen_main_process_is_named_at_the_deadline_and_the_others_are_ended() {
    // A child of the frozen one would stay a zombie.
    let mut run = start(node("main").with(node("w").daemonized()));
    let pid = run.node("main").pid;
    let Some(frozen) = Frozen::new(pid) else { return };
    run.signal(SIGTERM);
    run.wait_end();
    drop(frozen);
    let ended = run.finish_with_leftovers();
    survived(&ended, pid);
    assert_eq!(ended.report["exit"], Value::Null, "{ended}");
    assert_eq!(fate(&ended, "node w"), "SIGTERM");
}

#[test]
fn a_leftover_that_thaws_in_time_is_no_survivor() {
    let main = node("main").with(node("frozen").setsid()).with(node("w").reports([SIGTERM])).exit_on_go(3);
    let mut run = Supervise::new().options(["--leftover-timeout", "30s"]).tree(main).start();
    run.wait_up();
    let Some(frozen) = Frozen::new(run.node("frozen").pid) else { return };
    run.let_go("main");
    run.wait_got("w", SIGTERM, 1);
    drop(frozen);
    run.signal_node("w", SIGKILL);
    let ended = run.finish();
    assert_eq!((ended.code, fate(&ended, "node frozen")), (Some(3), "SIGTERM"), "{ended}");
    assert!(ended.wall < BOUNDED, "{ended}");
}

/// A tracer from outside: the dead stay zombies, which nobody else can reap, until it lets go.
struct Tracer(i32);

impl Tracer {
    fn of(pid: i32) -> Self {
        // SAFETY: no memory is involved.
        let done = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        Self(pid)
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // Takes its end as the tracer, so that its parent gets it.
        // SAFETY: no status is asked for.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), libc::__WALL) };
    }
}

#[test]
fn a_dead_leftover_that_a_tracer_holds_is_named_at_the_deadline() {
    if !need_root() {
        return;
    }
    let mut run = start(node("main").with(node("held").setsid()).with(node("w").setsid()).exit_on_go(3));
    let pid = run.node("held").pid;
    let tracer = Tracer::of(pid);
    run.let_go("main");
    run.wait_end();
    assert_eq!(sys::stat(pid).unwrap().state, 'Z');
    drop(tracer);
    let ended = run.finish_with_leftovers();
    survived(&ended, pid);
    assert_eq!(named(&ended, pid)["state"], "Z", "{ended}");
    assert_eq!(fate(&ended, "node w"), "SIGTERM");
}

/// An unprivileged run whose service can become root: a copy of setpriv with the set-uid bit, `./root COMMAND`.
fn with_a_way_to_root(script: &str) -> Option<Supervise> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let hides = mounts.lines().rfind(|line| line.contains(" /proc proc ")).is_some_and(|line| line.contains("hidepid"));
    if !need_root() || !need_program("setpriv") || !need("/proc that shows everybody (without hidepid)", !hides) {
        return None;
    }
    let run = Supervise::new().user(4711, 4711).config(SHORT);
    let root = run.dir().join("setpriv");
    let path = std::env::var_os("PATH").unwrap();
    let setpriv = std::env::split_paths(&path).map(|dir| dir.join("setpriv")).find(|file| file.is_file()).unwrap();
    fs::copy(setpriv, &root).unwrap();
    fs::set_permissions(&root, fs::Permissions::from_mode(0o4755)).unwrap();
    let script = script.replace("./root", &format!("{} --reuid 0", root.display()));
    Some(run.command(["sh", "-c", &script]).stdin(Io::Pipe))
}

fn wait_for_command(run: &Running, command: &str) -> i32 {
    let mut pid = 0;
    let there = || {
        let found = run.processes().into_iter().find(|stat| sys::command(stat.pid) == command);
        pid = found.map_or(0, |stat| stat.pid);
        pid > 0
    };
    assert!(sys::spin(Duration::from_secs(50), there), "{command}");
    pid
}

#[test]
fn a_set_uid_leftover_that_may_not_be_signalled_is_named_as_that() {
    let Some(run) = with_a_way_to_root("./root sleep 1000 & read line; exit 3") else { return };
    let mut run = run.start();
    let pid = wait_for_command(&run, "sleep 1000");
    run.mark();
    run.write_stdin("end\n");
    let ended = run.finish_with_leftovers();
    survived(&ended, pid);
    let named = named(&ended, pid);
    assert_eq!((&named["not_permitted"], &named["uid"]), (&true.into(), &0.into()), "{ended}");
    assert!(ended.stderr.contains("not permitted"), "{ended}");
    assert_eq!(ended.left.len(), 1, "{ended}");
}

#[test]
fn a_signal_to_a_group_of_two_uids_is_not_taken_for_success() {
    let script = "(./root sleep 1000 & sleep 2000 & wait) & setsid sleep 3000 & read line; exit 3";
    let Some(run) = with_a_way_to_root(script) else { return };
    let mut run = run.start();
    let pid = wait_for_command(&run, "sleep 1000");
    let group = |pid| sys::stat(pid).unwrap().pgid;
    assert_eq!(group(pid), group(wait_for_command(&run, "sleep 2000")));
    wait_for_command(&run, "sleep 3000");
    run.mark();
    run.write_stdin("end\n");
    let ended = run.finish_with_leftovers();
    survived(&ended, pid);
    assert_eq!(named(&ended, pid)["not_permitted"], true, "{ended}");
    assert_eq!((fate(&ended, "sleep 2000"), fate(&ended, "sleep 3000")), ("SIGTERM", "SIGTERM"), "{ended}");
    assert_eq!(ended.left.len(), 1, "{ended}");
}

#[test]
fn a_leftover_that_may_not_be_signalled_and_goes_ended_by_itself() {
    let Some(run) = with_a_way_to_root("exec 3<&0; ./root cat <&3 & exec sleep 1000") else { return };
    let mut run = run.options(["-vv", "--leftover-timeout", "30s"]).start();
    let (pid, main) = (wait_for_command(&run, "cat"), wait_for_command(&run, "sleep 1000"));
    sys::kill(main, SIGKILL).unwrap();
    // The second look comes after the first has asked it to go.
    run.expect_stderr("TerminateLeftovers");
    run.expect_stderr("TerminateLeftovers");
    run.close_stdin();
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    assert_eq!(named(&ended, pid)["ended"], "by itself", "{ended}");
    assert!(ended.stderr.contains("1 by itself") && ended.wall < BOUNDED, "{ended}");
}
