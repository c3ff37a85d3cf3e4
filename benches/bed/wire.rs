//! What a measure and the service below the supervisor say to each other: a socket that the supervisor passes on.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use libc::pid_t;

use super::clock::now;
use super::program::{WIRE, readable};

/// "I have come so far": who says it, and when that was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word {
    pub(crate) pid: pid_t,
    pub(crate) time: u64,
}

/// The measure's end.
pub(crate) struct Wire(UnixStream);

/// Both ends; the second one is for the program, and to be dropped once that has started.
pub(crate) fn pair() -> io::Result<(Wire, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair()?;
    Ok((Wire(ours), theirs.into()))
}

impl Wire {
    /// Waits for the next word; none in that time is an error.
    pub(crate) fn word(&mut self, limit: Duration) -> io::Result<Word> {
        let silent = || io::Error::new(io::ErrorKind::TimedOut, format!("no word of the service in {limit:?}"));
        self.word_if(limit)?.ok_or_else(silent)
    }

    /// Waits for the next word for some time.
    pub(crate) fn word_if(&mut self, limit: Duration) -> io::Result<Option<Word>> {
        let until = now() + u64::try_from(limit.as_nanos()).map_err(io::Error::other)?;
        if !readable(self.0.as_raw_fd(), until)? {
            return Ok(None);
        }
        let (mut pid, mut time) = ([0; 4], [0; 8]);
        let gone = |error: io::Error| io::Error::new(error.kind(), format!("the service's end of the wire: {error}"));
        self.0.read_exact(&mut pid).map_err(gone)?;
        self.0.read_exact(&mut time).map_err(gone)?;
        Ok(Some(Word { pid: pid_t::from_ne_bytes(pid), time: u64::from_ne_bytes(time) }))
    }

    /// Lets the service go on.
    pub(crate) fn go(&mut self) -> io::Result<()> {
        self.0.write_all(b"g")
    }
}

/// The service's end.
pub(crate) struct Station(UnixStream);

impl Station {
    /// The wire that this process was started with; once only.
    pub(crate) fn inherited() -> Self {
        // SAFETY: whoever plays a role is started with a socket there, and nothing else uses it.
        Station(unsafe { UnixStream::from_raw_fd(WIRE) })
    }

    pub(crate) fn say(&mut self) -> io::Result<()> {
        // SAFETY: no pointers.
        let pid = unsafe { libc::getpid() };
        let word = [pid.to_ne_bytes().as_slice(), now().to_ne_bytes().as_slice()].concat();
        self.0.write_all(&word)
    }

    pub(crate) fn await_go(&mut self) -> io::Result<()> {
        self.0.read_exact(&mut [0])
    }
}
