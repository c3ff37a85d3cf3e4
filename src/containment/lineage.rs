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
//! # Killing
//!
//! A pass goes round and round without reaping: first the direct children, by number and before anything is read about
//! them, since a chain of processes that fork and exit is caught only by who is quicker; then everything below. The dead
//! keep their places in the process table and in RLIMIT_NPROC until they are reaped, so a fork bomb at its limit cannot
//! fill the gaps; and who was sent SIGKILL makes no more children. A pass ends when a round finds nobody new, or after a
//! number of rounds: chains leave many dead, and they have to be reaped in between.

use super::leftover::Leftovers;
use super::walk::Finder;
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
            leftovers: Leftovers::default(),
            told_groups: BTreeSet::new(),
            has_precedence: false,
            told_blindly: false,
            killed: BTreeSet::new(),
            too_many_to_name: false,
        })
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
        self.finder.started(supervisor, own_session);
    }

    /// Notes that a direct child ended and was reaped.
    pub fn reaped(&mut self, pid: Pid, exit: Exit) {
        if self.main == Some(pid) {
            self.main = None;
        }
        self.killed.remove(&pid);
        self.finder.reaped(pid);
        self.leftovers.reaped(pid, exit);
    }

    /// Whether it is proven that nobody is left, given what waiting has just said.
    pub fn is_empty(&self, left: Left) -> bool {
        match left {
            // As PID 1 there may be others: who entered from outside has no parent here.
            Left::Nobody => !self.finder.is_init() || nobody_else_in_the_namespace(),
            Left::More => false,
            Left::Somebody => self.main.is_none() && self.finder.only_strangers_left(),
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
    pub fn signal_group(&self, signal: Signal) {
        match (self.main, self.service_group) {
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
    pub fn signal_tree(&self, signal: Signal) {
        if let Err(why) = self.finder.proc() {
            return self.signal_blindly(why, &[signal]);
        }
        self.signal_main(signal);
        let until = Instant::now() + NAMING_TIME;
        let _ = self.finder.walk(&mut |member| {
            if self.main != Some(member.stat.pid) {
                // Who is gone, or not ours to signal, is not who the others wait for.
                let _ = member.process.signal(member.stat.pid, signal);
            }
            go_on(until)
        });
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
        if !group_is_ours(seen, &self.ours) || !is_pinned || send(-seen.pgid, Signal::TERM) == Err(libc::EPERM) {
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
        let Lineage { finder, leftovers, main, .. } = self;
        let mut untold = Vec::new();
        let walked = finder.walk(&mut |member| {
            let stat = member.stat;
            if *main != Some(stat.pid) && (!leftovers.knows(stat) || leftovers.told(stat.pid).is_none()) {
                untold.push(stat.clone());
            }
            go_on(until)
        });
        self.too_many_to_name |= walked.is_break();
        self.name(&untold);
        untold
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

    /// Sends SIGKILL to all that is left of the tree, the main process included. Breaks off at `until`.
    pub fn kill_tree(&mut self, until: Instant) {
        self.take_precedence();
        if let Err(why) = self.finder.proc() {
            return self.signal_blindly(why, &[Signal::KILL]);
        }
        if !self.too_many_to_name {
            self.name_again();
            self.look(until.min(Instant::now() + NAMING_TIME));
            // Whoever is born from now on is of a kind that is not worth the time that its name would take.
            self.too_many_to_name = true;
        }
        if self.finder.is_init() {
            self.leftovers.tell_all(Signal::KILL);
            return kill(-1, Signal::KILL);
        }
        self.kill_groups();
        let mut refused = BTreeSet::new();
        for _ in 0..MOST_ROUNDS {
            let new = self.kill_direct_children(&mut refused);
            if new.is_empty() || self.kill_below(&new, until).is_break() {
                return;
            }
        }
    }

    /// Groups as a whole first: that is atomic against fork.
    fn kill_groups(&mut self) {
        let known = self.leftovers.living().filter(|leftover| group_is_ours(&leftover.stat, &self.ours));
        let mut groups: BTreeSet<Pid> = known.map(|leftover| leftover.stat.pgid).collect();
        groups.extend(self.service_group);
        groups.extend(&self.told_groups);
        for group in groups {
            if has_child_in_group(group) {
                kill(-group, Signal::KILL);
            }
        }
    }

    /// Direct children are safe by number, also those that are dead and not reaped. Gives those that had not been sent
    /// SIGKILL before; `refused` are those that may not be, and are tried once a pass.
    fn kill_direct_children(&mut self, refused: &mut BTreeSet<Pid>) -> Vec<Pid> {
        let mut new = Vec::new();
        for pid in self.finder.children() {
            if self.killed.contains(&pid) || refused.contains(&pid) {
                continue;
            }
            if self.main != Some(pid) {
                self.leftovers.count(pid);
            }
            if send(pid, Signal::KILL) == Err(libc::EPERM) {
                self.leftovers.deny(pid);
                refused.insert(pid);
            } else {
                self.leftovers.tell(pid, Signal::KILL);
                self.killed.insert(pid);
            }
            new.push(pid);
        }
        new
    }

    /// Everything below these direct children. Whoever was killed once has no more children than it had then, and those that
    /// were missed come to us when it is dead.
    fn kill_below(&mut self, direct: &[Pid], until: Instant) -> ControlFlow<()> {
        let Lineage { finder, leftovers, .. } = self;
        finder.cull(direct, &mut |pid, process| {
            leftovers.count(pid);
            tell(leftovers, pid, process, Signal::KILL);
            go_on(until)
        })
    }

    /// Without a `/proc` to find members in: as PID 1 everything in the namespace is ours; else the service's own group
    /// is left, as long as a child of ours is in it.
    fn signal_blindly(&self, why: Unusable, signals: &[Signal]) {
        let group = self.service_group.filter(|group| has_child_in_group(*group));
        let target = if self.finder.is_init() { Some(-1) } else { group.map(|group| -group) };
        tracing::debug!(?why, "/proc cannot be used; signalling what can be signalled without it");
        for signal in signals {
            if let Some(target) = target {
                kill(target, *signal);
            }
            self.signal_main(*signal);
        }
    }

    /// Takes down who is left. A dead child that cannot be reaped counts: somebody who traces it holds it.
    pub fn name_survivors(&mut self) {
        let until = Instant::now() + NAMING_TIME;
        let mut left = BTreeMap::new();
        let _ = self.finder.walk(&mut |member| {
            left.insert(member.stat.pid, (member.stat.clone(), member.process.wchan()));
            go_on(until)
        });
        for (_, stat) in self.finder.children().into_iter().filter_map(|pid| self.finder.look_up(pid)) {
            left.entry(stat.pid).or_insert((stat, None));
        }
        let stats: Vec<Stat> = left.values().map(|(stat, _)| stat.clone()).collect();
        self.name(&stats);
        for (stat, wchan) in left.into_values() {
            self.leftovers.survived(stat.pid, stat.state, wchan);
        }
    }

    /// Everyone who was left, for the report.
    pub fn into_leftovers(self) -> Leftovers {
        self.leftovers
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

/// Signals by number where nothing has to be known of the failure: it is seen by the next look, and of a group success would
/// prove nothing either.
fn kill(target: Pid, signal: Signal) {
    let _ = send(target, signal);
}

/// The one place that signals by number. The number is a direct child that is not reaped, a group that such a child is
/// in, or, as PID 1, everybody. Never our own group, never PID 1. Gives the errno.
fn send(target: Pid, signal: Signal) -> Result<(), i32> {
    let everybody_of_ours = target == -1 && nix::unistd::getpid().as_raw() == 1;
    let ourselves = target.abs() <= 1 || target == -nix::unistd::getpgrp().as_raw();
    if ourselves && !everybody_of_ours {
        return Err(libc::EPERM);
    }
    // SAFETY: kill takes any number; see above for whose this is.
    let sent = unsafe { libc::kill(target, signal.number()) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)) }
}

/// ESRCH of a signal to everybody: as PID 1 the kernel counts all others in the namespace for it, zombies included.
fn nobody_else_in_the_namespace() -> bool {
    // SAFETY: signal 0 sends nothing.
    unsafe { libc::kill(-1, 0) != 0 && *libc::__errno_location() == libc::ESRCH }
}
