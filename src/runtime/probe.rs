//! Whether a runtime directory could be had, found out without leaving one.

use super::place::{open_directory, without};
use super::{Failure, RUNTIME, base};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The directory in which named runs have theirs.
///
/// # Errors
/// Says why they have none, and what follows.
pub fn probe() -> Result<PathBuf, String> {
    let owner = nix::unistd::geteuid().as_raw();
    let tried = base(owner, std::env::var_os(RUNTIME)).map_err(Failure::Without);
    tried.and_then(|base| probe_below(&base, owner)).map_err(|failure| match failure {
        Failure::Without(why) => format!("{why}; a named run goes on without a lock and without a sweep"),
        Failure::Refused(refused) => format!("{refused}; a named run is refused"),
    })
}

fn probe_below(base: &Path, owner: u32) -> Result<PathBuf, Failure> {
    let path = base.join("supervise");
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let above = nix::fcntl::open(base, flags, Mode::empty()).map_err(|why| without("open", base, why.into()))?;
    let (at, name) = match fstatat(&above, "supervise", AtFlags::AT_SYMLINK_NOFOLLOW) {
        // Another name than the one that a run makes: a run that came between would lose its directory.
        Err(Errno::ENOENT) => (above, format!("supervise.doctor-{}", std::process::id())),
        // No name begins with a dot, so no run can mean this one.
        _ => (open_directory(&above, c"supervise", &path, owner)?, format!(".doctor-{}", std::process::id())),
    };
    mkdirat(&at, name.as_str(), Mode::S_IRWXU).map_err(|why| without("make a directory in", &path, why.into()))?;
    let written = write_in(&at, name.as_str());
    let removed = unlinkat(&at, name.as_str(), UnlinkatFlags::RemoveDir);
    written.map_err(|why| without("write to a file in", &path, why.into()))?;
    removed.map_err(|why| without("remove a directory in", &path, why.into()))?;
    Ok(path)
}

/// Writes a file, since a full disk may have room for a directory, locks it, and removes it.
fn write_in(at: &OwnedFd, directory: &str) -> nix::Result<()> {
    let file = format!("{directory}/record");
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let written = nix::fcntl::openat(at, file.as_str(), flags, Mode::S_IRWXU)
        .and_then(|opened| nix::unistd::write(&opened, &[b'x'; 4096]).map(|_| opened))
        // SAFETY: a descriptor of ours; it does not wait.
        .and_then(|opened| Errno::result(unsafe { libc::flock(opened.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }))
        .map(drop);
    unlinkat(at, file.as_str(), UnlinkatFlags::NoRemoveDir)?;
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn entries(directory: &Path) -> usize {
        fs::read_dir(directory).unwrap().count()
    }

    #[test]
    fn what_can_be_had_is_found_out_without_leaving_anything() {
        let base = tempfile::tempdir().unwrap();
        let owner = nix::unistd::geteuid().as_raw();
        assert!(probe_below(base.path(), owner).is_ok());
        assert_eq!(entries(base.path()), 0);
        fs::create_dir(base.path().join("supervise")).unwrap();
        fs::set_permissions(base.path().join("supervise"), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(probe_below(base.path(), owner).is_ok());
        assert_eq!((entries(base.path()), entries(&base.path().join("supervise"))), (1, 0));
    }

    #[test]
    fn what_a_named_run_would_refuse_is_refused() {
        let base = tempfile::tempdir().unwrap();
        symlink("/", base.path().join("supervise")).unwrap();
        assert!(matches!(probe_below(base.path(), nix::unistd::geteuid().as_raw()), Err(Failure::Refused(_))));
    }
}
