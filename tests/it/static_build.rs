//! The static build: one documented command, and a binary that runs where there is nothing else.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use crate::support::need::need;
use crate::support::{Ended, Supervise, need_program, need_root};

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// A service for an empty image: it leaves copies of itself behind, or waits for its end.
const SERVICE: &str = r#"fn main() {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("left") {
        println!("left");
        loop {
            std::thread::park();
        }
    }
    for _ in 0..3 {
        let left = std::process::Command::new("/service").arg("left").stdout(std::process::Stdio::piped()).spawn();
        let mut ready = [0; 5];
        std::io::Read::read_exact(&mut left.unwrap().stdout.take().unwrap(), &mut ready).unwrap();
    }
    println!("{} at {}", std::process::id(), std::env::current_dir().unwrap().display());
    std::process::exit(7);
}
"#;

fn source() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The command as the README has it.
fn documented_command() -> String {
    let text = fs::read_to_string(source().join("README.md")).unwrap();
    let commands: Vec<&str> = text.lines().map(str::trim).filter(|line| line.contains("crt-static")).collect();
    assert_eq!(
        commands,
        [format!("RUSTFLAGS=\"-C target-feature=+crt-static\" cargo build --release --target {TRIPLE}")]
    );
    commands[0].to_owned()
}

/// Builds it once for each test process, in a directory that is kept from run to run.
fn build() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("static");
        let mut shell = Command::new("sh");
        shell.args(["-c", &documented_command()]).current_dir(source()).env("CARGO_TARGET_DIR", &target);
        // What the cargo above set for itself is not part of the command.
        for name in ["CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "CARGO_BUILD_RUSTFLAGS", "RUSTC_WRAPPER"] {
            shell.env_remove(name);
        }
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        target.join(TRIPLE).join("release/supervise")
    })
}

fn need_this_machine() -> bool {
    need("x86_64", cfg!(target_arch = "x86_64"))
}

/// Whether the ELF file names a program that is to load it (PT_INTERP).
fn has_an_interpreter(file: &Path) -> bool {
    let bytes = fs::read(file).unwrap();
    assert_eq!(&bytes[..6], b"\x7fELF\x02\x01", "a 64-bit ELF of this byte order");
    let number = |at: usize, length: usize| {
        bytes[at..at + length].iter().rev().fold(0_usize, |number, byte| number << 8 | usize::from(*byte))
    };
    let (table, entry, count) = (number(0x20, 8), number(0x36, 2), number(0x38, 2));
    assert!(count > 0);
    (0..count).any(|index| number(table + index * entry, 4) == libc::PT_INTERP as usize)
}

#[test]
fn the_static_build_asks_for_no_loader() {
    if !need_this_machine() {
        return;
    }
    assert!(!has_an_interpreter(build()));
    if cfg!(not(target_feature = "crt-static")) {
        assert!(has_an_interpreter(Path::new(env!("CARGO_BIN_EXE_supervise"))), "the look would see one");
    }
}

#[test]
fn the_static_build_is_small() {
    if need_this_machine() {
        assert!(fs::metadata(build()).unwrap().len() < 3_000_000);
    }
}

/// A root directory with nothing in it but `/supervise` and `/service`.
fn empty_image() -> tempfile::TempDir {
    static SERVICE_BUILT: OnceLock<PathBuf> = OnceLock::new();
    let service = SERVICE_BUILT.get_or_init(|| {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("static-service");
        fs::create_dir_all(&place).unwrap();
        fs::write(place.join("service.rs"), SERVICE).unwrap();
        let mut rustc = Command::new("rustc");
        rustc.args(["--edition", "2024", "-C", "target-feature=+crt-static", "--target", TRIPLE, "-o"]);
        let status = rustc.arg(place.join("service")).arg(place.join("service.rs")).status().unwrap();
        assert!(status.success());
        place.join("service")
    });
    let image = tempfile::tempdir().unwrap();
    for (from, name) in [(build(), "supervise"), (service.as_path(), "service")] {
        fs::copy(from, image.path().join(name)).unwrap();
        fs::set_permissions(image.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    image
}

/// Runs `/supervise` with these arguments as PID 1 of the image: no /proc, no /dev, no /tmp.
fn run_in(image: &Path, arguments: &[&str]) -> Ended {
    let root = format!("--root={}", image.display());
    let namespace = ["--mount", "--pid", "--fork", "--kill-child", &root, "/supervise"];
    Supervise::program("unshare").options(namespace).options(arguments.iter().copied()).run()
}

fn can_run() -> bool {
    need_this_machine() && need_root() && need_program("unshare") && need_program("rustc")
}

#[test]
fn the_static_build_is_all_that_an_empty_image_needs() {
    if !can_run() {
        return;
    }
    let image = empty_image();
    let ended = run_in(image.path(), &["--", "/supervise", "--version"]);
    let version = format!("supervise {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!((ended.code, &ended.stdout, ended.stderr.as_str()), (Some(0), &version, ""), "{ended}");
    let names: Vec<_> = fs::read_dir(image.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn in_an_empty_image_a_service_ends_and_nothing_of_it_is_left() {
    if !can_run() {
        return;
    }
    let image = empty_image();
    let ended = run_in(image.path(), &["--report", "/report.json", "--leftover-timeout", "30s", "--", "/service"]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(7), "2 at /\n"), "{ended}");
    // Those that it left die of SIGTERM: nobody had to wait for the next rung.
    assert!(ended.wall < Duration::from_secs(30), "{ended}");
    let report: Value = serde_json::from_slice(&fs::read(image.path().join("report.json")).unwrap()).unwrap();
    assert_eq!((&report["exit"]["code"], &report["result"]), (&7.into(), &"exit-code".into()), "{report}");
}

#[test]
fn in_an_empty_image_what_is_wrong_is_said() {
    if !can_run() {
        return;
    }
    let image = empty_image();
    let ended = run_in(image.path(), &["--", "/bin/sh"]);
    assert_eq!(ended.code, Some(127), "{ended}");
    // That there is no /proc may be said before, if the child that tried was not reaped at once.
    assert!(ended.stderr.contains("supervise: error: cannot execute \"/bin/sh\": not found"), "{ended}");
}
