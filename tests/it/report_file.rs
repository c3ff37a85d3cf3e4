//! Where the report goes. A file is replaced as a whole; everything else is written into as it is; and whatever goes
//! wrong there is a warning and no more.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Seek as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::support::supervise::{full_pipe, pipe};
use crate::support::{Ended, Io, Supervise, need_root, node, sys};

const OLD: &str = "what was there before";

/// A service that says one line and ends with 3.
fn service(place: &str) -> Supervise {
    Supervise::new().without_report().options(["--report", place]).command(["sh", "-c", "echo of the service; exit 3"])
}

fn whole(text: &str) -> Value {
    let report: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
    assert_eq!((&report["exit"]["code"], &report["exit_code"]), (&3.into(), &3.into()), "{text}");
    assert!(text.ends_with("}\n"), "{text}");
    report
}

fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The run went as it would have gone without a report, and one warning says what became of that.
fn assert_warned(ended: &Ended, place: &str, reason: &str) {
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(3), "of the service\n"), "{ended}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended}");
    assert!(ended.stderr.starts_with("supervise: warning: "), "{ended}");
    assert!(
        ended.stderr.contains("report") && ended.stderr.contains(place) && ended.stderr.contains(reason),
        "{ended}"
    );
}

#[test]
fn a_file_is_made_with_the_report_alone_and_for_everybody_to_read() {
    let ended = service("report").umask(0o022).run();
    let path = ended.dir.path().join("report");
    whole(&fs::read_to_string(&path).unwrap());
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(3), ""), "{ended}");
    let made: Vec<String> = names(ended.dir.path()).into_iter().filter(|name| name.contains("report")).collect();
    assert_eq!(made, ["report"]);
}

#[test]
fn whoever_has_the_old_report_open_reads_it_to_its_end() {
    let run = service("report");
    let path = run.dir().join("report");
    fs::write(&path, OLD).unwrap();
    let mut old = fs::File::open(&path).unwrap();
    let _ended = run.run();
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!(text, OLD);
    assert_ne!(old.metadata().unwrap().ino(), path.metadata().unwrap().ino());
    whole(&fs::read_to_string(&path).unwrap());
}

#[test]
fn a_reader_never_sees_a_part() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("report");
    let over = AtomicBool::new(false);
    let read = || {
        let mut seen = BTreeSet::new();
        while !over.load(Ordering::Relaxed) {
            if let Ok(text) = fs::read_to_string(&path) {
                seen.insert(whole(&text)["invocation"].to_string());
            }
        }
        seen
    };
    let seen = std::thread::scope(|scope| {
        let reader = scope.spawn(read);
        let long = "x".repeat(100_000);
        for _ in 0..10 {
            let run = Supervise::new().without_report().options(["--report", path.to_str().unwrap()]);
            run.command(["sh", "-c", "exit 3", &long]).run();
        }
        over.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(!seen.is_empty());
    assert_eq!(names(directory.path()), BTreeSet::from(["report".to_owned()]));
}

#[test]
fn the_old_report_stays_when_the_new_one_cannot_be_written() {
    let run = service("report").rlimit(libc::RLIMIT_FSIZE, 10, 10);
    let path = run.dir().join("report");
    fs::write(&path, OLD).unwrap();
    let ended = run.run();
    assert_warned(&ended, "/report", "File too large");
    assert_eq!(fs::read_to_string(&path).unwrap(), OLD);
    let made: Vec<String> = names(ended.dir.path()).into_iter().filter(|name| name.contains("report")).collect();
    assert_eq!(made, ["report"]);
}

#[test]
fn a_full_disk_is_a_warning_and_the_old_report_stays() {
    if !need_root() {
        return;
    }
    // Only the run sees the full disk, so the one that looks at it is inside.
    let script = r#"cd full && rm filler && echo "$1" > report && cat /dev/zero > more
        "$0" --report report -- sh -c 'echo of the service; exit 3'; echo "code $?"; cat report; ls -A"#;
    let run = Supervise::program("sh").options(["-c", script, env!("CARGO_BIN_EXE_supervise"), OLD]);
    let full = run.dir().join("full");
    let ended = run.full_disk(&full).run();
    assert_eq!(ended.stdout, format!("of the service\ncode 3\n{OLD}\nmore\nreport\n"), "{ended}");
    let warnings: Vec<&str> = ended.stderr.lines().filter(|line| line.starts_with("supervise: ")).collect();
    assert_eq!(warnings.len(), 1, "{ended}");
    assert!(warnings[0].contains("warning: the report could not be written") && warnings[0].contains("No space left"));
}

#[test]
fn a_place_that_cannot_be_written_to_is_a_warning() {
    let places = [
        ("{dir}/none/report", "No such file or directory"),
        ("{dir}", "Is a directory"),
        ("/dev/full", "No space left"),
        // Nobody reads it.
        ("{dir}/fifo", "No such device or address"),
        ("/dev/fd/9", "Bad file descriptor"),
        ("{dir}/loop", "Too many levels of symbolic links"),
        ("{dir}/link-to-nowhere", "No such file or directory"),
    ];
    for (place, reason) in places {
        let run = service(place);
        nix::unistd::mkfifo(&run.dir().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        symlink("loop", run.dir().join("loop")).unwrap();
        symlink("none/report", run.dir().join("link-to-nowhere")).unwrap();
        let before = names(run.dir());
        let ended = run.run();
        let place = place.replace("{dir}", ended.dir.path().to_str().unwrap());
        assert_warned(&ended, &place, reason);
        let made: Vec<String> = names(ended.dir.path()).difference(&before).cloned().collect();
        assert!(made.iter().all(|name| name == "tell"), "{made:?}\n{ended}");
    }
}

#[test]
fn a_directory_that_may_not_be_written_to_is_a_warning() {
    let closed = tempfile::tempdir().unwrap();
    fs::set_permissions(closed.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let place = closed.path().join("report").to_str().unwrap().to_owned();
    let run = service(&place);
    let run = if closed.path().metadata().unwrap().uid() == 0 { run.user(4711, 4711) } else { run };
    assert_warned(&run.run(), &place, "Permission denied");
    assert!(names(closed.path()).is_empty());
}

#[test]
fn a_link_that_another_user_made_is_not_followed() {
    if !need_root() {
        return;
    }
    let run = service("{dir}/link");
    let (victim, link) = (run.dir().join("victim"), run.dir().join("link"));
    fs::write(&victim, OLD).unwrap();
    symlink("victim", &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(65_534), None).unwrap();
    let ended = run.run();
    assert_warned(&ended, "link", "Operation not permitted");
    assert_eq!(fs::read_to_string(ended.dir.path().join("victim")).unwrap(), OLD);
}

#[test]
fn a_link_stays_and_the_file_behind_it_is_replaced() {
    for old in [None, Some(OLD.repeat(1000))] {
        let run = service("link");
        let behind = run.dir().join("behind");
        fs::create_dir(&behind).unwrap();
        symlink("behind/report", run.dir().join("link")).unwrap();
        if let Some(old) = &old {
            fs::write(behind.join("report"), old).unwrap();
        }
        let ended = run.run();
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(3), ""), "{ended}");
        whole(&fs::read_to_string(behind.join("report")).unwrap());
        assert!(ended.dir.path().join("link").symlink_metadata().unwrap().is_symlink());
        assert_eq!(names(&behind), BTreeSet::from(["report".to_owned()]));
    }
}

#[test]
fn the_longest_name_that_a_file_can_have_is_good_enough() {
    let name = "r".repeat(255);
    let ended = service(&name).run();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(3), ""), "{ended}");
    whole(&fs::read_to_string(ended.dir.path().join(name)).unwrap());
}

#[test]
fn what_a_killed_run_left_unfinished_is_not_in_the_way() {
    // In a container every run has the same pid.
    let script = r#": > .report.1.tmp; for run in 1 2; do
        unshare -pf --kill-child "$0" --report report -- sh -c 'exit 3' && exit 1; test -s report || exit 2; rm report
        done"#;
    if !need_root() {
        return;
    }
    let ended = Supervise::program("sh").options(["-c", script, env!("CARGO_BIN_EXE_supervise")]).run();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended}");
}

#[test]
fn a_fifo_with_a_reader_gets_all_of_it() {
    let run = service("fifo");
    let path = run.dir().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let reader = sys::open(path.to_str().unwrap(), libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC).unwrap();
    let ended = run.run();
    assert_eq!(ended.stderr, "", "{ended}");
    whole(&rest(reader));
}

/// What is in a pipe whose writers are gone.
fn rest(reader: OwnedFd) -> String {
    let mut text = String::new();
    fs::File::from(reader).read_to_string(&mut text).unwrap();
    text
}

#[test]
fn standard_output_and_standard_error_can_take_it() {
    let ended = service("/dev/stdout").run();
    whole(ended.stdout.strip_prefix("of the service\n").unwrap());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(3), ""));
    let ended = service("/dev/stderr").run();
    whole(&ended.stderr);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(3), "of the service\n"));
}

#[test]
fn a_descriptor_can_take_it() {
    for place in ["/dev/fd/5", "/proc/self/fd/5"] {
        let (read, write) = pipe();
        let ended = service(place).fd(5, write).run();
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(3), ""), "{ended}");
        whole(&rest(read));
    }
}

#[test]
fn a_socket_can_take_it() {
    let (mut near, far) = UnixStream::pair().unwrap();
    let ended = service("/dev/stdout").stdout(Io::Fd(far.into())).run();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(3), ""), "{ended}");
    let mut text = String::new();
    near.read_to_string(&mut text).unwrap();
    whole(text.strip_prefix("of the service\n").unwrap());
}

#[test]
fn a_file_that_is_standard_output_keeps_what_the_service_wrote() {
    let mut out = tempfile::tempfile().unwrap();
    let ended = service("/dev/stdout").stdout(Io::Fd(out.try_clone().unwrap().into())).run();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(3), ""), "{ended}");
    let mut text = String::new();
    out.rewind().unwrap();
    out.read_to_string(&mut text).unwrap();
    whole(text.strip_prefix("of the service\n").unwrap_or_else(|| panic!("{text}")));
}

#[test]
fn a_report_that_is_longer_than_a_pipe_gets_through_whole() {
    for place in ["/dev/stdout", "{dir}/fifo"] {
        let main = node("main").with(node("w").setsid().copies(400)).exit_on_go(3);
        let run = Supervise::new().without_report().options(["--leftover-timeout", "1m", "--report", place]);
        let fifo = run.dir().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let far = sys::open(fifo.to_str().unwrap(), libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC).unwrap();
        let mut run = run.tree(main).start();
        run.wait_up();
        // Slower than the writer: it begins when the pipe is full.
        let reader = std::thread::spawn(move || {
            let mut poll = libc::pollfd { fd: far.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd.
            unsafe { libc::poll(&raw mut poll, 1, 60_000) };
            let mut text = String::new();
            // Blocking from here on.
            // SAFETY: no memory is involved.
            unsafe { libc::fcntl(far.as_raw_fd(), libc::F_SETFL, 0) };
            fs::File::from(far).read_to_string(&mut text).unwrap();
            text
        });
        run.let_go("main");
        if place == "/dev/stdout" {
            // Nobody will come.
            drop(sys::open(fifo.to_str().unwrap(), libc::O_WRONLY | libc::O_CLOEXEC).unwrap());
        }
        let ended = run.finish();
        let read = reader.join().unwrap();
        let text = if place == "/dev/stdout" { ended.stdout.as_str() } else { read.as_str() };
        assert_eq!(whole(text)["leftovers"].as_array().unwrap().len(), 400);
        assert!(text.len() > 65_536, "the pipe was never full");
    }
}

#[test]
fn a_reader_of_the_report_that_stalls_does_not_hold_up_the_end_for_ever() {
    let (read, write) = full_pipe();
    let ended = service("/dev/fd/5").fd(5, write).guard(Duration::from_secs(30)).run();
    assert_warned(&ended, "/dev/fd/5", "");
    drop(read);
    // Nor does one that went away.
    let (read, write) = pipe();
    drop(read);
    assert_warned(&service("/dev/fd/5").fd(5, write).run(), "/dev/fd/5", "Broken pipe");
}

#[test]
fn a_relative_path_is_where_supervise_was_started() {
    let config =
        "[service]\ncommand = ['sh', '-c', 'pwd; exit 3']\nworking-directory = '/'\n[report]\nfile = 'below/report'\n";
    let run = Supervise::new().without_report().config(config);
    fs::create_dir(run.dir().join("below")).unwrap();
    let ended = run.run();
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (Some(3), "/\n", ""), "{ended}");
    whole(&fs::read_to_string(ended.dir.path().join("below/report")).unwrap());
}

#[test]
fn it_is_written_when_nothing_was_started() {
    for (program, code) in [("no-such-program", 127), ("/etc/passwd", 126)] {
        let ended = Supervise::new().without_report().options(["--report", "report"]).command([program]).run();
        assert_eq!(ended.code, Some(code), "{ended}");
        let text = fs::read_to_string(ended.dir.path().join("report")).unwrap();
        let report: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&report["result"], &report["exit_code"]), (&"start-failed".into(), &code.into()), "{text}");
    }
}
