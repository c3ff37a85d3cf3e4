//! What `/proc` tells about a process. A process that is gone tells nothing, which is no error.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use libc::pid_t;

/// State and parent of a process.
pub(crate) struct Stat {
    pub(crate) state: char,
    pub(crate) parent: pid_t,
}

/// All processes that can be seen.
pub(crate) fn pids() -> Vec<pid_t> {
    numbers("/proc")
}

pub(crate) fn stat(pid: pid_t) -> Option<Stat> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything, parentheses as well.
    let mut fields = line.get(line.rfind(')')? + 1..)?.split_whitespace();
    Some(Stat { state: fields.next()?.chars().next()?, parent: fields.next()?.parse().ok()? })
}

/// The processes that execute `program`.
pub(crate) fn running(program: &Path) -> Vec<pid_t> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let wanted = identity(program);
    let same = |pid: &pid_t| identity(format!("/proc/{pid}/exe").as_ref()) == wanted;
    pids().into_iter().filter(|&pid| pid != 1).filter(same).collect()
}

/// The processes whose parent is `parent`.
pub(crate) fn children(parent: pid_t) -> Vec<pid_t> {
    pids().into_iter().filter(|&pid| stat(pid).is_some_and(|stat| stat.parent == parent)).collect()
}

/// The arguments of a process.
pub(crate) fn arguments(pid: pid_t) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|&byte| byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

/// Nanoseconds that all threads of a process have run.
pub(crate) fn run_time(pid: pid_t) -> u64 {
    let of = |tid: &pid_t| -> Option<u64> {
        let line = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?;
        line.split_whitespace().next()?.parse().ok()
    };
    threads(pid).iter().filter_map(of).sum()
}

/// How often all threads of a process were switched away from, by their will or against it.
pub(crate) fn switches(pid: pid_t) -> u64 {
    let of = |tid: &pid_t| {
        let path = format!("/proc/{pid}/task/{tid}/status");
        field(&path, "voluntary_ctxt_switches:") + field(&path, "nonvoluntary_ctxt_switches:")
    };
    threads(pid).iter().map(of).sum()
}

/// Proportional set size in kB.
pub(crate) fn pss(pid: pid_t) -> u64 {
    field(&format!("/proc/{pid}/smaps_rollup"), "Pss:")
}

/// Private pages in kB that were written to, which cost memory whatever else runs.
pub(crate) fn private_dirty(pid: pid_t) -> u64 {
    field(&format!("/proc/{pid}/smaps_rollup"), "Private_Dirty:")
}

pub(crate) fn threads(pid: pid_t) -> Vec<pid_t> {
    numbers(&format!("/proc/{pid}/task"))
}

/// The number after `name` at the start of a line; 0 where there is none.
fn field(path: &str, name: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn numbers(folder: &str) -> Vec<pid_t> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
