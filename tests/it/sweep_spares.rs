//! Whom the sweep does not touch: other users, other names, runs without a name, numbers that are another's by now. And the
//! sweep by hand.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command};
use std::time::Duration;

use libc::SIGTERM;
use serde_json::json;

use crate::start::program;
use crate::support::need::need;
use crate::support::{Ended, Running, Supervise, need_program, need_root, node, sys};
use crate::sweep::{Named, both};

const LIMIT: Duration = Duration::from_secs(30);

/// A process of the test's own, that is not to be touched; killed with this.
struct Bystander(Child);

impl Bystander {
    fn new(command: &mut Command, name: &str) -> Bystander {
        let child = command.spawn().unwrap();
        let bystander = Bystander(child);
        assert!(sys::spin(LIMIT, || sys::command(bystander.pid()) == name), "{}", sys::command(bystander.pid()));
        bystander
    }

    fn marked(uid: u32, variable: &str, value: &str) -> Bystander {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &uid.to_string(), "--clear-groups", "sleep", "1001"]).env(variable, value);
        Bystander::new(&mut command, "sleep 1001")
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    #[track_caller]
    fn untouched(mut self, ended: &Ended) {
        let status = self.0.try_wait().unwrap();
        assert_eq!(status.and_then(|status| status.signal()), None, "{ended}");
        assert_eq!(sys::stat(self.pid()).map(|stat| stat.state), Some('S'), "{ended}");
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn up(run: Supervise) -> Running {
    let mut run = run.tree(node("main").with(node("w").setsid())).start();
    run.wait_up();
    run
}

#[track_caller]
fn alive(run: &mut Running) {
    for name in ["main", "w"] {
        let pid = run.node(name).pid;
        assert!(sys::stat(pid).is_some_and(|stat| stat.state == 'S'), "{name}");
    }
}

#[test]
fn other_names_and_runs_without_a_name_are_not_touched() {
    for named in both() {
        let other = if named.base.is_some() { Named::of_user() } else { Named::new() };
        // A name that begins as ours does.
        let longer = named.without().options(["--name", &format!("{}x", named.name)]);
        let mut others = [up(other.run()), up(named.without()), up(longer)];
        // What such a run left is nobody's to end but that run's.
        others[0].kill_both();
        others[1].kill_both();
        let first = {
            let mut first = up(named.run());
            first.kill_both();
            first
        };
        let second = named.run().command(["true"]).run();
        assert_eq!((second.code, second.report["swept"].as_array().unwrap().len()), (Some(0), 2), "{second}");
        others.iter_mut().for_each(alive);
        first.finish_empty_within(LIMIT);
        let [lost, unnamed, mut longer] = others;
        longer.signal(SIGTERM);
        assert_eq!(longer.finish().code, Some(128 + SIGTERM));
        lost.finish_with_leftovers();
        unnamed.finish_with_leftovers();
        let _ = fs::remove_dir_all(format!("{}x", named.directory().display()));
    }
}

#[test]
fn the_same_name_of_another_user_is_another_name() {
    if !need_root() {
        return;
    }
    let (root, user) = (Named::new(), Named::of_user());
    let of_user = || user.without().options(["--name", &root.name]);
    let mut first = up(of_user());
    first.kill_both();
    let second = root.run().command(["true"]).run();
    assert_eq!((second.code, &second.report["swept"]), (Some(0), &json!([])), "{second}");
    alive(&mut first);
    let third = of_user().command(["true"]).run();
    assert_eq!((third.code, third.report["swept"].as_array().unwrap().len()), (Some(0), 2), "{third}");
    first.finish_empty_within(LIMIT);
}

#[test]
fn another_user_who_takes_our_mark_is_not_touched() {
    if !need_root() || !need_program("setpriv") {
        return;
    }
    let (root, user) = (Named::new(), Named::of_user());
    let mark = format!("0/{}", root.name);
    let bystanders =
        [Bystander::marked(4712, "SUPERVISE_NAME", &mark), Bystander::marked(4711, "SUPERVISE_NAME", &mark)];
    let second = root.run().command(["true"]).run();
    assert_eq!((second.code, &second.report["swept"]), (Some(0), &json!([])), "{second}");
    bystanders.into_iter().for_each(|bystander| bystander.untouched(&second));
    let bystander = Bystander::marked(0, "SUPERVISE_NAME", &format!("4711/{}", user.name));
    let second = user.run().command(["true"]).run();
    assert_eq!((second.code, &second.report["swept"]), (Some(0), &json!([])), "{second}");
    bystander.untouched(&second);
}

#[test]
fn a_process_in_another_pid_namespace_with_our_name_is_not_touched() {
    if !need_root() || !need_program("unshare") {
        return;
    }
    let named = Named::new();
    let mark = format!("SUPERVISE_NAME=0/{}", named.name);
    let mut outer =
        Command::new("unshare").args(["-p", "--fork", "--kill-child", "env", &mark, "sleep", "1001"]).spawn().unwrap();
    let above = outer.id().cast_signed();
    let inner = || sys::children(above).into_iter().find(|pid| sys::command(*pid) == "sleep 1001");
    assert!(sys::spin(LIMIT, || inner().is_some()));
    let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap();
    assert_ne!(inner().map(namespace), Some(namespace(above)));
    // A container's run of the same name has a lock of its own.
    let second = named.run().command(["true"]).run();
    let lives = inner().is_some();
    // Which ends the other one, too.
    outer.kill().unwrap();
    outer.wait().unwrap();
    assert_eq!((second.code, lives, &second.report["swept"]), (Some(0), true, &json!([])), "{second}");
}

// Numbers.

/// Since Linux 6.14 each pid namespace has a limit of its own; before, it is the machine's, and nothing here may touch that.
fn pid_max_is_the_namespace_s() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    need("a pid_max of each pid namespace's own (Linux 6.14)", version >= (6, 14))
}

/// In a pid namespace with its own `/proc`, `/run` and at most 400 numbers: a named run is lost, its numbers are given to
/// others, and then the same name is started again.
const REUSED: &str = r#"
    mount -t tmpfs none /run || exit 90
    before=$(cat /proc/sys/kernel/pid_max)
    echo 400 >/proc/sys/kernel/pid_max && [ "$(cat /proc/sys/kernel/pid_max)" = 400 ] && [ "$before" != 400 ] || exit 91
    last() { (:) & last=$!; wait $last; }
    # Numbers below 300 are not given a second time.
    while last; [ $last -lt 301 ]; do :; done
    $OURS --name web --containment lineage -- sh -c 'echo $$ >main; exec sleep 1002' &
    guard=$!
    while ! [ -s main ]; do last; done
    main=$(cat main)
    supervisor=$(cat /proc/$guard/task/$guard/children)
    kill -STOP $guard $supervisor; kill -9 $supervisor; kill -9 $guard; wait $guard 2>/dev/null
    kill -9 $main
    while kill -0 $main 2>/dev/null || kill -0 $supervisor 2>/dev/null; do last; done
    reuse() {
        while last; n=$((last + 1)); [ $n -ge 400 ] && n=300; [ $n != $1 ]; do :; done
        shift; "$@" & reused=$!
    }
    # The higher one first: once the lower one is taken, the one before the higher may never be the last.
    reuse $main setsid sh -c 'sleep 1004 & exec sleep 1005'; two=$reused
    reuse $supervisor sleep 1003; one=$reused
    [ $one = $supervisor ] && [ $two = $main ] || { echo "$one $supervisor $two $main"; exit 92; }
    $OURS --name web -- sh -c "cat /proc/$one/cmdline /proc/$two/cmdline | tr '\0' ' '; exit 5"
    code=$?
    kill -0 $one && kill -0 $two && exit $code
    exit 93
"#;

#[test]
fn a_number_that_is_another_s_by_now_is_not_touched() {
    if !need_root() || !need_program("unshare") || !need_program("setsid") || !pid_max_is_the_namespace_s() {
        return;
    }
    let outer = || fs::read_to_string("/proc/sys/kernel/pid_max").unwrap();
    let before = outer();
    let run = Supervise::program("unshare").options(["-m", "sh", "-c", REUSED]).pid_one();
    let report = run.dir().join("report.json");
    let ours = format!("{} --report {}", program(), report.display());
    let ended = run.env("OURS", &ours).run();
    assert_eq!((ended.code, &ended.report["swept"]), (Some(5), &json!([])), "{ended}");
    assert_eq!(ended.stdout, "sleep 1003 sleep 1005 ", "{ended}");
    assert_eq!(outer(), before);
}

// By hand.

#[test]
fn a_sweep_by_hand_ends_what_is_left_and_starts_nothing() {
    for named in both() {
        let sweep = || named.without().options(["sweep", &named.name]);
        let nothing = sweep().run();
        assert_eq!((nothing.code, &nothing.report["swept"]), (Some(0), &json!([])), "{nothing}");
        let mut first = named.run().tree(node("main").with(node("w").setsid().ignores([SIGTERM]))).start();
        first.wait_up();
        let refused = sweep().run();
        assert_eq!(refused.code, Some(125), "{refused}");
        assert!(refused.stderr.contains(&format!("is running already as pid {}", first.pid())), "{refused}");
        alive(&mut first);
        first.kill_both();
        let swept = sweep().options(["--leftover-timeout", "300ms"]).run();
        assert_eq!((swept.code, swept.report["swept"].as_array().unwrap().len()), (Some(0), 2), "{swept}");
        assert_eq!((&swept.report["exit"], &swept.report["pid"]), (&json!(null), &json!(null)), "{swept}");
        assert_eq!(swept.report["result"], "swept", "{swept}");
        assert!(swept.stderr.contains("ended 2 leftovers of earlier runs in "), "{swept}");
        first.finish_empty_within(LIMIT);
        let again = sweep().run();
        assert_eq!((again.code, &again.report["swept"]), (Some(0), &json!([])), "{again}");
    }
}

#[test]
fn a_sweep_by_hand_of_what_is_no_name_is_wrong_use() {
    for wrong in
        [&["sweep"][..], &["sweep", "../x"], &["sweep", ""], &["sweep", "a", "b"], &["sweep", "a", "--", "true"]]
    {
        let ended = Supervise::program(program()).options(wrong.iter().copied()).run();
        assert_eq!(ended.code, Some(2), "{wrong:?} {ended}");
    }
}

#[test]
fn a_sweep_by_hand_without_a_runtime_directory_ends_nobody_and_says_so() {
    if !need_root() {
        return;
    }
    let named = Named::of_user();
    let mut first = up(named.run());
    first.kill_both();
    let ended = named.without().env("XDG_RUNTIME_DIR", "").options(["sweep", &named.name]).run();
    assert_eq!(ended.code, Some(125), "{ended}");
    assert!(ended.stderr.contains("nothing is swept"), "{ended}");
    alive(&mut first);
    assert_eq!(named.without().options(["sweep", &named.name]).run().code, Some(0));
    first.finish_empty_within(LIMIT);
}

#[test]
fn a_stop_of_a_sweep_by_hand_gives_its_number() {
    let named = Named::new();
    let mut first = named.run().tree(node("main").reports([SIGTERM])).start();
    first.wait_up();
    first.kill_both();
    let mut sweep = named.without().options(["sweep", &named.name, "--leftover-timeout", "300ms"]).start();
    first.wait_got("main", SIGTERM, 1);
    sweep.signal(SIGTERM);
    let sweep = sweep.finish();
    assert_eq!((sweep.code, &sweep.report["swept"][0]["ended"]), (Some(128 + SIGTERM), &"SIGKILL".into()), "{sweep}");
    first.finish_empty_within(LIMIT);
}
