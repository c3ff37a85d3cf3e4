//! A cgroup of the service's own: entered at once, ended whoever is in it, removed at the end. Each test has a cgroup in
//! which its run makes others, so that what stays is seen.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::{SIGKILL, SIGTERM};

use crate::end::{IMPATIENT, fate};
use crate::support::fault::Fault;
use crate::support::need::need;
use crate::support::{Io, Running, Supervise, need_program, need_root, sys};

/// The limit of every wait of ours.
const LIMIT: Duration = Duration::from_secs(30);

/// A user who has nothing.
const USER: u32 = 4711;

/// What no run may wait for.
const NEVER_SPENT: [&str; 4] = ["--stop-timeout", "30s", "--leftover-timeout", "30s"];

/// Where version 2 is mounted.
fn mount_point() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
    line.split(' ').nth(4).map(PathBuf::from)
}

/// A cgroup to run in, removed with all that is in it.
pub(crate) struct Scratch {
    pub(crate) mount: PathBuf,
    pub(crate) path: PathBuf,
}

impl Scratch {
    pub(crate) fn new() -> Option<Scratch> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/").map(str::to_owned));
        let found = own.zip(mount_point()).filter(|_| need_root());
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let made = found.and_then(|(own, mount)| {
            let path = mount.join(own).join(format!("supervise-test-{}-{number}", std::process::id()));
            fs::create_dir(&path).ok().map(|()| Scratch { mount, path })
        });
        need("a cgroup of version 2 in which others can be made", made.is_some()).then_some(made).flatten()
    }

    /// Hands it to a user, as systemd does for `Delegate=yes`.
    pub(crate) fn delegate(&self, uid: u32) {
        for file in ["", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"] {
            chown(self.path.join(file), Some(uid), Some(uid)).unwrap();
        }
    }

    /// As `/proc/PID/cgroup` names it.
    fn name(&self) -> String {
        format!("/{}", self.path.strip_prefix(&self.mount).unwrap().display())
    }

    /// A run in it, after these commands of a shell.
    pub(crate) fn run_after(&self, script: &str) -> Supervise {
        let script = format!("echo $$ >'{}/cgroup.procs' && {script} exec \"$@\"", self.path.display());
        Supervise::new().wrapped_in(["sh", "-c", &script, "sh"]).env("CGROUPS", self.mount.to_str().unwrap())
    }

    pub(crate) fn run(&self) -> Supervise {
        self.run_after("")
    }

    /// A run in it of somebody who has nothing.
    pub(crate) fn run_as_user(&self) -> Supervise {
        let as_user = format!("set -- setpriv --reuid {USER} --regid {USER} --clear-groups \"$@\" &&");
        let run = self.run_after(&as_user);
        chown(run.dir(), Some(USER), Some(USER)).unwrap();
        run
    }

    fn below(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.path).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect()
    }

    /// The service's, which there is one of.
    pub(crate) fn only_one(&self) -> PathBuf {
        let mut below = self.below();
        assert_eq!(below.len(), 1, "{below:?}");
        below.remove(0)
    }

    #[track_caller]
    pub(crate) fn is_clean(&self) {
        assert_eq!(self.below(), [] as [PathBuf; 0], "a cgroup stays");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fn remove(path: &Path) {
            for entry in fs::read_dir(path).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
                remove(&entry.path());
            }
            let _ = fs::remove_dir(path);
        }
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
        sys::spin(Duration::from_secs(5), || {
            fs::read_to_string(self.path.join("cgroup.events")).is_ok_and(|events| events.contains("populated 0"))
        });
        remove(&self.path);
    }
}

/// A service that knows its cgroup's directory as `$own`, and ends when a line comes.
fn service(script: &str) -> [String; 3] {
    let own = r#"own=$CGROUPS$(sed -n s/^0:://p /proc/self/cgroup)"#;
    ["sh".to_owned(), "-c".to_owned(), format!("{own}; {script} echo up; read line; exit 3")]
}

pub(crate) fn start(run: Supervise, script: &str) -> Running {
    let mut run = run.command(service(script)).stdin(Io::Pipe).start();
    run.expect_stdout("up\n");
    run
}

fn own_cgroup(text: &str) -> &str {
    text.lines().find_map(|line| line.strip_prefix("0::")).unwrap()
}

// Entering it.

#[test]
fn the_service_is_in_its_cgroup_from_its_first_instruction_and_we_are_not() {
    let Some(scratch) = Scratch::new() else { return };
    for mode in ["cgroup", "auto"] {
        let script = "cat /proc/self/cgroup /proc/$PPID/cgroup";
        let ended = scratch.run().options(["--containment", mode]).command(["sh", "-c", script]).run();
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{ended}");
        let own = format!("{}/supervise-{}", scratch.name(), ended.report["invocation"].as_str().unwrap());
        let seen: Vec<&str> = ended.stdout.lines().filter_map(|line| line.strip_prefix("0::")).collect();
        assert_eq!(seen, [own, scratch.name()], "{ended}");
        assert_eq!(ended.report["containment"], "cgroup", "{ended}");
        scratch.is_clean();
    }
}

#[test]
fn where_clone3_is_refused_the_service_enters_by_itself_and_that_is_said_once() {
    let Some(scratch) = Scratch::new() else { return };
    for (errno, why) in [(libc::ENOSYS, "Function not implemented"), (libc::EPERM, "Operation not permitted")] {
        for mode in ["cgroup", "auto"] {
            let fault = Fault::new().fails(libc::SYS_clone3, errno);
            let script = "cat /proc/self/cgroup; (trap '' TERM; exec setsid sleep 1000) & exit 3";
            let run = scratch.run().options(["--containment", mode]).options(IMPATIENT).fault(fault);
            let ended = run.command(["sh", "-c", script]).run();
            let said = format!("clone3 cannot put the service into its cgroup ({why}); it enters by itself");
            assert_eq!(ended.stderr.matches(&said).count(), 1, "{ended}");
            assert!(own_cgroup(&ended.stdout).starts_with(&format!("{}/supervise-", scratch.name())), "{ended}");
            assert_eq!((ended.code, &ended.report["containment"]), (Some(3), &"cgroup".into()), "{ended}");
            scratch.is_clean();
        }
    }
}

#[test]
fn who_cannot_be_executed_leaves_no_cgroup() {
    let Some(scratch) = Scratch::new() else { return };
    for (command, code) in [("/nowhere/at-all", 127), ("/etc/passwd", 126)] {
        let ended = scratch.run().options(["--containment", "cgroup"]).command([command]).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        scratch.is_clean();
    }
}

// Ending all that is in it.

#[test]
fn sub_cgroups_of_the_service_are_ended_and_removed() {
    let Some(scratch) = Scratch::new() else { return };
    let script = "mkdir -p $own/a/b $own/empty/c;
        (echo 0 >$own/a/cgroup.procs; exec setsid sleep 1001) &
        (trap '' TERM; echo 0 >$own/a/b/cgroup.procs; exec setsid sleep 1002) &";
    let mut run = start(scratch.run().options(IMPATIENT), script);
    run.wait_command("sleep 1001");
    run.wait_command("sleep 1002");
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    assert_eq!((fate(&ended, "sleep 1001"), fate(&ended, "sleep 1002")), ("SIGTERM", "SIGKILL"), "{ended}");
    scratch.is_clean();
}

#[test]
fn who_went_by_sigterm_and_was_reaped_by_its_parent_is_not_said_to_have_been_killed() {
    let Some(scratch) = Scratch::new() else { return };
    // The shell waits for the first, and is deaf from then on.
    let script = "(trap : TERM; sleep 1001; trap '' TERM; exec sleep 1002) &";
    for mode in ["lineage", "cgroup", "pidns"] {
        let mut run = start(scratch.run().options(["--containment", mode]).options(IMPATIENT), script);
        run.wait_command("sleep 1001");
        run.write_stdin("end\n");
        let ended = run.finish();
        assert_eq!(fate(&ended, "sleep 1001"), "SIGTERM", "{mode} {ended}");
    }
}

#[test]
fn a_member_that_moves_itself_out_is_ended() {
    let Some(scratch) = Scratch::new() else { return };
    let script = "out=${own%/*};
        (echo 0 >$out/cgroup.procs; exec setsid sleep 1001) &
        (trap '' TERM; echo 0 >$out/cgroup.procs; setsid sleep 1002 &) &";
    let mut run = start(scratch.run().options(IMPATIENT), script);
    for command in ["sleep 1001", "sleep 1002"] {
        let pid = run.wait_command(command);
        assert_eq!(own_cgroup(&fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap()), scratch.name());
    }
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(ended.code, Some(3), "{ended}");
    assert_eq!((fate(&ended, "sleep 1001"), fate(&ended, "sleep 1002")), ("SIGTERM", "SIGKILL"), "{ended}");
    scratch.is_clean();
}

/// A process of ours that is put into the service's cgroup; killed with this.
pub(crate) struct Guest(Child);

impl Guest {
    pub(crate) fn enter(cgroup: &Path, script: &str) -> Guest {
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let pid = child.id().cast_signed();
        assert!(sys::spin(LIMIT, || sys::command(pid).starts_with("sleep")));
        fs::write(cgroup.join("cgroup.procs"), pid.to_string()).unwrap();
        Guest(child)
    }

    pub(crate) fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    fn ended_by(mut self) -> Option<i32> {
        use std::os::unix::process::ExitStatusExt as _;
        self.0.try_wait().unwrap().and_then(|status| status.signal())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_that_is_put_in_from_outside_is_ended() {
    let Some(scratch) = Scratch::new() else { return };
    let mut run = start(scratch.run().options(IMPATIENT), "");
    let soft = Guest::enter(&scratch.only_one(), "exec sleep 1001");
    let hard = Guest::enter(&scratch.only_one(), "trap '' TERM; exec sleep 1002");
    run.write_stdin("end\n");
    let ended = run.finish();
    let signals = (soft.ended_by(), hard.ended_by());
    assert_eq!((ended.code, signals), (Some(3), (Some(SIGTERM), Some(SIGKILL))), "{ended}");
    assert_eq!((fate(&ended, "sleep 1001"), fate(&ended, "sleep 1002")), ("SIGTERM", "SIGKILL"), "{ended}");
    scratch.is_clean();
}

#[test]
fn a_guest_that_goes_by_sigterm_is_not_waited_for_until_the_rung_ends() {
    let Some(scratch) = Scratch::new() else { return };
    let mut run = start(scratch.run().options(NEVER_SPENT), "");
    let guest = Guest::enter(&scratch.only_one(), "exec sleep 1001");
    run.write_stdin("end\n");
    let ended = run.finish();
    assert_eq!(guest.ended_by(), Some(SIGTERM), "{ended}");
    assert!(ended.wall < Duration::from_secs(20), "{ended}");
}

#[test]
fn who_was_put_in_is_ended_also_when_one_of_us_is_lost() {
    let Some(scratch) = Scratch::new() else { return };
    for guard_is_lost in [false, true] {
        let mut run = start(scratch.run(), "");
        let guest = Guest::enter(&scratch.only_one(), "trap '' TERM; exec sleep 1001");
        let victim = if guard_is_lost { run.pid() } else { run.inner() };
        sys::kill(victim, SIGKILL).unwrap();
        let ended = if guard_is_lost { run.finish_empty_within(LIMIT) } else { run.finish() };
        assert_eq!((guest.ended_by(), &ended.report["exit_code"]), (Some(SIGKILL), &125.into()), "{ended}");
        scratch.is_clean();
    }
}

#[test]
fn without_cgroup_kill_all_that_is_in_it_is_killed_one_by_one_and_that_is_said_once() {
    let Some(scratch) = Scratch::new() else { return };
    if !need_program("unshare") || !need_program("nsenter") {
        return;
    }
    let run = scratch.run_after("set -- unshare -m \"$@\" &&").options(IMPATIENT);
    fs::write(run.dir().join("nothing"), "").unwrap();
    let mut run = start(run, "mkdir $own/a; (trap '' TERM; echo 0 >$own/a/cgroup.procs; exec setsid sleep 1001) &");
    run.wait_command("sleep 1001");
    let deaf = Guest::enter(&scratch.only_one(), "trap '' TERM; exec sleep 1002");
    // Only the run sees it: a file that cannot be written to over the one that kills.
    let (from, to) = (run.dir().join("nothing"), scratch.only_one().join("cgroup.kill"));
    let mounts = format!("mount --bind {0} {1} && mount -o remount,bind,ro {1}", from.display(), to.display());
    let pid = run.pid().to_string();
    let done = Command::new("nsenter").args(["-m", "-t", &pid, "sh", "-c", &mounts]).status().unwrap();
    assert!(done.success());
    run.write_stdin("end\n");
    let ended = run.finish();
    let said = "cgroup.kill cannot be used here; the members of the cgroup are killed one by one";
    assert_eq!(ended.stderr.matches(said).count(), 1, "{ended}");
    assert_eq!((ended.code, deaf.ended_by()), (Some(3), Some(SIGKILL)), "{ended}");
    assert_eq!(fate(&ended, "sleep 1001"), "SIGKILL", "{ended}");
    scratch.is_clean();
}

// Other users.

/// The set-uid copy of a program by which the service's processes become root for good: whoever has the real user's number
/// left may still be signalled by him.
pub(crate) fn way_to_root(run: &Supervise) -> String {
    let path = std::env::var_os("PATH").unwrap();
    let setpriv = std::env::split_paths(&path).map(|dir| dir.join("setpriv")).find(|file| file.is_file()).unwrap();
    let copy = run.dir().join("setpriv");
    fs::copy(setpriv, &copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
    format!("{} --reuid 0", copy.display())
}

fn uids(pid: i32) -> Vec<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap().to_owned();
    line.split_whitespace().map(str::to_owned).collect()
}

/// An unprivileged run that has left a process of root.
fn left_by_root(run: Supervise) -> (Running, i32) {
    let root = way_to_root(&run);
    let short = "[stop]\nleftover-timeout = \"200ms\"\nkill-timeout = \"300ms\"\n";
    let mut run = start(run.config(short), &format!("{root} setsid sleep 1001 & (exec setsid sleep 1002) &"));
    let pid = run.wait_command("sleep 1001");
    run.wait_command("sleep 1002");
    assert_eq!(uids(pid), ["0"; 4]);
    assert_eq!(uids(run.pid()), ["4711"; 4]);
    run.write_stdin("end\n");
    (run, pid)
}

#[test]
fn in_a_delegated_cgroup_a_set_uid_child_of_an_unprivileged_run_is_ended() {
    let Some(scratch) = Scratch::new() else { return };
    if !need_program("setpriv") {
        return;
    }
    for mode in ["auto", "cgroup"] {
        scratch.delegate(USER);
        let (run, _) = left_by_root(scratch.run_as_user().options(["--containment", mode]));
        let ended = run.finish();
        assert_eq!((ended.code, &ended.report["containment"]), (Some(3), &"cgroup".into()), "{ended}");
        assert_eq!((fate(&ended, "sleep 1001"), fate(&ended, "sleep 1002")), ("SIGKILL", "SIGTERM"), "{ended}");
        scratch.is_clean();
    }
}

#[test]
fn in_a_delegated_cgroup_the_guard_ends_a_set_uid_child_when_the_supervisor_is_lost_and_the_other_way_round() {
    let Some(scratch) = Scratch::new() else { return };
    if !need_program("setpriv") {
        return;
    }
    scratch.delegate(USER);
    for guard_is_lost in [false, true] {
        let run = scratch.run_as_user();
        let root = way_to_root(&run);
        let mut run = start(run, &format!("{root} setsid sleep 1001 &"));
        run.wait_command("sleep 1001");
        let victim = if guard_is_lost { run.pid() } else { run.inner() };
        sys::kill(victim, SIGKILL).unwrap();
        let ended = if guard_is_lost { run.finish_empty_within(LIMIT) } else { run.finish() };
        assert_eq!(ended.report["exit_code"], 125, "{ended}");
        assert_eq!(fate(&ended, "sleep 1001"), "SIGKILL", "{ended}");
        scratch.is_clean();
    }
}

#[test]
fn without_delegation_a_set_uid_child_is_named_with_123() {
    let Some(scratch) = Scratch::new() else { return };
    if !need_program("setpriv") {
        return;
    }
    let (run, pid) = left_by_root(scratch.run_as_user());
    let ended = run.finish_with_leftovers();
    assert_eq!((ended.code, &ended.report["containment"]), (Some(123), &"lineage".into()), "{ended}");
    assert_eq!(fate(&ended, "sleep 1001"), "survived", "{ended}");
    assert_eq!(ended.left.iter().map(|left| left.pid).collect::<Vec<_>>(), [pid], "{ended}");
    assert!(ended.stderr.contains(&format!("could not end sleep 1001 (pid {pid}, ")), "{ended}");
}

// Its end.

#[test]
fn the_cgroup_is_removed_however_the_run_ends() {
    let Some(scratch) = Scratch::new() else { return };
    let deaf = "(trap '' TERM; exec setsid sleep 1001) &";
    let soft = "(exec setsid sleep 1001) &";
    type Way = fn(&mut Running);
    let ways: [(&str, Way); 4] = [
        (soft, |run| run.write_stdin("end\n")),
        (soft, |run| run.signal(SIGTERM)),
        (deaf, |run| run.write_stdin("end\n")),
        (deaf, |run| {
            let supervisor = run.inner();
            sys::kill(supervisor, SIGKILL).unwrap();
        }),
    ];
    for (index, (script, way)) in ways.into_iter().enumerate() {
        let mut run = start(scratch.run().options(IMPATIENT), script);
        run.wait_command("sleep 1001");
        assert!(scratch.only_one().exists());
        way(&mut run);
        let ended = run.finish();
        assert_eq!(ended.code, [Some(3), Some(143), Some(3), Some(125)][index], "{ended}");
        assert_eq!(ended.report["containment"], "cgroup", "{ended}");
        scratch.is_clean();
    }
    let mut run = start(scratch.run(), deaf);
    run.wait_command("sleep 1001");
    run.signal(SIGKILL);
    let ended = run.finish_empty_within(LIMIT);
    assert_eq!(ended.report["result"], "guard-lost", "{ended}");
    scratch.is_clean();
}

#[test]
fn the_cgroup_of_a_dead_predecessor_is_removed_when_nobody_is_in_it_any_more() {
    let Some(scratch) = Scratch::new() else { return };
    let mut lost = start(scratch.run(), "mkdir $own/a; (exec setsid sleep 1001) &");
    let left = lost.wait_command("sleep 1001");
    let stays = scratch.only_one();
    lost.kill_both();
    assert!(sys::stat(left).is_some(), "of a run without a name nothing is ended afterwards");
    let ended = scratch.run().command(["true"]).run();
    assert_eq!((ended.code, scratch.only_one()), (Some(0), stays), "somebody is alive in it");
    assert!(sys::stat(left).is_some_and(|stat| stat.state != 'Z'));
    lost.finish_with_leftovers();
    let ended = scratch.run().command(["true"]).run();
    assert_eq!(ended.code, Some(0), "{ended}");
    scratch.is_clean();
}
