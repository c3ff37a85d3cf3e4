//! What is written becomes what runs: where a command is looked for, what is said when there is none, and which words are
//! the service's and which are ours.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::start::program;
use crate::support::{Ended, Supervise, need_root, node_program};

/// A file in the run's directory.
fn put(run: &Supervise, name: &str, mode: u32, text: &str) -> PathBuf {
    let path = run.dir().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path
}

const HELLO: &str = "#!/bin/sh\necho \"$0\" \"$@\"; exit 7\n";

/// Nothing was there to run, and all that is said of it is right.
fn assert_not_started(ended: &Ended, code: i32, texts: &[&str]) {
    assert_eq!(ended.code, Some(code), "{ended}");
    for text in texts {
        assert!(ended.stderr.contains(text), "{text:?} is not in {ended}");
    }
    // The errno's text, for people.
    assert!(!ended.stderr.contains("os error"), "{ended}");
    let why = ended.report["start_error"].as_str().unwrap_or_else(|| panic!("{ended}"));
    assert!(ended.stderr.contains(why), "{ended}");
    assert_eq!((&ended.report["result"], &ended.report["exit"]), (&json!("start-failed"), &Value::Null), "{ended}");
    assert_eq!(ended.report["exit_code"], json!(code), "{ended}");
    assert_eq!(ended.report["leftovers"], json!([]), "{ended}");
}

// Where it is looked for.

#[test]
fn a_script_without_an_interpreter_line_runs_as_execvp_runs_it() {
    let script = "echo \"$0\" \"$@\"; exit 7\n";
    let run = Supervise::new();
    put(&run, "script", 0o755, script);
    let ended = run.command(["./script", "a b", "c"]).run();
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(7), "./script a b c\n"), "{ended}");
    // Found through PATH, it is told where it was found.
    let run = Supervise::new();
    let path = put(&run, "bin/script", 0o755, script);
    let search = format!("/nowhere:{}:/bin", path.parent().unwrap().display());
    let ended = run.env("PATH", &search).command(["script", "a"]).run();
    assert_eq!((ended.code, ended.stdout), (Some(7), format!("{} a\n", path.display())));
    let run = Supervise::new();
    put(&run, "empty", 0o755, "");
    assert_eq!(run.command(["./empty"]).run().code, Some(0));
}

#[test]
fn the_first_that_can_be_executed_in_path_is_taken() {
    let run = Supervise::new();
    put(&run, "a/hello", 0o644, HELLO);
    fs::create_dir_all(run.dir().join("b/hello")).unwrap();
    put(&run, "c", 0o644, "no directory");
    let taken = put(&run, "d/hello", 0o755, HELLO);
    put(&run, "e/hello", 0o755, "#!/bin/sh\nexit 9\n");
    let dir = run.dir().display().to_string();
    let search = ["missing", "a", "b", "c", "d", "e"].map(|name| format!("{dir}/{name}")).join(":");
    let ended = run.env("PATH", &search).command(["hello", "x"]).run();
    assert_eq!((ended.code, ended.stdout), (Some(7), format!("{} x\n", taken.display())));
}

#[test]
fn an_empty_element_of_path_is_the_directory_we_stand_in() {
    for search in ["", ":/nowhere", "/nowhere:", "/nowhere::/nowhere", "."] {
        let run = Supervise::new();
        put(&run, "hello", 0o755, HELLO);
        let ended = run.env("PATH", search).command(["hello"]).run();
        assert_eq!(ended.code, Some(7), "PATH={search:?} {ended}");
    }
    let run = Supervise::new();
    put(&run, "hello", 0o755, HELLO);
    assert_eq!(run.env("PATH", "/nowhere").command(["hello"]).run().code, Some(127));
}

#[test]
fn without_path_the_system_directories_are_searched() {
    let unset = |command: [&str; 2]| {
        let ours = program();
        Supervise::program("env").options(["-u", "PATH", &ours, "--"]).options(command).run()
    };
    let ended = unset(["sh", "-c"]);
    // sh complains that -c lacks its argument: it was found.
    assert_eq!(ended.code, Some(2), "{ended}");
    let ended = unset(["no-such-command", ""]);
    assert_eq!(ended.code, Some(127), "{ended}");
    assert!(ended.stderr.contains("looked in /bin, /usr/bin"), "{ended}");
}

#[test]
fn a_relative_command_is_meant_from_the_working_directory_of_the_service() {
    for command in [r#"["./hello"]"#, r#"["below/../hello"]"#] {
        let config = format!("[service]\ncommand = {command}\nworking-directory = \"{{dir}}/there\"\n");
        let run = Supervise::new().config(&config);
        put(&run, "there/hello", 0o755, "#!/bin/sh\npwd; exit 7\n");
        put(&run, "hello", 0o755, "#!/bin/sh\nexit 9\n");
        fs::create_dir(run.dir().join("there/below")).unwrap();
        let there = run.dir().join("there");
        let ended = run.run();
        assert_eq!((ended.code, ended.stdout.trim()), (Some(7), there.to_str().unwrap()), "{command}");
    }
    // So is a relative element of PATH, and an error about what is there.
    let config = "[service]\ncommand = [\"hello\"]\nworking-directory = \"there\"\nenvironment = { PATH = \"bin\" }\n";
    let run = Supervise::new().config(config);
    put(&run, "there/bin/hello", 0o755, "#!/bin/sh\nexit 7\n");
    assert_eq!(run.run().code, Some(7));
    let run = Supervise::new().config(config);
    put(&run, "there/bin/hello", 0o755, "#!/no/such/interpreter\n");
    assert_not_started(&run.run(), 126, &["interpreter"]);
}

#[test]
fn the_configured_path_is_the_one_that_counts() {
    let config = "[service]\ncommand = [\"hello\"]\nenvironment = { PATH = \"{dir}/a\" }\n";
    let run = Supervise::new().config(config);
    put(&run, "a/hello", 0o755, "#!/bin/sh\nexit 7\n");
    put(&run, "b/hello", 0o755, "#!/bin/sh\nexit 9\n");
    let search = format!("{}/b", run.dir().display());
    let ended = run.env("PATH", &search).run();
    assert_eq!(ended.code, Some(7), "{ended}");
}

// When it cannot be executed.

#[test]
fn a_command_that_is_not_found_is_127_and_says_where_it_was_looked_for() {
    let run = Supervise::new().env("PATH", "/nowhere:/bin").command(["no-such-command", "x"]);
    assert_not_started(
        &run.run(),
        127,
        &["\"no-such-command\"", "not found (looked in /nowhere, /bin): No such file or directory"],
    );
    let run = Supervise::new().command(["/no/such/command"]);
    assert_not_started(&run.run(), 127, &["\"/no/such/command\"", "not found: No such file or directory"]);
    let run = Supervise::new().command(["/bin/sh/below-a-file"]);
    assert_not_started(&run.run(), 127, &["not found: Not a directory"]);
}

#[test]
fn a_whole_command_line_in_one_word_is_recognised() {
    let run = Supervise::new().command(["sleep 1"]);
    assert_not_started(&run.run(), 127, &["\"sleep 1\"", "write the program and each argument as a word of its own"]);
    let run = Supervise::new().command(["no such", "x"]);
    assert!(!run.run().stderr.contains("word of its own"));
}

#[test]
fn a_file_that_cannot_be_executed_is_126_and_says_why() {
    let run = Supervise::new();
    put(&run, "script", 0o644, HELLO);
    assert_not_started(&run.command(["./script"]).run(), 126, &["\"./script\": Permission denied"]);

    let run = Supervise::new();
    put(&run, "script", 0o755, "#!/no/such/interpreter\n");
    assert_not_started(&run.command(["./script"]).run(), 126, &["./script exists", "interpreter"]);

    let run = Supervise::new();
    let directory = run.dir().display().to_string();
    let run = run.command([directory.as_str()]);
    assert_not_started(&run.run(), 126, &["Permission denied", &format!("{directory} is a directory")]);

    let run = Supervise::new();
    symlink("loop", run.dir().join("loop")).unwrap();
    assert_not_started(&run.command(["./loop"]).run(), 126, &["\"./loop\": Too many levels of symbolic links"]);

    let words = json!([node_program(), "x".repeat(200_000)]);
    let run = Supervise::new().config(&format!("[service]\ncommand = {words}\n"));
    assert_not_started(&run.run(), 126, &["Argument list too long"]);
}

#[test]
fn a_denied_file_in_path_is_remembered_when_no_other_is_found() {
    let run = Supervise::new();
    let denied = put(&run, "a/hello", 0o644, HELLO);
    fs::create_dir(run.dir().join("b")).unwrap();
    let search = format!("{0}/a:{0}/b:/nowhere", run.dir().display());
    let run = run.env("PATH", &search).command(["hello"]);
    assert_not_started(&run.run(), 126, &[&format!("Permission denied ({})", denied.display())]);
}

#[test]
fn a_service_that_exits_with_our_codes_is_no_failure_to_start() {
    for code in [123, 124, 125, 126, 127] {
        let ended = Supervise::new().command(["sh", "-c", &format!("exit {code}")]).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        assert_eq!(
            (&ended.report["start_error"], &ended.report["result"]),
            (&Value::Null, &json!("exit-code")),
            "{ended}"
        );
        assert_eq!(ended.stderr, "", "{ended}");
    }
}

#[test]
fn a_working_directory_that_cannot_be_entered_is_125() {
    let config = "[service]\ncommand = [\"true\"]\nworking-directory = \"/no/such/place\"\n";
    let ended = Supervise::new().config(config).run();
    assert_not_started(
        &ended,
        125,
        &["cannot enter the working directory \"/no/such/place\": No such file or directory"],
    );
}

#[test]
fn no_room_for_a_process_is_125() {
    if !need_root() {
        return;
    }
    // A uid that nobody has: the program itself is the one process it may have.
    let ended = Supervise::new().user(899_001, 899_001).rlimit(libc::RLIMIT_NPROC, 1, 1).command(["true"]).run();
    assert_not_started(&ended, 125, &["cannot start the service", "Resource temporarily unavailable"]);
}

// Whose words they are.

#[test]
fn after_the_two_dashes_nothing_is_ours() {
    let words = ["-x", "--version", "--config", "none", "--report", "none", "--", "-c", "check", "--help"];
    let command = ["printf", "<%s>"].into_iter().chain(words);
    let ended = Supervise::new().options(["--stop-timeout", "5s"]).command(command).run();
    assert_eq!(ended.stdout, words.map(|word| format!("<{word}>")).concat(), "{ended}");
    assert_eq!(ended.code, Some(0), "{ended}");
    for program in ["-x", "--version", "--help"] {
        let ended = Supervise::new().command([program]).run();
        assert_not_started(&ended, 127, &[&format!("cannot execute {program:?}")]);
    }
    // A verb of ours is a program like any other there.
    let run = Supervise::new();
    put(&run, "check", 0o755, HELLO);
    let ended = run.env("PATH", ".:/bin").command(["check"]).run();
    assert_eq!(ended.code, Some(7), "{ended}");
}

/// Wrong use: exit 2, nothing but a message, and `{dir}/started` was not made.
fn refused(options: &[&str], command: bool) -> Ended {
    let run = Supervise::new().options(options.iter().copied());
    let started = run.dir().join("started");
    let touch = ["touch", started.to_str().unwrap()];
    let ended = if command { run.command(touch).run() } else { run.run() };
    assert_eq!(ended.code, Some(2), "{options:?} {ended}");
    assert_eq!((ended.stdout.as_str(), &ended.report), ("", &Value::Null), "{options:?} {ended}");
    assert!(!ended.stderr.is_empty() && !started.exists(), "{options:?} {ended}");
    ended
}

#[test]
fn a_command_without_the_two_dashes_is_shown_the_right_form() {
    for (options, form) in [
        (["sleep", "5"].as_slice(), "supervise -- sleep 5"),
        (&["-v", "sleep", "5"], "supervise -- sleep 5"),
        (&["--stop-timeout", "5s", "sleep", "5"], "supervise -- sleep 5"),
        (&["./start", "-x"], "supervise -- ./start -x"),
    ] {
        let ended = Supervise::new().without_report().options(options.iter().copied()).run();
        assert_eq!(ended.code, Some(2), "{ended}");
        assert!(ended.stderr.contains(form), "{form:?} is not in {ended}");
    }
    let ended = Supervise::new().without_report().options(["mysql", "--password", "hunter2"]).run();
    assert!(ended.code == Some(2) && !ended.stderr.contains("hunter2"), "{ended}");
}

#[test]
fn nothing_to_run_is_shown_the_right_form() {
    let ended = refused(&[], false);
    assert!(ended.stderr.contains("supervise -- COMMAND") && ended.stderr.contains("supervise -c FILE"), "{ended}");
    let ended = Supervise::new().options(["--", ""]).without_report().run();
    assert_eq!(ended.code, Some(2), "{ended}");
    assert!(ended.stderr.contains("supervise -- COMMAND"), "{ended}");
}

#[test]
fn wrong_options_start_nothing() {
    for (options, named) in [
        (["--no-such-option"].as_slice(), "--no-such-option"),
        (&["--stop-timeout", "soon"], "--stop-timeout"),
        (&["--leftover-timeout=-1s"], "--leftover-timeout"),
        (&["--timeout", "5"], "--timeout"),
        (&["--stop-signal", "NOPE"], "--stop-signal"),
        (&["--stop-signal", "65"], "--stop-signal"),
        (&["--map-signal", "HUP"], "--map-signal"),
        (&["--map-signal", "HUP=NOPE"], "--map-signal"),
        (&["--map-signal", "KILL=TERM"], "--map-signal"),
        (&["--success-exit-status", "256"], "--success-exit-status"),
        (&["--containment", "moon"], "--containment"),
        (&["--log-format", "xml"], "--log-format"),
        (&["-c", "/no/such/file"], "/no/such/file"),
        (&["-v", "-q"], "--verbose"),
    ] {
        let ended = refused(options, true);
        assert!(ended.stderr.contains(named), "{named:?} is not in {ended}");
    }
}

#[test]
fn a_slip_of_the_pen_is_told_what_was_meant() {
    let ended = refused(&["--stop-time", "5s"], true);
    assert!(ended.stderr.contains("--stop-timeout"), "{ended}");
}
