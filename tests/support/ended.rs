//! The end of a run, and the verdict: was anything left?

use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::running::Running;
use super::supervise::MARK;
use super::sys;
use super::told::{Told, count_got};
use super::wire::{Event, Left, Order};

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    /// Of a run at a terminal: what the terminal showed.
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// From the exec to the end.
    pub(crate) wall: Duration,
    /// From the last signal (or `mark`) to the end.
    pub(crate) after_signal: Duration,
    /// Null when there is none.
    pub(crate) report: Value,
    /// Alive (or a zombie) when the program had ended. Ended by now.
    pub(crate) left: Vec<Left>,
    /// Orphans that fell past the living program.
    pub(crate) fell: u32,
    /// The terminal's foreground group at the end.
    pub(crate) foreground: i32,
    pub(crate) pid: i32,
    pub(crate) told: Vec<Told>,
    pub(crate) argv: Vec<String>,
    /// The run's directory, removed with this.
    pub(crate) dir: TempDir,
}

/// What the end of the program means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Empty,
    EmptyWithin(Duration),
    LeftoversAllowed,
}

impl Running {
    /// Waits for the end. Panics when anything is left at that moment.
    pub(crate) fn finish(self) -> Ended {
        self.end(Verdict::Empty)
    }

    /// For a program that is not there any more to wait (a guard that was killed): panics when anything is left after
    /// `limit`.
    pub(crate) fn finish_empty_within(self, limit: Duration) -> Ended {
        self.end(Verdict::EmptyWithin(limit))
    }

    /// Waits for the end. What is left is in `Ended::left`, and is ended then.
    pub(crate) fn finish_with_leftovers(self) -> Ended {
        self.end(Verdict::LeftoversAllowed)
    }

    fn end(mut self, verdict: Verdict) -> Ended {
        self.wait_end();
        let Some(Event::Ended { code, signal, foreground, fell, at, mut empty, mut left }) = self.ended.take() else {
            unreachable!("wait_end")
        };
        if let Verdict::EmptyWithin(limit) = verdict {
            self.order(&Order::Settle(u64::try_from(limit.as_millis()).unwrap()));
            (empty, left) = self.until("what is left to end", |run| {
                run.take_event(|event| match event {
                    Event::Settled { empty, left, .. } => Some((*empty, left.clone())),
                    _ => None,
                })
            });
        }
        self.clear();
        let held = self.drain();
        let marked = self.end_marked();
        let ended = Ended {
            code,
            signal,
            stdout: self.stdout.text(),
            stderr: self.stderr.text(),
            wall: Duration::from_micros(at.saturating_sub(self.started_at)),
            after_signal: Duration::from_micros(at.saturating_sub(self.marked_at.max(self.started_at))),
            report: self.report(),
            left,
            fell,
            foreground,
            pid: self.pid,
            told: std::mem::take(&mut self.told),
            argv: std::mem::take(&mut self.launch.argv),
            dir: std::mem::replace(&mut self.dir, TempDir::new().unwrap()),
        };
        let allowed = verdict == Verdict::LeftoversAllowed;
        assert!(allowed || empty, "processes are left after the end of the program\n{ended}");
        assert!(held.is_empty(), "after the end of all descendants somebody still holds {held:?}\n{ended}");
        assert!(marked.is_empty(), "not descendants any more, but alive and of this run: {marked:?}\n{ended}");
        ended
    }

    fn clear(&mut self) {
        self.order(&Order::Clear);
        let empty = self.until("the last to end", |run| {
            run.take_event(|event| if let Event::Cleared { empty } = event { Some(*empty) } else { None })
        });
        if !empty {
            self.fail("the warden could not end what is left");
        }
        self.end_warden();
    }

    /// Reads all pipes to their end. Which have none: forks of other tests may hold one for a moment, hence the limit.
    fn drain(&mut self) -> Vec<&'static str> {
        self.tell_kept = None;
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let open = [("the tree's pipe", &self.tell), ("stdout", &self.stdout), ("stderr", &self.stderr)];
            let open: Vec<_> = open.into_iter().filter(|(_, s)| s.fd.is_some()).map(|(name, _)| name).collect();
            if open.is_empty() || Instant::now() > end {
                return open;
            }
            self.pump(Some(end));
        }
    }

    /// Who escaped even from the warden.
    fn end_marked(&self) -> Vec<String> {
        let mark = format!("{MARK}={}", self.dir.path().display());
        let has_mark = |pid: &i32| {
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ.split(|b| *b == 0).any(|entry| entry == mark.as_bytes())
        };
        let found: Vec<i32> = sys::processes().into_iter().filter(has_mark).collect();
        let named = found.iter().map(|pid| format!("{pid} {}", sys::command(*pid))).collect();
        for pid in found {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        named
    }

    fn report(&self) -> Value {
        let Ok(text) = fs::read(self.dir.path().join("report.json")) else { return Value::Null };
        serde_json::from_slice(&text).unwrap_or_else(|e| panic!("report: {e}: {}", String::from_utf8_lossy(&text)))
    }
}

impl Ended {
    /// What a `Supervise::look` service saw: pid, ppid, pgid, sid, uid, gid, umask, foreground, cwd, args, env, ignored,
    /// caught, blocked, fds (number → file [dev, inode] and flags), subreaper, pdeathsig.
    pub(crate) fn look(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}\n{self}"))
    }

    /// How often a node told that it caught the signal.
    pub(crate) fn got(&self, name: &str, signal: i32) -> usize {
        count_got(&self.told, name, signal)
    }
}

/// All that is known, for the message of an assertion.
impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "command: {:?}", self.argv)?;
        writeln!(f, "code: {:?} signal: {:?} wall: {:?} fell: {}", self.code, self.signal, self.wall, self.fell)?;
        for left in self.left.iter().take(20) {
            writeln!(f, "left: {left:?}")?;
        }
        if self.left.len() > 20 {
            writeln!(f, "left: {} more", self.left.len() - 20)?;
        }
        write!(f, "report: {:#}\nstdout: {}\nstderr: {}", self.report, self.stdout, self.stderr)
    }
}
