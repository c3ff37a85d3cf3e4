//! What happens → [`Event`]s, one batch a wake-up. The loop sleeps until a descriptor is ready or the core's deadline is
//! reached; nothing else wakes it.
//!
//! The order within a batch is fixed:
//!
//! 1. *the start*: why a command could not be executed must be known before the death of the child that tried;
//! 2. *the guard*: that it was stopped is known before the SIGCONT is heard that it passes on;
//! 3. *signals*: a stop that came before an exit was noticed is told as a stop;
//! 4. *deaths*, with the word on what is left behind them, so that a service that leaves nothing costs no look for it;
//! 5. *the deadline* last: what came in time came in time.

use crate::effects::{Clock, Effects};
use crate::guard::Guarded;
use crate::process::memory;
use crate::process::reap::Left;
use crate::process::signals::SignalSource;
use crate::supervisor::{Event, Supervisor, Time, Verdict};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;
use tracing::trace;

const SIGNALS: Token = Token(0);
const START: Token = Token(1);
const GUARD: Token = Token(2);
const ENDS: Token = Token(3);

/// How long a service lives before the memory of the start is given back; nothing wakes us after that without an event or
/// a deadline of the core.
const SETTLED: Duration = Duration::from_millis(200);

/// What epoll's milliseconds hold.
const LONGEST_SLEEP: Duration = Duration::from_secs(86_400);

/// The sources.
#[derive(Debug)]
pub struct EventLoop {
    poll: Poll,
    signals: SignalSource,
    clock: Clock,
    /// When the start is behind us, until it is.
    settles: Option<Time>,
    watches_ends: bool,
}

impl EventLoop {
    /// Opens the sources. Signals that came since they were blocked are waiting in theirs.
    ///
    /// # Errors
    /// When the kernel gives no epoll or no signalfd.
    pub fn open(clock: Clock, guarded: Option<&Guarded>) -> io::Result<EventLoop> {
        let poll = Poll::new()?;
        let signals = SignalSource::open(guarded.map(|guarded| guarded.pid))?;
        poll.registry().register(&mut SourceFd(&signals.as_raw_fd()), SIGNALS, Interest::READABLE)?;
        if let Some(guarded) = guarded {
            poll.registry().register(&mut SourceFd(&guarded.link.as_raw_fd()), GUARD, Interest::READABLE)?;
        }
        Ok(EventLoop { poll, signals, clock, settles: Some(clock.now().after(SETTLED)), watches_ends: false })
    }

    /// The descriptors that must stay open.
    pub fn descriptors(&self) -> [i32; 2] {
        [self.poll.as_raw_fd(), self.signals.as_raw_fd()]
    }

    /// Runs a service, or a sweep, from its first event to its end.
    pub fn run(&mut self, first: Event, supervisor: &mut Supervisor, effects: &mut Effects) -> Verdict {
        self.hand_in(first, supervisor, effects);
        self.watch_start(effects);
        let mut ready = Events::with_capacity(4);
        let mut events = Vec::new();
        let mut more = false;
        loop {
            if let Some(verdict) = effects.verdict() {
                return verdict;
            }
            self.watch_ends(effects);
            // It fails only when interrupted, which the blocked signals leave to a debugger; the batch is made all the same.
            let patience = if more { Some(Duration::ZERO) } else { self.patience(supervisor) };
            let _ = self.poll.poll(&mut ready, patience);
            if ready.is_empty() && self.settle() {
                // Nothing in between, or half of what was given back would be needed for it.
                let _ = self.poll.poll(&mut ready, self.patience(supervisor));
            }
            more = self.batch(effects, &mut events);
            // Looked at now: what these events lead to may take its time, and who dies meanwhile has to be heard first.
            let late = supervisor.deadline().is_some_and(|deadline| deadline <= self.clock.now());
            for event in events.drain(..) {
                self.hand_in(event, supervisor, effects);
            }
            if late {
                self.hand_in(Event::Tick, supervisor, effects);
            }
        }
    }

    /// Takes what happened. True when there is more of it: a descriptor that was not read to its end does not wake us again.
    fn batch(&self, effects: &mut Effects, events: &mut Vec<Event>) -> bool {
        events.extend(effects.check_start());
        events.extend(effects.hear_guard());
        let drained = self.signals.drain(|received| events.extend(effects.signal_event(received)));
        let left = effects.reap(events);
        effects.put_in_order(events);
        left == Left::More || !drained
    }

    fn hand_in(&self, event: Event, supervisor: &mut Supervisor, effects: &mut Effects) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            trace!(?event);
            for action in supervisor.handle(self.clock.now(), event) {
                // Only a start can fail at once, and it comes alone.
                next = effects.perform(action).or(next);
            }
        }
    }

    /// Were it refused (ENOMEM), the first death or signal would make the batch that looks there.
    fn watch_start(&self, effects: &Effects) {
        if let Some(progress) = effects.progress() {
            let _ = self.poll.registry().register(&mut SourceFd(&progress.as_raw_fd()), START, Interest::READABLE);
        }
    }

    /// From the time on when they matter. Were it refused, the looks at their deadlines would see them.
    fn watch_ends(&mut self, effects: &mut Effects) {
        if !self.watches_ends
            && let Some((descriptor, interest)) = effects.more_ends()
        {
            self.watches_ends = self.poll.registry().register(&mut SourceFd(&descriptor), ENDS, interest).is_ok();
        }
    }

    /// Gives memory back, once, when the service has lived for a while: a short run does without that. True when it did.
    fn settle(&mut self) -> bool {
        let is_time = self.settles.take_if(|time| *time <= self.clock.now()).is_some();
        if is_time {
            memory::release();
        }
        is_time
    }

    /// How long to sleep at the most. Rounded up to the millisecond, in which epoll counts, so as not to wake too early.
    fn patience(&self, supervisor: &Supervisor) -> Option<Duration> {
        let deadline = [supervisor.deadline(), self.settles].into_iter().flatten().min()?;
        Some(self.clock.now().until(deadline).min(LONGEST_SLEEP))
    }
}
