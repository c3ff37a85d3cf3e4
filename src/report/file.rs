//! Where the report goes, without harm to the run: every failure is a warning and no more.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A place for the report, found before the service starts: afterwards neither the working directory nor the standard
/// output is ours.
#[derive(Debug)]
pub enum Destination {
    /// A file that is replaced as a whole.
    Replace(PathBuf),
    /// A pipe, a device, a link: written into as it is.
    Write(PathBuf, File),
}

impl Destination {
    /// Finds the place.
    ///
    /// # Errors
    /// When something stands there that cannot be written to.
    pub fn find(path: &Path) -> io::Result<Destination> {
        let path = std::path::absolute(path)?;
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_dir() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
            Ok(meta) if !meta.is_file() => {
                // Without waiting for a reader, and without becoming a terminal's owner.
                let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
                let file = OpenOptions::new().write(true).custom_flags(flags).open(&path)?;
                Ok(Destination::Write(path, file))
            }
            // Whether a file can be made is seen when it is.
            _ => Ok(Destination::Replace(path)),
        }
    }

    /// The descriptor that has to stay open.
    pub fn descriptor(&self) -> Option<RawFd> {
        match self {
            Destination::Replace(_) => None,
            Destination::Write(_, file) => Some(file.as_raw_fd()),
        }
    }

    /// Its name.
    pub fn path(&self) -> &Path {
        match self {
            Destination::Replace(path) | Destination::Write(path, _) => path,
        }
    }

    /// Writes the report. A reader of a file finds the old one or the new one, never a part.
    ///
    /// # Errors
    /// When it cannot be written; what stood there before stands there still.
    pub fn write(&mut self, text: &str) -> io::Result<()> {
        match self {
            Destination::Write(_, file) => file.write_all(text.as_bytes()),
            Destination::Replace(path) => {
                let temporary = temporary(path);
                let written = write_whole(&temporary, text).and_then(|()| fs::rename(&temporary, &*path));
                if written.is_err() {
                    // It may not have been made at all.
                    let _ = fs::remove_file(&temporary);
                }
                written
            }
        }
    }
}

/// A name of our own beside the file, so that the rename stays in one file system.
fn temporary(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    path.with_file_name(name)
}

fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
