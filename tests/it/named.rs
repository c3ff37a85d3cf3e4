//! A run with a name is the only one of it: the lock, the directory in which it is, and where there is no place for one.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::Path;
use std::time::Duration;

use libc::{SIGKILL, SIGTERM};
use serde_json::{Value, json};

use crate::cgroup::start as start_shell;
use crate::end::fate;
use crate::start::program;
use crate::support::{Ended, Io, Running, Supervise, need_program, need_root, node, sys};
use crate::sweep::{Frozen, Named, both};

const LIMIT: Duration = Duration::from_secs(30);

const USER: u32 = 4711;

fn up(run: Supervise) -> Running {
    let mut run = run.tree(node("main").exit_on_go(3)).start();
    run.wait_up();
    run
}

#[track_caller]
fn is_refused(second: &Ended, named: &Named, pid: i32) {
    assert_eq!(second.code, Some(125), "{second}");
    assert!(!second.dir.path().join("started").exists(), "{second}");
    let said =
        format!("\"{}\" is running already as pid {pid}; stop it first, or give this one another name", named.name);
    assert!(second.stderr.contains(&said) && second.stderr.contains("nothing was started"), "{said}: {second}");
    assert_eq!(second.stderr.lines().count(), 1, "{second}");
}

fn a_second(named: &Named) -> Ended {
    named.run().command(["touch", "started"]).run()
}

#[track_caller]
fn is_free(named: &Named) {
    let next = named.run().command(["sh", "-c", "exit 4"]).run();
    assert_eq!((next.code, &*next.stderr, &next.report["swept"]), (Some(4), "", &json!([])), "{next}");
}

// The lock.

#[test]
fn a_run_whose_lock_was_removed_is_not_taken_for_a_leftover() {
    for named in both() {
        for options in [&[][..], &["--guard", "off"]] {
            let mut first = up(named.run().options(options.iter().copied()));
            fs::remove_dir_all(named.directory()).unwrap();
            // The first of these makes a lock of its own.
            for _ in 0..2 {
                is_refused(&a_second(&named), &named, first.pid());
            }
            first.let_go("main");
            assert_eq!(first.finish().code, Some(3));
            is_free(&named);
        }
    }
}

#[test]
fn a_second_start_is_refused_with_the_pid_of_the_first() {
    for named in both() {
        for options in [&[][..], &["--guard", "off"], &["--containment", "pidns"], &["--containment", "lineage"]] {
            if options.contains(&"pidns") && !need_root() {
                continue;
            }
            let mut first = up(named.run().options(options.iter().copied()));
            let pid = first.pid();
            for _ in 0..2 {
                is_refused(&a_second(&named), &named, pid);
            }
            first.let_go("main");
            let ended = first.finish();
            assert_eq!((ended.code, &ended.report["name"]), (Some(3), &named.name.as_str().into()), "{ended}");
            is_free(&named);
        }
    }
}

#[test]
fn of_two_starts_at_once_one_runs() {
    let named = Named::new();
    for _ in 0..5 {
        let script = "echo up; read line; exit 3";
        let mut both: Vec<Running> =
            (0..2).map(|_| named.run().command(["sh", "-c", script]).stdin(Io::Pipe).start()).collect();
        let is_up = |run: &Running| run.processes().iter().any(|stat| sys::command(stat.pid).starts_with("sh -c"));
        assert!(sys::spin(LIMIT, || both.iter().any(is_up)));
        let mut second = both.pop().unwrap();
        let mut first = both.pop().unwrap();
        if is_up(&second) {
            std::mem::swap(&mut first, &mut second);
        }
        let refused = second.finish();
        assert_eq!((refused.code, &*refused.stdout), (Some(125), ""), "{refused}");
        assert!(refused.stderr.contains("is running already"), "{refused}");
        first.expect_stdout("up\n");
        first.write_stdin("end\n");
        assert_eq!(first.finish().code, Some(3));
    }
}

#[test]
fn while_the_supervisor_cleans_up_after_its_guard_the_name_is_taken() {
    let named = Named::new();
    let patient = "[stop]\nkill-timeout = \"30s\"\n";
    let mut first = named.run().config(patient).tree(node("main").with(node("frozen").setsid())).start();
    first.wait_up();
    let supervisor = first.inner();
    let Some(frozen) = Frozen::new(first.node("frozen").pid) else { return };
    first.signal(SIGKILL);
    first.wait_end();
    is_refused(&a_second(&named), &named, supervisor);
    drop(frozen);
    let ended = first.finish_empty_within(LIMIT);
    assert_eq!((&ended.report["result"], fate(&ended, "node frozen")), (&"guard-lost".into(), "SIGKILL"), "{ended}");
    is_free(&named);
}

#[test]
fn while_the_guard_cleans_up_after_its_supervisor_the_name_is_taken() {
    let named = Named::new();
    let mut first = named.run().tree(node("main").with(node("frozen").setsid())).start();
    first.wait_up();
    let pid = first.pid();
    let Some(frozen) = Frozen::new(first.node("frozen").pid) else { return };
    sys::kill(first.inner(), SIGKILL).unwrap();
    is_refused(&a_second(&named), &named, pid);
    drop(frozen);
    let ended = first.finish();
    assert_eq!((ended.code, fate(&ended, "node frozen")), (Some(125), "SIGKILL"), "{ended}");
    is_free(&named);
}

#[test]
fn what_the_service_left_does_not_hold_the_name() {
    let named = Named::new();
    let mut first = up(named.run());
    first.kill_both();
    // Main lives, and has none of our descriptors.
    let second = named.run().command(["true"]).run();
    assert_eq!((second.code, second.report["swept"].as_array().unwrap().len()), (Some(0), 1), "{second}");
    first.finish_empty_within(LIMIT);
}

#[test]
fn the_service_knows_its_name_and_its_invocation() {
    for named in both() {
        let script = "echo $SUPERVISE_NAME $SUPERVISE_INVOCATION; id -u";
        let ended = named.run().command(["sh", "-c", script]).run();
        let uid = ended.stdout.lines().last().unwrap();
        let invocation = ended.report["invocation"].as_str().unwrap();
        assert_eq!(ended.stdout, format!("{uid}/{} {invocation}\n{uid}\n", named.name), "{ended}");
        let ended = named.without().command(["env"]).run();
        assert!(!ended.stdout.contains("SUPERVISE_NAME") && !ended.stdout.contains("SUPERVISE_INVOCATION"), "{ended}");
    }
}

#[test]
fn the_name_of_the_command_line_wins_over_the_file_s() {
    let (of_file, typed) = (Named::new(), Named::new());
    let config = format!("name = \"{}\"\n", of_file.name);
    let show = ["sh", "-c", "echo $SUPERVISE_NAME"];
    let run = || of_file.without().config(&config).command(show);
    let seen = |run: Supervise| run.run().stdout.trim().split_once('/').unwrap().1.to_owned();
    assert_eq!(seen(run()), of_file.name);
    let base = typed.base.as_ref().map_or("", |base| base.path().to_str().unwrap()).to_owned();
    assert_eq!(seen(run().options(["--name", &typed.name]).env("XDG_RUNTIME_DIR", &base)), typed.name);
}

#[test]
fn what_is_no_name_is_wrong_use_and_nothing_is_started() {
    let long = "x".repeat(65);
    for wrong in ["", ".", "..", "../x", "a/b", ".hidden", "a b", "ä", "a\n", &long] {
        for ended in [
            Supervise::new().options([format!("--name={wrong}")]).command(["touch", "started"]).run(),
            Supervise::new().config(&format!("name = {}\n", json!(wrong))).command(["touch", "started"]).run(),
        ] {
            assert_eq!((ended.code, &ended.report), (Some(2), &Value::Null), "{wrong:?} {ended}");
            assert!(!ended.dir.path().join("started").exists(), "{ended}");
            assert!(ended.stderr.contains("letters (a-z, A-Z), digits"), "{wrong:?} {ended}");
        }
    }
}

// The directory.

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn the_runtime_directory_is_ours_alone_whatever_the_umask() {
    for named in both() {
        for umask in [0, 0o777] {
            let mut run = up(named.run().umask(umask));
            let directory = named.directory();
            assert_eq!((mode(&directory), mode(directory.parent().unwrap())), (0o700, 0o700));
            for file in ["lock", "state.json"] {
                assert_eq!(mode(&directory.join(file)) & 0o077, 0, "{file}");
            }
            run.let_go("main");
            assert_eq!(run.finish().code, Some(3));
            assert!(!directory.join("state.json").exists(), "nothing is left to be recorded");
            fs::remove_dir_all(&directory).unwrap();
        }
    }
}

#[track_caller]
fn is_not_trusted(named: &Named, what: &str) {
    let ended = named.run().command(["touch", "started"]).run();
    assert_eq!(ended.code, Some(125), "{what}: {ended}");
    assert!(!ended.dir.path().join("started").exists(), "{what}: {ended}");
    for said in [what, "nothing was started", named.directory().parent().unwrap().to_str().unwrap()] {
        assert!(ended.stderr.contains(said), "{said}: {ended}");
    }
    assert_eq!(ended.stderr.lines().count(), 1, "{what}: {ended}");
}

#[test]
fn what_is_not_ours_alone_in_its_place_is_not_trusted() {
    for named in both() {
        assert_eq!(named.run().command(["true"]).run().code, Some(0));
        let directory = named.directory();
        let lock = directory.join("lock");
        let elsewhere = tempfile::tempdir().unwrap();
        let owner = fs::metadata(&directory).unwrap().uid();
        let again = || {
            let _ = fs::remove_file(&directory);
            let _ = fs::remove_dir_all(&directory);
        };
        let make = || {
            again();
            fs::create_dir(&directory).unwrap();
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
            chown(&directory, Some(owner), Some(owner)).unwrap();
        };

        again();
        symlink(elsewhere.path(), &directory).unwrap();
        is_not_trusted(&named, "is not a directory; remove it");
        again();
        fs::write(&directory, "").unwrap();
        is_not_trusted(&named, "is not a directory; remove it");
        make();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o770)).unwrap();
        is_not_trusted(&named, "can be written to by others (mode 0770)");
        make();
        symlink(elsewhere.path().join("target"), &lock).unwrap();
        is_not_trusted(&named, "is a link; remove it");
        assert!(!elsewhere.path().join("target").exists());
        make();
        nix::unistd::mkfifo(&lock, nix::sys::stat::Mode::S_IRWXU).unwrap();
        is_not_trusted(&named, "is not a file; remove it");
        if need_root() {
            make();
            chown(&directory, Some(4712), Some(4712)).unwrap();
            is_not_trusted(&named, &format!("belongs to user 4712 and not to user {owner}"));
            make();
            fs::write(&lock, "").unwrap();
            chown(&lock, Some(4712), Some(4712)).unwrap();
            is_not_trusted(&named, &format!("belongs to user 4712 and not to user {owner}"));
        }
        again();
    }
}

#[test]
fn a_link_in_place_of_all_runtime_directories_of_a_user_is_not_trusted() {
    if !need_root() {
        return;
    }
    let named = Named::of_user();
    let elsewhere = tempfile::tempdir().unwrap();
    chown(elsewhere.path(), Some(USER), Some(USER)).unwrap();
    symlink(elsewhere.path(), named.directory().parent().unwrap()).unwrap();
    let ended = named.run().command(["touch", "started"]).run();
    assert_eq!(ended.code, Some(125), "{ended}");
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0, "{ended}");
}

#[test]
fn a_record_that_cannot_be_understood_is_said_and_the_name_alone_is_enough() {
    let large = "x".repeat(2 << 20);
    for garbage in ["", "{", "[]", "{\"version\": 99, \"invocations\": []}", "\0\0\0", &large] {
        let named = Named::new();
        let mut first = named.run().tree(node("main").with(node("w").setsid())).start();
        first.wait_up();
        first.kill_both();
        fs::write(named.directory().join("state.json"), garbage).unwrap();
        let second = named.run().command(["true"]).run();
        assert_eq!((second.code, second.report["swept"].as_array().unwrap().len()), (Some(0), 2), "{second}");
        assert_eq!(second.stderr.matches("is not used: ").count(), 1, "{second}");
        first.finish_empty_within(LIMIT);
        is_free(&named);
    }
}

// No place for one.

/// The run goes on, its leftovers are ended, and what is missing is said once.
#[track_caller]
fn goes_on(run: Supervise, said: &str) {
    let mut run = start_shell(run, "setsid sleep 1001 &");
    run.wait_command("sleep 1001");
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!((ended.code, fate(&ended, "sleep 1001")), (Some(3), "SIGTERM"), "{ended}");
    assert_eq!(ended.stderr.matches(said).count(), 1, "{said:?}: {ended}");
    // That, and what was ended.
    assert_eq!(ended.stderr.lines().count(), 2, "{ended}");
}

fn on_a_run_of(options: &str, more: &str) -> Supervise {
    let script = format!("mount -t tmpfs -o {options} none /run && {more} exec \"$@\"");
    Supervise::new().options(["--name", "web"]).wrapped_in(["unshare", "-m", "sh", "-c", &script, "sh"])
}

#[test]
fn where_run_is_read_only_or_full_that_is_said_and_the_run_goes_on() {
    if !need_root() || !need_program("unshare") {
        return;
    }
    let without = "has no runtime directory: ";
    let second = "a second start is not refused, and nothing is swept";
    goes_on(on_a_run_of("ro", ""), without);
    goes_on(on_a_run_of("ro", ""), second);
    goes_on(on_a_run_of("ro", ""), "Read-only file system");
    goes_on(on_a_run_of("nr_inodes=1", ""), "No space left on device");
    // There is a place for the lock, and none for a byte.
    let full = "mkdir -m 700 /run/supervise /run/supervise/web && { cat /dev/zero >/run/filler 2>/dev/null; :; } &&";
    goes_on(on_a_run_of("size=64k", full), "cannot write to /run/supervise/web: No space left on device");
}

#[test]
fn where_run_is_full_a_second_start_is_refused_all_the_same() {
    if !need_root() || !need_program("unshare") {
        return;
    }
    let script = "
        mount -t tmpfs -o size=64k none /run && mkdir -m 700 /run/supervise /run/supervise/web
        cat /dev/zero >/run/filler 2>/dev/null
        $OURS --name web -- sh -c 'echo up >up; exec sleep 1001' & first=$!
        while ! [ -s up ]; do :; done
        $OURS --name web -- touch started; code=$?
        kill $first; wait $first; echo first $first $?; exit $code";
    let run = Supervise::program("unshare").options(["-m", "sh", "-c", script]).env("OURS", &program());
    let ended = run.run();
    assert_eq!(ended.code, Some(125), "{ended}");
    assert!(ended.stderr.contains("\"web\" is running already"), "{ended}");
    assert!(ended.stdout.ends_with(" 143\n") && !ended.dir.path().join("started").exists(), "{ended}");
}

#[test]
fn a_user_without_a_runtime_directory_is_told_and_the_run_goes_on() {
    if !need_root() {
        return;
    }
    let name = ["--name", "web"];
    let user = || Supervise::new().user(USER, USER).options(name);
    let foreign = tempfile::tempdir().unwrap();
    let foreign = foreign.path().to_str().unwrap();
    goes_on(user(), "XDG_RUNTIME_DIR is not set");
    goes_on(user().env("XDG_RUNTIME_DIR", ""), "XDG_RUNTIME_DIR is not set");
    goes_on(user().env("XDG_RUNTIME_DIR", "here"), "XDG_RUNTIME_DIR is here, which is no absolute path");
    goes_on(user().env("XDG_RUNTIME_DIR", "/nowhere/at-all"), "No such file or directory");
    goes_on(user().env("XDG_RUNTIME_DIR", foreign), "which belongs to user 0 and not to us");
}

#[test]
fn root_s_place_does_not_depend_on_the_environment() {
    if !need_root() {
        return;
    }
    let named = Named::new();
    let mut run = up(named.run().env("XDG_RUNTIME_DIR", "/nowhere/at-all"));
    assert!(named.directory().join("lock").exists());
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!((ended.code, &*ended.stderr), (Some(143), ""), "{ended}");
}
