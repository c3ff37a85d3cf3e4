//! What the harness and the warden tell each other.
//!
//! One JSON value a line over a Unix stream socket; descriptors travel with the line they belong to.
#![allow(dead_code, reason = "each end uses its half")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Where the program under test runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Space {
    #[default]
    Ours,
    /// PID 1 of a namespace, with its own /proc.
    PidOne,
    /// PID 1, and no /proc is mounted.
    PidOneWithoutProc,
    /// PID 1, and /proc shows the pids of the outer namespace.
    PidOneWithOuterProc,
}

/// A tmpfs only the program under test and its tree see.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Tmpfs {
    pub(crate) path: String,
    /// Written full before the program starts.
    pub(crate) full: bool,
}

/// One BPF instruction.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Op {
    pub(crate) code: u16,
    pub(crate) jt: u8,
    pub(crate) jf: u8,
    pub(crate) k: u32,
}

/// The first line, to the warden. The descriptors for `fds` come with it, in the same order.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Launch {
    pub(crate) argv: Vec<String>,
    pub(crate) argv0: Option<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) cwd: String,
    /// Numbers the program finds its descriptors at; all others are closed.
    pub(crate) fds: Vec<RawFd>,
    pub(crate) ignored: Vec<i32>,
    pub(crate) blocked: Vec<i32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) umask: Option<u32>,
    pub(crate) rlimits: Vec<(u32, u64, u64)>,
    pub(crate) seccomp: Vec<Op>,
    pub(crate) space: Space,
    pub(crate) tmpfs: Vec<Tmpfs>,
    /// The number (one of `fds`) of the terminal that becomes the controlling one.
    pub(crate) terminal: Option<RawFd>,
    /// Send this signal so many microseconds after the exec.
    pub(crate) signal_at: Option<(u64, i32)>,
    /// At the end, kill all that runs as this uid.
    pub(crate) bomb_uid: Option<u32>,
}

/// To the warden, later.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Answer `Settled` when nothing is left, or after so many milliseconds.
    Settle(u64),
    /// End what is left and answer `Cleared`.
    Clear,
    /// The terminal to the program, then SIGCONT.
    Foreground,
    /// SIGCONT, and the terminal stays the shell's.
    Background,
    /// The terminal to the shell.
    Reclaim,
    /// Start this command in the program's namespaces, from outside; answer `Entered`.
    Enter { argv: Vec<String>, env: Vec<(String, String)> },
}

/// A process alive below the warden after the program ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Left {
    pub(crate) pid: i32,
    pub(crate) ppid: i32,
    pub(crate) pgid: i32,
    pub(crate) sid: i32,
    pub(crate) state: char,
    pub(crate) comm: String,
    pub(crate) command: String,
}

/// From the warden. Times are microseconds of CLOCK_MONOTONIC.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    /// With a pidfd.
    Started {
        pid: i32,
        at: u64,
    },
    Failed {
        what: String,
    },
    Signalled {
        at: u64,
    },
    Stopped {
        signal: i32,
        foreground: i32,
    },
    Continued,
    HungUp,
    Ended {
        code: Option<i32>,
        signal: Option<i32>,
        foreground: i32,
        fell: u32,
        at: u64,
        empty: bool,
        left: Vec<Left>,
    },
    Settled {
        empty: bool,
        left: Vec<Left>,
        at: u64,
    },
    Cleared {
        empty: bool,
    },
    Entered {
        pid: i32,
    },
}

/// One end of the socket.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: OwnedFd,
    bytes: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Wire {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, bytes: Vec::new(), fds: VecDeque::new() }
    }

    /// Both ends.
    pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
        let mut ends = [0; 2];
        // SAFETY: `ends` has room for the two descriptors.
        let done =
            unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0, ends.as_mut_ptr()) };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: both are new and nobody else's.
        Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub(crate) fn send<T: Serialize>(&self, value: &T, fds: &[RawFd]) -> io::Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        let mut sent = self.send_some(&line, fds)?;
        while sent < line.len() {
            sent += self.send_some(&line[sent..], &[])?;
        }
        Ok(())
    }

    fn send_some(&self, bytes: &[u8], fds: &[RawFd]) -> io::Result<usize> {
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = [0_u64; 256];
        // SAFETY: all zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !fds.is_empty() {
            let size = u32::try_from(size_of_val(fds)).map_err(io::Error::other)?;
            message.msg_control = control.as_mut_ptr().cast();
            // SAFETY: the control buffer is aligned and longer than CMSG_SPACE of at most 253 descriptors.
            unsafe {
                message.msg_controllen = libc::CMSG_SPACE(size) as usize;
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(size) as usize;
                std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast(), fds.len());
            }
        }
        // SAFETY: the message points to live buffers.
        let sent = unsafe { libc::sendmsg(self.fd(), &raw const message, libc::MSG_NOSIGNAL) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Reads what is there, waiting for it unless `flags` says MSG_DONTWAIT; false at the end of the other side.
    pub(crate) fn read(&mut self, flags: i32) -> io::Result<bool> {
        let mut buffer = [0_u8; 65536];
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut control = [0_u64; 256];
        // SAFETY: all zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: the message points to live buffers.
        let got = unsafe { libc::recvmsg(self.fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
        let Ok(got) = usize::try_from(got) else {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(true),
                Some(libc::ECONNRESET) => Ok(false),
                _ => Err(error),
            };
        };
        self.bytes.extend_from_slice(&buffer[..got]);
        // SAFETY: the kernel filled the control buffer; the descriptors in it are new and ours.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&raw const message);
            while !header.is_null() {
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                let size = (*header).cmsg_len - libc::CMSG_LEN(0) as usize;
                for i in 0..size / size_of::<RawFd>() {
                    self.fds.push_back(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
        }
        Ok(got > 0)
    }

    /// The next whole line that was read.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Option<T> {
        let end = self.bytes.iter().position(|b| *b == b'\n')?;
        let line: Vec<u8> = self.bytes.drain(..=end).collect();
        Some(serde_json::from_slice(&line).unwrap_or_else(|e| panic!("{e} in {}", String::from_utf8_lossy(&line))))
    }

    /// The next descriptor that came.
    pub(crate) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.fds.pop_front()
    }
}
