//! `supervisor.toml.example` shows every key that there is, with its default.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Section and key.
type Key = (String, String);

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("supervisor.toml.example")
}

/// What `supervise check` prints for a file.
fn check(file: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_supervise")).arg("check").arg("-c").arg(file).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Calls `visit` with the section that each line is in.
fn each_line<'t>(text: &'t str, mut visit: impl FnMut(&str, &'t str)) {
    let mut section = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            name.clone_into(&mut section);
        } else {
            visit(&section, line);
        }
    }
}

/// Whether the line sets a key, and which: `key = value`, or `# key = value` when it would.
fn setting(line: &str) -> Option<&str> {
    let (key, _) = line.strip_prefix("# ").unwrap_or(line).split_once(" = ")?;
    key.chars().all(|c| c.is_ascii_lowercase() || c == '-').then_some(key)
}

/// Every key that the product knows, and whether it has a default.
fn known() -> BTreeMap<Key, bool> {
    let mut known = BTreeMap::new();
    let nothing = tempfile::NamedTempFile::new().unwrap();
    each_line(&check(nothing.path()), |section, line| {
        let (key, has_default) = match line.strip_prefix("# ").and_then(|line| line.strip_suffix(": not set")) {
            Some(key) => (Some(key), false),
            None => (setting(line), true),
        };
        assert!(key.is_some() || line.is_empty(), "{line}");
        known.extend(key.map(|key| ((section.to_owned(), key.to_owned()), has_default)));
    });
    assert!(known.len() >= 15 && known.values().any(|has| *has) && known.values().any(|has| !has), "{known:?}");
    known
}

#[test]
fn the_example_shows_every_key_once() {
    let text = fs::read_to_string(example()).unwrap();
    let mut shown: Vec<Key> = Vec::new();
    each_line(&text, |section, line| shown.extend(setting(line).map(|key| (section.to_owned(), key.to_owned()))));
    let distinct: BTreeSet<&Key> = shown.iter().collect();
    assert_eq!(distinct.len(), shown.len(), "a key is shown twice: {shown:?}");
    assert_eq!(distinct, known().keys().collect(), "left: what is shown, right: what there is");
}

#[test]
fn the_example_sets_what_has_a_default_and_comments_out_what_has_none() {
    let known = known();
    each_line(&fs::read_to_string(example()).unwrap(), |section, line| {
        if let Some(key) = setting(line) {
            let has_default = known[&(section.to_owned(), key.to_owned())];
            assert_eq!(!line.starts_with('#'), has_default, "{section}.{key}");
        }
    });
}

#[test]
fn the_values_of_the_example_are_the_defaults() {
    let nothing = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(check(&example()), check(nothing.path()));
}

#[test]
fn what_the_example_comments_out_can_be_used() {
    let text = fs::read_to_string(example()).unwrap();
    let lines = text.lines().map(|line| if setting(line).is_some() { line.trim_start_matches("# ") } else { line });
    let used = tempfile::NamedTempFile::new().unwrap();
    fs::write(used.path(), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let printed = check(used.path());
    assert!(!printed.contains("not set"), "{printed}");
}

#[test]
fn every_key_of_the_example_has_its_comment_above() {
    let mut above = "";
    each_line(&fs::read_to_string(example()).unwrap(), |section, line| {
        if let Some(key) = setting(line) {
            assert!(above.starts_with("# "), "{section}.{key}");
        }
        above = line;
    });
}
