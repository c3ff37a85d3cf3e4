//! Reading one section of the file, key by key: what is taken is known, what is left over is not.
//!
//! The names that the parser asks for *are* the known keys, so there is no second list to keep beside it. Every refusal
//! has the line, the key and what to write instead; all of them are collected, so that one run shows all.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong and what to do, the key named.
    pub text: String,
}

impl Refusal {
    /// The text goes no further than this.
    pub(super) fn not_utf8(before: &[u8]) -> Refusal {
        let text = "not UTF-8: there is a byte here that is no character; save the file as UTF-8".to_owned();
        Refusal { line: line_after(before), text }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.text)
    }
}

/// As many refusals as anybody reads.
const MOST: usize = 100;

/// All that is wrong with one text.
#[derive(Debug)]
pub(super) struct Refusals<'s> {
    source: &'s str,
    pub(super) list: Vec<Refusal>,
}

impl<'s> Refusals<'s> {
    pub(super) fn new(source: &'s str) -> Refusals<'s> {
        Refusals { source, list: Vec::new() }
    }

    pub(super) fn add(&mut self, at: Range<usize>, text: String) {
        if self.list.len() >= MOST {
            return;
        }
        let before = self.source.as_bytes().get(..at.start).unwrap_or_default();
        self.list.push(Refusal { line: line_after(before), text });
    }
}

fn line_after(before: &[u8]) -> usize {
    before.iter().filter(|byte| **byte == b'\n').count() + 1
}

/// A value with its full name and place.
#[derive(Debug)]
pub(super) struct Entry<'i> {
    pub(super) name: String,
    pub(super) span: Range<usize>,
    pub(super) value: DeValue<'i>,
}

/// A table whose keys are taken one by one.
#[derive(Debug)]
pub(super) struct Section<'i> {
    prefix: String,
    entries: BTreeMap<String, (Range<usize>, Spanned<DeValue<'i>>)>,
    known: Vec<&'static str>,
}

impl<'i> Section<'i> {
    pub(super) fn new(prefix: String, table: DeTable<'i>) -> Section<'i> {
        let entries = table.into_iter().map(|(key, value)| (key.get_ref().to_string(), (key.span(), value)));
        Section { prefix, entries: entries.collect(), known: Vec::new() }
    }

    /// Takes the value of a key.
    pub(super) fn take(&mut self, key: &'static str) -> Option<Entry<'i>> {
        self.known.push(key);
        let (_, value) = self.entries.remove(key)?;
        Some(Entry { name: self.name(key), span: value.span(), value: value.into_inner() })
    }

    /// Takes a value and reads it; what is wrong with it is noted.
    pub(super) fn read<T>(
        &mut self,
        key: &'static str,
        refusals: &mut Refusals<'_>,
        read: impl FnOnce(DeValue<'i>) -> Result<T, String>,
    ) -> Option<T> {
        let entry = self.take(key)?;
        match read(entry.value) {
            Ok(value) => Some(value),
            Err(why) => {
                refusals.add(entry.span, format!("{}: {why}", entry.name));
                None
            }
        }
    }

    /// Takes a table below this one.
    pub(super) fn section(&mut self, key: &'static str, refusals: &mut Refusals<'_>) -> Section<'i> {
        let name = self.name(key);
        let table = self.read(key, refusals, |value| match value {
            DeValue::Table(table) => Ok(table),
            other => Err(format!("is a table: write [{key}] and its keys below, not {}", kind(&other))),
        });
        Section::new(name, table.unwrap_or_default())
    }

    /// Refuses what nobody asked for, with the nearest key that somebody did.
    pub(super) fn finish(self, refusals: &mut Refusals<'_>) {
        for (key, (span, _)) in &self.entries {
            let nearest = self.known.iter().map(|known| (strsim::jaro_winkler(known, key), known));
            let nearest = nearest.filter(|(likeness, _)| *likeness > 0.7).max_by(|a, b| a.0.total_cmp(&b.0));
            let remedy = match nearest {
                Some((_, known)) => format!("did you mean `{known}`?"),
                None => format!("known here: {}", self.known.join(", ")),
            };
            refusals.add(span.clone(), format!("{}: unknown key; {remedy}", self.name(key)));
        }
    }

    fn name(&self, key: &str) -> String {
        // A key in quotes may hold anything, also what would take up another line.
        let plain = !key.is_empty() && !key.contains(|c: char| c.is_control() || c == '.');
        let key = if plain { key.to_owned() } else { format!("{key:?}") };
        if self.prefix.is_empty() { key } else { format!("{}.{key}", self.prefix) }
    }
}

/// What a value is, in words.
pub(super) fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "an array",
        DeValue::Table(_) => "a table",
    }
}
