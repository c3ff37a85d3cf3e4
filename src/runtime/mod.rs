//! The runtime directory of a named run: the lock that keeps a second one out, and the record of what may be left of earlier
//! ones.
//!
//! It is `/run/supervise/NAME` for root and `$XDG_RUNTIME_DIR/supervise/NAME` for others. `/run` and XDG_RUNTIME_DIR are the
//! system's and are followed as they are; below them nothing is believed that is a link, that is another user's, or that
//! others may write to. The directory stays after the run, and the lock file with it: a second run that had opened a lock file
//! before it was removed would hold a lock that a third one does not see.

mod name;
mod place;
mod probe;
mod state;
#[cfg(test)]
pub(crate) mod tests;

pub use name::{Name, NotAName};
pub use probe::probe;
pub use state::{Identity, Invocation};

use crate::log::reason;
use crate::process::proc::{Proc, Process};
use crate::process::title::SUPERVISOR;
use crate::process::{Pid, marks};
use marks::RUNTIME;
use nix::fcntl::OFlag;
use std::ffi::{CStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

const LOCK: &CStr = c"lock";
const STATE: &CStr = c"state.json";
const NEW_STATE: &CStr = c"state.json.new";

/// The largest record that is read.
const LARGEST_STATE: u64 = 1 << 20;

/// The most invocations that are recorded, the latest of them; a record of so many stays far below the largest that is read.
const MOST_RECORDED: usize = 200;

/// The runtime directory, with the lock held as long as this, or a copy of its descriptor, is open.
#[derive(Debug)]
pub struct Runtime {
    directory: OwnedFd,
    lock: File,
    path: PathBuf,
    owner: u32,
}

/// What became of the wish to be the only run of a name.
#[derive(Debug)]
pub enum Entered {
    /// We are the only one.
    Alone(Runtime),
    /// There is no runtime directory to be had, and this says why. The run goes on without lock and record, and without a
    /// sweep: another run of this name may be alive.
    Without(String),
    /// Nothing may be started.
    Refused(Refused),
}

/// Why a named run may not start.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is one already.
    Running {
        /// The process that people see of it, if that could be found out.
        pid: Option<Pid>,
        /// The name of both.
        name: String,
    },
    /// What stands there is not ours alone. Says what it is, and what to do.
    NotOurs(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Running { pid, name } => {
                write!(f, "{name:?} is running already")?;
                if let Some(pid) = pid {
                    write!(f, " as pid {pid}")?;
                }
                write!(f, "; stop it first, or give this one another name")
            }
            Refused::NotOurs(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Refused {}

/// Why there is no runtime directory.
enum Failure {
    Without(String),
    Refused(Refused),
}

impl Runtime {
    /// Makes the directory, takes the lock, and announces the process that people see of this run.
    pub fn enter(name: &Name, announced: Pid) -> Entered {
        let owner = nix::unistd::geteuid().as_raw();
        let entered = base(owner, std::env::var_os(RUNTIME)).map_err(Failure::Without);
        match entered.and_then(|base| Runtime::enter_below(&base, owner, name, announced)) {
            Ok(runtime) => Entered::Alone(runtime),
            Err(Failure::Without(why)) => Entered::Without(why),
            Err(Failure::Refused(refused)) => Entered::Refused(refused),
        }
    }

    fn enter_below(base: &Path, owner: u32, name: &Name, announced: Pid) -> Result<Runtime, Failure> {
        let (directory, path) = place::make(base, owner, name)?;
        let lock = place::lock(&directory, owner, &path.join("lock"))?;
        // SAFETY: a descriptor of ours; it does not wait.
        if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let why = io::Error::last_os_error();
            if why.kind() != io::ErrorKind::WouldBlock {
                return Err(Failure::Without(format!("cannot lock {}/lock: {}", path.display(), reason(&why))));
            }
            let refused = Refused::Running { pid: holder(&lock), name: name.to_string() };
            return Err(Failure::Refused(refused));
        }
        if let Some(pid) = holder_of_a_removed_lock(&path.join("lock")) {
            return Err(Failure::Refused(Refused::Running { pid: Some(pid), name: name.to_string() }));
        }
        // The lock holds without it; a second start then says less.
        let _ = announce(&lock, announced);
        Ok(Runtime { directory, lock, path, owner })
    }

    /// The earlier invocations that are not proven to be all gone, the oldest first.
    ///
    /// # Errors
    /// When the record cannot be trusted or understood: a warning for people. Nothing is known then.
    pub fn former(&self) -> Result<Vec<Invocation>, String> {
        let path = self.path.join("state.json");
        let unusable = |why: &str| {
            let path = path.display();
            format!("the record {path} is not used: {why}; what earlier runs left is looked for by their name only")
        };
        let file = match place::open_ours(&self.directory, STATE, OFlag::O_RDONLY, self.owner) {
            Ok(file) => file,
            Err(place::NoFile::Failed(why)) if why.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            Err(place::NoFile::Failed(why)) => return Err(unusable(&reason(&why))),
            Err(place::NoFile::NotOurs(why)) => return Err(unusable(&why)),
        };
        let mut text = Vec::new();
        file.take(LARGEST_STATE + 1).read_to_end(&mut text).map_err(|why| unusable(&reason(&why)))?;
        if u64::try_from(text.len()).map_or(true, |length| length > LARGEST_STATE) {
            return Err(unusable("it is larger than 1 MiB"));
        }
        state::decode(&text).map_err(|why| unusable(&why))
    }

    /// Records what is not proven to be all gone, the oldest first: this invocation too, as long as it runs. Nothing to be
    /// recorded removes the record. A reader finds the old one or the new one, never a part; it is not forced to a disk,
    /// since no process outlives the kernel.
    ///
    /// # Errors
    /// When it cannot be written; the old record is there still.
    pub fn record(&self, all: &[Invocation]) -> io::Result<()> {
        let latest = &all[all.len().saturating_sub(MOST_RECORDED)..];
        if latest.is_empty() {
            return place::remove(&self.directory, STATE);
        }
        let text = state::encode(latest)?;
        // Left by a run that was killed in the middle of this.
        place::remove(&self.directory, NEW_STATE)?;
        let written = place::create(&self.directory, NEW_STATE)
            .and_then(|mut file| file.write_all(&text))
            .and_then(|()| place::rename(&self.directory, NEW_STATE, STATE));
        if written.is_err() {
            // It may not have been made at all.
            let _ = place::remove(&self.directory, NEW_STATE);
        }
        written
    }

    /// The lock: whoever has a copy of this descriptor holds it as well.
    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// The descriptors that have to stay open.
    pub fn descriptors(&self) -> [RawFd; 2] {
        [self.directory.as_raw_fd(), self.lock.as_raw_fd()]
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The directory below which ours is; else why there is none.
fn base(owner: u32, of_user: Option<OsString>) -> Result<PathBuf, String> {
    if owner == 0 {
        return Ok(PathBuf::from(marks::ROOTS_BASE));
    }
    let base = PathBuf::from(
        of_user
            .filter(|base| !base.is_empty())
            .ok_or("XDG_RUNTIME_DIR is not set (a login session sets it; else set it to a directory of your own)")?,
    );
    if !base.is_absolute() {
        return Err(format!("XDG_RUNTIME_DIR is {}, which is no absolute path", base.display()));
    }
    match std::fs::metadata(&base) {
        Err(why) => Err(format!("XDG_RUNTIME_DIR is {}: {}", base.display(), reason(&why))),
        Ok(meta) if meta.uid() != owner => {
            Err(format!("XDG_RUNTIME_DIR is {}, which belongs to user {} and not to us", base.display(), meta.uid()))
        }
        Ok(_) => Ok(base),
    }
}

/// Who runs with a lock that was removed since: by a clean-up of `/run`, or with XDG_RUNTIME_DIR at a logout. What it runs
/// would be taken for a leftover.
fn holder_of_a_removed_lock(lock: &Path) -> Option<Pid> {
    let proc = Proc::open().ok()?;
    let us = nix::unistd::getpid().as_raw();
    let root = proc.process(us).ok()?.root();
    let removed = format!("{} (deleted)", lock.display());
    proc.all().ok()?.into_iter().filter(|pid| *pid != us).find_map(|pid| {
        let process = proc.process(pid).ok()?;
        let stat = process.stat().ok()?;
        let holds = |process: &Process| process.root() == root && process.has_open(&removed);
        // Below a guard it has this name always, and people know the guard.
        let is_one = [SUPERVISOR, "supervise"].contains(&&*stat.comm) && holds(&process);
        let guard = || proc.process(stat.ppid).ok().filter(holds).map(|_| stat.ppid);
        is_one.then(|| guard().unwrap_or(pid))
    })
}

/// Writes the process that people see into the lock, with its start time, so that a number that is another's by now is not
/// believed.
fn announce(lock: &File, announced: Pid) -> io::Result<()> {
    lock.set_len(0)?;
    let text = match Identity::find(announced) {
        Some(identity) => format!("{} {}\n", identity.pid, identity.start),
        None => format!("{announced}\n"),
    };
    lock.write_all_at(text.as_bytes(), 0)
}

/// Who holds a lock: the one that was announced, if that one is alive; else the one that took it, if the kernel says so.
fn holder(lock: &File) -> Option<Pid> {
    let mut text = [0; 64];
    let length = lock.read_at(&mut text, 0).unwrap_or(0);
    announced(&text[..length]).or_else(|| {
        let meta = lock.metadata().ok()?;
        let locks = std::fs::read_to_string("/proc/locks").ok()?;
        let path = std::fs::read_link(format!("/proc/self/fd/{}", lock.as_raw_fd())).ok()?;
        holder_among(&locks, meta.dev(), meta.ino()).map(|holder| seen_by_people(holder, &path))
    })
}

/// The guard of a supervisor, which has the lock before it has announced anybody.
fn seen_by_people(holder: Pid, lock: &Path) -> Pid {
    let guard = || {
        let proc = Proc::open().ok()?;
        let stat = proc.process(holder).ok()?.stat().ok()?;
        let above = proc.process(stat.ppid).ok().filter(|above| above.has_open(&lock.to_string_lossy()));
        above.filter(|_| stat.comm == SUPERVISOR).map(|_| stat.ppid)
    };
    guard().unwrap_or(holder)
}

fn announced(text: &[u8]) -> Option<Pid> {
    let mut words = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
    let pid = words.next()?.parse().ok().filter(|pid| *pid > 0)?;
    // Without a /proc to ask, it is most likely the one.
    let start = words.next().and_then(|start| start.parse().ok());
    let is_believed = Proc::open().is_err() || start.is_some() && Identity::find(pid).map(|now| now.start) == start;
    is_believed.then_some(pid)
}

/// Finds a lock in `/proc/locks` (proc_locks(5)): `1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE 0 EOF`. The device is not
/// that of stat(2) on every file system; then nothing is found.
fn holder_among(locks: &str, device: u64, inode: u64) -> Option<Pid> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_it = words.get(1) == Some(&"FLOCK") && words.get(5) == Some(&file.as_str());
        words.get(4).filter(|_| is_it)?.parse().ok().filter(|pid| *pid > 0)
    })
}
