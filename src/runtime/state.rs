//! What is recorded of an invocation, so that the next one can prove what is left of it.

use crate::process::Pid;
use crate::process::proc::Proc;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::PathBuf;

/// The format; a record of another one is not understood.
const VERSION: u32 = 1;

/// One process, for as long as this kernel runs: a number that was given away again has another start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its number.
    pub pid: Pid,
    /// When it started, in clock ticks since boot (proc_pid_stat(5)).
    pub start: u64,
}

impl Identity {
    /// Who has this number now; nothing when it is nobody, or when `/proc` cannot say.
    pub fn find(pid: Pid) -> Option<Identity> {
        let stat = Proc::open().ok()?.process(pid).ok()?.stat().ok()?;
        Some(Identity { pid, start: stat.start })
    }
}

/// What is known of an invocation that is not proven to be all gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invocation {
    /// Its UUID, as its processes have it in SUPERVISE_INVOCATION.
    pub id: String,
    /// The boot that it was in (random(4)); empty when it could not be read.
    pub boot: String,
    /// The pid namespace that its numbers are of; 0 when it could not be read.
    pub pid_namespace: u64,
    /// The process that supervised it.
    pub supervisor: Option<Identity>,
    /// The main process.
    pub main: Option<Identity>,
    /// Whether the main process leads a session of its own, whose number is its own then.
    #[serde(default)]
    pub own_session: bool,
    /// Its cgroup, as a directory.
    pub cgroup: Option<PathBuf>,
    /// Those that could not be ended: what proved them to be of it may be gone by the next time.
    #[serde(default)]
    pub survivors: Vec<Identity>,
}

impl Invocation {
    /// One that begins here and now; nothing of it is started yet.
    pub fn begin(id: String) -> Invocation {
        let proc = Proc::open().ok();
        let boot = proc.as_ref().and_then(|proc| proc.boot_id().ok()).unwrap_or_default();
        let us = nix::unistd::getpid().as_raw();
        let pid_namespace = proc.and_then(|proc| proc.process(us).ok()?.pid_namespace()).unwrap_or(0);
        Invocation {
            id,
            boot,
            pid_namespace,
            supervisor: None,
            main: None,
            own_session: false,
            cgroup: None,
            survivors: vec![],
        }
    }

    /// Whether its numbers mean to us what they meant to it.
    pub fn has_our_numbers(&self, boot: &str, pid_namespace: u64) -> bool {
        !boot.is_empty() && pid_namespace != 0 && self.boot == boot && self.pid_namespace == pid_namespace
    }
}

#[derive(Serialize, Deserialize)]
struct State {
    version: u32,
    invocations: Vec<Invocation>,
}

pub(super) fn encode(invocations: &[Invocation]) -> io::Result<Vec<u8>> {
    Ok(serde_json::to_vec(&State { version: VERSION, invocations: invocations.to_vec() })?)
}

/// Else says for people why it cannot be read.
pub(super) fn decode(text: &[u8]) -> Result<Vec<Invocation>, String> {
    let state: State = serde_json::from_slice(text).map_err(|why| format!("it is damaged ({why})"))?;
    if state.version != VERSION {
        return Err(format!("it is of version {}, and this program knows version {VERSION}", state.version));
    }
    Ok(state.invocations)
}
