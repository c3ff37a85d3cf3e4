//! What a process was started with, as JSON.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

/// See `Look` in `supervise.rs` for the keys.
pub(crate) fn look(file: Option<&str>) -> i32 {
    // Before anything is opened.
    let fds = open_fds();
    let (mut ignored, mut caught) = (Vec::new(), Vec::new());
    for signal in 1..=64 {
        // SAFETY: all zero is a valid sigaction, to be filled.
        let action = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &raw mut action) < 0 {
                continue;
            }
            action.sa_sigaction
        };
        match action {
            libc::SIG_DFL => {}
            libc::SIG_IGN => ignored.push(signal),
            _ => caught.push(signal),
        }
    }
    let args: Vec<String> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    let env: Map<String, Value> =
        std::env::vars_os().map(|(k, v)| (k.to_string_lossy().into_owned(), json!(v.to_string_lossy()))).collect();
    // SAFETY: no memory is involved.
    let (pid, ppid, pgid, sid, uid, gid) =
        unsafe { (libc::getpid(), libc::getppid(), libc::getpgid(0), libc::getsid(0), libc::getuid(), libc::getgid()) };
    // SAFETY: no memory is involved.
    let (umask, foreground) = unsafe { (libc::umask(0), libc::tcgetpgrp(0)) };
    let seen = json!({
        "pid": pid, "ppid": ppid, "pgid": pgid, "sid": sid, "uid": uid, "gid": gid, "umask": umask,
        "foreground": foreground, "cwd": std::env::current_dir().ok(), "args": args, "env": env,
        "ignored": ignored, "caught": caught, "blocked": blocked(), "fds": fds,
        "subreaper": flag(libc::PR_GET_CHILD_SUBREAPER), "pdeathsig": flag(libc::PR_GET_PDEATHSIG),
    });
    let mut text = seen.to_string();
    let _ = writeln!(text);
    match file {
        Some(file) => std::fs::write(file, text).unwrap(),
        // SAFETY: the buffer is as long as said.
        None => drop(unsafe { libc::write(1, text.as_ptr().cast(), text.len()) }),
    }
    0
}

/// Number → `dev:inode flags`, by fstat: works without /proc.
fn open_fds() -> Map<String, Value> {
    let mut found = Map::new();
    for fd in 0..1024 {
        // SAFETY: all zero is a valid stat, to be filled.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd, &raw mut stat) == 0 {
                let flags = libc::fcntl(fd, libc::F_GETFL);
                found.insert(fd.to_string(), json!({ "file": [stat.st_dev, stat.st_ino], "flags": flags }));
            }
        }
    }
    found
}

fn blocked() -> Vec<i32> {
    // SAFETY: all zero is a valid set, to be filled.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_SETMASK, std::ptr::null(), &raw mut set);
        (1..=64).filter(|signal| libc::sigismember(&raw const set, *signal) == 1).collect()
    }
}

fn flag(what: i32) -> i32 {
    let mut value = 0;
    // SAFETY: the value is ours to fill.
    unsafe { libc::prctl(what, &raw mut value) };
    value
}
