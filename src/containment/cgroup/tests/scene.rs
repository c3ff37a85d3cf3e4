//! What the claims about cgroups play with: a cgroup for each test, processes in it, and a second run of the test's own
//! program, for what another user or another namespace sees.

use super::super::{Cgroup, place, populated, subtree};
use crate::process::Pid;
use nix::unistd::{Uid, setresuid};
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A user who has nothing and no other processes.
pub(super) const NOBODY: u32 = 64_117;

/// How long anything may take that is not slow.
const PATIENCE: Duration = Duration::from_secs(10);

/// Says to the second run where its scratch is; and what else it has to know.
const PART: &str = "SUPERVISE_TEST_SCRATCH";
const VARIANT: &str = "SUPERVISE_TEST_VARIANT";

/// A cgroup to make others in. Its end ends all that is in it.
pub(super) struct Scratch {
    path: PathBuf,
    directory: OwnedFd,
}

/// A UUID that no other test has.
pub(super) fn name() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("00000000-0000-4000-{number:04x}-{:012x}", std::process::id())
}

impl Scratch {
    /// Nothing where the machine has none for us; said, and in CI a failure.
    pub(super) fn new() -> Option<Scratch> {
        let found = place::find().map_err(|why| why.to_string());
        let found =
            found.and_then(|found| if Uid::effective().is_root() { Ok(found) } else { Err("no root".to_owned()) });
        match found {
            Ok((place, _)) => {
                let path = place.join(format!("test-{}", name()));
                fs::create_dir(&path).unwrap();
                let directory = fs::File::open(&path).unwrap().into();
                Some(Scratch { path, directory })
            }
            Err(why) => {
                assert!(std::env::var_os("CI").is_none(), "in CI nothing is skipped: {why}");
                writeln!(io::stderr(), "skipped: {why}").unwrap();
                None
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    pub(super) fn make(&self) -> Cgroup {
        Cgroup::make_in(self.directory(), &self.path, &name()).unwrap()
    }

    /// A shell in the cgroup, whose directory is its working directory.
    pub(super) fn start(&self, cgroup: &Cgroup, script: &str) -> Service {
        let command = entering(cgroup.entrance().unwrap(), script);
        Service::start(command.current_dir(cgroup.path()))
    }

    pub(super) fn start_in(&self, directory: &OwnedFd, script: &str) -> Service {
        let entrance = subtree::open_file(directory.as_fd(), c"cgroup.procs", nix::fcntl::OFlag::O_WRONLY).unwrap();
        Service::start(entering(entrance, script))
    }

    /// A process that forks and exits, and so on; as another user, few at once, and not for ever.
    pub(super) fn start_chain(&self, cgroup: &Cgroup) -> Service {
        let command = entering(cgroup.entrance().unwrap(), ":");
        // SAFETY: system calls only.
        unsafe { command.pre_exec(become_chain) };
        Service::start(command)
    }

    pub(super) fn wait_for_members(&self, cgroup: &Cgroup, count: usize) {
        wait_for(|| cgroup.members().unwrap().len() >= count);
    }

    /// As systemd does it for `Delegate=yes`.
    pub(super) fn delegate(&self, uid: u32) {
        for path in [self.path.clone(), self.path.join("cgroup.procs"), self.path.join("cgroup.subtree_control")] {
            chown(path, Some(uid), None).unwrap();
        }
    }

    /// This program, with the scratch as its own cgroup.
    pub(super) fn inside(&self) -> Command {
        let entrance = subtree::open_file(self.directory(), c"cgroup.procs", nix::fcntl::OFlag::O_WRONLY).unwrap();
        let mut command = Command::new(this());
        enter(&mut command, entrance);
        command
    }

    /// The same, with a file system for cgroups that is read-only, in a mount namespace.
    pub(super) fn read_only_inside(&self) -> Command {
        let entrance = subtree::open_file(self.directory(), c"cgroup.procs", nix::fcntl::OFlag::O_WRONLY).unwrap();
        let mut command = Command::new("unshare");
        let script = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && shift && exec \"$@\"";
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(mount_point(&self.path)).arg(this());
        enter(&mut command, entrance);
        command
    }
}

/// Where the file system that a directory is of begins.
fn mount_point(path: &Path) -> PathBuf {
    use std::os::unix::fs::MetadataExt;
    let device = fs::metadata(path).unwrap().dev();
    let above = path.ancestors().take_while(|path| fs::metadata(path).unwrap().dev() == device);
    above.last().unwrap().to_owned()
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::write(self.path.join("cgroup.kill"), "1").unwrap();
        wait_for(|| !subtree::is_populated(self.directory()).unwrap());
        subtree::remove_below(self.directory()).unwrap();
        fs::remove_dir(&self.path).unwrap();
    }
}

/// A process of a test, reaped at its end.
pub(super) struct Service(Child);

impl Service {
    pub(super) fn start(command: &mut Command) -> Service {
        Service(command.stdin(Stdio::null()).spawn().unwrap())
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::try_from(self.0.id()).unwrap()
    }

    pub(super) fn reap(&mut self) {
        self.0.wait().unwrap();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may be another user's, who is dead already.
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// A shell that is in the cgroup from before its first instruction.
pub(super) fn entering(entrance: OwnedFd, script: &str) -> &'static mut Command {
    let command = Box::leak(Box::new(Command::new("sh")));
    command.args(["-c", script]);
    enter(command, entrance);
    command
}

fn enter(command: &mut Command, entrance: OwnedFd) {
    // SAFETY: one write.
    unsafe { command.pre_exec(move || nix::unistd::write(&entrance, b"0").map(drop).map_err(io::Error::from)) };
}

fn become_chain() -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: 60, rlim_max: 60 };
    // SAFETY: system calls that are safe after fork. The pipe on which the parent waits for exec is closed. A chain ends by
    // itself after some seconds.
    unsafe {
        libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit);
        if libc::setresuid(NOBODY + 1, NOBODY + 1, NOBODY + 1) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        for _ in 0..100_000 {
            if libc::fork() > 0 {
                libc::_exit(0);
            }
        }
        libc::_exit(0);
    }
}

pub(super) fn wait_for(mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "it does not happen");
        // SAFETY: no descriptors, a time.
        unsafe { libc::poll(std::ptr::null_mut(), 0, 1) };
    }
}

/// Whether the events have something to report within some milliseconds.
pub(super) fn poll(events: &OwnedFd, milliseconds: i32) -> bool {
    let mut asked = libc::pollfd { fd: events.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
    // SAFETY: one of them.
    unsafe { libc::poll(&raw mut asked, 1, milliseconds) > 0 && asked.revents & libc::POLLPRI != 0 }
}

/// Waits for the event, nothing else.
pub(super) fn wait_until_empty(events: &OwnedFd) {
    while populated(events.as_fd()).unwrap() {
        assert!(poll(events, 10_000), "no event says that it is empty");
    }
}

/// Does the same again until all are gone.
pub(super) fn until_empty(events: &OwnedFd, mut again: impl FnMut()) {
    let began = Instant::now();
    while populated(events.as_fd()).unwrap() {
        assert!(began.elapsed() < PATIENCE, "somebody escapes");
        again();
        poll(events, 1);
    }
}

pub(super) fn this() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// The scratch, in the second run.
pub(super) fn part() -> Option<PathBuf> {
    std::env::var_os(PART).map(PathBuf::from)
}

pub(super) fn set_variant(command: &mut Command, kind: &str, user: bool) {
    command.env(VARIANT, format!("{kind} {user}"));
}

pub(super) fn variant() -> (String, bool) {
    let variant = std::env::var(VARIANT).unwrap();
    let (kind, user) = variant.split_once(' ').unwrap();
    (kind.to_owned(), user == "true")
}

/// Runs one test of this program again, and nothing else.
pub(super) fn run_part(mut command: Command, test: &str, scratch: &Scratch) -> Child {
    let test = format!("containment::cgroup::tests::{test}");
    command.args([&test, "--exact", "--nocapture", "--test-threads=1"]).env(PART, &scratch.path);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub(super) fn succeeds(part: Child) {
    let output = part.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.contains("1 passed"), "{told}");
}

/// Becomes another user, with a way back.
pub(super) fn as_user(uid: u32) -> impl FnOnce() {
    let (user, root) = (Uid::from_raw(uid), Uid::from_raw(0));
    setresuid(user, user, root).unwrap();
    move || setresuid(root, root, root).unwrap()
}

/// Becomes another user for good.
pub(super) fn drop_root(uid: u32) {
    let user = Uid::from_raw(uid);
    setresuid(user, user, user).unwrap();
}
