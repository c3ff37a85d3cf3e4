//! Who is to be left alone, where the operator allows that: processes that `supervise keep` marked, and all below them.
//!
//! The mark is in the environment, which is read by a reader of its own (see `process::marks`), so it is asked for once for
//! each process. Who cannot be read is not kept.

use crate::process::Pid;
use crate::process::marks;
use crate::process::proc::{Proc, Stat};
use std::collections::BTreeMap;
use std::time::Instant;

/// One process, whatever becomes of its number.
type Key = (Pid, u64);

/// What is known of the kept.
#[derive(Debug, Default)]
pub(super) struct Keep {
    allowed: bool,
    /// Everybody who was asked about, and whether they are kept.
    known: BTreeMap<Key, bool>,
}

impl Keep {
    pub(super) fn allow(&mut self) {
        self.allowed = true;
    }

    /// Whether there may be kept ones at all.
    pub(super) fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Asks about those that were not asked about. Parents have to come before their children.
    pub(super) fn ask(&mut self, proc: &Proc, found: &[Stat], until: Instant) {
        if !self.allowed {
            return;
        }
        let unknown: Vec<Stat> = found.iter().filter(|stat| !self.known.contains_key(&key(stat))).cloned().collect();
        let marks = marks::read(proc, &unknown, until).marks;
        for stat in &unknown {
            let marked = marks.get(&stat.pid).is_some_and(marks::Marks::is_kept);
            self.known.insert(key(stat), marked || self.is_kept_by_number(stat.ppid));
        }
    }

    /// Whether this process is kept.
    pub(super) fn has(&self, stat: &Stat) -> bool {
        self.allowed && self.known.get(&key(stat)) == Some(&true)
    }

    /// Whether this direct child of ours is kept, which is not reaped.
    pub(super) fn is_kept_by_number(&self, pid: Pid) -> bool {
        self.allowed && self.known.range((pid, 0)..=(pid, u64::MAX)).next_back().is_some_and(|(_, kept)| *kept)
    }

    /// Whether anybody is kept.
    pub(super) fn is_anybody(&self) -> bool {
        self.known.values().any(|kept| *kept)
    }

    /// A reaped one's number may come back as somebody else.
    pub(super) fn forget(&mut self, pid: Pid) {
        if self.allowed {
            self.known.retain(|(known, _), _| *known != pid);
        }
    }
}

fn key(stat: &Stat) -> Key {
    (stat.pid, stat.start)
}
