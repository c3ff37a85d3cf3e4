//! Who is of an earlier invocation, each with its proof.
//!
//! A process stays a member once it was proven one: its number and its start time together are its own. What is no proof any
//! more (a parent that has gone, a session whose leader has gone) is not needed for it then.

use super::Scope;
use super::proof::{Here, is_leftover};
use crate::containment::cgroup::Cgroup;
use crate::containment::walk::hold;
use crate::process::Pid;
use crate::process::marks::{self, Marks};
use crate::process::proc::{Proc, Process, Stat};
use crate::runtime::{Identity, Invocation};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use tracing::debug;

/// How often one process may keep the reader of environments waiting before it counts as one that cannot be read.
const MOST_WAITS: u32 = 2;

/// How many directories are held open at once, as in `walk`.
const MOST_HELD: usize = 128;

/// The most parents between a process and us: far more than there are, and an end where numbers were reused in a circle.
const DEEPEST: usize = 4096;

/// One process, for ever.
pub(super) type Key = (Pid, u64);

pub(super) fn key(stat: &Stat) -> Key {
    (stat.pid, stat.start)
}

/// The members, and what was found out about others.
#[derive(Debug)]
pub(super) struct Members {
    scope: Scope,
    here: Here,
    /// The earlier invocations whose numbers mean to us what they meant to them.
    recorded: Vec<Invocation>,
    proven: BTreeMap<Pid, Stat>,
    /// Supervisors of earlier invocations: they would end their own trees, so they are no ones to be told.
    supervisors: BTreeSet<Key>,
    /// Those whose environment was read and is no proof.
    others: BTreeSet<Key>,
    /// Those that kept the reader waiting, and how often.
    waits: BTreeMap<Key, u32>,
    /// The cgroups of earlier invocations.
    cgroups: Vec<Cgroup>,
    /// Those that are kept, of whichever invocation.
    all_kept: BTreeSet<Key>,
    /// The kept ones that are of an earlier invocation.
    kept: Vec<Stat>,
}

/// What one look found.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Members that are alive, the oldest first.
    pub(super) living: Vec<Stat>,
    /// Whether everything was looked at that there was time for.
    pub(super) finished: bool,
    /// Whether somebody went away while we looked: there may be somebody whom he made behind our back.
    pub(super) somebody_vanished: bool,
}

/// Everybody, as they were a moment ago.
struct Crowd<'a> {
    proc: &'a Proc,
    stats: BTreeMap<Pid, Stat>,
    /// Ourselves, those that we were told of, and all above us.
    never: BTreeSet<Pid>,
    /// Of these the ones whose descendants are not touched either.
    ours: BTreeSet<Pid>,
}

impl Members {
    pub(super) fn new(scope: Scope, here: Here) -> Members {
        // One that is gone, or that somebody holds, has nobody for us.
        let cgroups = scope.former.iter().filter_map(|former| Cgroup::open(former.cgroup.as_deref()?).ok()).collect();
        let former = scope.former.iter();
        let recorded =
            former.filter(|former| former.has_our_numbers(&here.boot, here.pid_namespace)).cloned().collect();
        Members {
            scope,
            here,
            recorded,
            proven: BTreeMap::new(),
            supervisors: BTreeSet::new(),
            others: BTreeSet::new(),
            waits: BTreeMap::new(),
            cgroups,
            all_kept: BTreeSet::new(),
            kept: vec![],
        }
    }

    pub(super) fn has_cgroups(&self) -> bool {
        !self.cgroups.is_empty()
    }

    /// Whether somebody is in a cgroup that is to be killed as a whole.
    pub(super) fn has_populated_cgroup(&self, proc: &Proc) -> bool {
        let never = self.never(proc);
        let mut wholly_theirs = self.cgroups.iter().filter(|cgroup| is_wholly_theirs(cgroup, &never));
        wholly_theirs.any(|cgroup| cgroup.is_populated().unwrap_or(true))
    }

    /// Kills all that is in the cgroups, except where one of those is that are never touched: a start may come out of what an
    /// earlier run left. Gives those of the living that were in one.
    pub(super) fn kill_cgroups(&mut self, proc: &Proc, living: &[Stat]) -> Vec<Stat> {
        let never = self.never(proc);
        let mut inside = BTreeSet::new();
        for cgroup in self.cgroups.iter_mut().filter(|cgroup| is_wholly_theirs(cgroup, &never)) {
            cgroup.stop_births();
            inside.extend(cgroup.members().unwrap_or_default());
            // Where it cannot be done at once it was done one by one.
            drop(cgroup.kill());
        }
        living.iter().filter(|stat| inside.contains(&stat.pid)).cloned().collect()
    }

    /// They are empty now, or somebody in them could not be ended, who is named.
    pub(super) fn remove_cgroups(&mut self) {
        for cgroup in self.cgroups.drain(..) {
            if let Err(why) = cgroup.remove() {
                debug!("the cgroup {} stays: {why}", cgroup.path().display());
            }
        }
    }

    /// Those of earlier invocations that are left alone.
    pub(super) fn take_kept(&mut self) -> Vec<Stat> {
        std::mem::take(&mut self.kept)
    }

    pub(super) fn is_supervisor(&self, stat: &Stat) -> bool {
        self.supervisors.contains(&key(stat))
    }

    /// Whether there are some whose environment was no proof.
    pub(super) fn knows_others(&self) -> bool {
        !self.others.is_empty()
    }

    /// Forgets them, so that it is read again: an exec gives a process another one.
    pub(super) fn forget_others(&mut self) {
        self.others.clear();
    }

    /// Those whose environment could not be read, as they kept the reader waiting.
    pub(super) fn unreadable(&self) -> impl Iterator<Item = Pid> {
        self.waits.iter().filter(|(_, waits)| **waits >= MOST_WAITS).map(|((pid, _), _)| *pid)
    }

    /// Looks at everybody. Breaks off at `until`.
    pub(super) fn look(&mut self, proc: &Proc, until: Instant) -> Look {
        let mut look = Look { finished: true, ..Look::default() };
        self.refresh(proc);
        let crowd = self.gather(proc, until, &mut look);
        if self.scope.allow_keep {
            self.ask_who_is_kept(&crowd, until, &mut look);
        }
        self.prove_by_record(&crowd);
        self.prove_by_cgroup(&crowd);
        self.prove_by_marks(&crowd, until, &mut look);
        self.prove_by_descent(&crowd, until, &mut look);
        look.living = self.proven.values().cloned().collect();
        look.living.sort_by_key(|stat| (stat.start, stat.pid));
        look
    }

    /// Forgets members that are gone or dead: the dead are their parents' to reap.
    fn refresh(&mut self, proc: &Proc) {
        let known = std::mem::take(&mut self.proven).into_values();
        let alive = known.filter_map(|known| alive(proc, &known)).map(|(_, now)| (now.pid, now));
        self.proven = alive.collect();
    }

    fn gather<'a>(&self, proc: &'a Proc, until: Instant, look: &mut Look) -> Crowd<'a> {
        let mut stats = BTreeMap::new();
        let all = proc.all().unwrap_or_default();
        look.finished &= !all.is_empty();
        for pid in all {
            if Instant::now() >= until {
                look.finished = false;
                break;
            }
            match hold(proc, pid) {
                Some((_, stat)) => _ = stats.insert(pid, stat),
                None => look.somebody_vanished = true,
            }
        }
        Crowd { proc, stats, never: self.never(proc), ours: self.ours() }
    }

    /// We, and those of ours that we were told of.
    fn ours(&self) -> BTreeSet<Pid> {
        // PID 1 is everybody's parent, and no guard of ours.
        let told = self.scope.ours.iter().copied().filter(|pid| *pid > 1);
        told.chain([nix::unistd::getpid().as_raw()]).collect()
    }

    /// The same, and all above us.
    fn never(&self, proc: &Proc) -> BTreeSet<Pid> {
        let mut never = self.ours();
        let mut above = nix::unistd::getpid().as_raw();
        for _ in 0..DEEPEST {
            // Who is known already, as the guard is, has somebody above, too.
            match hold(proc, above).map(|(_, stat)| stat.ppid) {
                Some(parent) if parent > 0 => above = parent,
                _ => break,
            }
            never.insert(above);
        }
        never
    }

    /// Before anybody is proven by anything else.
    fn ask_who_is_kept(&mut self, crowd: &Crowd<'_>, until: Instant, look: &mut Look) {
        let is_new = |stat: &&Stat| !self.all_kept.contains(&key(stat)) && crowd.may_have(stat);
        let mut unknown: Vec<Stat> = crowd.stats.values().filter(is_new).cloned().collect();
        // Parents before their children: who is below a kept one is kept, whatever it did to its environment.
        unknown.sort_by_key(|stat| (stat.start, stat.pid));
        let read = marks::read(crowd.proc, &unknown, until);
        look.finished &= read.finished;
        for stat in unknown {
            let marks = read.marks.get(&stat.pid);
            let parent = crowd.stats.get(&stat.ppid).map(key);
            let is_below_one = parent.is_some_and(|parent| self.all_kept.contains(&parent));
            let is_leftover = marks.is_some_and(|marks| is_leftover(&self.scope, &self.here, marks));
            let is_kept = is_below_one || marks.is_some_and(Marks::is_kept);
            if is_kept && (is_leftover || is_below_one && self.kept.iter().any(|kept| Some(key(kept)) == parent)) {
                self.kept.push(stat.clone());
            }
            if is_kept {
                self.all_kept.insert(key(&stat));
            }
        }
    }

    /// By what was recorded of processes: number and start time, in this boot and this pid namespace.
    fn prove_by_record(&mut self, crowd: &Crowd<'_>) {
        let recorded = std::mem::take(&mut self.recorded);
        for former in &recorded {
            if let Some((leader, stat)) = former.main.and_then(|main| find(crowd.proc, main)) {
                self.prove(crowd, &stat);
                // A zombie keeps its number too; whoever asks it gets an answer until it is reaped.
                if former.own_session && stat.sid == stat.pid {
                    self.prove_session(crowd, &leader, &stat);
                }
            }
            for (_, stat) in former.survivors.iter().filter_map(|survivor| find(crowd.proc, *survivor)) {
                self.prove(crowd, &stat);
            }
            if let Some((holder, stat)) = former.supervisor.and_then(|supervisor| find(crowd.proc, supervisor)) {
                if !self.proven.contains_key(&stat.pid) && self.prove(crowd, &stat) {
                    self.supervisors.insert(key(&stat));
                }
                if self.is_supervisor(&stat) {
                    self.prove_children_of_supervisor(crowd, former, &holder, &stat);
                }
            }
        }
        self.recorded = recorded;
    }

    /// While its leader is not reaped, the number of a session is that session's.
    fn prove_session(&mut self, crowd: &Crowd<'_>, leader: &Process, leads: &Stat) {
        for seen in crowd.stats.values().filter(|seen| seen.sid == leads.pid) {
            if let Some((_, now)) = alive(crowd.proc, seen)
                && now.sid == leads.pid
                && leader.exists()
            {
                self.prove(crowd, &now);
            }
        }
    }

    /// What fell to a supervisor, but not what it had before the service: see `strangers`.
    fn prove_children_of_supervisor(
        &mut self,
        crowd: &Crowd<'_>,
        former: &Invocation,
        holder: &Process,
        supervisor: &Stat,
    ) {
        let Some(main) = former.main else { return };
        for stat in children(crowd, holder, supervisor) {
            if stat.start >= main.start && !(former.own_session && stat.sid == supervisor.sid) {
                self.prove(crowd, &stat);
            }
        }
    }

    /// By the cgroup of an earlier invocation. Its list is read again while each is held, so that no reused number gets in.
    fn prove_by_cgroup(&mut self, crowd: &Crowd<'_>) {
        for some in self.cgroup_members().chunks(MOST_HELD) {
            let held: Vec<_> = some.iter().filter_map(|pid| hold(crowd.proc, *pid)).collect();
            let again: BTreeSet<Pid> = self.cgroup_members().into_iter().collect();
            for (process, stat) in held {
                if again.contains(&stat.pid) && process.exists() {
                    self.prove(crowd, &stat);
                }
            }
        }
    }

    /// The processes in the cgroups of earlier invocations.
    fn cgroup_members(&self) -> Vec<Pid> {
        self.cgroups.iter().flat_map(|cgroup| cgroup.members().unwrap_or_default()).collect()
    }

    /// By what stands in their environment. The reader held each while it read.
    fn prove_by_marks(&mut self, crowd: &Crowd<'_>, until: Instant, look: &mut Look) {
        let is_worth_reading = |stat: &&Stat| {
            let key = key(stat);
            !stat.is_zombie()
                && crowd.may_have(stat)
                && !self.proven.contains_key(&stat.pid)
                && !self.others.contains(&key)
                && self.waits.get(&key).is_none_or(|waits| *waits < MOST_WAITS)
        };
        let unknown: Vec<Stat> = crowd.stats.values().filter(is_worth_reading).cloned().collect();
        if Instant::now() >= until {
            look.finished = false;
            return;
        }
        let read = marks::read(crowd.proc, &unknown, until);
        look.finished &= read.finished;
        for stat in unknown {
            match read.marks.get(&stat.pid) {
                Some(marks) if is_leftover(&self.scope, &self.here, marks) => _ = self.prove(crowd, &stat),
                Some(marks) if marks.has_environment => _ = self.others.insert(key(&stat)),
                Some(_) => {}
                None if read.stuck.contains(&stat.pid) => {
                    let waits = self.waits.entry(key(&stat)).or_default();
                    *waits += 1;
                    look.finished &= *waits >= MOST_WAITS;
                }
                None => look.somebody_vanished = true,
            }
        }
    }

    /// What a member made is of the same invocation, whatever it has done to its environment.
    fn prove_by_descent(&mut self, crowd: &Crowd<'_>, until: Instant, look: &mut Look) {
        // A supervisor's children were looked at by the record.
        let mut queue: Vec<Stat> = self.proven.values().filter(|stat| !self.is_supervisor(stat)).cloned().collect();
        while let Some(parent) = queue.pop() {
            if Instant::now() >= until {
                look.finished = false;
                return;
            }
            let Some((holder, now)) = alive(crowd.proc, &parent) else {
                look.somebody_vanished = true;
                continue;
            };
            for stat in children(crowd, &holder, &now) {
                if !self.proven.contains_key(&stat.pid) && self.prove(crowd, &stat) {
                    queue.push(stat);
                }
            }
        }
    }

    /// Takes one in that is proven. False when it is dead, or one of those that are never touched.
    fn prove(&mut self, crowd: &Crowd<'_>, stat: &Stat) -> bool {
        let is_kept = self.all_kept.contains(&key(stat));
        let is_one = !stat.is_zombie() && !is_kept && crowd.may_have(stat);
        if is_one {
            self.proven.insert(stat.pid, stat.clone());
        }
        is_one
    }
}

impl Crowd<'_> {
    /// Nobody of ours, nobody above us, nobody of the kernel's.
    fn may_have(&self, stat: &Stat) -> bool {
        stat.pid > 1 && !stat.is_kernel_thread() && !self.never.contains(&stat.pid) && !self.is_below_us(stat)
    }

    /// Whether it descends from us, or from one that we were told of: our readers, and what was ours before the service.
    fn is_below_us(&self, stat: &Stat) -> bool {
        let mut parent = stat.ppid;
        for _ in 0..DEEPEST {
            if self.ours.contains(&parent) {
                return true;
            }
            let above = self.stats.get(&parent).map(|stat| stat.ppid);
            match above.or_else(|| Some(hold(self.proc, parent)?.1.ppid)) {
                Some(above) if above > 0 => parent = above,
                _ => return false,
            }
        }
        false
    }
}

/// Whether nobody is in it who is never touched.
fn is_wholly_theirs(cgroup: &Cgroup, never: &BTreeSet<Pid>) -> bool {
    cgroup.members().is_ok_and(|members| members.iter().all(|pid| !never.contains(pid)))
}

/// Takes hold of one that was seen before, if it is alive.
fn alive(proc: &Proc, seen: &Stat) -> Option<(Process, Stat)> {
    hold(proc, seen.pid).filter(|(_, now)| now.start == seen.start && !now.is_zombie())
}

/// Takes hold of one that was recorded, dead or alive.
fn find(proc: &Proc, identity: Identity) -> Option<(Process, Stat)> {
    hold(proc, identity.pid).filter(|(_, now)| now.start == identity.start)
}

/// The living children of one that is held. Each is believed only while both are held: it names its parent, and the parent
/// still answers afterwards.
fn children(crowd: &Crowd<'_>, holder: &Process, parent: &Stat) -> Vec<Stat> {
    let listed = holder.children(parent).unwrap_or_else(|_| {
        // The slow way, without CONFIG_PROC_CHILDREN.
        crowd.stats.values().filter(|stat| stat.ppid == parent.pid).map(|stat| stat.pid).collect()
    });
    let held = listed.into_iter().filter_map(|pid| hold(crowd.proc, pid)).map(|(_, stat)| stat);
    held.filter(|stat| stat.ppid == parent.pid && !stat.is_zombie() && holder.exists()).collect()
}
