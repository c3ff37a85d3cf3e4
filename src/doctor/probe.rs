//! Looking: each by trying it, as `supervise` would use it.

use super::trial::{Tried, attempt, fork_once};
use super::{Finding, Subject};
use crate::containment::cgroup::{Cgroup, Killed};
use crate::containment::pid_namespace;
use crate::effects::Clock;
use crate::event_loop::EventLoop;
use crate::guard::{self, Group, Role};
use crate::log::reason;
use crate::process::proc::{Proc, Process, Unusable};
use crate::process::{descriptors, oom, privileges, reap, spawn};
use crate::{report, runtime};
use nix::sched::{CloneFlags, unshare};
use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::path::Path;

/// The kernel's release (uname(2)).
pub(super) fn kernel() -> String {
    let mut names = MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: it fills what is ours, and all zero is valid, too: empty strings.
    let names = unsafe {
        libc::uname(names.as_mut_ptr());
        names.assume_init()
    };
    let bytes: Vec<u8> = names.release.iter().take_while(|c| **c != 0).map(|c| c.cast_unsigned()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Everything, in the order in which it is shown.
pub(super) fn look() -> Vec<Finding> {
    let mut found = ourselves();
    found.extend(proc());
    found.extend(cgroup());
    found.extend(namespaces());
    found.extend(limits());
    found
}

fn finding(name: Subject, tried: Tried) -> Finding {
    let available = tried.is_ok();
    Finding { name, available, detail: tried.unwrap_or_else(|why| why) }
}

/// What a system call said, and what to do when it refused.
fn answered(result: io::Result<()>, what: &str, remedy: &str) -> Tried {
    result.map(|()| what.to_owned()).map_err(|why| format!("{}; {remedy}", reason(&why)))
}

fn ourselves() -> Vec<Finding> {
    let pid = nix::unistd::getpid();
    let (real, effective) = (nix::unistd::getuid(), nix::unistd::geteuid());
    let as_whom =
        format!("user {effective}{}", if real == effective { String::new() } else { format!(" (real {real})") });
    let is_init = pid.as_raw() == 1;
    let which = if is_init { "the kernel ends all others with us; no guard is needed" } else { "not PID 1" };
    let may_signal = privileges::has(privileges::Capability::Kill);
    let others = match may_signal {
        Ok(true) => Ok("processes of other users may be signalled (CAP_KILL)".to_owned()),
        Ok(false) => Err("another user's process (set-uid, sudo) may not be: run as root, or with CAP_KILL".to_owned()),
        Err(why) => Err(format!("cannot ask for our capabilities: {}", reason(&why))),
    };
    vec![
        finding(Subject::PidOne, if is_init { Ok(which.to_owned()) } else { Err(which.to_owned()) }),
        finding(Subject::Root, if effective.is_root() { Ok(as_whom) } else { Err(as_whom) }),
        finding(Subject::Subreaper, attempt(subreaper)),
        finding(Subject::EmptinessProof, attempt(emptiness_proof)),
        finding(Subject::Events, attempt(sources_of_events)),
        finding(Subject::Guard, attempt(make_guard)),
        finding(Subject::SignalOtherUsers, others),
    ]
}

fn subreaper() -> Tried {
    // SAFETY: a constant option that takes a flag.
    let set = match unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    answered(set, "orphans of the service fall to us", "prctl(PR_SET_CHILD_SUBREAPER) takes Linux 3.4 and no filter")
}

/// In a child that has no children.
fn emptiness_proof() -> Tried {
    match reap::has_children() {
        Ok(false) => Ok("waitid says ECHILD when nobody is left".to_owned()),
        Ok(true) => Err("waitid knows of children that are not there; run where the kernel answers".to_owned()),
        Err(why) => Err(format!("waitid: {}; allow it in the filter of system calls (seccomp)", reason(&why))),
    }
}

fn sources_of_events() -> Tried {
    let opened = EventLoop::open(Clock::start(), None).map(drop);
    answered(opened, "epoll and signalfd tell what happens", "allow epoll and signalfd in the filter of system calls")
}

fn make_guard() -> Tried {
    match guard::fork(Group::Own) {
        // SAFETY: ends this process at once.
        Ok(Role::Supervisor(_)) => unsafe { libc::_exit(0) },
        Ok(Role::Guard(_)) => {
            // SAFETY: this takes our only child, which has ended or is about to.
            unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) };
            Ok("a second process cleans up when the first is killed".to_owned())
        }
        Err(why) => Err(format!("{}; it takes a process, a socket pair and a signalfd", reason(&why))),
    }
}

fn proc() -> Vec<Finding> {
    let opened = Proc::open();
    let mounted = match &opened {
        Ok(_) => Ok("mounted, and shows our pid namespace".to_owned()),
        Err(Unusable::NotMounted) => Err("not mounted: mount -t proc proc /proc".to_owned()),
        Err(Unusable::OtherNamespace) => Err("of another pid namespace: mount -t proc proc /proc in ours".to_owned()),
    };
    let us = nix::unistd::getpid().as_raw();
    let without = || Err("cannot be tried without a /proc".to_owned());
    let proc = opened.ok();
    let ours = proc.as_ref().and_then(|proc| proc.process(us).ok());
    // There always is one, and its stat is everybody's to read unless others are hidden.
    let shows_others = proc.as_ref().map_or_else(without, |proc| match proc.process(1).and_then(|one| one.stat()) {
        Ok(_) => Ok("shows the processes of all users".to_owned()),
        Err(_) => Err("hides other users' processes (hidepid): mount it without, or with our group as gid=".to_owned()),
    });
    let children = ours.as_ref().map_or_else(without, |ours| {
        let read = ours.stat().and_then(|stat| ours.children(&stat)).map(drop);
        answered(
            read,
            "children are listed by their parents",
            "CONFIG_PROC_CHILDREN is missing; all of /proc is read instead",
        )
    });
    let held = |ours: &Process| {
        answered(
            ours.takes_signals(),
            "signals reach the very process that was looked at",
            "signalled by number right after a look; Linux 5.1, or a filter",
        )
    };
    let pidfd = ours.as_ref().map(|ours| ours.pidfd(us));
    let opens = pidfd.as_ref().map_or_else(without, |pidfd| match pidfd {
        Ok(_) => Ok("the end of a process that is not ours wakes us".to_owned()),
        Err(why) => Err(format!("{}; a sweep looks again at times instead (Linux 5.3, or a filter)", reason(why))),
    });
    let group = match pidfd {
        Some(Ok(pidfd)) => signals_groups(&pidfd),
        _ => Err("cannot be tried without a pidfd; not used yet".to_owned()),
    };
    vec![
        finding(Subject::Proc, mounted),
        finding(Subject::ProcOfOthers, shows_others),
        finding(Subject::ProcChildren, children),
        finding(Subject::PidfdSendSignal, ours.as_ref().map_or_else(without, held)),
        finding(Subject::PidfdOpen, opens),
        finding(Subject::PidfdGroupSignal, group),
    ]
}

/// PIDFD_SIGNAL_PROCESS_GROUP (pidfd_send_signal(2)).
const PROCESS_GROUP: libc::c_uint = 1 << 2;

fn signals_groups(pidfd: &impl AsRawFd) -> Tried {
    let null = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: a descriptor of ours; signal 0 asks only.
    let asked = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), 0, null, PROCESS_GROUP) };
    let error = io::Error::last_os_error();
    // We need not lead a group: the flag is known all the same.
    let known = asked == 0 || error.raw_os_error() == Some(libc::ESRCH);
    answered(if known { Ok(()) } else { Err(error) }, "not used yet", "Linux 6.9; not used yet")
}

fn cgroup() -> Vec<Finding> {
    let none = |name| finding(name, Err("cannot be tried without a cgroup".to_owned()));
    let mut cgroup = match Cgroup::make(&report::invocation()) {
        Ok(cgroup) => cgroup,
        Err(why) => {
            let rest = [Subject::CgroupKill, Subject::CgroupFreeze, Subject::PidsController, Subject::CloneIntoCgroup];
            return std::iter::once(finding(Subject::Cgroup, Err(why.to_string()))).chain(rest.map(none)).collect();
        }
    };
    let above = cgroup.path().parent().unwrap_or(Path::new("/")).display().to_string();
    let born = attempt(|| be_born_in(&cgroup));
    let enters = if born.is_ok() { Ok(String::new()) } else { attempt(|| enter(&cgroup)) };
    let killed = match cgroup.kill() {
        Killed::AtOnce => Ok("one write kills all, whoever it runs as".to_owned()),
        Killed::OneByOne { .. } => {
            Err("members are killed one by one, other users' are not; takes Linux 5.14".to_owned())
        }
    };
    let write = |file: &str, value: &str, what: &str, remedy: &str| {
        let opened = File::options().write(true).open(cgroup.path().join(file));
        answered(opened.and_then(|mut file| file.write_all(value.as_bytes())), what, remedy)
    };
    let frozen = write("cgroup.freeze", "0", "births can be stopped by freezing", "takes Linux 5.2");
    let pids = write(
        "pids.max",
        "max",
        "births can be stopped by pids.max",
        "not enabled for cgroups below ours; not needed where they can be frozen",
    );
    let removed = cgroup.remove().map_err(|why| format!("; {} stays: {}", cgroup.path().display(), reason(&why)));
    let stays = removed.err().unwrap_or_default();
    let made = match enters {
        Ok(_) => Ok(format!("can be made in {above}{stays}")),
        Err(why) => Err(format!("can be made in {above}, and nobody can be put into it: {why}{stays}")),
    };
    vec![
        finding(Subject::Cgroup, made),
        finding(Subject::CgroupKill, killed),
        finding(Subject::CgroupFreeze, frozen),
        finding(Subject::PidsController, pids),
        finding(Subject::CloneIntoCgroup, born),
    ]
}

fn be_born_in(cgroup: &Cgroup) -> Tried {
    let made = match spawn::fork_into(cgroup.descriptor()) {
        // SAFETY: ends this process at once.
        Ok(0) => unsafe { libc::_exit(0) },
        Ok(-1) => Err(io::Error::last_os_error()),
        Ok(child) => {
            // SAFETY: our direct child, which has ended or is about to.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::__WALL) };
            Ok(())
        }
        Err(why) => Err(why),
    };
    answered(
        made,
        "the service is born in its cgroup (clone3)",
        "it enters by itself before exec instead (Linux 5.7, or a filter)",
    )
}

fn enter(cgroup: &Cgroup) -> Tried {
    let entered = cgroup.entrance().and_then(|entrance| Ok(nix::unistd::write(entrance, b"0")?));
    entered.map(|_| String::new()).map_err(|why| reason(&why))
}

fn namespaces() -> Vec<Finding> {
    let as_we_are = attempt(|| {
        let made = unshare(CloneFlags::CLONE_NEWPID).map_err(io::Error::from);
        answered(made, "can be made as we are", "takes root with CAP_SYS_ADMIN, or a user namespace")
    });
    let of_users = attempt(|| {
        let made = unshare(CloneFlags::CLONE_NEWUSER).map_err(io::Error::from);
        let remedy = "see user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, and the filter of system calls";
        answered(made, "can be made", remedy)
    });
    vec![
        finding(Subject::PidNamespace, as_we_are),
        finding(Subject::UserNamespace, of_users),
        finding(Subject::PrivateProc, attempt(pid_namespace_with_proc)),
    ]
}

/// All that `--containment pidns` does.
fn pid_namespace_with_proc() -> Tried {
    pid_namespace::make().map_err(|why| why.to_string())?;
    attempt(|| {
        let settled = pid_namespace::settle().map_err(|why| format!("{why}; in a container, unmask its /proc"));
        settled.map(|()| "a pid namespace with a /proc of its own can be had (--containment pidns)".to_owned())
    })
}

fn limits() -> Vec<Finding> {
    let usable = runtime::probe().map(|path| format!("{} keeps lock and record of named runs", path.display()));
    vec![
        finding(Subject::RuntimeDirectory, usable),
        finding(Subject::Precedence, attempt(precedence)),
        finding(Subject::NprocLimit, nproc_limit()),
        finding(Subject::OomScore, oom_score()),
        finding(Subject::CloseRange, {
            let remedy = "open descriptors are read from /proc/self/fd instead (Linux 5.9, or a filter)";
            answered(descriptors::can_close_ranges(), "descriptors are let go of at once", remedy)
        }),
    ]
}

fn precedence() -> Tried {
    // SAFETY: the nice value of this process only.
    let set = match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    answered(set, "we may go before a fork bomb (nice -20)", "takes root, CAP_SYS_NICE or RLIMIT_NICE")
}

/// RLIMIT_NPROC, of which the kernel asks nothing of root, CAP_SYS_RESOURCE and CAP_SYS_ADMIN (getrlimit(2)).
fn nproc_limit() -> Tried {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it fills what is ours.
    unsafe { libc::getrlimit(libc::RLIMIT_NPROC, &raw mut limit) };
    let value = if limit.rlim_cur == libc::RLIM_INFINITY { "unlimited".to_owned() } else { limit.rlim_cur.to_string() };
    let bound = attempt(|| {
        let none = libc::rlimit { rlim_cur: 0, ..limit };
        // SAFETY: the limit of this process only; lowering it is always allowed.
        unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const none) };
        match fork_once() {
            Err(why) if why.raw_os_error() == Some(libc::EAGAIN) => Ok("it binds this user".to_owned()),
            Err(why) => Err(format!("cannot be tried: {}", reason(&why))),
            Ok(()) => Err("it does not bind this user (root, CAP_SYS_RESOURCE or CAP_SYS_ADMIN)".to_owned()),
        }
    });
    let with_value = |text: String| format!("{value} processes; {text}");
    bound.map(with_value).map_err(with_value)
}

fn oom_score() -> Tried {
    let ours = oom::find().map_err(|why| format!("cannot be read: {}; needs /proc", reason(&why)))?;
    let lowered = attempt(|| {
        _ = oom::lower();
        match oom::find() {
            Ok(now) if now < ours => Ok(format!("{now} while we supervise; the service keeps its own")),
            Ok(_) if ours <= oom::OURS => Ok("low enough already".to_owned()),
            Ok(_) => Err("it cannot be lowered without CAP_SYS_RESOURCE: we may be killed for memory".to_owned()),
            Err(why) => Err(reason(&why)),
        }
    });
    let with_value = |text: String| format!("{ours}; {text}");
    lowered.map(with_value).map_err(with_value)
}
