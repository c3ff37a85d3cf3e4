//! Children that were ours before the service was, and what becomes of theirs.
//!
//! A shell may have started others before it became us by exec: `tee` behind `exec supervise -- x > >(tee log)`, a side
//! process behind `&`. They are not of the service, and nothing here may touch them, nor wait for them. Their orphans fall to
//! us as well; they are told from the service's by having started before it, or by being in our session while the service
//! has one of its own. (As PID 1 there are no strangers: everything in the namespace ends with us.)

use crate::process::Pid;
use crate::process::proc::Stat;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Who is not of the service.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    ours: Pid,
    our_session: Pid,
    /// Direct children that are not reaped, so their numbers are theirs.
    known: RefCell<BTreeSet<Pid>>,
    /// Whether there ever were any.
    ever: bool,
    service: Option<Service>,
}

#[derive(Debug)]
struct Service {
    /// Nothing when it could not be read: then nobody is told by it.
    start: Option<u64>,
    own_session: bool,
}

impl Strangers {
    pub(super) fn new(ours: Pid, our_session: Pid, children: Vec<Pid>) -> Strangers {
        // Also when they could not be listed: then they are told by their age.
        let known = RefCell::new(children.into_iter().collect());
        Strangers { ours, our_session, known, ever: true, service: None }
    }

    /// Whether it has to be asked who is of the service.
    pub(super) fn ever(&self) -> bool {
        self.ever
    }

    /// Notes what the service can be told by.
    pub(super) fn service_is(&mut self, start: Option<u64>, own_session: bool) {
        self.service = Some(Service { start, own_session });
    }

    /// Whether this direct child is one; `stat` is asked for when it is not known yet.
    pub(super) fn has(&self, pid: Pid, stat: impl FnOnce() -> Option<Stat>) -> bool {
        if !self.ever {
            return false;
        }
        if self.known.borrow().contains(&pid) {
            return true;
        }
        let strange = stat().is_some_and(|stat| self.is_strange(&stat));
        if strange {
            self.known.borrow_mut().insert(pid);
        }
        strange
    }

    fn is_strange(&self, stat: &Stat) -> bool {
        let Some(service) = &self.service else { return true };
        let is_older = service.start.is_some_and(|start| stat.start < start);
        stat.ppid == self.ours && (is_older || service.own_session && stat.sid == self.our_session)
    }

    /// Notes that these are.
    pub(super) fn know(&self, children: impl Iterator<Item = Pid>) {
        self.known.borrow_mut().extend(children);
    }

    /// A reaped one's number may come back as somebody of the tree.
    pub(super) fn forget(&self, pid: Pid) {
        self.known.borrow_mut().remove(&pid);
    }
}
