//! At a terminal `supervise` is as good as not there: keys, stops, the background, the hang-up.
//!
//! Where it can be, one body runs with and without it, and what the shell saw must be the same.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use libc::{SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU, SIGUSR1, SIGWINCH};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

use crate::support::tree::Node;
use crate::support::{Act, Ended, Running, Supervise, need_program, node, node_program, sys};

const CTRL_C: &str = "\x03";
const CTRL_BACKSLASH: &str = "\x1c";
const CTRL_S: &str = "\x13";
const CTRL_Z: &str = "\x1a";

fn supervised(tree: Node) -> Supervise {
    Supervise::new().tree(tree).at_terminal()
}

/// The two ways to run a tree: by itself and below `supervise`.
fn alone_and_supervised(tree: impl Fn() -> Node) -> [Supervise; 2] {
    [Supervise::program(node_program()).options(["tree", "{dir}"]).bare_tree(tree()).at_terminal(), supervised(tree())]
}

/// The same for a script.
fn script_alone_and_supervised(script: &str) -> [Supervise; 2] {
    let command = ["sh", "-c", script];
    [
        Supervise::program("sh").options(["-c", script]).at_terminal(),
        Supervise::new().without_report().command(command).at_terminal(),
    ]
}

/// What `$?` is.
fn shell_code(ended: &Ended) -> i32 {
    ended.code.unwrap_or_else(|| 128 + ended.signal.unwrap())
}

fn wait_state(run: &mut Running, name: &str, state: char) {
    let pid = run.pid_of(name);
    let now = || sys::stat(pid).map_or('-', |stat| stat.state);
    assert!(sys::spin(Duration::from_secs(30), || now() == state), "{name} is {}, not {state}", now());
}

fn wait_foreground(run: &Running, group: i32) {
    let done = sys::spin(Duration::from_secs(30), || run.foreground() == group);
    assert!(done, "the foreground is {}, not {group}", run.foreground());
}

/// The terminal, to look at its modes. To be dropped before the end.
fn open_terminal(run: &Running) -> File {
    let path = format!("/proc/{}/fd/0", run.shell());
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path).unwrap()
}

fn set_tostop(run: &Running) {
    let terminal = open_terminal(run);
    let mut modes = tcgetattr(&terminal).unwrap();
    modes.local_flags |= LocalFlags::TOSTOP;
    tcsetattr(&terminal, SetArg::TCSANOW, &modes).unwrap();
}

fn is_raw(modes: &Termios) -> bool {
    !modes.local_flags.intersects(LocalFlags::ICANON | LocalFlags::ISIG | LocalFlags::ECHO)
}

// Keys.

#[test]
fn a_key_ends_the_service_with_the_same_code_as_without_us() {
    for (key, signal) in [(CTRL_C, SIGINT), (CTRL_BACKSLASH, SIGQUIT)] {
        for run in alone_and_supervised(|| node("main").with(node("w"))) {
            let mut run = run.rlimit(libc::RLIMIT_CORE, 0, 0).start();
            run.wait_up();
            run.type_in(key);
            assert_eq!(shell_code(&run.finish_with_leftovers()), 128 + signal);
        }
    }
}

#[test]
fn ctrl_c_reaches_every_process_of_the_service_once_and_is_no_stop_when_it_is_handled() {
    for run in alone_and_supervised(|| {
        let w = node("w").reports([SIGINT, SIGQUIT]).on(SIGUSR1, Act::Exit(0));
        node("main").reports([SIGINT, SIGQUIT, SIGUSR1]).on(SIGTERM, Act::DrainThenExit(3)).with(w)
    }) {
        let mut run = run.start();
        run.wait_up();
        for times in 1..=3 {
            for (key, signal) in [(CTRL_C, SIGINT), (CTRL_BACKSLASH, SIGQUIT)] {
                run.type_in(key);
                run.wait_got("main", signal, times);
                run.wait_got("w", signal, times);
            }
        }
        // What comes behind them: a second copy would be there before it.
        run.signal(SIGUSR1);
        run.wait_got("main", SIGUSR1, 1);
        run.signal_node("w", SIGUSR1);
        run.wait_got("w", SIGUSR1, 1);
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!(ended.code, Some(3), "{ended}");
        for name in ["main", "w"] {
            assert_eq!((ended.got(name, SIGINT), ended.got(name, SIGQUIT)), (3, 3), "{ended}");
        }
        assert!(ended.report.is_null() || ended.report["stop_signal"] == "SIGTERM", "{ended}");
    }
}

#[test]
fn a_new_window_size_is_told_once() {
    for run in alone_and_supervised(|| node("main").reports([SIGWINCH, SIGUSR1]).on(SIGTERM, Act::Exit(0))) {
        let mut run = run.start();
        run.wait_up();
        run.resize(50, 132);
        run.wait_got("main", SIGWINCH, 1);
        run.signal(SIGUSR1);
        run.wait_got("main", SIGUSR1, 1);
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!(ended.got("main", SIGWINCH), 1, "{ended}");
    }
}

#[test]
fn a_service_in_raw_mode_gets_the_keys_as_bytes() {
    for run in script_alone_and_supervised("stty raw -echo; echo ready; dd bs=1 count=2 2>/dev/null | od -An -tx1") {
        let mut run = run.start();
        run.expect_stdout("ready");
        run.type_in("\x03\x1a");
        run.expect_stdout("03 1a");
        assert_eq!(run.finish().code, Some(0));
    }
}

// Stopped and continued.

#[test]
fn ctrl_z_stops_service_and_supervise_and_fg_and_bg_continue_them() {
    for run in alone_and_supervised(|| node("main").with(node("w"))) {
        let mut run = run.start();
        run.wait_up();
        let main = run.node("main").pid;
        assert_eq!(run.foreground(), main);
        for _ in 0..3 {
            run.type_in(CTRL_Z);
            let stop = run.wait_stopped();
            assert_eq!((stop.signal, stop.foreground), (SIGTSTP, run.pid()), "given back before the stop");
            wait_state(&mut run, "main", 'T');
            wait_state(&mut run, "w", 'T');
            assert_eq!(run.foreground(), run.shell());
            run.fg();
            run.wait_continued();
            wait_foreground(&run, main);
            wait_state(&mut run, "main", 'S');
            wait_state(&mut run, "w", 'S');
        }
        run.type_in(CTRL_Z);
        run.wait_stopped();
        run.bg();
        run.wait_continued();
        wait_state(&mut run, "main", 'S');
        assert_eq!(run.foreground(), run.shell());
        run.fg();
        wait_foreground(&run, main);
        run.type_in(CTRL_C);
        assert_eq!(shell_code(&run.finish_with_leftovers()), 128 + SIGINT);
    }
}

#[test]
fn a_background_read_stops_it_and_is_seen_as_that() {
    for run in script_alone_and_supervised("echo ready; read line; read line; echo got $line") {
        let mut run = run.start();
        run.expect_stdout("ready");
        run.take_terminal();
        // The read that goes on is of the foreground.
        run.type_in("first\n");
        assert_eq!(run.wait_stopped().signal, SIGTTIN);
        run.bg();
        assert_eq!(run.wait_stopped().signal, SIGTTIN);
        run.fg();
        run.type_in("second\n");
        run.expect_stdout("got second");
        assert_eq!(run.finish().code, Some(0));
    }
}

#[test]
fn a_background_write_stops_it_where_the_terminal_wants_that() {
    for run in script_alone_and_supervised("mkfifo go; echo ready; read x <go; echo written") {
        let mut run = run.start();
        run.expect_stdout("ready");
        set_tostop(&run);
        run.take_terminal();
        fs::write(run.dir().join("go"), "\n").unwrap();
        assert_eq!(run.wait_stopped().signal, SIGTTOU);
        run.fg();
        run.expect_stdout("written");
        assert_eq!(run.finish().code, Some(0));
    }
}

#[test]
fn started_in_the_background_it_gets_the_terminal_with_fg_only() {
    let supervise = env!("CARGO_BIN_EXE_supervise");
    for program in [&[][..], &[supervise, "--"]] {
        // The shell starts what was stopped in its foreground in the background.
        let wait = ["-c", "kill -STOP $$; exec \"$@\"", "sh"];
        let service = ["sh", "-c", "echo up; read line; echo got $line"];
        let mut run = Supervise::program("sh").options([&wait[..], program, &service].concat()).at_terminal().start();
        assert_eq!(run.wait_stopped().signal, SIGSTOP);
        run.bg();
        run.expect_stdout("up");
        assert_eq!(run.wait_stopped().signal, SIGTTIN);
        assert_eq!(run.foreground(), run.shell());
        run.fg();
        run.type_in("line\n");
        run.expect_stdout("got line");
        assert_eq!(run.finish().code, Some(0));
    }
}

#[test]
fn stop_signals_of_others_stop_both() {
    for signal in [SIGTSTP, SIGTTIN, SIGTTOU] {
        let mut run = supervised(node("main")).start();
        run.wait_up();
        let main = run.node("main").pid;
        for _ in 0..2 {
            run.signal(signal);
            assert_eq!(run.wait_stopped().signal, signal);
            wait_state(&mut run, "main", 'T');
            run.fg();
            run.wait_continued();
            wait_foreground(&run, main);
            wait_state(&mut run, "main", 'S');
        }
        // The same to the service itself.
        run.signal_node("main", SIGSTOP);
        run.wait_stopped();
        run.signal(SIGTERM);
        run.signal(SIGCONT);
        let ended = run.finish();
        assert_eq!(ended.code, Some(143), "{ended}");
    }
}

#[test]
fn without_a_terminal_stop_signals_stop_both_too() {
    for signal in [SIGTSTP, SIGTTIN, SIGTTOU] {
        let mut run = Supervise::new().tree(node("main")).start();
        run.wait_up();
        for _ in 0..2 {
            run.signal(signal);
            assert_eq!(run.wait_stopped().signal, SIGSTOP);
            wait_state(&mut run, "main", 'T');
            run.signal(SIGCONT);
            run.wait_continued();
            wait_state(&mut run, "main", 'S');
        }
        run.signal(SIGTERM);
        assert_eq!(run.finish().code, Some(143));
    }
}

#[test]
fn a_service_that_ignores_ctrl_z_goes_on_and_so_do_we() {
    for run in alone_and_supervised(|| node("main").ignores([SIGTSTP]).reports([SIGINT])) {
        let mut run = run.start();
        run.wait_up();
        run.type_in(CTRL_Z);
        run.signal(SIGTSTP);
        run.type_in(CTRL_C);
        run.wait_got("main", SIGINT, 1);
        assert_eq!(run.foreground(), run.node("main").pid);
        run.signal(SIGKILL);
        run.finish_with_leftovers();
    }
}

// Hang-up.

#[test]
fn a_hang_up_leaves_nothing() {
    for stopped in [false, true] {
        let deaf = node("deaf").setsid().ignores([SIGHUP]);
        let mut run = supervised(node("main").with(deaf).with(node("w").own_group())).start();
        run.wait_up();
        if stopped {
            run.type_in(CTRL_Z);
            run.wait_stopped();
        }
        run.hang_up();
        let ended = run.finish();
        assert_eq!(ended.code, Some(128 + SIGHUP), "{ended}");
    }
}

#[test]
fn a_service_may_make_something_of_a_hang_up() {
    for run in alone_and_supervised(|| node("main").on(SIGHUP, Act::Exit(5))) {
        let mut run = run.start();
        run.wait_up();
        run.hang_up();
        assert_eq!(run.finish().code, Some(5));
    }
}

#[test]
fn below_nohup_it_outlives_a_hang_up() {
    let command = [env!("CARGO_BIN_EXE_supervise"), "--", node_program().to_str().unwrap(), "tree", "{dir}"];
    let tree = node("main").reports([SIGUSR1]).on(SIGTERM, Act::Exit(4));
    let mut run = Supervise::program("nohup").options(command).bare_tree(tree).at_terminal().start();
    run.wait_up();
    assert!(run.node("main").ignores(SIGHUP));
    run.hang_up();
    run.signal(SIGHUP);
    run.signal(SIGUSR1);
    run.wait_got("main", SIGUSR1, 1);
    run.signal(SIGTERM);
    assert_eq!(run.finish().code, Some(4));
}

// The end.

#[test]
fn the_terminal_is_given_back_however_it_ends() {
    let mut run = supervised(node("main").with(node("w").own_group())).start();
    run.wait_up();
    run.signal_node("main", SIGKILL);
    let ended = run.finish();
    assert_eq!((ended.code, ended.foreground), (Some(137), ended.pid), "{ended}");

    for (command, code) in [("/does/not/exist", 127), ("/", 126), ("true", 0)] {
        let ended = Supervise::new().command([command]).at_terminal().run();
        assert_eq!((ended.code, ended.foreground), (Some(code), ended.pid), "{ended}");
    }
}

#[test]
fn the_modes_of_the_terminal_are_put_back_when_the_service_was_killed() {
    for (then, code, raw_after) in [("kill -KILL $$", 137, false), ("exit 3", 3, true)] {
        let script = format!("stty raw -echo; mkfifo go; echo ready; read x <go; {then}");
        let mut run = Supervise::new().without_report().command(["sh", "-c", &script]).at_terminal().start();
        run.expect_stdout("ready");
        let terminal = open_terminal(&run);
        assert!(is_raw(&tcgetattr(&terminal).unwrap()));
        fs::write(run.dir().join("go"), "\n").unwrap();
        run.wait_end();
        // As a shell does it for its own: a program that ended by itself may have meant it.
        assert_eq!(is_raw(&tcgetattr(&terminal).unwrap()), raw_after, "{then}");
        drop(terminal);
        assert_eq!(run.finish().code, Some(code));
    }
}

#[test]
fn an_interactive_shell_works_and_what_it_left_is_ended() {
    if !need_program("bash") {
        return;
    }
    for killed in [false, true] {
        let bash = ["bash", "--norc", "--noprofile", "-i"];
        let mut run = Supervise::new().env("TERM", "dumb").command(bash).at_terminal().start();
        run.type_in("sleep 1000 & echo pid''=$$\n");
        run.expect_stdout("pid=");
        let digits = run.expect_stdout("\n");
        let bash: i32 = digits.trim().parse().unwrap();
        run.type_in("cat\n");
        let cat = || sys::stat(run.foreground()).is_some_and(|stat| stat.comm == "cat");
        assert!(sys::spin(Duration::from_secs(30), cat));
        if killed {
            sys::kill(bash, SIGKILL).unwrap();
        } else {
            run.type_in(CTRL_Z);
            run.expect_stdout("Stopped");
            run.type_in("exit 7\nexit 7\n");
        }
        let ended = run.finish();
        assert_eq!(ended.code, Some(if killed { 137 } else { 7 }), "{ended}");
        assert_eq!(ended.foreground, ended.pid, "{ended}");
        assert!(ended.stdout.contains("ended 2 leftovers") || !killed, "{ended}");
    }
}

#[test]
fn our_log_never_stops_us_in_the_background() {
    let mut run = supervised(node("main").exit_on_go(3).with(node("w").setsid())).start();
    run.wait_up();
    set_tostop(&run);
    run.take_terminal();
    run.let_go("main");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    assert!(ended.stdout.contains("ended 1 leftover"), "{ended}");
}

#[test]
fn a_terminal_that_was_halted_holds_up_nothing() {
    let mut run = supervised(node("main").exit_on_go(3).with(node("w").setsid())).start();
    run.wait_up();
    run.type_in(CTRL_S);
    run.let_go("main");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    assert!(!ended.stdout.contains("leftover"), "it was halted: {ended}");
}
