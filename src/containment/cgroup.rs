//! Containment by a cgroup of our own (version 2): what the service makes is born in it, whoever it runs as, and one
//! write kills all of it.
//!
//! The cgroup is a directory `supervise-UUID` below our own cgroup, without controllers, so that it can be made wherever
//! the directory may be written to: as root, or in a subtree that was delegated to us. It holds the service only; we stay
//! where we are. A member that has the rights can move itself out; it stays our descendant, and the lineage has it.
//!
//! # Whose it is
//!
//! A lock (flock(2)) on the directory says that its supervisor, or that supervisor's guard, lives. The lock belongs to the
//! open file description and goes with its last descriptor, so no death leaves it behind. The directory may be opened by
//! nobody else (0700): whoever may open it may lock it. A start removes the cgroups of dead predecessors that are empty.
//!
//! # Killing
//!
//! `cgroup.kill` (Linux 5.14) reaches all below and asks for no rights over the members, but one who is being born may
//! escape it (before Linux 6.14): births are stopped first, and it is written again until `cgroup.events` says
//! `populated 0`, which alone proves that nobody is left.

mod place;
mod subtree;
#[cfg(test)]
mod tests;

pub use place::Unavailable;

use crate::log::reason;
use crate::process::Pid;
use crate::process::proc::Proc;
use crate::signal::Signal;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use uuid::Uuid;

/// What the names of our cgroups begin with. A UUID comes next.
const PREFIX: &str = "supervise-";

/// How often another start may take ours for a dead one's, in the moment before it is locked.
const MOST_TRIES: u32 = 8;

/// How many members are held open at once at the most: a limit on open files is 1,024 by habit.
const MOST_HELD: usize = 128;

/// The most rounds in one pass of killing one by one.
const MOST_ROUNDS: u32 = 16;

/// A cgroup that holds a service, locked.
#[derive(Debug)]
pub struct Cgroup {
    directory: OwnedFd,
    path: PathBuf,
    births_stopped: bool,
}

/// How a cgroup was killed. No proof that all are gone: that is `populated 0`.
#[derive(Debug)]
pub enum Killed {
    /// The kernel was told to kill all that is in it, whoever it runs as.
    AtOnce,
    /// `cgroup.kill` is missing (before Linux 5.14) or refused.
    OneByOne {
        /// How many members were sent SIGKILL.
        killed: usize,
        /// Why one of the others could not be: EPERM for another user's.
        refused: Option<io::Error>,
    },
}

impl Cgroup {
    /// Makes a cgroup below our own, named after a UUID, and locks it. Before that, removes those of dead predecessors that
    /// are empty.
    ///
    /// # Errors
    /// Says why there can be none, or none that a process could be put into.
    pub fn make(name: &str) -> Result<Cgroup, Unavailable> {
        let (directory, own) = place::find()?;
        Cgroup::make_in(own.as_fd(), &directory, name)
    }

    /// Removes the empty cgroups of those that are dead. What cannot be removed stays for the next start.
    pub fn remove_those_of_the_dead() {
        if let Ok((_, own)) = place::find() {
            remove_dead(own.as_fd());
        }
    }

    fn make_in(own: BorrowedFd<'_>, at: &Path, name: &str) -> Result<Cgroup, Unavailable> {
        remove_dead(own);
        let name = format!("{PREFIX}{name}");
        for attempt in 1..=MOST_TRIES {
            // Under another name each time: who took the last one for a dead one's may not be done with it.
            let name = if attempt == 1 { name.clone() } else { format!("{name}.{attempt}") };
            if !is_ours(OsStr::new(&name)) {
                return Err(Unavailable(format!("cannot name a cgroup {name:?}: there is no UUID in it")));
            }
            if let Some(cgroup) = try_make(own, at, &name)? {
                return Ok(cgroup);
            }
        }
        Err(Unavailable(format!("{}/{name} was removed again and again by others that start there", at.display())))
    }

    /// The cgroup of which another process gave us the directory, and with it the lock.
    pub fn from_descriptor(directory: OwnedFd) -> Cgroup {
        // For people and for the record: nothing is done by this path. Empty where there is no /proc.
        let path = nix::fcntl::readlink(format!("/proc/self/fd/{}", directory.as_raw_fd()).as_str());
        Cgroup { directory, path: path.unwrap_or_default().into(), births_stopped: false }
    }

    /// Opens and locks the cgroup of a predecessor.
    ///
    /// # Errors
    /// `NotFound` when it is gone, `WouldBlock` when its supervisor or guard lives, `InvalidInput` when the path is no such
    /// cgroup's; what the kernel says when a symbolic link is on the way (ENOTDIR) or we may not.
    pub fn open(path: &Path) -> io::Result<Cgroup> {
        let not_ours = || io::Error::new(io::ErrorKind::InvalidInput, "this is not the path of a cgroup of ours");
        let mut way = path.components();
        if way.next() != Some(Component::RootDir) || !path.file_name().is_some_and(is_ours) {
            return Err(not_ours());
        }
        let mut directory = openat(AT_FDCWD, "/", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
        for step in way {
            let Component::Normal(name) = step else { return Err(not_ours()) };
            let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            directory = openat(&directory, name, flags, Mode::empty())?;
        }
        let directory = subtree::open_directory(directory.as_fd(), c".")?;
        if fstatfs(&directory)?.filesystem_type() != CGROUP2_SUPER_MAGIC {
            return Err(not_ours());
        }
        lock(&directory).map_err(|why| match why.kind() {
            io::ErrorKind::WouldBlock => io::Error::new(why.kind(), "the supervisor of this cgroup lives"),
            _ => why,
        })?;
        Ok(Cgroup { directory, path: path.to_owned(), births_stopped: false })
    }

    /// Its directory, by name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its directory, to make a process in it (CLONE_INTO_CGROUP) and for the guard. Whoever has it holds the lock.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Where a process that writes `0` puts itself in.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn entrance(&self) -> io::Result<OwnedFd> {
        subtree::open_file(self.descriptor(), c"cgroup.procs", OFlag::O_WRONLY)
    }

    /// What reports POLLPRI when the cgroup becomes empty, or is so no more; to be read by [`populated`] each time.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn events(&self) -> io::Result<OwnedFd> {
        let events = subtree::open_file(self.descriptor(), c"cgroup.events", OFlag::O_RDONLY)?;
        // Only what happens after a reading is reported.
        populated(events.as_fd())?;
        Ok(events)
    }

    /// The processes in it and below, as far as they can be seen from our pid namespace. Those of the moment; and those of
    /// sub-cgroups that we may not read are missing.
    ///
    /// # Errors
    /// When the list cannot be read.
    pub fn members(&self) -> io::Result<Vec<Pid>> {
        let file = self.list_file();
        let mut members = BTreeSet::new();
        let mut of_top = None;
        self.walk_populated(&mut |cgroup| {
            let listed = list(cgroup, file);
            members.extend(listed.iter().flatten());
            of_top.get_or_insert(listed.map(drop));
        })?;
        of_top.unwrap_or(Ok(())).map(|()| members.into_iter().collect())
    }

    /// Whether a living process is in it or below. The dead do not count, reaped or not. Nobody is in one that was removed.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn is_populated(&self) -> io::Result<bool> {
        subtree::is_populated(self.descriptor())
    }

    /// Lets no more be born: forks fail where the pids controller is at hand, else everything is frozen. SIGKILL works on
    /// the frozen. Before Linux 5.2 neither may be there.
    pub fn stop_births(&mut self) {
        if !self.births_stopped {
            self.births_stopped = self.write(c"pids.max", "0").or_else(|_| self.write(c"cgroup.freeze", "1")).is_ok();
        }
    }

    /// Sends SIGKILL to all that is in it and below. To be repeated until nobody is.
    pub fn kill(&mut self) -> Killed {
        match self.write(c"cgroup.kill", "1") {
            Ok(()) => Killed::AtOnce,
            // Missing or refused; or the service made its cgroup threaded, and EOPNOTSUPP is the answer.
            Err(_) => self.kill_each(),
        }
    }

    fn kill_each(&self) -> Killed {
        let (mut killed, mut refused) = (BTreeSet::new(), None);
        let Ok(proc) = Proc::open() else {
            let refused = Some(io::Error::other("there is no /proc of our own pid namespace"));
            return Killed::OneByOne { killed: 0, refused };
        };
        let file = self.list_file();
        for _ in 0..MOST_ROUNDS {
            let before = killed.len();
            let walked = self.walk_populated(&mut |cgroup| {
                if let Err(why) = kill_listed(&proc, cgroup, file, &mut killed) {
                    refused = Some(why);
                }
            });
            if let Err(why) = walked {
                refused = Some(why);
            }
            if killed.len() == before {
                break;
            }
        }
        Killed::OneByOne { killed: killed.len(), refused }
    }

    /// Undoes `stop_births`, for whoever may be left, and removes the cgroup with all below it, the deepest first. Removed
    /// already is well.
    ///
    /// # Errors
    /// EBUSY when somebody is in it; EACCES when a member that had more rights than we have made something in it.
    pub fn remove(&self) -> io::Result<()> {
        if self.is_removed_at_once() {
            return Ok(());
        }
        // Fails where the file is not there, and then there is nothing to undo.
        _ = self.write(c"cgroup.freeze", "0");
        _ = self.write(c"pids.max", "max");
        let Some((above, name)) = subtree::find_name(self.descriptor())? else { return Ok(()) };
        let below = subtree::remove_below(self.descriptor());
        // What is in the way says more than that something is.
        subtree::remove_empty(above.as_fd(), &name).map_err(|why| below.err().unwrap_or(why))
    }

    /// The usual case, cheaply: it is empty, has none below it, and the name that we know is its own, as a UUID is in it.
    fn is_removed_at_once(&self) -> bool {
        let name = self.path.file_name().filter(|name| is_ours(name));
        let name = name.and_then(|name| CString::new(name.as_bytes()).ok());
        let above = subtree::open_directory(self.descriptor(), c"..").ok();
        name.zip(above).is_some_and(|(name, above)| subtree::remove_empty(above.as_fd(), &name).is_ok())
    }

    /// Where its members are listed. In a threaded cgroup the processes are not, and its threads stand for them: it is one
    /// only if the service made it so, with nobody in it.
    fn list_file(&self) -> &'static CStr {
        match subtree::read(self.descriptor(), c"cgroup.type") {
            Ok(kind) if kind == b"threaded\n" => c"cgroup.threads",
            _ => c"cgroup.procs",
        }
    }

    fn write(&self, file: &CStr, value: &str) -> io::Result<()> {
        subtree::write(self.descriptor(), file, value)
    }

    /// Visits every cgroup in which, or below which, somebody is.
    fn walk_populated(&self, visit: &mut dyn FnMut(BorrowedFd<'_>)) -> io::Result<()> {
        let mut enter = |cgroup: BorrowedFd<'_>| {
            // Where it is not to be read, there may be somebody.
            let populated = subtree::is_populated(cgroup).unwrap_or(true);
            if populated {
                visit(cgroup);
            }
            populated
        };
        subtree::walk(self.descriptor(), &mut enter, &mut |_, _| {})
    }
}

/// Reads what `Cgroup::events` opened: whether somebody is in the cgroup. The next change is reported again after that.
///
/// # Errors
/// When it cannot be read.
pub fn populated(events: BorrowedFd<'_>) -> io::Result<bool> {
    // "populated 1" and "frozen 0", a line each.
    let mut text = [0; 256];
    // SAFETY: the buffer is as long as said. At 0 the kernel makes the text anew.
    let length = unsafe { libc::pread(events.as_raw_fd(), text.as_mut_ptr().cast(), text.len(), 0) };
    match usize::try_from(length).map_err(|_| io::Error::last_os_error()) {
        Ok(length) => subtree::populated(&text[..length]),
        Err(why) if subtree::is_gone(&why) => Ok(false),
        Err(why) => Err(why),
    }
}

/// Whether a directory is one of ours by its name.
fn is_ours(name: &OsStr) -> bool {
    let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { return false };
    let (uuid, attempt) = rest.split_once('.').unwrap_or((rest, "2"));
    uuid.len() == 36 && Uuid::try_parse(uuid).is_ok() && attempt.parse::<u32>().is_ok()
}

fn lock(directory: &OwnedFd) -> io::Result<()> {
    // SAFETY: a descriptor of ours, and flags.
    match unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes a cgroup; nothing when there is one of that name, or another start removes ours before it is locked.
fn try_make(own: BorrowedFd<'_>, at: &Path, name: &str) -> Result<Option<Cgroup>, Unavailable> {
    match mkdirat(own, name, Mode::S_IRWXU) {
        Ok(()) => {}
        Err(nix::Error::EEXIST) => return Ok(None),
        Err(why) => return Err(place::cannot_make(at, &why.into())),
    }
    let path = at.join(name);
    let taken = subtree::open_directory(own, name).and_then(|directory| lock(&directory).map(|()| directory));
    let checked = taken.map_err(Refused::Error).and_then(|directory| check(directory.as_fd()).map(|()| directory));
    let why = match checked {
        Ok(directory) => return Ok(Some(Cgroup { directory, path, births_stopped: false })),
        Err(Refused::Error(why)) if subtree::is_gone(&why) || why.kind() == io::ErrorKind::WouldBlock => {
            return Ok(None);
        }
        Err(Refused::Error(why)) => format!("cannot use {}: {}", path.display(), reason(&why)),
        Err(Refused::Type(kind)) => format!(
            "no process can be put into {}, which is of type {kind:?}: the cgroups there are for threads",
            path.display()
        ),
    };
    // It is empty; and where it stays all the same, the reason is no other.
    _ = CString::new(name).map(|name| subtree::remove_empty(own, &name));
    Err(Unavailable(why))
}

enum Refused {
    Error(io::Error),
    Type(String),
}

/// Whether a process can be put into it.
fn check(cgroup: BorrowedFd<'_>) -> Result<(), Refused> {
    match subtree::read(cgroup, c"cgroup.type") {
        Ok(kind) if kind == b"domain\n" => {}
        Ok(kind) => return Err(Refused::Type(String::from_utf8_lossy(&kind).trim_end().to_owned())),
        // Before Linux 4.14 there is no such file. Where the whole cgroup is gone, the next one is not there either.
        Err(why) if subtree::is_gone(&why) => {}
        Err(why) => return Err(Refused::Error(why)),
    }
    subtree::open_file(cgroup, c"cgroup.procs", OFlag::O_WRONLY).map(drop).map_err(Refused::Error)
}

/// Removes the empty cgroups of those that are dead. What cannot be removed stays for the next start.
fn remove_dead(own: BorrowedFd<'_>) {
    for name in subtree::subdirectories(own) {
        if !is_ours(OsStr::from_bytes(name.to_bytes())) {
            continue;
        }
        let Ok(directory) = subtree::open_directory(own, name.as_c_str()) else { continue };
        // Held until it is removed: nobody else can take it for a cgroup to live in.
        if lock(&directory).is_ok() && subtree::is_populated(directory.as_fd()).is_ok_and(|populated| !populated) {
            _ = subtree::remove_below(directory.as_fd()).and_then(|()| subtree::remove_empty(own, &name));
        }
    }
}

/// Those directly in a cgroup.
fn list(cgroup: BorrowedFd<'_>, file: &CStr) -> io::Result<Vec<Pid>> {
    let text = match subtree::read(cgroup, file) {
        // A threaded one below ours: its processes are listed further up (cgroups(7)).
        Err(why) if why.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(Vec::new()),
        Err(why) if subtree::is_gone(&why) => return Ok(Vec::new()),
        text => text?,
    };
    let numbers = text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok()?.parse().ok());
    // 0 stands for a process that has no number in our pid namespace.
    Ok(numbers.filter(|pid| *pid > 0).collect())
}

/// Kills those directly in a cgroup.
///
/// A number in the list stands for a member at that moment. Its directory in `/proc` is opened, then the list is read
/// again: if the number is still in it, the directory is the member's, or that of a process that is gone since, and a signal
/// to it reaches nobody. A signal to a thread's directory is one to its process.
fn kill_listed(proc: &Proc, cgroup: BorrowedFd<'_>, file: &CStr, killed: &mut BTreeSet<Pid>) -> io::Result<()> {
    let us = nix::unistd::getpid().as_raw();
    let mut refused = None;
    for some in list(cgroup, file)?.chunks(MOST_HELD) {
        let mut held = Vec::with_capacity(some.len());
        for &pid in some.iter().filter(|pid| **pid != us) {
            match proc.process(pid) {
                Ok(process) => held.push((pid, process)),
                Err(why) if subtree::is_gone(&why) => {}
                Err(why) => refused = Some(why),
            }
        }
        let again: BTreeSet<Pid> = list(cgroup, file)?.into_iter().collect();
        for (pid, process) in held.into_iter().filter(|(pid, _)| again.contains(pid)) {
            match process.signal(pid, Signal::KILL) {
                Ok(()) => _ = killed.insert(pid),
                Err(why) if why.raw_os_error() == Some(libc::ESRCH) => {}
                Err(why) => refused = Some(why),
            }
        }
    }
    refused.map_or(Ok(()), Err)
}
