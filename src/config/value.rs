//! What a single value of the configuration or an option may be, and how to say that it is not.

use super::reader::kind;
use crate::runtime::{Name, NotAName};
use crate::signal::Signal;
use crate::supervisor::Target;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use toml::de::{DeArray, DeTable, DeValue};

/// An exit that counts as success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuccessStatus {
    /// This exit code, or, above 128, death by the signal that shells give this code for.
    Code(u8),
    /// Death by this signal.
    Signal(Signal),
}

/// Reads a duration: "7s", "500ms", "1h 30m".
///
/// # Errors
/// Says what a duration looks like.
pub fn duration(text: &str) -> Result<Duration, String> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    humantime::parse_duration(text).map_err(|_| {
        format!("{text:?} is not a duration; write a number with a unit, such as \"7s\", \"500ms\" or \"1h 30m\"")
    })
}

/// Reads one pair of the signal map, "FROM=TO".
///
/// # Errors
/// Says what is wrong with either side.
pub fn mapping(text: &str) -> Result<(Signal, Signal), String> {
    let Some((from, to)) = text.split_once('=') else {
        return Err(format!("{text:?} has no \"=\"; write FROM=TO, such as TERM=QUIT"));
    };
    let to = to.parse().map_err(|error: crate::signal::NotASignal| error.to_string())?;
    Ok((mappable(from)?, to))
}

/// Reads the left side of a mapping: a signal that comes in and may be passed on.
pub(super) fn mappable(text: &str) -> Result<Signal, String> {
    let signal: Signal = text.parse().map_err(|error: crate::signal::NotASignal| error.to_string())?;
    if [Signal::KILL, Signal::STOP].contains(&signal) {
        return Err(format!("{signal} never comes in: the kernel acts on it; map another signal"));
    }
    if [Signal::CHLD, Signal::CONT, Signal::PIPE].contains(&signal) || signal.stops_a_process() {
        return Err(format!("{signal} is not passed on as a signal of the operator; map another signal"));
    }
    Ok(signal)
}

/// Reads a success status: a code from 0 to 255 or the name of a signal.
///
/// # Errors
/// Says what may be written.
pub fn success_status(text: &str) -> Result<SuccessStatus, String> {
    if text.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
        let code = text.parse().map_err(|_| format!("{text} is not an exit code; write a number from 0 to 255"))?;
        return Ok(SuccessStatus::Code(code));
    }
    let signal = text.parse().map_err(|_| {
        format!("{text:?} is neither an exit code from 0 to 255 nor the name of a signal such as \"TERM\"")
    })?;
    Ok(SuccessStatus::Signal(signal))
}

pub(super) fn string(value: DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) if text.contains('\0') => {
            Err("holds a NUL character, which no name can; remove it".into())
        }
        DeValue::String(text) => Ok(text.into_owned()),
        other => Err(format!("must be a string in quotes, not {}", kind(&other))),
    }
}

pub(super) fn path(value: DeValue<'_>) -> Result<PathBuf, String> {
    let text = string(value)?;
    if text.is_empty() { Err("is empty; write a path or leave the key out".into()) } else { Ok(text.into()) }
}

pub(super) fn duration_value(value: DeValue<'_>) -> Result<Duration, String> {
    match value {
        DeValue::String(text) => duration(&text),
        other => Err(format!("must be a duration in quotes, such as \"7s\" or \"500ms\", not {}", kind(&other))),
    }
}

/// The dead need a moment to be gone, so without any everything would be said to have survived.
pub(super) fn time_to_die(value: DeValue<'_>) -> Result<Duration, String> {
    match duration_value(value)? {
        Duration::ZERO => {
            Err("must be more than nothing, such as \"5s\": what was killed needs a moment to be gone".into())
        }
        time => Ok(time),
    }
}

pub(super) fn signal(value: DeValue<'_>) -> Result<Signal, String> {
    let text = match &value {
        DeValue::String(text) => text.as_ref(),
        DeValue::Integer(number) => number.as_str(),
        other => return Err(format!("must be a signal such as \"TERM\" or \"SIGRTMIN+3\", not {}", kind(other))),
    };
    text.parse().map_err(|error: crate::signal::NotASignal| error.to_string())
}

pub(super) fn boolean(value: DeValue<'_>) -> Result<bool, String> {
    match value {
        DeValue::Boolean(value) => Ok(value),
        other => Err(format!("must be true or false, not {}", kind(&other))),
    }
}

pub(super) fn name(value: DeValue<'_>) -> Result<Name, String> {
    string(value)?.parse().map_err(|error: NotAName| error.to_string())
}

/// One of a few words.
pub(super) fn choice<T: Copy>(value: DeValue<'_>, words: &[(&str, T)]) -> Result<T, String> {
    let text = string(value)?;
    let found = words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning);
    let listed = || words.iter().map(|(word, _)| format!("{word:?}")).collect::<Vec<_>>().join(", ");
    found.ok_or_else(|| format!("{text:?} is not known; write one of {}", listed()))
}

pub(super) const TARGETS: [(&str, Target); 3] =
    [("main", Target::Main), ("group", Target::Group), ("tree", Target::Tree)];

pub(super) fn command(value: DeValue<'_>) -> Result<Vec<OsString>, String> {
    const REMEDY: &str = "write the program and each argument as a string of its own: [\"program\", \"argument\"]";
    let DeValue::Array(words) = value else {
        return Err(format!("must be an array of strings, not {}; {REMEDY}", kind(&value)));
    };
    let words = each(words, |word| string(word).map(OsString::from))?;
    match words.first() {
        None => Err(format!("is empty; {REMEDY}")),
        Some(program) if program.is_empty() => Err(format!("names no program: its first string is empty; {REMEDY}")),
        Some(_) => Ok(words),
    }
}

pub(super) fn success_statuses(value: DeValue<'_>) -> Result<Vec<SuccessStatus>, String> {
    let DeValue::Array(list) = value else {
        return Err(format!("must be an array such as [143, \"TERM\"], not {}", kind(&value)));
    };
    each(list, |status| match &status {
        DeValue::Integer(number) => success_status(number.as_str()),
        DeValue::String(text) => success_status(text),
        other => Err(format!("holds {}; write exit codes and names of signals", kind(other))),
    })
}

pub(super) fn variables(value: DeValue<'_>) -> Result<Vec<(String, String)>, String> {
    table(value, "{ NAME = \"value\" }")?
        .into_iter()
        .map(|(name, value)| {
            let name = name.into_inner().into_owned();
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(format!("{name:?} cannot be the name of a variable; remove \"=\" and NUL"));
            }
            let value = string(value.into_inner()).map_err(|why| format!("{name} {why}"))?;
            Ok((name, value))
        })
        .collect()
}

pub(super) fn signal_map(value: DeValue<'_>) -> Result<BTreeMap<Signal, Signal>, String> {
    let mut map = BTreeMap::new();
    for (from, to) in table(value, "{ USR1 = \"HUP\" }")? {
        let from = mappable(from.get_ref())?;
        if map.insert(from, signal(to.into_inner())?).is_some() {
            return Err(format!("names {from} twice; a signal is passed on as one: remove all but one"));
        }
    }
    Ok(map)
}

fn table<'i>(value: DeValue<'i>, example: &str) -> Result<DeTable<'i>, String> {
    match value {
        DeValue::Table(table) => Ok(table),
        other => Err(format!("must be a table such as {example}, not {}", kind(&other))),
    }
}

fn each<'i, T>(list: DeArray<'i>, read: impl Fn(DeValue<'i>) -> Result<T, String>) -> Result<Vec<T>, String> {
    list.into_iter().map(|item| read(item.into_inner())).collect()
}
