//! Starts a program, the same way for every measure and peer, and waits for its end.
//!
//! As posix_spawn does it (CLONE_VM and CLONE_VFORK, so that the size of this process costs nothing and the start has
//! happened when the call returns), but with what posix_spawn lacks: a namespace, a user, a limit.

use std::ffi::{CString, OsString, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use libc::pid_t;

use super::clock::now;

/// Where a program that is given a wire finds it.
pub(crate) const WIRE: RawFd = 3;

const STACK: usize = 64 * 1024;

/// An unprivileged user, and how many processes the user may have.
#[derive(Clone, Copy)]
pub(crate) struct Account {
    pub(crate) uid: libc::uid_t,
    pub(crate) processes: u64,
}

/// A program that is ready to be started, as often as wanted.
pub(crate) struct Program {
    argv: Vec<CString>,
    environment: Vec<CString>,
    null: File,
    stack: Vec<u8>,
    wire: Option<RawFd>,
    account: Option<Account>,
    as_pid1: bool,
}

impl Program {
    pub(crate) fn new(command: Vec<OsString>) -> io::Result<Self> {
        let text = |text: OsString| CString::new(text.into_vec()).map_err(io::Error::other);
        Ok(Program {
            argv: command.into_iter().map(text).collect::<io::Result<_>>()?,
            // Nothing of the caller's: a JOURNAL_STREAM or NOTIFY_SOCKET would change what is measured.
            environment: vec![c"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
            null: File::options().read(true).write(true).open("/dev/null")?,
            stack: vec![0; STACK],
            wire: None,
            account: None,
            as_pid1: false,
        })
    }

    /// Gives it `wire`, which must be open at each start.
    pub(crate) fn with_wire(mut self, wire: &impl AsRawFd) -> Self {
        self.wire = Some(wire.as_raw_fd());
        self
    }

    /// Runs it as somebody else.
    pub(crate) fn run_by(mut self, account: Option<Account>) -> Self {
        self.account = account;
        self
    }

    /// Runs it, if asked, as PID 1 of a new namespace, with a `/proc` of its own, as in a container.
    pub(crate) fn in_namespace(mut self, as_pid1: bool) -> Self {
        self.as_pid1 = as_pid1;
        self
    }

    /// Starts it; when this returns, it has been executed.
    pub(crate) fn start(&mut self) -> io::Result<pid_t> {
        let pointers = |texts: &[CString]| -> Vec<*const c_char> {
            texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
        };
        let (argv, environment) = (pointers(&self.argv), pointers(&self.environment));
        let image = Image {
            argv: argv.as_ptr(),
            environment: environment.as_ptr(),
            null: self.null.as_raw_fd(),
            wire: self.wire,
            account: self.account,
            as_pid1: self.as_pid1,
            errno: AtomicI32::new(0),
        };
        let namespaces = if self.as_pid1 { libc::CLONE_NEWPID | libc::CLONE_NEWNS } else { 0 };
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD | namespaces;
        let top = self.stack.as_mut_ptr_range().end.cast::<c_void>();
        let top = top.map_addr(|address| address & !15);
        // SAFETY: the stack and the image outlive the child's use of them, since CLONE_VFORK holds this thread until
        // the child has executed or ended; `become_program` writes nothing else of ours.
        let pid = unsafe { libc::clone(become_program, top, flags, (&raw const image).cast_mut().cast()) };
        if pid == -1 {
            return Err(io::Error::last_os_error());
        }
        match image.errno.load(Ordering::Relaxed) {
            0 => Ok(pid),
            errno => {
                wait(pid)?;
                let error = io::Error::from_raw_os_error(errno);
                let name = self.argv.first().map(|name| name.to_string_lossy()).unwrap_or_default();
                Err(io::Error::new(error.kind(), format!("{name} can't be started: {error}")))
            }
        }
    }
}

/// What the child needs, in a form that asks nothing of the allocator.
struct Image {
    argv: *const *const c_char,
    environment: *const *const c_char,
    null: RawFd,
    wire: Option<RawFd>,
    account: Option<Account>,
    as_pid1: bool,
    errno: AtomicI32,
}

/// The child, in the parent's memory: system calls only.
extern "C" fn become_program(image: *mut c_void) -> c_int {
    // SAFETY: `start` passes a pointer to an image that lives until we have executed or ended.
    let image = unsafe { &*image.cast::<Image>() };
    // SAFETY: system calls on descriptors, numbers and strings that the image holds.
    unsafe {
        // A group of its own: whoever signals its own group must not hit the measuring process.
        if prepare(image) {
            libc::execve(*image.argv, image.argv, image.environment);
        }
        image.errno.store(*libc::__errno_location(), Ordering::Relaxed);
        libc::_exit(127)
    }
}

/// Makes the process what the image asks for; false with errno set when it can't.
unsafe fn prepare(image: &Image) -> bool {
    // SAFETY: as in `become_program`.
    unsafe {
        libc::setpgid(0, 0);
        // The Rust runtime of this program ignores it, which would outlive the exec.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        if image.as_pid1 && libc::mount(c"proc".as_ptr(), c"/proc".as_ptr(), c"proc".as_ptr(), 0, ptr::null()) != 0 {
            return false;
        }
        for fd in 0..3 {
            libc::dup2(image.null, fd);
        }
        if let Some(wire) = image.wire {
            if wire == WIRE {
                libc::fcntl(WIRE, libc::F_SETFD, 0);
            } else {
                libc::dup2(wire, WIRE);
            }
        }
        let Some(Account { uid, processes }) = image.account else {
            return true;
        };
        let limit = libc::rlimit { rlim_cur: processes, rlim_max: processes };
        // The raw calls, since glibc's would want to change all threads of the process whose memory this is.
        libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) == 0
            && libc::syscall(libc::SYS_setgroups, 0, ptr::null::<libc::gid_t>()) == 0
            && libc::syscall(libc::SYS_setgid, uid) == 0
            && libc::syscall(libc::SYS_setuid, uid) == 0
    }
}

/// How a process ended, and what it used, together with those that it waited for.
pub(crate) struct Ended {
    status: c_int,
    /// User and system time in microseconds.
    pub(crate) cpu: f64,
    /// Page faults that needed no I/O.
    pub(crate) faults: f64,
}

impl Ended {
    pub(crate) fn well(&self) -> bool {
        self.status == 0
    }

    /// "exit 3", or "signal 9".
    pub(crate) fn how(&self) -> String {
        if libc::WIFSIGNALED(self.status) {
            format!("signal {}", libc::WTERMSIG(self.status))
        } else {
            format!("exit {}", libc::WEXITSTATUS(self.status))
        }
    }
}

/// Waits for the end of a child.
pub(crate) fn wait(pid: pid_t) -> io::Result<Ended> {
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: both pointers are valid for the write.
    while unsafe { libc::wait4(pid, &raw mut status, libc::__WALL, usage.as_mut_ptr()) } != pid {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: wait4 has filled it.
    let usage = unsafe { usage.assume_init() };
    let micros = |time: libc::timeval| time.tv_sec as f64 * 1e6 + time.tv_usec as f64;
    Ok(Ended { status, cpu: micros(usage.ru_utime) + micros(usage.ru_stime), faults: usage.ru_minflt as f64 })
}

/// Waits for the end of a child, but not longer than `limit`.
pub(crate) fn wait_for(pid: pid_t, limit: Duration) -> io::Result<Option<Ended>> {
    // SAFETY: no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = c_int::try_from(fd).map_err(io::Error::other)?;
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that was just opened, and that nobody else has.
    let pidfd = unsafe { OwnedFd::from_raw_fd(fd) };
    let until = now() + u64::try_from(limit.as_nanos()).map_err(io::Error::other)?;
    if readable(pidfd.as_raw_fd(), until)? { wait(pid).map(Some) } else { Ok(None) }
}

/// Waits until there is something to read, or for the time `until`.
pub(crate) fn readable(fd: RawFd, until: u64) -> io::Result<bool> {
    loop {
        let left = Duration::from_nanos(until.saturating_sub(now()));
        let left = libc::timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry, a valid time-out, and no signal mask.
        match unsafe { libc::ppoll(&raw mut entry, 1, &raw const left, ptr::null()) } {
            -1 if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted => {
                return Err(io::Error::last_os_error());
            }
            -1 => {}
            ready => return Ok(ready == 1),
        }
    }
}

/// Sends a signal to a child that has not been waited for, or to a process of the namespace.
pub(crate) fn signal(pid: pid_t, signal: c_int) -> io::Result<()> {
    // SAFETY: no pointers.
    if unsafe { libc::kill(pid, signal) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
