//! What a run says: the lines of its tree, and the streams of the program.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::sys;

/// A process of the tree, as it was when it was in its place.
#[derive(Clone, Debug)]
pub(crate) struct Proc {
    pub(crate) name: String,
    pub(crate) pid: i32,
    pub(crate) ppid: i32,
    pub(crate) pgid: i32,
    pub(crate) sid: i32,
    /// SigIgn of /proc/self/status; None without /proc and for a newborn.
    pub(crate) ignored: Option<u64>,
}

impl Proc {
    pub(crate) fn ignores(&self, signal: i32) -> bool {
        let mask = self.ignored.unwrap_or_else(|| panic!("{}: its signals are not known", self.name));
        mask & (1 << (signal - 1)) != 0
    }
}

/// A line from the tree.
#[derive(Clone, Debug)]
pub(crate) enum Told {
    Up(Proc),
    Born(Proc),
    Got { name: String, signal: i32 },
    Done { name: String },
}

/// What a stream gave until now.
#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) fd: Option<OwnedFd>,
    pub(super) bytes: Vec<u8>,
    /// How far `expect_…` has looked.
    pub(super) seen: usize,
}

impl Stream {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    pub(super) fn find(&mut self, text: &str) -> Option<String> {
        let rest = &self.bytes[self.seen..];
        let at = rest.windows(text.len()).position(|part| part == text.as_bytes())?;
        let found = String::from_utf8_lossy(&rest[..at + text.len()]).into_owned();
        self.seen += at + text.len();
        Some(found)
    }

    pub(super) fn next_line(&mut self) -> Option<String> {
        let rest = &self.bytes[self.seen..];
        let len = rest.iter().position(|b| *b == b'\n')?;
        let line = String::from_utf8_lossy(&rest[..len]).into_owned();
        self.seen += len + 1;
        Some(line)
    }

    pub(super) fn take(&mut self, ready: &[RawFd]) {
        let Some(fd) = self.fd.as_ref().map(AsRawFd::as_raw_fd).filter(|fd| ready.contains(fd)) else { return };
        let mut buffer = [0; 65536];
        loop {
            match sys::read(fd, &mut buffer) {
                Ok(0) => break self.fd = None,
                Ok(size) => self.bytes.extend_from_slice(&buffer[..size]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                // A terminal that nobody has open any more.
                Err(_) => break self.fd = None,
            }
        }
    }
}

pub(super) fn count_got(told: &[Told], name: &str, signal: i32) -> usize {
    let of_it = |told: &&Told| matches!(told, Told::Got { name: who, signal: what } if who == name && *what == signal);
    told.iter().filter(of_it).count()
}

pub(super) fn parse(line: &str) -> Option<Told> {
    let mut words = line.split(' ');
    let (kind, name) = (words.next()?, words.next()?.to_owned());
    let mut number = || words.next()?.parse::<i32>().ok();
    match kind {
        "got" => Some(Told::Got { name, signal: number()? }),
        "done" => Some(Told::Done { name }),
        _ => {
            let (pid, ppid, pgid, sid) = (number()?, number()?, number()?, number()?);
            let ignored = words.next().and_then(|mask| u64::from_str_radix(mask, 16).ok());
            let proc = Proc { name, pid, ppid, pgid, sid, ignored };
            Some(if kind == "up" { Told::Up(proc) } else { Told::Born(proc) })
        }
    }
}
