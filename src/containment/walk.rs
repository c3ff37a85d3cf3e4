//! Who is in the tree right now.
//!
//! A member is found through its parent, and believed only while both are held: the child's `stat` names the parent, and
//! the parent's directory in `/proc` still answers afterwards. So a number that was reused between two reads brings no
//! stranger in. What the walk misses (a birth behind its back, an orphan that moved) falls to us sooner or later, and
//! the next walk finds it: nothing here proves that nobody is left.

use super::strangers::Strangers;
use crate::log::Once;
use crate::process::Pid;
use crate::process::proc::{Proc, Process, Stat, Unusable};
use crate::process::reap;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, RawFd};

/// How many directories are held open at once at the most, of those that wait and of those in hand each: a limit on open
/// files is 1,024 by habit.
const MOST_HELD: usize = 128;

/// Finds the members of the tree.
#[derive(Debug)]
pub(super) struct Finder {
    /// Our own number.
    us: Pid,
    /// Whether everything in the pid namespace is ours.
    is_init: bool,
    strangers: Strangers,
    proc: OnceCell<Proc>,
}

/// One member of the tree, held.
#[derive(Debug)]
pub(super) struct Member<'a> {
    pub(super) process: &'a Process,
    pub(super) stat: &'a Stat,
}

impl Finder {
    /// Looks around before anything is started.
    ///
    /// # Errors
    /// When we may not wait for children.
    pub(super) fn new(us: Pid, our_session: Pid) -> io::Result<Finder> {
        let is_init = us == 1;
        let mut finder = Finder { us, is_init, strangers: Strangers::default(), proc: OnceCell::new() };
        // ECHILD, the usual answer, costs one call.
        let has_children = reap::has_children()?;
        if has_children && !is_init {
            finder.strangers = Strangers::new(us, our_session, finder.all_children());
        }
        Ok(finder)
    }

    /// The main process was made.
    pub(super) fn started(&mut self, main: Pid, own_session: bool) {
        if self.strangers.ever() {
            let start = self.look_up(main).map(|(_, stat)| stat.start);
            self.strangers.service_is(start, own_session);
        }
        // Opened again when it is needed: what is open now is closed with all that the service has inherited.
        self.proc.take();
    }

    /// Takes all children but this one for strangers, where there ever were any.
    pub(super) fn note_strangers(&self, but: Option<Pid>) {
        if self.strangers.ever() {
            self.strangers.know(self.all_children().into_iter().filter(|pid| Some(*pid) != but));
        }
    }

    pub(super) fn is_init(&self) -> bool {
        self.is_init
    }

    /// A direct child was reaped.
    pub(super) fn reaped(&self, pid: Pid) {
        self.strangers.forget(pid);
    }

    pub(super) fn proc(&self) -> Result<&Proc, Unusable> {
        if let Some(proc) = self.proc.get() {
            return Ok(proc);
        }
        // Not kept when it fails: the table of open files may be full for a moment only.
        Proc::open().map(|proc| self.proc.get_or_init(|| proc))
    }

    /// The descriptor that has to stay open, if there is one yet.
    pub(super) fn descriptor(&self) -> Option<RawFd> {
        self.proc.get().map(AsRawFd::as_raw_fd)
    }

    /// Our own children. Nobody reaps them but us, so the list is whole.
    fn all_children(&self) -> Vec<Pid> {
        let Ok(proc) = self.proc() else { return vec![] };
        let ourselves = hold(proc, self.us);
        let listed = ourselves.map(|(process, stat)| process.children(&stat));
        listed.and_then(Result::ok).unwrap_or_else(|| {
            static SAID: Once = Once::new();
            SAID.say(|| {
                "this kernel lists no children (CONFIG_PROC_CHILDREN); they are looked for among all processes"
                    .to_owned()
            });
            self.scan().remove(&self.us).unwrap_or_default()
        })
    }

    /// Those of our children that are of the service.
    pub(super) fn children(&self) -> Vec<Pid> {
        self.all_children().into_iter().filter(|pid| !self.is_stranger(*pid)).collect()
    }

    /// True when there are children of ours, and none of them is of the service, or all that are may stay: `may_stay` is asked
    /// if `some_may` says that it can have a use.
    pub(super) fn only_others_left(&self, some_may: bool, may_stay: impl Fn(Pid) -> bool) -> bool {
        // Read once: what a second reading has may not be what the first had.
        let children = if self.strangers.ever() || some_may { self.all_children() } else { Vec::new() };
        !children.is_empty() && children.into_iter().all(|pid| may_stay(pid) || self.is_stranger(pid))
    }

    fn is_stranger(&self, pid: Pid) -> bool {
        self.strangers.has(pid, || self.look_up(pid).map(|(_, stat)| stat))
    }

    /// Takes hold of whoever has this number now.
    pub(super) fn look_up(&self, pid: Pid) -> Option<(Process, Stat)> {
        hold(self.proc().ok()?, pid)
    }

    /// Takes hold of a process again that was seen before, if it is still there.
    pub(super) fn hold(&self, seen: &Stat) -> Option<(Process, Stat)> {
        self.look_up(seen.pid)
            .filter(|(_, now)| now.start == seen.start && (now.ppid == seen.ppid || now.ppid == self.us))
    }

    /// Hands every living member to `visit`, parents before their children, until that breaks the walk off. A member's
    /// children are read after its visit: who was sent SIGKILL adds no more to them.
    pub(super) fn walk(&self, visit: &mut dyn FnMut(&Member<'_>) -> ControlFlow<()>) -> ControlFlow<()> {
        match self.proc() {
            Err(_) => ControlFlow::Continue(()),
            Ok(proc) if self.is_init => self.walk_namespace(proc, visit),
            Ok(proc) => self.walk_lineage(proc, visit),
        }
    }

    /// As PID 1 all that we can see is ours, also what entered from outside and is nobody's child here.
    fn walk_namespace(&self, proc: &Proc, visit: &mut dyn FnMut(&Member<'_>) -> ControlFlow<()>) -> ControlFlow<()> {
        for pid in proc.all().unwrap_or_default() {
            if pid == self.us {
                continue;
            }
            if let Some((process, stat)) = hold(proc, pid).filter(|(_, stat)| !stat.is_zombie()) {
                visit(&Member { process: &process, stat: &stat })?;
            }
        }
        ControlFlow::Continue(())
    }

    fn walk_lineage(&self, proc: &Proc, visit: &mut dyn FnMut(&Member<'_>) -> ControlFlow<()>) -> ControlFlow<()> {
        let mut scan = None;
        let mut children_of = |process: &Process, stat: &Stat| {
            process.children(stat).unwrap_or_else(|_| {
                let scan: &BTreeMap<Pid, Vec<Pid>> = scan.get_or_insert_with(|| self.scan());
                scan.get(&stat.pid).cloned().unwrap_or_default()
            })
        };
        let Some((_, our_stat)) = hold(proc, self.us) else { return ControlFlow::Continue(()) };
        let mut queue: VecDeque<(Pid, u64, Vec<Pid>)> = VecDeque::from([(self.us, our_stat.start, self.children())]);
        let mut seen = BTreeSet::new();
        while let Some((parent, start, children)) = queue.pop_front() {
            let holder = hold(proc, parent).filter(|(_, stat)| stat.start == start);
            for pid in children {
                let Some((process, stat)) = hold(proc, pid) else { continue };
                // Ours if it fell to us, or if it still has the parent through which it was found.
                let has_its_parent = stat.ppid == parent && holder.as_ref().is_some_and(|(holder, _)| holder.exists());
                let ours = stat.ppid == self.us || has_its_parent;
                if !ours || stat.is_zombie() || !seen.insert((pid, stat.start)) {
                    continue;
                }
                visit(&Member { process: &process, stat: &stat })?;
                let below = children_of(&process, &stat);
                if !below.is_empty() {
                    queue.push_back((pid, stat.start, below));
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Hands everything below these direct children to `visit`, at the least price: no `stat` is read. They must not be
    /// reaped meanwhile.
    ///
    /// A number in the list of a held parent stands for a child of that parent at that moment. Its directory is opened, then
    /// the list is read again: if the number is still in it, the directory is the child's, or that of a process that is
    /// gone since, and a signal to it reaches nobody.
    pub(super) fn cull(
        &self,
        direct: &[Pid],
        visit: &mut dyn FnMut(Pid, &Process) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let Ok(proc) = self.proc() else { return ControlFlow::Continue(()) };
        for &direct in direct {
            let Ok(process) = proc.process(direct) else { continue };
            let mut queue = VecDeque::from([(direct, process)]);
            while let Some((parent, holder)) = queue.pop_front() {
                let listed = holder.children_of_leader(parent).unwrap_or_default();
                for some in listed.chunks(MOST_HELD) {
                    let held: Vec<_> = some.iter().filter_map(|pid| Some((*pid, proc.process(*pid).ok()?))).collect();
                    let again: BTreeSet<Pid> =
                        holder.children_of_leader(parent).unwrap_or_default().into_iter().collect();
                    for (pid, process) in held.into_iter().filter(|(pid, _)| again.contains(pid)) {
                        visit(pid, &process)?;
                        // Who is not descended into falls to us when its parents are gone.
                        if queue.len() < MOST_HELD {
                            queue.push_back((pid, process));
                        }
                    }
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Parent to children, from every `stat` that can be read: the slow way, without CONFIG_PROC_CHILDREN.
    fn scan(&self) -> BTreeMap<Pid, Vec<Pid>> {
        let mut children: BTreeMap<Pid, Vec<Pid>> = BTreeMap::new();
        let Ok(proc) = self.proc() else { return children };
        for pid in proc.all().unwrap_or_default() {
            if let Some((_, stat)) = hold(proc, pid) {
                children.entry(stat.ppid).or_default().push(pid);
            }
        }
        children
    }
}

/// Takes hold of whoever has this number now.
pub(super) fn hold(proc: &Proc, pid: Pid) -> Option<(Process, Stat)> {
    let process = proc.process(pid).ok()?;
    let stat = process.stat().ok()?;
    Some((process, stat))
}
