//! A pid namespace around the service (`--containment pidns`): inside all is as outside, and nothing outlives both of us.
//!
//! As root, and as an ordinary user, for whom it takes a user namespace.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use libc::{SIGABRT, SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1};
use serde_json::{Value, json};

use crate::end::{IMPATIENT, fate};
use crate::start::program;
use crate::support::fault::Fault;
use crate::support::need::need;
use crate::support::ours::{is_dead, wait_state};
use crate::support::tree::Node;
use crate::support::{Act, Ended, Io, Running, Supervise, need_root, node, sys};

/// The limit of every wait of ours.
const LIMIT: Duration = Duration::from_secs(30);

/// How soon the kernel has ended all, on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(5);

const USER: u32 = 4711;

type Who = fn(Supervise) -> Supervise;

/// Root and an ordinary user.
fn both() -> Vec<Who> {
    let namespaces = fs::read_to_string("/proc/sys/user/max_user_namespaces").unwrap_or_default();
    if !need_root() || !need("user namespaces", namespaces.trim() != "0") {
        return vec![];
    }
    vec![|run| run, |run| run.user(USER, USER)]
}

fn pidns(who: Who) -> Supervise {
    who(Supervise::new()).options(["--containment", "pidns"])
}

fn start(run: Supervise, main: Node) -> Running {
    let mut run = run.tree(main).start();
    run.wait_up();
    run
}

/// All ways out that there are outside of a namespace.
fn everything(main: Node) -> Node {
    main.with(node("far").setsid().with(node("deep").setsid().ignores([SIGTERM])))
        .with(node("orphan").orphaned())
        .with(node("fallen").daemonized().ignores([SIGTERM]).with(node("below").daemonized()))
        .with(node("many").own_group().copies(20))
}

// What the service finds.

/// What a service was started with, in this containment; the run's directory is the only thing that differs.
fn look(who: Who, mode: &str, terminal: bool) -> Value {
    let lock = File::open("/etc/passwd").unwrap();
    let run = who(Supervise::new()).options(["--containment", mode]).look().umask(0o027);
    let run = run.fd(7, lock.into()).env("MINE", "1").ignoring([SIGHUP]).blocking([SIGUSR1]);
    let run = if terminal { run.at_terminal() } else { run };
    let ended = run.run();
    assert_eq!((ended.code, &ended.report["containment"]), (Some(0), &mode.into()), "{ended}");
    let mut seen = ended.look();
    if terminal {
        assert_eq!(seen["foreground"], seen["pgid"], "{ended}");
    }
    for numbers in ["pid", "ppid", "pgid", "sid", "foreground"] {
        seen.as_object_mut().unwrap().remove(numbers);
    }
    for standard in ["0", "1", "2"] {
        // Pipes and terminals of the run's own.
        seen["fds"][standard].as_object_mut().unwrap().remove("file");
    }
    let directory = ended.dir.path().to_str().unwrap().to_owned();
    serde_json::from_str(&seen.to_string().replace(&directory, "DIR")).unwrap()
}

#[test]
fn the_service_finds_what_it_finds_outside() {
    for who in both() {
        for terminal in [false, true] {
            let (inside, outside) = (look(who, "pidns", terminal), look(who, "lineage", terminal));
            assert_eq!(inside, outside);
            assert!(outside["fds"]["7"].is_object() && outside["ignored"] == json!([SIGHUP]), "{outside:#}");
        }
    }
}

#[test]
fn its_files_are_its_own_outside_too() {
    for who in both() {
        let ended = pidns(who).command(["sh", "-c", "echo x >mine; id -u; id -g"]).run();
        let meta = fs::metadata(ended.dir.path().join("mine")).unwrap();
        assert_eq!(ended.stdout, format!("{}\n{}\n", meta.uid(), meta.gid()), "{ended}");
        let report = fs::metadata(ended.dir.path().join("report.json")).unwrap();
        assert_eq!(report.uid(), meta.uid(), "{ended}");
    }
}

#[test]
fn proc_shows_the_processes_of_the_namespace_alone() {
    for who in both() {
        let script = "for one in /proc/[0-9]*; do read name <$one/comm; echo ${one#/proc/} $name; done; echo $PPID";
        let ended = pidns(who).command(["sh", "-c", script]).run();
        assert_eq!(ended.stdout, "1 supervisor\n2 sh\n1\n", "{ended}");
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{ended}");
    }
}

#[test]
fn what_the_service_mounts_is_not_seen_outside() {
    if both().is_empty() {
        return;
    }
    let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap();
    let before = mounts();
    let script = "mkdir m && mount -t tmpfs none m && echo x >m/inside && echo up && read line";
    let mut run = pidns(|run| run).command(["sh", "-c", script]).stdin(Io::Pipe).start();
    run.expect_stdout("up\n");
    assert_eq!(fs::read_dir(run.dir().join("m")).unwrap().count(), 0);
    assert!(!mounts().contains(run.dir().to_str().unwrap()));
    assert_eq!(mounts().matches(" /proc ").count(), before.matches(" /proc ").count());
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(0), "{ended}");
}

// Ends and signals.

#[test]
fn exit_codes_are_the_service_s() {
    for who in both() {
        for code in [0, 3, 123, 255] {
            let ended = pidns(who).tree(node("main").exit(code)).run();
            assert_eq!((ended.code, &ended.report["exit"]["code"]), (Some(code), &code.into()), "{ended}");
            assert_eq!((&*ended.stderr, &ended.report["containment"]), ("", &"pidns".into()), "{ended}");
        }
        for signal in [SIGTERM, SIGKILL, SIGABRT, SIGHUP, libc::SIGRTMIN() + 3] {
            let main = node("main").killed_by(signal);
            let ended = pidns(who).rlimit(libc::RLIMIT_CORE, 0, 0).tree(main).run();
            assert_eq!((ended.code, &ended.report["exit"]["number"]), (Some(128 + signal), &signal.into()), "{ended}");
        }
        for (command, code) in [("/nowhere/at-all", 127), ("/etc/passwd", 126)] {
            assert_eq!(pidns(who).command([command]).run().code, Some(code));
        }
    }
}

#[test]
fn signals_are_passed_on() {
    let signals = [SIGHUP, SIGUSR1, libc::SIGRTMIN(), libc::SIGRTMIN() + 3, libc::SIGRTMAX()];
    for who in both() {
        let main = node("main").reports(signals).on(SIGTERM, Act::Exit(9));
        let mut run = start(pidns(who), main);
        for signal in signals {
            run.signal(signal);
            run.wait_got("main", signal, 1);
        }
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["stop_signal"]), (Some(9), &"SIGTERM".into()), "{ended}");
        signals.iter().for_each(|signal| assert_eq!(ended.got("main", *signal), 1, "{ended}"));
    }
}

#[test]
fn a_stop_at_any_moment_of_the_start_is_not_lost() {
    for who in both() {
        for round in 0..60 {
            let after = Duration::from_micros(round * 60);
            let run = pidns(who).command(["sleep", "1001"]).signal_at(after, SIGTERM).guard(Duration::from_secs(20));
            let ended = run.run();
            assert_eq!(ended.code.unwrap_or_else(|| 128 + ended.signal.unwrap()), 128 + SIGTERM, "{round} {ended}");
        }
    }
}

#[test]
fn a_service_that_ignores_the_stop_is_killed_with_all_it_left() {
    for who in both() {
        let main = everything(node("main").ignores([SIGTERM]));
        let mut run = start(pidns(who).options(IMPATIENT), main);
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["exit"]["number"]), (Some(137), &SIGKILL.into()), "{ended}");
        assert_eq!((fate(&ended, "node orphan"), fate(&ended, "node fallen")), ("SIGTERM", "SIGKILL"), "{ended}");
        assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 25, "{ended}");
    }
}

#[test]
fn leftovers_are_asked_then_killed_and_named() {
    for who in both() {
        let asked = node("asked").daemonized().reports([SIGTERM]);
        let main = node("main").with(node("soft").setsid().on(SIGTERM, Act::Exit(0))).with(asked).exit_on_go(3);
        let mut run = start(pidns(who).options(IMPATIENT), main);
        run.let_go("main");
        let ended = run.finish();
        assert_eq!((ended.code, ended.got("soft", SIGTERM), ended.got("asked", SIGTERM)), (Some(3), 1, 1), "{ended}");
        assert_eq!((fate(&ended, "node soft"), fate(&ended, "node asked")), ("SIGTERM", "SIGKILL"), "{ended}");
    }
}

#[test]
fn orphans_are_reaped_while_the_service_runs() {
    for who in both() {
        let mut run = start(pidns(who), node("main").churn(200, 10));
        run.wait_done("main");
        let alive = || run.processes().len() == 3;
        assert!(sys::spin(LIMIT, alive), "{:?}", run.processes());
        run.signal(SIGTERM);
        assert_eq!(run.finish().code, Some(128 + SIGTERM));
    }
}

// At a terminal.

#[test]
fn keys_reach_the_service() {
    for who in both() {
        for (key, signal) in [("\x03", SIGINT), ("\x1c", SIGQUIT)] {
            let run = pidns(who).at_terminal().rlimit(libc::RLIMIT_CORE, 0, 0);
            let mut run = start(run, node("main").with(node("w").reports([signal])));
            run.type_in(key);
            let ended = run.finish();
            assert_eq!((ended.code, ended.got("w", signal)), (Some(128 + signal), 1), "{ended}");
            assert_eq!(ended.foreground, ended.pid, "{ended}");
        }
    }
}

#[test]
fn the_service_is_stopped_and_continued_with_us() {
    for who in both() {
        let mut run = start(pidns(who).at_terminal(), node("main").with(node("w")).reports([SIGCONT]));
        for times in 1..=2 {
            run.type_in("\x1a");
            let stop = run.wait_stopped();
            assert_eq!((stop.signal, stop.foreground), (SIGTSTP, run.pid()));
            for name in ["main", "w"] {
                let pid = run.pid_of(name);
                wait_state(pid, &['T']);
                assert!(!is_dead(pid), "{name}");
            }
            run.fg();
            run.wait_continued();
            run.wait_got("main", SIGCONT, times);
            // The service is in the caller's group, which has no number inside.
            assert!(sys::spin(LIMIT, || run.foreground() == run.pid()), "{}", run.foreground());
            // A key in the moment in which it goes on would stop it once more.
            wait_state(run.pid(), &['S']);
        }
        run.type_in("\x03");
        let ended = run.finish();
        assert_eq!(ended.code, Some(128 + SIGINT), "{ended}");
    }
}

#[test]
fn a_hang_up_ends_the_service() {
    for who in both() {
        let mut run = start(pidns(who).at_terminal(), node("main").with(node("w").setsid()));
        run.hang_up();
        let ended = run.finish();
        assert_eq!(ended.code, Some(128 + SIGHUP), "{ended}");
    }
}

// Our own deaths.

/// From one shell: the supervisor comes first, so that the guard does not do it.
fn kill_from_a_shell(arguments: &str) {
    let done = std::process::Command::new("sh").args(["-c", &format!("kill -9 {arguments}")]).status().unwrap();
    assert!(done.success(), "{arguments}");
}

fn all_is_gone_with_both(run: Running) {
    let ended = run.finish_empty_within(AT_ONCE);
    assert_eq!((ended.code, ended.signal), (None, Some(SIGKILL)), "{ended}");
}

#[test]
fn both_killed_at_the_same_instant_all_is_gone() {
    for who in both() {
        type Way = fn(&mut Running);
        let ways: [Way; 4] = [
            Running::kill_both,
            |run| kill_from_a_shell(&format!("{} {}", run.inner(), run.pid())),
            |run| kill_from_a_shell(&format!("{} {}", run.pid(), run.inner())),
            |run| kill_from_a_shell(&format!("-{}", run.pid())),
        ];
        for way in ways {
            let mut run = start(pidns(who), everything(node("main")));
            way(&mut run);
            all_is_gone_with_both(run);
        }
    }
}

#[test]
fn each_killed_alone_all_is_gone_and_the_other_says_so() {
    for who in both() {
        let mut run = start(pidns(who), everything(node("main")));
        run.signal(SIGKILL);
        let ended = run.finish_empty_within(LIMIT);
        assert_eq!((ended.signal, &ended.report["result"]), (Some(SIGKILL), &"guard-lost".into()), "{ended}");
        assert_eq!(ended.stderr.matches("the guard was killed").count(), 1, "{ended}");

        let mut run = start(pidns(who), everything(node("main")));
        sys::kill(run.inner(), SIGKILL).unwrap();
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["result"]), (Some(125), &"supervisor-lost".into()), "{ended}");
        assert_eq!(ended.stderr.matches("the supervisor was killed").count(), 1, "{ended}");
        assert_eq!(ended.report["containment"], "pidns", "{ended}");
    }
}

#[test]
fn killed_at_any_moment_of_the_start_nothing_is_left() {
    for who in both() {
        for round in 0..40 {
            let after = Duration::from_micros(round * 100);
            let run = pidns(who).tree(node("main").with(node("w").setsid().ignores([SIGTERM])));
            run.signal_at(after, SIGKILL).start().finish_empty_within(LIMIT);
        }
    }
}

#[test]
fn a_namespace_within_a_namespace_is_the_same() {
    for who in both() {
        let inner = [&*program(), "--containment", "pidns", "--"];
        let script = "setsid sleep 1001 & for one in /proc/[0-9]*; do read name <$one/comm; echo $name; done; exit 3";
        let ended = pidns(who).command(inner.into_iter().chain(["sh", "-c", script])).run();
        assert_eq!(ended.code, Some(3), "{ended}");
        assert!(ended.stdout.starts_with("supervisor\nsh\n") && ended.stdout.lines().count() == 3, "{ended}");
        let mut run = pidns(who).command(inner.into_iter().chain(["sleep", "1001"])).start();
        run.wait_command("sleep 1001");
        run.kill_both();
        all_is_gone_with_both(run);
    }
}

#[test]
fn without_a_guard_and_as_pid_1_it_is_the_same() {
    for who in both() {
        let spaces: [Who; 2] = [|run| run.options(["--guard", "off"]), Supervise::pid_one];
        for (index, space) in spaces.into_iter().enumerate() {
            let run = || space(pidns(who)).options(IMPATIENT);
            let script = "trap 'exit 4' HUP; setsid sleep 1001 & echo up; read line; exit 3";
            let mut first = run().command(["sh", "-c", script]).stdin(Io::Pipe).start();
            first.wait_command("sleep 1001");
            first.write_stdin("end\n");
            let ended = first.finish();
            assert_eq!((ended.code, fate(&ended, "sleep 1001")), (Some(3), "SIGTERM"), "{index} {ended}");
            let mut second = run().command(["sh", "-c", "setsid sleep 1001 & exec sleep 1002"]).start();
            second.wait_command("sleep 1001");
            sys::kill(second.inner(), SIGKILL).unwrap();
            let ended = second.finish();
            assert_eq!((ended.code, &ended.report["result"]), (Some(125), &"supervisor-lost".into()), "{ended}");
        }
    }
}

// Where there can be none.

fn is_refused(ended: &Ended) {
    assert_eq!(ended.code, Some(125), "{ended}");
    assert!(!ended.dir.path().join("started").exists(), "{ended}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
    for said in ["cannot contain the service in a pid namespace: ", "nothing was started", "--containment auto"] {
        assert!(ended.stderr.contains(said), "{said}: {ended}");
    }
    assert_eq!(ended.report, Value::Null, "{ended}");
}

#[test]
fn where_there_can_be_none_nothing_is_started_and_that_is_said() {
    for who in both() {
        for call in [libc::SYS_unshare, libc::SYS_mount] {
            for errno in [libc::EPERM, libc::ENOSYS] {
                let fault = Fault::new().fails(call, errno);
                for guard in ["auto", "off"] {
                    let run = pidns(who).options(["--guard", guard]).fault(fault.clone());
                    is_refused(&run.command(["touch", "started"]).run());
                }
            }
        }
    }
}

#[test]
fn without_a_guard_its_place_is_taken_with_nothing_of_the_run_in_hand() {
    if !need_root() {
        return;
    }
    let named = crate::sweep::Named::new();
    let run = named.run().options(["--guard", "off", "--containment", "pidns"]);
    let ended = run.command(["sh", "-c", "exit 6"]).run();
    assert_eq!((ended.code, &ended.report["exit_code"]), (Some(6), &6.into()), "{ended}");
    assert_eq!(ended.stderr, "", "{ended}");
}
