//! The configuration file: what it says takes effect, the command line wins over it, and `check` prints what is in force.
//! What is refused is in `config_refused.rs`.

use std::fs;
use std::process::{Command, Output};
use std::time::Duration;

use ::supervise::cli::{self, Asked};
use ::supervise::config::Settings;
use ::supervise::report::mask;
use libc::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::support::{Act, Supervise, node};

/// `supervise check` of a text, with these options.
fn check(text: &str, options: &[&str]) -> Output {
    let here = tempfile::tempdir().unwrap();
    let file = here.path().join("supervisor.toml");
    fs::write(&file, text).unwrap();
    let mut run = Command::new(env!("CARGO_BIN_EXE_supervise"));
    run.arg("check").arg("-c").arg(&file).args(options).output().unwrap()
}

fn printed(text: &str, options: &[&str]) -> String {
    let output = check(text, options);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
    String::from_utf8(output.stdout).unwrap()
}

/// Every key, each with another value than its default.
const ALL: &str = r#"name = "web-1"

[service]
command = ["/bin/service", "a b", "it's \"quoted\"", ""]
working-directory = "/srv"
environment = { LANG = "C", "odd name" = "a\nb" }
success-exit-status = [3, 143, "SIGHUP"]
timeout = "1h 30m"

[stop]
signal = "SIGRTMIN+3"
target = "group"
timeout = "500ms"
leftover-timeout = "1s"
kill-timeout = "2s"

[signals]
map = { SIGUSR1 = "SIGHUP", SIGRTMIN = "SIGRTMIN+2" }

[containment]
mode = "lineage"
allow-keep = true

[report]
file = "/run/report.json"

[log]
format = "json"
level = "debug"
"#;

#[test]
fn check_prints_what_is_in_force_as_the_file_that_would_say_it() {
    let once = printed(ALL, &[]);
    assert_eq!(printed(&once, &[]), once);
    assert!(!once.contains("not set"), "{once}");
    for line in
        ["target = \"group\"", "timeout = \"500ms\"", "mode = \"lineage\"", "allow-keep = true", "level = \"debug\""]
    {
        assert!(once.contains(&format!("{line}\n")), "{line} in\n{once}");
    }
    assert!(once.starts_with("name = \"web-1\"\n\n[service]\n"), "{once}");
    assert!(once.contains(r#"signal = "SIGRTMIN+3""#) && once.contains(r#"success-exit-status = [3, 143, "SIGHUP"]"#));
}

#[test]
fn check_of_nothing_prints_the_defaults() {
    let defaults = printed("", &[]);
    assert!(defaults.starts_with("# name: not set\n\n[service]\n"), "{defaults}");
    let wanted = [
        ("# command: not set", "service"),
        ("# timeout: not set", "service"),
        ("signal = \"SIGTERM\"", "stop"),
        ("target = \"main\"", "stop"),
        ("timeout = \"7s\"", "stop"),
        ("leftover-timeout = \"2s\"", "stop"),
        ("kill-timeout = \"5s\"", "stop"),
        ("mode = \"auto\"", "containment"),
        ("allow-keep = false", "containment"),
        ("# file: not set", "report"),
        ("level = \"info\"", "log"),
    ];
    for (line, section) in wanted {
        let (_, below) = defaults.split_once(&format!("[{section}]\n")).unwrap();
        let section = below.split("\n[").next().unwrap();
        assert!(section.lines().any(|known| known == line), "{line} in\n{defaults}");
    }
    let without_a_file = Command::new(env!("CARGO_BIN_EXE_supervise")).arg("check").output().unwrap();
    assert_eq!((without_a_file.status.code(), without_a_file.stdout), (Some(0), defaults.into_bytes()));
}

#[test]
fn check_starts_nothing() {
    let file = "[service]\ncommand = ['sh', '-c', ': > started']\n[report]\nfile = 'report'\n";
    let check = || Supervise::new().without_report().options(["check"]);
    let runs = [
        (check().config(file), "command = [\"sh\", \"-c\", \": > started\"]"),
        (check().config(file).command(["true"]), "command = [\"true\"]"),
        (check().command(["sh", "-c", ": > started"]), "command = [\"sh\", \"-c\", \": > started\"]"),
    ];
    for (run, in_force) in runs {
        let ended = run.run();
        assert_eq!(ended.code, Some(0), "{ended}");
        assert!(ended.stdout.lines().any(|line| line == in_force), "{ended}");
        assert!(!ended.dir.path().join("started").exists() && !ended.dir.path().join("report").exists());
    }
}

#[test]
fn check_says_when_nobody_can_be_told() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_supervise")).arg("check").stdout(full).status().unwrap();
    assert_eq!(status.code(), Some(125));
}

#[test]
fn the_command_line_wins_over_the_file() {
    let flags = [
        ("--stop-signal=INT", "signal = \"SIGINT\""),
        ("--stop-timeout=3s", "timeout = \"3s\""),
        ("--leftover-timeout=4s", "leftover-timeout = \"4s\""),
        ("--timeout=5s", "timeout = \"5s\""),
        ("--containment=auto", "mode = \"auto\""),
        ("--name=web", "name = \"web\""),
        ("--success-exit-status=9,KILL", "success-exit-status = [9, \"SIGKILL\"]"),
        ("--report=/elsewhere", "file = \"/elsewhere\""),
        ("--log-format=text", "format = \"text\""),
        ("-vv", "level = \"trace\""),
        ("-q", "level = \"error\""),
    ];
    let file = printed(ALL, &[]);
    for (flag, line) in flags {
        assert!(!file.lines().any(|known| known == line), "{flag} would change nothing");
        let both = printed(ALL, &[flag]);
        assert!(both.lines().any(|known| known == line), "{flag}\n{both}");
        let changed = both.lines().zip(file.lines()).filter(|(both, file)| both != file).count();
        assert_eq!((changed, both.lines().count()), (1, file.lines().count()), "{flag}\n{both}");
    }
    let mapped = printed(ALL, &["--map-signal", "USR1=USR2", "--map-signal", "HUP=INT"]);
    for pair in ["SIGUSR1 = \"SIGUSR2\"", "SIGHUP = \"SIGINT\"", "SIGRTMIN = \"SIGRTMIN+2\""] {
        assert!(mapped.contains(pair), "{mapped}");
    }
}

#[test]
fn a_command_behind_the_options_takes_the_place_of_the_files() {
    let file = "[service]\ncommand = ['sh', '-c', ': > of-the-file']\nsuccess-exit-status = [3]\n";
    let ended = Supervise::new().config(file).command(["sh", "-c", "echo of the line; exit 3"]).run();
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "of the line\n"), "{ended}");
    assert!(!ended.dir.path().join("of-the-file").exists());
    let ended = Supervise::new().config(file).run();
    assert_eq!(ended.code, Some(0), "{ended}");
    assert!(ended.dir.path().join("of-the-file").exists());
}

#[test]
fn environment_and_working_directory_reach_the_service() {
    let file = "[service]\ncommand = {command}\nworking-directory = '{dir}/below'\n\
                environment = { NEW = 'a=b\"c', HOME = '/changed', EMPTY = '' }\n";
    let run = Supervise::new().config(file).env("KEPT", "as it was").look();
    fs::create_dir(run.dir().join("below")).unwrap();
    let ended = run.run();
    let look = ended.look();
    assert_eq!(look["cwd"], ended.dir.path().join("below").to_str().unwrap(), "{ended}");
    for (name, value) in [("NEW", "a=b\"c"), ("HOME", "/changed"), ("EMPTY", ""), ("KEPT", "as it was")] {
        assert_eq!(look["env"][name], value, "{name}\n{ended}");
    }
}

#[test]
fn a_working_directory_that_cannot_be_entered_is_said() {
    let ended = Supervise::new().config("[service]\nworking-directory = '/does/not/exist'\n").command(["true"]).run();
    assert_eq!(ended.code, Some(125), "{ended}");
    assert!(ended.stderr.contains("working directory \"/does/not/exist\": No such file"), "{ended}");
}

#[test]
fn the_file_says_how_long_all_may_take() {
    let ended = Supervise::new().config("[service]\ntimeout = '100ms'\n").command(["sleep", "1000"]).run();
    assert_eq!(ended.code, Some(124), "{ended}");
    assert!(ended.stderr.contains("longer than 100ms"), "{ended}");
}

#[test]
fn the_file_says_how_the_service_is_stopped() {
    let main = node("main").on(SIGINT, Act::Exit(7)).reports([SIGTERM]);
    let mut run = Supervise::new().config("[stop]\nsignal = 'INT'\n").tree(main).start();
    run.wait_up();
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!((ended.code, ended.got("main", SIGTERM)), (Some(7), 0), "{ended}");
}

#[test]
fn the_file_says_who_is_told_to_stop() {
    for (target, group, beyond) in [("main", 0, 0), ("group", 1, 0), ("tree", 1, 1)] {
        let main = node("main")
            .with(node("same").reports([SIGTERM]).exit_on_go(0))
            .with(node("beyond").setsid().reports([SIGTERM]).exit_on_go(0))
            .on(SIGTERM, Act::DrainThenExit(0));
        let mut run =
            Supervise::new().config(&format!("[stop]\ntarget = '{target}'\ntimeout = '1m'\n")).tree(main).start();
        run.wait_up();
        run.signal(SIGTERM);
        run.wait_got("main", SIGTERM, 1);
        let told = [("same", group), ("beyond", beyond)];
        told.iter().for_each(|(name, times)| run.wait_got(name, SIGTERM, *times));
        told.iter().for_each(|(name, _)| run.let_go(name));
        let ended = run.finish();
        assert_eq!(ended.code, Some(0), "{ended}");
        told.iter().for_each(|(name, times)| assert_eq!(ended.got(name, SIGTERM), *times, "{target} {name}\n{ended}"));
    }
}

#[test]
fn the_file_says_how_long_the_ladders_rungs_are() {
    let deaf = || node("deaf").setsid().ignores([SIGTERM]);
    let file = "[stop]\ntimeout = '100ms'\nleftover-timeout = '100ms'\n";
    let mut run = Supervise::new().config(file).tree(node("main").ignores([SIGTERM]).with(deaf())).start();
    run.wait_up();
    run.signal(SIGTERM);
    let ended = run.finish();
    assert_eq!(ended.code, Some(137), "{ended}");
    // Seven seconds and two are the defaults.
    assert!(ended.after_signal >= Duration::from_millis(200) && ended.after_signal < Duration::from_secs(7), "{ended}");
    assert_eq!(ended.report["leftovers"][0]["ended"], "SIGKILL", "{ended}");
}

#[test]
fn the_file_says_what_signals_are_passed_on_as() {
    let main = node("main").reports([SIGHUP]).reports([SIGUSR1]).on(SIGTERM, Act::Exit(0));
    let mut run = Supervise::new().config("[signals]\nmap = { USR1 = 'HUP' }\n").tree(main).start();
    run.wait_up();
    run.signal(SIGUSR1);
    run.wait_got("main", SIGHUP, 1);
    run.signal(SIGTERM);
    assert_eq!(run.finish().got("main", SIGUSR1), 0);
}

#[test]
fn the_file_says_what_counts_as_success() {
    let file = "[service]\nsuccess-exit-status = [3, 143, 'HUP']\n";
    for (script, code) in [("exit 3", 0), ("exit 143", 0), ("kill -TERM $$", 0), ("kill -HUP $$", 0), ("exit 4", 4)] {
        let ended = Supervise::new().config(file).command(["sh", "-c", script]).run();
        assert_eq!(ended.code, Some(code), "{script}\n{ended}");
    }
}

fn a_duration() -> impl Strategy<Value = String> {
    let unit = select(vec!["ns", "us", "ms", "s", "m", "h", "days"]);
    vec((0_u32..100_000, unit), 1..3).prop_map(|parts| {
        parts.into_iter().map(|(number, unit)| format!("{number}{unit}")).collect::<Vec<_>>().join(" ")
    })
}

fn a_signal(numbers: std::ops::RangeInclusive<i32>) -> impl Strategy<Value = String> {
    let named = select(vec!["TERM", "SIGINT", "hup", "SIGRTMIN+3", "RTMAX-1", "USR2", "WINCH"]);
    prop_oneof![numbers.prop_map(|number| number.to_string()), named.prop_map(str::to_owned)]
}

/// Anything without a NUL, and without what would be masked.
fn a_word() -> impl Strategy<Value = String> {
    "\\PC{0,12}|[ -~]{0,12}|[\n\t\r\u{1}\"'\\\\]{0,4}".prop_filter("NUL", |word| !word.contains('\0'))
}

fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// `key = value`, or nothing.
fn a_line(key: &'static str, value: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    option::of(value).prop_map(move |value| value.map_or_else(String::new, |value| format!("{key} = {value}\n")))
}

fn a_quoted(value: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    value.prop_map(|value| quoted(&value))
}

fn a_service() -> impl Strategy<Value = String> {
    let command = vec(a_word(), 1..4)
        .prop_filter("a program, and no secret", |words| !words[0].is_empty() && mask::arguments(words) == *words);
    let command =
        command.prop_map(|words| format!("[{}]", words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(", ")));
    let name = "[A-Za-z_ é.]{1,6}".prop_filter("no secret", |name| mask::variable(name, "value") == "value");
    let table = |pairs: std::collections::BTreeMap<String, String>| {
        let pairs = pairs.iter().map(|(name, value)| format!("{} = {}", quoted(name), quoted(value)));
        format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
    };
    let status =
        prop_oneof![any::<u8>().prop_map(|code| code.to_string()), Just("'HUP'".to_owned()), Just("'143'".to_owned())];
    (
        a_line("command", command),
        a_line("working-directory", a_quoted(a_word().prop_filter("a path", |path| !path.is_empty()))),
        a_line("environment", btree_map(name, a_word(), 0..3).prop_map(table)),
        a_line("success-exit-status", vec(status, 0..4).prop_map(|list| format!("[{}]", list.join(", ")))),
        a_line("timeout", a_quoted(a_duration())),
    )
        .prop_map(|(a, b, c, d, e)| format!("[service]\n{a}{b}{c}{d}{e}"))
}

fn a_file() -> impl Strategy<Value = String> {
    let stop = (
        a_line("signal", a_quoted(a_signal(1..=64))),
        a_line("target", a_quoted(select(vec!["main", "group", "tree"]).prop_map(str::to_owned))),
        a_line("timeout", a_quoted(a_duration())),
        a_line("leftover-timeout", a_quoted(a_duration())),
        a_line("kill-timeout", a_quoted(a_duration().prop_map(|time| format!("{time} 1s")))),
    );
    // What may be mapped, by number and by name.
    let map = btree_map(a_signal(1..=3), a_signal(1..=64), 0..3).prop_filter("each signal once", |map| {
        let signals: std::collections::BTreeSet<supervise::signal::Signal> =
            map.keys().map(|name| name.parse().unwrap()).collect();
        signals.len() == map.len()
    });
    let map = map.prop_map(|map| {
        let pairs = map.iter().map(|(from, to)| format!("{} = {}", quoted(from), quoted(to)));
        format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
    });
    let words = |words: &'static [&'static str]| a_quoted(select(words).prop_map(str::to_owned));
    let others = (
        a_line("map", map),
        a_line("mode", words(&["auto", "lineage", "cgroup", "pidns"])),
        a_line("name", words(&["web", "getty@tty1", "0.a_b:c"])),
        a_line("file", a_quoted(a_word().prop_filter("a path", |path| !path.is_empty()))),
        a_line("format", words(&["auto", "text", "json"])),
        a_line("level", words(&["error", "warn", "info", "debug", "trace"])),
    );
    (a_service(), stop, others).prop_map(|(service, (a, b, c, d, e), (map, mode, name, file, format, level))| {
        format!(
            "{name}{service}[stop]\n{a}{b}{c}{d}{e}[signals]\n{map}[containment]\n{mode}[report]\n{file}[log]\n{format}{level}"
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn what_is_printed_says_the_same_when_it_is_read(text in a_file()) {
        let meant = Settings::from_text(&text).map_err(|e| TestCaseError::fail(format!("{e:?}\n{text}")))?.in_force();
        let printed = meant.to_string();
        let read = Settings::from_text(&printed).map_err(|e| TestCaseError::fail(format!("{e:?}\n{printed}")))?;
        prop_assert_eq!(read.in_force(), meant, "{}", printed);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,60}|[ -~\n\u{0}]{0,60}") {
        let _ = Settings::from_text(&text);
    }

    #[test]
    fn no_torn_file_makes_the_reader_panic(text in a_file(), cut in any::<proptest::sample::Index>(), put in "[\\[\\]{}=\"'.,#\n0-9a-z]{0,6}") {
        let at = cut.index(text.len() + 1);
        let at = (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let _ = Settings::from_text(&text[..at]);
        let _ = Settings::from_text(&format!("{}{put}{}", &text[..at], &text[at..]));
    }

    #[test]
    fn no_arguments_start_what_does_not_stand_behind_two_dashes(words in vec(an_argument(), 0..8)) {
        let arguments: Vec<String> = std::iter::once("supervise".to_owned()).chain(words).collect();
        let read = cli::read(&arguments.iter().map(Into::into).collect::<Vec<_>>());
        let at = arguments.iter().position(|word| word == "--");
        if let Ok(Asked::Run(request)) = read
            && let Ok(settings) = request.settings_to_run()
        {
            let command: Vec<String> = at.map(|at| arguments[at + 1..].to_vec()).unwrap_or_default();
            prop_assert!(!command.is_empty() && !command[0].is_empty(), "{:?} of {:?}", settings.command, arguments);
            prop_assert_eq!(settings.command, command.iter().map(std::ffi::OsString::from).collect::<Vec<_>>());
            // As the name of a file or of a run it is no command.
            let before = arguments[..at.unwrap_or(0)].windows(2);
            prop_assert!(!before.into_iter().any(|two| two[1] == "check" && !["--report", "--name"].contains(&&*two[0])));
        }
    }
}

fn an_argument() -> impl Strategy<Value = String> {
    let known = vec![
        "--",
        "--",
        "check",
        "-c",
        "--config",
        "/does/not/exist",
        "/dev/null",
        "--stop-signal",
        "TERM",
        "--stop-timeout",
        "--stop-timeout=1s",
        "1s",
        "--timeout",
        "--containment",
        "auto",
        "lineage",
        "--map-signal",
        "USR1=HUP",
        "--success-exit-status",
        "1,2",
        "--report",
        "--name",
        "--guard=off",
        "--log-format=json",
        "-v",
        "-q",
        "-vv",
        "--help",
        "--version",
        "true",
        "sh",
        "-c",
        "",
        "-",
        "--no-such",
        "=",
        "--stop-signal=",
    ];
    prop_oneof![4 => select(known).prop_map(str::to_owned), 1 => "\\PC{0,8}"]
}
