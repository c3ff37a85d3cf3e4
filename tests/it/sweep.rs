//! What earlier runs of a name left is ended before a run of that name starts anything, and nobody else is touched.
//!
//! An earlier run here is one whose guard and supervisor were both killed; its own harness still holds what it left, and
//! sees the end of that.

use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::{SIGHUP, SIGINT, SIGKILL, SIGTERM};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cgroup::{Scratch, way_to_root};
use crate::end::is_called;
use crate::start::program;
use crate::support::need::need;
use crate::support::supervise::pipe;
use crate::support::tree::Node;
use crate::support::{Act, Ended, Io, Running, Supervise, need_program, need_root, node, sys};

/// The limit of every wait of ours.
const LIMIT: Duration = Duration::from_secs(30);

const USER: u32 = 4711;

/// Soon at the end of the ladder.
const SHORT: &str = "[stop]\nleftover-timeout = \"300ms\"\n";
/// And at the end of patience.
const IMPATIENT: &str = "[stop]\nleftover-timeout = \"300ms\"\nkill-timeout = \"400ms\"\n";
/// What no run may wait for.
const LONG: &str = "[stop]\nleftover-timeout = \"30s\"\nkill-timeout = \"30s\"\n";

/// A name that no other run of this machine has.
pub(crate) struct Named {
    pub(crate) name: String,
    /// The runtime directory of somebody who is not root.
    pub(crate) base: Option<TempDir>,
    user: Option<u32>,
}

impl Named {
    /// Of whoever runs the tests.
    pub(crate) fn new() -> Named {
        // SAFETY: no memory is involved.
        let is_root = unsafe { libc::geteuid() } == 0;
        Named { name: name(), base: (!is_root).then(|| tempfile::tempdir().unwrap()), user: None }
    }

    /// Of an ordinary user. Root only.
    pub(crate) fn of_user() -> Named {
        let base = tempfile::tempdir().unwrap();
        chown(base.path(), Some(USER), Some(USER)).unwrap();
        Named { name: name(), base: Some(base), user: Some(USER) }
    }

    /// A run without the name, that has everything else.
    pub(crate) fn without(&self) -> Supervise {
        let run = Supervise::new();
        let run = if let Some(user) = self.user { run.user(user, user) } else { run };
        if let Some(base) = &self.base { run.env("XDG_RUNTIME_DIR", base.path().to_str().unwrap()) } else { run }
    }

    pub(crate) fn run(&self) -> Supervise {
        self.without().options(["--name", &self.name])
    }

    /// Where its lock and its record are.
    pub(crate) fn directory(&self) -> PathBuf {
        let base = self.base.as_ref().map_or(PathBuf::from("/run"), |base| base.path().to_owned());
        base.join("supervise").join(&self.name)
    }

    /// A run that is lost, when all of its tree is up.
    fn lost(&self, tree: Node) -> Running {
        let mut run = self.run().tree(tree).start();
        run.wait_up();
        run.kill_both();
        run
    }

    /// The same of a shell that says `up`.
    fn lost_shell(&self, run: Supervise, script: &str, commands: &[&str]) -> Running {
        let mut run = run.command(["sh", "-c", script]).start();
        for command in commands {
            run.wait_command(command);
        }
        run.kill_both();
        run
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if self.base.is_none() {
            let _ = fs::remove_dir_all(self.directory());
        }
    }
}

fn name() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// As root and as an ordinary user, as far as there are both.
pub(crate) fn both() -> Vec<Named> {
    let mut both = vec![Named::new()];
    if need_root() {
        both.push(Named::of_user());
    }
    both
}

/// A service that says which of these are alive when it starts.
fn watchman(run: Supervise, pids: &[i32]) -> Supervise {
    let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
    let script = "for p in $OLD; do grep -qs '^State:.[^ZX]' /proc/$p/status && echo $p; done; echo started";
    run.env("OLD", &pids.join(" ")).command(["sh", "-c", script])
}

fn pids(run: &Running) -> Vec<i32> {
    run.nodes().map(|proc| proc.pid).collect()
}

#[track_caller]
fn swept<'e>(ended: &'e Ended, command: &str) -> &'e Value {
    let all = ended.report["swept"].as_array().unwrap();
    let named: Vec<&Value> = all.iter().filter(|one| is_called(one, command)).collect();
    assert_eq!(named.len(), 1, "{command:?} is not named once\n{ended}");
    named[0]
}

/// Nothing of the earlier run was alive when the service of this one started.
#[track_caller]
fn started_alone(ended: &Ended) {
    assert_eq!((ended.code, &*ended.stdout), (Some(0), "started\n"), "{ended}");
}

// Who is found.

#[test]
fn what_an_earlier_run_left_is_ended_before_anything_is_started() {
    for named in both() {
        let main = node("main")
            .with(node("far").setsid().with(node("deep").setsid().ignores([SIGTERM])))
            .with(node("orphan").orphaned())
            .with(node("fallen").daemonized().with(node("below").daemonized().ignores([SIGTERM])))
            .with(node("stopped").setsid().stopped())
            .with(node("many").own_group().copies(20));
        let first = named.lost(main);
        let second = watchman(named.run().config(SHORT), &pids(&first)).run();
        started_alone(&second);
        assert_eq!(second.report["swept"].as_array().unwrap().len(), 27, "{second}");
        for deaf in ["deep", "below"] {
            assert_eq!(swept(&second, &format!("node {deaf}"))["ended"], "SIGKILL", "{deaf} {second}");
        }
        assert!(second.stderr.contains("ended 27 leftovers of earlier runs in "), "{second}");
        assert_eq!(second.report["leftovers"], json!([]), "{second}");
        first.finish_empty_within(LIMIT);
    }
}

#[test]
fn they_are_asked_first_and_not_waited_for_longer_than_they_take() {
    let named = Named::new();
    let first =
        named.lost(node("main").on(SIGTERM, Act::DrainThenExit(0)).with(node("w").setsid().on(SIGTERM, Act::Exit(0))));
    let second = watchman(named.run().config(LONG), &pids(&first)).run();
    started_alone(&second);
    assert!(second.wall < Duration::from_secs(20), "{second}");
    let first = first.finish_empty_within(LIMIT);
    assert_eq!((first.got("main", SIGTERM), first.got("w", SIGTERM)), (1, 1), "{second}");
}

#[test]
fn whose_parents_are_gone_is_found_by_its_environment() {
    for named in both() {
        let run = named.run().options(["--containment", "lineage"]);
        let mut first = named.lost_shell(run, "(setsid sleep 1001 &); exec sleep 1002", &["sleep 1001", "sleep 1002"]);
        let (left, main) = (first.wait_command("sleep 1001"), first.wait_command("sleep 1002"));
        sys::kill(main, SIGKILL).unwrap();
        assert!(sys::spin(LIMIT, || sys::stat(main).is_none()));
        let second = watchman(named.run().config(LONG), &[left]).run();
        started_alone(&second);
        assert_eq!(swept(&second, "sleep 1001")["ended"], "SIGTERM", "{second}");
        first.finish_empty_within(LIMIT);
    }
}

#[test]
fn who_has_no_environment_is_found_by_its_session() {
    for named in both() {
        let run = named.run().options(["--containment", "lineage"]);
        let script = "(env -i /bin/sleep 1001 &); exec sleep 1002";
        let mut first = named.lost_shell(run, script, &["/bin/sleep 1001", "sleep 1002"]);
        let (left, main) = (first.wait_command("/bin/sleep 1001"), first.wait_command("sleep 1002"));
        let stat = sys::stat(left).unwrap();
        assert_eq!((stat.sid, stat.ppid == main), (main, false));
        let second = watchman(named.run().config(LONG), &[left, main]).run();
        started_alone(&second);
        assert_eq!(swept(&second, "/bin/sleep 1001")["ended"], "SIGTERM", "{second}");
        first.finish_empty_within(LIMIT);
    }
}

#[test]
fn who_has_no_environment_is_found_by_its_parent() {
    for named in both() {
        let run = named.run().options(["--containment", "lineage"]);
        let script = "setsid sh -c 'env -i /usr/bin/setsid /bin/sleep 1001 & wait' & exec sleep 1002";
        let mut first = named.lost_shell(run, script, &["/bin/sleep 1001", "sleep 1002"]);
        let (left, main) = (first.wait_command("/bin/sleep 1001"), first.wait_command("sleep 1002"));
        sys::kill(main, SIGKILL).unwrap();
        assert!(sys::spin(LIMIT, || sys::stat(main).is_none()));
        let second = watchman(named.run().config(LONG), &[left]).run();
        started_alone(&second);
        assert_eq!(swept(&second, "/bin/sleep 1001")["ended"], "SIGTERM", "{second}");
        first.finish_empty_within(LIMIT);
    }
}

#[test]
fn who_has_nothing_else_is_found_by_its_cgroup() {
    let Some(scratch) = Scratch::new() else { return };
    let named = Named::new();
    let in_scratch = || scratch.run().options(["--name", &named.name]);
    let script = "(env -i /usr/bin/setsid /bin/sleep 1001 &); (trap '' TERM; exec env -i /usr/bin/setsid /bin/sleep 1003) & exec sleep 1002";
    let mut first = named.lost_shell(in_scratch(), script, &["/bin/sleep 1001", "/bin/sleep 1003", "sleep 1002"]);
    let left = ["/bin/sleep 1001", "/bin/sleep 1003"].map(|command| first.wait_command(command));
    let main = first.wait_command("sleep 1002");
    sys::kill(main, SIGKILL).unwrap();
    assert!(sys::spin(LIMIT, || sys::stat(main).is_none()));
    let second = watchman(in_scratch().config(SHORT), &left).run();
    started_alone(&second);
    assert_eq!(swept(&second, "/bin/sleep 1003")["ended"], "SIGKILL", "{second}");
    assert_ne!(swept(&second, "/bin/sleep 1001")["ended"], "survived", "{second}");
    first.finish_empty_within(LIMIT);
    scratch.is_clean();
}

#[test]
fn a_sweep_that_was_cut_off_is_made_good_by_the_next() {
    let named = Named::new();
    let deaf = |name| node(name).reports([SIGTERM]).with(node("deaf").setsid().ignores([SIGTERM]));
    let mut first = named.lost(deaf("main"));
    let mut second = named.run().config(LONG).command(["touch", "started"]).start();
    first.wait_got("main", SIGTERM, 1);
    second.kill_both();
    let second = second.finish_with_leftovers();
    assert!(!second.dir.path().join("started").exists(), "{second}");
    let third = watchman(named.run().config(SHORT), &pids(&first)).run();
    started_alone(&third);
    assert_eq!(swept(&third, "node deaf")["ended"], "SIGKILL", "{third}");
    first.finish_empty_within(LIMIT);
}

#[test]
fn a_supervisor_that_was_cut_off_from_its_guard_is_let_finish() {
    let named = Named::new();
    let mut first = named.run().tree(node("main").with(node("w").setsid())).start();
    first.wait_up();
    let pids = pids(&first);
    first.signal(SIGKILL);
    // Refused or started: never beside the old ones.
    let second = watchman(named.run().config(SHORT), &pids).run();
    match second.code {
        Some(0) => started_alone(&second),
        _ => assert_eq!((second.code, second.stderr.contains("is running already")), (Some(125), true), "{second}"),
    }
    first.finish_empty_within(LIMIT);
    started_alone(&watchman(named.run(), &pids).run());
}

#[test]
fn a_start_out_of_what_an_earlier_run_left_spares_those_above_it() {
    for named in both() {
        let script = format!(
            "setsid sleep 1001 & read line; {} --name {} --report second.json -- sh -c 'echo second; exit 6'; echo then $?",
            program(),
            named.name
        );
        let run = named.run().command(["sh", "-c", &script]).stdin(Io::Pipe).guard(Duration::from_secs(15));
        let mut first = run.start();
        first.wait_command("sleep 1001");
        first.kill_both();
        first.write_stdin("go\n");
        first.expect_stdout("second\n");
        first.expect_stdout("then 6\n");
        let text = fs::read(first.dir().join("second.json")).unwrap();
        let report: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(
            (report["swept"].as_array().unwrap().len(), &report["swept"][0]["command"]),
            (1, &json!("sleep 1001"))
        );
        first.finish_empty_within(LIMIT);
    }
}

#[test]
fn ctrl_c_during_the_sweep_is_a_stop() {
    for with_company in [false, true] {
        let named = Named::new();
        let mut first = named.lost(node("main").reports([SIGTERM]));
        let second = named.run().config(SHORT).command(["touch", "started"]).at_terminal();
        // A pipeline's next command reads what we say: the keys are for all of it.
        let (_reader, writer) = pipe();
        let second = if with_company { second.stdout(Io::Fd(writer)) } else { second };
        let mut second = second.start();
        first.wait_got("main", SIGTERM, 1);
        second.type_in("\x03");
        let second = second.finish();
        assert_eq!((second.code, &second.report["result"]), (Some(130), &"stopped".into()), "{with_company} {second}");
        assert!(!second.dir.path().join("started").exists(), "{second}");
        first.finish_empty_within(LIMIT);
    }
}

#[test]
fn of_a_pid_namespace_nothing_is_left_to_be_swept() {
    for named in both() {
        let run = named.run().options(["--containment", "pidns"]);
        let mut first = run.tree(node("main").with(node("w").setsid().ignores([SIGTERM]))).start();
        first.wait_up();
        first.kill_both();
        first.finish_empty_within(LIMIT);
        let second = watchman(named.run().options(["--containment", "pidns"]).config(SHORT), &[]).run();
        started_alone(&second);
        assert_eq!((&second.report["swept"], &*second.stderr), (&json!([]), ""), "{second}");
    }
}

// Who cannot be ended, and stops.

/// Frozen by the cgroup v1 freezer: not even SIGKILL has an effect until it is thawed.
pub(crate) struct Frozen(PathBuf);

impl Frozen {
    pub(crate) fn new(pid: i32) -> Option<Frozen> {
        let freezer = PathBuf::from("/sys/fs/cgroup/freezer");
        if !need_root() || !need("cgroup v1 freezer", freezer.join("cgroup.procs").exists()) {
            return None;
        }
        let frozen = Frozen(freezer.join(format!("supervise-test-sweep-{pid}")));
        fs::create_dir(&frozen.0).unwrap();
        fs::write(frozen.0.join("cgroup.procs"), pid.to_string()).unwrap();
        fs::write(frozen.0.join("freezer.state"), "FROZEN").unwrap();
        let state = || fs::read_to_string(frozen.0.join("freezer.state")).is_ok_and(|state| state.trim() == "FROZEN");
        assert!(sys::spin(LIMIT, state));
        Some(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        sys::spin(LIMIT, || fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn who_cannot_be_ended_is_named_with_123_and_nothing_is_started() {
    let named = Named::new();
    let mut first = named.run().tree(node("main").with(node("frozen").setsid()).with(node("w").setsid())).start();
    first.wait_up();
    let pid = first.node("frozen").pid;
    first.kill_both();
    let Some(frozen) = Frozen::new(pid) else { return };
    let second = named.run().config(IMPATIENT).command(["touch", "started"]).run();
    assert_eq!((second.code, &second.report["result"]), (Some(123), &"survivors".into()), "{second}");
    assert!(!second.dir.path().join("started").exists(), "{second}");
    assert_eq!(
        (swept(&second, "node frozen")["ended"].as_str(), &second.report["exit"]),
        (Some("survived"), &Value::Null),
        "{second}"
    );
    assert!(second.stderr.contains(&format!("could not end 'node frozen' (pid {pid}, state D")), "{second}");
    assert!(second.wall < Duration::from_secs(20), "{second}");
    drop(frozen);
    let third = watchman(named.run().config(SHORT), &pids(&first)).run();
    started_alone(&third);
    first.finish_empty_within(LIMIT);
}

#[test]
fn who_may_not_be_signalled_is_named_with_123_and_nothing_is_started() {
    if !need_root() || !need_program("setpriv") {
        return;
    }
    let named = Named::of_user();
    let run = named.run();
    let script = format!("{} setsid sleep 1001 & exec sleep 1002", way_to_root(&run));
    let mut first = named.lost_shell(run, &script, &["sleep 1001", "sleep 1002"]);
    let pid = first.wait_command("sleep 1001");
    // The second time it has no parent any more by which it could be known, and an environment that is not to be read.
    for _ in 0..2 {
        let next = named.run().config(IMPATIENT).command(["touch", "started"]).run();
        assert_eq!((next.code, sys::stat(pid).map(|stat| stat.state)), (Some(123), Some('S')), "{next}");
        assert_eq!(swept(&next, "sleep 1001")["not_permitted"], true, "{next}");
        assert!(!next.dir.path().join("started").exists(), "{next}");
    }
    sys::kill(pid, SIGKILL).unwrap();
    first.finish_empty_within(LIMIT);
}

#[test]
fn after_a_stop_during_the_sweep_nothing_is_started() {
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        let named = Named::new();
        let mut first = named.lost(node("main").reports([SIGTERM]));
        let mut second = named.run().config(SHORT).command(["touch", "started"]).start();
        first.wait_got("main", SIGTERM, 1);
        second.signal(signal);
        let second = second.finish();
        assert_eq!((second.code, &second.report["result"]), (Some(128 + signal), &"stopped".into()), "{second}");
        assert_eq!(swept(&second, "node main")["ended"], "SIGKILL", "{second}");
        assert!(!second.dir.path().join("started").exists(), "{second}");
        first.finish_empty_within(LIMIT);
    }
}

#[test]
fn another_signal_during_the_sweep_is_no_stop() {
    let named = Named::new();
    let mut first = named.lost(node("main").reports([SIGTERM]));
    let mut second = watchman(named.run().config(SHORT), &pids(&first)).start();
    first.wait_got("main", SIGTERM, 1);
    second.signal(libc::SIGUSR1);
    started_alone(&second.finish());
    first.finish_empty_within(LIMIT);
}

#[test]
fn a_supervisor_or_guard_that_is_killed_during_the_sweep_starts_nothing() {
    for guard_is_lost in [false, true] {
        let named = Named::new();
        let mut first = named.lost(node("main").reports([SIGTERM]));
        let mut second = named.run().config(SHORT).command(["touch", "started"]).start();
        first.wait_got("main", SIGTERM, 1);
        let victim = if guard_is_lost { second.pid() } else { second.inner() };
        sys::kill(victim, SIGKILL).unwrap();
        let second = if guard_is_lost { second.finish_empty_within(LIMIT) } else { second.finish() };
        assert_eq!(second.report["exit_code"], 125, "{second}");
        assert!(!second.dir.path().join("started").exists(), "{second}");
        started_alone(&watchman(named.run().config(SHORT), &pids(&first)).run());
        first.finish_empty_within(LIMIT);
    }
}
