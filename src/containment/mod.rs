//! What holds the tree together, so that all of it can be ended.
//!
//! The contract, whatever the means:
//!
//! * *enter*: all that the service makes is inside, from its first instruction on;
//! * *signal* and *kill*: may be repeated at will, reach what was born meanwhile, and never touch a process that may not
//!   be of the tree;
//! * *is empty*: said only when proven.
//!
//! [`lineage`] is always on. A [`cgroup`] comes on top where there can be one: it reaches also whom we may not signal, and
//! outlives us all. In a [`pid_namespace`] we are PID 1, and the kernel ends everybody with us. What earlier invocations
//! of a named run left is nobody's tree any more; [`sweep`] finds it.

pub mod cgroup;
mod keep;
pub mod leftover;
pub mod lineage;
pub mod pid_namespace;
mod send;
mod strangers;
pub mod sweep;
mod walk;

use crate::process::Pid;
use crate::process::reap::Left;
use crate::process::spawn::Destined;
use crate::process::terminal::Placement;
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use cgroup::{Cgroup, Killed};
use leftover::Leftovers;
use lineage::Lineage;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// While the cgroup is dying, who is outside of it is looked for no more often than this.
const BETWEEN_WALKS: Duration = Duration::from_millis(100);

/// The tree of a service, and all that holds it.
#[derive(Debug)]
pub struct Containment {
    lineage: Lineage,
    cgroup: Option<Held>,
}

#[derive(Debug)]
struct Held {
    cgroup: Cgroup,
    /// Whether a service is not to be started outside of it.
    must: bool,
    /// Becomes ready when somebody comes in or the last one goes; opened when that is to be known.
    events: Option<OwnedFd>,
    /// When it was killed first, and who is outside of it was looked for last.
    killed: Option<Instant>,
}

impl Held {
    /// What the kernel says. Asking the descriptor of the events arms it again.
    fn is_populated(&self) -> bool {
        let answer = match &self.events {
            Some(events) => cgroup::populated(events.as_fd()),
            None => self.cgroup.is_populated(),
        };
        // What cannot be asked may have somebody in it.
        answer.unwrap_or(true) && !self.has_us_alone()
    }

    fn members(&self) -> Vec<Pid> {
        self.cgroup.members().unwrap_or_default()
    }

    /// A service with the rights may have put us into it, which frozen or killed as a whole would take us with it.
    fn has_us(&self) -> bool {
        // A list that cannot be read may have us in it.
        self.cgroup.members().map_or(true, |members| members.into_iter().any(is_one_of_us))
    }

    fn has_us_alone(&self) -> bool {
        let members = self.members();
        !members.is_empty() && members.into_iter().all(is_one_of_us)
    }
}

/// Ourselves, or the process above us, which is the guard where there is one.
fn is_one_of_us(pid: Pid) -> bool {
    [nix::unistd::getpid(), nix::unistd::getppid()].iter().any(|us| us.as_raw() == pid)
}

impl Containment {
    /// Descent alone.
    pub fn new(lineage: Lineage) -> Containment {
        Containment { lineage, cgroup: None }
    }

    /// With a cgroup on top, in which the service must be, or is to be if that can be done.
    pub fn hold(&mut self, cgroup: Cgroup, must: bool) {
        self.cgroup = Some(Held { cgroup, must, events: None, killed: None });
    }

    /// What it is called.
    pub fn name(&self) -> &'static str {
        match (&self.cgroup, self.lineage.is_init()) {
            (Some(_), _) => "cgroup",
            (None, true) => "pidns",
            (None, false) => "lineage",
        }
    }

    /// Whether we are PID 1.
    pub fn is_init(&self) -> bool {
        self.lineage.is_init()
    }

    /// The cgroup, if there is one.
    pub fn cgroup(&self) -> Option<&Cgroup> {
        self.cgroup.as_ref().map(|held| &held.cgroup)
    }

    /// Becomes ready, with priority, when the cgroup may be empty.
    pub fn events(&mut self) -> Option<RawFd> {
        let held = self.cgroup.as_mut()?;
        held.events = held.events.take().or_else(|| held.cgroup.events().ok());
        held.events.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// The descriptors that have to stay open.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let directory = self.cgroup.as_ref().map(|held| held.cgroup.descriptor().as_raw_fd());
        let events = self.cgroup.as_ref().and_then(|held| held.events.as_ref()).map(AsRawFd::as_raw_fd);
        self.lineage.descriptor().into_iter().chain(directory).chain(events)
    }

    /// Where the service is to be made.
    pub fn destined(&self) -> Option<Destined<'_>> {
        let Held { cgroup, must, .. } = self.cgroup.as_ref()?;
        Some(Destined { cgroup, must: *must })
    }

    /// The descriptor of the cgroup, for the guard.
    pub fn for_the_guard(&self) -> Option<BorrowedFd<'_>> {
        self.cgroup.as_ref().map(|held| held.cgroup.descriptor())
    }

    /// Leaves kept processes alone from now on.
    pub fn allow_keep(&mut self) {
        self.lineage.allow_keep();
    }

    /// Whether kept processes are left alone.
    pub fn allows_keep(&self) -> bool {
        self.lineage.allows_keep()
    }

    /// Takes the main process in.
    pub fn started(&mut self, main: Pid, placement: Placement) {
        self.lineage.started(main, placement);
    }

    /// Takes the supervisor in, for its guard.
    pub fn guards(&mut self, supervisor: Pid, own_session: bool) {
        self.lineage.guards(supervisor, own_session);
    }

    /// Notes who is with us while the supervisor lives, and so is not of the service.
    pub fn note_those_from_outside(&self) {
        self.lineage.note_those_from_outside();
    }

    /// Notes that a direct child ended and was reaped.
    pub fn reaped(&mut self, pid: Pid, exit: Exit) {
        self.lineage.reaped(pid, exit);
    }

    /// Whether it is proven that nobody is left, given what waiting has just said.
    pub fn is_empty(&self, left: Left) -> bool {
        // Who was put into the cgroup from outside is nobody's child here.
        self.lineage.is_empty(left) && !self.is_populated()
    }

    fn is_populated(&self) -> bool {
        self.cgroup.as_ref().is_some_and(Held::is_populated)
    }

    /// Sends a signal to the main process; nothing when it is reaped.
    pub fn signal_main(&self, signal: Signal) {
        self.lineage.signal_main(signal);
    }

    /// Sends a signal to the main process and its group.
    pub fn signal_group(&mut self, signal: Signal) {
        self.lineage.signal_group(signal);
    }

    /// Sends a signal to the main process first and then to everything below it.
    pub fn signal_tree(&mut self, signal: Signal) {
        self.lineage.signal_tree(signal);
    }

    /// Asks every leftover to end that was not asked yet.
    pub fn terminate_leftovers(&mut self, until: Instant) {
        self.lineage.terminate_leftovers(until);
        if let Some(held) = &self.cgroup {
            let others = || held.members().into_iter().filter(|pid| !is_one_of_us(*pid)).collect();
            self.lineage.terminate_others(others);
        }
    }

    /// Sends SIGKILL to all that is left, the main process included. Breaks off at `until`.
    pub fn kill_tree(&mut self, until: Instant) {
        let Some(held) = self.cgroup.as_mut().filter(|held| !held.has_us()) else {
            return self.lineage.kill_tree(until);
        };
        let is_first = held.killed.is_none();
        if is_first {
            // With nobody being born there is time to read the names.
            held.cgroup.stop_births();
            self.lineage.name_before_the_kill(until);
            self.lineage.tell_of_the_kill(&held.members());
        }
        let killed = held.cgroup.kill();
        if let (true, Killed::OneByOne { refused, .. }) = (is_first, &killed) {
            let refused = refused.as_ref().map(|why| format!(" ({})", crate::log::reason(why))).unwrap_or_default();
            info!("cgroup.kill cannot be used here; the members of the cgroup are killed one by one{refused}");
        }
        // Whoever left the cgroup is still below us.
        let is_due = held.killed.is_none_or(|last| last.elapsed() >= BETWEEN_WALKS);
        if is_due || !held.is_populated() {
            held.killed = Some(Instant::now());
            if !is_first {
                self.lineage.kill_tree(until);
            }
        }
    }

    /// Takes down who is left. False when nobody is found.
    pub fn name_survivors(&mut self) -> bool {
        let members = self.cgroup.as_ref().map(Held::members).unwrap_or_default();
        let others: Vec<Pid> = members.into_iter().filter(|pid| !is_one_of_us(*pid)).collect();
        self.lineage.name_survivors(&others)
    }

    /// Removes the cgroup and gives everyone who was left, for the report.
    pub fn into_leftovers(self) -> Leftovers {
        if let Some(Held { cgroup, .. }) = self.cgroup
            && let Err(why) = cgroup.remove()
        {
            warn!("the cgroup {} stays: {}", cgroup.path().display(), crate::log::reason(&why));
        }
        self.lineage.into_leftovers()
    }
}
