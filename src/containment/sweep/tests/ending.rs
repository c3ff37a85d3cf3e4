//! Claims about how they are ended, and what is said of it.

use super::*;
use std::mem;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

#[test]
fn one_that_ignores_the_request_is_killed_and_one_that_is_stopped_takes_it() {
    let scope = scope("ladder");
    let mark = scope.mark_of_name();
    let deaf = Left::by("trap '' TERM; sleep 1000 >/dev/null 2>&1 & echo $!", &[(NAME, &mark)]);
    let stopped = Left::by("sleep 1000 >/dev/null 2>&1 & echo $!", &[(NAME, &mark)]);
    send(stopped.one(), Signal::STOP);
    let mut sweep = sweep(&scope);
    assert_eq!(sweep.look(soon()), Found::Somebody);
    sweep.terminate(soon());
    wait_for_end_of(stopped.one());
    assert_eq!(sweep.look(soon()), Found::Somebody);
    assert!(deaf.is_alive() && stopped.is_gone());
    kill_all(&mut sweep);
    assert!(deaf.is_gone());
    let list = leftovers(sweep);
    let ended_by = |left: &Left| list.iter().find(|it| it.stat.pid == left.one().pid).unwrap().ended_by();
    assert_eq!((list.len(), ended_by(&deaf), ended_by(&stopped)), (2, Some(Signal::KILL), Some(Signal::TERM)));
}

#[test]
fn nobody_is_asked_twice() {
    let scope = scope("once");
    let folder = tempfile::TempDir::new().unwrap();
    let (told, never) = (folder.path().join("told"), folder.path().join("never"));
    nix::unistd::mkfifo(&never, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let script = format!(
        "sh -c 'trap \"echo TERM >>{told}\" TERM; trap \"echo USR1 >>{told}\" USR1; exec 3<>{never}
         echo $$; exec >/dev/null; while :; do read x <&3; done' &",
        told = told.display(),
        never = never.display(),
    );
    let left = Left::by(&script, &[(NAME, &scope.mark_of_name())]);
    let mut sweep = sweep(&scope);
    for round in 1..=4 {
        sweep.terminate(soon());
        // It takes the lower number first, so the second answer comes after all that was sent before.
        for answer in 1..=2 {
            send(left.one(), Signal::from_number(libc::SIGUSR1).unwrap());
            let text = || std::fs::read_to_string(&told).unwrap_or_default();
            let until = soon();
            while text().matches("USR1").count() < (round - 1) * 2 + answer && Instant::now() < until {
                is_readable(-1, Duration::from_millis(1));
            }
        }
    }
    assert_eq!(std::fs::read_to_string(&told).unwrap().matches("TERM").count(), 1);
    kill_all(&mut sweep);
}

#[test]
fn who_makes_others_without_a_mark_all_the_time_leaves_none() {
    let scope = scope("spawner");
    let mut ends = [0; 2];
    // SAFETY: there is room for two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: both are new and ours.
    let (held_by_all, writer) = unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    let spawner = "i=0; while [ $i -lt 250 ]; do env -i setsid sleep 30 & sleep 0.02; i=$((i+1)); done; wait";
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", &format!("for n in 1 2 3 4 5 6 7 8; do ({spawner}) & done")]).env(NAME, scope.mark_of_name());
    shell.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let end = writer.as_raw_fd();
    // SAFETY: dup is async-signal-safe. The copy is not closed by an exec, so each of them has it.
    let shell = unsafe {
        shell.pre_exec(move || nix::unistd::dup(BorrowedFd::borrow_raw(end)).map(mem::forget).map_err(Into::into))
    };
    assert!(shell.status().unwrap().success());
    drop(writer);

    let mut sweep = sweep(&scope);
    assert_eq!(sweep.look(soon()), Found::Somebody);
    kill_all(&mut sweep);
    assert!(is_readable(held_by_all.as_raw_fd(), Duration::from_secs(5)), "somebody escaped");
}

#[test]
fn members_that_come_and_go_are_ended() {
    let scope = scope("chain");
    let script = "sh -c 'echo $$; exec >/dev/null; while :; do /bin/true; (/bin/true &); done' &";
    let left = Left::by(script, &[(NAME, &scope.mark_of_name())]);
    let mut sweep = sweep(&scope);
    sweep.terminate(soon());
    sweep.kill(soon());
    kill_all(&mut sweep);
    assert!(left.is_gone());
}

#[test]
fn who_ends_behind_our_back_harms_nothing() {
    let scope = scope("vanishing");
    let left =
        Left::by("for i in 1 2 3 4; do sleep 1000 >/dev/null 2>&1 & echo $!; done", &[(NAME, &scope.mark_of_name())]);
    let mut sweep = sweep(&scope);
    assert_eq!(sweep.look(soon()), Found::Somebody);
    let until = soon();
    for (round, stat) in left.held.iter().enumerate() {
        send(stat, Signal::KILL);
        wait_for_end_of(stat);
        match round {
            0 => sweep.send(stat, Signal::TERM),
            1 => sweep.name_all(std::slice::from_ref(stat), until),
            2 => _ = sweep.find(until),
            _ => _ = sweep.name_survivors(),
        }
    }
    sweep.drain();
    assert_eq!(sweep.look(soon()), Found::Nobody);
    let list = leftovers(sweep);
    assert_eq!(list.len(), 4);
    assert!(list.iter().all(|it| it.fate == Fate::Ended(None) && it.ended_by().is_none()), "{list:?}");
}

#[test]
fn the_dead_whom_nobody_reaps_do_not_count() {
    let scope = scope("zombie");
    // The shell has the mark, what it becomes has not, and does not reap.
    let script = "sh -c 'sleep 1000 >/dev/null & echo $!; echo $$; exec env -i sleep 1001 >/dev/null' &";
    let left = Left::by(script, &[(NAME, &scope.mark_of_name())]);
    let dead = left.held.iter().find(|it| left.held.iter().any(|other| other.pid == it.ppid)).unwrap();
    let parent = left.held.iter().find(|it| it.pid == dead.ppid).unwrap();
    let until = soon();
    while stat(parent.pid).unwrap().comm != "sleep" && Instant::now() < until {
        is_readable(-1, Duration::from_millis(1));
    }
    let mut sweep = sweep(&scope);
    terminate_all(&mut sweep);
    assert!(is_alive(parent), "it has no mark and no parent with one");
    assert!(stat(dead.pid).unwrap().is_zombie());
}

#[test]
fn the_descriptor_is_readable_when_one_has_ended_and_not_for_ever() {
    let scope = scope("descriptor");
    let script = "sleep 1000 >/dev/null 2>&1 & echo $!; sleep 1000 >/dev/null 2>&1 & echo $!";
    let left = Left::by(script, &[(NAME, &scope.mark_of_name())]);
    let mut sweep = sweep(&scope);
    assert_eq!(sweep.look(soon()), Found::Somebody);
    assert!(!is_readable(sweep.descriptor(), Duration::ZERO));
    for stat in &left.held {
        send(stat, Signal::KILL);
        assert!(is_readable(sweep.descriptor(), PATIENCE));
        sweep.drain();
        assert!(!is_readable(sweep.descriptor(), Duration::ZERO));
    }
    assert_eq!(sweep.look(soon()), Found::Nobody);
}

#[test]
fn a_recorded_supervisor_is_not_asked_but_killed_and_what_it_had_before_is_not_touched() {
    let mut scope = scope("supervisor");
    let script = "sh -c '
        sleep 1000 >/dev/null & echo $!
        sleep 0.05
        setsid sh -c \"echo \\$\\$; exec sleep 1001 >/dev/null\" & 
        echo $$; exec >/dev/null; wait' &";
    let left = Left::by(script, &[]);
    let is_above = |stat: &&Stat| left.held.iter().any(|other| other.ppid == stat.pid);
    let supervisor = left.held.iter().find(is_above).unwrap();
    let main = left.held.iter().find(|stat| stat.sid == stat.pid).unwrap();
    let before = left.held.iter().find(|stat| ![supervisor.pid, main.pid].contains(&stat.pid)).unwrap();
    let recorded = Invocation {
        main: Some(identity(main)),
        supervisor: Some(identity(supervisor)),
        own_session: true,
        ..former("s")
    };
    scope.former = vec![recorded];
    let mut sweep = sweep(&scope);
    sweep.terminate(soon());
    wait_for_end_of(main);
    assert!(is_alive(supervisor));
    assert_eq!(sweep.look(soon()), Found::Somebody);
    kill_all(&mut sweep);
    assert!(!is_alive(supervisor) && is_alive(before));
    let list = leftovers(sweep);
    let ends: Vec<_> = list.iter().map(|it| (it.stat.pid, it.ended_by())).collect();
    assert!(ends.contains(&(supervisor.pid, Some(Signal::KILL))) && ends.contains(&(main.pid, Some(Signal::TERM))));
    assert_eq!(ends.len(), 2, "{ends:?}");
}

#[test]
fn survivors_are_named_with_what_they_do() {
    let scope = scope("survivor");
    let left = Left::by("sleep 1000 >/dev/null 2>&1 & echo $!", &[(NAME, &scope.mark_of_name())]);
    let mut sweep = sweep(&scope);
    sweep.name_survivors();
    let list = leftovers(sweep);
    assert_eq!((list.len(), list[0].stat.pid), (1, left.one().pid));
    assert!(matches!(list[0].fate, Fate::Survived { state: 'S', .. }), "{:?}", list[0].fate);
}

#[test]
fn a_look_for_which_there_is_no_time_says_so() {
    let scope = scope("no-time");
    assert_eq!(sweep(&scope).look(Instant::now()), Found::Unfinished);
}

#[test]
fn without_a_proc_nothing_is_found_and_that_is_said_once() {
    if !need_root() {
        return;
    }
    let scope = scope("blind");
    assert!(sweep(&scope).take_warnings().is_empty());
    assert!(holds_apart(|| {
        // SAFETY: constants; the mounts are made in a mount namespace of this process alone.
        unsafe {
            assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
            let (none, private) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
            assert_eq!(libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), private, none), 0);
            assert_eq!(libc::mount(c"none".as_ptr(), c"/proc".as_ptr(), c"tmpfs".as_ptr(), 0, none), 0);
        }
        let mut sweep = sweep(&scope);
        let warnings = sweep.take_warnings();
        assert!(warnings.len() == 1 && warnings[0].starts_with("/proc is not mounted"), "{warnings:?}");
        assert_eq!(sweep.look(soon()), Found::Blind);
        sweep.terminate(soon());
        sweep.kill(soon());
        sweep.name_survivors();
        assert!(sweep.take_warnings().is_empty());
    }));
}

#[test]
fn hidden_processes_are_told_of_once() {
    if !need_root() {
        return;
    }
    let scope = Scope { uid: FOREIGNER, ..scope("hidden") };
    assert!(holds_apart(|| {
        // SAFETY: as above.
        unsafe {
            assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
            let (none, private) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
            assert_eq!(libc::mount(c"none".as_ptr(), c"/".as_ptr(), std::ptr::null(), private, none), 0);
            let hidden = c"hidepid=2".as_ptr().cast();
            assert_eq!(libc::mount(c"proc".as_ptr(), c"/proc".as_ptr(), c"proc".as_ptr(), 0, hidden), 0);
        }
        nix::unistd::setgroups(&[]).unwrap();
        nix::unistd::setresgid(FOREIGNER.into(), FOREIGNER.into(), FOREIGNER.into()).unwrap();
        nix::unistd::setresuid(FOREIGNER.into(), FOREIGNER.into(), FOREIGNER.into()).unwrap();
        let mut sweep = sweep(&scope);
        let warnings = sweep.take_warnings();
        assert!(warnings.len() == 1 && warnings[0].contains("hidepid"), "{warnings:?}");
        assert_eq!(sweep.look(soon()), Found::Nobody);
    }));
}
