//! The life of a node: takes its place, makes its children, sets its signals, says `up`, ends as asked.
//!
//! Lines to the harness, through the run's FIFO, which every node holds open for as long as it lives:
//!
//!     up NAME PID PPID PGID SID IGNORED    IGNORED as in SigIgn of /proc/self/status
//!     born NAME PID PPID PGID SID          a newborn of NAME
//!     got NAME SIGNAL
//!     done NAME                            its churn is over
//!
//! Who waits for its descendants holds an eventfd that each of them adds one to after its `up`. A process that stops
//! is counted by its parent, after it is really stopped.

use std::ffi::CString;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::signals::{self, Line, exit};
use crate::spec::{Birth, End, Spec, Traced, Tree};
use crate::{bursts, place, sys};

/// The environment variable that makes a process go on as a node, whatever its arguments.
pub(crate) const EXECED: &str = "NODE_GO_ON";

/// What a node has from those above it.
#[derive(Clone, Serialize, Deserialize)]
struct Stage {
    dir: String,
    node: String,
    tell: i32,
    /// One eventfd for each ancestor that waits.
    waiting: Vec<i32>,
    /// Which copies this node is below: `#3`, `#3#0`.
    suffix: String,
    /// The way down to its description.
    path: Vec<usize>,
    /// The elder sibling to trace, and the eventfd that says it is up.
    elder: Option<(i32, i32)>,
    /// Who traces this node waits here.
    up: Option<i32>,
}

pub(crate) fn start(dir: &str) -> ! {
    let tree = read_tree(dir);
    let fifo = sys::open(&format!("{dir}/tell"), libc::O_WRONLY).unwrap_or_else(|_| place::complain("open tell"));
    let tell = out_of_the_way(std::os::fd::IntoRawFd::into_raw_fd(fifo));
    let stage = Stage {
        dir: dir.to_owned(),
        node: tree.node,
        tell,
        waiting: Vec::new(),
        suffix: String::new(),
        path: Vec::new(),
        elder: None,
        up: None,
    };
    stage.live(&tree.root, false)
}

/// After the exec a description asked for.
pub(crate) fn go_on(text: &str) -> ! {
    let stage: Stage = serde_json::from_str(text).unwrap();
    let root = read_tree(&stage.dir).root;
    let spec = stage.path.iter().fold(&root, |spec, i| &spec.children[*i]);
    stage.live(spec, true)
}

fn read_tree(dir: &str) -> Tree {
    let text = std::fs::read(format!("{dir}/spec.json")).unwrap_or_else(|_| place::complain("read spec.json"));
    serde_json::from_slice(&text).unwrap()
}

/// Numbers a service may care for stay free.
fn out_of_the_way(fd: i32) -> i32 {
    // SAFETY: no memory is involved; `fd` is ours.
    unsafe {
        let high = libc::fcntl(fd, libc::F_DUPFD, 100);
        libc::close(fd);
        high
    }
}

fn counter() -> i32 {
    // SAFETY: no memory is involved.
    out_of_the_way(unsafe { libc::eventfd(0, 0) })
}

fn add_one(counter: i32) {
    let one = 1_u64.to_ne_bytes();
    // SAFETY: the buffer is as long as said.
    unsafe { libc::write(counter, one.as_ptr().cast(), one.len()) };
}

fn wait_for(counter: i32, count: usize) {
    let mut seen = 0;
    while seen < count as u64 {
        let mut value = [0; 8];
        if sys::read(counter, &mut value).is_ok() {
            seen += u64::from_ne_bytes(value);
        }
    }
}

impl Stage {
    fn name(&self, spec: &Spec) -> String {
        format!("{}{}", spec.name, self.suffix)
    }

    fn live(mut self, spec: &Spec, execed: bool) -> ! {
        if !spec.argv.is_empty() && !execed {
            self.exec(spec);
        }
        let name = self.name(spec);
        if spec.birth != Birth::Vfork {
            signals::set_teller(self.tell, &name);
            if !execed {
                place::set_names(spec, &name);
            }
        }
        place::set_place(spec);
        let waits = matches!(spec.end, End::WhenUp(_) | End::KilledBy(_)).then(counter);
        self.make_children(spec, waits, |child| child.birth != Birth::Vfork);
        for signal in &spec.ignores {
            signals::ignore(*signal);
        }
        for (signal, act) in &spec.on {
            signals::on(*signal, *act);
        }
        signals::block(&spec.blocks, libc::SIG_BLOCK);
        if spec.leader_exits {
            let (stage, spec, name) = (self.clone(), spec.clone(), name.clone());
            std::thread::spawn(move || {
                sys::spin(std::time::Duration::from_secs(30), || {
                    // SAFETY: no memory is involved.
                    sys::stat(unsafe { libc::getpid() }).is_none_or(|s| s.state == 'Z')
                });
                stage.go(&spec, &name, waits);
            });
            // SAFETY: ends this thread only, which holds nothing.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        self.go(spec, &name, waits)
    }

    /// All that comes after a node is in its place.
    fn go(mut self, spec: &Spec, name: &str, waits: Option<i32>) -> ! {
        if let Some((pid, up)) = self.elder.take().filter(|_| spec.traces_elder) {
            wait_for(up, 1);
            trace(pid);
        }
        let churns = matches!(spec.burst, Some(crate::spec::Burst::Churn { .. }));
        if let Some(burst) = spec.burst.filter(|_| !churns) {
            bursts::burst(burst);
        }
        // SAFETY: the buffer is as long as said.
        unsafe { libc::write(1, spec.says.as_ptr().cast(), spec.says.len()) };
        if spec.traced == Traced::ByParent {
            // SAFETY: no memory is involved.
            unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
        }
        self.say_up(name);
        if stops(spec) {
            // SAFETY: no memory is involved; not `raise`, which does not know who we are after a bare clone.
            unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
        } else {
            self.waiting.iter().chain(&self.up).for_each(|counter| add_one(*counter));
        }
        if let Some(burst) = spec.burst.filter(|_| churns) {
            bursts::burst(burst);
            let mut line = Line::new();
            let _ = writeln!(line, "done {name}");
            line.write_to(self.tell);
        }
        self.make_children(spec, waits, |child| child.birth == Birth::Vfork);
        if let Some(counter) = waits {
            wait_for(counter, spec.below());
        }
        self.end(spec, name)
    }

    fn make_children(&mut self, spec: &Spec, waits: Option<i32>, wanted: impl Fn(&Spec) -> bool) {
        let mut elder = None;
        for (index, child) in spec.children.iter().enumerate().filter(|(_, child)| wanted(child)) {
            for copy in 0..child.copies {
                let mut stage = self.clone();
                stage.path.push(index);
                stage.waiting.extend(waits);
                stage.elder = elder;
                stage.up = (child.traced == Traced::ByYounger).then(counter);
                if child.copies > 1 {
                    let _ = write!(stage.suffix, "#{copy}");
                }
                let up = stage.up;
                let waiting = stage.waiting.clone();
                let mut stage = Some(stage);
                let pid = place::make(child.birth, &mut || stage.take().unwrap().live(child, false));
                elder = up.map(|up| (pid, up));
                if stops(child) {
                    wait_stopped(pid);
                    waiting.iter().for_each(|counter| add_one(*counter));
                }
            }
        }
    }

    fn say_up(&self, name: &str) {
        let mut line = Line::new();
        // SAFETY: no memory is involved.
        let (pid, ppid, pgid, sid) = unsafe { (libc::getpid(), libc::getppid(), libc::getpgid(0), libc::getsid(0)) };
        let _ = writeln!(line, "up {name} {pid} {ppid} {pgid} {sid} {}", ignored());
        line.write_to(self.tell);
    }

    fn exec(&self, spec: &Spec) -> ! {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(EXECED, serde_json::to_string(self).unwrap()) };
        let path = CString::new(self.node.as_str()).unwrap();
        let argv: Vec<CString> = spec.argv.iter().map(|a| CString::new(a.as_str()).unwrap()).collect();
        let mut pointers: Vec<_> = argv.iter().map(|a| a.as_ptr()).collect();
        pointers.push(std::ptr::null());
        // SAFETY: null-terminated arrays of valid C strings.
        unsafe { libc::execv(path.as_ptr(), pointers.as_ptr()) };
        place::complain("exec")
    }

    fn end(&self, spec: &Spec, name: &str) -> ! {
        match spec.end {
            End::Exit(code) | End::WhenUp(code) => exit(code),
            End::KilledBy(signal) => {
                signals::default(signal);
                signals::block(&[signal], libc::SIG_UNBLOCK);
                // SAFETY: no memory is involved.
                unsafe { libc::kill(libc::getpid(), signal) };
            }
            End::OnGo(code) => {
                let go = format!("{}/go-{name}", self.dir);
                let fifo = sys::open(&go, libc::O_RDONLY | libc::O_CLOEXEC).unwrap_or_else(|_| place::complain("go"));
                drop(fifo);
                exit(code)
            }
            End::Never => {}
        }
        loop {
            // SAFETY: no memory is involved.
            unsafe { libc::pause() };
        }
    }
}

fn stops(spec: &Spec) -> bool {
    spec.stopped || spec.traced == Traced::ByParent
}

/// Without taking the news from whoever waits for it.
fn wait_stopped(pid: i32) {
    let how = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT | libc::__WALL;
    // SAFETY: all zero is a valid siginfo, and it is ours.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_PID, pid.cast_unsigned(), &raw mut info, how);
    }
}

fn trace(pid: i32) {
    // SAFETY: no memory is involved.
    let done = unsafe {
        libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) == 0 && libc::ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0) == 0
    };
    if !done {
        place::complain("ptrace");
    }
    wait_stopped(pid);
}

/// What the kernel says, not what was asked; `-` without /proc.
fn ignored() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.map_or("-", str::trim).to_owned()
}
