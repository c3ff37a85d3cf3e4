//! The harness' terminal and its shell.

use libc::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGTTIN, SIGWINCH};

use crate::support::{Act, Supervise, node, node_program};

fn at_terminal(tree: crate::support::tree::Node) -> Supervise {
    Supervise::program(node_program()).options(["tree", "{dir}"]).bare_tree(tree).at_terminal()
}

#[test]
fn the_program_has_the_terminal_and_a_group_of_its_own() {
    let mut run = at_terminal(node("main").says("hello")).start();
    run.wait_up();
    run.expect_stdout("hello");
    let main = run.node("main");
    assert_eq!((main.pgid, main.sid, run.foreground()), (main.pid, run.shell(), main.pid));
    run.type_in("\x03");
    let ended = run.finish();
    assert_eq!((ended.signal, ended.foreground), (Some(SIGINT), main.pid), "{ended}");
}

#[test]
fn the_shell_takes_the_terminal_back_at_a_stop_and_gives_it_again() {
    let mut run = at_terminal(node("main").on(SIGWINCH, Act::Report)).start();
    run.wait_up();
    run.type_in("\x1a");
    let stop = run.wait_stopped();
    assert_eq!((stop.signal, stop.foreground), (SIGTSTP, run.pid()));
    assert_eq!(run.foreground(), run.shell());
    run.fg();
    run.wait_continued();
    assert_eq!(run.foreground(), run.pid());
    run.resize(50, 132);
    run.wait_got("main", SIGWINCH, 1);
    run.signal(SIGTERM);
    assert_eq!(run.finish().signal, Some(SIGTERM));
}

#[test]
fn a_background_reader_stops_until_it_is_in_the_foreground() {
    let mut run =
        Supervise::program("sh").options(["-c", "echo ready; read line; echo got $line"]).at_terminal().start();
    run.expect_stdout("ready");
    run.type_in("\x1a");
    assert_eq!(run.wait_stopped().signal, SIGTSTP);
    run.bg();
    assert_eq!(run.wait_stopped().signal, SIGTTIN);
    run.fg();
    run.type_in("line\n");
    run.expect_stdout("got line");
    assert_eq!(run.finish().code, Some(0));
}

#[test]
fn a_hang_up_reaches_the_program() {
    let mut run = at_terminal(node("main").on(SIGHUP, Act::Exit(5))).start();
    run.wait_up();
    run.hang_up();
    assert_eq!(run.finish().code, Some(5));
}
