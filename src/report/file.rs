//! Where the report goes, without harm to the run: every failure is a warning and no more.
//!
//! A file is replaced as a whole. Everything else is written into as it is: a pipe, a device, and what a descriptor that
//! we were started with leads to, which may be a file that the service writes to as well.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long whoever reads the report may leave it lying before we end without them.
const PATIENCE: Duration = Duration::from_secs(5);

/// As many as the kernel follows.
const MOST_LINKS: usize = 40;

/// A place for the report, found before the service starts: afterwards neither the working directory nor the standard
/// output is ours.
#[derive(Debug)]
pub struct Destination {
    /// As it was asked for.
    path: PathBuf,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Replace(PathBuf),
    Write(File),
}

impl Destination {
    /// Finds the place.
    ///
    /// # Errors
    /// When something stands there that cannot be written to.
    pub fn find(path: &Path) -> io::Result<Destination> {
        let path = std::path::absolute(path)?;
        let place = Place::find(path.clone())?;
        Ok(Destination { path, place })
    }

    /// A place that another process of ours found: a file by its path, everything else by its descriptor.
    pub fn known(path: PathBuf, descriptor: Option<OwnedFd>) -> Destination {
        let place = descriptor.map_or_else(|| Place::Replace(path.clone()), |open| Place::Write(File::from(open)));
        Destination { path, place }
    }

    /// The file that is to be replaced, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match &self.place {
            Place::Replace(path) => Some(path),
            Place::Write(_) => None,
        }
    }

    /// The descriptor that has to stay open.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.place {
            Place::Replace(_) => None,
            Place::Write(file) => Some(file.as_fd()),
        }
    }

    /// Its name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the report. A reader of a file finds the old one or the new one, never a part.
    ///
    /// # Errors
    /// When it cannot be written; a file that stood there before stands there still.
    pub fn write(&mut self, text: &str) -> io::Result<()> {
        match &self.place {
            Place::Write(file) => write_patiently(file, text.as_bytes()),
            Place::Replace(path) => {
                // In the same directory, so that the rename stays in one file system.
                let temporary = path.with_file_name(format!(".supervise-report.{}.tmp", std::process::id()));
                let written = write_whole(&temporary, text).and_then(|()| fs::rename(&temporary, path));
                if written.is_err() {
                    // It may not have been made at all.
                    let _ = fs::remove_file(&temporary);
                }
                written
            }
        }
    }
}

impl Place {
    /// Follows the path, link by link: the file behind a link is what is to be replaced, not the link.
    fn find(mut path: PathBuf) -> io::Result<Place> {
        for _ in 0..MOST_LINKS {
            if let Some(descriptor) = descriptor(&path) {
                return duplicate(descriptor).map(Place::Write);
            }
            match fs::read_link(&path) {
                Ok(_) if !is_trusted(&path)? => return Err(io::Error::from_raw_os_error(libc::EPERM)),
                Ok(target) => path = path.parent().unwrap_or(Path::new("/")).join(target),
                Err(_) => return Place::at(path),
            }
        }
        Err(io::Error::from_raw_os_error(libc::ELOOP))
    }

    fn at(path: PathBuf) -> io::Result<Place> {
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_dir() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
            Ok(meta) if !meta.is_file() => {
                // Without waiting for a reader, and without becoming a terminal's owner.
                let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
                OpenOptions::new().write(true).custom_flags(flags).open(&path).map(Place::Write)
            }
            // Whether a file can be made is seen when it is.
            _ => Ok(Place::Replace(path)),
        }
    }
}

/// Whether a link was made by us or by root: in a directory that others may write to, theirs could lead to any file of ours.
fn is_trusted(link: &Path) -> io::Result<bool> {
    let owner = fs::symlink_metadata(link)?.uid();
    Ok(owner == 0 || owner == nix::unistd::geteuid().as_raw())
}

/// Which descriptor of ours a path means. To open such a path would begin a file anew from its start, over what the service
/// wrote, and fail for a socket.
fn descriptor(path: &Path) -> Option<RawFd> {
    match path.to_str()? {
        "/dev/stdin" => Some(0),
        "/dev/stdout" => Some(1),
        "/dev/stderr" => Some(2),
        path => path.strip_prefix("/dev/fd/").or_else(|| path.strip_prefix("/proc/self/fd/"))?.parse().ok(),
    }
}

fn duplicate(descriptor: RawFd) -> io::Result<File> {
    // SAFETY: fcntl takes any number.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: new and ours.
    Ok(unsafe { File::from_raw_fd(copy) })
}

fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    // A run that was killed in the middle of this may have had our number; in a container each has.
    let _ = fs::remove_file(path);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// In pieces that do not wait once the kernel says that there is room: the flags of the descriptor may be the service's
/// as well, and are not ours to change.
fn write_patiently(mut file: &File, mut text: &[u8]) -> io::Result<()> {
    let mut until = Instant::now() + PATIENCE;
    while !text.is_empty() {
        wait_for_room(file, until)?;
        match file.write(&text[..text.len().min(libc::PIPE_BUF)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => {
                text = &text[length..];
                until = Instant::now() + PATIENCE;
            }
            // Somebody else took the room.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < until => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn wait_for_room(file: &File, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now()).as_millis();
    let mut poll = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd.
    match unsafe { libc::poll(&raw mut poll, 1, i32::try_from(left).unwrap_or(i32::MAX)) } {
        0 => Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
        _ => Ok(()),
    }
}
