//! The leftovers by name: who was still alive after the main process ended, and what became of each.

use crate::process::Pid;
use crate::process::names::Name;
use crate::process::proc::Stat;
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use std::collections::{BTreeMap, BTreeSet};

/// The most leftovers that are kept by name. A fork bomb would fill our memory with its dead; beyond this they are only
/// counted.
const MOST: usize = 16_384;

/// One member of the tree that was alive after the main process ended.
#[derive(Clone, Debug)]
pub struct Leftover {
    /// Who it was when it was first seen.
    pub stat: Stat,
    /// Who it is beyond that; empty when it could not be read.
    pub name: Name,
    /// The strongest signal that it was sent.
    pub told: Option<Signal>,
    /// Whether it was asked to end before it was killed.
    asked: bool,
    /// Whether a signal to it was refused.
    pub denied: bool,
    /// What became of it.
    pub fate: Fate,
}

/// What became of a leftover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is not known to have ended yet.
    Alive,
    /// It was left alone, as it asked for and the operator allows.
    Kept,
    /// It ended; how, when it was ours to reap.
    Ended(Option<Exit>),
    /// It could not be ended.
    Survived {
        /// Its state as `/proc` has it.
        state: char,
        /// The kernel function in which it waits.
        wchan: Option<String>,
    },
}

impl Leftover {
    fn tell(&mut self, signal: Signal) {
        self.asked |= signal == Signal::TERM;
        self.told = Some(signal);
    }

    /// The signal that ended it; nothing when it ended by itself.
    pub fn ended_by(&self) -> Option<Signal> {
        let killed = matches!(self.fate, Fate::Ended(Some(Exit::Signal { signal: Signal::KILL, .. }) | None));
        match self.told {
            // SIGKILL came after the end that SIGTERM had begun.
            Some(Signal::KILL) if !killed => self.asked.then_some(Signal::TERM),
            told => told,
        }
    }
}

/// All leftovers of a run.
#[derive(Debug, Default)]
pub struct Leftovers {
    living: BTreeMap<Pid, Leftover>,
    ended: Vec<Leftover>,
    unnamed: usize,
    /// Those of the unnamed that are not reaped: each is seen more than once.
    counted: BTreeSet<Pid>,
}

impl Leftovers {
    /// True when this very process is known.
    pub fn knows(&self, stat: &Stat) -> bool {
        self.living.get(&stat.pid).is_some_and(|known| known.stat.start == stat.start)
    }

    /// What was said to it, if it is known.
    pub fn told(&self, pid: Pid) -> Option<Signal> {
        self.living.get(&pid)?.told
    }

    /// Takes one down that is seen for the first time. Its number may have been another's, who must be gone then.
    pub fn add(&mut self, stat: &Stat, name: Name) {
        if let Some(mut former) = self.living.remove(&stat.pid) {
            former.fate = Fate::Ended(None);
            self.ended.push(former);
        }
        if self.living.len() + self.ended.len() >= MOST {
            return self.count(stat.pid);
        }
        let leftover =
            Leftover { stat: stat.clone(), name, told: None, asked: false, denied: false, fate: Fate::Alive };
        self.living.insert(stat.pid, leftover);
    }

    /// Gives those that still have one the name that they have now.
    pub fn rename(&mut self, names: BTreeMap<Pid, Name>) {
        for (pid, name) in names {
            if let Some(leftover) = self.living.get_mut(&pid)
                && !name.arguments.is_empty()
            {
                leftover.name = name;
            }
        }
    }

    /// Counts one that there is no time or no room to name.
    pub fn count(&mut self, pid: Pid) {
        if !self.living.contains_key(&pid) && self.counted.insert(pid) {
            self.unnamed += 1;
        }
    }

    /// Whether somebody who is not known to have ended has this number.
    pub fn has_living(&self, pid: Pid) -> bool {
        self.living.contains_key(&pid)
    }

    /// Notes that it is left alone.
    pub fn keep(&mut self, pid: Pid) {
        if let Some(leftover) = self.living.get_mut(&pid) {
            leftover.fate = Fate::Kept;
        }
    }

    /// Those that are not known to have ended.
    pub fn living(&self) -> impl Iterator<Item = &Leftover> {
        self.living.values()
    }

    /// Notes that it was sent a signal.
    pub fn tell(&mut self, pid: Pid, signal: Signal) {
        if let Some(leftover) = self.living.get_mut(&pid) {
            leftover.tell(signal);
        }
    }

    /// Notes that it may not be signalled.
    pub fn deny(&mut self, pid: Pid) {
        if let Some(leftover) = self.living.get_mut(&pid) {
            leftover.denied = true;
        }
    }

    /// Notes that it was reaped.
    pub fn reaped(&mut self, pid: Pid, exit: Exit) {
        self.counted.remove(&pid);
        if let Some(mut leftover) = self.living.remove(&pid) {
            leftover.fate = Fate::Ended(Some(exit));
            self.ended.push(leftover);
        }
    }

    /// Notes who is left at the end of patience.
    pub fn survived(&mut self, pid: Pid, state: char, wchan: Option<String>) {
        if let Some(leftover) = self.living.get_mut(&pid) {
            leftover.fate = Fate::Survived { state, wchan };
        }
    }

    /// Those that could not be ended.
    pub fn survivors(&self) -> impl Iterator<Item = &Stat> {
        let survived = |leftover: &&Leftover| matches!(leftover.fate, Fate::Survived { .. });
        self.living.values().filter(survived).map(|leftover| &leftover.stat)
    }

    /// Everyone, in the order of their numbers, and how many more had no room.
    pub fn into_list(self) -> (Vec<Leftover>, usize) {
        let mut list = self.ended;
        // Whoever is not known to live was reaped by a parent of its own.
        list.extend(self.living.into_values().map(|mut leftover| {
            if leftover.fate == Fate::Alive {
                leftover.fate = Fate::Ended(None);
            }
            leftover
        }));
        list.sort_by_key(|leftover| (leftover.stat.start, leftover.stat.pid));
        (list, self.unnamed)
    }
}
