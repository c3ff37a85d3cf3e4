//! All that runs between fork and exec. Async-signal-safe calls only: no allocation, no lock, no panic, no drop.
//!
//! The order is the contract:
//!
//! 1. the cgroup, where the kernel could not make us in it: nothing of ours is to be outside;
//! 2. session or group early, so that a signal to the group reaches us from here on;
//! 3. the terminal while every signal is still blocked, or taking it from the background would stop us (SIGTTOU);
//! 4. the working directory before exec, since a relative command is meant from there;
//! 5. the OOM score, which took a privilege to change and takes none to put back;
//! 6. dispositions and mask last: a signal that came in the meantime is taken now, as the service would have.
//!
//! Every descriptor of ours is close-on-exec; the pipe tells of a failure, its end of file of success.

use super::signals::Inherited;
use super::spawn::{Failure, Plan, Step};
use super::terminal::Placement;
use std::os::fd::RawFd;

/// Becomes the service, or tells the pipe why not.
pub(super) fn become_service(plan: &mut Plan, inherited: &Inherited, placement: Placement, pipe: RawFd) -> ! {
    let failure = attempt(plan, inherited, placement);
    let message = failure.encode();
    // SAFETY: write and _exit are async-signal-safe. The pipe is empty and non-blocking, so this does not wait.
    unsafe {
        libc::write(pipe, message.as_ptr().cast(), message.len());
        libc::_exit(125)
    }
}

fn attempt(plan: &mut Plan, inherited: &Inherited, placement: Placement) -> Failure {
    if let Some((entrance, must)) = plan.entrance {
        // SAFETY: write is async-signal-safe. "0" is the writer (cgroups(7)).
        if unsafe { libc::write(entrance, c"0".as_ptr().cast(), 1) } != 1 && must {
            return Failure::last(Step::Cgroup, 0);
        }
    }
    if let Err(failure) = place(placement) {
        return failure;
    }
    if let Some(directory) = &plan.working_directory {
        // SAFETY: chdir is async-signal-safe; the path was made before the fork.
        if unsafe { libc::chdir(directory.as_ptr()) } != 0 {
            return Failure::last(Step::WorkingDirectory, 0);
        }
    }
    plan.oom_score.restore();
    become_command(plan, inherited)
}

/// Becomes the command where and as we are, or says why not.
pub(super) fn become_command(plan: &mut Plan, inherited: &Inherited) -> Failure {
    inherited.restore();
    execute(plan)
}

fn place(placement: Placement) -> Result<(), Failure> {
    // SAFETY: setsid, setpgid, getpid and tcsetpgrp are async-signal-safe.
    unsafe {
        match placement {
            Placement::OwnSession => {
                if libc::setsid() < 0 {
                    return Err(Failure::last(Step::Session, 0));
                }
            }
            Placement::OwnGroup { terminal, foreground } => {
                if libc::setpgid(0, 0) < 0 {
                    return Err(Failure::last(Step::Group, 0));
                }
                if foreground {
                    // It fails when the terminal is gone: then there is no foreground to be in.
                    libc::tcsetpgrp(terminal, libc::getpid());
                }
            }
            // It fails when the caller is gone with all that was in its group: then there is nobody to share it with.
            Placement::CallersGroup(group) if group > 0 => _ = libc::setpgid(0, group),
            // Of another pid namespace: it cannot be named, and we are in it.
            Placement::CallersGroup(_) => {}
        }
    }
    Ok(())
}

/// execvp, with the search made before the fork: the first candidate that the kernel takes; a text file without `#!` goes
/// to /bin/sh; a file that may not be executed is remembered while the others are tried.
fn execute(plan: &mut Plan) -> Failure {
    let mut denied = None;
    let mut last = Failure { step: Step::Execute, errno: libc::ENOENT, candidate: 0 };
    for (index, candidate) in plan.candidates.iter().enumerate() {
        // SAFETY: execve is async-signal-safe; path, argv and envp are null-terminated and were made before the fork.
        unsafe { libc::execve(candidate.as_ptr(), plan.argv.as_ptr(), plan.envp.as_ptr()) };
        last = Failure::last(Step::Execute, index);
        if last.errno == libc::ENOEXEC {
            plan.script_argv[1] = candidate.as_ptr();
            // SAFETY: as above; the list was allocated before the fork.
            unsafe { libc::execve(c"/bin/sh".as_ptr(), plan.script_argv.as_ptr(), plan.envp.as_ptr()) };
            return last;
        }
        match last.errno {
            libc::EACCES => denied = Some(last),
            // What execvp of glibc goes on after: this directory does not have it, or cannot be asked.
            libc::ENOENT | libc::ESTALE | libc::ENOTDIR | libc::ENODEV | libc::ETIMEDOUT => {}
            _ => return last,
        }
    }
    denied.unwrap_or(last)
}
