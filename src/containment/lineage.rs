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
//! The first passes kill what they see: direct children before anything is read about them, since a chain of processes
//! that fork and exit is caught only by who is quicker. When passes keep finding newborns the births are stopped first:
//! each member that is found is stopped (SIGSTOP: it keeps its place in the process table, which a bomb would fill again,
//! and leaves the processors to us), until a look finds nobody new. After that one pass kills them all.

use super::leftover::Leftovers;
use super::walk::{Finder, Member};
use crate::process::Pid;
use crate::process::proc::{Stat, Unusable};
use crate::process::reap::Left;
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use std::collections::HashSet;
use std::io;

/// After this many passes that found newborns, births are stopped first.
const PATIENT_PASSES: u32 = 2;

/// The most looks in one pass that stops births; the loop must get to reap in between.
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
    told_groups: HashSet<Pid>,
    passes_with_newborns: u32,
}

impl Lineage {
    /// Becomes the one that orphans fall to. To be called before anything is started.
    ///
    /// # Errors
    /// When the kernel refuses (before Linux 3.4).
    pub fn enter() -> io::Result<Lineage> {
        // SAFETY: a constant option that takes a flag.
        if unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Lineage {
            finder: Finder::new(),
            ours: Ours {
                pid: nix::unistd::getpid().as_raw(),
                group: nix::unistd::getpgrp().as_raw(),
                session: nix::unistd::getsid(None).map_or(0, nix::unistd::Pid::as_raw),
            },
            main: None,
            service_group: None,
            leftovers: Leftovers::default(),
            told_groups: HashSet::new(),
            passes_with_newborns: 0,
        })
    }

    /// Takes the main process in; `own_group` says whether it leads a group of its own.
    pub fn started(&mut self, main: Pid, own_group: bool) {
        self.main = Some(main);
        self.service_group = own_group.then_some(main);
    }

    /// Notes that a direct child ended and was reaped.
    pub fn reaped(&mut self, pid: Pid, exit: Exit) {
        if self.main == Some(pid) {
            self.main = None;
        }
        self.finder.forget_stranger(pid);
        self.leftovers.reaped(pid, exit);
    }

    /// Whether it is proven that nobody is left, given what waiting has just said.
    pub fn is_empty(&self, left: Left) -> bool {
        match left {
            // As PID 1 there may be others: who entered from outside has no parent here.
            Left::Nobody => !self.finder.is_init() || nobody_else_in_the_namespace(),
            Left::Somebody => self.main.is_none() && self.finder.only_strangers_left(),
        }
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
            // The main process is not reaped, so the number is that group's.
            (Some(_), Some(group)) => kill(-group, signal),
            _ => self.signal_main(signal),
        }
    }

    /// Sends a signal to the main process first and then to everything below it.
    pub fn signal_tree(&self, signal: Signal) {
        self.signal_main(signal);
        self.finder.walk(&mut |member| {
            if self.main != Some(member.stat.pid) {
                // Who is gone, or not ours to signal, is not who the others wait for.
                let _ = member.process.signal(member.stat.pid, signal);
            }
        });
    }

    /// Looks for leftovers; each that was not told yet gets SIGTERM, then SIGCONT, since one that is stopped takes the
    /// first only after the second.
    pub fn terminate_leftovers(&mut self) {
        if let Err(why) = self.finder.proc() {
            return self.signal_blindly(why, &[Signal::TERM, Signal::CONT]);
        }
        let told_before = self.told_groups.clone();
        let Lineage { finder, leftovers, told_groups, ours, main, .. } = self;
        finder.walk(&mut |member| {
            let stat = &member.stat;
            if *main == Some(stat.pid) || leftovers.knows(stat) && leftovers.told(stat.pid).is_some() {
                return;
            }
            leftovers.see(member.process, stat);
            let whole = group_is_ours(stat, ours) && !told_before.contains(&stat.pgid);
            if told_groups.contains(&stat.pgid) && !told_before.contains(&stat.pgid) {
                leftovers.tell(stat.pid, Signal::TERM);
            } else if whole {
                told_groups.insert(stat.pgid);
                leftovers.tell(stat.pid, Signal::TERM);
                kill(-stat.pgid, Signal::TERM);
                kill(-stat.pgid, Signal::CONT);
            } else {
                tell(leftovers, member, Signal::TERM);
                let _ = member.process.signal(stat.pid, Signal::CONT);
            }
        });
    }

    /// Sends SIGKILL to all that is left of the tree, the main process included.
    pub fn kill_tree(&mut self) {
        if let Err(why) = self.finder.proc() {
            return self.signal_blindly(why, &[Signal::KILL]);
        }
        if self.passes_with_newborns >= PATIENT_PASSES {
            self.stop_births();
        } else {
            self.kill_direct_children();
        }
        let newborns = self.kill_members();
        if self.finder.is_init() {
            kill(-1, Signal::KILL);
        }
        self.passes_with_newborns += u32::from(newborns);
    }

    /// Direct children are safe by number, and whoever is about to fork and exit is caught only by being quick.
    fn kill_direct_children(&self) {
        for pid in self.finder.children() {
            if !self.finder.strangers().contains(&pid) {
                kill(pid, Signal::KILL);
            }
        }
    }

    /// One pass over everything. True when it met somebody unknown.
    fn kill_members(&mut self) -> bool {
        let Lineage { finder, leftovers, ours, main, .. } = self;
        let mut killed_groups = HashSet::new();
        let mut newborns = false;
        finder.walk(&mut |member| {
            let stat = &member.stat;
            if *main != Some(stat.pid) {
                newborns |= !leftovers.knows(stat);
                leftovers.see(member.process, stat);
            }
            if group_is_ours(stat, ours) && killed_groups.insert(stat.pgid) {
                kill(-stat.pgid, Signal::KILL);
            }
            // Also where the group was told: success of a signal to a group hides who refused it.
            tell(leftovers, member, Signal::KILL);
        });
        newborns
    }

    /// Stops everything that is found until a look finds nobody new.
    fn stop_births(&mut self) {
        let Lineage { finder, leftovers, .. } = self;
        let mut held = HashSet::new();
        for _ in 0..MOST_ROUNDS {
            let before = held.len();
            finder.walk(&mut |member| {
                if held.insert((member.stat.pid, member.stat.start)) {
                    let _ = member.process.signal(member.stat.pid, Signal::STOP);
                    leftovers.see(member.process, &member.stat);
                }
            });
            if held.len() == before {
                return;
            }
        }
    }

    /// Without a `/proc` to find members in: as PID 1 everything in the namespace is ours; else the service's own group
    /// is left, as long as a child of ours is in it.
    fn signal_blindly(&mut self, why: Unusable, signals: &[Signal]) {
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

    /// Takes down who is left. An unreaped zombie counts: somebody who traces it holds it.
    pub fn name_survivors(&mut self) {
        let Lineage { finder, leftovers, .. } = self;
        finder.walk(&mut |member| {
            leftovers.see(member.process, &member.stat);
            leftovers.survived(member.stat.pid, member.stat.state, member.process.wchan());
        });
    }

    /// Everyone who was left, for the report.
    pub fn into_leftovers(self) -> Leftovers {
        self.leftovers
    }

    /// The leftovers so far.
    pub fn leftovers(&self) -> &Leftovers {
        &self.leftovers
    }
}

/// Whether every member of this one's group is of the tree, and the group's number cannot be another's.
fn group_is_ours(stat: &Stat, ours: &Ours) -> bool {
    let proven = stat.sid > 1 && stat.sid != ours.session && stat.ppid == ours.pid;
    // As PID 1 there is nobody else whose it could be.
    (proven || ours.pid == 1) && stat.pgid > 1 && stat.pgid != ours.group
}

fn tell(leftovers: &mut Leftovers, member: &Member<'_>, signal: Signal) {
    let pid = member.stat.pid;
    match member.process.signal(pid, signal) {
        Ok(()) => leftovers.tell(pid, signal),
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => leftovers.deny(pid),
        // Gone meanwhile: what was wanted.
        Err(_) => {}
    }
}

/// The one place that signals by number. The number is a direct child that is not reaped, a group that such a child is
/// in, or, as PID 1, everybody.
fn kill(target: Pid, signal: Signal) {
    let everybody_of_ours = target == -1 && nix::unistd::getpid().as_raw() == 1;
    let ourselves = target.abs() <= 1 || target == -nix::unistd::getpgrp().as_raw();
    if ourselves && !everybody_of_ours {
        return;
    }
    // SAFETY: kill takes any number; see above for whose this is. Its failure is seen by the next look: a group's success
    // would prove nothing either.
    unsafe { libc::kill(target, signal.number()) };
}

/// ESRCH of a signal to everybody: as PID 1 the kernel counts all others in the namespace for it, zombies included.
fn nobody_else_in_the_namespace() -> bool {
    // SAFETY: signal 0 sends nothing.
    unsafe { libc::kill(-1, 0) != 0 && *libc::__errno_location() == libc::ESRCH }
}

/// Whether a child of ours that is not reaped is in this group, which also pins the group's number.
fn has_child_in_group(group: Pid) -> bool {
    let Ok(id) = libc::id_t::try_from(group) else { return false };
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: `info` is ours; WNOWAIT takes nothing.
    unsafe { libc::waitid(libc::P_PGID, id, info.as_mut_ptr(), options) == 0 }
}
