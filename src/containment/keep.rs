//! Who is to be left alone, where the operator allows that: processes that `supervise keep` marked, and all below them.
//!
//! The mark is in the environment, which is read by a reader of its own (see `process::marks`). Who cannot be read is not
//! kept.

use crate::process::Pid;
use crate::process::marks;
use crate::process::proc::{Proc, Stat};
use std::collections::BTreeSet;
use std::time::Instant;

/// How often one is asked that has no environment.
const MOST_TIMES: u32 = 3;

/// One process, whatever becomes of its number.
type Key = (Pid, u64);

/// What is known of the kept.
#[derive(Debug, Default)]
pub(super) struct Keep {
    allowed: bool,
    /// Those that are kept. The others are asked again each time: an exec gives a process another environment.
    kept: BTreeSet<Key>,
}

impl Keep {
    pub(super) fn allow(&mut self) {
        self.allowed = true;
    }

    /// Whether there may be kept ones at all.
    pub(super) fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Asks about these. Parents have to come before their children.
    pub(super) fn ask(&mut self, proc: &Proc, found: &[Stat], until: Instant) {
        if !self.allowed {
            return;
        }
        let mut unknown: Vec<Stat> = found.iter().filter(|stat| !self.kept.contains(&key(stat))).cloned().collect();
        for _ in 0..MOST_TIMES {
            let marks = marks::read(proc, &unknown, until).marks;
            for stat in &unknown {
                let marked = marks.get(&stat.pid).is_some_and(marks::Marks::is_kept);
                if marked || self.is_kept_by_number(stat.ppid) {
                    self.kept.insert(key(stat));
                }
            }
            // In the middle of an exec it has none for a moment.
            unknown.retain(|stat| marks.get(&stat.pid).is_some_and(|marks| !marks.has_environment));
            if unknown.is_empty() {
                return;
            }
        }
    }

    /// Whether this process is kept.
    pub(super) fn has(&self, stat: &Stat) -> bool {
        self.kept.contains(&key(stat))
    }

    /// Whether this direct child of ours is kept, which is not reaped.
    pub(super) fn is_kept_by_number(&self, pid: Pid) -> bool {
        self.kept.range((pid, 0)..=(pid, u64::MAX)).next().is_some()
    }

    /// Whether anybody is kept.
    pub(super) fn is_anybody(&self) -> bool {
        !self.kept.is_empty()
    }

    /// A reaped one's number may come back as somebody else.
    pub(super) fn forget(&mut self, pid: Pid) {
        if self.allowed {
            self.kept.retain(|(known, _)| *known != pid);
        }
    }
}

fn key(stat: &Stat) -> Key {
    (stat.pid, stat.start)
}
