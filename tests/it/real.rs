//! Real software as the service: Ansible below a service modelled on dcmanager, shell pipelines, a Python pool, servers
//! that put themselves into the background. The programs and what they say are in `tests/support/real/`; what they need
//! is installed by its `setup`.

use std::path::Path;

use serde_json::Value;

use crate::support::need::need;
use crate::support::{Ended, Running, Supervise, need_root, sys};
use libc::{SIGKILL, SIGTERM};

/// In a command line of the Ansible runs.
const PASSWORD: &str = "Hunter2";

/// The roles in what the services say.
const EVERYBODY: &[&str] =
    &["leader", "async", "background", "plain", "orphan", "members", "deaf", "pool", "nginx", "redis"];

#[test]
fn ansible_2_17_killed_in_mid_run_leaves_nothing() {
    killed_in_mid_run("2.17.14");
}

#[test]
fn ansible_2_19_killed_in_mid_run_leaves_nothing() {
    killed_in_mid_run("2.19.14");
}

fn killed_in_mid_run(version: &str) {
    let Some(mut run) = dcmanager_with_ansible(version, &[]) else { return };
    let said = Said::lines(&mut run, 2);
    said.kill_service(&mut run);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    said.assert_all_named(&ended);
    assert_password_masked(&ended);
}

// dcmanager ends the groups it knows of by itself; what is not in them is ours.

#[test]
fn ansible_2_17_stopped_with_sigterm_leaves_nothing() {
    stopped("2.17.14", &["async"]);
}

#[test]
fn ansible_2_19_stopped_with_sigterm_leaves_nothing() {
    stopped("2.19.14", &["async", "background"]);
}

fn stopped(version: &str, outside_the_groups: &[&str]) {
    let Some(mut run) = dcmanager_with_ansible(version, &[]) else { return };
    let said = Said::lines(&mut run, 2);
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(0), "{ended}");
    said.named(&ended, outside_the_groups);
}

#[test]
fn ansible_2_17_leaves_nothing_when_the_service_crashes() {
    crashes("2.17.14");
}

#[test]
fn ansible_2_19_leaves_nothing_when_the_service_crashes() {
    crashes("2.19.14");
}

fn crashes(version: &str) {
    let Some(mut run) = dcmanager_with_ansible(version, &["--then", "crash"]) else { return };
    let said = Said::lines(&mut run, 2);
    let ended = run.finish();
    assert_eq!(ended.code, Some(1), "{ended}");
    assert!(ended.stderr.contains("Crash: every playbook is up"), "{ended}");
    said.assert_all_named(&ended);
}

#[test]
fn playbooks_that_only_start_when_the_service_is_killed_are_ended() {
    let Some(mut run) = dcmanager_with_ansible("2.19.14", &["--playbooks", "4"]) else { return };
    let said = Said::lines(&mut run, 1);
    said.kill_service(&mut run);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    said.assert_all_named(&ended);
}

#[test]
fn ansible_below_pid_one_leaves_nothing() {
    if !need_root() {
        return;
    }
    let Some(venv) = venv("2.19.14") else { return };
    let service = ["--ansible", &venv, "--then", "abort"];
    let mut run = Supervise::new().pid_one().service("dcmanager.py", &service).start();
    let said = Said::lines(&mut run, 2);
    let ended = run.finish();
    assert_eq!(ended.code, Some(134), "{ended}");
    said.assert_all_named(&ended);
}

#[test]
fn three_hundred_groups_and_1200_orphans_are_all_named_in_the_report() {
    let mut run = Supervise::new().service("dcmanager.py", &["--playbooks", "300"]).start();
    let said = Said::lines(&mut run, 300);
    assert_eq!((said.pids(&["leader"]).len(), said.pids(&["orphan"]).len()), (300, 1200));
    said.kill_service(&mut run);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    said.assert_all_named_as_ended_by_us(&ended);
    assert_eq!(leftovers(&ended).len(), 1500, "{ended}");
    assert!(ended.stderr.contains("ended 1500 leftovers"), "{ended}");
}

#[test]
fn a_pipelines_background_members_are_ended() {
    for stays in [false, true] {
        let arguments: &[&str] = if stays { &["wait"] } else { &[] };
        let run = Supervise::new().options(["--leftover-timeout", "300ms"]).script("pipeline.sh", arguments);
        let mut run = run.start();
        let said = Said::lines(&mut run, 1);
        if stays {
            said.kill_service(&mut run);
        }
        let ended = run.finish();
        assert_eq!(ended.code, Some(if stays { 137 } else { 0 }), "{ended}");
        said.assert_all_named_as_ended_by_us(&ended);
        let deaf = i64::from(said.pids(&["deaf"])[0]);
        assert_eq!(leftovers(&ended).iter().find(|one| one["pid"] == deaf).unwrap()["ended"], "SIGKILL", "{ended}");
    }
}

#[test]
fn a_python_pool_is_ended_with_its_service() {
    for start_method in ["fork", "spawn", "forkserver"] {
        for (then, code) in [("abort", 134), ("wait", 137)] {
            let arguments = ["--start-method", start_method, "--then", then];
            end_as_told(Supervise::new().script("pool.py", &arguments), then, code);
        }
    }
}

#[test]
fn nginx_that_daemonized_itself_is_ended() {
    server_is_ended("nginx", "nginx");
}

#[test]
fn redis_that_daemonized_itself_is_ended() {
    server_is_ended("redis", "redis-server");
}

fn server_is_ended(server: &str, program: &str) {
    let places = ["/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin"];
    if !need(program, places.iter().any(|place| Path::new(place).join(program).is_file())) {
        return;
    }
    for (then, code) in [("exit", 0), ("crash", 1), ("wait", 137)] {
        let ended = end_as_told(Supervise::new().service("server.py", &[server, "--then", then]), then, code);
        assert!(leftovers(&ended).iter().all(|one| one["command"].as_str().unwrap().contains(server)), "{ended}");
    }
}

/// Runs a service that ends by itself once it is up, or waits to be killed.
fn end_as_told(service: Supervise, then: &str, code: i32) -> Ended {
    let mut run = service.start();
    let said = Said::lines(&mut run, 1);
    if then == "wait" {
        said.kill_service(&mut run);
    }
    let ended = run.finish();
    assert_eq!(ended.code, Some(code), "{ended}");
    said.assert_all_named_as_ended_by_us(&ended);
    ended
}

// What is started.

impl Supervise {
    /// One of `tests/support/real/`. What it writes goes to the run's directory.
    fn script(self, name: &str, arguments: &[&str]) -> Self {
        let path = format!("{}/tests/support/real/{name}", env!("CARGO_MANIFEST_DIR"));
        let dir = self.dir().to_str().unwrap().to_owned();
        self.env("TMPDIR", &dir).command([&[path.as_str()], arguments].concat())
    }

    /// One that has to be told the directory.
    fn service(self, name: &str, arguments: &[&str]) -> Self {
        let dir = self.dir().to_str().unwrap().to_owned();
        self.script(name, &[arguments, &["--dir", &dir]].concat())
    }
}

/// Two playbooks, if not said otherwise.
fn dcmanager_with_ansible(version: &str, arguments: &[&str]) -> Option<Running> {
    let venv = venv(version)?;
    let arguments = [&["--ansible", &venv], arguments].concat();
    Some(Supervise::new().service("dcmanager.py", &arguments).start())
}

fn venv(version: &str) -> Option<String> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let venv = target.join(format!("venv-ansible-{version}"));
    let there = venv.join("complete").exists();
    need(&format!("ansible-core {version}, by tests/support/real/setup,"), there)
        .then(|| venv.to_str().unwrap().to_owned())
}

// What is asserted, besides that nothing is left: that is the harness's.

/// What the service said: in each line its own pid, and by role those of the processes that outlive it.
struct Said(Vec<Value>);

impl Said {
    /// Waits for so many lines.
    fn lines(run: &mut Running, count: usize) -> Self {
        Self((0..count).map(|_| serde_json::from_str(&run.expect_stdout("\n")).unwrap()).collect())
    }

    fn service(&self) -> i32 {
        pid(&self.0[0]["service"])
    }

    fn pids(&self, roles: &[&str]) -> Vec<i32> {
        let named = self.0.iter().flat_map(|line| roles.iter().filter_map(|role| line[role].as_array()));
        named.flatten().map(pid).collect()
    }

    fn kill_service(&self, run: &mut Running) {
        run.mark();
        sys::kill(self.service(), SIGKILL).unwrap();
    }

    fn assert_all_named(&self, ended: &Ended) {
        self.named(ended, EVERYBODY);
    }

    /// For where nobody in the tree ends another.
    fn assert_all_named_as_ended_by_us(&self, ended: &Ended) {
        for leftover in self.named(ended, EVERYBODY) {
            assert!(["SIGTERM", "SIGKILL"].contains(&leftover["ended"].as_str().unwrap()), "{leftover}\n{ended}");
        }
    }

    /// What the report says of those with these roles: something, and once.
    fn named<'e>(&self, ended: &'e Ended, roles: &[&str]) -> Vec<&'e Value> {
        assert_eq!(ended.fell, 0, "{ended}");
        assert_eq!(ended.report["pid"], self.service(), "{ended}");
        assert_eq!(ended.report["leftovers_unnamed"], 0, "{ended}");
        let pids = self.pids(roles);
        assert!(!pids.is_empty(), "{ended}");
        let named = |pid: &i32| leftovers(ended).iter().filter(|one| one["pid"] == *pid).collect::<Vec<_>>();
        let wrong: Vec<&i32> = pids.iter().filter(|pid| named(pid).len() != 1).collect();
        assert!(wrong.is_empty(), "{} of {} are not named once: {wrong:?}\n{ended}", wrong.len(), pids.len());
        let named: Vec<&Value> = pids.iter().flat_map(named).collect();
        // In brackets stands whose command line was only asked for when it was dying.
        let nameless = named.iter().find(|one| one["command"].as_str().unwrap().starts_with('['));
        assert!(nameless.is_none(), "{nameless:?}\n{ended}");
        named
    }
}

fn pid(value: &Value) -> i32 {
    value.as_i64().and_then(|pid| pid.try_into().ok()).unwrap()
}

fn leftovers(ended: &Ended) -> &Vec<Value> {
    ended.report["leftovers"].as_array().unwrap()
}

fn assert_password_masked(ended: &Ended) {
    let all = format!("{}{}", ended.report, ended.stderr);
    assert!(all.contains("ansible_become_pass=***"), "{ended}");
    assert!(!all.contains(PASSWORD), "{ended}");
}
