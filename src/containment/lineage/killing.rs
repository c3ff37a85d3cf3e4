//! The last rung for a tree.
//!
//! A pass goes round and round without reaping: first the direct children, by number and before anything is read about
//! them, since a chain of processes that fork and exit is caught only by who is quicker; then everything below. The dead
//! keep their places in the process table and in RLIMIT_NPROC until they are reaped, so a fork bomb at its limit cannot
//! fill the gaps; and who was sent SIGKILL makes no more children. A pass ends when a round finds nobody new, or after a
//! number of rounds: chains leave many dead, and they have to be reaped in between.

use super::{Lineage, MOST_ROUNDS, NAMING_TIME, go_on, group_is_ours, tell};
use crate::containment::send::{kill, send};
use crate::process::Pid;
use crate::process::reap::has_child_in_group;
use crate::signal::Signal;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Instant;

impl Lineage {
    /// Sends SIGKILL to all that is left of the tree, the main process included. Breaks off at `until`.
    pub fn kill_tree(&mut self, until: Instant) {
        self.take_precedence();
        if let Err(why) = self.finder.proc() {
            return self.signal_blindly(why, &[Signal::KILL]);
        }
        let is_first = !self.too_many_to_name;
        self.name_before_the_kill(until);
        if self.keep.is_allowed() {
            return self.kill_all_but_the_kept(until);
        }
        if self.finder.is_init() {
            if is_first {
                self.tell_the_living_of_the_kill();
            }
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

    /// Takes everyone down by name, once.
    pub fn name_before_the_kill(&mut self, until: Instant) {
        if !self.too_many_to_name {
            self.name_again();
            self.look(until.min(Instant::now() + NAMING_TIME));
            // Whoever is born from now on is of a kind that is not worth the time that its name would take.
            self.too_many_to_name = true;
        }
    }

    /// Who is not ours to reap may have ended of the first request.
    fn tell_the_living_of_the_kill(&mut self) {
        let known: Vec<_> = self.leftovers.living().map(|leftover| leftover.stat.clone()).collect();
        let alive = known.iter().filter(|stat| {
            self.finder.look_up(stat.pid).is_some_and(|(_, now)| now.start == stat.start && !now.is_zombie())
        });
        let alive: Vec<Pid> = alive.map(|stat| stat.pid).collect();
        self.tell_of_the_kill(&alive);
    }

    /// Notes that these are sent SIGKILL, by a way of its own.
    pub fn tell_of_the_kill(&mut self, members: &[Pid]) {
        members.iter().for_each(|pid| self.leftovers.tell(*pid, Signal::KILL));
    }

    /// Each alone, and asked first: the price of exemptions is that a fork bomb gets the time for it.
    fn kill_all_but_the_kept(&mut self, until: Instant) {
        self.signal_main(Signal::KILL);
        for _ in 0..MOST_ROUNDS {
            let mut found = Vec::new();
            let _ = self.finder.walk(&mut |member| {
                if self.leftovers.told(member.stat.pid) != Some(Signal::KILL) || !self.leftovers.knows(member.stat) {
                    found.push(member.stat.clone());
                }
                go_on(until)
            });
            self.ask_who_is_kept(&found, until);
            found.retain(|stat| self.main != Some(stat.pid) && !self.keep.has(stat));
            self.name(&found);
            for stat in &found {
                if let Some((process, _)) = self.finder.hold(stat) {
                    tell(&mut self.leftovers, stat.pid, &process, Signal::KILL);
                }
            }
            if found.is_empty() || go_on(until).is_break() {
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
            if self.main != Some(pid) && !self.is_a_reader(pid) {
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

    /// Whether it is one of the supervisor's own that outlived it by a moment.
    fn is_a_reader(&self, pid: Pid) -> bool {
        // SAFETY: getpgid only asks. A child of ours that is not reaped.
        self.supervisors_group.is_some_and(|group| unsafe { libc::getpgid(pid) } == group)
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
}
