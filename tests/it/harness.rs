//! The harness itself: it finds what is left, and its nodes are what they were asked to be.
//!
//! Under tini, dumb-init, catatonit and sh, so that it is known to work before the product does.

use std::os::fd::AsRawFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use libc::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

use crate::support::fault::Fault;
use crate::support::tree::{bomb_uid, ignoring};
use crate::support::{
    Act, Born, Ended, Io, Running, Supervise, need_program, need_root, node, node_program, supervise, sys,
};

/// A subreaper that passes signals on and ends with its main process, whatever is left.
fn tini() -> Supervise {
    Supervise::program("tini").options(["-s"])
}

fn shell(script: &str) -> Supervise {
    Supervise::program("sh").options(["-c", script])
}

fn message(panics: impl FnOnce() -> Ended) -> String {
    let cause = catch_unwind(AssertUnwindSafe(panics)).expect_err("it must panic");
    cause.downcast_ref::<String>().cloned().unwrap_or_default()
}

fn state(pid: i32) -> char {
    sys::stat(pid).map_or('-', |stat| stat.state)
}

/// Ends what is alive: these tests are about the tree, not about its end.
fn over(mut run: Running) -> Ended {
    run.signal(libc::SIGKILL);
    run.finish_with_leftovers()
}

#[test]
fn what_is_left_is_named_and_gone_after() {
    let ended = shell("setsid sleep 1000 & exit 5").start().finish_with_leftovers();
    assert_eq!(ended.code, Some(5), "{ended}");
    assert_eq!(ended.left.len(), 1, "{ended}");
    assert_eq!(state(ended.left[0].pid), '-');
}

#[test]
fn a_leftover_fails_the_test_by_name_and_is_gone_after() {
    let mut pid = 0;
    let text = message(|| {
        let mut run = shell("setsid sleep 1000 & echo $!; read line").stdin(Io::Pipe).start();
        pid = run.expect_stdout("\n").trim().parse().unwrap();
        run.write_stdin("end\n");
        run.finish()
    });
    assert!(text.contains("processes are left") && text.contains("sleep"), "{text}");
    assert_eq!(state(pid), '-');
}

#[test]
fn a_zombie_is_a_leftover() {
    let run = shell("sh -c 'exit 0' & exec sleep 1000").start();
    let zombie = || run.processes().iter().any(|stat| stat.state == 'Z');
    assert!(sys::spin(Duration::from_secs(30), zombie));
    let ended = over(run);
    assert_eq!(ended.left.iter().map(|left| left.state).collect::<String>(), "Z", "{ended}");
}

#[test]
fn a_process_of_the_run_that_is_nobodys_descendant_fails_the_test() {
    let run = shell("exit 0");
    let mark = run.dir().display().to_string();
    // Ends with its stdin, should nobody find it.
    let mut stranger = std::process::Command::new("cat")
        .env(supervise::MARK, mark)
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let text = message(|| run.run());
    let killed = stranger.wait().unwrap();
    assert!(text.contains("not descendants any more") && text.contains("cat"), "{text}");
    assert!(!killed.success());
}

#[test]
fn a_panic_of_the_test_ends_the_run() {
    let mut pids = Vec::new();
    message(|| {
        let mut run = tini().tree(node("main").with(node("deaf").setsid().ignores([SIGTERM]).copies(5))).start();
        run.wait_up();
        pids = run.nodes().map(|proc| proc.pid).collect();
        panic!("of the test");
    });
    assert_eq!(pids.len(), 6);
    assert!(pids.into_iter().all(|pid| state(pid) == '-'));
}

#[test]
fn a_wait_that_is_too_long_fails_with_what_is_known() {
    let text = message(|| {
        let mut run = tini().guard(Duration::from_millis(300)).tree(node("main").says("hello")).start();
        run.wait_up();
        run.wait_got("main", SIGTERM, 1);
        run.finish()
    });
    assert!(
        text.contains("for main to get signal 15") && text.contains("node main") && text.contains("hello"),
        "{text}"
    );
}

#[test]
fn a_program_that_cannot_be_started_is_said() {
    let text = message(|| Supervise::program("/does/not/exist").run());
    assert!(text.contains("No such file"), "{text}");
}

#[test]
fn every_described_process_is_up_before_the_wait_is_over() {
    let deep = node("w").setsid().copies(300).with(node("x").with(node("y").own_group().copies(2)));
    let mut run = tini().tree(node("main").with(deep)).start();
    run.wait_up();
    assert_eq!(run.nodes().count(), 1 + 300 * 4);
    let (w, x, y) = (run.node("w#299"), run.node("x#299"), run.node("y#299#1"));
    assert_eq!((w.sid, w.pgid), (w.pid, w.pid));
    assert_eq!((x.ppid, x.sid, x.pgid), (w.pid, w.pid, w.pid));
    assert_eq!((y.ppid, y.sid, y.pgid), (x.pid, w.pid, y.pid));
    assert_eq!(sys::command(y.pid), "node y#299#1");
    let ended = over(run);
    assert_eq!(ended.left.len(), 1201, "{ended}");
}

#[test]
fn signals_are_ignored_blocked_and_caught_as_described() {
    let leaf = node("leaf").reports([SIGUSR1]);
    let main = node("main").ignores([SIGTERM, SIGHUP]).blocks([SIGUSR2]).on(SIGINT, Act::Exit(7)).with(leaf);
    let mut run = tini().tree(main).start();
    run.wait_up();
    let main = run.node("main");
    assert!(main.ignores(SIGTERM) && main.ignores(SIGHUP) && !main.ignores(SIGINT));
    assert!(!run.node("leaf").ignores(SIGTERM));
    run.signal(SIGTERM);
    run.signal(SIGUSR2);
    run.signal_node("leaf", SIGUSR1);
    run.wait_got("leaf", SIGUSR1, 1);
    run.signal_node("leaf", libc::SIGKILL);
    run.signal(SIGINT);
    run.wait_got("main", SIGINT, 1);
    // `main` did not wait for the leaf, and tini may be gone before it could.
    let ended = run.finish_with_leftovers();
    assert_eq!(ended.code, Some(7), "{ended}");
    assert_eq!(ended.got("main", SIGUSR2), 0);
}

#[test]
fn newborns_are_born() {
    let deaf = Act::NewbornThenExit(ignoring(&[SIGTERM]), 3);
    let session = Act::Newborn(Born { setsid: true, ..Born::default() });
    let mut run = tini().tree(node("main").on(SIGUSR1, session).on(SIGTERM, deaf)).start();
    run.wait_up();
    run.signal(SIGUSR1);
    let first = run.wait_born(1)[0].clone();
    assert_eq!((first.ppid, first.sid), (run.node("main").pid, first.pid));
    run.signal(SIGTERM);
    let second = run.wait_born(2)[1].clone();
    sys::kill(second.pid, SIGTERM).unwrap();
    let ended = run.finish_with_leftovers();
    assert_eq!(ended.code, Some(3), "{ended}");
    assert_eq!(ended.left.len(), 2, "{ended}");
}

#[test]
fn a_drain_waits_for_the_children() {
    let mut run = tini().tree(node("main").on(SIGTERM, Act::DrainThenExit(4)).with(node("w").exit_on_go(0))).start();
    run.wait_up();
    run.signal(SIGTERM);
    run.wait_got("main", SIGTERM, 1);
    assert_ne!(state(run.node("main").pid), 'Z');
    run.let_go("w");
    assert_eq!(run.finish().code, Some(4));
}

#[test]
fn processes_are_made_in_every_way() {
    let main = node("main")
        .with(node("orphan").orphaned())
        .with(node("background").daemonized())
        .with(node("cloned").cloned())
        .with(node("sibling").clone_parent())
        .with(node("silent").exit_signal(0))
        .with(node("other").exit_signal(SIGUSR1))
        .with(node("vforked").vforked());
    let mut run = tini().tree(main).start();
    run.wait_up();
    let main = run.node("main");
    for child in ["cloned", "silent", "other", "vforked"] {
        assert_eq!(run.node(child).ppid, main.pid, "{child}");
    }
    for fallen in ["orphan", "background", "sibling"] {
        assert_eq!(run.node(fallen).ppid, run.pid(), "{fallen}");
    }
    let background = run.node("background");
    assert!(background.sid != main.sid && background.sid != background.pid);
    assert_eq!(run.node("orphan").sid, main.sid);
    assert_eq!(state(main.pid), 'D', "suspended by its vforked child");
    run.signal_node("vforked", libc::SIGKILL);
    assert!(sys::spin(Duration::from_secs(30), || state(main.pid) == 'S'));
    assert_eq!(over(run).left.len(), 8);
}

#[test]
fn processes_are_in_the_state_that_was_asked_for() {
    let main = node("main")
        .with(node("stopped").stopped())
        .with(node("traced").traced())
        .with(node("elder").traced_by_younger())
        .with(node("tracer").traces_elder())
        .with(node("headless").leader_exits().ignores([SIGTERM]))
        .with(node("named").comm("a) S b\n"))
        .with(node("secret").argv(["backup", "--password", "hunter2"]).with(node("below")))
        .with(node("reaper").subreaper().with(node("between").with(node("fallen").orphaned())));
    let mut run = tini().tree(main).start();
    run.wait_up();
    for (name, expected) in [("stopped", 'T'), ("traced", 't'), ("elder", 't'), ("headless", 'Z'), ("named", 'S')] {
        let pid = run.node(name).pid;
        assert!(sys::spin(Duration::from_secs(30), || state(pid) == expected), "{name} is {}", state(pid));
    }
    assert_eq!(sys::stat(run.node("named").pid).unwrap().comm, "a) S b\n");
    assert_eq!(sys::command(run.node("secret").pid), "backup --password hunter2");
    assert_eq!(run.node("below").ppid, run.node("secret").pid);
    assert_eq!(run.node("fallen").ppid, run.node("reaper").pid);
    run.signal_node("headless", SIGTERM);
    assert_eq!(state(run.node("headless").pid), 'Z');
    assert_eq!(over(run).left.len(), 12);
}

#[test]
fn a_main_process_ends_when_all_are_up() {
    for _ in 0..5 {
        let main = node("main").exit_when_up(9).with(node("w").copies(10).with(node("s").setsid().stopped()));
        let ended = tini().tree(main).start().finish_with_leftovers();
        assert_eq!(ended.code, Some(9), "{ended}");
        assert_eq!(ended.left.iter().filter(|left| left.state == 'T').count(), 10, "{ended}");
    }
}

#[test]
fn a_main_process_dies_of_any_signal() {
    for signal in [libc::SIGKILL, libc::SIGSEGV, SIGTERM, libc::SIGPIPE, 34, 64] {
        let main = node("main").with(node("w")).killed_by(signal);
        let mut run = Supervise::program(node_program()).options(["tree", "{dir}"]).bare_tree(main).start();
        run.wait_up();
        let ended = run.finish_with_leftovers();
        assert_eq!((ended.code, ended.signal), (None, Some(signal)), "{ended}");
    }
}

#[test]
fn chains_are_ended() {
    let mut run = tini().tree(node("main").chains(4).with(node("w").chains_of_sessions(4))).start();
    run.wait_up();
    let ended = over(run);
    assert!(!ended.left.is_empty(), "{ended}");
}

#[test]
fn a_bomb_is_ended() {
    if !need_root() {
        return;
    }
    let uid = bomb_uid();
    let mut run = tini().bomb_uid(uid).tree(node("main").bomb(uid, 200)).start();
    run.wait_up();
    assert!(sys::spin(Duration::from_secs(60), || run.processes().len() > 150));
    over(run);
}

#[test]
fn churn_is_done_when_it_says_so() {
    let mut run = tini().tree(node("main").churn(500, 20)).start();
    run.wait_done("main");
    let ended = over(run);
    assert_eq!(ended.fell, 0, "{ended}");
}

#[test]
fn the_program_starts_exactly_as_asked() {
    let (read, write) = supervise::pipe();
    let watched = write.as_raw_fd();
    let run =
        Supervise::program(node_program()).options(["look"]).ignoring([SIGHUP, libc::SIGCHLD]).blocking([SIGUSR2]);
    let run = run.stdin(Io::Closed).fd(7, write).env("SOME", "thing").umask(0o27).rlimit(libc::RLIMIT_NOFILE, 100, 100);
    let dir = run.dir().to_owned();
    let ended = run.run();
    let look = ended.look();
    assert_eq!(look["ignored"], serde_json::json!([SIGHUP, libc::SIGCHLD]), "{ended}");
    assert_eq!(look["blocked"], serde_json::json!([SIGUSR2]), "{ended}");
    let fds: Vec<&String> = look["fds"].as_object().unwrap().keys().collect();
    assert_eq!(fds, ["1", "2", "7"], "{ended}");
    assert_eq!(look["env"]["SOME"], "thing");
    assert_eq!(look["umask"], 0o27);
    assert_eq!(look["cwd"], dir.to_str().unwrap());
    assert_eq!((&look["sid"], &look["pgid"]), (&look["pid"], &look["pid"]));
    assert!(watched > 2 && read.as_raw_fd() > 2);
}

#[test]
fn a_user_is_changed() {
    if !need_root() {
        return;
    }
    let ended = Supervise::program(node_program()).options(["look"]).user(4711, 4712).run();
    assert_eq!((&ended.look()["uid"], &ended.look()["gid"]), (&4711.into(), &4712.into()));
    let mut run = tini().user(4711, 4711).tree(node("main").with(node("w"))).start();
    run.wait_up();
    assert_eq!(over(run).left.len(), 2);
}

#[test]
fn the_program_is_pid_one_with_each_kind_of_proc() {
    if !need_root() || !need_program("catatonit") {
        return;
    }
    let builders: [fn(Supervise) -> Supervise; 3] =
        [Supervise::pid_one, Supervise::pid_one_without_proc, Supervise::pid_one_with_outer_proc];
    for (space, proc_is_there) in builders.into_iter().zip([true, false, false]) {
        let tree = node("main").on(SIGTERM, Act::Exit(6)).with(node("w").setsid()).with(node("o").orphaned());
        let mut run = space(Supervise::program("catatonit")).tree(tree).start();
        run.wait_up();
        assert_eq!(run.node("main").ppid, 1);
        assert_eq!(run.node("o").ppid, 1);
        let w = run.pid_of("w");
        assert_eq!(sys::stat(w).unwrap().comm, "w");
        let entered = run.enter(["sh", "-c", "exec sleep 1000"]);
        assert!(sys::spin(Duration::from_secs(30), || sys::command(entered) == "sleep 1000"));
        if proc_is_there {
            assert!(run.node("w").ignored.is_some());
        }
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!((ended.code, ended.fell), (Some(6), 0), "{ended}");
        assert_eq!((state(w), state(entered)), ('-', '-'));
    }
}

#[test]
fn a_system_call_fails_as_asked() {
    let fault = Fault::new().fails(libc::SYS_mkdir, libc::ENOSPC).fails_with(libc::SYS_prctl, 0, 15, libc::EPERM);
    let ended = shell("mkdir x; echo $?; rmdir y").fault(fault).run();
    assert!(ended.stderr.contains("No space left"), "{ended}");
    assert!(ended.stderr.contains("No such file"), "{ended}");
}

#[test]
fn a_full_disk_is_full_for_the_run_only() {
    if !need_root() {
        return;
    }
    let run = shell("echo x > full/new && echo written");
    let full = run.dir().join("full");
    let ended = run.full_disk(&full).run();
    assert!(ended.stderr.contains("No space left") || ended.stderr.contains("I/O error"), "{ended}");
    assert!(!ended.stdout.contains("written"), "{ended}");
    assert_eq!(std::fs::read_dir(&full).unwrap().count(), 0);
}
