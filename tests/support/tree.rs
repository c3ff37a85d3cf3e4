//! The process tree a test asks for.
//!
//!     node("leader").ignores([TERM]).with(node("w").setsid().copies(300).with(node("x"))).exit_when_up(0)
//!
//! Every process is a fork of the first one, named by comm and command line `node NAME`; copies are `w#0`, `w#1`, …, and
//! what is below them `x#0`, `x#1`, … By default a process lives for ever and dies of what it is sent.
//!
//! `Running::wait_up` comes back when *all* described processes are in their place: sessions made, signals set, the
//! stopped ones stopped. A signal of `on` and `reports` is told as `got NAME SIGNAL` (`Running::wait_got`), a newborn as
//! `born` (`Running::wait_born`).
//!
//! The kernel sends SIGHUP and SIGCONT to a group with stopped members when its last tie to the session above goes: a
//! stopped process that is to outlive its parents wants `setsid`.
//!
//! Limits: a `vforked` process is a leaf and has no `on`; a `stopped` or `traced` one is made by its parent (not
//! `orphaned`, `daemonized`, `clone_parent`).

pub(crate) use super::spec::{Act, Born};
use super::spec::{Birth, Burst, End, Spec, Traced};

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Node(pub(super) Spec);

pub(crate) fn node(name: &str) -> Node {
    assert!(!name.contains(char::is_whitespace) && name.len() < 200, "{name:?} is no name; see Node::comm");
    Node(Spec { name: name.to_owned(), copies: 1, ..Spec::default() })
}

/// A newborn for [`Act::Newborn`] that ignores these signals.
pub(crate) fn ignoring(signals: &[i32]) -> Born {
    Born { ignored: signals.iter().fold(0, |mask, signal| mask | 1 << (signal - 1)), setsid: false }
}

impl Node {
    /// A child, made in the order written.
    pub(crate) fn with(mut self, child: Self) -> Self {
        let maker_ends = self.0.birth == Birth::Vfork;
        assert!(!maker_ends, "a vforked process is a leaf");
        if child.0.stopped || child.0.traced != Traced::No {
            let by_parent = matches!(child.0.birth, Birth::Fork | Birth::Clone3 | Birth::CloneSignal(_));
            assert!(by_parent, "{} must be its parent's child to be stopped", child.0.name);
        }
        self.0.children.push(child.0);
        self
    }

    pub(crate) fn copies(mut self, copies: u32) -> Self {
        self.0.copies = copies;
        self
    }

    // How it is made.

    /// The parent is suspended while this process lives.
    pub(crate) fn vforked(self) -> Self {
        assert!(self.0.children.is_empty() && self.0.on.is_empty(), "a vforked process is a leaf and catches nothing");
        self.born(Birth::Vfork)
    }

    pub(crate) fn cloned(self) -> Self {
        self.born(Birth::Clone3)
    }

    /// A sibling of its maker.
    pub(crate) fn clone_parent(self) -> Self {
        self.born(Birth::CloneParent)
    }

    /// Its parent gets this signal at its end; 0 for none.
    pub(crate) fn exit_signal(self, signal: i32) -> Self {
        self.born(Birth::CloneSignal(signal))
    }

    /// Forked twice: its parent is the nearest subreaper.
    pub(crate) fn orphaned(self) -> Self {
        self.born(Birth::Orphan)
    }

    /// Forked twice with setsid between, as services that go to the background do.
    pub(crate) fn daemonized(self) -> Self {
        self.born(Birth::Daemon)
    }

    fn born(mut self, birth: Birth) -> Self {
        self.0.birth = birth;
        self
    }

    // What it is.

    pub(crate) fn setsid(mut self) -> Self {
        self.0.setsid = true;
        self
    }

    pub(crate) fn own_group(mut self) -> Self {
        self.0.own_group = true;
        self
    }

    /// The name in /proc/PID/stat: any bytes, at most 15.
    pub(crate) fn comm(mut self, comm: impl AsRef<[u8]>) -> Self {
        self.0.comm = Some(comm.as_ref().to_vec());
        self
    }

    /// Exec'd with this command line.
    pub(crate) fn argv<S: Into<String>>(mut self, argv: impl IntoIterator<Item = S>) -> Self {
        self.0.argv = argv.into_iter().map(Into::into).collect();
        self
    }

    pub(crate) fn subreaper(mut self) -> Self {
        self.0.subreaper = true;
        self
    }

    /// Root only. What is below it has this uid, too.
    pub(crate) fn uid(mut self, uid: u32) -> Self {
        self.0.uid = Some(uid);
        self
    }

    pub(crate) fn closes_stdio(mut self) -> Self {
        self.0.closes = vec![0, 1, 2];
        self
    }

    /// Written to stdout before it is up.
    pub(crate) fn says(mut self, text: &str) -> Self {
        text.clone_into(&mut self.0.says);
        self
    }

    // Its signals.

    /// That it really does is in `Proc::ignored`.
    pub(crate) fn ignores(mut self, signals: impl IntoIterator<Item = i32>) -> Self {
        self.0.ignores.extend(signals);
        self
    }

    pub(crate) fn blocks(mut self, signals: impl IntoIterator<Item = i32>) -> Self {
        self.0.blocks.extend(signals);
        self
    }

    pub(crate) fn on(mut self, signal: i32, act: Act) -> Self {
        self.0.on.push((signal, act));
        self
    }

    /// Catches them, tells of it, and goes on.
    pub(crate) fn reports(self, signals: impl IntoIterator<Item = i32>) -> Self {
        signals.into_iter().fold(self, |node, signal| node.on(signal, Act::Report))
    }

    // Its state.

    /// By SIGSTOP, when it is up.
    pub(crate) fn stopped(mut self) -> Self {
        self.0.stopped = true;
        self
    }

    /// Traced by its parent, and stopped.
    pub(crate) fn traced(mut self) -> Self {
        self.0.traced = Traced::ByParent;
        self
    }

    /// Traced by the child of the same parent that is made next, which has `traces_elder`.
    pub(crate) fn traced_by_younger(mut self) -> Self {
        self.0.traced = Traced::ByYounger;
        self
    }

    pub(crate) fn traces_elder(mut self) -> Self {
        self.0.traces_elder = true;
        self
    }

    /// Its first thread has exited, another one lives: a zombie to look at, but not dead.
    pub(crate) fn leader_exits(mut self) -> Self {
        self.0.leader_exits = true;
        self
    }

    // What it does for ever.

    /// So many chains of processes that fork and exit, for ever. Their zombies fill the machine's pids when nobody
    /// reaps fast enough: end the run soon, or give the node `uid(bomb_uid())` and the run an RLIMIT_NPROC, which counts
    /// zombies, too.
    pub(crate) fn chains(self, count: u32) -> Self {
        self.burst(Burst::Chains { count, sessions: false })
    }

    /// The same, each process in a session of its own.
    pub(crate) fn chains_of_sessions(self, count: u32) -> Self {
        self.burst(Burst::Chains { count, sessions: true })
    }

    /// Every process forks for ever, each in a session of its own, as a uid of its own with at most `cap` processes.
    /// Root only. Take the uid from `bomb_uid()`, and tell it `Supervise::bomb_uid`, so that nothing can be left.
    pub(crate) fn bomb(self, uid: u32, cap: u64) -> Self {
        assert!(uid >= BOMB_UIDS && cap < 10_000, "a bomb has a uid of its own and a cap");
        self.burst(Burst::Wide { uid, cap })
    }

    /// Orphans that end at once, `batch` at a time; then it tells `done`.
    pub(crate) fn churn(self, total: u32, batch: u32) -> Self {
        self.burst(Burst::Churn { total, batch })
    }

    fn burst(mut self, burst: Burst) -> Self {
        self.0.burst = Some(burst);
        self
    }

    // How it ends by itself.

    /// At once.
    pub(crate) fn exit(self, code: i32) -> Self {
        self.end(End::Exit(code))
    }

    /// When all its descendants are up.
    pub(crate) fn exit_when_up(self, code: i32) -> Self {
        self.end(End::WhenUp(code))
    }

    /// By this signal, when all its descendants are up.
    pub(crate) fn killed_by(self, signal: i32) -> Self {
        self.end(End::KilledBy(signal))
    }

    /// When the test says `Running::let_go(NAME)`.
    pub(crate) fn exit_on_go(self, code: i32) -> Self {
        self.end(End::OnGo(code))
    }

    fn end(mut self, end: End) -> Self {
        self.0.end = end;
        self
    }

    /// Processes described, this one with all below.
    pub(crate) fn count(&self) -> usize {
        self.0.count()
    }

    /// The full names of all nodes that end `on_go`.
    pub(super) fn waiting_for_go(&self) -> Vec<String> {
        fn collect(spec: &Spec, suffix: &str, found: &mut Vec<String>) {
            for copy in 0..spec.copies {
                let suffix = if spec.copies > 1 { format!("{suffix}#{copy}") } else { suffix.to_owned() };
                if matches!(spec.end, End::OnGo(_)) {
                    found.push(format!("{}{suffix}", spec.name));
                }
                spec.children.iter().for_each(|child| collect(child, &suffix, found));
            }
        }
        let mut found = Vec::new();
        collect(&self.0, "", &mut found);
        found
    }
}

const BOMB_UIDS: u32 = 1_000_000;

/// A uid that no other bomb of this machine has now.
pub(crate) fn bomb_uid() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    BOMB_UIDS + std::process::id() * 16 + NEXT.fetch_add(1, Ordering::Relaxed) % 16
}
