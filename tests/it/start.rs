//! What a service finds at its start: the caller's signals, descriptors and directory, all of them and none of ours; and
//! what our own process lets go of.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use libc::{SIGCHLD, SIGHUP, SIGPIPE, SIGTERM, SIGTSTP, SIGTTIN, SIGTTOU};
use serde_json::{Value, json};

use crate::support::supervise::pipe;
use crate::support::{Ended, Io, Running, Supervise, need_program, need_root, node_program, sys};

/// The limit of every wait of ours.
const GUARD: Duration = Duration::from_secs(60);

/// The program under test, for runs that the harness cannot make.
pub(crate) fn program() -> String {
    std::env::var("SUPERVISE_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_supervise").to_owned())
}

fn sh(script: &str) -> Supervise {
    Supervise::new().command(["sh", "-c", script])
}

/// The same service without us.
fn bare_look() -> Supervise {
    Supervise::program(node_program()).options(["look"])
}

/// Waits for the end of a child, and kills it when that does not come.
fn wait(child: &mut Child) -> ExitStatus {
    let pidfd = sys::pidfd_open(child.id().cast_signed()).unwrap();
    let end = Instant::now() + GUARD;
    while sys::wait_readable(&[pidfd.as_raw_fd()], Some(end)).unwrap().is_empty() {
        if Instant::now() > end {
            let _ = child.kill();
            panic!("it hangs");
        }
    }
    child.wait().unwrap()
}

// Signals.

#[derive(Debug, PartialEq, Eq)]
struct Signals {
    blocked: u64,
    ignored: u64,
    caught: u64,
}

/// Bit n-1 for signal n.
fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// What a service has that is started with these. By system calls: the C library hides 32 and 33.
fn signals_of_service(blocked: u64, ignored: u64) -> Signals {
    let mut command = Command::new(program());
    command.args(["--", "cat", "/proc/self/status"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let set = move || {
        for signal in 1..=64 {
            // Handler (0 default, 1 ignored), flags, restorer, mask.
            let action = [u64::from(ignored & bit(signal) != 0), 0, 0, 0];
            // SAFETY: the action is long enough, and neither disposition needs more.
            unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, action.as_ptr(), 0, 8) };
        }
        // SAFETY: the mask is ours.
        unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const blocked, 0, 8) };
        Ok(())
    };
    // SAFETY: nothing but system calls.
    let mut child = unsafe { command.pre_exec(set) }.spawn().unwrap();
    let status = wait(&mut child);
    let text = io::read_to_string(child.stdout.take().unwrap()).unwrap();
    assert!(status.success(), "blocked {blocked:x} ignored {ignored:x}: {status}");
    let mask = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("no {key} in {text}"));
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    Signals { blocked: mask("SigBlk:"), ignored: mask("SigIgn:"), caught: mask("SigCgt:") }
}

#[test]
fn mask_and_dispositions_reach_the_service_exactly() {
    let unblockable = bit(libc::SIGKILL) | bit(libc::SIGSTOP);
    let each = (1..=64).map(|signal| (bit(signal), bit(65 - signal)));
    let all =
        [(0, 0), (u64::MAX, 0), (0, u64::MAX), (u64::MAX, u64::MAX), (0x5555_5555_5555_5555, 0x3333_3333_3333_3333)];
    for (blocked, ignored) in each.chain(all) {
        let expected = Signals { blocked: blocked & !unblockable, ignored: ignored & !unblockable, caught: 0 };
        assert_eq!(signals_of_service(blocked, ignored), expected);
    }
}

#[test]
fn nohups_hang_up_stays_ignored_and_stops_are_not_left_blocked() {
    let ended = Supervise::new().ignoring([SIGHUP, SIGCHLD, SIGTSTP, SIGTTIN, SIGTTOU]).look().run();
    let look = ended.look();
    assert_eq!(look["ignored"], json!([SIGHUP, SIGCHLD, SIGTSTP, SIGTTIN, SIGTTOU]), "{ended}");
    assert_eq!((&look["blocked"], &look["caught"]), (&json!([]), &json!([])), "{ended}");
}

#[test]
fn a_broken_pipe_ends_a_service_unless_the_caller_ignores_it() {
    let run = || sh("kill -PIPE $$; exit 3");
    assert_eq!(run().run().code, Some(128 + SIGPIPE));
    assert_eq!(run().ignoring([SIGPIPE]).run().code, Some(3));
    // A writer whose reader has gone ends at once, as in `yes | head -1`.
    let (read, write) = pipe();
    drop(read);
    assert_eq!(Supervise::new().command(["yes"]).stdout(Io::Fd(write)).run().code, Some(128 + SIGPIPE));
}

#[test]
fn a_caller_that_ignores_sigchld_does_not_hide_the_end() {
    for signals in [vec![], vec![SIGCHLD]] {
        let ended = sh("exit 7").ignoring([SIGCHLD]).blocking(signals.clone()).run();
        assert_eq!(ended.code, Some(7), "{ended}");
        let ended = sh("setsid sleep 1000 & exit 8").ignoring([SIGCHLD]).blocking(signals).run();
        assert_eq!((ended.code, ended.report["leftovers"].as_array().map(Vec::len)), (Some(8), Some(1)), "{ended}");
    }
}

// A stop, or the end, in the first moments.

#[test]
fn a_stop_right_after_the_start_is_never_lost() {
    for round in 0..200 {
        let run = Supervise::new().command(["sleep", "1000"]).signal_at(Duration::from_micros(round * 17), SIGTERM);
        let ended = run.run();
        // Before our first instructions the kernel ends us by the signal, and nothing was started.
        let done = ended.code == Some(128 + SIGTERM) || (ended.signal == Some(SIGTERM) && ended.report == Value::Null);
        assert!(done, "after {} us: {ended}", round * 17);
    }
}

#[test]
fn a_stop_that_waited_for_the_start_is_not_lost() {
    let mut command = Command::new(program());
    // It ends with its stdin, should we not end it.
    command.args(["--stop-signal", "USR1", "--", "cat"]).stdin(Stdio::piped());
    let pend = || {
        let blocked = bit(SIGTERM);
        // SAFETY: nothing but system calls.
        unsafe {
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const blocked, 0, 8);
            libc::kill(libc::getpid(), SIGTERM);
        }
        Ok(())
    };
    // SAFETY: nothing but system calls.
    let mut child = unsafe { command.pre_exec(pend) }.spawn().unwrap();
    let held = child.stdin.take();
    assert_eq!(wait(&mut child).code(), Some(128 + libc::SIGUSR1));
    drop(held);
}

/// More of them by SUPERVISE_STARTS=20000.
#[test]
fn many_starts_of_a_service_that_ends_at_once_all_end() {
    let starts = std::env::var("SUPERVISE_STARTS").map_or(2_000, |text| text.parse().unwrap());
    let many = move || {
        for _ in 0..starts / 2 {
            let mut child = Command::new(program()).args(["--", "true"]).spawn().unwrap();
            let status = wait(&mut child);
            assert_eq!((status.code(), status.signal()), (Some(0), None));
        }
    };
    let second = std::thread::spawn(many);
    many();
    second.join().unwrap();
}

// Descriptors.

fn numbers(look: &Value) -> BTreeSet<i32> {
    look["fds"].as_object().unwrap().keys().map(|number| number.parse().unwrap()).collect()
}

#[test]
fn closed_standard_descriptors_stay_closed_for_the_service() {
    for closed in 0..8 {
        let is_closed = |number: i32| closed & (1 << number) != 0;
        let mut run = Supervise::new();
        let seen = run.dir().join("look.json");
        for number in (0..3).filter(|number| is_closed(*number)) {
            run = match number {
                0 => run.stdin(Io::Closed),
                1 => run.stdout(Io::Closed),
                _ => run.stderr(Io::Closed),
            };
        }
        let ended = run.command([node_program().to_str().unwrap(), "look", seen.to_str().unwrap()]).run();
        assert_eq!(ended.code, Some(0), "{ended}");
        let look: Value = serde_json::from_slice(&fs::read(&seen).unwrap()).unwrap();
        assert_eq!(numbers(&look), (0..3).filter(|number| !is_closed(*number)).collect(), "{closed:03b} {ended}");
    }
}

/// A pipe, a locked file, a socket that listens, a number far up.
fn with_descriptors(run: Supervise, given: &[(i32, &OwnedFd)]) -> Ended {
    given.iter().fold(run, |run, (number, fd)| run.fd(*number, fd.try_clone().unwrap())).run()
}

#[test]
fn inherited_descriptors_reach_the_service_unchanged_and_none_of_ours_does() {
    let (read, write) = pipe();
    sys::nonblocking(read.as_raw_fd()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let log: OwnedFd = fs::OpenOptions::new().append(true).create(true).open(&path).unwrap().into();
    let socket: OwnedFd = TcpListener::bind("127.0.0.1:0").unwrap().into();
    let given = [(3, &read), (4, &write), (7, &log), (9, &socket), (200, &log)];
    let (ours, bare) = (with_descriptors(Supervise::new().look(), &given), with_descriptors(bare_look(), &given));
    let (ours_look, bare_look) = (ours.look(), bare.look());
    assert_eq!(numbers(&ours_look), [0, 1, 2, 3, 4, 7, 9, 200].into(), "{ours}");
    for (number, _) in given {
        let number = number.to_string();
        assert_eq!(ours_look["fds"][&number], bare_look["fds"][&number], "{number} {ours}");
    }
    assert!(ours_look["fds"]["3"]["flags"].as_i64().unwrap() & i64::from(libc::O_NONBLOCK) != 0, "{ours}");
    assert!(ours_look["fds"]["7"]["flags"].as_i64().unwrap() & i64::from(libc::O_APPEND) != 0, "{ours}");
}

fn is_locked(path: &std::path::Path) -> bool {
    let file = fs::File::open(path).unwrap();
    // SAFETY: no memory is involved. Closing the file lets go of the lock.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) < 0 }
}

/// Runs until its stdin ends, and says when it is there.
fn until_told(script: &str) -> Supervise {
    sh(&format!("{script}echo up; read line; exit 0")).stdin(Io::Pipe)
}

fn end(mut run: Running) -> Ended {
    run.write_stdin("end\n");
    run.finish()
}

#[test]
fn a_lock_and_a_listening_socket_live_as_long_as_the_service_holds_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lock");
    let lock = fs::File::create(&path).unwrap();
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) }, 0);
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let mut run = until_told("").fd(5, lock.into()).fd(6, socket.into()).start();
    run.expect_stdout("up\n");
    assert!(is_locked(&path));
    TcpStream::connect(address).unwrap();
    end(run);
    assert!(sys::spin(GUARD, || !is_locked(&path)));
    // The service lets go of both: we hold neither.
    let (lock, socket) = (fs::File::open(&path).unwrap(), TcpListener::bind(address).unwrap());
    // SAFETY: no memory is involved.
    assert_eq!(unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) }, 0);
    let mut run = until_told("exec 5>&- 6>&-; ").fd(5, lock.into()).fd(6, socket.into()).start();
    run.expect_stdout("up\n");
    assert!(sys::spin(GUARD, || !is_locked(&path)), "we hold the lock");
    assert!(sys::spin(GUARD, || TcpStream::connect(address).is_err()), "we hold the socket");
    end(run);
}

/// Waits for the end of file, or for the last reader of a pipe to go.
fn is_let_go(fd: &OwnedFd) -> bool {
    let ready = sys::wait_readable(&[fd.as_raw_fd()], Some(Instant::now() + GUARD)).unwrap();
    !ready.is_empty() && !matches!(sys::read(fd.as_raw_fd(), &mut [0; 64]), Ok(1..))
}

#[test]
fn a_reader_sees_the_end_of_file_and_a_writer_the_broken_pipe_while_the_service_lives() {
    let ((stdin, writer), (reader, stdout), (other_reader, other)) = (pipe(), pipe(), pipe());
    let run = sh("exec <&- >&- 5>&-; echo up >&2; exec sleep 1000");
    let mut run = run.stdin(Io::Fd(stdin)).stdout(Io::Fd(stdout)).fd(5, other).start();
    run.expect_stderr("up\n");
    assert!(is_let_go(&reader), "we hold stdout");
    assert!(is_let_go(&other_reader), "we hold descriptor 5");
    assert!(is_let_go(&writer), "we hold stdin");
    // Guard, supervisor, service.
    assert_eq!(run.processes().len(), 3);
    run.signal(SIGTERM);
    assert_eq!(run.finish().code, Some(128 + SIGTERM));
}

#[test]
fn standard_error_stays_ours_for_the_log() {
    let ended = sh("exec 2>&-; setsid sleep 1000 & exit 0").run();
    assert!(ended.stderr.contains("ended 1 leftover"), "{ended}");
}

// Directory, session, environment.

#[test]
fn the_service_starts_where_the_caller_stood_with_its_environment_and_umask() {
    let run = Supervise::new().env("SOME", "thing").umask(0o27).look();
    let below = run.dir().join("below");
    fs::create_dir(&below).unwrap();
    let ended = run.cwd(&below).run();
    let look = ended.look();
    assert_eq!(look["cwd"], json!(below), "{ended}");
    assert_eq!((&look["env"]["SOME"], &look["umask"]), (&json!("thing"), &json!(0o27)), "{ended}");
    assert_eq!(look["args"], json!([node_program(), "look"]), "{ended}");
    assert_eq!((&look["subreaper"], &look["pdeathsig"]), (&json!(0), &json!(0)), "{ended}");
}

#[test]
fn our_own_directory_is_the_root_while_the_service_lives() {
    let mut run = until_told("").start();
    run.expect_stdout("up\n");
    for ours in [run.pid(), run.supervisor()].map(|pid| format!("/proc/{pid}/cwd")) {
        assert!(sys::spin(GUARD, || fs::read_link(&ours).unwrap() == std::path::Path::new("/")));
    }
    end(run);
}

#[test]
fn the_callers_file_system_can_be_unmounted_when_the_service_has_left_it() {
    if !need_root() || !need_program("umount") {
        return;
    }
    let run = Supervise::new();
    let mounted = run.dir().join("mounted");
    let script = format!("cd /; until umount {} 2>/dev/null; do :; done; echo unmounted", mounted.display());
    let ended = run.full_disk(&mounted).cwd(&mounted).command(["sh", "-c", &script]).run();
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "unmounted\n"), "{ended}");
}

#[test]
fn without_a_terminal_the_service_leads_a_session_of_its_own() {
    for guard in ["on", "off"] {
        let read_then_look = format!("read line; exec {} look", node_program().display());
        let mut run = sh(&read_then_look).options(["--guard", guard]).stdin(Io::Pipe).start();
        let parent = if guard == "on" { run.supervisor() } else { run.pid() };
        let ended = end(run);
        let look = ended.look();
        assert_eq!((&look["sid"], &look["pgid"]), (&look["pid"], &look["pid"]), "{ended}");
        assert_eq!(look["ppid"], json!(parent), "{ended}");
        assert_eq!(ended.report["pid"], look["pid"], "{ended}");
    }
}
