//! Directories and files that are ours alone, opened without following a link.
//!
//! What is opened is checked after it was opened, through its descriptor, so that nobody can put another in its place between
//! the check and the use.

use super::{Failure, Name, Refused};
use crate::log::reason;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat, umask};
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// What no directory of ours gives to others: to write in it.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Why a file was not opened.
pub(super) enum NoFile {
    /// It is a link, or another's, or no file.
    NotOurs(String),
    /// The kernel says why.
    Failed(io::Error),
}

/// Opens the lock, and makes it when it is missing.
pub(super) fn lock(directory: &OwnedFd, owner: u32, path: &Path) -> Result<File, Failure> {
    open_ours(directory, super::LOCK, OFlag::O_RDWR | OFlag::O_CREAT, owner).map_err(|no_file| match no_file {
        NoFile::NotOurs(what) => not_ours(path, &format!("{what}; remove it")),
        NoFile::Failed(why) => without("open", path, why),
    })
}

/// Makes what is missing of `BASE/supervise/NAME` and opens it.
pub(super) fn make(base: &Path, owner: u32, name: &Name) -> Result<(OwnedFd, PathBuf), Failure> {
    // Only to go on from: this needs no right to read it.
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let opened = nix::fcntl::open(base, flags, Mode::empty());
    let mut directory = opened.map_err(|why| without("open", base, why.into()))?;
    let mut path = base.to_owned();
    for part in ["supervise".to_owned(), name.to_string()] {
        path.push(&part);
        // Neither has a NUL in it.
        let part = CString::new(part).unwrap_or_default();
        directory = make_one(&directory, &part, &path, owner)?;
    }
    Ok((directory, path))
}

fn make_one(above: &OwnedFd, part: &CStr, path: &Path, owner: u32) -> Result<OwnedFd, Failure> {
    if let Err(why) = for_us_alone(|| mkdirat(above, part, Mode::S_IRWXU))
        && why != nix::errno::Errno::EEXIST
    {
        return Err(without("make", path, why.into()));
    }
    let directory = open_directory(above, part, path, owner)?;
    close_to_others(&directory);
    Ok(directory)
}

/// Takes the right to look into it from others, who cannot have written there.
fn close_to_others(directory: &OwnedFd) {
    let others = Mode::S_IRWXG | Mode::S_IRWXO;
    if fstat(directory).is_ok_and(|stat| stat.st_mode & others.bits() != 0) {
        let opened = openat(directory, ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty());
        // Refused on a read-only file system, where nothing can be kept secret either.
        let _ = opened.and_then(|opened| nix::sys::stat::fchmod(&opened, Mode::S_IRWXU));
    }
}

/// Opens a directory if it is ours alone.
pub(super) fn open_directory(above: &OwnedFd, part: &CStr, path: &Path, owner: u32) -> Result<OwnedFd, Failure> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let directory = match openat(above, part, flags, Mode::empty()) {
        Ok(directory) => directory,
        Err(nix::errno::Errno::ELOOP | nix::errno::Errno::ENOTDIR) => {
            return Err(not_ours(path, "is not a directory; remove it"));
        }
        Err(why) => return Err(without("open", path, why.into())),
    };
    let stat = fstat(&directory).map_err(|why| without("look at", path, why.into()))?;
    if stat.st_uid != owner {
        let why = format!("belongs to user {} and not to user {owner}, who starts this; remove it", stat.st_uid);
        return Err(not_ours(path, &why));
    }
    if stat.st_mode & WRITABLE_BY_OTHERS != 0 {
        let why = format!("can be written to by others (mode {:04o}); remove it", stat.st_mode & 0o7777);
        return Err(not_ours(path, &why));
    }
    Ok(directory)
}

fn not_ours(path: &Path, why: &str) -> Failure {
    let text =
        format!("{} {why}, or start this without a name: no lock and no record there could be trusted", path.display());
    Failure::Refused(Refused::NotOurs(text))
}

pub(super) fn without(what: &str, path: &Path, why: io::Error) -> Failure {
    Failure::Without(format!("cannot {what} {}: {}", path.display(), reason(&why)))
}

/// Makes something that others have no right to, whatever umask we were given: one that takes our own rights as well would
/// lock us out.
fn for_us_alone<T>(make: impl FnOnce() -> T) -> T {
    let inherited = umask(Mode::S_IRWXG | Mode::S_IRWXO);
    let made = make();
    umask(inherited);
    made
}

/// Opens a file of ours in a directory of ours; makes it when the flags say so.
pub(super) fn open_ours(directory: &OwnedFd, name: &CStr, flags: OFlag, owner: u32) -> Result<File, NoFile> {
    // It does not wait for whoever has the other end of a pipe.
    let always = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    let file = match for_us_alone(|| openat(directory, name, flags | always, mode)) {
        Ok(file) => File::from(file),
        Err(why) => {
            // ELOOP for a link, ENXIO for a socket, EISDIR, EACCES for another's: what stands there says more.
            let there = fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW);
            return Err(match there.map(|stat| foreign(&stat, owner)) {
                Ok(Some(what)) => NoFile::NotOurs(what),
                _ => NoFile::Failed(why.into()),
            });
        }
    };
    let stat = fstat(file.as_fd()).map_err(|why| NoFile::Failed(why.into()))?;
    match foreign(&stat, owner) {
        Some(what) => Err(NoFile::NotOurs(what)),
        None => Ok(file),
    }
}

/// Why it is no file of ours.
fn foreign(stat: &FileStat, owner: u32) -> Option<String> {
    let kind = SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits());
    if kind == SFlag::S_IFLNK {
        Some("is a link".to_owned())
    } else if kind != SFlag::S_IFREG {
        Some("is not a file".to_owned())
    } else if stat.st_uid != owner {
        Some(format!("belongs to user {} and not to user {owner}", stat.st_uid))
    } else if stat.st_mode & WRITABLE_BY_OTHERS != 0 {
        Some("can be written to by others".to_owned())
    } else {
        None
    }
}

/// Makes a file that was not there.
pub(super) fn create(directory: &OwnedFd, name: &CStr) -> io::Result<File> {
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(File::from(for_us_alone(|| openat(directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR))?))
}

/// Removes a file, if it is there.
pub(super) fn remove(directory: &OwnedFd, name: &CStr) -> io::Result<()> {
    match unlinkat(directory, name, UnlinkatFlags::NoRemoveDir) {
        Err(why) if why != nix::errno::Errno::ENOENT => Err(why.into()),
        _ => Ok(()),
    }
}

/// Puts a file in the place of another.
pub(super) fn rename(directory: &OwnedFd, from: &CStr, to: &CStr) -> io::Result<()> {
    Ok(nix::fcntl::renameat(directory, from, directory, to)?)
}
