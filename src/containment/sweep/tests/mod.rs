//! Claims about who is swept, with real processes: none of them is a child of ours.

mod ending;

use super::*;
use crate::containment::leftover::{Fate, Leftover};
use crate::process::Pid;
use crate::process::marks::{INVOCATION, NAME};
use crate::runtime::Identity;
use crate::runtime::tests::apart::holds_apart;
use crate::runtime::tests::need::need_root;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Long enough for a loaded machine; nothing that goes well takes so long.
const PATIENCE: Duration = Duration::from_secs(20);

/// Nobody's number.
const FOREIGNER: u32 = 54_321;

/// Processes that a shell script left behind: it told their numbers. Ended when this goes.
struct Left {
    held: Vec<Stat>,
}

impl Left {
    /// Runs a script with these variables and no others, and waits for its own end, not for that of those that it leaves.
    fn by(script: &str, environment: &[(&str, &str)]) -> Left {
        Left::by_user(script, environment, None)
    }

    fn by_user(script: &str, environment: &[(&str, &str)], uid: Option<u32>) -> Left {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        shell.envs(environment.iter().copied()).stdin(Stdio::null()).stderr(Stdio::null());
        if let Some(uid) = uid {
            shell.uid(uid);
        }
        let told = shell.output().unwrap();
        let text = String::from_utf8(told.stdout).unwrap();
        let held: Vec<Stat> = text.split_whitespace().map(|pid| stat(pid.parse().unwrap()).unwrap()).collect();
        assert!(!held.is_empty(), "{script}");
        Left { held }
    }

    fn one(&self) -> &Stat {
        &self.held[0]
    }

    fn is_alive(&self) -> bool {
        self.held.iter().all(is_alive)
    }

    fn is_gone(&self) -> bool {
        !self.held.iter().any(is_alive)
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        let proc = Proc::open().unwrap();
        for seen in &self.held {
            if let Some((process, _)) = hold(&proc, seen.pid).filter(|(_, now)| now.start == seen.start) {
                let _ = process.signal(seen.pid, Signal::KILL);
            }
        }
    }
}

fn stat(pid: Pid) -> Option<Stat> {
    Some(hold(&Proc::open().unwrap(), pid)?.1)
}

fn is_alive(seen: &Stat) -> bool {
    stat(seen.pid).is_some_and(|now| now.start == seen.start && !now.is_zombie())
}

fn send(seen: &Stat, signal: Signal) {
    hold(&Proc::open().unwrap(), seen.pid).unwrap().0.signal(seen.pid, signal).unwrap();
}

fn wait_for_end_of(seen: &Stat) {
    let proc = Proc::open().unwrap();
    let Some((process, _)) = hold(&proc, seen.pid).filter(|(_, now)| now.start == seen.start) else { return };
    if let Ok(pidfd) = process.pidfd(seen.pid) {
        assert!(is_readable(pidfd.as_raw_fd(), PATIENCE), "{seen:?}");
    }
}

fn is_readable(descriptor: RawFd, patience: Duration) -> bool {
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd.
    unsafe { libc::poll(&raw mut poll, 1, i32::try_from(patience.as_millis()).unwrap()) == 1 }
}

fn identity(stat: &Stat) -> Identity {
    Identity { pid: stat.pid, start: stat.start }
}

/// A sweep for a name that no other test has.
fn scope(name: &str) -> Scope {
    let uid = nix::unistd::geteuid().as_raw();
    let name = format!("{name}-{}", std::process::id()).parse().unwrap();
    Scope {
        name,
        uid,
        present: format!("present-{}", std::process::id()),
        former: vec![],
        ours: vec![],
        allow_keep: false,
    }
}

fn former(id: &str) -> Invocation {
    Invocation::begin(format!("{id}-{}", std::process::id()))
}

fn sweep(scope: &Scope) -> Sweep {
    Sweep::new(scope.clone()).unwrap()
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// As the caller does it: asks, waits, looks again.
fn terminate_all(sweep: &mut Sweep) {
    let until = soon();
    while sweep.look(until) != Found::Nobody {
        assert!(Instant::now() < until, "{sweep:?}");
        sweep.terminate(until);
        is_readable(sweep.descriptor(), Duration::from_secs(1));
        sweep.drain();
    }
}

fn kill_all(sweep: &mut Sweep) {
    let until = soon();
    while sweep.look(until) != Found::Nobody {
        assert!(Instant::now() < until, "{sweep:?}");
        sweep.kill(until);
        is_readable(sweep.descriptor(), Duration::from_secs(1));
        sweep.drain();
    }
}

fn leftovers(sweep: Sweep) -> Vec<Leftover> {
    let (list, unnamed) = sweep.into_leftovers().into_list();
    assert_eq!(unnamed, 0);
    list
}

/// Asked to end and ended, if there was somebody.
fn touches_nobody(scope: &Scope) {
    let mut sweep = sweep(scope);
    assert_eq!(sweep.look(soon()), Found::Nobody);
    sweep.terminate(soon());
    sweep.kill(soon());
    assert!(leftovers(sweep).is_empty());
}

#[test]
fn the_mark_of_a_recorded_invocation_is_found_over_a_double_fork_and_a_session_of_its_own() {
    let mut scope = scope("double-fork");
    scope.former = vec![former("double-fork")];
    let left = Left::by("setsid sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!'", &[(INVOCATION, &scope.former[0].id)]);
    let mut sweep = sweep(&scope);
    assert_eq!(sweep.look(soon()), Found::Somebody);
    assert!(left.is_alive(), "to look is not to touch");
    terminate_all(&mut sweep);
    assert!(left.is_gone());
    let list = leftovers(sweep);
    assert_eq!(list.len(), 1);
    assert_eq!((list[0].stat.pid, list[0].ended_by()), (left.one().pid, Some(Signal::TERM)));
    assert_eq!(
        (&list[0].name.arguments[..], list[0].name.uid),
        (&["sleep".to_owned(), "1000".to_owned()][..], Some(scope.uid))
    );
    assert_eq!(list[0].fate, Fate::Ended(None));
}

#[test]
fn an_invocation_that_is_not_recorded_is_found_by_our_name() {
    let scope = scope("by-name");
    let marks = [(INVOCATION, "unknown"), (NAME, &scope.mark_of_name())];
    let left = Left::by("sleep 1000 >/dev/null 2>&1 & echo $!", &marks);
    let mut sweep = sweep(&scope);
    terminate_all(&mut sweep);
    assert!(left.is_gone());
}

#[test]
fn another_name_another_invocation_and_the_present_one_are_not_touched() {
    let mut scope = scope("other");
    scope.former = vec![former("other")];
    let longer = format!("{}x", scope.mark_of_name());
    let foreign = format!("{FOREIGNER}/{}", scope.name);
    let present = scope.present.clone();
    let script = "sleep 1000 >/dev/null 2>&1 & echo $!";
    let left = [
        Left::by(script, &[(INVOCATION, "other"), (NAME, &longer)]),
        Left::by(script, &[(INVOCATION, "other"), (NAME, &foreign)]),
        Left::by(script, &[(INVOCATION, &format!("{}x", scope.former[0].id))]),
        Left::by(script, &[(INVOCATION, &present), (NAME, &scope.mark_of_name())]),
        Left::by(script, &[]),
    ];
    touches_nobody(&scope);
    assert!(left.iter().all(Left::is_alive));
}

#[test]
fn another_users_process_with_our_name_is_not_touched_unless_its_invocation_is_recorded() {
    if !need_root() {
        return;
    }
    let mut scope = scope("user");
    let recorded = former("user");
    let marks = [(INVOCATION, &recorded.id[..]), (NAME, &scope.mark_of_name())];
    let left = Left::by_user("sleep 1000 >/dev/null 2>&1 & echo $!", &marks, Some(FOREIGNER));
    touches_nobody(&scope);
    assert!(left.is_alive());
    scope.former = vec![recorded];
    let mut sweep = sweep(&scope);
    terminate_all(&mut sweep);
    assert!(left.is_gone());
    assert_eq!(leftovers(sweep)[0].name.uid, Some(FOREIGNER));
}

#[test]
fn our_own_children_and_those_above_us_are_not_touched() {
    let scope = scope("ours");
    let mut sleeper = Command::new("sleep");
    sleeper.arg("1000").env(NAME, scope.mark_of_name()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = sleeper.spawn().unwrap();
    let left = Left { held: vec![stat(child.id().try_into().unwrap()).unwrap()] };
    touches_nobody(&scope);
    assert!(left.is_alive());
    child.kill().unwrap();
    child.wait().unwrap();

    let above = stat(nix::unistd::getppid().as_raw()).unwrap();
    let us = stat(nix::unistd::getpid().as_raw()).unwrap();
    let mut scope = scope;
    scope.former = vec![Invocation { main: Some(identity(&above)), supervisor: Some(identity(&us)), ..former("ours") }];
    touches_nobody(&scope);
}

#[test]
fn who_is_below_a_process_of_ours_is_not_touched() {
    let mut scope = scope("guard");
    let mark = scope.mark_of_name();
    let left = Left::by("sh -c 'sleep 1000 >/dev/null & echo $!; exec >/dev/null; wait' & echo $!", &[(NAME, &mark)]);
    let guard = left.held.iter().find(|stat| left.held.iter().any(|other| other.ppid == stat.pid)).unwrap();
    scope.ours = vec![guard.pid];
    touches_nobody(&scope);
    assert!(left.is_alive());
    // PID 1 is no guard: everybody is below it.
    scope.ours = vec![1];
    let mut sweep = sweep(&scope);
    kill_all(&mut sweep);
    assert!(left.is_gone());
}

#[test]
fn a_recorded_number_with_another_start_is_another_process() {
    let mut scope = scope("reused");
    let left = Left::by("setsid sh -c 'echo $$; exec sleep 1000 >/dev/null 2>&1' &", &[]);
    let seen = left.one();
    assert_eq!(seen.sid, seen.pid);
    let other = Some(Identity { start: seen.start - 1, ..identity(seen) });
    scope.former = vec![Invocation { main: other, supervisor: other, own_session: true, ..former("reused") }];
    touches_nobody(&scope);
    // Nor is it the same in another boot or another namespace.
    let same = Invocation { main: Some(identity(seen)), own_session: true, ..former("reused") };
    let elsewhere = Invocation { pid_namespace: same.pid_namespace + 1, ..same.clone() };
    for former in [elsewhere, Invocation { boot: "other".to_owned(), ..same.clone() }] {
        scope.former = vec![former];
        touches_nobody(&scope);
    }
    assert!(left.is_alive());
    scope.former = vec![same];
    let mut sweep = sweep(&scope);
    terminate_all(&mut sweep);
    assert!(left.is_gone());
}

/// The leader of a session, and one in it that is no child of it; neither has a mark.
const SESSION: &str =
    "setsid sh -c '(sleep 1000 >/dev/null 2>&1 & echo $!); echo $$; exec sleep 1000 >/dev/null 2>&1' &";

fn session() -> (Left, Stat, Stat) {
    let left = Left::by(SESSION, &[]);
    let leader = left.held.iter().find(|stat| stat.sid == stat.pid).unwrap().clone();
    let other = left.held.iter().find(|stat| stat.sid == leader.pid && stat.pid != leader.pid).unwrap().clone();
    assert_ne!(other.ppid, leader.pid);
    (left, leader, other)
}

#[test]
fn the_session_that_the_recorded_main_process_still_leads_is_found() {
    let mut scope = scope("session");
    let (left, leader, _) = session();
    scope.former = vec![Invocation { main: Some(identity(&leader)), own_session: true, ..former("session") }];
    let mut sweep = sweep(&scope);
    terminate_all(&mut sweep);
    assert!(left.is_gone());
    assert_eq!(leftovers(sweep).len(), 2);
}

#[test]
fn a_session_that_was_not_its_own_is_no_proof() {
    let mut scope = scope("not-own");
    let (_left, leader, other) = session();
    scope.former = vec![Invocation { main: Some(identity(&leader)), own_session: false, ..former("not-own") }];
    let mut sweep = sweep(&scope);
    terminate_all(&mut sweep);
    assert!(!is_alive(&leader) && is_alive(&other));
}

#[test]
fn a_session_is_proof_until_its_leader_is_reaped_and_no_longer() {
    let mut scope = scope("leaderless");
    // A child of ours, so that it is reaped when we say so; the other falls to somebody else.
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "(sleep 1000 >/dev/null 2>&1 & echo $!); exec sleep 1000 >/dev/null"]).stdout(Stdio::piped());
    // SAFETY: setsid is async-signal-safe.
    let mut child =
        unsafe { shell.pre_exec(|| nix::unistd::setsid().map(|_| ()).map_err(Into::into)) }.spawn().unwrap();
    let mut told = String::new();
    child.stdout.take().unwrap().read_to_string(&mut told).unwrap();
    let other = Left { held: vec![stat(told.trim().parse().unwrap()).unwrap()] };
    let leader = stat(child.id().try_into().unwrap()).unwrap();
    assert_eq!(other.one().sid, leader.pid);
    scope.former = vec![Invocation { main: Some(identity(&leader)), own_session: true, ..former("leaderless") }];

    child.kill().unwrap();
    wait_for_end_of(&leader);
    assert!(stat(leader.pid).unwrap().is_zombie());
    assert_eq!(sweep(&scope).look(soon()), Found::Somebody);
    child.wait().unwrap();
    touches_nobody(&scope);
    assert!(other.is_alive());
}

#[test]
fn what_a_member_made_is_found_whatever_its_environment() {
    let scope = scope("descent");
    let script = "sh -c 'env -i setsid sleep 1000 >/dev/null & echo $!; exec >/dev/null; wait' & echo $!";
    let left = Left::by(script, &[(NAME, &scope.mark_of_name())]);
    assert_eq!(left.held.len(), 2);
    let mut sweep = sweep(&scope);
    terminate_all(&mut sweep);
    assert!(left.is_gone());
}

#[test]
fn who_was_seen_once_is_known_when_its_parent_has_gone() {
    let scope = scope("orphan");
    let script = "sh -c 'env -i sleep 1000 >/dev/null & echo $!; exec >/dev/null; wait' & echo $!";
    let left = Left::by(script, &[(NAME, &scope.mark_of_name())]);
    let parent = left.held.iter().find(|stat| left.held.iter().any(|other| other.ppid == stat.pid)).unwrap();
    let mut sweep = sweep(&scope);
    // The exec of `env` is seen as it is: until then it has the mark.
    assert_eq!(sweep.look(soon()), Found::Somebody);
    send(parent, Signal::KILL);
    wait_for_end_of(parent);
    assert_eq!(sweep.look(soon()), Found::Somebody);
    terminate_all(&mut sweep);
    assert!(left.is_gone());
}

#[test]
fn a_member_that_becomes_one_by_an_exec_is_found_before_nobody_is_said_to_be_left() {
    let scope = scope("exec");
    let script = format!(
        "sh -c 'echo $$; exec >/dev/null; kill -STOP $$; exec env {NAME}={} sleep 1000' &",
        scope.mark_of_name()
    );
    let left = Left::by(&script, &[("SOMETHING", "else")]);
    let mut sweep = sweep(&scope);
    assert_eq!(sweep.look(soon()), Found::Nobody);
    send(left.one(), Signal::CONT);
    let until = soon();
    while stat(left.one().pid).unwrap().comm != "sleep" && Instant::now() < until {
        is_readable(-1, Duration::from_millis(1));
    }
    terminate_all(&mut sweep);
    assert!(left.is_gone());
}
