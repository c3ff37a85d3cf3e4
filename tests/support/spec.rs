//! What one process of a test's tree is asked to be.
//!
//! The data both sides share: the tree DSL (`tree.rs`) writes it, the node program (`node/`) plays it. It decides
//! nothing. See `tree.rs` for what each field is for.
#![allow(dead_code, reason = "the test crates write these, the node program reads them")]

use serde::{Deserialize, Serialize};

/// How a process comes into the world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Birth {
    #[default]
    Fork,
    /// CLONE_VM and CLONE_VFORK: the parent is suspended as long as this process lives.
    Vfork,
    Clone3,
    /// A sibling of its maker.
    CloneParent,
    /// The signal the parent gets at its end, instead of SIGCHLD; 0 for none.
    CloneSignal(i32),
    /// Forked twice, the one between has exited: its parent is the nearest subreaper.
    Orphan,
    /// Forked twice with setsid between.
    Daemon,
}

/// What a caught signal makes a process do, after it has told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Act {
    Report,
    Exit(i32),
    Newborn(Born),
    NewbornThenExit(Born, i32),
    /// Wait for all own children to end, then exit.
    DrainThenExit(i32),
}

/// The newborn of [`Act::Newborn`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Born {
    /// Bit n-1: ignores signal n.
    pub(crate) ignored: u64,
    pub(crate) setsid: bool,
}

/// How a process ends by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    #[default]
    Never,
    /// At once, its children may not be up yet.
    Exit(i32),
    /// When all its described descendants are up.
    WhenUp(i32),
    /// The same, by a signal.
    KilledBy(i32),
    /// When the test lets it go.
    OnGo(i32),
}

/// Processes that come and go without being described one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Burst {
    /// Processes that fork and exit for ever.
    Chains { count: u32, sessions: bool },
    /// Every process forks for ever, each in a session of its own, as `uid` under RLIMIT_NPROC `cap`.
    Wide { uid: u32, cap: u64 },
    /// `total` orphans that end at once, `batch` of them from each process between.
    Churn { total: u32, batch: u32 },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Traced {
    #[default]
    No,
    /// PTRACE_TRACEME, stopped.
    ByParent,
    /// Seized and stopped by the sibling made right after it, which has `traces_elder`.
    ByYounger,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) copies: u32,
    pub(crate) birth: Birth,
    pub(crate) setsid: bool,
    pub(crate) own_group: bool,
    pub(crate) comm: Option<Vec<u8>>,
    pub(crate) argv: Vec<String>,
    pub(crate) subreaper: bool,
    pub(crate) uid: Option<u32>,
    pub(crate) ignores: Vec<i32>,
    pub(crate) blocks: Vec<i32>,
    pub(crate) on: Vec<(i32, Act)>,
    pub(crate) stopped: bool,
    pub(crate) traced: Traced,
    pub(crate) traces_elder: bool,
    pub(crate) leader_exits: bool,
    pub(crate) closes: Vec<i32>,
    pub(crate) says: String,
    pub(crate) burst: Option<Burst>,
    pub(crate) end: End,
    pub(crate) children: Vec<Spec>,
}

impl Spec {
    /// Processes that will say `up`: itself with all below, times its copies.
    pub(crate) fn count(&self) -> usize {
        self.copies as usize * (1 + self.below())
    }

    /// Described descendants of one copy.
    pub(crate) fn below(&self) -> usize {
        self.children.iter().map(Spec::count).sum()
    }
}

/// The file `spec.json` in a run's directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tree {
    /// The node program, for nodes that are exec'd.
    pub(crate) node: String,
    pub(crate) root: Spec,
}
