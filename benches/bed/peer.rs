//! Who is measured, and how each is called.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::PathBuf;

/// A supervisor under measurement.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    /// What stands between the program and the command.
    options: &'static [&'static str],
    /// Whether orphans fall to it when it is not PID 1.
    pub(crate) subreaper: bool,
    /// Whether it is `supervise`, and not somebody to compare it with.
    pub(crate) ours: bool,
}

struct Kind {
    name: &'static str,
    options: &'static [&'static str],
    subreaper: bool,
}

/// As their manuals call them; tini is no subreaper without `-s`.
const KINDS: [Kind; 4] = [
    Kind { name: "tini", options: &["-s", "--"], subreaper: true },
    Kind { name: "tini-static", options: &["-s", "--"], subreaper: true },
    Kind { name: "dumb-init", options: &["--"], subreaper: false },
    Kind { name: "catatonit", options: &["--"], subreaper: true },
];

impl Peer {
    /// The same, at another place.
    pub(crate) fn moved_to(self, program: PathBuf) -> Self {
        Peer { program, ..self }
    }

    /// The same, called with other options.
    pub(crate) fn called(self, addition: &str, options: &'static [&'static str]) -> Self {
        Peer { name: format!("{} {addition}", self.name), options, ..self }
    }

    /// The command line that has it run `command`.
    pub(crate) fn running(&self, command: &[OsString]) -> Vec<OsString> {
        let options = self.options.iter().map(OsString::from);
        [self.program.clone().into_os_string()].into_iter().chain(options).chain(command.iter().cloned()).collect()
    }
}

/// `supervise` first, then the peers found in PATH; and the names of those that are not there.
pub(crate) fn find_all(asked: Option<OsString>, built: PathBuf) -> io::Result<(Vec<Peer>, Vec<&'static str>)> {
    let binaries: Vec<PathBuf> = asked.map_or_else(|| vec![built], |paths| env::split_paths(&paths).collect());
    let mut peers = Vec::new();
    for (at, binary) in binaries.iter().enumerate() {
        let program = binary
            .canonicalize()
            .map_err(|error| io::Error::new(error.kind(), format!("no supervise at {}: {error}", binary.display())))?;
        // Pages of a fresh build that are still to be written count as dirty memory of whoever runs it.
        File::open(&program)?.sync_all()?;
        let name = if at == 0 { "supervise".to_owned() } else { format!("supervise.{}", at + 1) };
        peers.push(Peer { name, program, options: &["--"], subreaper: true, ours: true });
    }
    let mut absent = Vec::new();
    for Kind { name, options, subreaper } in KINDS {
        match in_path(name.as_ref()) {
            Some(program) => peers.push(Peer { name: name.to_owned(), program, options, subreaper, ours: false }),
            None => absent.push(name),
        }
    }
    Ok((peers, absent))
}

/// Where PATH has `name`.
pub(crate) fn in_path(name: &OsStr) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| path.is_file())
}
