//! `/proc`: whom to signal, and what to call them. Never whether anybody is left; that is ECHILD's to say.
//!
//! A process is held by its `/proc/PID` directory. The directory stands for that very process, whatever becomes of its
//! number: once it is reaped every read fails, and `pidfd_send_signal` takes the directory as it takes a pidfd. So what
//! was read and who is signalled cannot be two different processes.

use super::Pid;
use crate::log::{Once, reason};
use crate::signal::Signal;
use std::ffi::{CStr, CString, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;

/// statfs(2): the file system is procfs.
const PROC_SUPER_MAGIC: u64 = 0x9fa0;

/// What one read takes: a page, which is what the kernel gives at once for most of these files.
const PIECE: usize = 4096;

/// PF_KTHREAD (include/linux/sched.h): a thread of the kernel's own.
const KERNEL_THREAD: u32 = 0x0020_0000;

/// By how much a full piece may be shorter: records, such as one number in a list, are not cut in two.
const LONGEST_RECORD: usize = 64;

/// A `/proc` that shows our own pid namespace.
#[derive(Debug)]
pub struct Proc {
    directory: OwnedFd,
}

/// Why `/proc` cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// Nothing, or something else, is mounted there.
    NotMounted,
    /// Its numbers mean other processes than ours do.
    OtherNamespace,
}

/// One process, held.
#[derive(Debug)]
pub struct Process {
    directory: OwnedFd,
}

/// What `/proc/PID/stat` says (proc_pid_stat(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Its number.
    pub pid: Pid,
    /// Its name, 15 bytes at most; any byte may be in it.
    pub comm: String,
    /// R, S, D, T, t, Z and others.
    pub state: char,
    /// Its parent.
    pub ppid: Pid,
    /// Its process group.
    pub pgid: Pid,
    /// Its session.
    pub sid: Pid,
    /// The kernel's flags for it (PF_*, include/linux/sched.h).
    pub flags: u32,
    /// How many threads it has.
    pub threads: u32,
    /// When it started, in clock ticks since boot.
    pub start: u64,
}

impl Stat {
    /// True when it is dead and only waits to be reaped. A leader thread that ended while others live is not dead.
    pub fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }

    /// True for a thread of the kernel's own, which has no program, no environment and no parent of ours.
    pub fn is_kernel_thread(&self) -> bool {
        self.flags & KERNEL_THREAD != 0
    }
}

impl Proc {
    /// Opens `/proc`, if it is one and shows our namespace.
    ///
    /// # Errors
    /// Says why it cannot be used.
    pub fn open() -> Result<Proc, Unusable> {
        let directory = open_at(libc::AT_FDCWD, c"/proc", libc::O_PATH | libc::O_DIRECTORY);
        let directory = directory.map_err(|_| Unusable::NotMounted)?;
        let kind = nix::sys::statfs::fstatfs(&directory).map_err(|_| Unusable::NotMounted)?;
        if u64::try_from(kind.filesystem_type().0) != Ok(PROC_SUPER_MAGIC) {
            return Err(Unusable::NotMounted);
        }
        // Mounted from outside our pid namespace, "self" has another number there, or none.
        let ours = nix::unistd::getpid().to_string();
        match nix::fcntl::readlinkat(&directory, "self") {
            Ok(number) if number.as_encoded_bytes() == ours.as_bytes() => Ok(Proc { directory }),
            _ => Err(Unusable::OtherNamespace),
        }
    }

    /// Takes hold of the process that has this number now.
    ///
    /// # Errors
    /// There is none, or it is hidden from us.
    pub fn process(&self, pid: Pid) -> io::Result<Process> {
        let name = CString::new(pid.to_string())?;
        let directory = open_at(self.directory.as_raw_fd(), &name, libc::O_RDONLY | libc::O_DIRECTORY)?;
        Ok(Process { directory })
    }

    /// The numbers of all processes that can be seen.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn all(&self) -> io::Result<Vec<Pid>> {
        numbers_in(&self.directory, c".")
    }

    /// Which boot this is: a text that no other boot has (random(4)).
    ///
    /// # Errors
    /// When it cannot be read, as in a sandbox that hides `/proc/sys`.
    pub fn boot_id(&self) -> io::Result<String> {
        let text = read_at(&self.directory, c"sys/kernel/random/boot_id")?;
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    }
}

impl AsRawFd for Proc {
    fn as_raw_fd(&self) -> RawFd {
        self.directory.as_raw_fd()
    }
}

impl Process {
    /// Reads its `stat`.
    ///
    /// # Errors
    /// ESRCH when it is gone.
    pub fn stat(&self) -> io::Result<Stat> {
        parse_stat(&self.read(c"stat")?).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
    }

    /// Its children of the moment, those of every thread. Exact as long as none of them is reaped meanwhile.
    ///
    /// # Errors
    /// ENOENT when the kernel has no such file (CONFIG_PROC_CHILDREN); ESRCH when the process is gone.
    pub fn children(&self, stat: &Stat) -> io::Result<Vec<Pid>> {
        if stat.threads <= 1 {
            return self.children_of_leader(stat.pid);
        }
        let mut children = Vec::new();
        for thread in numbers_in(&self.directory, c"task")? {
            let path = CString::new(format!("task/{thread}/children"))?;
            match self.read(&path) {
                Ok(text) => children.extend(parse_numbers(&text)),
                // A thread that ended meanwhile has handed its children to another thread of the process.
                Err(_) if thread != stat.pid => {}
                Err(error) => return Err(error),
            }
        }
        Ok(children)
    }

    /// The children of its leader thread: enough to go on from, at the price of one file.
    ///
    /// # Errors
    /// As `children`.
    pub fn children_of_leader(&self, pid: Pid) -> io::Result<Vec<Pid>> {
        let path = CString::new(format!("task/{pid}/children"))?;
        self.read(&path).map(|text| parse_numbers(&text))
    }

    /// Its arguments, each ended by a NUL. Waits for the lock on the process's memory map: see `names`.
    pub(super) fn command_line(&self) -> Vec<u8> {
        self.read(c"cmdline").unwrap_or_default()
    }

    /// Its environment at its last exec, each entry ended by a NUL; empty when we may not read it, and while it has no memory
    /// of its own. Waits for the lock on the process's memory map: see `reader`.
    pub(super) fn environment(&self) -> Vec<u8> {
        let of_leader = self.read(c"environ").unwrap_or_default();
        if !of_leader.is_empty() {
            return of_leader;
        }
        // A leader thread that ended has given the memory up, which the others have still.
        let threads = numbers_in(&self.directory, c"task").unwrap_or_default().into_iter();
        let of_threads = threads.filter_map(|thread| CString::new(format!("task/{thread}/environ")).ok());
        of_threads.filter_map(|path| self.read(&path).ok()).find(|text| !text.is_empty()).unwrap_or_default()
    }

    /// The real user id; nothing when it is hidden or gone.
    pub fn uid(&self) -> Option<u32> {
        self.uids().map(|[real, ..]| real)
    }

    /// The real, the effective and the saved user id; nothing when they are hidden or it is gone.
    pub fn uids(&self) -> Option<[u32; 3]> {
        let status = self.read(c"status").ok()?;
        let status = String::from_utf8_lossy(&status);
        let mut ids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace();
        let mut next = || ids.next()?.parse().ok();
        Some([next()?, next()?, next()?])
    }

    /// The number of its pid namespace (namespaces(7)); nothing when we may not know.
    pub fn pid_namespace(&self) -> Option<u64> {
        self.behind(c"ns/pid").map(|(_, inode)| inode)
    }

    /// Whether one of its descriptors leads to this file, as the kernel has it: with " (deleted)" behind the path of one that is
    /// gone. False when we may not know.
    pub fn has_open(&self, target: &str) -> bool {
        let descriptors = numbers_in(&self.directory, c"fd").unwrap_or_default();
        descriptors.into_iter().any(|number| {
            let link = nix::fcntl::readlinkat(&self.directory, format!("fd/{number}").as_str());
            link.is_ok_and(|link| link.as_encoded_bytes() == target.as_bytes())
        })
    }

    /// Its root directory, as device and inode; nothing when we may not know. Waits for the file system that it is in.
    pub fn root(&self) -> Option<(u64, u64)> {
        self.behind(c"root")
    }

    /// The device of a directory as the process sees it, whose mounts may be its own; nothing when we may not know. Waits for the
    /// file system that it is in.
    pub fn device_of(&self, directory: &str) -> Option<u64> {
        let path = CString::new(format!("root{directory}")).ok()?;
        self.behind(&path).map(|(device, _)| device)
    }

    /// Device and inode of what a link of the kernel's leads to.
    fn behind(&self, link: &CStr) -> Option<(u64, u64)> {
        let stat = nix::sys::stat::fstatat(&self.directory, link, nix::fcntl::AtFlags::empty()).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// A descriptor that is readable when it has ended, reaped or not (pidfd_open(2)).
    ///
    /// # Errors
    /// ENOSYS before Linux 5.3, EPERM when a filter refuses it, ESRCH when it is gone.
    pub fn pidfd(&self, pid: Pid) -> io::Result<OwnedFd> {
        // SAFETY: the call takes any number; the kernel makes the descriptor close-on-exec.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: new, and owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // The number was its own in between, if it still is now.
        if self.is_held_by(pid) { Ok(fd) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
    }

    /// The kernel function in which it waits; nothing when it does not, or when we may not know.
    pub fn wchan(&self) -> Option<String> {
        let name = String::from_utf8(self.read(c"wchan").ok()?).ok()?;
        (name != "0" && !name.is_empty()).then_some(name)
    }

    /// Sends a signal to this very process.
    ///
    /// # Errors
    /// ESRCH when it is gone, EPERM when we may not.
    pub fn signal(&self, pid: Pid, signal: Signal) -> io::Result<()> {
        let null = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: a descriptor of ours, a valid signal, no siginfo (the kernel fills one in), no flags.
        let sent =
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.directory.as_raw_fd(), signal.number(), null, 0) };
        if sent == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        let is_the_answer = match error.raw_os_error() {
            Some(libc::ESRCH) => true,
            Some(libc::EPERM) => can_signal_what_is_held(),
            _ => false,
        };
        if is_the_answer || !self.is_held_by(pid) {
            return Err(error);
        }
        static SAID: Once = Once::new();
        let by_number = "processes are signalled by number, right after a look that it is still theirs";
        SAID.say(|| format!("pidfd_send_signal cannot be used here ({}); {by_number}", reason(&error)));
        // Before Linux 5.1, or refused by a filter: by number, right after we saw that it is still this process's.
        // SAFETY: kill takes any number; this one is greater than 1.
        if pid > 1 && unsafe { libc::kill(pid, signal.number()) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Whether signals can be sent to this very process, and not by its number only.
    ///
    /// # Errors
    /// ENOSYS before Linux 5.1, EPERM when a filter refuses it or the process is not ours to signal, ESRCH when it is gone.
    pub fn takes_signals(&self) -> io::Result<()> {
        let null = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: signal 0 asks only.
        match unsafe { libc::syscall(libc::SYS_pidfd_send_signal, self.directory.as_raw_fd(), 0, null, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// True while the number is still its own.
    fn is_held_by(&self, pid: Pid) -> bool {
        self.stat().is_ok_and(|stat| stat.pid == pid)
    }

    /// True while it is not reaped.
    pub fn exists(&self) -> bool {
        // Whoever may not be signalled exists; whether the call is there at all is asked of stat.
        match self.takes_signals() {
            Ok(()) => true,
            Err(why) => why.raw_os_error() != Some(libc::ESRCH) && self.read(c"stat").is_ok(),
        }
    }

    fn read(&self, name: &CStr) -> io::Result<Vec<u8>> {
        read_at(&self.directory, name)
    }
}

/// A whole file. Read in large pieces: the kernel makes these texts anew for each, and knows no size beforehand for which
/// the standard library could ask. A piece that is not full is the last: a list of children to which a chain of processes
/// adds would have no other end.
fn read_at(directory: &impl AsRawFd, name: &CStr) -> io::Result<Vec<u8>> {
    let mut file = File::from(open_at(directory.as_raw_fd(), name, libc::O_RDONLY)?);
    let mut text = Vec::new();
    loop {
        let length = text.len();
        text.resize(length + PIECE, 0);
        let more = file.read(&mut text[length..])?;
        text.truncate(length + more);
        if more < PIECE - LONGEST_RECORD {
            return Ok(text);
        }
    }
}

/// Whether `pidfd_send_signal` is there and no filter refuses it: then it finds fault with the descriptor.
fn can_signal_what_is_held() -> bool {
    let null = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: -1 is nobody's descriptor.
    let asked = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, -1, 0, null, 0) };
    asked != 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EBADF)
}

fn open_at(directory: i32, name: &CStr, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: `name` is null-terminated; the kernel checks the rest.
    let fd = unsafe { libc::openat(directory, name.as_ptr(), flags | libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: new, and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The entries of a directory that are numbers.
fn numbers_in(directory: &impl AsFd, name: &CStr) -> io::Result<Vec<Pid>> {
    let opened = open_at(directory.as_fd().as_raw_fd(), name, libc::O_RDONLY | libc::O_DIRECTORY)?;
    let mut listing = nix::dir::Dir::from_fd(opened)?;
    // An error is the last of them: the same one would come for ever.
    let entries = listing.iter().map_while(Result::ok);
    Ok(entries.filter_map(|entry| entry.file_name().to_str().ok()?.parse().ok()).collect())
}

fn parse_numbers(text: &[u8]) -> Vec<Pid> {
    text.split(|byte| byte.is_ascii_whitespace())
        .filter_map(|word| std::str::from_utf8(word).ok()?.parse().ok())
        .collect()
}

/// The name stands in parentheses and may hold parentheses and spaces, so what follows is found from the *last* `)`.
fn parse_stat(text: &[u8]) -> Option<Stat> {
    let open = text.iter().position(|byte| *byte == b'(')?;
    let close = text.iter().rposition(|byte| *byte == b')')?;
    let pid = std::str::from_utf8(&text[..open]).ok()?.trim().parse().ok()?;
    let comm = OsString::from_vec(text.get(open + 1..close)?.to_vec()).to_string_lossy().into_owned();
    let rest = std::str::from_utf8(&text[close + 1..]).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some(Stat {
        pid,
        comm,
        state: fields.first()?.chars().next()?,
        ppid: fields.get(1)?.parse().ok()?,
        pgid: fields.get(2)?.parse().ok()?,
        sid: fields.get(3)?.parse().ok()?,
        flags: fields.get(6)?.parse().ok()?,
        threads: fields.get(17)?.parse().ok()?,
        start: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAIL: &str = "S 10 20 30 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 3 0 424242 1 2";

    #[test]
    fn a_name_may_hold_parentheses_spaces_and_line_ends() {
        for name in ["sh", "a) S b", "((", "))", ") Z 1 1 1", "a\nb", ""] {
            let stat = parse_stat(format!("77 ({name}) {TAIL}\n").as_bytes()).unwrap();
            assert_eq!((stat.pid, stat.comm.as_str(), stat.state), (77, name, 'S'));
            assert_eq!((stat.ppid, stat.pgid, stat.sid, stat.threads, stat.start), (10, 20, 30, 3, 424_242));
        }
    }

    #[test]
    fn what_is_cut_short_is_no_stat() {
        let whole = format!("77 (sh) {TAIL}");
        for end in 0..whole.len() - " 424242 1 2".len() {
            assert_eq!(parse_stat(&whole.as_bytes()[..end]), None, "{}", &whole[..end]);
        }
    }

    #[test]
    fn a_leader_thread_that_ended_before_the_others_is_not_dead() {
        let stat = parse_stat(format!("77 (sh) {TAIL}").replace(" S ", " Z ").as_bytes()).unwrap();
        assert!(!stat.is_zombie());
    }
}
