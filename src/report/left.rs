//! Those who were left: in a line for people, and as data.

use super::{ExitFields, mask};
use crate::containment::leftover::{Fate, Leftover, Leftovers};
use crate::signal::Signal;
use serde::Serialize;
use std::time::Duration;

/// How many leftovers the line for people names.
const NAMED_IN_LINE: usize = 5;

/// Those who were left, and how long it took to end them.
#[derive(Debug, Default)]
pub struct Left {
    list: Vec<Leftover>,
    unnamed: usize,
    took: Duration,
}

#[derive(Serialize)]
pub(super) struct LeftoverFields {
    pid: i32,
    ppid: i32,
    pgid: i32,
    sid: i32,
    uid: Option<u32>,
    command: String,
    ended: String,
    exit: Option<ExitFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<char>,
    #[serde(skip_serializing_if = "Option::is_none")]
    wchan: Option<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    not_permitted: bool,
}

impl From<&Leftover> for LeftoverFields {
    fn from(leftover: &Leftover) -> LeftoverFields {
        let (exit, state, wchan) = match &leftover.fate {
            Fate::Ended(exit) => (exit.map(ExitFields::from), None, None),
            Fate::Survived { state, wchan } => (None, Some(*state), wchan.clone()),
            Fate::Alive | Fate::Kept => (None, None, None),
        };
        LeftoverFields {
            pid: leftover.stat.pid,
            ppid: leftover.stat.ppid,
            pgid: leftover.stat.pgid,
            sid: leftover.stat.sid,
            uid: leftover.name.uid,
            command: name(leftover),
            ended: ended(leftover),
            exit,
            state,
            wchan,
            not_permitted: leftover.denied && state.is_some(),
        }
    }
}

/// Its command line; its name in brackets, as `ps` has it, when it gave its memory up.
fn name(leftover: &Leftover) -> String {
    if leftover.name.arguments.is_empty() {
        return mask::command_line(&[format!("[{}]", leftover.stat.comm)]);
    }
    mask::command_line(&leftover.name.arguments)
}

fn ended(leftover: &Leftover) -> String {
    match leftover.fate {
        Fate::Survived { .. } => "survived".to_owned(),
        Fate::Kept => "kept".to_owned(),
        _ => leftover.ended_by().map_or_else(|| "by itself".to_owned(), |signal| signal.to_string()),
    }
}

impl Left {
    /// All of them.
    pub fn new(leftovers: Leftovers, took: Duration) -> Left {
        let (list, unnamed) = leftovers.into_list();
        Left { list, unnamed, took }
    }

    /// Takes the main process out, which is no leftover, and gives what became of it.
    pub(super) fn take(&mut self, main: i32) -> Option<Fate> {
        let index = self.list.iter().position(|leftover| leftover.stat.pid == main)?;
        Some(self.list.remove(index).fate)
    }

    /// Whether nobody was left.
    pub fn is_nothing(&self) -> bool {
        self.list.is_empty() && self.unnamed == 0
    }

    pub(super) fn fields(&self) -> Vec<LeftoverFields> {
        self.list.iter().map(LeftoverFields::from).collect()
    }

    /// How many more were left than are named.
    pub(super) fn unnamed(&self) -> usize {
        self.unnamed
    }

    /// The line for people, about the leftovers of `whom`; nothing when nothing had to be ended. Of the unnamed it is not
    /// known who lives if `some_live` and none of them has a name.
    pub fn summary(&self, whom: &str, some_live: bool) -> Option<String> {
        let unnamed = if some_live && self.survivors().is_empty() { 0 } else { self.unnamed };
        let counted = |label: &str| self.list.iter().filter(|one| ended(one) == label).count();
        let (term, kill, itself) =
            (counted(&Signal::TERM.to_string()), counted(&Signal::KILL.to_string()), counted("by itself"));
        let total = term + kill + itself + unnamed;
        if total == 0 {
            return None;
        }
        let parts = [
            (term, "by SIGTERM"),
            (kill, "by SIGKILL"),
            (itself, if itself == 1 { "by itself" } else { "by themselves" }),
            (unnamed, "unnamed"),
        ];
        let how: Vec<String> =
            parts.iter().filter(|(count, _)| *count > 0).map(|(count, how)| format!("{count} {how}")).collect();
        let gone: Vec<&Leftover> =
            self.list.iter().filter(|one| !matches!(one.fate, Fate::Survived { .. } | Fate::Kept)).collect();
        let took = self.took.as_secs_f64();
        let plural = if total == 1 { "leftover" } else { "leftovers" };
        let by_name = if gone.is_empty() { String::new() } else { format!(": {}", names(&gone)) };
        Some(format!("ended {total} {plural} of {whom} in {took:.2} s ({}){by_name}", how.join(", ")))
    }

    /// The line about who was left alone.
    pub fn kept(&self) -> Option<String> {
        let kept: Vec<&Leftover> = self.list.iter().filter(|one| one.fate == Fate::Kept).collect();
        let plural = if kept.len() == 1 { "process" } else { "processes" };
        (!kept.is_empty()).then(|| format!("left {} kept {plural} alone: {}", kept.len(), names(&kept)))
    }

    /// Those who could not be ended, each with what is known.
    pub(super) fn survivors(&self) -> Vec<String> {
        let named = self.list.iter().filter_map(|one| match &one.fate {
            Fate::Survived { state, wchan } => {
                let uid = one.name.uid.map_or_else(|| "?".to_owned(), |uid| uid.to_string());
                let wchan = wchan.as_ref().map(|wchan| format!(", waiting in {wchan}")).unwrap_or_default();
                let denied = if one.denied { ", not permitted to signal it" } else { "" };
                Some(format!("{} (pid {}, state {state}, uid {uid}{wchan}{denied})", name(one), one.stat.pid))
            }
            _ => None,
        });
        named.collect()
    }
}

fn names(leftovers: &[&Leftover]) -> String {
    let short = |leftover: &&Leftover| {
        let short: String = name(leftover).chars().take(60).collect();
        format!("{short} (pid {})", leftover.stat.pid)
    };
    let mut named: Vec<String> = leftovers.iter().take(NAMED_IN_LINE).map(short).collect();
    let more = leftovers.len().saturating_sub(NAMED_IN_LINE);
    if more > 0 {
        named.push(format!("and {more} more"));
    }
    named.join(", ")
}
