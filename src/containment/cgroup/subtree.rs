//! A cgroup and all below it: its files, its walk, its removal.
//!
//! Everything is reached from an opened directory. However deep a service makes its cgroups (the kernel sets no limit
//! by default), the walk holds two descriptors and calls itself nowhere: it goes back up by `..`, which is safe because
//! kernfs renames no cgroup of version 2.

use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{AccessFlags, UnlinkatFlags, faccessat, unlinkat};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The most cgroups that one walk visits: who makes them quicker than we walk must not hold us for ever.
const MOST_VISITED: usize = 1 << 17;

/// Opens a directory to read it, no symbolic link followed at its end.
pub(super) fn open_directory<P: ?Sized + nix::NixPath>(from: BorrowedFd<'_>, name: &P) -> io::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(openat(from, name, flags, Mode::empty())?)
}

/// Opens a file of a cgroup.
pub(super) fn open_file(cgroup: BorrowedFd<'_>, name: &CStr, how: OFlag) -> io::Result<OwnedFd> {
    Ok(openat(cgroup, name, how | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?)
}

pub(super) fn read(cgroup: BorrowedFd<'_>, name: &CStr) -> io::Result<Vec<u8>> {
    let mut file = File::from(open_file(cgroup, name, OFlag::O_RDONLY)?);
    let mut text = Vec::new();
    // The kernel knows no size beforehand for which the standard library could ask.
    loop {
        let length = text.len();
        text.resize(length + 4096, 0);
        let more = file.read(&mut text[length..])?;
        text.truncate(length + more);
        if more == 0 {
            return Ok(text);
        }
    }
}

pub(super) fn write(cgroup: BorrowedFd<'_>, name: &CStr, value: &str) -> io::Result<()> {
    File::from(open_file(cgroup, name, OFlag::O_WRONLY)?).write_all(value.as_bytes())
}

/// Whether an error says that the cgroup itself is no more: its files are not found, or answer nothing.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

/// What `cgroup.events` says (cgroups(7)): whether a living process is in it or below. Nobody is in what is gone.
pub(super) fn is_populated(cgroup: BorrowedFd<'_>) -> io::Result<bool> {
    match read(cgroup, c"cgroup.events").and_then(|text| populated(&text)) {
        Err(error) if is_gone(&error) => Ok(false),
        answer => answer,
    }
}

pub(super) fn populated(events: &[u8]) -> io::Result<bool> {
    let value = events.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"populated "));
    match value {
        Some(b"0") => Ok(false),
        Some(b"1") => Ok(true),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "cgroup.events does not say whether it is populated")),
    }
}

/// Visits a cgroup and all below. `enter` is called before what is below, and says whether to go there; `leave` after
/// it, with the directory above and the name, and not for the top.
///
/// # Errors
/// When the way is lost.
pub(super) fn walk(
    top: BorrowedFd<'_>,
    enter: &mut dyn FnMut(BorrowedFd<'_>) -> bool,
    leave: &mut dyn FnMut(BorrowedFd<'_>, &CStr),
) -> io::Result<()> {
    let mut children = |cgroup: BorrowedFd<'_>| if enter(cgroup) { subdirectories(cgroup) } else { Vec::new() };
    let mut here = open_directory(top, c".")?;
    // The way from the top down to here, and what is still to be visited in each directory on it.
    let mut way: Vec<CString> = Vec::new();
    let mut waiting = vec![children(here.as_fd())];
    let mut visits = 1;
    while let Some(siblings) = waiting.last_mut() {
        if let Some(name) = siblings.pop() {
            match step_into(here.as_fd(), &name) {
                Ok(below) if visits < MOST_VISITED => {
                    visits += 1;
                    waiting.push(children(below.as_fd()));
                    way.push(name);
                    here = below;
                }
                Ok(_) => break,
                Err(_) => leave(here.as_fd(), &name),
            }
        } else {
            waiting.pop();
            let Some(name) = way.pop() else { break };
            here = open_directory(here.as_fd(), c"..")?;
            leave(here.as_fd(), &name);
        }
    }
    Ok(())
}

/// Opens a directory out of which there is a way back: `..` asks for the right to search it.
fn step_into(from: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let below = open_directory(from, name)?;
    faccessat(&below, c".", AccessFlags::X_OK, AtFlags::empty())?;
    Ok(below)
}

/// The cgroups directly below; none where they may not be listed.
pub(super) fn subdirectories(cgroup: BorrowedFd<'_>) -> Vec<CString> {
    let entries = entries(cgroup, |entry| entry.file_type() == Some(Type::Directory));
    entries.unwrap_or_default()
}

fn entries(directory: BorrowedFd<'_>, wanted: impl Fn(&nix::dir::Entry) -> bool) -> io::Result<Vec<CString>> {
    let mut listing = Dir::from_fd(open_directory(directory, c".")?)?;
    // An error is the last of them: the same one would come for ever.
    let found = listing.iter().map_while(Result::ok).filter(|entry| wanted(entry));
    let names = found.map(|entry| entry.file_name().to_owned());
    Ok(names.filter(|name| ![c".", c".."].contains(&name.as_c_str())).collect())
}

/// Removes all below a cgroup, the deepest first.
///
/// # Errors
/// The first thing that could not be removed, after everything else was: EBUSY where somebody is in it.
pub(super) fn remove_below(top: BorrowedFd<'_>) -> io::Result<()> {
    let mut first = None;
    let walked = walk(top, &mut |_| true, &mut |above, name| {
        if let Err(why) = remove_empty(above, name) {
            first.get_or_insert(why);
        }
    });
    first.map_or(walked, Err)
}

/// Removes one that has nobody in it and nothing below. What is gone already is no error.
pub(super) fn remove_empty(above: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    match unlinkat(above, name, UnlinkatFlags::RemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(why) => Err(why.into()),
    }
}

/// The directory above, and the name that a cgroup has in it; nothing when it is there no more.
pub(super) fn find_name(cgroup: BorrowedFd<'_>) -> io::Result<Option<(OwnedFd, CString)>> {
    let ours = fstat(cgroup)?;
    let above = open_directory(cgroup, c"..")?;
    // At the root of a mount what is above is of another file system, and its numbers mean other things.
    if fstat(&above)?.st_dev != ours.st_dev {
        return Err(Errno::EXDEV.into());
    }
    let names = entries(above.as_fd(), |entry| entry.ino() == ours.st_ino)?;
    Ok(names.into_iter().next().map(|name| (above, name)))
}
