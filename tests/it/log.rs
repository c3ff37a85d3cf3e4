//! The log on standard error: how its lines look, how much is said, and that nobody who reads it, or does not, can hold
//! up or end `supervise`.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;

use libc::SIGTERM;
use serde_json::Value;

use crate::support::supervise::{full_pipe, pipe};
use crate::support::{Ended, Io, Supervise, node, sys};

/// A pipe takes no more than this whole.
const LONGEST_LINE: usize = libc::PIPE_BUF;

/// A run that says something at every level: a leftover, and a report that cannot be written.
fn talkative() -> Supervise {
    Supervise::new().without_report().options(["--report", "/dev/full"]).command(["sh", "-c", "sleep 1000 & exit 0"])
}

/// A run whose command cannot be started, because its name is this long.
fn too_long(name: &str) -> Supervise {
    Supervise::new().without_report().command([format!("/{name}")])
}

/// What a pipe, whose writers are gone, still has.
fn rest(reader: OwnedFd) -> String {
    let mut text = String::new();
    std::fs::File::from(reader).read_to_string(&mut text).unwrap();
    text
}

/// Empties a pipe that others still write to; how much was in it.
fn drain(reader: &OwnedFd) -> Vec<u8> {
    let mut text = Vec::new();
    let mut buffer = [0; 65_536];
    while !sys::wait_readable(&[reader.as_raw_fd()], Some(std::time::Instant::now())).unwrap().is_empty() {
        let got = sys::read(reader.as_raw_fd(), &mut buffer).unwrap();
        text.extend(&buffer[..got]);
    }
    text
}

/// What systemd sets when it connects a service's standard error to the journal (systemd.exec(5)).
fn journal_stream(fd: &OwnedFd) -> (u64, u64) {
    let meta = std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap();
    (meta.dev(), meta.ino())
}

fn assert_json_lines(text: &str) -> Vec<Value> {
    let parse = |line| {
        let value: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(value["level"].is_string() && value["timestamp"].is_string(), "{line}");
        assert!(value["message"].is_string() || value["level"] == "TRACE", "{line}");
        value
    };
    let lines: Vec<Value> = text.lines().map(parse).collect();
    assert!(!lines.is_empty() && text.ends_with('\n'), "{text:?}");
    lines
}

#[test]
fn people_see_who_speaks_and_how_bad_it_is() {
    let ended = talkative().run();
    let lines: Vec<&str> = ended.stderr.lines().collect();
    assert_eq!((ended.code, lines.len()), (Some(0), 2), "{ended}");
    assert!(lines[0].starts_with("supervise: ended 1 leftover "), "{ended}");
    assert!(lines[1].starts_with("supervise: warning: the report could not be written"), "{ended}");
    let ended = Supervise::new().command(["no-such-program"]).run();
    assert!(ended.stderr.starts_with("supervise: error: cannot execute \"no-such-program\": not found"), "{ended}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
}

#[test]
fn the_journal_gets_the_level_of_each_line() {
    let (read, write) = pipe();
    let (dev, ino) = journal_stream(&write);
    let run = talkative().env("JOURNAL_STREAM", &format!("{dev}:{ino}")).stderr(Io::Fd(write));
    assert_eq!(run.run().code, Some(0));
    let text = rest(read);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].starts_with("<6>ended 1 leftover ") && lines[1].starts_with("<4>the report could "), "{text}");
}

#[test]
fn the_journal_gets_the_level_on_every_line_of_a_long_message() {
    let (read, write) = pipe();
    let (dev, ino) = journal_stream(&write);
    let run = Supervise::new().without_report().config("[stop]\nsignal = 'X'\ntimeout = 1\n").command(["true"]);
    let run = run.env("JOURNAL_STREAM", &format!("{dev}:{ino}")).stderr(Io::Fd(write));
    assert_eq!(run.run().code, Some(2));
    let text = rest(read);
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.lines().all(|line| line.starts_with("<3>")), "{text}");
}

#[test]
fn a_stale_journal_stream_is_not_believed() {
    // Inherited by somebody whose standard error goes elsewhere.
    for wrong in [|(dev, ino): (u64, u64)| format!("{dev}:{}", ino + 1), |(dev, ino)| format!("{}:{ino}", dev + 1)] {
        let (read, write) = pipe();
        let stale = wrong(journal_stream(&write));
        assert_eq!(talkative().env("JOURNAL_STREAM", &stale).stderr(Io::Fd(write)).run().code, Some(0));
        let text = rest(read);
        assert!(text.lines().count() == 2 && text.lines().all(|line| line.starts_with("supervise: ")), "{text}");
    }
}

#[test]
fn what_the_operator_wants_wins_over_the_journal() {
    let (read, write) = pipe();
    let (dev, ino) = journal_stream(&write);
    let run = talkative().options(["--log-format", "text"]).env("JOURNAL_STREAM", &format!("{dev}:{ino}"));
    assert_eq!(run.stderr(Io::Fd(write)).run().code, Some(0));
    let text = rest(read);
    assert!(text.lines().all(|line| line.starts_with("supervise: ")), "{text}");
}

#[test]
fn every_line_of_a_json_log_is_json() {
    let ended = talkative().options(["-vv", "--log-format", "json"]).run();
    let lines = assert_json_lines(&ended.stderr);
    let levels: Vec<&str> = lines.iter().map(|line| line["level"].as_str().unwrap()).collect();
    for level in ["TRACE", "DEBUG", "INFO", "WARN"] {
        assert!(levels.contains(&level), "no {level}\n{ended}");
    }
    let said = |level: &str, text: &str| {
        lines.iter().any(|line| {
            line["level"] == level && line["message"].as_str().is_some_and(|message| message.contains(text))
        })
    };
    assert!(said("INFO", "ended 1 leftover of the service") && said("WARN", "the report could not be"), "{ended}");
}

#[test]
fn errors_before_the_start_are_json_too() {
    let json = || Supervise::new().without_report().options(["--log-format", "json"]);
    for run in [json().command(["no-such-program"]), json().config("[stop]\nsignal = 'X'\n").command(["true"]), json()]
    {
        let ended = run.run();
        let lines = assert_json_lines(&ended.stderr);
        assert_eq!((lines.len(), &lines[0]["level"]), (1, &"ERROR".into()), "{ended}");
    }
}

fn levels(ended: &Ended) -> (bool, bool, bool, bool) {
    let has = |text: &str| ended.stderr.contains(text);
    (has("warning: "), has("ended 1 leftover"), has("the service starts as pid "), has("reaped"))
}

#[test]
fn as_much_is_said_as_was_asked_for() {
    let nothing = (false, false, false, false);
    let (warnings, usual) = ((true, false, false, false), (true, true, false, false));
    let (more, everything) = ((true, true, true, false), (true, true, true, true));
    assert_eq!(levels(&talkative().run()), usual);
    assert_eq!(levels(&talkative().options(["-v"]).run()), more);
    assert_eq!(levels(&talkative().options(["-vv"]).run()), everything);
    assert_eq!(levels(&talkative().options(["-q"]).run()), nothing);
    let words = [("error", nothing), ("warn", warnings), ("info", usual), ("debug", more), ("trace", everything)];
    for (word, wanted) in words {
        let ended = talkative().config(&format!("[log]\nlevel = '{word}'\n")).run();
        assert_eq!(levels(&ended), wanted, "{word}\n{ended}");
    }
    // The command line wins.
    assert_eq!(levels(&talkative().config("[log]\nlevel = 'trace'\n").options(["-q"]).run()), nothing);
    assert_eq!(levels(&talkative().config("[log]\nlevel = 'error'\n").options(["-v"]).run()), more);
}

#[test]
fn errors_are_said_however_quiet_it_is_to_be() {
    let ended = Supervise::new().options(["-q"]).command(["no-such-program"]).run();
    assert!(ended.stderr.starts_with("supervise: error: "), "{ended}");
}

#[test]
fn more_and_less_at_once_is_wrong_use() {
    for both in [["-v", "-q"], ["-q", "-v"], ["--verbose", "--quiet"], ["-qv", "-vv"]] {
        let run = Supervise::new().options(both).command(["sh", "-c", ": > started"]);
        let ended = run.run();
        assert_eq!(ended.code, Some(2), "{ended}");
        assert!(ended.stderr.contains("cannot be used with"), "{ended}");
        assert!(!ended.dir.path().join("started").exists());
    }
}

#[test]
fn a_reader_that_stalls_blocks_nobody() {
    let (read, write) = full_pipe();
    let main = node("main").with(node("soft")).with(node("deaf").setsid().ignores([SIGTERM])).exit_on_go(6);
    let mut run =
        Supervise::new().options(["-vv", "--leftover-timeout", "100ms"]).stderr(Io::Fd(write)).tree(main).start();
    run.wait_up();
    run.let_go("main");
    let ended = run.finish();
    assert_eq!(ended.code, Some(6), "{ended}");
    assert_eq!(ended.report["leftovers"].as_array().unwrap().len(), 2, "{ended}");
    // Really nothing of it was read, and nothing fitted in.
    assert!(rest(read).bytes().all(|byte| byte == b'x'));
}

/// Lets a reader stall from the start until the service is up, and read from then on; what it reads then.
fn stalled_until_up(options: &[&str], environment: impl Fn(&OwnedFd) -> Vec<(&'static str, String)>) -> String {
    let (read, write) = full_pipe();
    let mut run = Supervise::new().options(options.iter().copied());
    for (name, value) in environment(&write) {
        run = run.env(name, &value);
    }
    let mut run = run.stderr(Io::Fd(write)).tree(node("main").exit_on_go(6)).start();
    // By now it has told of the start in vain.
    run.wait_up();
    let early = String::from_utf8(drain(&read)).unwrap();
    run.let_go("main");
    assert_eq!(run.finish().code, Some(6));
    early.trim_start_matches('x').to_owned() + &rest(read)
}

fn dropped(line: &str) -> u32 {
    let (before, _) = line.split_once(" log lines dropped: nobody read standard error").expect(line);
    before.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap().parse().expect(line)
}

#[test]
fn what_was_dropped_is_counted_and_said_when_somebody_reads_again() {
    let text = stalled_until_up(&["-vv"], |_| vec![]);
    let first = text.lines().next().unwrap();
    assert!(first.starts_with("supervise: warning: "), "{text}");
    // The start and what is done for it, at the least; not what came later.
    assert!((2..=8).contains(&dropped(first)), "{text}");
    assert_eq!(text.matches("dropped").count(), 1, "{text}");
    assert!(text.contains("reaped") && text.contains("End("), "{text}");
}

#[test]
fn what_was_dropped_is_said_in_the_form_of_the_log() {
    let text = stalled_until_up(&["-vv", "--log-format", "json"], |_| vec![]);
    let lines = assert_json_lines(&text);
    assert_eq!(lines[0]["level"], "WARN", "{text}");
    assert!(dropped(lines[0]["message"].as_str().unwrap()) >= 2, "{text}");
    let text = stalled_until_up(&["-vv"], |stderr| {
        let (dev, ino) = journal_stream(stderr);
        vec![("JOURNAL_STREAM", format!("{dev}:{ino}"))]
    });
    assert!(text.starts_with("<4>") && text.lines().all(|line| line.starts_with('<')), "{text}");
}

#[test]
fn a_reader_that_went_away_ends_nobody() {
    let (read, write) = pipe();
    drop(read);
    let ended = talkative().options(["-vv"]).stderr(Io::Fd(write)).run();
    assert_eq!((ended.code, ended.signal), (Some(0), None), "{ended}");
}

#[test]
fn a_log_without_a_standard_error_harms_nobody() {
    for format in ["text", "json"] {
        let ended = Supervise::new().options(["-vv", "--log-format", format]).stderr(Io::Closed).look().run();
        assert_eq!(ended.code, Some(0), "{ended}");
        // Nothing of ours came to stand there in its place.
        assert!(ended.look()["fds"].get("2").is_none(), "{ended}");
        assert_eq!(ended.report["result"], "success");
    }
    let ended = talkative().stderr(Io::Closed).stdout(Io::Closed).run();
    assert_eq!(ended.code, Some(0), "{ended}");
}

#[test]
fn a_socket_gets_the_log() {
    let (mut near, far) = UnixStream::pair().unwrap();
    assert_eq!(talkative().stderr(Io::Fd(far.into())).run().code, Some(0));
    let mut text = String::new();
    near.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("supervise: ended 1 leftover ") && text.lines().count() == 2, "{text}");
}

#[test]
fn a_socket_that_is_full_or_closed_blocks_and_ends_nobody() {
    let (near, far) = UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    while (&far).write(&[b'x'; 4096]).is_ok() {}
    while (&far).write(b"x").is_ok() {}
    far.set_nonblocking(false).unwrap();
    assert_eq!(talkative().options(["-vv"]).stderr(Io::Fd(far.into())).run().code, Some(0));
    drop(near);
    let (near, far) = UnixStream::pair().unwrap();
    drop(near);
    let ended = talkative().options(["-vv"]).stderr(Io::Fd(far.into())).run();
    assert_eq!((ended.code, ended.signal), (Some(0), None), "{ended}");
}

#[test]
fn a_line_that_is_too_long_is_cut_between_two_characters() {
    // One byte more each time: one of them would cut a character in two.
    for shift in ["", "a", "aa"] {
        let ended = too_long(&format!("{shift}{}", "€".repeat(4000))).run();
        assert_eq!(ended.code, Some(126), "{ended}");
        assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
        assert!(ended.stderr.len() <= LONGEST_LINE && ended.stderr.len() > LONGEST_LINE - 8, "{}", ended.stderr.len());
        assert!(ended.stderr.ends_with("…\n") && !ended.stderr.contains('\u{fffd}'), "{ended}");
    }
}

#[test]
fn a_line_that_is_too_long_is_json_all_the_same() {
    for name in ["€".repeat(4000), "\"\\".repeat(4000), "a".repeat(4090)] {
        let ended = too_long(&name).options(["--log-format", "json"]).run();
        assert_eq!(ended.code, Some(126), "{ended}");
        let lines = assert_json_lines(&ended.stderr);
        assert!(lines.len() == 1 && ended.stderr.len() <= LONGEST_LINE, "{ended}");
        let message = lines[0]["message"].as_str().unwrap();
        assert!(message.starts_with("cannot execute ") && message.ends_with('…'), "{ended}");
    }
}

#[test]
fn a_leftover_with_a_long_command_line_is_named_shortly() {
    let main = node("main").with(node("long").argv(["backup".to_owned(), "a".repeat(100_000)])).exit_on_go(0);
    let mut run = Supervise::new().options(["--leftover-timeout", "1m"]).tree(main).start();
    run.wait_up();
    let pid = run.node("long").pid;
    run.let_go("main");
    let ended = run.finish();
    assert!(ended.stderr.contains("backup aaa") && ended.stderr.contains(&format!("(pid {pid})")), "{ended}");
    assert!(ended.stderr.len() < 300, "{ended}");
    let told = ended.report["leftovers"][0]["command"].as_str().unwrap();
    assert!(told.starts_with("backup aaa") && told.len() <= LONGEST_LINE, "{ended}");
}

#[test]
fn nothing_that_a_terminal_would_act_on_is_in_a_line() {
    let main = node("main").with(node("x").argv(["a\u{1b}[2Jb\nsupervise: error: forged"])).exit_on_go(0);
    let mut run = Supervise::new().options(["--leftover-timeout", "1m"]).tree(main).start();
    run.wait_up();
    run.let_go("main");
    let ended = run.finish();
    assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
    assert!(!ended.stderr.contains('\u{1b}') && ended.stderr.contains("ended 1 leftover"), "{ended}");
    let ended = Supervise::new().without_report().command(["no\u{1b}[2J\nsupervise: forged"]).run();
    assert_eq!((ended.code, ended.stderr.lines().count()), (Some(127), 1), "{ended}");
    assert!(!ended.stderr.contains('\u{1b}'), "{ended}");
}
