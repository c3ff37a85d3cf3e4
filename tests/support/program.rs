//! Where the node program is, and that it is there: `cargo test --test it` builds no examples, nor does it notice that
//! one is old. Then it is built here, once for each test process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

/// The program of `tests/support/node.rs`.
pub(crate) fn node_program() -> &'static Path {
    static NODE: OnceLock<PathBuf> = OnceLock::new();
    NODE.get_or_init(|| {
        let built = Path::new(env!("CARGO_BIN_EXE_supervise")).parent().unwrap();
        let node = built.join("examples/node");
        if modified(&node) < newest_source() {
            build(built);
        }
        node
    })
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|m| m.modified()).ok()
}

fn newest_source() -> Option<SystemTime> {
    let support = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support");
    let own = std::fs::read_dir(support.join("node")).into_iter().flatten().flatten().map(|entry| entry.path());
    let shared = ["node.rs", "spec.rs", "sys.rs", "wire.rs"].map(|name| support.join(name));
    own.chain(shared).filter_map(|path| modified(&path)).max()
}

/// Into the same directory as the program under test: TARGET/[TRIPLE/]PROFILE.
fn build(built: &Path) {
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let profile = if name(built) == "debug" { "dev".to_owned() } else { name(built) };
    let mut target = built.parent().unwrap();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--example", "node", "--profile", &profile]);
    if name(target).contains("-linux-") {
        cargo.args(["--target", &name(target)]);
        target = target.parent().unwrap();
    }
    cargo.arg("--target-dir").arg(target).current_dir(env!("CARGO_MANIFEST_DIR"));
    let status = cargo.status().unwrap_or_else(|e| panic!("{cargo:?}: {e}"));
    assert!(status.success(), "{cargo:?}: {status}");
}
