//! The guard: the process that people see and signal, and that outlives the supervisor.
//!
//! ```text
//! guard          a subreaper; the caller's child, in the caller's group; small: it knows no configuration
//!   └ supervisor a subreaper; another name, another group: who kills the one by name or group misses the other
//!       └ service
//! ```
//!
//! It passes every signal on, stops when the service is stopped, and ends as the supervisor ends. If the supervisor dies of a
//! signal, all that was below it falls to the guard, which kills until the kernel says that nobody is left. If the guard
//! dies, the supervisor reads the end of file at once, and kills in its place. What needs more than killing (the log, the
//! report) is the caller's, with what the supervisor has told.

pub mod link;
mod split;

pub use split::{Group, Guarded, Role, fork, hand_over, outlive};

use crate::containment::Containment;
use crate::containment::cgroup::Cgroup;
use crate::containment::leftover::Leftovers;
use crate::process::reap::{Change, Left, reap};
use crate::process::signals::{SignalSource, queue, queue_no_more};
use crate::process::terminal::suspend;
use crate::process::{Pid, descriptors, memory};
use crate::signal::Signal;
use crate::supervisor::exit::Exit;
use link::{Contained, GuardEnd, Message};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a run lasts before the memory of the start is given back.
const SETTLED: Duration = Duration::from_millis(200);

/// Patience after the last death, until the supervisor has told what is in force.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many times over it is given in all, as the supervisor does.
const MOST_PATIENCE: u32 = 12;

/// How long a supervisor that has not begun may take to heed a request to stop: it may wait for its configuration.
const HEEDS_WITHIN: Duration = Duration::from_secs(1);

/// Between two looks while nobody dies, with doubling.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(500)];

/// The most dead that are taken before something else is done.
const MOST_AT_ONCE: usize = 10_000;

/// See the module.
#[derive(Debug)]
pub struct Guard {
    supervisor: Pid,
    link: GuardEnd,
    signals: SignalSource,
    tree: Containment,
    contained: Contained,
    record: (Vec<u8>, Option<OwnedFd>),
    /// Held, and never looked at.
    locks: Vec<OwnedFd>,
    /// Whether there is nothing more to hear.
    silent: bool,
    /// Whether the supervisor has told how it holds the service, which it does before it starts it.
    has_begun: bool,
    /// The first request to stop that came before that, and when it is to be heeded.
    early_stop: Option<(Instant, Signal)>,
}

/// How it ended.
#[derive(Debug)]
pub enum End {
    /// The supervisor came to its own end, with this exit code.
    Orderly(u8),
    /// The supervisor was asked to stop before it had begun, did not heed it, and was killed.
    Stopped(Signal),
    /// The supervisor was killed, and so was all that it left.
    Lost(Lost),
}

/// What is known of a supervisor that was lost, and of what it left.
#[derive(Debug)]
pub struct Lost {
    /// How it died.
    pub exit: Exit,
    /// What it had told last.
    pub record: Vec<u8>,
    /// Where the report goes, when that is a descriptor.
    pub report: Option<OwnedFd>,
    /// Who was left.
    pub leftovers: Leftovers,
    /// Whether somebody could not be ended.
    pub survivors: bool,
}

impl Guard {
    fn over(supervisor: Pid, link: GuardEnd, signals: SignalSource, mut tree: Containment) -> Guard {
        tree.guards(supervisor, false);
        let contained = Contained { own_session: false, allow_keep: false, kill_timeout: PATIENCE };
        let (record, locks) = ((vec![], None), vec![]);
        let (silent, has_begun, early_stop) = (false, false, None);
        Guard { supervisor, link, signals, tree, contained, record, locks, silent, has_begun, early_stop }
    }

    /// Watches over the supervisor to its end.
    pub fn watch(mut self) -> End {
        descriptors::release(&[self.link.as_raw_fd(), self.signals.as_raw_fd()]);
        let settles = Instant::now() + SETTLED;
        let mut is_settled = false;
        loop {
            if !is_settled && !self.sleep(Some(settles)) {
                is_settled = true;
                memory::release();
            }
            if is_settled {
                // Nothing in between, or half of what was given back would be needed for it.
                self.sleep(self.early_stop.map(|(until, _)| until));
            }
            self.pass_on_signals();
            self.listen();
            if let Some((_, signal)) = self.early_stop.take_if(|(until, _)| *until <= Instant::now()) {
                // SAFETY: our child, which is not reaped.
                unsafe { libc::kill(self.supervisor, libc::SIGKILL) };
                return End::Stopped(signal);
            }
            let (_, ended) = self.reap();
            // What was told before that end: another may be the supervisor by now.
            self.listen();
            let somebody_ended = !ended.is_empty();
            match ended.into_iter().find(|(pid, _)| *pid == self.supervisor) {
                Some((_, Exit::Code(code))) => return End::Orderly(code),
                Some((_, exit)) => return End::Lost(self.take_over(exit)),
                None if somebody_ended => self.tree.note_those_from_outside(),
                None => {}
            }
        }
    }

    fn pass_on_signals(&mut self) {
        // A flood that is not read to its end has the descriptor still readable.
        let _ = self.signals.drain(|received| {
            if ![Signal::CHLD, Signal::PIPE].contains(&received.signal) {
                queue(self.supervisor, received);
            }
            if received.signal.asks_for_a_stop() && !self.has_begun {
                self.early_stop.get_or_insert((Instant::now() + HEEDS_WITHIN, received.signal));
            }
        });
    }

    /// Until a signal or a message comes, or that moment. True when something came.
    fn sleep(&self, until: Option<Instant>) -> bool {
        let timeout = until.map_or(-1, |until| milliseconds(until.saturating_duration_since(Instant::now())));
        let readable = |descriptor| libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        let mut both = [readable(self.signals.as_raw_fd()), readable(self.link.as_raw_fd())];
        // SAFETY: as many as said. A link at its end is readable for ever.
        unsafe { libc::poll(both.as_mut_ptr(), if self.silent { 1 } else { 2 }, timeout) != 0 }
    }

    fn listen(&mut self) {
        while !self.silent
            && let Some(message) = self.link.receive()
        {
            match message {
                Message::End => self.silent = true,
                Message::Record(text, report) => self.record = (text, report.or(self.record.1.take())),
                Message::Contained(contained, cgroup) => {
                    self.contained = contained;
                    (self.has_begun, self.early_stop) = (true, None);
                    self.tree.guards(self.supervisor, contained.own_session);
                    cgroup.into_iter().for_each(|directory| self.tree.hold(Cgroup::from_descriptor(directory), false));
                    if contained.allow_keep {
                        self.tree.allow_keep();
                    }
                }
                Message::Hold(lock) => self.locks.push(lock),
                Message::Suspend(signal) => self.link.answer(suspend(signal)),
                Message::Successor(pid) => {
                    queue_no_more(self.supervisor);
                    self.supervisor = pid;
                    self.tree.guards(pid, self.contained.own_session);
                }
            }
        }
    }

    /// Takes those that are dead, the supervisor perhaps among them.
    fn reap(&mut self) -> (Left, Vec<(Pid, Exit)>) {
        let mut ended = vec![];
        loop {
            let left = reap(|change| {
                if let Change::Ended(pid, exit) = change {
                    self.tree.reaped(pid, exit);
                    ended.push((pid, exit));
                }
            });
            if left != Left::More || ended.len() > MOST_AT_ONCE {
                return (left, ended);
            }
        }
    }

    /// Kills until nobody is left.
    fn take_over(mut self, exit: Exit) -> Lost {
        self.silent = true;
        // What was told last may have come after that was noted.
        self.tree.reaped(self.supervisor, exit);
        // Who was there a moment ago may have gone.
        let survivors = !self.kill_all() && (self.tree.name_survivors() || !self.is_empty());
        if self.tree.cgroup().is_none() {
            // It may have been killed before it could tell of the one that it had just made.
            Cgroup::remove_those_of_the_dead();
        }
        let (record, report) = self.record;
        Lost { exit, record, report, leftovers: self.tree.into_leftovers(), survivors }
    }

    fn is_empty(&mut self) -> bool {
        let (left, _) = self.reap();
        self.tree.is_empty(left)
    }

    /// False when patience is at its end.
    fn kill_all(&mut self) -> bool {
        let patience = self.contained.kill_timeout;
        let at_last = far(patience.saturating_mul(MOST_PATIENCE));
        let mut until = far(patience);
        let [shortest, longest] = PAUSES;
        let mut pause = shortest;
        loop {
            // Before the dead are taken: who dies afterwards wakes us. Requests to end come too late.
            let _ = self.signals.drain(|_| {});
            let (left, died) = self.reap();
            if self.tree.is_empty(left) {
                return true;
            }
            if !died.is_empty() {
                (until, pause) = (far(patience), shortest);
            }
            if Instant::now() >= until.min(at_last) {
                return false;
            }
            self.tree.kill_tree(at_last);
            if left != Left::More {
                self.sleep(Some(Instant::now() + pause));
                pause = (pause * 2).min(longest);
            }
        }
    }
}

/// So much later; a day at the most.
fn far(later: Duration) -> Instant {
    Instant::now() + later.min(Duration::from_secs(86_400))
}

fn milliseconds(duration: Duration) -> i32 {
    // Rounded up, so as not to wake too early.
    i32::try_from(duration.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
}
