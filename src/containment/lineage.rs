//! Containment by descent: a child subreaper gets every orphan below it, so nothing that the service makes can leave.
//!
//! # Whole groups
//!
//! A signal to a group is atomic against fork, one to each member is not. A group is signalled as a whole where it is
//! proven to be all ours: a session other than our own that one of the tree is in was made inside the tree, since a
//! process has the session of its parent or one that it made itself, and a group never reaches beyond its session. The
//! number of the group is safe as long as a direct child of ours is in it: until we reap that child the kernel cannot
//! give the number away. Everything else is signalled one by one, held by its directory in `/proc`.
//!
//! Killing is in `killing`.

mod killing;

use super::keep::Keep;
use super::leftover::Leftovers;
use super::send::{kill, nobody_else_in_the_namespace, send};
use super::walk::Finder;
use crate::log::Once;
use crate::process::proc::{Process, Stat, Unusable};
use crate::process::reap::{Left, has_child_in_group};
use crate::process::terminal::Placement;
use crate::process::{Pid, names};
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// How long names are read at the most. Within the rungs of the ladder, and long enough for ten thousand.
const NAMING_TIME: Duration = Duration::from_millis(500);

/// The most rounds in one pass.
const MOST_ROUNDS: u32 = 16;

/// Our own numbers.
#[derive(Clone, Copy, Debug)]
struct Ours {
    pid: Pid,
    group: Pid,
    session: Pid,
}

/// The tree below this process.
#[derive(Debug)]
pub struct Lineage {
    finder: Finder,
    ours: Ours,
    /// The main process, until it is reaped.
    main: Option<Pid>,
    /// The service's own group, if it was given one. Never a proof that the number is still that group's.
    service_group: Option<Pid>,
    /// The group of a supervisor that we guard: in it are readers of its own, which are no leftovers of the service.
    supervisors_group: Option<Pid>,
    leftovers: Leftovers,
    /// Groups that were told to end as a whole. Who is found in one afterwards was born after that, and is told alone.
    told_groups: BTreeSet<Pid>,
    /// Whether we asked for the processors already.
    has_precedence: bool,
    /// Whether SIGTERM was sent where nobody could be found.
    told_blindly: bool,
    /// Direct children that were sent SIGKILL and are not reaped: their numbers are theirs.
    killed: BTreeSet<Pid>,
    /// A fork bomb, or as good as one.
    too_many_to_name: bool,
    keep: Keep,
}

impl Lineage {
    /// Becomes the one that orphans fall to. To be called before anything is started.
    ///
    /// # Errors
    /// When the kernel refuses (before Linux 3.4), or a filter does.
    pub fn enter() -> io::Result<Lineage> {
        // SAFETY: a constant option that takes a flag.
        if unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let ours = Ours {
            pid: nix::unistd::getpid().as_raw(),
            group: nix::unistd::getpgrp().as_raw(),
            session: nix::unistd::getsid(None).map_or(0, nix::unistd::Pid::as_raw),
        };
        Ok(Lineage {
            finder: Finder::new(ours.pid, ours.session)?,
            ours,
            main: None,
            service_group: None,
            supervisors_group: None,
            leftovers: Leftovers::default(),
            told_groups: BTreeSet::new(),
            has_precedence: false,
            told_blindly: false,
            killed: BTreeSet::new(),
            too_many_to_name: false,
            keep: Keep::default(),
        })
    }

    /// Leaves kept processes alone. Not as PID 1, whom nobody outlives.
    pub fn allow_keep(&mut self) {
        if !self.is_init() {
            self.keep.allow();
        }
    }

    /// Whether kept processes are left alone.
    pub fn allows_keep(&self) -> bool {
        self.keep.is_allowed()
    }

    /// Whether we are PID 1.
    pub fn is_init(&self) -> bool {
        self.finder.is_init()
    }

    /// Takes the main process in, which is or will be where it was placed.
    pub fn started(&mut self, main: Pid, placement: Placement) {
        self.main = Some(main);
        self.service_group = (!matches!(placement, Placement::CallersGroup(_))).then_some(main);
        self.finder.started(main, placement == Placement::OwnSession);
    }

    /// Takes the supervisor in, for its guard: all that is below it falls to us when it is lost.
    pub fn guards(&mut self, supervisor: Pid, own_session: bool) {
        self.main = Some(supervisor);
        self.supervisors_group = Some(supervisor);
        self.finder.started(supervisor, own_session);
    }

    /// Notes who is with us while the supervisor lives: what it started is below it, so nobody of them is of the service. Its
    /// orphans fall to us when one of ours from before has ended.
    pub fn note_those_from_outside(&self) {
        self.finder.note_strangers(self.main);
    }

    /// Notes that a direct child ended and was reaped.
    pub fn reaped(&mut self, pid: Pid, exit: Exit) {
        if self.main == Some(pid) {
            self.main = None;
        }
        self.killed.remove(&pid);
        self.finder.reaped(pid);
        self.keep.forget(pid);
        self.leftovers.reaped(pid, exit);
    }

    /// Whether it is proven that nobody is left, given what waiting has just said.
    pub fn is_empty(&self, left: Left) -> bool {
        match left {
            // As PID 1 there may be others: who entered from outside has no parent here.
            Left::Nobody => !self.finder.is_init() || nobody_else_in_the_namespace(),
            Left::More => false,
            Left::Somebody => {
                let is_kept = |pid| self.keep.is_kept_by_number(pid);
                self.main.is_none() && self.finder.only_others_left(self.keep.is_anybody(), is_kept)
            }
        }
    }

    /// The descriptor that has to stay open, if there is one yet.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.finder.descriptor()
    }

    /// Sends a signal to the main process; nothing when it is reaped.
    pub fn signal_main(&self, signal: Signal) {
        if let Some(main) = self.main {
            kill(main, signal);
        }
    }

    /// Sends a signal to the main process and its group; to the main process alone when the group is also ours.
    pub fn signal_group(&mut self, signal: Signal) {
        match (self.main, self.service_group) {
            // Kept ones may be in it.
            (Some(_), Some(group)) if self.keep.is_allowed() => self.signal_members(signal, |stat| stat.pgid == group),
            // The main process is not reaped, so the number is that group's. Just forked, it may not have made the group yet.
            (Some(main), Some(group)) => {
                if send(-group, signal) == Err(libc::ESRCH) {
                    kill(main, signal);
                }
            }
            _ => self.signal_main(signal),
        }
    }

    /// Sends a signal to the main process first and then to everything below it.
    pub fn signal_tree(&mut self, signal: Signal) {
        if let Err(why) = self.finder.proc() {
            return self.signal_blindly(why, &[signal]);
        }
        self.signal_members(signal, |_| true);
    }

    fn signal_members(&mut self, signal: Signal, is_meant: impl Fn(&Stat) -> bool) {
        self.signal_main(signal);
        let until = Instant::now() + NAMING_TIME;
        let mut members = Vec::new();
        let _ = self.finder.walk(&mut |member| {
            if self.main != Some(member.stat.pid) && is_meant(member.stat) {
                members.push(member.stat.clone());
            }
            go_on(until)
        });
        self.ask_who_is_kept(&members, until);
        for stat in members.iter().filter(|stat| !self.keep.has(stat)) {
            if let Some((process, _)) = self.finder.hold(stat) {
                // Who is gone, or not ours to signal, is not who the others wait for.
                let _ = process.signal(stat.pid, signal);
            }
        }
    }

    fn ask_who_is_kept(&mut self, found: &[Stat], until: Instant) {
        if let Ok(proc) = self.finder.proc() {
            self.keep.ask(proc, found, until);
        }
    }

    /// Looks for leftovers; each that was not told yet gets SIGTERM, then SIGCONT, since one that is stopped takes the
    /// first only after the second. Breaks off at `until`: among the processes of a fork bomb we get little time.
    pub fn terminate_leftovers(&mut self, until: Instant) {
        self.take_precedence();
        if let Err(why) = self.finder.proc() {
            // Once: who was told cannot be told from who was not, and some take a second request for impatience.
            if !std::mem::replace(&mut self.told_blindly, true) {
                self.signal_blindly(why, &[Signal::TERM, Signal::CONT]);
            }
            return;
        }
        let untold = self.look(until);
        let told_before = self.told_groups.clone();
        let mut told_by_group = Vec::new();
        for stat in untold {
            if Instant::now() >= until {
                self.too_many_to_name = true;
                return;
            }
            let new_group = !told_before.contains(&stat.pgid);
            if new_group && (self.told_groups.contains(&stat.pgid) || self.terminate_group(&stat)) {
                self.leftovers.tell(stat.pid, Signal::TERM);
                told_by_group.push(stat);
            } else {
                self.terminate(&stat);
            }
        }
        for stat in told_by_group {
            if self.finder.hold(&stat).is_some_and(|(_, now)| now.pgid != stat.pgid) {
                // It left the group before the signal came to that.
                self.terminate(&stat);
            }
        }
    }

    /// False when the group is not to be signalled as a whole, or nobody in it may be: then each is told alone.
    fn terminate_group(&mut self, seen: &Stat) -> bool {
        // Reading the names took its time: the child that was in it may have left.
        let is_pinned = self.finder.is_init() || has_child_in_group(seen.pgid);
        let may_be_kept = self.keep.is_allowed();
        if may_be_kept
            || !group_is_ours(seen, &self.ours)
            || !is_pinned
            || send(-seen.pgid, Signal::TERM) == Err(libc::EPERM)
        {
            return false;
        }
        kill(-seen.pgid, Signal::CONT);
        self.told_groups.insert(seen.pgid)
    }

    fn terminate(&mut self, seen: &Stat) {
        if let Some((process, _)) = self.finder.hold(seen) {
            tell(&mut self.leftovers, seen.pid, &process, Signal::TERM);
            let _ = process.signal(seen.pid, Signal::CONT);
        }
    }

    /// Goes before the processes of a fork bomb, where we may: among thousands of them our share of the processors is next to
    /// nothing. A session competes as a whole (sched(7), autogroup), so both values count.
    fn take_precedence(&mut self) {
        if std::mem::replace(&mut self.has_precedence, true) {
            return;
        }
        // SAFETY: it changes our own nice value only. Refused without CAP_SYS_NICE, and then things are as they were.
        unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
        // Refused likewise, or there are no autogroups.
        let _ = std::fs::write("/proc/self/autogroup", "-20");
    }

    /// Finds the leftovers that were told nothing yet, and takes them down by name, all of them before the first is
    /// signalled: the dead have no name.
    fn look(&mut self, until: Instant) -> Vec<Stat> {
        let Lineage { finder, leftovers, main, supervisors_group, keep, .. } = self;
        let mut untold = Vec::new();
        let walked = finder.walk(&mut |member| {
            let stat = member.stat;
            let is_told = leftovers.knows(stat) && leftovers.told(stat.pid).is_some();
            let is_ours = *main == Some(stat.pid) || *supervisors_group == Some(stat.pgid);
            if !is_ours && !is_told && !keep.has(stat) {
                untold.push(stat.clone());
            }
            go_on(until)
        });
        self.too_many_to_name |= walked.is_break();
        self.ask_who_is_kept(&untold, until);
        self.name(&untold);
        untold.retain(|stat| {
            let kept = self.keep.has(stat);
            if kept {
                self.leftovers.keep(stat.pid);
            }
            !kept
        });
        untold
    }

    /// Asks those to end whom a cgroup has beside our descendants, and who are still in it when they are held.
    pub fn terminate_others(&mut self, members: impl Fn() -> Vec<Pid>) {
        let strange = |pid: &Pid| self.main != Some(*pid) && !self.leftovers.has_living(*pid);
        let found: Vec<_> = members().into_iter().filter(strange).filter_map(|pid| self.finder.look_up(pid)).collect();
        if found.is_empty() {
            return;
        }
        let again: BTreeSet<Pid> = members().into_iter().collect();
        let others = found.into_iter().filter(|(_, stat)| again.contains(&stat.pid) && !stat.is_zombie());
        let others: Vec<_> = others.collect();
        self.name(&others.iter().map(|(_, stat)| stat.clone()).collect::<Vec<_>>());
        for (process, stat) in others {
            tell(&mut self.leftovers, stat.pid, &process, Signal::TERM);
            let _ = process.signal(stat.pid, Signal::CONT);
        }
    }

    fn name(&mut self, found: &[Stat]) {
        let unknown: Vec<Stat> = found.iter().filter(|stat| !self.leftovers.knows(stat)).cloned().collect();
        let Ok(proc) = self.finder.proc() else { return };
        let mut names = names::read(proc, &unknown, NAMING_TIME);
        for stat in &unknown {
            self.leftovers.add(stat, names.remove(&stat.pid).unwrap_or_default());
        }
    }

    /// Who was seen between its fork and its exec had the name of its parent.
    fn name_again(&mut self) {
        let living: Vec<Stat> = self.leftovers.living().map(|leftover| leftover.stat.clone()).collect();
        let Ok(proc) = self.finder.proc() else { return };
        self.leftovers.rename(names::read(proc, &living, NAMING_TIME));
    }

    /// Without a `/proc` to find members in: as PID 1 everything in the namespace is ours; else the service's own group
    /// is left, as long as a child of ours is in it.
    fn signal_blindly(&self, why: Unusable, signals: &[Signal]) {
        let group = self.service_group.filter(|group| has_child_in_group(*group));
        let target = if self.finder.is_init() { Some(-1) } else { group.map(|group| -group) };
        static SAID: Once = Once::new();
        SAID.say(|| {
            let why = match why {
                Unusable::NotMounted => "/proc is not mounted",
                Unusable::OtherNamespace => "/proc is of another pid namespace",
            };
            let whom =
                if self.is_init() { "everybody in our pid namespace" } else { "the service's own process group" };
            format!("{why}: nobody can be named, and {whom} is all that can be ended")
        });
        for signal in signals {
            if let Some(target) = target {
                kill(target, *signal);
            }
            self.signal_main(*signal);
        }
    }

    /// Takes down who is left, `others` besides our descendants. A dead child that cannot be reaped counts: somebody who traces
    /// it holds it. False when nobody alive is found: who only was not reaped yet may be gone at the next look.
    pub fn name_survivors(&mut self, others: &[Pid]) -> bool {
        let until = Instant::now() + NAMING_TIME;
        let mut left = BTreeMap::new();
        let _ = self.finder.walk(&mut |member| {
            if !self.keep.has(member.stat) {
                left.insert(member.stat.pid, (member.stat.clone(), member.process.wchan()));
            }
            go_on(until)
        });
        let not_kept = |pid: &Pid| !self.keep.is_kept_by_number(*pid);
        let children = self.finder.children().into_iter().filter(not_kept);
        for (_, stat) in children.filter_map(|pid| self.finder.look_up(pid)) {
            left.entry(stat.pid).or_insert((stat, None));
        }
        for (process, stat) in others.iter().filter_map(|pid| self.finder.look_up(*pid)) {
            if !stat.is_zombie() {
                left.entry(stat.pid).or_insert_with(|| (stat, process.wchan()));
            }
        }
        let stats: Vec<Stat> = left.values().map(|(stat, _)| stat.clone()).collect();
        self.name(&stats);
        let found = left.values().any(|(stat, _)| !stat.is_zombie());
        for (stat, wchan) in left.into_values() {
            self.leftovers.survived(stat.pid, stat.state, wchan);
        }
        found
    }

    /// Everyone who was left, for the report.
    pub fn into_leftovers(mut self) -> Leftovers {
        self.name_the_kept();
        self.leftovers
    }

    /// Where all others went by the stop signal, nobody has looked at them yet.
    fn name_the_kept(&mut self) {
        if !self.keep.is_anybody() {
            return;
        }
        let until = Instant::now() + NAMING_TIME;
        let mut kept = Vec::new();
        let _ = self.finder.walk(&mut |member| {
            if self.keep.has(member.stat) && !self.leftovers.knows(member.stat) {
                kept.push(member.stat.clone());
            }
            go_on(until)
        });
        self.name(&kept);
        kept.iter().for_each(|stat| self.leftovers.keep(stat.pid));
    }
}

/// Whether every member of this one's group is of the tree, and the group's number cannot be another's.
fn group_is_ours(stat: &Stat, ours: &Ours) -> bool {
    let proven = stat.sid > 1 && stat.sid != ours.session && stat.ppid == ours.pid;
    // As PID 1 there is nobody else whose it could be.
    (proven || ours.pid == 1) && stat.pgid > 1 && stat.pgid != ours.group
}

fn go_on(until: Instant) -> ControlFlow<()> {
    if Instant::now() < until { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}

fn tell(leftovers: &mut Leftovers, pid: Pid, process: &Process, signal: Signal) {
    match process.signal(pid, signal) {
        Ok(()) => leftovers.tell(pid, signal),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => leftovers.deny(pid),
        // Gone meanwhile: what was wanted.
        Err(_) => {}
    }
}
