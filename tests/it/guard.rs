//! Guard or supervisor is killed, at whatever moment: nothing is left, and the other one says what happened.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read as _;
use std::time::{Duration, Instant};

use libc::{SIGCONT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP};
use serde_json::{Value, json};

use crate::end::fate;
use crate::report::with_one_that_may_not_be_signalled;
use crate::support::supervise::pipe;
use crate::support::tree::Node;
use crate::support::{Ended, Running, Supervise, need_root, node, node_program, sys};

/// The limit of every wait of ours.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// What no run may wait for.
const NEVER_SPENT: [&str; 4] = ["--stop-timeout", "1m", "--leftover-timeout", "1m"];
const WITHOUT_WAITING: Duration = Duration::from_secs(25);

/// Which of our two processes is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Guard,
    Supervisor,
}

use Victim::{Guard, Supervisor};

const BOTH: [Victim; 2] = [Guard, Supervisor];

impl Victim {
    fn is_killed(self, run: &mut Running) {
        match self {
            Guard => run.signal(SIGKILL),
            Supervisor => {
                let supervisor = run.supervisor();
                run.mark();
                sys::kill(supervisor, SIGKILL).unwrap();
            }
        }
    }

    fn result(self) -> &'static str {
        match self {
            Guard => "guard-lost",
            Supervisor => "supervisor-lost",
        }
    }

    /// All is gone: with the guard's own end, where it has one; and whoever is left of the two has said what happened.
    fn finish(self, run: Running) -> Ended {
        let ended = match self {
            Guard => run.finish_empty_within(LIMIT),
            Supervisor => run.finish(),
        };
        let (end, said) = match self {
            Guard => ((None, Some(SIGKILL)), "supervise: error: the guard was killed; all that was started was ended"),
            Supervisor => (
                (Some(125), None),
                "supervise: error: the supervisor was killed; its guard ended all that it had started",
            ),
        };
        assert_eq!((ended.code, ended.signal), end, "{self:?} {ended}");
        assert_eq!(ended.stderr.lines().filter(|line| *line == said).count(), 1, "{self:?} {ended}");
        assert!(ended.after_signal < WITHOUT_WAITING, "{self:?} {ended}");
        ended
    }

    fn finish_and_report(self, run: Running, exit: &Value) -> Ended {
        let ended = self.finish(run);
        assert_eq!(ended.report["result"], self.result(), "{ended}");
        assert_eq!((&ended.report["exit_code"], &ended.report["exit"]), (&json!(125), exit), "{self:?} {ended}");
        ended
    }
}

fn killed() -> Value {
    json!({ "signal": "SIGKILL", "number": SIGKILL, "core_dumped": false })
}

/// All kinds of the ways out: a session, a fork that is nobody's child, both, a group, deafness, a stop.
pub(crate) fn everything(main: Node) -> Node {
    let far = node("far").setsid().with(node("group").own_group().with(node("deep").setsid().ignores([SIGTERM])));
    main.with(far)
        .with(node("near").ignores([SIGTERM]))
        .with(node("orphan").orphaned())
        .with(node("fallen").daemonized().ignores([SIGTERM]).with(node("below").daemonized()))
        .with(node("frozen").setsid().stopped())
        .with(node("many").setsid().copies(20))
}

fn pids(run: &Running) -> BTreeSet<i32> {
    run.nodes().map(|proc| proc.pid).collect()
}

fn leftovers(ended: &Ended) -> BTreeSet<i32> {
    let all = ended.report["leftovers"].as_array().unwrap();
    all.iter().map(|one| i32::try_from(one["pid"].as_i64().unwrap()).unwrap()).collect()
}

pub(crate) fn is_dead(pid: i32) -> bool {
    sys::stat(pid).is_none_or(|stat| stat.state == 'Z')
}

fn wait_state(pid: i32, wanted: char) {
    let state = || sys::stat(pid).map_or('-', |stat| stat.state);
    assert!(sys::spin(LIMIT, || state() == wanted), "{pid} is {}, not {wanted}", state());
}

// At every moment.

#[test]
fn killed_while_the_service_is_up_everything_is_killed_and_named() {
    for victim in BOTH {
        let mut run = Supervise::new().options(NEVER_SPENT).tree(everything(node("main"))).start();
        run.wait_up();
        let (main, mut all) = (run.node("main").pid, pids(&run));
        all.remove(&main);
        victim.is_killed(&mut run);
        let ended = victim.finish_and_report(run, &killed());
        assert_eq!((&ended.report["pid"], leftovers(&ended)), (&json!(main), all), "{victim:?} {ended}");
        for one in ended.report["leftovers"].as_array().unwrap() {
            assert_eq!((&one["ended"], &one["exit"]["signal"]), (&json!("SIGKILL"), &json!("SIGKILL")), "{ended}");
        }
        assert!(ended.stderr.contains("ended 28 leftovers of the service"), "{ended}");
    }
}

#[test]
fn killed_while_the_service_is_asked_to_stop_everything_is_killed_at_once() {
    for victim in BOTH {
        let main = everything(node("main").reports([SIGTERM]));
        let mut run = Supervise::new().options(NEVER_SPENT).tree(main).start();
        run.wait_up();
        run.signal(SIGTERM);
        run.wait_got("main", SIGTERM, 1);
        victim.is_killed(&mut run);
        let ended = victim.finish_and_report(run, &killed());
        assert_eq!(leftovers(&ended).len(), 28, "{victim:?} {ended}");
    }
}

#[test]
fn killed_while_leftovers_are_asked_to_end_the_service_s_own_end_is_still_told() {
    for (victim, exit) in BOTH.into_iter().zip([json!({ "code": 3 }), json!({ "code": 3 })]) {
        let main = node("main").with(node("drains").setsid().reports([SIGTERM]).with(node("below").orphaned()));
        let mut run = Supervise::new().options(NEVER_SPENT).tree(main.exit_on_go(3)).start();
        run.wait_up();
        let main = run.node("main").pid;
        run.let_go("main");
        run.wait_got("drains", SIGTERM, 1);
        victim.is_killed(&mut run);
        let ended = victim.finish_and_report(run, &exit);
        assert_eq!(ended.report["pid"], main, "{ended}");
        assert_eq!(fate(&ended, "node drains"), "SIGKILL", "{victim:?} {ended}");
    }
}

#[test]
fn killed_while_a_great_many_are_being_killed_the_other_kills_the_rest() {
    for victim in BOTH {
        let deaf = node("deaf").setsid().ignores([SIGTERM]).copies(150).with(node("below").ignores([SIGTERM]));
        let run = Supervise::new().options(["-vv", "--leftover-timeout", "0s"]);
        let mut run = run.tree(node("main").with(deaf).exit_on_go(4)).start();
        run.wait_up();
        let supervisor = run.supervisor();
        run.let_go("main");
        run.expect_stderr("KillTree");
        // So that it is not over before.
        sys::kill(supervisor, SIGSTOP).unwrap();
        wait_state(supervisor, 'T');
        victim.is_killed(&mut run);
        victim.finish_and_report(run, &json!({ "code": 4 }));
    }
}

#[test]
fn killed_while_one_cannot_be_ended_the_other_goes_on_until_it_can() {
    if !need_root() {
        return;
    }
    for victim in BOTH {
        let run = with_one_that_may_not_be_signalled("kill-timeout = '1m'");
        let mut run = run.bare_tree(node("immune").setsid().uid(0).exit_on_go(5)).start();
        run.wait_up();
        let immune = run.node("immune");
        run.write_stdin("go\n");
        run.expect_stderr("KillTree");
        victim.is_killed(&mut run);
        if victim == Guard {
            run.expect_stderr("GuardLost");
        } else {
            let guard = run.pid();
            assert!(sys::spin(LIMIT, || sys::stat(immune.pid).is_some_and(|stat| stat.ppid == guard)));
            wait_naps(guard);
        }
        run.let_go("immune");
        let ended = victim.finish_and_report(run, &json!({ "code": 4 }));
        let told = &ended.report["leftovers"][0];
        assert_eq!((&told["pid"], &told["exit"]), (&json!(immune.pid), &json!({ "code": 5 })), "{ended}");
    }
}

/// It sleeps between two looks: then it has had the first.
fn wait_naps(guard: i32) {
    let naps = || {
        let status = fs::read_to_string(format!("/proc/{guard}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    let before = naps();
    assert!(sys::spin(Duration::from_secs(2), || naps() >= before + 4), "it does not sleep between two looks");
}

/// Kills the supervisor while a child of its own reads the names of the leftovers. False when that was over too soon.
fn kill_while_names_are_read(run: &mut Running) -> bool {
    let supervisor = run.supervisor();
    let reads = || sys::children(supervisor).iter().any(|pid| sys::stat(*pid).is_some_and(|s| s.comm == "supervisor"));
    let seen = sys::spin(Duration::from_secs(1), || reads() || is_dead(supervisor)) && !is_dead(supervisor);
    run.mark();
    let _ = sys::kill(supervisor, SIGKILL);
    seen
}

/// Who reads the names outlives the supervisor by a moment, and holds what that held.
#[test]
fn a_guard_that_waits_for_those_that_it_may_not_end_sleeps_meanwhile() {
    if !need_root() {
        return;
    }
    for _ in 0..10 {
        let run = with_one_that_may_not_be_signalled("kill-timeout = '1m'");
        let mut run = run.bare_tree(node("immune").setsid().uid(0).with(node("w").copies(20))).start();
        run.wait_up();
        run.write_stdin("go\n");
        kill_while_names_are_read(&mut run);
        let guard = run.pid();
        assert!(sys::spin(LIMIT, || sys::children(guard).len() == 1), "{:?}", run.processes());
        wait_naps(guard);
        for pid in pids(&run) {
            sys::kill(pid, SIGKILL).unwrap();
        }
        Supervisor.finish_and_report(run, &json!({ "code": 4 }));
    }
}

#[test]
fn what_the_supervisor_had_of_its_own_is_no_leftover_of_the_service() {
    for _ in 0..20 {
        let mut run = Supervise::new().tree(node("main").with(node("w").setsid().copies(30)).exit_on_go(4)).start();
        run.wait_up();
        let mut all = pids(&run);
        all.remove(&run.node("main").pid);
        run.let_go("main");
        if !kill_while_names_are_read(&mut run) {
            run.finish();
            continue;
        }
        let ended = Supervisor.finish_and_report(run, &json!({ "code": 4 }));
        assert!(leftovers(&ended).is_subset(&all), "{ended}");
    }
}

#[test]
fn who_could_not_be_ended_by_the_guard_is_named() {
    if !need_root() {
        return;
    }
    let run = with_one_that_may_not_be_signalled("kill-timeout = '3s'");
    let mut run = run.bare_tree(node("immune").setsid().uid(0)).start();
    run.wait_up();
    let immune = run.node("immune").pid;
    run.signal(SIGTERM);
    run.expect_stderr("KillTree");
    Supervisor.is_killed(&mut run);
    let ended = run.finish_with_leftovers();
    assert_eq!(ended.left.iter().map(|left| left.pid).collect::<Vec<_>>(), [immune], "{ended}");
    assert_eq!((ended.code, &ended.report["result"]), (Some(123), &json!("survivors")), "{ended}");
    let told = &ended.report["leftovers"][0];
    assert_eq!((&told["pid"], &told["ended"]), (&json!(immune), &json!("survived")), "{ended}");
    assert!(ended.stderr.contains("could not end ") && ended.stderr.contains(&format!("pid {immune}")), "{ended}");
}

// In the first moments.

#[test]
fn the_guard_killed_right_after_the_start_leaves_nothing() {
    let mut lost = 0;
    for round in 0..80 {
        let run = Supervise::new().command(["sleep", "1000"]).signal_at(Duration::from_micros(round * 60), SIGKILL);
        let ended = run.start().finish_empty_within(LIMIT);
        assert_eq!(ended.signal, Some(SIGKILL), "{ended}");
        // Before there is a supervisor nobody is there to say anything, and nothing to be said.
        assert!(ended.report.is_null() || ended.report["result"] == "guard-lost", "after {} us: {ended}", round * 60);
        lost += usize::from(!ended.report.is_null());
    }
    assert!(lost > 10, "{lost} of 80 had a supervisor");
}

#[test]
fn the_supervisor_killed_right_after_the_start_leaves_nothing() {
    for round in 0..80 {
        let mut run = Supervise::new().command(["sleep", "1000"]).start();
        let guard = run.pid();
        let mut child = None;
        assert!(sys::spin(LIMIT, || {
            child = sys::children(guard).first().copied();
            child.is_some()
        }));
        let at = Instant::now() + Duration::from_micros(round * 25);
        while Instant::now() < at {
            std::hint::spin_loop();
        }
        run.mark();
        sys::kill(child.unwrap(), SIGKILL).unwrap();
        let ended = run.finish();
        assert_eq!((ended.code, ended.stderr.is_empty()), (Some(125), false), "after {} us: {ended}", round * 25);
        // Nothing is known of a run whose supervisor had not come to tell of it.
        let told = ended.report["result"] == "supervisor-lost" && ended.stderr.contains("the supervisor was killed; ");
        let had_not_begun = ended.stderr.contains("before it had begun") && ended.report.is_null();
        assert!(told || had_not_begun, "after {} us: {ended}", round * 25);
    }
}

#[test]
fn a_supervisor_killed_before_it_knows_what_to_run_has_a_guard_that_says_so() {
    let run = Supervise::new().options(["-c", "{dir}/fifo"]);
    nix::unistd::mkfifo(&run.dir().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut run = run.start();
    Supervisor.is_killed(&mut run);
    let ended = run.finish();
    assert_eq!((ended.code, ended.stderr.lines().count()), (Some(125), 1), "{ended}");
    assert!(ended.stderr.starts_with("supervise: error: the supervisor "), "{ended}");
    assert!(ended.stderr.contains("before it had begun") && ended.report.is_null(), "{ended}");
}

// Stopped.

#[test]
fn a_supervisor_that_somebody_stopped_ends_everything_when_its_guard_dies() {
    // At a terminal the one that orphans fall to is of our session: the kernel continues nobody there by itself.
    for at_terminal in [false, true] {
        let run = Supervise::new().options(NEVER_SPENT).tree(everything(node("main")));
        let mut run = if at_terminal { run.at_terminal() } else { run }.start();
        run.wait_up();
        let supervisor = run.supervisor();
        sys::kill(supervisor, SIGSTOP).unwrap();
        wait_state(supervisor, 'T');
        Guard.is_killed(&mut run);
        let ended = run.finish_empty_within(LIMIT);
        assert_eq!((&ended.report["result"], &ended.report["exit"]), (&json!("guard-lost"), &killed()), "{ended}");
    }
}

#[test]
fn a_guard_that_somebody_stopped_ends_everything_when_it_goes_on() {
    let mut run = Supervise::new().options(NEVER_SPENT).tree(everything(node("main"))).start();
    run.wait_up();
    let supervisor = run.supervisor();
    run.signal(SIGSTOP);
    run.wait_stopped();
    sys::kill(supervisor, SIGKILL).unwrap();
    wait_state(supervisor, 'Z');
    run.signal(SIGCONT);
    Supervisor.finish_and_report(run, &killed());
}

#[test]
fn killed_while_all_of_it_is_stopped_everything_is_killed() {
    for at_terminal in [false, true] {
        for victim in BOTH {
            let run = Supervise::new().options(NEVER_SPENT).tree(everything(node("main")));
            let mut run = if at_terminal { run.at_terminal() } else { run }.start();
            run.wait_up();
            let main = run.node("main").pid;
            run.signal(SIGTSTP);
            run.wait_stopped();
            wait_state(main, 'T');
            victim.is_killed(&mut run);
            if victim == Supervisor {
                // As the shell's "fg"; a guard that is stopped can do nothing.
                run.signal(SIGCONT);
            }
            let limit = LIMIT;
            let ended = if victim == Guard { run.finish_empty_within(limit) } else { run.finish() };
            assert_eq!(ended.report["result"], victim.result(), "{ended}");
            assert_eq!(ended.report["exit"], killed(), "{ended}");
        }
    }
}

// What is said of it.

#[test]
fn a_report_to_a_descriptor_is_finished_by_who_is_left() {
    for victim in BOTH {
        for place in ["/dev/fd/7", "/dev/stdout", "fifo", "report"] {
            let (read, write) = pipe();
            let run = Supervise::new().without_report().options(["--report", place]).command([
                "sh",
                "-c",
                "echo up >&2; exec sleep 1000 7>&-",
            ]);
            let fifo = run.dir().join("fifo");
            nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
            let reader = sys::open(fifo.to_str().unwrap(), libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC).unwrap();
            let mut run = run.fd(7, write).start();
            run.expect_stderr("up\n");
            victim.is_killed(&mut run);
            let ended = victim.finish(run);
            let mut text = String::new();
            match place {
                "/dev/fd/7" => drop(fs::File::from(read).read_to_string(&mut text).unwrap()),
                "/dev/stdout" => text.clone_from(&ended.stdout),
                "report" => text = fs::read_to_string(ended.dir.path().join("report")).unwrap(),
                _ => {
                    let mut bytes = vec![0; 65536];
                    let size = fs::File::from(reader).read(&mut bytes).unwrap();
                    text = String::from_utf8(bytes[..size].to_vec()).unwrap();
                }
            }
            let report: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{place} {e}: {text:?} {ended}"));
            assert_eq!((&report["result"], &report["exit_code"]), (&json!(victim.result()), &json!(125)), "{ended}");
            assert_eq!(report["command"], "sh -c 'echo up >&2; exec sleep 1000 7>&-'", "{ended}");
        }
    }
}

#[test]
fn a_report_is_of_the_same_run_whoever_writes_it() {
    let main = || node("main").with(node("w").setsid().argv(["backup", "--password", "hunter2"]));
    let keys = |report: &Value| report.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let mut run = Supervise::new().tree(main()).start();
    run.wait_up();
    run.signal(SIGTERM);
    let whole = run.finish();
    for victim in BOTH {
        let mut run = Supervise::new().options(["--log-format", "json"]).tree(main()).start();
        run.wait_up();
        victim.is_killed(&mut run);
        let ended = if victim == Guard { run.finish_empty_within(LIMIT) } else { run.finish() };
        assert_eq!(keys(&ended.report), keys(&whole.report), "{ended}");
        assert!(uuid::Uuid::parse_str(ended.report["invocation"].as_str().unwrap()).is_ok(), "{ended}");
        assert_eq!(ended.report["leftovers"][0]["command"], "backup --password ***", "{ended}");
        let time = |key: &str| humantime::parse_rfc3339(ended.report[key].as_str().unwrap()).unwrap();
        let took = time("ended").duration_since(time("started")).unwrap().as_secs_f64();
        assert!((ended.report["duration"].as_f64().unwrap() - took).abs() < 0.002, "{ended}");
        let node = node_program().display();
        assert!(ended.report["command"].as_str().unwrap().starts_with(&format!("{node} tree ")), "{ended}");
        // In the form that was asked for.
        assert!(!ended.stderr.is_empty(), "{ended}");
        for line in ended.stderr.lines() {
            assert!(serde_json::from_str::<Value>(line).is_ok(), "{line}");
        }
    }
}
