//! Claims about a cgroup of ours, with real processes. Each test has a cgroup of its own to make others in, so that none
//! sees those of another.

mod scene;

use super::*;
use scene::{NOBODY, Scratch, as_user, name, part, run_part};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;

/// What the C library says to EAGAIN.
const AGAIN: &str = "Resource temporarily unavailable";

#[test]
fn all_that_is_in_it_and_below_is_killed_at_once() {
    let Some(scratch) = Scratch::new() else { return };
    let mut cgroup = scratch.make();
    let events = cgroup.events().unwrap();
    let tree =
        "mkdir -p a/b c; (echo 0 > a/cgroup.procs; exec setsid sleep 99) & (echo 0 > a/b/cgroup.procs; exec sleep 99) &
                (echo 0 > c/cgroup.procs; trap '' TERM HUP INT; sleep 99; :) & exec sleep 99";
    let service = scratch.start(&cgroup, tree);
    scratch.wait_for_members(&cgroup, 5);
    assert!(cgroup.is_populated().unwrap() && cgroup.members().unwrap().contains(&service.pid()));
    assert!(matches!(cgroup.kill(), Killed::AtOnce));
    scene::wait_until_empty(&events);
    assert!(cgroup.members().unwrap().is_empty());
    cgroup.remove().unwrap();
    assert!(!cgroup.path().exists());
    assert!(!cgroup.is_populated().unwrap() && !populated(events.as_fd()).unwrap(), "nobody is in what is gone");
    cgroup.remove().unwrap();
    assert!(cgroup.members().unwrap().is_empty());
}

#[test]
fn without_cgroup_kill_each_member_is_killed() {
    let Some(scratch) = Scratch::new() else { return };
    let cgroup = scratch.make();
    let _service = scratch
        .start(&cgroup, "mkdir -p a/b; for at in . a a/b; do (echo 0 > $at/cgroup.procs; exec sleep 99) & done; wait");
    scratch.wait_for_members(&cgroup, 4);
    let Killed::OneByOne { killed, refused: None } = cgroup.kill_each() else { panic!("refused") };
    assert!(killed >= 4, "{killed}");
    scene::wait_until_empty(&cgroup.events().unwrap());
    cgroup.remove().unwrap();
}

#[test]
fn we_ourselves_are_spared_where_the_service_put_us_in() {
    if let Some(own) = part() {
        let cgroup = Cgroup::from_descriptor(fs::File::open(own).unwrap().into());
        assert_eq!(cgroup.members().unwrap(), [Pid::try_from(std::process::id()).unwrap()]);
        assert!(matches!(cgroup.kill_each(), Killed::OneByOne { killed: 0, refused: None }));
        return;
    }
    let Some(scratch) = Scratch::new() else { return };
    let test = "we_ourselves_are_spared_where_the_service_put_us_in";
    scene::succeeds(run_part(scratch.inside(), test, &scratch));
}

#[test]
fn chains_of_processes_that_fork_and_exit_die() {
    for one_by_one in [false, true] {
        let Some(scratch) = Scratch::new() else { return };
        let mut cgroup = scratch.make();
        let _chains: Vec<_> = (0..4).map(|_| scratch.start_chain(&cgroup)).collect();
        scratch.wait_for_members(&cgroup, 4);
        cgroup.stop_births();
        let events = cgroup.events().unwrap();
        scene::until_empty(&events, || {
            _ = if one_by_one { cgroup.kill_each() } else { cgroup.kill() };
        });
        cgroup.remove().unwrap();
    }
}

#[test]
fn births_are_stopped_until_it_is_removed() {
    let Some(scratch) = Scratch::new() else { return };
    let mut cgroup = scratch.make();
    let _service = scratch.start(&cgroup, "exec sleep 99");
    scratch.wait_for_members(&cgroup, 1);
    cgroup.stop_births();
    cgroup.stop_births();
    let file = |name: &str| fs::read_to_string(cgroup.path().join(name)).unwrap_or_default();
    assert!(file("pids.max") == "0\n" || file("cgroup.freeze") == "1\n");
    assert_eq!(cgroup.remove().unwrap_err().raw_os_error(), Some(libc::EBUSY), "somebody is in it");
    assert!(file("pids.max") != "0\n" && file("cgroup.freeze") == "0\n", "who is left is not held for ever");
    assert!(cgroup.is_populated().unwrap());
}

#[test]
fn the_events_report_the_first_in_and_the_last_out() {
    let Some(scratch) = Scratch::new() else { return };
    let mut cgroup = scratch.make();
    let events = cgroup.events().unwrap();
    assert!(!scene::poll(&events, 0), "nothing happened yet");
    let _service = scratch.start(&cgroup, "exec sleep 99");
    assert!(scene::poll(&events, 5000) && populated(events.as_fd()).unwrap());
    assert!(!scene::poll(&events, 0), "it was read");
    cgroup.kill();
    assert!(scene::poll(&events, 5000) && !populated(events.as_fd()).unwrap());
}

#[test]
fn a_service_that_makes_thousands_of_cgroups_or_very_deep_ones_is_cleared() {
    let Some(scratch) = Scratch::new() else { return };
    let mut cgroup = scratch.make();
    for number in 0..2000 {
        mkdirat(cgroup.descriptor(), format!("wide{number}").as_str(), Mode::S_IRWXU).unwrap();
    }
    let mut deepest = cgroup.descriptor().try_clone_to_owned().unwrap();
    for _ in 0..600 {
        mkdirat(&deepest, "deep", Mode::S_IRWXU).unwrap();
        deepest = subtree::open_directory(deepest.as_fd(), "deep").unwrap();
    }
    let _service = scratch.start_in(&deepest, "exec sleep 99");
    scratch.wait_for_members(&cgroup, 1);
    let Killed::OneByOne { killed: 1, refused: None } = cgroup.kill_each() else { panic!("not found") };
    scene::wait_until_empty(&cgroup.events().unwrap());
    cgroup.kill();
    cgroup.remove().unwrap();
    assert!(!cgroup.path().exists());
}

#[test]
fn threads_in_cgroups_of_their_own_are_members_once() {
    let Some(scratch) = Scratch::new() else { return };
    let cgroup = scratch.make();
    let service =
        scratch.start(&cgroup, "mkdir a; echo threaded > a/cgroup.type; echo $$ > a/cgroup.threads; exec sleep 99");
    scene::wait_for(|| fs::read_to_string(cgroup.path().join("a/cgroup.threads")).is_ok_and(|text| !text.is_empty()));
    assert_eq!(cgroup.members().unwrap(), [service.pid()]);
    assert!(matches!(cgroup.kill_each(), Killed::OneByOne { killed: 1, refused: None }));
    scene::wait_until_empty(&cgroup.events().unwrap());
    cgroup.remove().unwrap();
}

#[test]
fn a_cgroup_that_was_made_threaded_behind_our_back_is_killed_all_the_same() {
    let Some(scratch) = Scratch::new() else { return };
    let mut cgroup = scratch.make();
    fs::write(cgroup.path().join("cgroup.type"), "threaded").unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ > cgroup.procs; echo $$ > \"$0\"/cgroup.threads; exec sleep 99"]).arg(cgroup.path());
    let service = scene::Service::start(command.current_dir(scratch.path()));
    scene::wait_for(|| cgroup.is_populated().unwrap());
    assert_eq!(cgroup.members().unwrap(), [service.pid()]);
    assert!(matches!(cgroup.kill(), Killed::OneByOne { killed: 1, refused: None }));
    scene::wait_until_empty(&cgroup.events().unwrap());
    cgroup.remove().unwrap();
}

#[test]
fn in_a_threaded_cgroup_there_is_none_for_us() {
    let Some(scratch) = Scratch::new() else { return };
    fs::create_dir(scratch.path().join("threads")).unwrap();
    fs::write(scratch.path().join("threads/cgroup.type"), "threaded").unwrap();
    let own = subtree::open_directory(scratch.directory(), "threads").unwrap();
    let why = Cgroup::make_in(own.as_fd(), Path::new("/here"), &name()).unwrap_err().to_string();
    assert!(why.contains("is of type \"domain invalid\""), "{why}");
    assert!(subtree::subdirectories(own.as_fd()).is_empty(), "it was removed again");
}

#[test]
fn the_empty_cgroups_of_the_dead_are_removed_and_no_others() {
    let Some(scratch) = Scratch::new() else { return };
    let (dead, living, full, foreign) =
        (scratch.make(), scratch.make(), scratch.make(), scratch.path().join("supervise-mine"));
    fs::create_dir(&foreign).unwrap();
    fs::create_dir_all(dead.path().join("a/b")).unwrap();
    fs::create_dir(full.path().join("of its service")).unwrap();
    let _service = scratch.start(&full, "exec sleep 99");
    scratch.wait_for_members(&full, 1);
    let paths = [&dead, &living, &full].map(|cgroup| cgroup.path().to_owned());
    // Its supervisor is dead, its guard is not.
    let guard = Cgroup::from_descriptor(living.descriptor().try_clone_to_owned().unwrap());
    assert_eq!(guard.path(), living.path());
    drop((dead, living, full));
    let _new = scratch.make();
    assert_eq!(paths.each_ref().map(|path| path.exists()), [false, true, true]);
    assert!(foreign.exists(), "what has no UUID is not ours");
    assert!(paths[2].join("of its service").exists(), "who is alive keeps all");
    drop(guard);
    let _new = scratch.make();
    assert_eq!(paths.each_ref().map(|path| path.exists()), [false, false, true]);
}

#[test]
fn a_name_that_is_taken_or_in_another_starts_hands_is_given_up_for_the_next() {
    let Some(scratch) = Scratch::new() else { return };
    let name = name();
    let first = scratch.path().join(format!("supervise-{name}"));
    fs::create_dir(&first).unwrap();
    let other = fs::File::open(&first).unwrap().into();
    lock(&other).unwrap();
    let cgroup = Cgroup::make_in(scratch.directory(), scratch.path(), &name).unwrap();
    assert_eq!(cgroup.path(), scratch.path().join(format!("supervise-{name}.2")));
    assert_eq!(fs::metadata(cgroup.path()).unwrap().permissions().mode() & 0o777, 0o700, "others could lock it");
    assert!(Cgroup::make_in(scratch.directory(), scratch.path(), "../x").is_err());
}

#[test]
fn starts_at_the_same_time_do_not_take_each_others_cgroup() {
    if let Some(own) = part() {
        let own = fs::File::open(own).unwrap();
        for _ in 0..100 {
            let cgroup = Cgroup::make_in(own.as_fd(), Path::new("/"), &name()).unwrap();
            cgroup.entrance().unwrap();
        }
        return;
    }
    let Some(scratch) = Scratch::new() else { return };
    let test = "starts_at_the_same_time_do_not_take_each_others_cgroup";
    let starts: Vec<_> = (0..4).map(|_| run_part(Command::new(scene::this()), test, &scratch)).collect();
    starts.into_iter().for_each(scene::succeeds);
    drop(scratch.make());
    let left = subtree::subdirectories(scratch.directory());
    assert!(left.len() <= 1, "{left:?}");
}

#[test]
fn a_predecessors_is_opened_by_its_path_and_nothing_else_is() {
    let Some(scratch) = Scratch::new() else { return };
    let cgroup = scratch.make();
    let path = cgroup.path().to_owned();
    let kind = |path: &Path| Cgroup::open(path).map(drop).map_err(|why| why.kind());
    assert_eq!(kind(&path), Err(io::ErrorKind::WouldBlock), "its supervisor lives");
    drop(cgroup);
    let opened = Cgroup::open(&path).unwrap();
    assert_eq!(kind(&path), Err(io::ErrorKind::WouldBlock), "it is locked again");
    opened.remove().unwrap();
    assert_eq!(kind(&path), Err(io::ErrorKind::NotFound));

    let elsewhere = tempfile::tempdir().unwrap();
    let ours = elsewhere.path().join(format!("supervise-{}", name()));
    fs::create_dir(&ours).unwrap();
    assert_eq!(kind(&ours), Err(io::ErrorKind::InvalidInput), "no cgroup2");
    assert_eq!(kind(scratch.path()), Err(io::ErrorKind::InvalidInput), "another name");
    assert_eq!(kind(Path::new("supervise-x")), Err(io::ErrorKind::InvalidInput));
    let dotted = scratch.path().join("..").join(scratch.path().file_name().unwrap()).join(path.file_name().unwrap());
    assert_eq!(kind(&dotted), Err(io::ErrorKind::InvalidInput));
    let living = scratch.make();
    let name = living.path().file_name().unwrap().to_owned();
    drop(living);
    symlink(scratch.path().join(&name), elsewhere.path().join(&name)).unwrap();
    assert_eq!(kind(&elsewhere.path().join(&name)), Err(io::ErrorKind::NotADirectory), "a link at the end");
    symlink(scratch.path(), elsewhere.path().join("link")).unwrap();
    assert_eq!(
        kind(&elsewhere.path().join("link").join(&name)),
        Err(io::ErrorKind::NotADirectory),
        "a link on the way"
    );
}

#[test]
fn in_a_delegated_cgroup_an_ordinary_user_ends_the_children_of_root() {
    if let Some(own) = part() {
        let restore = as_user(NOBODY);
        let mut cgroup = Cgroup::make(&name()).unwrap();
        assert_eq!(cgroup.path().parent(), Some(&*own));
        restore();
        let mut root = scene::Service::start(scene::entering(cgroup.entrance().unwrap(), "exec sleep 99"));
        scene::drop_root(NOBODY);
        scene::wait_for(|| cgroup.members().unwrap() == [root.pid()]);
        let Killed::OneByOne { killed: 0, refused: Some(why) } = cgroup.kill_each() else { panic!("by what right?") };
        assert_eq!(why.raw_os_error(), Some(libc::EPERM));
        assert!(matches!(cgroup.kill(), Killed::AtOnce));
        scene::wait_until_empty(&cgroup.events().unwrap());
        root.reap();
        return cgroup.remove().unwrap();
    }
    let Some(scratch) = Scratch::new() else { return };
    scratch.delegate(NOBODY);
    let test = "in_a_delegated_cgroup_an_ordinary_user_ends_the_children_of_root";
    scene::succeeds(run_part(scratch.inside(), test, &scratch));
}

#[test]
fn where_there_can_be_none_the_reason_is_said() {
    if let Some(own) = part() {
        let own = own.display();
        let (kind, user) = scene::variant();
        if user {
            scene::drop_root(NOBODY);
        }
        let expected = match kind.as_str() {
            "foreign" => format!("may not make a directory in {own}: Permission denied (delegate it: Delegate=yes)"),
            "half" => format!("may not write {own}/cgroup.procs: Permission denied (delegate it: Delegate=yes)"),
            "read-only" => format!("{own} is read-only: Read-only file system"),
            _ => format!("no more cgroups are allowed below {own}: {AGAIN} (cgroup.max.descendants)"),
        };
        return assert_eq!(Cgroup::make(&name()).unwrap_err().to_string(), expected);
    }
    let test = "where_there_can_be_none_the_reason_is_said";
    for (kind, user) in [("foreign", true), ("half", true), ("full", false), ("read-only", false)] {
        let Some(scratch) = Scratch::new() else { return };
        match kind {
            "half" => std::os::unix::fs::chown(scratch.path(), Some(NOBODY), None).unwrap(),
            "full" => fs::write(scratch.path().join("cgroup.max.descendants"), "0").unwrap(),
            _ => {}
        }
        let mut command = if kind == "read-only" { scratch.read_only_inside() } else { scratch.inside() };
        scene::set_variant(&mut command, kind, user);
        scene::succeeds(run_part(command, test, &scratch));
    }
}

#[test]
fn who_has_no_number_here_is_no_member_by_number() {
    if let Some(own) = part() {
        let (inner, _) = scene::variant();
        let cgroup = Cgroup::open(&own.join(inner)).unwrap();
        assert!(cgroup.is_populated().unwrap());
        assert!(cgroup.members().unwrap().is_empty());
        return;
    }
    let Some(scratch) = Scratch::new() else { return };
    let cgroup = scratch.make();
    let _service = scratch.start(&cgroup, "exec sleep 99");
    scratch.wait_for_members(&cgroup, 1);
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc"]).arg(scene::this());
    scene::set_variant(&mut command, cgroup.path().file_name().unwrap().to_str().unwrap(), false);
    drop(cgroup);
    scene::succeeds(run_part(command, "who_has_no_number_here_is_no_member_by_number", &scratch));
}
