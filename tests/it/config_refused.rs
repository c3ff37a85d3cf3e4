//! A configuration that is wrong is refused: file, line, key and remedy are said, for everything that is wrong with it,
//! and nothing is started.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ::supervise::config::Settings;

use crate::support::{Ended, Supervise, need_root};

/// Runs a command that leaves a file, with this configuration; `check` of the same must say the same.
fn run(config: &[u8]) -> Ended {
    let check = Supervise::new().without_report().options(["check", "-c", "supervisor.toml"]);
    fs::write(check.dir().join("supervisor.toml"), config).unwrap();
    let checked = check.run();
    let run = Supervise::new().without_report().options(["-c", "supervisor.toml"]);
    fs::write(run.dir().join("supervisor.toml"), config).unwrap();
    let ended = run.command(["sh", "-c", ": > started"]).run();
    let ok = |ended: &Ended| ended.code == Some(0);
    assert_eq!((ok(&checked), &checked.stderr), (ok(&ended), &ended.stderr), "{checked}\n{ended}");
    ended
}

fn started(ended: &Ended) -> bool {
    ended.dir.path().join("started").exists()
}

/// The refusals without the log's prefix.
fn refusals(config: &[u8]) -> Vec<String> {
    let ended = run(config);
    assert_eq!((ended.code, started(&ended)), (Some(2), false), "{ended}");
    let text = ended.stderr.strip_prefix("supervise: error: ").unwrap_or_else(|| panic!("{ended}"));
    text.lines().map(str::to_owned).collect()
}

/// One refusal, in this line, that names the key and has all of this in it.
fn assert_refused(config: &str, line: usize, key: &str, parts: &[&str]) {
    let all = refusals(config.as_bytes());
    assert_eq!(all.len(), 1, "{config}\n{all:?}");
    let begin = if key.is_empty() { String::new() } else { format!("{key}: ") };
    let begin = format!("supervisor.toml: line {line}: {begin}");
    assert!(all[0].starts_with(&begin), "{begin} in\n{}", all[0]);
    for part in parts {
        assert!(all[0].contains(part), "{part} in\n{}", all[0]);
    }
}

#[test]
fn what_is_right_is_not_refused() {
    let ended = run(b"# nothing\n[service]\nsuccess-exit-status = [3]\n");
    assert_eq!((ended.code, started(&ended), ended.stderr.as_str()), (Some(0), true, ""), "{ended}");
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    let cases = [
        ("[stop]\ntimout = '1s'\n", 2, "stop.timout", "did you mean `timeout`?"),
        ("\n[stop]\n\nleftover_timeout = '1s'\n", 4, "stop.leftover_timeout", "did you mean `leftover-timeout`?"),
        ("[service]\ncomand = ['true']\n", 2, "service.comand", "did you mean `command`?"),
        ("[service]\nworkingdirectory = '/'\n", 2, "service.workingdirectory", "did you mean `working-directory`?"),
        ("[log]\nlevle = 'info'\n", 2, "log.levle", "did you mean `level`?"),
        ("[log]\nzzz = 1\n", 2, "log.zzz", "known here: format, level"),
        ("[stopp]\ntimeout = '1s'\n", 1, "stopp", "did you mean `stop`?"),
        ("[xyzzy]\n", 1, "xyzzy", "known here: name, service, stop, signals, containment, report, log"),
        ("service.command = ['true']\nlogs.level = 'info'\n", 2, "logs", "did you mean `log`?"),
        ("timeout = '1s'\n", 1, "timeout", "unknown key"),
    ];
    for (config, line, key, remedy) in cases {
        assert_refused(config, line, key, &["unknown key", remedy]);
    }
}

#[test]
fn a_value_that_cannot_be_is_refused_with_what_can() {
    let cases = [
        ("[stop]\ntimeout = '7 parsecs'\n", 2, "stop.timeout", "such as \"7s\", \"500ms\" or \"1h 30m\""),
        ("[stop]\ntimeout = '7'\n", 2, "stop.timeout", "a number with a unit"),
        ("[stop]\ntimeout = '-7s'\n", 2, "stop.timeout", "\"-7s\" is not a duration"),
        ("[stop]\ntimeout = ''\n", 2, "stop.timeout", "\"\" is not a duration"),
        ("[stop]\ntimeout = 7\n", 2, "stop.timeout", "in quotes, such as \"7s\" or \"500ms\", not an integer"),
        ("[stop]\nkill-timeout = '0'\n", 2, "stop.kill-timeout", "must be more than nothing"),
        ("[service]\ntimeout = '99999999999999999999y'\n", 2, "service.timeout", "is not a duration"),
        ("[stop]\nsignal = 'TERMINATE'\n", 2, "stop.signal", "a name such as \"TERM\" or \"SIGTERM\""),
        ("[stop]\nsignal = 65\n", 2, "stop.signal", "a number from 1 to 64"),
        ("[stop]\nsignal = 0\n", 2, "stop.signal", "\"0\" is not a signal"),
        ("[stop]\nsignal = 'SIGRTMIN+31'\n", 2, "stop.signal", "\"SIGRTMIN+31\" is not a signal"),
        ("[stop]\ntarget = 'everybody'\n", 2, "stop.target", "write one of \"main\", \"group\", \"tree\""),
        (
            "[containment]\nmode = 'docker'\n",
            2,
            "containment.mode",
            "write one of \"auto\", \"lineage\", \"cgroup\", \"pidns\"",
        ),
        ("[containment]\nallow-keep = 'yes'\n", 2, "containment.allow-keep", "must be true or false"),
        ("name = '../x'\n", 1, "name", "is not a name"),
        ("[log]\nformat = 'xml'\n", 2, "log.format", "write one of \"auto\", \"text\", \"json\""),
        ("[log]\nlevel = 'loud'\n", 2, "log.level", "write one of \"error\", \"warn\""),
        ("[report]\nfile = ''\n", 2, "report.file", "write a path or leave the key out"),
        ("[service]\nworking-directory = ''\n", 2, "service.working-directory", "write a path"),
        ("[service]\ncommand = []\n", 2, "service.command", "[\"program\", \"argument\"]"),
        ("[service]\ncommand = ['']\n", 2, "service.command", "names no program"),
        ("[service]\ncommand = 'sleep 1'\n", 2, "service.command", "must be an array of strings, not a string"),
        ("[service]\ncommand = ['sleep', 1]\n", 2, "service.command", "must be a string in quotes, not an integer"),
        ("[service]\nenvironment = { A = 1 }\n", 2, "service.environment", "A must be a string in quotes"),
        ("[service.environment]\n'A=B' = 'x'\n", 1, "service.environment", "cannot be the name of a variable"),
        ("[service]\nenvironment = { '' = 'x' }\n", 2, "service.environment", "cannot be the name of a variable"),
        ("[service]\nenvironment = ['A=B']\n", 2, "service.environment", "{ NAME = \"value\" }"),
        ("[service]\nsuccess-exit-status = [256]\n", 2, "service.success-exit-status", "a number from 0 to 255"),
        ("[service]\nsuccess-exit-status = [-1]\n", 2, "service.success-exit-status", "a number from 0 to 255"),
        ("[service]\nsuccess-exit-status = ['NO']\n", 2, "service.success-exit-status", "the name of a signal"),
        ("[service]\nsuccess-exit-status = [1.5]\n", 2, "service.success-exit-status", "holds a float"),
        ("[service]\nsuccess-exit-status = 3\n", 2, "service.success-exit-status", "an array such as [143, \"TERM\"]"),
        ("[signals]\nmap = { KILL = 'TERM' }\n", 2, "signals.map", "SIGKILL never comes in"),
        ("[signals]\nmap = { CHLD = 'TERM' }\n", 2, "signals.map", "map another signal"),
        ("[signals]\nmap = { NO = 'TERM' }\n", 2, "signals.map", "\"NO\" is not a signal"),
        ("[signals]\nmap = { USR1 = 'NO' }\n", 2, "signals.map", "\"NO\" is not a signal"),
        ("[signals]\nmap = 'USR1=HUP'\n", 2, "signals.map", "{ USR1 = \"HUP\" }"),
        ("stop = 'TERM'\n", 1, "stop", "write [stop] and its keys below, not a string"),
        ("[[service]]\ncommand = ['true']\n", 1, "service", "write [service] and its keys below, not an array"),
    ];
    for (config, line, key, remedy) in cases {
        assert_refused(config, line, key, &[remedy]);
    }
}

#[test]
fn a_nul_is_refused_wherever_it_is() {
    let cases = [
        ("[service]\ncommand = [\"true\", \"a\\u0000b\"]\n", "service.command"),
        ("[service]\nworking-directory = \"/\\u0000\"\n", "service.working-directory"),
        ("[service]\nenvironment = { A = \"\\u0000\" }\n", "service.environment"),
        ("[service]\nenvironment = { \"A\\u0000\" = \"x\" }\n", "service.environment"),
        ("[report]\nfile = \"a\\u0000\"\n", "report.file"),
    ];
    for (config, key) in cases {
        assert_refused(config, 2, key, &["NUL", "remove"]);
    }
    assert_refused("[service]\n# \0\n", 2, "", &["not TOML"]);
}

#[test]
fn what_is_no_toml_is_refused_with_its_line() {
    let cases = [
        ("[service]\ncommand = ['true'\n[stop]\n", "not TOML"),
        ("\n\n[service\n", "not TOML"),
        ("command\n", "not TOML"),
        ("[stop]\ntimeout = 7s\n", "not TOML"),
        ("[stop]\ntimeout = '1s'\ntimeout = '2s'\n", "duplicate key"),
        ("[stop]\n[log]\n[stop]\n", "duplicate key"),
    ];
    for ((config, part), line) in cases.into_iter().zip([3, 3, 1, 2, 3, 3]) {
        assert_refused(config, line, "", &["not TOML", part]);
    }
}

#[test]
fn what_is_no_utf8_is_refused_with_its_line() {
    let all = refusals(b"[service]\n\ncommand = ['caf\xe9']\n");
    assert_eq!(all.len(), 1, "{all:?}");
    assert!(all[0].starts_with("supervisor.toml: line 3: not UTF-8") && all[0].contains("save the file as UTF-8"));
}

#[test]
fn everything_that_is_wrong_is_told_at_once() {
    let config = "[service]\ncomand = ['true']\ntimeout = 5\n[stop]\nsignal = 'NO'\n[log]\nlevel = 'loud'\n[nowhere]\n";
    let all = refusals(config.as_bytes());
    let wanted = [(2, "service.comand"), (3, "service.timeout"), (5, "stop.signal"), (7, "log.level"), (8, "nowhere")];
    assert_eq!(all.len(), wanted.len(), "{all:?}");
    for (line, key) in wanted {
        let begin = format!("supervisor.toml: line {line}: {key}: ");
        assert_eq!(all.iter().filter(|one| one.starts_with(&begin)).count(), 1, "{begin} in {all:?}");
    }
}

/// What each kind of value looks like.
const KINDS: [(&str, &str); 7] = [
    ("a string", "'word'"),
    ("an integer", "-7"),
    ("a float", "1.5"),
    ("a boolean", "true"),
    ("a date", "2001-01-01"),
    ("an array", "[{}]"),
    ("a table", "{ '=' = [] }"),
];

/// Every key that there is, by section, from what the product prints.
fn known_keys() -> BTreeMap<String, Vec<String>> {
    let printed = Settings::default().in_force().to_string();
    // What stands above the first section is in none.
    let mut section = String::new();
    let mut keys = BTreeMap::from([(section.clone(), Vec::<String>::new())]);
    for line in printed.lines().filter(|line| !line.is_empty()) {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
            keys.entry(section.clone()).or_default();
        } else {
            let key = line.trim_start_matches("# ").split([' ', ':']).next().unwrap();
            keys.get_mut(&section).unwrap().push(key.to_owned());
        }
    }
    assert!(keys.values().map(Vec::len).sum::<usize>() >= 15, "{keys:?}");
    keys
}

/// What the reader says that it knows.
fn known_here(text: &str) -> Vec<String> {
    let refused = Settings::from_text(text).expect_err(text);
    let (_, known) = refused[0].text.split_once("known here: ").expect(text);
    known.split(", ").map(str::to_owned).collect()
}

#[test]
fn check_prints_every_key_that_the_reader_knows() {
    let printed = known_keys();
    let mut top = known_here("'~' = 1\n");
    top.sort();
    let mut told: Vec<String> = printed.keys().filter(|section| !section.is_empty()).cloned().collect();
    told.extend(printed[""].clone());
    told.sort();
    assert_eq!(told, top);
    for (section, keys) in printed.into_iter().filter(|(section, _)| !section.is_empty()) {
        assert_eq!(known_here(&format!("[{section}]\n'~' = 1\n")), keys, "{section}");
    }
}

#[test]
fn no_key_takes_a_value_of_a_wrong_kind() {
    for (section, keys) in known_keys() {
        for key in keys {
            for (kind, value) in KINDS {
                // Each of these is wrong in its own way even where the kind is right, except where any string will do.
                let any_string = ["working-directory", "file", "name"].contains(&key.as_str());
                if any_string && kind == "a string" || key == "allow-keep" && kind == "a boolean" {
                    continue;
                }
                let (head, begin) = if section.is_empty() {
                    (String::new(), format!("{key}: "))
                } else {
                    (format!("[{section}]"), format!("{section}.{key}: "))
                };
                let text = format!("\n{head}\n\n{key} = {value}\n");
                let refused = Settings::from_text(&text).expect_err(&text);
                assert_eq!((refused.len(), refused[0].line), (1, 4), "{text}{refused:?}");
                assert!(refused[0].text.starts_with(&begin), "{text}{refused:?}");
            }
        }
    }
    for (kind, value) in KINDS.iter().filter(|(kind, _)| *kind != "a table") {
        for section in known_keys().keys().filter(|section| !section.is_empty()) {
            let refused = Settings::from_text(&format!("{section} = {value}\n")).expect_err(section);
            assert!(
                refused[0].text.contains(&format!("write [{section}] and its keys below, not {kind}")),
                "{refused:?}"
            );
        }
    }
}

#[test]
fn an_empty_file_is_a_configuration_and_no_command() {
    let ended = run(b"");
    assert_eq!((ended.code, started(&ended)), (Some(0), true), "{ended}");
    let run = Supervise::new().without_report().config("");
    let ended = run.run();
    assert_eq!(ended.code, Some(2), "{ended}");
    for part in ["supervisor.toml: service.command is missing", "write it under [service]", "-- COMMAND"] {
        assert!(ended.stderr.contains(part), "{ended}");
    }
}

/// Runs with a file that is somewhere else, or nowhere.
fn assert_unreadable(run: Supervise, path: &Path, reason: &str) {
    let run = run.without_report().options(["-c", path.to_str().unwrap()]).command(["sh", "-c", ": > started"]);
    let ended = run.run();
    assert_eq!((ended.code, started(&ended)), (Some(2), false), "{ended}");
    let wanted = format!("supervise: error: cannot read the configuration {}: {reason}", path.display());
    assert!(ended.stderr.starts_with(&wanted), "{ended}");
}

#[test]
fn a_file_that_cannot_be_read_is_said() {
    let run = Supervise::new();
    let path = run.dir().join("none.toml");
    assert_unreadable(run, &path, "No such file or directory");
    let run = Supervise::new();
    let path = run.dir().to_owned();
    assert_unreadable(run, &path, "Is a directory");
    if need_root() {
        let secret = tempfile::NamedTempFile::new().unwrap();
        assert_unreadable(Supervise::new().user(4711, 4711), secret.path(), "Permission denied");
    }
}

#[test]
fn a_wrong_option_starts_nothing_and_says_what_can_be_written() {
    let cases: [(&[&str], &str); 8] = [
        (&["--stop-timeout", "7 parsecs"], "such as \"7s\""),
        (&["--stop-signal", "NO"], "a name such as \"TERM\""),
        (&["--map-signal", "USR1"], "write FROM=TO"),
        (&["--map-signal", "KILL=TERM"], "SIGKILL never comes in"),
        (&["--success-exit-status", "256"], "a number from 0 to 255"),
        (&["--containment", "docker"], "possible values: auto, lineage, cgroup, pidns"),
        (&["--stop-timout", "7s"], "--stop-timeout"),
        (&["--timeout"], "a value is required"),
    ];
    for (options, remedy) in cases {
        let run = Supervise::new().without_report().options(options.iter().copied());
        let ended = run.command(["sh", "-c", ": > started"]).run();
        assert_eq!((ended.code, started(&ended)), (Some(2), false), "{ended}");
        assert!(ended.stderr.starts_with("supervise: error: ") && ended.stderr.contains(remedy), "{ended}");
    }
}

#[test]
fn a_command_without_the_two_dashes_is_refused_with_the_right_form() {
    let run = Supervise::new().without_report().options(["--stop-timeout", "1s", "sh", "-c", ": > started"]);
    let ended = run.run();
    assert_eq!((ended.code, started(&ended)), (Some(2), false), "{ended}");
    assert!(ended.stderr.contains("write: supervise -- sh -c ': > started'"), "{ended}");
}

#[test]
fn a_file_without_an_end_is_refused() {
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_supervise")).args(["check", "-c", "/dev/zero"]).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("cannot read the configuration /dev/zero: File too large"), "{text}");
}

#[test]
fn a_refusal_is_one_line_whatever_the_key_holds() {
    let refusals = Settings::from_text("\"\\u001b[31m\\n\" = 1\n").unwrap_err();
    let text = refusals[0].to_string();
    assert!(refusals.len() == 1 && !text.chars().any(char::is_control), "{text}");
}

#[test]
fn a_signal_is_mapped_once() {
    let refusals = Settings::from_text("[signals]\nmap = {USR1 = 'HUP', 10 = 'INT'}\n").unwrap_err();
    assert!(refusals[0].to_string().contains("names SIGUSR1 twice"), "{refusals:?}");
}
