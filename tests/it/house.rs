//! Claims about the house: what must not be in it, and how large its rooms may be. They read the sources as text.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Rooms with these names get everything that has no other place.
const MEANINGLESS: [&str; 11] =
    ["util", "utils", "common", "helper", "helpers", "type", "types", "core", "misc", "stuff", "prelude"];

/// Words that the house has others for: service, tree, invocation, member.
const NOT_OUR_WORDS: [&str; 11] =
    ["job", "jobs", "task", "tasks", "worker", "workers", "unit", "units", "instance", "instances", "daemon"];

#[test]
fn the_core_is_pure() {
    let io = ["nix", "libc", "mio", "tracing", "unsafe", "Instant", "SystemTime", "println", "eprintln", "panic"];
    let of_std = ["fs", "process", "env", "io", "net", "os", "thread", "sync", "cell"];
    for file in core() {
        let code = file.code();
        for word in words(&code) {
            assert!(!io.contains(&word), "{file}: {word}");
        }
        for room in of_std {
            assert!(!code.contains(&format!("std::{room}")), "{file}: std::{room}");
        }
        assert!(!code.contains("Result<"), "{file}: a decision cannot fail");
        for room in code.split("crate::").skip(1).filter_map(|rest| words(rest).next()) {
            assert!(["signal", "supervisor"].contains(&room), "{file} knows crate::{room}");
        }
    }
}

#[test]
fn every_pair_of_state_and_event_is_written_down() {
    let service = core().into_iter().find(|file| file.path.ends_with("service.rs")).unwrap();
    let decisions: Vec<&str> = service.text.lines().map(str::trim).filter(|line| line.contains("=>")).collect();
    assert!(!decisions.is_empty());
    for line in decisions {
        assert!(!line.starts_with("_ =>") && !line.starts_with("(_,") && !line.contains(", _) =>"), "{line}");
    }
}

#[test]
fn no_file_is_over_500_lines() {
    for file in everything() {
        assert!(file.text.lines().count() <= 500, "{file}");
    }
}

#[test]
fn no_function_is_over_70_lines() {
    for file in everything() {
        for (name, lines) in functions(&file.text) {
            assert!(lines <= 70, "{file}: {name} has {lines} lines");
        }
    }
}

#[test]
fn no_module_has_a_name_that_means_nothing() {
    for file in everything() {
        let below = file.path.strip_prefix(root()).unwrap().with_extension("");
        let names = below.iter().filter_map(|name| name.to_str()).map(str::to_owned);
        let inline = file.code();
        let inline = inline.split("mod ").skip(1).filter_map(|rest| words(rest).next()).map(str::to_owned);
        for name in names.chain(inline) {
            assert!(!MEANINGLESS.contains(&name.as_str()), "{file}: {name}");
        }
    }
}

#[test]
fn every_dependency_has_its_reason_beside_it() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let mut section = "";
    let mut before = "";
    let mut seen = 0;
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section.ends_with("dependencies]") && line.contains(" = ") {
            seen += 1;
            assert!(before.starts_with("# ") && before.len() > 10, "no reason above: {line}");
        }
        before = line;
    }
    assert!(seen > 5, "the manifest is not read as it is written");
}

#[test]
fn only_reap_reads_a_wait_status() {
    let reading = ["si_status", "CLD_EXITED", "CLD_KILLED", "WaitStatus", "WIFEXITED", "WEXITSTATUS", "WIFSIGNALED"];
    for file in product().iter().filter(|file| !file.path.ends_with("process/reap.rs")) {
        for line in file.code().lines() {
            let mut names = words(line);
            assert!(!names.any(|word| reading.contains(&word)), "{file}: {line}");
            // To wait for a reader of our own is no reading.
            assert!(!line.contains("waitpid(") || line.contains("null_mut()"), "{file}: {line}");
        }
    }
}

#[test]
fn only_the_command_line_knows_128_plus_n() {
    for file in product().iter().filter(|file| !file.path.ends_with("src/cli.rs")) {
        let code = file.code();
        assert!(!code.contains("128 +") && !code.contains("+ 128"), "{file}");
    }
}

#[test]
fn there_are_no_threads_no_async_and_no_traits_of_our_own() {
    for file in product() {
        let code = file.code();
        for word in words(&code) {
            assert!(!["async", "await", "trait", "Mutex", "Arc"].contains(&word), "{file}: {word}");
        }
        assert!(!code.contains("thread::"), "{file}");
    }
}

#[test]
fn the_words_of_the_house_are_kept() {
    for file in product() {
        let code = file.code();
        for name in words(&code) {
            // What a shell and the kernel call by this name.
            let name = name.replace("job_control", "");
            for word in parts(&name) {
                assert!(!NOT_OUR_WORDS.contains(&word.as_str()), "{file}: {word} in {name}");
            }
        }
    }
}

#[test]
fn every_file_says_what_it_is_for() {
    for file in everything() {
        assert!(file.text.starts_with("//! "), "{file}");
    }
}

#[test]
fn the_front_page_has_every_room() {
    let front = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let map: String = front.lines().filter(|line| line.starts_with("//! | ")).collect();
    let rooms = front.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    let rooms: Vec<&str> = rooms.collect();
    assert!(!rooms.is_empty());
    for room in rooms {
        assert!(map.contains(&format!("[`{room}`]")), "{room}");
    }
}

#[test]
fn no_file_knows_where_on_this_machine_it_is() {
    let here = root().to_str().unwrap();
    for file in everything() {
        assert!(!file.text.contains(here), "{file}");
    }
}

/// A source, and its place.
struct Source {
    path: PathBuf,
    text: String,
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.path.strip_prefix(root()).unwrap_or(&self.path).display())
    }
}

impl Source {
    fn read(path: PathBuf) -> Source {
        let text = fs::read_to_string(&path).unwrap();
        Source { path, text }
    }

    /// Without comments and the insides of strings.
    fn code(&self) -> String {
        self.text.lines().map(code_of_line).collect::<Vec<_>>().join("\n")
    }
}

/// The code on a line. A string that goes over several lines is taken for code, which makes a claim stricter only.
fn code_of_line(line: &str) -> String {
    let mut code = String::new();
    let mut in_string = false;
    let mut rest = line.chars().peekable();
    while let Some(c) = rest.next() {
        match (c, in_string) {
            ('\\', true) => _ = rest.next(),
            ('"', _) => in_string = !in_string,
            ('\'', false) if rest.peek() == Some(&'"') => _ = rest.next(),
            ('/', false) if rest.peek() == Some(&'/') => break,
            (_, true) => {}
            (c, false) => code.push(c),
        }
    }
    code
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn everything() -> Vec<Source> {
    let all = ["src", "tests", "benches"].map(|folder| sources(&root().join(folder)));
    all.into_iter().flatten().collect()
}

fn product() -> Vec<Source> {
    let all = sources(&root().join("src"));
    assert!(all.len() > 20, "the product is not where it was");
    all.into_iter().filter(|file| !tests_of_the_core().contains(&top_of_the_core(&file.path))).collect()
}

/// The decisions, without their tests.
fn core() -> Vec<Source> {
    let files: Vec<Source> = product().into_iter().filter(|file| file.path.starts_with(core_folder())).collect();
    assert!(files.len() >= 3, "the core is not where it was");
    files
}

fn core_folder() -> PathBuf {
    root().join("src/supervisor")
}

/// The modules that `supervisor/mod.rs` has for tests only.
fn tests_of_the_core() -> BTreeSet<String> {
    let text = fs::read_to_string(core_folder().join("mod.rs")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let modules = lines.windows(2).filter(|pair| pair[0] == "#[cfg(test)]").map(|pair| pair[1]);
    modules.filter_map(|line| Some(line.strip_prefix("mod ")?.strip_suffix(';')?.to_owned())).collect()
}

/// The module right below `supervisor` that a file is in; nothing for any other file.
fn top_of_the_core(path: &Path) -> String {
    let below = path.strip_prefix(core_folder()).unwrap_or(Path::new(""));
    below.with_extension("").iter().next().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn sources(folder: &Path) -> Vec<Source> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(Source::read(path));
        }
    }
    found
}

/// Everything that could be a name or a number.
fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// The words that a name is made of: `told_groups`, `ToldGroups`, `TOLD_GROUPS`.
fn parts(name: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut previous = '_';
    for c in name.chars() {
        if c == '_' || c.is_uppercase() && previous.is_lowercase() {
            parts.push(String::new());
        }
        if let Some(part) = parts.last_mut().filter(|_| c != '_') {
            part.extend(c.to_lowercase());
        }
        previous = c;
    }
    parts
}

/// The functions of a formatted source, and how many lines each takes: it ends where a brace closes as far left as it
/// began.
fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = vec![];
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let begins = code
            .split("fn ")
            .next()
            .is_some_and(|before| before.len() < code.len() && before.split_whitespace().all(is_before_fn));
        if !begins || line.ends_with(['}', ';']) {
            continue;
        }
        let end = format!("{}}}", &line[..line.len() - code.len()]);
        let length = lines[at..].iter().position(|line| *line == end).map_or(1, |last| last + 1);
        found.push((words(code.split("fn ").nth(1).unwrap()).next().unwrap_or("").to_owned(), length));
    }
    found
}

fn is_before_fn(word: &str) -> bool {
    ["pub", "const", "unsafe", "extern", "async", "\"C\""].contains(&word) || word.starts_with("pub(")
}

#[test]
fn the_reader_of_sources_sees_functions_and_code() {
    let text = "fn a(\n    b: u8,\n) {\n    if b {\n    }\n}\n\n    pub(super) const fn c() -> u8 {\n        1\n    }\nfn d() {}\n";
    assert_eq!(functions(text), [("a".to_owned(), 6), ("c".to_owned(), 3)]);
    assert_eq!(code_of_line(r#"    let a = "nix \" // libc"; '"'; // mio"#).trim(), "let a = ; ';");
    assert_eq!(parts("toldGroups_of_ALL"), ["told", "groups", "of", "all"]);
    assert!(tests_of_the_core().contains("world") && !tests_of_the_core().contains("service"));
}
