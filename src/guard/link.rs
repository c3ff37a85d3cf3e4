//! What the supervisor and its guard say to each other: one datagram a message, over a pair of sockets that nobody else has.
//!
//! The end of the pair is a message, too: the kernel closes it with the last process that has it, so the supervisor learns of
//! its guard's death at once. (The guard learns of the supervisor's by waiting.) Signals do not go this way, see
//! [`signals::queue`](crate::process::signals::queue).

use crate::process::Pid;
use crate::signal::Signal;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recv, recvmsg, sendmsg,
    socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// The longest message, in bytes. A record is made to fit.
pub const LONGEST: usize = 32 * 1024;

const RECORD: u8 = b'R';
const CONTAINED: u8 = b'C';
const HOLD: u8 = b'H';
const SUSPEND: u8 = b'S';
const SUCCESSOR: u8 = b'X';
const NO_EFFECT: u8 = b'0';
const WAS_STOPPED: u8 = b'1';

/// What the guard is told.
#[derive(Debug)]
pub enum Message {
    /// All that the report needs if the supervisor is lost, and where to write it when that is a descriptor. The last one
    /// counts.
    Record(Vec<u8>, Option<OwnedFd>),
    /// How the service is contained.
    Contained(Contained, Option<OwnedFd>),
    /// To be held open as long as the guard lives: a lock.
    Hold(OwnedFd),
    /// The service was stopped: stop as well, so that a shell sees it.
    Suspend(Signal),
    /// Another process is the supervisor from now on.
    Successor(Pid),
    /// Nobody has the other end any more.
    End,
}

/// What the guard needs to know to end the tree in the supervisor's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contained {
    /// Whether the service has a session of its own.
    pub own_session: bool,
    /// Whether kept processes are to be left alone.
    pub allow_keep: bool,
    /// From SIGKILL, and from each death after it, to the end of patience.
    pub kill_timeout: Duration,
}

/// What the supervisor is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The guard was stopped, and goes on: so is the service to go on.
    WasStopped,
    /// The guard could not be stopped: there is no shell that would continue it.
    NoEffect,
    /// There is no guard any more.
    Lost,
}

/// The supervisor's end.
#[derive(Debug)]
pub struct Link(OwnedFd);

/// The guard's end.
#[derive(Debug)]
pub struct GuardEnd(OwnedFd);

/// Both ends.
///
/// # Errors
/// When the kernel has no more descriptors, or a filter refuses the call.
pub fn pair() -> io::Result<(GuardEnd, Link)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (guard, supervisor) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    Ok((GuardEnd(guard), Link(supervisor)))
}

impl Link {
    /// Tells the guard what to report. What does not fit, or finds the guard stopped and its queue full, is not told.
    pub fn record(&self, text: &[u8], report: Option<BorrowedFd<'_>>) {
        self.say(RECORD, text, report);
    }

    /// Tells the guard how the service is contained, and by which cgroup.
    pub fn contained(&self, contained: Contained, cgroup: Option<BorrowedFd<'_>>) {
        let flags = [u8::from(contained.own_session), u8::from(contained.allow_keep)];
        let kill_timeout = u64::try_from(contained.kill_timeout.as_millis()).unwrap_or(u64::MAX).to_ne_bytes();
        self.say(CONTAINED, &[&flags[..], &kill_timeout].concat(), cgroup);
    }

    /// Gives the guard a share in a lock.
    pub fn hold(&self, lock: BorrowedFd<'_>) {
        self.say(HOLD, &[], Some(lock));
    }

    /// Asks the guard to stop as the service was stopped. Answered when it goes on, or when that had no effect.
    pub fn suspend(&self, signal: Signal) {
        self.say(SUSPEND, &signal.number().to_ne_bytes(), None);
    }

    /// Tells the guard that this child of ours takes our place.
    pub fn successor(&self, pid: Pid) {
        self.say(SUCCESSOR, &pid.to_ne_bytes(), None);
    }

    fn say(&self, kind: u8, text: &[u8], descriptor: Option<BorrowedFd<'_>>) {
        if text.len() < LONGEST {
            send(&self.0, kind, text, descriptor);
        }
    }

    /// What the guard has said since.
    pub fn answer(&self) -> Option<Answer> {
        let mut byte = [0];
        match nix::unistd::read(&self.0, &mut byte) {
            Ok(1) if byte == [WAS_STOPPED] => Some(Answer::WasStopped),
            Ok(1) => Some(Answer::NoEffect),
            Err(Errno::EAGAIN | Errno::EINTR) => None,
            Ok(_) | Err(_) => Some(Answer::Lost),
        }
    }
}

impl GuardEnd {
    /// The next message, if there is one. What cannot be heard, as a filter has it, is heard no more.
    pub fn receive(&self) -> Option<Message> {
        match self.try_receive() {
            Ok(message) => message,
            Err(Errno::EAGAIN | Errno::EINTR) => None,
            Err(_) => Some(Message::End),
        }
    }

    fn try_receive(&self) -> nix::Result<Option<Message>> {
        // The length first: a buffer for the longest would be touched for each.
        let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC;
        let length = recv(self.0.as_raw_fd(), &mut [], peek)?;
        let mut text = vec![0; length];
        let mut space = nix::cmsg_space!(RawFd);
        let mut parts = [IoSliceMut::new(&mut text)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let received = recvmsg::<()>(self.0.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
        let length = received.bytes;
        if length == 0 {
            return Ok(Some(Message::End));
        }
        let mut descriptor = None;
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(descriptors) = message {
                // SAFETY: the kernel has just made them for us.
                descriptor = descriptors.into_iter().map(|new| unsafe { OwnedFd::from_raw_fd(new) }).next();
            }
        }
        text.truncate(length);
        Ok(decode(&text, descriptor))
    }

    /// Says whether the stop that was asked for had an effect. If it had, SIGCONT is behind us, and taken.
    pub fn answer(&self, was_stopped: bool) {
        send(&self.0, if was_stopped { WAS_STOPPED } else { NO_EFFECT }, &[], None);
    }
}

fn decode(text: &[u8], descriptor: Option<OwnedFd>) -> Option<Message> {
    let (kind, text) = text.split_first()?;
    let number = || text.first_chunk().map(|bytes| i32::from_ne_bytes(*bytes));
    match *kind {
        RECORD => Some(Message::Record(text.to_vec(), descriptor)),
        CONTAINED => {
            let (flags, kill_timeout) = text.split_first_chunk()?;
            let [own_session, allow_keep] = flags.map(|byte: u8| byte != 0);
            let kill_timeout = Duration::from_millis(u64::from_ne_bytes(*kill_timeout.first_chunk()?));
            Some(Message::Contained(Contained { own_session, allow_keep, kill_timeout }, descriptor))
        }
        HOLD => descriptor.map(Message::Hold),
        SUSPEND => Signal::from_number(number()?).map(Message::Suspend),
        SUCCESSOR => number().map(Message::Successor),
        _ => None,
    }
}

/// Never waits: both ends are non-blocking. It fails when the other is gone, of which waiting or the end of file tells.
fn send(socket: &OwnedFd, kind: u8, text: &[u8], descriptor: Option<BorrowedFd<'_>>) {
    let parts = [IoSlice::new(std::slice::from_ref(&kind)), IoSlice::new(text)];
    let descriptors: Vec<RawFd> = descriptor.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let rights: &[ControlMessage<'_>] = if descriptors.is_empty() { &[] } else { &rights };
    let _ = sendmsg::<()>(socket.as_raw_fd(), &parts, rights, MsgFlags::MSG_NOSIGNAL, None);
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsRawFd for GuardEnd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn what_is_said_is_what_is_heard_in_its_order() {
        let (guard, supervisor) = pair().unwrap();
        let (_reader, writer) = nix::unistd::pipe().unwrap();
        let contained = Contained { own_session: true, allow_keep: false, kill_timeout: Duration::from_millis(1500) };
        supervisor.contained(contained, None);
        supervisor.record(b"one", Some(writer.as_fd()));
        supervisor.suspend(Signal::TSTP);
        supervisor.successor(77);
        supervisor.hold(writer.as_fd());
        let Some(Message::Contained(told, None)) = guard.receive() else { panic!() };
        assert_eq!(told, contained);
        assert!(matches!(guard.receive(), Some(Message::Record(text, Some(_))) if text == b"one"));
        assert!(matches!(guard.receive(), Some(Message::Suspend(Signal::TSTP))));
        assert!(matches!(guard.receive(), Some(Message::Successor(77))));
        assert!(matches!(guard.receive(), Some(Message::Hold(_))));
        assert!(guard.receive().is_none());
        drop(supervisor);
        assert!(matches!(guard.receive(), Some(Message::End)));
    }

    #[test]
    fn a_message_that_is_too_long_is_not_told_in_parts() {
        let (guard, supervisor) = pair().unwrap();
        supervisor.record(&vec![b'x'; LONGEST], None);
        assert!(guard.receive().is_none());
        supervisor.record(&vec![b'x'; LONGEST - 1], None);
        assert!(matches!(guard.receive(), Some(Message::Record(text, None)) if text.len() == LONGEST - 1));
    }

    #[test]
    fn the_end_of_one_is_told_to_the_other() {
        let (guard, supervisor) = pair().unwrap();
        assert_eq!(supervisor.answer(), None);
        guard.answer(false);
        guard.answer(true);
        drop(guard);
        assert_eq!(supervisor.answer(), Some(Answer::NoEffect));
        assert_eq!(supervisor.answer(), Some(Answer::WasStopped));
        assert_eq!(supervisor.answer(), Some(Answer::Lost));
    }
}
