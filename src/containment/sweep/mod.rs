//! The leftovers of earlier invocations of the same name, found and ended before a named run starts anything.
//!
//! They are not our children: nothing of them falls to us, nobody tells us of their end for sure, and a number may be
//! another's at any time. So only who is proven to be one of them is touched, and each is held by its directory in `/proc`
//! while it is signalled. The proofs, of which one is enough:
//!
//! * *mark*: its environment names an earlier invocation, or this very run's name (`proof`);
//! * *record*: it is the recorded main process or in the session which that one still leads, or the recorded supervisor;
//! * *cgroup*: it is in the recorded cgroup;
//! * *descent*: its parent is one of them.
//!
//! That nobody is left is as good as a look at everybody can be, and no better: it is no ECHILD. What has thrown its
//! environment away and lost its parents before we saw it is not found.

mod ends;
mod members;
mod proof;
#[cfg(test)]
mod tests;

use super::leftover::Leftovers;
use super::walk::hold;
use crate::process::proc::{Proc, Stat, Unusable};
use crate::process::{Pid, names};
use crate::runtime::{Invocation, Name};
use crate::signal::Signal;
use ends::Ends;
use members::{Key, Look, Members, key};
use proof::Here;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// How long names are read at the most, as in `lineage`.
const NAMING_TIME: Duration = Duration::from_millis(500);

/// The most looks after which nobody is said to be left while others come and go, and the longest that they take in all. A
/// chain of processes that fork and exit is seen by one of many looks.
const MOST_LOOKS: u32 = 40;
const LONGEST_LOOKING: Duration = Duration::from_millis(300);

/// The most rounds of one killing.
const MOST_ROUNDS: u32 = 24;

/// The most rounds in which they are stopped before they are killed.
const MOST_STOPS: u32 = 4;

/// Whose leftovers are looked for.
#[derive(Clone, Debug)]
pub struct Scope {
    /// The name of the run.
    pub name: Name,
    /// Our effective user id.
    pub uid: u32,
    /// The UUID of this invocation, which is never touched.
    pub present: String,
    /// The earlier invocations that are recorded.
    pub former: Vec<Invocation>,
    /// Whether kept processes are left alone.
    pub allow_keep: bool,
    /// Processes of ours besides this one, such as the guard. They and their descendants are never touched, nor is any process
    /// above us.
    pub ours: Vec<Pid>,
}

impl Scope {
    /// What SUPERVISE_NAME says in the environment of this run's service.
    pub fn mark_of_name(&self) -> String {
        self.name.mark(self.uid)
    }
}

/// What a look says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Everybody was looked at, and nobody is one of them and alive. The dead do not count: they are their parents' to reap.
    Nobody,
    /// Somebody is alive.
    Somebody,
    /// Nobody alive was found, but there was no time to look at everybody.
    Unfinished,
    /// Without a `/proc` nobody can be looked for, now or later.
    Blind,
}

/// The search for leftovers of earlier invocations, and their end.
#[derive(Debug)]
pub struct Sweep {
    proc: Result<Proc, Unusable>,
    members: Members,
    ends: Ends,
    leftovers: Leftovers,
    asked: BTreeSet<Key>,
    stopped: BTreeSet<Key>,
    killed: BTreeSet<Key>,
    warnings: Vec<String>,
    /// Whether it was said already that somebody cannot be read.
    told_of_unreadable: bool,
}

impl Sweep {
    /// Looks around; nobody is looked for yet. To be called by the holder of the name's lock only: else another run of this
    /// name may be alive, and would be taken for a leftover.
    ///
    /// # Errors
    /// When there is no descriptor to be had.
    pub fn new(scope: Scope) -> io::Result<Sweep> {
        let proc = Proc::open();
        let here = proc.as_ref().map_or_else(|_| Here::default(), |proc| Here::look_around(proc, scope.uid));
        let warnings = blindness(&proc).into_iter().collect();
        Ok(Sweep {
            proc,
            members: Members::new(scope, here),
            ends: Ends::new()?,
            leftovers: Leftovers::default(),
            asked: BTreeSet::new(),
            stopped: BTreeSet::new(),
            killed: BTreeSet::new(),
            warnings,
            told_of_unreadable: false,
        })
    }

    /// Looks for members again. Breaks off at `until`.
    pub fn look(&mut self, until: Instant) -> Found {
        // Who was no member at an earlier look may have become one by an exec.
        let mut is_old_news = self.members.knows_others();
        let mut looks = 0;
        let began = Instant::now();
        loop {
            let Some(look) = self.find(until) else { return Found::Blind };
            looks += 1;
            if !look.living.is_empty() {
                self.name(&look.living, until);
                return Found::Somebody;
            }
            let proc = self.proc.as_ref();
            if proc.is_ok_and(|proc| self.members.has_populated_cgroup(proc)) {
                // Somebody of another pid namespace, who has no number here.
                return Found::Somebody;
            }
            if !look.finished {
                return Found::Unfinished;
            }
            if std::mem::take(&mut is_old_news) {
                self.members.forget_others();
            } else if !look.somebody_vanished || looks >= MOST_LOOKS || began.elapsed() >= LONGEST_LOOKING {
                return Found::Nobody;
            }
        }
    }

    /// Sends SIGTERM to each that was not told yet, then SIGCONT, since one that is stopped takes the first only after the
    /// second; the oldest first. Not to a supervisor, which is about to end its tree by itself.
    pub fn terminate(&mut self, until: Instant) {
        let Some(look) = self.find(until) else { return };
        // All of them by name before the first is signalled: the dead have no name.
        self.name(&look.living, until);
        for stat in &look.living {
            if !self.members.is_supervisor(stat) && self.asked.insert(key(stat)) {
                self.send(stat, Signal::TERM);
                self.send(stat, Signal::CONT);
            }
        }
    }

    /// Sends SIGKILL to each, round after round until one finds nobody new, or until `until`.
    ///
    /// They are stopped first, until nobody is new: whoever dies leaves its children to others, and what they are would not be
    /// seen any more. After SIGSTOP a process makes at most the one that it is about to make.
    pub fn kill(&mut self, until: Instant) {
        if let Some(look) = self.members.has_cgroups().then(|| self.find(until)).flatten() {
            // By name first, and by hand afterwards: whoever is not in a cgroup, or where it cannot be killed as a whole.
            self.name(&look.living, until);
            let Ok(proc) = &self.proc else { return };
            for stat in self.members.kill_cgroups(proc, &look.living) {
                self.leftovers.tell(stat.pid, Signal::KILL);
            }
        }
        let mut stops = 0;
        for round in 1..=MOST_ROUNDS {
            let Some(look) = self.find(until) else { return };
            let is_last = round == MOST_ROUNDS || Instant::now() >= until;
            let not_killed = look.living.into_iter().filter(|stat| !self.killed.contains(&key(stat)));
            let left: Vec<Stat> = not_killed.collect();
            if left.is_empty() {
                return;
            }
            if !is_last && stops < MOST_STOPS && self.stop(&left) {
                stops += 1;
                continue;
            }
            stops = 0;
            self.name_all(&left, until);
            // Children first: a group that loses its parents would be told to go on (setpgid(2), orphaned groups).
            for stat in left.iter().rev() {
                self.killed.insert(key(stat));
                self.send(stat, Signal::KILL);
            }
            if is_last {
                return;
            }
        }
    }

    /// Stops those that were not stopped yet. True when it has to be seen what that brings: somebody is new, or still on its
    /// way to a stop.
    fn stop(&mut self, left: &[Stat]) -> bool {
        let mut is_settled = true;
        for stat in left {
            if self.stopped.insert(key(stat)) {
                is_settled = false;
                self.send(stat, Signal::STOP);
            } else {
                // One that waits in the kernel makes none.
                is_settled &= matches!(stat.state, 'T' | 't' | 'D');
            }
        }
        !is_settled
    }

    /// Takes down who is left. False when nobody is found.
    pub fn name_survivors(&mut self) -> bool {
        let until = Instant::now() + NAMING_TIME;
        let Some(look) = self.find(until) else { return false };
        self.name_all(&look.living, until);
        let Ok(proc) = &self.proc else { return false };
        let mut found = false;
        for stat in look.living {
            let held = hold(proc, stat.pid).filter(|(_, now)| now.start == stat.start && !now.is_zombie());
            if let Some((process, now)) = held {
                found = true;
                self.leftovers.survived(now.pid, now.state, process.wchan());
            }
        }
        found
    }

    /// An epoll descriptor that is readable when one of the members has ended. Without pidfd_open (before Linux 5.3, or refused)
    /// there is nobody in it, and beyond some hundred members not all are at once: look again at times.
    pub fn descriptor(&self) -> RawFd {
        self.ends.descriptor()
    }

    /// Takes what the descriptor told, so that it is not readable for ever. True when somebody has ended.
    pub fn drain(&mut self) -> bool {
        self.ends.drain()
    }

    /// What limits the search, for people; each is told once.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Removes the cgroups of earlier invocations, and gives everyone who was left, for the report.
    pub fn into_leftovers(mut self) -> Leftovers {
        self.members.remove_cgroups();
        let kept = self.members.take_kept();
        self.name_all(&kept, Instant::now() + NAMING_TIME);
        kept.iter().for_each(|stat| self.leftovers.keep(stat.pid));
        self.leftovers
    }

    /// Nothing without a `/proc`.
    fn find(&mut self, until: Instant) -> Option<Look> {
        let Sweep { proc, members, ends, warnings, .. } = self;
        let proc = proc.as_ref().ok()?;
        let look = members.look(proc, until);
        ends.watch(proc, &look.living);
        if let Some(pid) = members.unreadable().next()
            && !std::mem::replace(&mut self.told_of_unreadable, true)
        {
            warnings.push(format!(
                "pid {pid} keeps everybody waiting who reads its environment; if it is left of an earlier run, it stays"
            ));
        }
        Some(look)
    }

    /// Takes those down by name that are new. A supervisor is one to be told of only when it has to be killed.
    fn name(&mut self, living: &[Stat], until: Instant) {
        let new = living.iter().filter(|stat| !self.members.is_supervisor(stat) && !self.leftovers.knows(stat));
        let new: Vec<Stat> = new.cloned().collect();
        self.name_all(&new, until);
    }

    /// Takes them down by name, or by the name that they have now: who was seen between its fork and its exec had that of its
    /// parent.
    fn name_all(&mut self, living: &[Stat], until: Instant) {
        let Sweep { proc, leftovers, .. } = self;
        let Ok(proc) = proc else { return };
        let limit = NAMING_TIME.min(until.saturating_duration_since(Instant::now()));
        let mut names = names::read(proc, living, limit);
        for stat in living {
            if !leftovers.knows(stat) {
                leftovers.add(stat, names.remove(&stat.pid).unwrap_or_default());
            }
        }
        leftovers.rename(names);
    }

    /// Signals this very process, if it is alive: the dead take every signal, and it would be said that it ended them.
    fn send(&mut self, seen: &Stat, signal: Signal) {
        let Ok(proc) = &self.proc else { return };
        let held = hold(proc, seen.pid).filter(|(_, now)| now.start == seen.start && !now.is_zombie());
        let Some((process, _)) = held else { return };
        match process.signal(seen.pid, signal) {
            Ok(()) if [Signal::TERM, Signal::KILL].contains(&signal) => self.leftovers.tell(seen.pid, signal),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => self.leftovers.deny(seen.pid),
            // Gone meanwhile: what was wanted.
            _ => {}
        }
    }
}

/// What cannot be seen here, for people.
fn blindness(proc: &Result<Proc, Unusable>) -> Option<String> {
    match proc {
        Err(Unusable::NotMounted) => {
            Some("/proc is not mounted: nobody can look for what earlier runs of this name left".to_owned())
        }
        Err(Unusable::OtherNamespace) => {
            Some("/proc is of another pid namespace: nobody can look for what earlier runs of this name left".to_owned())
        }
        // There always is one, and its stat is everybody's to read unless others are hidden.
        Ok(proc) if hold(proc, 1).is_none() => Some(
            "/proc hides the processes of others (hidepid): what earlier runs of this name left to another user is not found"
                .to_owned(),
        ),
        Ok(_) => None,
    }
}
