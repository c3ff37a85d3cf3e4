//! The program under test, on a tree of real processes, with a subreaper of the run's own above it.
//!
//! ```text
//! use crate::support::{Act, Supervise, need_root, node};
//! use libc::SIGTERM;
//!
//! #[test]
//! fn a_leftover_that_ignores_sigterm_is_killed() {
//!     let tree = node("main").with(node("deaf").setsid().ignores([SIGTERM])).exit_on_go(3);
//!     let mut run = Supervise::new().options(["--leftover-timeout", "100ms"]).tree(tree).start();
//!     run.wait_up();                                  // all of the tree is in its place
//!     assert!(run.node("deaf").ignores(SIGTERM));     // it really does
//!     run.let_go("main");
//!     let ended = run.finish();                       // panics when anything is left
//!     assert_eq!(ended.code, Some(3), "{ended}");     // {ended}: all that is known
//!     assert_eq!(ended.report["leftovers"][0]["ended"], "SIGKILL");
//! }
//! ```
//!
//! `Supervise` says what is started: program, options, configuration, tree or command, environment, descriptors,
//! signals, user, limits, namespace, terminal, faults. `start` gives a [`Running`], `run` is `start().finish()`.
//!
//! What holds without asking:
//! * The program gets PATH, HOME and LANG=C only, stdin from /dev/null, pipes for stdout and stderr, a session of its own
//!   without a terminal, default signals, an empty mask, and the run's own directory (`dir()`) as cwd and HOME.
//! * `--report` is given and read, except for another program (`Supervise::program`, environment SUPERVISE_BIN).
//! * `finish` panics when a descendant is left when the program has ended (zombies too), when somebody holds the tree's
//!   pipe, stdout or stderr, or when the run's mark is still in an environment in /proc. It ends what is left first.
//! * No wait is longer than 60 s (`guard`): then all is ended and the test fails with what is known.
//! * A panic, or the end of the test's process, ends all that the run started.
//!
//! In `config` and `options`, `{command}` is the tree or command as a TOML array, `{dir}` the run's directory.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use super::ended::Ended;
use super::fault::Fault;
use super::program::node_program;
use super::pty::Terminal;
use super::running::Running;
use super::spec::Tree;
use super::sys;
use super::tree::Node;
use super::wire::{Launch, Space, Tmpfs};

/// Where a standard stream leads.
#[derive(Debug)]
pub(crate) enum Io {
    /// To the test.
    Pipe,
    Null,
    /// The descriptor is closed when the program starts.
    Closed,
    File(PathBuf),
    Fd(OwnedFd),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Supervise {
    pub(super) dir: TempDir,
    program: PathBuf,
    wrapper: Vec<String>,
    options: Vec<String>,
    config: Option<String>,
    pub(super) tree: Option<Node>,
    command: Vec<String>,
    report: bool,
    pub(super) stdio: [Io; 3],
    pub(super) fds: Vec<(i32, OwnedFd)>,
    pub(super) launch: Launch,
    pub(super) terminal: Option<Terminal>,
    pub(super) guard: Duration,
}

impl Supervise {
    /// The product, or what SUPERVISE_BIN names.
    pub(crate) fn new() -> Self {
        match std::env::var("SUPERVISE_BIN") {
            Ok(other) => Self::program(other),
            Err(_) => Self { report: true, ..Self::program(env!("CARGO_BIN_EXE_supervise")) },
        }
    }

    /// Another program in its place, `tini` or `sh`; looked up in PATH.
    pub(crate) fn program(program: impl Into<PathBuf>) -> Self {
        let dir = TempDir::with_prefix("supervise-test-").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let home = dir.path().to_str().unwrap().to_owned();
        let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/bin:/bin".to_owned());
        let mut env =
            vec![("PATH".to_owned(), path), ("HOME".to_owned(), home.clone()), ("LANG".to_owned(), "C".to_owned())];
        env.extend(std::env::var("LLVM_PROFILE_FILE").map(|file| ("LLVM_PROFILE_FILE".to_owned(), file)));
        env.push((MARK.to_owned(), home.clone()));
        Self {
            dir,
            program: program.into(),
            wrapper: Vec::new(),
            options: Vec::new(),
            config: None,
            tree: None,
            command: Vec::new(),
            report: false,
            stdio: [Io::Null, Io::Pipe, Io::Pipe],
            fds: Vec::new(),
            launch: Launch { env, cwd: home, ..Launch::default() },
            terminal: None,
            guard: super::running::GUARD,
        }
    }

    /// The run's own directory; removed with [`Ended`].
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    // What is started.

    pub(crate) fn options<S: Into<String>>(mut self, options: impl IntoIterator<Item = S>) -> Self {
        self.options.extend(options.into_iter().map(Into::into));
        self
    }

    /// Written to a file that is given with `-c`. A tree or command is also given on the command line, unless the text
    /// names it by `{command}`.
    pub(crate) fn config(mut self, text: &str) -> Self {
        self.config = Some(text.to_owned());
        self
    }

    pub(crate) fn tree(mut self, root: Node) -> Self {
        let dir = self.dir().to_str().unwrap().to_owned();
        self.command = vec![node_program().to_str().unwrap().to_owned(), "tree".to_owned(), dir];
        self.tree = Some(root);
        self
    }

    /// The tree without its command: the options name it, by `{command}` or `node_program()` and `tree {dir}`.
    pub(crate) fn bare_tree(mut self, root: Node) -> Self {
        self.tree = Some(root);
        self
    }

    pub(crate) fn command<S: Into<String>>(mut self, command: impl IntoIterator<Item = S>) -> Self {
        self.command = command.into_iter().map(Into::into).collect();
        self
    }

    /// A service that writes what it was started with as JSON to its stdout: see `Ended::look`.
    pub(crate) fn look(self) -> Self {
        let node = node_program().to_str().unwrap().to_owned();
        self.command([node, "look".to_owned()])
    }

    /// Behind these words, which become the program by exec: `["unshare", "-m", "sh", "-c", "mount …; exec \"$@\"", "sh"]`.
    pub(crate) fn wrapped_in<S: Into<String>>(mut self, wrapper: impl IntoIterator<Item = S>) -> Self {
        self.wrapper = wrapper.into_iter().map(Into::into).collect();
        self
    }

    /// Without `--report`.
    pub(crate) fn without_report(mut self) -> Self {
        self.report = false;
        self
    }

    /// The name the program is called by, instead of its path.
    pub(crate) fn argv0(mut self, name: &str) -> Self {
        self.launch.argv0 = Some(name.to_owned());
        self
    }

    // What it finds.

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.launch.env.retain(|(known, _)| known != name);
        self.launch.env.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn cwd(mut self, path: impl AsRef<Path>) -> Self {
        self.launch.cwd = path.as_ref().to_str().unwrap().to_owned();
        self
    }

    /// A pipe's other end is `Running::write_stdin`.
    pub(crate) fn stdin(mut self, io: Io) -> Self {
        self.stdio[0] = io;
        self
    }

    pub(crate) fn stdout(mut self, io: Io) -> Self {
        self.stdio[1] = io;
        self
    }

    pub(crate) fn stderr(mut self, io: Io) -> Self {
        self.stdio[2] = io;
        self
    }

    /// Passed on under this number.
    pub(crate) fn fd(mut self, number: i32, fd: OwnedFd) -> Self {
        self.fds.push((number, fd));
        self
    }

    /// Ignored when it starts, as `nohup` does with SIGHUP.
    pub(crate) fn ignoring(mut self, signals: impl IntoIterator<Item = i32>) -> Self {
        self.launch.ignored.extend(signals);
        self
    }

    /// Blocked when it starts.
    pub(crate) fn blocking(mut self, signals: impl IntoIterator<Item = i32>) -> Self {
        self.launch.blocked.extend(signals);
        self
    }

    /// Root only. The run's directory becomes this user's.
    pub(crate) fn user(mut self, uid: u32, gid: u32) -> Self {
        (self.launch.uid, self.launch.gid) = (Some(uid), Some(gid));
        self
    }

    pub(crate) fn umask(mut self, umask: u32) -> Self {
        self.launch.umask = Some(umask);
        self
    }

    pub(crate) fn rlimit(mut self, resource: u32, soft: u64, hard: u64) -> Self {
        self.launch.rlimits.push((resource, soft, hard));
        self
    }

    // Where it runs.

    /// PID 1 of a pid namespace with its own /proc. Root only, like the next two. `Proc` then has the pids as the
    /// namespace sees them, `Running::pid_of` ours.
    pub(crate) fn pid_one(self) -> Self {
        self.space(Space::PidOne)
    }

    /// The same, and no /proc is mounted.
    pub(crate) fn pid_one_without_proc(self) -> Self {
        self.space(Space::PidOneWithoutProc)
    }

    /// The same, and /proc shows other pids than the namespace has.
    pub(crate) fn pid_one_with_outer_proc(self) -> Self {
        self.space(Space::PidOneWithOuterProc)
    }

    fn space(mut self, space: Space) -> Self {
        self.launch.space = space;
        self
    }

    /// At a terminal, in the foreground, below a shell with job control; see `pty.rs`.
    pub(crate) fn at_terminal(mut self) -> Self {
        let (terminal, slave) = Terminal::open();
        self.stdio = [0, 1, 2].map(|_| Io::Fd(slave.try_clone().unwrap()));
        self.launch.terminal = Some(0);
        self.terminal = Some(terminal);
        self
    }

    // What goes wrong.

    pub(crate) fn fault(mut self, fault: Fault) -> Self {
        self.launch.seccomp = fault.ops();
        self
    }

    /// A full file system at `path`, made if it does not exist; only the run sees it. Root only.
    pub(crate) fn full_disk(mut self, path: impl AsRef<Path>) -> Self {
        fs::create_dir_all(&path).unwrap();
        self.launch.tmpfs.push(Tmpfs { path: path.as_ref().to_str().unwrap().to_owned(), full: true });
        self
    }

    /// This signal, so long after the exec; more exact than the test could.
    pub(crate) fn signal_at(mut self, after: Duration, signal: i32) -> Self {
        self.launch.signal_at = Some((u64::try_from(after.as_micros()).unwrap(), signal));
        self
    }

    /// The uid of a bomb in the tree.
    pub(crate) fn bomb_uid(mut self, uid: u32) -> Self {
        assert!(uid > 0);
        self.launch.bomb_uid = Some(uid);
        self
    }

    /// Another limit for every wait of this run.
    pub(crate) fn guard(mut self, limit: Duration) -> Self {
        self.guard = limit;
        self
    }

    // Go.

    pub(crate) fn start(mut self) -> Running {
        self.write_files();
        self.launch.argv = self.command_line();
        Running::start(self)
    }

    pub(crate) fn run(self) -> Ended {
        self.start().finish()
    }

    fn write_files(&self) {
        if let Some(config) = &self.config {
            fs::write(self.dir().join("supervisor.toml"), self.fill_in(config)).unwrap();
        }
        if let Some(Node(root)) = &self.tree {
            let tree = Tree { node: node_program().to_str().unwrap().to_owned(), root: root.clone() };
            fs::write(self.dir().join("spec.json"), serde_json::to_vec(&tree).unwrap()).unwrap();
        }
        if let (Some(uid), gid) = (self.launch.uid, self.launch.gid) {
            chown(self.dir(), Some(uid), gid).unwrap();
        }
    }

    fn fill_in(&self, text: &str) -> String {
        let command = serde_json::to_string(&self.command).unwrap();
        text.replace("{command}", &command).replace("{dir}", self.dir().to_str().unwrap())
    }

    fn command_line(&self) -> Vec<String> {
        let path = |name: &str| self.dir().join(name).to_str().unwrap().to_owned();
        let mut argv: Vec<String> = self.wrapper.iter().map(|word| self.fill_in(word)).collect();
        argv.push(self.program.to_str().unwrap().to_owned());
        argv.extend(self.options.iter().map(|option| self.fill_in(option)));
        if self.report {
            argv.extend(["--report".to_owned(), path("report.json")]);
        }
        if self.config.is_some() {
            argv.extend(["-c".to_owned(), path("supervisor.toml")]);
        }
        let named = self.config.as_ref().is_some_and(|text| text.contains("{command}"));
        if !self.command.is_empty() && !named {
            argv.push("--".to_owned());
            argv.extend(self.command.iter().cloned());
        }
        argv
    }
}

/// The environment variable that marks all processes of a run; its value is the run's directory.
pub(crate) const MARK: &str = "SUPERVISE_TEST_RUN";

/// Both ends of a pipe, read end first; for `Io::Fd` and `Supervise::fd`.
pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    sys::pipe().unwrap()
}

/// A pipe that is full, as behind a log reader that stalls: read end, write end.
pub(crate) fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (read, write) = pipe();
    sys::nonblocking(write.as_raw_fd()).unwrap();
    // SAFETY: the buffer is as long as said.
    while unsafe { libc::write(write.as_raw_fd(), [b'x'; 4096].as_ptr().cast(), 4096) } > 0 {}
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETFL, 0) };
    (read, write)
}
