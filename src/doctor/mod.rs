//! `supervise doctor`: what this kernel, container and user can offer, and which promises follow.
//!
//! `probe` looks, `promise` concludes, `text` shows. What can be tried is tried, in a harmless way, and in a forked
//! child (`trial`) where it would change us: a version of the kernel says little about what a container's filter lets
//! through. Nothing stays behind: no process, cgroup or directory.

mod probe;
mod promise;
mod text;
mod trial;

use promise::{Promise, Way};
use serde::{Serialize, Serializer};
use std::fmt;

/// The version of the data that `--json` gives.
const SCHEMA: u32 = 1;

/// What is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    PidOne,
    Root,
    Subreaper,
    EmptinessProof,
    Events,
    Guard,
    SignalOtherUsers,
    Proc,
    ProcOfOthers,
    ProcChildren,
    PidfdSendSignal,
    PidfdOpen,
    PidfdGroupSignal,
    Cgroup,
    CgroupKill,
    CgroupFreeze,
    PidsController,
    CloneIntoCgroup,
    PidNamespace,
    UserNamespace,
    PrivateProc,
    RuntimeDirectory,
    Precedence,
    NprocLimit,
    OomScore,
    CloseRange,
}

impl Subject {
    /// What it is called in both forms; never changed.
    fn name(self) -> &'static str {
        match self {
            Subject::PidOne => "pid-one",
            Subject::Root => "root",
            Subject::Subreaper => "subreaper",
            Subject::EmptinessProof => "emptiness-proof",
            Subject::Events => "events",
            Subject::Guard => "guard",
            Subject::SignalOtherUsers => "signal-other-users",
            Subject::Proc => "proc",
            Subject::ProcOfOthers => "proc-of-others",
            Subject::ProcChildren => "proc-children",
            Subject::PidfdSendSignal => "pidfd-send-signal",
            Subject::PidfdOpen => "pidfd-open",
            Subject::PidfdGroupSignal => "pidfd-group-signal",
            Subject::Cgroup => "cgroup",
            Subject::CgroupKill => "cgroup-kill",
            Subject::CgroupFreeze => "cgroup-freeze",
            Subject::PidsController => "pids-controller",
            Subject::CloneIntoCgroup => "clone-into-cgroup",
            Subject::PidNamespace => "pid-namespace",
            Subject::UserNamespace => "user-namespace",
            Subject::PrivateProc => "private-proc",
            Subject::RuntimeDirectory => "runtime-directory",
            Subject::Precedence => "precedence",
            Subject::NprocLimit => "nproc-limit",
            Subject::OomScore => "oom-score",
            Subject::CloseRange => "close-range",
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for Subject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// What was found out about one of them.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    name: Subject,
    available: bool,
    /// What it is or does; where it is not available, why, and what can be done.
    detail: String,
}

/// All that is known and follows.
#[derive(Debug, Serialize)]
struct Examination {
    schema: u32,
    kernel: String,
    auto: Way,
    findings: Vec<Finding>,
    promises: Vec<Promise>,
}

/// Looks, and gives what there is to be printed.
pub fn examine(as_json: bool) -> String {
    let findings = probe::look();
    let promises = promise::promises(&findings);
    let auto = promise::auto(&findings);
    let examination = Examination { schema: SCHEMA, kernel: probe::kernel(), auto, findings, promises };
    if as_json {
        // Strings, booleans and a number: there is nothing that could not be written as JSON.
        serde_json::to_string_pretty(&examination).map(|text| text + "\n").unwrap_or_default()
    } else {
        text::page(&examination)
    }
}
