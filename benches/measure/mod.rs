//! What is measured.

mod cgroup_bomb;
mod early_stop;
mod empty_stop;
mod endings;
mod idle;
mod reap;
mod start;

use std::ffi::OsString;
use std::io;
use std::thread;
use std::time::Duration;

use libc::pid_t;

use crate::bed::Scene;
use crate::bed::clock::now;
use crate::bed::peer::Peer;
use crate::bed::procfs;
use crate::bed::program::Program;
use crate::bed::table::Table;

/// A measure that can be asked for by name.
pub(crate) struct Measure {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) take: fn(&Scene<'_>) -> io::Result<Vec<Table>>,
}

/// All measures, in the order of a full run.
pub(crate) const MEASURES: &[Measure] = &[
    Measure { name: "start", what: "time added to a bare /bin/true", take: start::take },
    Measure { name: "memory", what: "PSS and private dirty pages when idle", take: idle::memory },
    Measure { name: "early-stop", what: "SIGTERM right after the start: how many are lost", take: early_stop::take },
    Measure { name: "reap", what: "CPU per reaped orphan, zombies meanwhile", take: reap::take },
    Measure { name: "empty-stop", what: "SIGTERM to exit, nothing left behind", take: empty_stop::take },
    Measure { name: "mass", what: "1,200 orphans that die of SIGTERM", take: endings::mass },
    Measure { name: "chains", what: "64 fork-and-exit chains", take: endings::chains },
    Measure { name: "bomb", what: "a wide fork bomb, each process in its own session", take: endings::bomb },
    Measure {
        name: "cgroup-bomb",
        what: "the same bomb in a cgroup, beside a bare cgroup.kill",
        take: cgroup_bomb::take,
    },
    Measure { name: "idle", what: "wake-ups while nothing happens", take: idle::wake_ups },
];

/// Starts `sleep` for ever below `peer`, and waits until it runs.
fn start_sleep(peer: &Peer, number: usize) -> io::Result<pid_t> {
    let (command, seconds) = sleep(number);
    let pid = Program::new(peer.running(&command))?.start()?;
    let until = now() + 5_000_000_000;
    while !procfs::pids().into_iter().any(|pid| is_sleep(pid, &seconds)) {
        if now() > until {
            return Err(io::Error::other(format!("{} did not start its service in 5 s", peer.name)));
        }
        thread::sleep(Duration::from_micros(500));
    }
    Ok(pid)
}

/// A service that would run for ever, and the argument that tells it from others.
fn sleep(number: usize) -> ([OsString; 2], String) {
    let seconds = (1_000_000 + number).to_string();
    (["sleep".into(), seconds.clone().into()], seconds)
}

/// Whether `pid` is that service itself, and not what runs it.
fn is_sleep(pid: pid_t, seconds: &str) -> bool {
    let arguments = procfs::arguments(pid);
    arguments.first().is_some_and(|name| name == "sleep") && arguments.get(1).is_some_and(|word| word == seconds)
}

/// Who has a turn when: each once per round, and in the rounds after one another in different company.
fn turns(number: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..number).map(move |at| {
        let turn = (at + round / 2) % number;
        if round.is_multiple_of(2) { turn } else { number - 1 - turn }
    })
}
