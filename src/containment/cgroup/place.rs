//! Where our own cgroup is, or in words for people why it is nowhere.
//!
//! `/proc/self/cgroup` says which cgroup is ours, `/proc/self/mountinfo` where the file system with its directory is
//! mounted: on a unified host at one place, on a hybrid host at another, in a container perhaps only in part. Both show
//! paths as our cgroup namespace sees them (cgroup_namespaces(7)).

use super::subtree::open_directory;
use crate::log::reason;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs};
use nix::unistd::{AccessFlags, faccessat};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Why there is no cgroup for us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable(pub(super) String);

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Finds and opens the directory of our own cgroup, in the first mount through which cgroups can be made below it.
///
/// # Errors
/// Says why not, of the first mount if there are several.
pub(super) fn find() -> Result<(PathBuf, OwnedFd), Unavailable> {
    let read = |path: &str| whole(path).map_err(|why| Unavailable(format!("cannot read {path}: {}", reason(&why))));
    let mut first = None;
    for directory in candidates(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?)? {
        match open_usable(&directory) {
            Ok(opened) => return Ok((directory, opened)),
            Err(why) => first = first.or(Some(why)),
        }
    }
    Err(first.unwrap_or_else(|| Unavailable("our own cgroup has no directory".to_owned())))
}

/// The directories that stand for our cgroup, in the order of their mounts; never none.
pub(super) fn candidates(mountinfo: &[u8], cgroup: &[u8]) -> Result<Vec<PathBuf>, Unavailable> {
    let mounts: Vec<Mount> = mountinfo.split(|byte| *byte == b'\n').filter_map(Mount::parse).collect();
    if mounts.is_empty() {
        return Err(Unavailable("no cgroup2 file system is mounted".to_owned()));
    }
    let ours = own_path(cgroup)?;
    let found: Vec<PathBuf> = mounts.iter().filter_map(|mount| mount.show(ours)).collect();
    if found.is_empty() {
        let Mount { root, point } = &mounts[0];
        let (point, root, ours) = (point.display(), root.display(), ours.display());
        return Err(Unavailable(format!("{point} shows the cgroups below {root}, and ours is {ours}")));
    }
    Ok(found)
}

/// In large pieces: the size of such a file is not known beforehand, and the kernel gives what fits.
fn whole(path: &str) -> io::Result<Vec<u8>> {
    let mut text = Vec::with_capacity(16 * 1024);
    File::open(path)?.read_to_end(&mut text)?;
    Ok(text)
}

/// The path in the line `0::` of `/proc/self/cgroup` (cgroups(7)).
fn own_path(cgroup: &[u8]) -> Result<&Path, Unavailable> {
    let lines = cgroup.split(|byte| *byte == b'\n');
    let path = lines.into_iter().find_map(|line| line.strip_prefix(b"0::"));
    let path =
        path.ok_or_else(|| Unavailable("/proc/self/cgroup names no cgroup of version 2 (line 0::)".to_owned()))?;
    let ours = Path::new(OsStr::from_bytes(path));
    let no = |why: &str| Err(Unavailable(format!("our own cgroup {} {why}", ours.display())));
    if !ours.has_root() {
        return no("has no path");
    }
    // Behind ".." the names are not told.
    if ours.starts_with("/..") {
        return no("is outside of our cgroup namespace");
    }
    if path.ends_with(b" (deleted)") {
        return no("is removed");
    }
    Ok(ours)
}

/// A mount of cgroup2: which cgroup's directory is to be seen where.
struct Mount {
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// Reads a line of `/proc/PID/mountinfo` (proc_pid_mountinfo(5)): `ID PARENT DEVICE ROOT POINT OPTIONS [TAG…] -
    /// TYPE SOURCE OPTIONS`. Nothing when it is of another file system or cannot be read.
    fn parse(line: &[u8]) -> Option<Mount> {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
        if *fields.get(dash + 1)? != b"cgroup2" {
            return None;
        }
        Some(Mount { root: unescape(fields[3]), point: unescape(fields[4]) })
    }

    /// Where a cgroup's directory is in this mount, if it shows it.
    fn show(&self, cgroup: &Path) -> Option<PathBuf> {
        let below = cgroup.strip_prefix(&self.root).ok()?;
        // Joined with nothing, a path would get a slash at its end.
        Some(if below.as_os_str().is_empty() { self.point.clone() } else { self.point.join(below) })
    }
}

/// `\040` and its like, in which spaces, tabs, line ends and backslashes are written.
fn unescape(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                path.push(byte);
                rest = &after[3..];
            }
            None => {
                path.push(first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

/// Opens the directory if it is what it should be and we may make others in it.
fn open_usable(directory: &Path) -> Result<OwnedFd, Unavailable> {
    let opened = open_directory(AT_FDCWD, directory)
        .map_err(|why| Unavailable(format!("cannot open {}: {}", directory.display(), reason(&why))))?;
    // Another mount may lie over it.
    if fstatfs(&opened).ok().is_none_or(|kind| kind.filesystem_type() != CGROUP2_SUPER_MAGIC) {
        return Err(Unavailable(format!("{} is hidden under another mount", directory.display())));
    }
    may_make(opened.as_fd(), directory)?;
    Ok(opened)
}

fn may_make(opened: BorrowedFd<'_>, directory: &Path) -> Result<(), Unavailable> {
    let writing = AccessFlags::W_OK | AccessFlags::X_OK;
    faccessat(opened, ".", writing, AtFlags::empty()).map_err(|why| cannot_make(directory, &why.into()))?;
    // Who is moved out of a cgroup needs to be let out: the kernel asks for this file of the one above both.
    match faccessat(opened, "cgroup.procs", AccessFlags::W_OK, AtFlags::empty()) {
        Ok(()) => Ok(()),
        Err(why) => {
            let (at, why) = (directory.display(), reason(&why.into()));
            Err(Unavailable(format!("may not write {at}/cgroup.procs: {why} (delegate it: Delegate=yes)")))
        }
    }
}

/// What a failed mkdir means.
pub(super) fn cannot_make(directory: &Path, why: &io::Error) -> Unavailable {
    let (at, text) = (directory.display(), reason(why));
    Unavailable(match why.raw_os_error() {
        Some(libc::EROFS) => format!("{at} is read-only: {text}"),
        Some(libc::EACCES | libc::EPERM) => {
            format!("may not make a directory in {at}: {text} (delegate it: Delegate=yes)")
        }
        // cgroup.max.descendants or cgroup.max.depth of any cgroup above.
        Some(libc::EAGAIN) => format!("no more cgroups are allowed below {at}: {text} (cgroup.max.descendants)"),
        _ => format!("cannot make a directory in {at}: {text}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
26 25 0:23 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
32 31 0:29 / /sys/fs/cgroup/unified rw shared:10 master:2 - cgroup2 cgroup2 rw
33 31 0:30 / /sys/fs/cgroup/pids rw,relatime shared:14 - cgroup cgroup rw,pids\n";
    const DOCKER_HOST: &str = "\
600 599 0:23 /docker/0a1b /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime master:9 - cgroup2 cgroup rw\n";
    const DOCKER_PRIVATE: &str = "600 599 0:23 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw\n";

    fn found(mountinfo: &str, cgroup: &str) -> Result<Vec<PathBuf>, String> {
        candidates(mountinfo.as_bytes(), cgroup.as_bytes()).map_err(|why| why.to_string())
    }

    #[test]
    fn our_cgroup_is_found_wherever_it_is_mounted() {
        let hybrid = "4:pids:/user.slice\n1:name=systemd:/user.slice/a.scope\n0::/user.slice/a.scope\n";
        let bind = format!("{UNIFIED}90 22 0:23 /user.slice /mnt/my\\040\\134cgroups rw - cgroup2 none rw\n");
        let stacked = "40 31 0:37 / /a rw - cgroup2 x rw\n41 31 0:37 / /b ro unbindable - cgroup2 x rw\n";
        for (mountinfo, cgroup, expected) in [
            (UNIFIED, "0::/system.slice/a.service\n", &["/sys/fs/cgroup/system.slice/a.service"][..]),
            (UNIFIED, "0::/\n", &["/sys/fs/cgroup"]),
            (HYBRID, hybrid, &["/sys/fs/cgroup/unified/user.slice/a.scope"]),
            (DOCKER_HOST, "0::/docker/0a1b\n", &["/sys/fs/cgroup"]),
            (DOCKER_HOST, "0::/docker/0a1b/inner\n", &["/sys/fs/cgroup/inner"]),
            (DOCKER_PRIVATE, "0::/\n", &["/sys/fs/cgroup"]),
            (&bind, "0::/user.slice/b c\n", &["/sys/fs/cgroup/user.slice/b c", "/mnt/my \\cgroups/b c"]),
            (&bind, "0::/user.slice2\n", &["/sys/fs/cgroup/user.slice2"]),
            (stacked, "0::/..x\n", &["/a/..x", "/b/..x"]),
        ] {
            let expected: Vec<PathBuf> = expected.iter().map(PathBuf::from).collect();
            assert_eq!(found(mountinfo, cgroup), Ok(expected), "{mountinfo}{cgroup}");
        }
    }

    #[test]
    fn what_has_no_directory_for_us_is_said() {
        let v1_only = "33 31 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n";
        for (mountinfo, cgroup, expected) in [
            ("", "0::/\n", "no cgroup2 file system is mounted"),
            (v1_only, "1:pids:/\n", "no cgroup2 file system is mounted"),
            (UNIFIED, "", "/proc/self/cgroup names no cgroup of version 2 (line 0::)"),
            (UNIFIED, "0::\n", "our own cgroup  has no path"),
            (UNIFIED, "0::/../a\n", "our own cgroup /../a is outside of our cgroup namespace"),
            (UNIFIED, "0::/..\n", "our own cgroup /.. is outside of our cgroup namespace"),
            (UNIFIED, "0::/a (deleted)\n", "our own cgroup /a (deleted) is removed"),
            (
                DOCKER_HOST,
                "0::/docker/0a1bc\n",
                "/sys/fs/cgroup shows the cgroups below /docker/0a1b, and ours is /docker/0a1bc",
            ),
            ("1 2 0:3 /../.. /c rw - cgroup2 x rw\n", "0::/a\n", "/c shows the cgroups below /../.., and ours is /a"),
        ] {
            assert_eq!(found(mountinfo, cgroup), Err(expected.to_owned()), "{mountinfo}{cgroup}");
        }
    }

    #[test]
    fn lines_that_cannot_be_read_are_passed_over() {
        let whole = "26 25 0:23 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw";
        for end in 0..whole.len() {
            // A type cut short is another type; the line may end behind it.
            let expected = whole[..end].contains("- cgroup2");
            assert_eq!(found(&whole[..end], "0::/\n").is_ok(), expected, "{}", &whole[..end]);
        }
        let odd = format!("\0\n - - - cgroup2\n1 2 3 - cgroup2 x y\n\n{whole}\n- \\9 \\\n");
        assert_eq!(found(&odd, "0::/\n"), Ok(vec![PathBuf::from("/sys/fs/cgroup")]));
        for (field, path) in
            [("a\\04", "a\\04"), ("\\", "\\"), ("\\777", "\\777"), ("\\040\\012", " \n"), ("\\é", "\\é")]
        {
            assert_eq!(unescape(field.as_bytes()), PathBuf::from(path), "{field}");
        }
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        for (errno, expected) in [
            (libc::EROFS, "/x is read-only: Read-only file system"),
            (libc::EACCES, "may not make a directory in /x: Permission denied (delegate it: Delegate=yes)"),
            (libc::ENOSPC, "cannot make a directory in /x: No space left on device"),
        ] {
            let why = cannot_make(Path::new("/x"), &io::Error::from_raw_os_error(errno));
            assert_eq!(why.to_string(), expected);
        }
        let here = std::env::temp_dir();
        let why = open_usable(&here).unwrap_err().to_string();
        assert_eq!(why, format!("{} is hidden under another mount", here.display()));
    }
}
