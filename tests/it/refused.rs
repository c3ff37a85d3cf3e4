//! System calls that the kernel, or a filter of a container, refuses: what still holds then.

use std::time::Duration;

use libc::{EAGAIN, EMFILE, ENOMEM, ENOSYS, EPERM, ESRCH, SIGTERM};

use crate::end::{IMPATIENT, fate};
use crate::support::fault::Fault;
use crate::support::tree::Node;
use crate::support::{Ended, Supervise, node};

fn deaf(name: &str) -> Node {
    node(name).ignores([SIGTERM])
}

/// Leftovers near and far, deep and not; ends with 7 when they are all up.
fn tree() -> Node {
    let far = node("far").setsid().with(deaf("deep").with(node("group").own_group()));
    node("main").with(node("near")).with(far).with(deaf("fallen").daemonized()).exit_when_up(7)
}

fn with(fault: Fault) -> Supervise {
    Supervise::new().options(IMPATIENT).fault(fault)
}

fn all_ended(ended: &Ended) {
    assert_eq!(ended.code, Some(7), "{ended}");
    for name in ["near", "far", "group"] {
        assert_eq!(fate(ended, &format!("node {name}")), "SIGTERM", "{ended}");
    }
    for name in ["deep", "fallen"] {
        assert_eq!(fate(ended, &format!("node {name}")), "SIGKILL", "{ended}");
    }
}

#[test]
fn a_kernel_without_signals_by_descriptor_still_ends_everything() {
    for errno in [ENOSYS, EPERM] {
        all_ended(&with(Fault::new().fails(libc::SYS_pidfd_send_signal, errno)).tree(tree()).run());
    }
}

#[test]
fn a_target_that_is_said_to_be_gone_ends_no_sweep() {
    let ended = with(Fault::new().fails(libc::SYS_pidfd_send_signal, ESRCH)).tree(tree()).run();
    assert_eq!(ended.code, Some(7), "{ended}");
    assert_eq!(fate(&ended, "node fallen"), "SIGKILL", "{ended}");
}

#[test]
fn what_only_saves_effort_may_be_missing() {
    for call in [libc::SYS_close_range, libc::SYS_pidfd_open, libc::SYS_pwritev2, libc::SYS_clone3] {
        all_ended(&with(Fault::new().fails(call, ENOSYS)).tree(tree()).run());
    }
}

fn nothing_was_started(fault: Fault) {
    nothing_was_started_and_one_line_says_why(fault, |_| false);
}

/// `warning` is a line that may come before.
fn nothing_was_started_and_one_line_says_why(fault: Fault, warning: fn(&str) -> bool) {
    let run = with(fault);
    let sign = run.dir().join("started");
    let ended = run.command(["touch", sign.to_str().unwrap()]).run();
    assert_eq!((ended.code, ended.signal), (Some(125), None), "{ended}");
    assert!(!sign.exists(), "{ended}");
    let lines: Vec<&str> = ended.stderr.lines().filter(|line| !warning(line)).collect();
    assert!(lines.len() == 1 && lines[0].starts_with("supervise: error: cannot "), "{ended}");
    assert!(ended.wall < Duration::from_secs(25), "{ended}");
}

#[test]
fn without_a_process_for_the_service_nothing_is_started() {
    // By whichever call the C library forks.
    for (errno, text) in [(EAGAIN, "Resource temporarily unavailable"), (ENOMEM, "Cannot allocate memory")] {
        let forks = [libc::SYS_clone, libc::SYS_clone3];
        let fault = forks.into_iter().fold(Fault::new(), |fault, call| fault.fails(call, errno));
        let ended = with(fault.clone()).command(["true"]).run();
        assert!(ended.stderr.contains("cannot start the service") && ended.stderr.contains(text), "{ended}");
        assert_eq!(ended.report["result"], "start-failed", "{ended}");
        // Without a guard the run would go on.
        let no_guard = |line: &str| line.starts_with("supervise: warning: there is no guard");
        assert_eq!(ended.stderr.lines().filter(|line| no_guard(line)).count(), 1, "{ended}");
        nothing_was_started_and_one_line_says_why(fault, no_guard);
    }
}

#[test]
fn without_a_source_of_events_nothing_is_started() {
    for (call, errno) in
        [(libc::SYS_signalfd4, EMFILE), (libc::SYS_epoll_create1, EMFILE), (libc::SYS_epoll_ctl, ENOMEM)]
    {
        nothing_was_started(Fault::new().fails(call, errno));
    }
}

#[test]
fn without_being_the_one_that_orphans_fall_to_nothing_is_started() {
    let subreaper = libc::PR_SET_CHILD_SUBREAPER.cast_unsigned();
    nothing_was_started(Fault::new().fails_with(libc::SYS_prctl, 0, subreaper, EPERM));
}

#[test]
fn signals_are_passed_on_where_they_cannot_be_queued() {
    let service = || node("main").reports([libc::SIGHUP, libc::SIGUSR1]).on(SIGTERM, crate::support::Act::Exit(9));
    let full = |run: Supervise| run.rlimit(libc::RLIMIT_SIGPENDING, 0, 0);
    let refused = |run: Supervise| run.fault(Fault::new().fails(libc::SYS_rt_sigqueueinfo, EPERM));
    let cannot_queue: [fn(Supervise) -> Supervise; 2] = [full, refused];
    for cannot_queue in cannot_queue {
        let mut run = cannot_queue(Supervise::new()).tree(service()).start();
        run.wait_up();
        for signal in [libc::SIGHUP, libc::SIGUSR1] {
            run.signal(signal);
            run.wait_got("main", signal, 1);
        }
        run.signal(SIGTERM);
        let ended = run.finish();
        assert_eq!(ended.code, Some(9), "{ended}");
    }
}

#[test]
fn a_guard_that_cannot_hear_takes_no_killed_service_for_a_success() {
    if !crate::support::need_root() {
        return;
    }
    for call in [libc::SYS_recvmsg, libc::SYS_recvfrom, libc::SYS_sendmsg] {
        let run = Supervise::new().without_report().fault(Fault::new().fails(call, EPERM));
        let run = run.options(["--containment", "pidns"]).command(["sh", "-c", "sleep 1000"]);
        let mut run = run.start();
        run.wait_end();
        let ended = run.finish_empty_within(Duration::from_secs(20));
        assert_eq!(ended.code, Some(125), "{ended}");
    }
}
