//! A named run: the only one of its name, after what earlier ones left is gone, and on record for the next.

use crate::containment::sweep::{Scope, Sweep};
use crate::log::reason;
use crate::process::Pid;
use crate::process::marks;
use crate::process::proc::Stat;
use crate::runtime::{Entered, Identity, Invocation, Name, Refused, Runtime};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use tracing::warn;

/// What a run has beside its name.
#[derive(Debug)]
pub struct Named {
    name: Name,
    runtime: Option<Runtime>,
    /// What is on record: earlier invocations that are not proven to be all gone, and this one at the end.
    on_record: Vec<Invocation>,
    can_record: bool,
}

impl Named {
    /// Takes the lock of the name. Where there is no place for one, the run goes on without, and that is said.
    ///
    /// # Errors
    /// When another run of this name has it, or what stands in its place is not ours alone.
    pub fn enter(name: &Name, announced: Pid) -> Result<Named, Refused> {
        let runtime = match Runtime::enter(name, announced) {
            Entered::Alone(runtime) => Some(runtime),
            Entered::Without(why) => {
                warn!(
                    "\"{name}\" has no runtime directory: {why}; a second start is not refused, and nothing is swept"
                );
                None
            }
            Entered::Refused(refused) => return Err(refused),
        };
        let former = runtime.as_ref().map_or(Ok(vec![]), Runtime::former);
        let on_record = former.unwrap_or_else(|why| {
            warn!("{why}");
            vec![]
        });
        Ok(Named { name: name.clone(), runtime, on_record, can_record: true })
    }

    /// Whether it is sure that no other run of this name is alive.
    pub fn is_alone(&self) -> bool {
        self.runtime.is_some()
    }

    /// The lock, for the guard.
    pub fn lock(&self) -> Option<BorrowedFd<'_>> {
        self.runtime.as_ref().map(Runtime::lock)
    }

    /// The descriptors that have to stay open.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.runtime.iter().flat_map(Runtime::descriptors)
    }

    /// The search for what earlier invocations left; none without the lock, since another run may be alive then.
    ///
    /// # Errors
    /// When there is no descriptor to be had.
    pub fn sweep(&self, present: &str, guard: Option<Pid>, allow_keep: bool) -> io::Result<Option<Sweep>> {
        if self.runtime.is_none() {
            return Ok(None);
        }
        let scope = Scope {
            name: self.name.clone(),
            uid: nix::unistd::geteuid().as_raw(),
            present: present.to_owned(),
            former: self.on_record.clone(),
            ours: guard.into_iter().collect(),
            allow_keep,
        };
        Sweep::new(scope).map(Some)
    }

    /// Notes that nothing of earlier invocations is left.
    pub fn swept(&mut self) {
        self.on_record.clear();
        self.write();
    }

    /// Puts this invocation on record before anything of it is started. Gives the variables by which its processes are found.
    pub fn begin(&mut self, id: &str, cgroup: Option<std::path::PathBuf>) -> Vec<(String, String)> {
        let supervisor = Identity::find(nix::unistd::getpid().as_raw());
        self.on_record.push(Invocation { supervisor, cgroup, ..Invocation::begin(id.to_owned()) });
        self.write();
        let mark = self.name.mark(nix::unistd::geteuid().as_raw());
        vec![(marks::INVOCATION.to_owned(), id.to_owned()), (marks::NAME.to_owned(), mark)]
    }

    /// Puts the main process on record.
    pub fn started(&mut self, main: Pid, own_session: bool) {
        if let Some(ours) = self.on_record.last_mut() {
            ours.main = Identity::find(main);
            ours.own_session = own_session;
        }
        self.write();
    }

    /// Takes this invocation off the record: it is proven that nothing of it is left.
    pub fn ended(&mut self) {
        self.on_record.pop();
        self.write();
    }

    /// Leaves it on record with those that could not be ended.
    pub fn survived<'s>(&mut self, id: &str, survivors: impl Iterator<Item = &'s Stat>) {
        let survivors: Vec<Identity> = survivors.map(|stat| Identity { pid: stat.pid, start: stat.start }).collect();
        match self.on_record.last_mut() {
            Some(last) => last.survivors.extend(survivors),
            None => self.on_record.push(Invocation { survivors, ..Invocation::begin(id.to_owned()) }),
        }
        self.write();
    }

    fn write(&mut self) {
        let Some(runtime) = &self.runtime else { return };
        if let Err(why) = runtime.record(&self.on_record)
            && std::mem::replace(&mut self.can_record, false)
        {
            let path = runtime.path().display();
            warn!("cannot write to {path}: {}; the next start may not find all that this run leaves", reason(&why));
        }
    }
}
