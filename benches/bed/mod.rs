//! Where measures are taken: a pid namespace of which the measuring process is the init.
//!
//! Measures make orphans, chains and bombs, and peers that leave them behind. Whatever happens, they end with the
//! namespace, and that ends with its init: the init has PDEATHSIG, and who started it kills it when its time is up.

pub(crate) mod clock;
pub(crate) mod facts;
pub(crate) mod peer;
pub(crate) mod procfs;
pub(crate) mod program;
pub(crate) mod role;
pub(crate) mod table;
pub(crate) mod wire;

use std::ffi::CStr;
use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process;
use std::ptr;
use std::time::Duration;

use libc::pid_t;

use peer::Peer;

/// How many process numbers a namespace may use: half of what a machine has by default.
const MOST_NUMBERS: &str = "16384";

/// What a measure has to work with.
pub(crate) struct Scene<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) peers: Vec<Peer>,
    pub(crate) quick: bool,
    /// This program, which plays the services, too.
    pub(crate) itself: PathBuf,
}

impl Scene<'_> {
    /// How often to measure.
    pub(crate) fn rounds(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }
}

/// Proof that this process is the init of a namespace of its own, and so may kill all that it sees.
pub(crate) struct Bed(());

impl Bed {
    /// Kills and reaps all other processes of the namespace.
    pub(crate) fn clear(&self) {
        // SAFETY: no pointers. `-1` spares the caller when it is an init, and reaches no other namespace.
        unsafe { libc::kill(-1, libc::SIGKILL) };
        // SAFETY: a null pointer says that the status is not wanted.
        while unsafe { libc::waitpid(-1, ptr::null_mut(), libc::__WALL) } > 0 {}
    }

    /// Lets this process run as soon as there is something to do for it, even beside a thousand busy ones, so that a
    /// time is not that of its own waiting. What it starts is not preferred.
    pub(crate) fn prefer_itself(&self) -> io::Result<()> {
        let first = libc::sched_param { sched_priority: 1 };
        // SAFETY: the pointer is valid for the read.
        let done =
            unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const first) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// How many other processes live here.
    pub(crate) fn others(&self) -> usize {
        let alive = |pid: &pid_t| procfs::stat(*pid).is_some_and(|stat| !matches!(stat.state, 'Z' | 'X'));
        procfs::pids().into_iter().filter(|&pid| pid != 1).filter(alive).count()
    }
}

/// Runs `measure` in a namespace that is gone when this returns. Says why, if the measure did not come to its end.
pub(crate) fn run(limit: Duration, measure: impl FnOnce(&Bed) -> io::Result<()>) -> io::Result<Option<String>> {
    // What is still in the buffer would be printed twice.
    io::stdout().flush()?;
    let (lifeline, held) = io::pipe()?;
    // SAFETY: no pointers.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let user = if uid == 0 { 0 } else { libc::CLONE_NEWUSER };
    let flags = libc::CLONE_NEWPID | libc::CLONE_NEWNS | user | libc::SIGCHLD;
    // SAFETY: without CLONE_VM this is a fork, and there are no other threads whose locks could be lost in it.
    let init = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    match init {
        -1 => {
            let error = io::Error::last_os_error();
            Err(io::Error::new(error.kind(), format!("a pid namespace to measure in can't be made: {error}")))
        }
        0 => {
            drop(held);
            let taken = settle(&lifeline, (user != 0).then_some((uid, gid))).and_then(|bed| {
                let taken = measure(&bed);
                bed.clear();
                taken
            });
            if let Err(error) = &taken {
                println!("\nerror: {error}");
            }
            let flushed = io::stdout().flush();
            process::exit(i32::from(taken.is_err() || flushed.is_err()))
        }
        init => {
            let init = pid_t::try_from(init).map_err(io::Error::other)?;
            let ended = program::wait_for(init, limit)?;
            if ended.is_none() {
                // SAFETY: no pointers; the number is an unreaped child's.
                unsafe { libc::kill(init, libc::SIGKILL) };
                program::wait(init)?;
            }
            drop(held);
            Ok(match ended {
                Some(ended) if ended.well() => None,
                Some(ended) => Some(ended.how()),
                None => Some(format!("not done after {} s", limit.as_secs())),
            })
        }
    }
}

/// Makes the namespace fit to live in: bound to its maker, without a terminal, with a `/proc` that shows it.
fn settle(lifeline: &io::PipeReader, mapped: Option<(libc::uid_t, libc::gid_t)>) -> io::Result<Bed> {
    // SAFETY: no pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let mut maker = libc::pollfd { fd: lifeline.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one valid entry. It tells whether the maker was gone before PDEATHSIG was set.
    if unsafe { libc::poll(&raw mut maker, 1, 0) } != 0 {
        process::exit(1);
    }
    // SAFETY: no pointers.
    let pid = unsafe {
        libc::setsid();
        libc::getpid()
    };
    if pid != 1 {
        return Err(io::Error::other("the namespace has another init"));
    }
    if let Some((uid, gid)) = mapped {
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
        fs::write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    }
    mount(c"none", c"/", c"", libc::MS_REC | libc::MS_PRIVATE)?;
    mount(c"proc", c"/proc", c"proc", 0)?;
    // Chains that nobody ends leave dead until the numbers run out; the rest of the machine is to keep some. Before this
    // release the limit is not a namespace's own.
    if facts::kernel()? >= (6, 14) {
        fs::write("/proc/sys/kernel/pid_max", MOST_NUMBERS)?;
    }
    Ok(Bed(()))
}

/// mount(2) without data.
pub(crate) fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong) -> io::Result<()> {
    // SAFETY: all strings end in NUL; no file system used here needs data.
    let done = unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
