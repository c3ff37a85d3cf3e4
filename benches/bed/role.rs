//! The services of the measures: this program, run again below the supervisor under measurement.
//!
//! All but the first process of a service are forks that never execute, so that it is the kernel and the supervisor
//! that set the pace.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::process::ExitCode;
use std::ptr;

use libc::pid_t;

use super::wire::Station;

/// The first argument of a process that plays a role.
pub(crate) const FLAG: &str = "--role";

/// Plays `role` to its end.
pub(crate) fn play(role: &str, arguments: &[String]) -> ExitCode {
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(0);
    let played = match role {
        "churn" => churn(number(0)),
        "mass" => mass(number(0), number(1)),
        "chains" => chains(number(0), number(1) == 1),
        "bomb" => bomb(),
        "bomb-as" => become_user(number(0), number(1)).and_then(|()| bomb()),
        _ => return ExitCode::from(2),
    };
    if played.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Makes orphans that end at once, one after the other, by double fork.
fn churn(orphans: usize) -> io::Result<()> {
    let mut station = Station::inherited();
    station.say()?;
    station.await_go()?;
    for _ in 0..orphans {
        orphan(|| {});
    }
    station.say()?;
    pause()
}

/// Makes sessions of orphans that end when told to by a signal, and are all direct children of the supervisor.
fn mass(sessions: usize, members: usize) -> io::Result<()> {
    let mut station = Station::inherited();
    let (counter, mark) = io::pipe()?;
    for _ in 0..sessions {
        orphan(|| {
            new_session();
            for _ in 1..members {
                orphan(|| stay(&mark));
            }
            stay(&mark);
        });
    }
    count(counter, sessions * members)?;
    station.say()?;
    pause()
}

/// Starts chains of processes, each of which forks its successor and ends; then ends itself when told.
fn chains(number: usize, sessions: bool) -> io::Result<()> {
    let mut station = Station::inherited();
    let (counter, mark) = io::pipe()?;
    for _ in 0..number {
        if fork() == 0 {
            let _ = (&mark).write(b"+");
            loop {
                match fork() {
                    0 if sessions => new_session(),
                    0 => {}
                    -1 => std::thread::yield_now(),
                    _ => end(),
                }
            }
        }
    }
    count(counter, number)?;
    station.say()?;
    station.await_go()?;
    station.say()
}

/// Forks without end and in every process, each in a session of its own; ends itself when the user may have no more.
fn bomb() -> io::Result<()> {
    let mut station = Station::inherited();
    let (counter, mark) = io::pipe()?;
    if fork() == 0 {
        new_session();
        let mut told = false;
        loop {
            match fork() {
                0 => {
                    new_session();
                    told = false;
                }
                -1 if !told => told = (&mark).write(b"+").is_ok(),
                _ => {}
            }
        }
    }
    count(counter, 1)?;
    station.say()
}

/// Gives root's rights up for those of a user who may have so many processes.
fn become_user(uid: usize, processes: usize) -> io::Result<()> {
    let uid = libc::uid_t::try_from(uid).map_err(io::Error::other)?;
    let most = libc::rlim_t::try_from(processes).map_err(io::Error::other)?;
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the pointers are valid for the read; an empty list of groups needs none.
    let done = unsafe {
        libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) == 0
            && libc::setgroups(0, ptr::null()) == 0
            && libc::setresgid(uid, uid, uid) == 0
            && libc::setresuid(uid, uid, uid) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs `life` in a process whose parent has ended.
fn orphan(life: impl FnOnce()) {
    let parent = retried_fork();
    if parent == 0 {
        if retried_fork() == 0 {
            life();
        }
        end()
    }
    // SAFETY: a null pointer says that the status is not wanted.
    unsafe { libc::waitpid(parent, ptr::null_mut(), 0) };
}

/// Forks, later if there are no numbers left.
fn retried_fork() -> pid_t {
    loop {
        match fork() {
            -1 => std::thread::yield_now(),
            pid => return pid,
        }
    }
}

fn fork() -> pid_t {
    // SAFETY: this process has one thread.
    unsafe { libc::fork() }
}

fn new_session() {
    // SAFETY: no pointers.
    unsafe { libc::setsid() };
}

/// Ends without the runtime's farewell, which a fork has no part in.
fn end() -> ! {
    // SAFETY: no pointers.
    unsafe { libc::_exit(0) }
}

/// Says that this process is there, and stays until a signal ends it.
fn stay(mut mark: &PipeWriter) {
    let _ = mark.write(b"+");
    let _ = pause();
}

fn pause() -> io::Result<()> {
    loop {
        // SAFETY: no pointers.
        unsafe { libc::pause() };
    }
}

/// Waits until so many have said that they are there.
fn count(mut counter: PipeReader, number: usize) -> io::Result<()> {
    counter.read_exact(&mut vec![0; number])
}
