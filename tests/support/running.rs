//! A run while it runs; its end is in `ended.rs`.
//!
//! One loop (`pump`) takes whatever comes from the warden, the tree, stdout, stderr and the terminal; every wait of a test
//! is "pump until", with the guard time as its limit.

use std::collections::VecDeque;
use std::fs;
use std::io::Write as _;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::program::node_program;
use super::pty::Terminal;
use super::supervise::{Io, Supervise};
use super::sys;
use super::told::{Proc, Stream, Told, count_got, parse};
use super::wire::{Event, Launch, Order, Space, Wire};

/// The limit of every wait; long, since the machine may be busy.
pub(super) const GUARD: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug)]
pub(crate) struct Running {
    pub(super) dir: TempDir,
    pub(super) launch: Launch,
    pub(super) warden: Child,
    pub(super) wire: Wire,
    pub(super) pidfd: Option<OwnedFd>,
    pub(super) pid: i32,
    pub(super) started_at: u64,
    pub(super) marked_at: u64,
    pub(super) tell: Stream,
    /// Keeps the tree's pipe from its end until the verdict.
    pub(super) tell_kept: Option<OwnedFd>,
    pub(super) told: Vec<Told>,
    pub(super) expected: usize,
    pub(super) stdout: Stream,
    pub(super) stderr: Stream,
    pub(super) stdin: Option<fs::File>,
    /// Open for those who have not come to wait yet.
    pub(super) gone: Vec<OwnedFd>,
    pub(super) terminal: Option<Terminal>,
    pub(super) events: VecDeque<Event>,
    pub(super) ended: Option<Event>,
    /// The warden was told to end.
    pub(super) over: bool,
    guard: Duration,
}

impl Running {
    pub(super) fn start(mut builder: Supervise) -> Self {
        let (tell, tell_kept) = fifo(&builder.dir, "tell");
        let waiting = builder.tree.as_ref().map(super::tree::Node::waiting_for_go).unwrap_or_default();
        for name in waiting {
            make_fifo(&builder.dir, &format!("go-{name}"));
        }
        let (near, far) = Wire::pair().unwrap();
        let warden = Command::new(node_program()).arg("warden").stdin(far).stdout(Stdio::null()).spawn();
        let warden = warden.unwrap_or_else(|e| panic!("{}: {e}", node_program().display()));
        let mut run = Self {
            launch: builder.launch.clone(),
            warden,
            wire: Wire::new(near),
            pidfd: None,
            pid: 0,
            started_at: 0,
            marked_at: 0,
            tell: Stream { fd: Some(tell), ..Stream::default() },
            tell_kept: Some(tell_kept),
            told: Vec::new(),
            expected: builder.tree.as_ref().map_or(0, super::tree::Node::count),
            stdout: Stream::default(),
            stderr: Stream::default(),
            stdin: None,
            gone: Vec::new(),
            terminal: builder.terminal.take(),
            events: VecDeque::new(),
            ended: None,
            over: false,
            guard: builder.guard,
            dir: builder.dir,
        };
        run.send_launch(builder.stdio, builder.fds);
        let pidfd = run.until("the start", |run| run.pidfd.take());
        run.pidfd = Some(pidfd);
        run
    }

    fn send_launch(&mut self, stdio: [Io; 3], mut fds: Vec<(i32, OwnedFd)>) {
        for (number, io) in (0..).zip(stdio) {
            let fd = match io {
                Io::Closed => continue,
                Io::Null => sys::open("/dev/null", libc::O_RDWR | libc::O_CLOEXEC).unwrap(),
                Io::File(path) => {
                    let how =
                        if number == 0 { libc::O_RDONLY } else { libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND };
                    sys::open(path.to_str().unwrap(), how | libc::O_CLOEXEC).unwrap()
                }
                Io::Fd(fd) => fd,
                Io::Pipe => {
                    let (read, write) = sys::pipe().unwrap();
                    if number == 0 {
                        self.stdin = Some(write.into());
                        read
                    } else {
                        let stream = if number == 1 { &mut self.stdout } else { &mut self.stderr };
                        sys::nonblocking(read.as_raw_fd()).unwrap();
                        stream.fd = Some(read);
                        write
                    }
                }
            };
            fds.push((number, fd));
        }
        if let Some(terminal) = &self.terminal {
            self.stdout.fd = Some(terminal.reader());
        }
        self.launch.fds = fds.iter().map(|(number, _)| *number).collect();
        let raw: Vec<RawFd> = fds.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
        self.wire.send(&self.launch, &raw).unwrap();
    }

    // Who is there.

    /// The program under test; with a guard, that is the guard.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// The process below the guard, whose child the service is. Waits until it has its name.
    pub(crate) fn supervisor(&mut self) -> i32 {
        let guard = self.pid;
        let named = || sys::children(guard).into_iter().find(|pid| sys::is_supervisor(*pid));
        let mut found = None;
        sys::spin(self.guard, || {
            found = named();
            found.is_some()
        });
        found.unwrap_or_else(|| self.fail("there is no supervisor below the guard"))
    }

    pub(crate) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// Waits until the whole tree is in its place.
    pub(crate) fn wait_up(&mut self) {
        self.until("the tree to be up", |run| (run.nodes().count() >= run.expected).then_some(()));
    }

    /// The processes that are up.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Proc> {
        self.told.iter().filter_map(|told| if let Told::Up(proc) = told { Some(proc) } else { None })
    }

    /// A process of the tree by its name, when it is up.
    pub(crate) fn node(&mut self, name: &str) -> Proc {
        self.until(&format!("{name} to be up"), |run| run.nodes().find(|p| p.name == name).cloned())
    }

    /// Its pid as we see it, in a namespace, too.
    pub(crate) fn pid_of(&mut self, name: &str) -> i32 {
        let inside = self.node(name).pid;
        // By this word the program makes a namespace by itself.
        if self.launch.space == Space::Ours && !self.launch.argv.iter().any(|word| word == "pidns") {
            return inside;
        }
        let found = sys::descendants(self.warden_pid()).into_iter().find(|stat| inner_pid(stat.pid) == Some(inside));
        found.map_or_else(|| self.fail(&format!("{name} is no more")), |stat| stat.pid)
    }

    /// All that lives below the warden now, the program with it.
    pub(crate) fn processes(&self) -> Vec<sys::Stat> {
        sys::descendants(self.warden_pid())
    }

    pub(super) fn warden_pid(&self) -> i32 {
        self.warden.id().cast_signed()
    }

    /// Waits for `count` newborns in all.
    pub(crate) fn wait_born(&mut self, count: usize) -> Vec<Proc> {
        self.until(&format!("{count} newborns"), |run| {
            let born = run.told.iter().filter_map(|t| if let Told::Born(p) = t { Some(p.clone()) } else { None });
            let born: Vec<Proc> = born.collect();
            (born.len() >= count).then_some(born)
        })
    }

    /// Waits until the node has caught the signal `times` times in all.
    pub(crate) fn wait_got(&mut self, name: &str, signal: i32, times: usize) {
        self.until(&format!("{name} to get signal {signal}"), |run| (run.got(name, signal) >= times).then_some(()));
    }

    /// How often the node told that it caught the signal, until now.
    pub(crate) fn got(&mut self, name: &str, signal: i32) -> usize {
        self.pump(Some(Instant::now()));
        count_got(&self.told, name, signal)
    }

    /// Waits for the end of the node's churn.
    pub(crate) fn wait_done(&mut self, name: &str) {
        let done = |told: &Told| matches!(told, Told::Done { name: who } if who == name);
        self.until(&format!("{name} to be done"), |run| run.told.iter().any(done).then_some(()));
    }

    // What the test does.

    /// To the program, by pidfd; sets the mark of `Ended::after_signal`. Nothing happens when it has ended.
    pub(crate) fn signal(&mut self, signal: i32) {
        self.mark();
        let _ = sys::pidfd_send(self.pidfd.as_ref().unwrap(), signal);
    }

    /// To a process of the tree.
    pub(crate) fn signal_node(&mut self, name: &str, signal: i32) {
        let pid = self.pid_of(name);
        self.mark();
        sys::kill(pid, signal).unwrap();
    }

    /// `Ended::after_signal` counts from here.
    pub(crate) fn mark(&mut self) {
        self.marked_at = sys::now_micros();
    }

    /// Lets a node that ends `on_go` end; sets the mark.
    pub(crate) fn let_go(&mut self, name: &str) {
        self.mark();
        let path = self.dir.path().join(format!("go-{name}"));
        assert!(path.exists(), "{name} does not wait for a go");
        let fifo = sys::open(path.to_str().unwrap(), libc::O_RDWR | libc::O_CLOEXEC).unwrap();
        self.gone.push(fifo);
    }

    pub(crate) fn write_stdin(&mut self, text: &str) {
        self.stdin.as_mut().expect("stdin(Io::Pipe)").write_all(text.as_bytes()).unwrap();
    }

    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Waits for this text on stdout (or the terminal), after what an earlier call found; what came until its end.
    pub(crate) fn expect_stdout(&mut self, text: &str) -> String {
        self.until(&format!("{text:?} on stdout"), |run| run.stdout.find(text))
    }

    /// The same on stderr.
    pub(crate) fn expect_stderr(&mut self, text: &str) -> String {
        self.until(&format!("{text:?} on stderr"), |run| run.stderr.find(text))
    }

    /// What stderr gave until now.
    pub(crate) fn stderr_so_far(&mut self) -> String {
        self.pump(Some(Instant::now()));
        self.stderr.text()
    }

    /// Starts a command from outside in the program's namespaces, as `docker exec` does; its pid as we see it.
    pub(crate) fn enter<S: Into<String>>(&mut self, argv: impl IntoIterator<Item = S>) -> i32 {
        let argv = argv.into_iter().map(Into::into).collect();
        self.order(&Order::Enter { argv, env: self.launch.env.clone() });
        let pid = self.until("the entering", |run| {
            run.take_event(|event| if let Event::Entered { pid } = event { Some(*pid) } else { None })
        });
        assert!(pid > 0, "nobody could enter");
        pid
    }

    /// Waits until the program has ended; for what is to be seen before the verdict. Finish it afterwards.
    pub(crate) fn wait_end(&mut self) {
        self.until("the end", |run| run.ended.is_some().then_some(()));
    }

    pub(super) fn drop_stdout(&mut self) {
        self.stdout.fd = None;
    }

    // The loop.

    pub(super) fn order(&mut self, order: &Order) {
        self.wire.send(order, &[]).unwrap();
    }

    pub(super) fn take_event<T>(&mut self, wanted: impl Fn(&Event) -> Option<T>) -> Option<T> {
        let index = self.events.iter().position(|event| wanted(event).is_some())?;
        self.events.remove(index).as_ref().and_then(wanted)
    }

    /// Waits for what `found` looks for, which the test calls `what`.
    pub(super) fn until<T>(&mut self, what: &str, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let end = Instant::now() + self.guard;
        loop {
            if let Some(value) = found(self) {
                return value;
            }
            if Instant::now() > end {
                self.fail(&format!("waited {:?} for {what}", self.guard));
            }
            self.pump(Some(end));
        }
    }

    /// Takes what is there, waiting for something until `end`.
    pub(super) fn pump(&mut self, end: Option<Instant>) {
        let streams = [&self.tell, &self.stdout, &self.stderr];
        let mut fds: Vec<RawFd> = streams.iter().filter_map(|s| s.fd.as_ref()).map(AsRawFd::as_raw_fd).collect();
        fds.extend((!self.over).then(|| self.wire.fd()));
        let ready = sys::wait_readable(&fds, end).unwrap();
        for stream in [&mut self.tell, &mut self.stdout, &mut self.stderr] {
            stream.take(&ready);
        }
        while let Some(line) = self.tell.next_line() {
            self.told.push(parse(&line).unwrap_or_else(|| panic!("the tree said {line:?}")));
        }
        if ready.contains(&self.wire.fd()) && !self.wire.read(libc::MSG_DONTWAIT).unwrap() {
            self.fail("the warden has ended");
        }
        while let Some(event) = self.wire.next::<Event>() {
            self.take(event);
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Started { pid, at } => {
                self.pid = pid;
                self.started_at = at;
                self.pidfd = self.wire.take_fd();
            }
            Event::Signalled { at } => self.marked_at = at,
            Event::Failed { what } => panic!("{:?} could not be started: {what}", self.launch.argv),
            Event::Ended { .. } => self.ended = Some(event),
            other => self.events.push_back(other),
        }
    }

    pub(super) fn fail(&mut self, what: &str) -> ! {
        let alive: Vec<String> = self.processes().iter().map(|s| format!("{s:?} {}", sys::command(s.pid))).collect();
        panic!(
            "{what}\ncommand: {:?}\nalive:\n  {}\ntold ({} of {} up): {:?}\nevents: {:?} {:?}\nstdout: {}\nstderr: {}",
            self.launch.argv,
            alive.join("\n  "),
            self.nodes().count(),
            self.expected,
            self.told.iter().rev().take(20).collect::<Vec<_>>(),
            self.events,
            self.ended,
            self.stdout.text(),
            self.stderr.text(),
        )
    }

    /// Closes the socket, which makes the warden end all that is left and itself.
    pub(super) fn end_warden(&mut self) {
        self.over = true;
        // SAFETY: no memory is involved.
        unsafe { libc::shutdown(self.wire.fd(), libc::SHUT_RDWR) };
        let _ = self.warden.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end_warden();
    }
}

/// The pid in the innermost namespace.
fn inner_pid(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

fn make_fifo(dir: &TempDir, name: &str) -> String {
    let path = dir.path().join(name);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Read end, and a write end that keeps it from its end.
fn fifo(dir: &TempDir, name: &str) -> (OwnedFd, OwnedFd) {
    let path = make_fifo(dir, name);
    let read = sys::open(&path, libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC).unwrap();
    let write = sys::open(&path, libc::O_WRONLY | libc::O_CLOEXEC).unwrap();
    // 1,200 processes say `up` in one breath, and the test may be busy; without the room they would only wait.
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(read.as_raw_fd(), libc::F_SETPIPE_SZ, 1 << 20) };
    (read, write)
}
