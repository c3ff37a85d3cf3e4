//! The states of a service and what leads from one to the next.
//!
//! ```text
//! Down ─Sweep→ Emptying (what earlier invocations left) ─TreeEmpty→ Down
//! Down ─Start→ Starting ─Started→ Up ─Exited→ Emptying ─TreeEmpty→ Down
//!                  │               └─stop, over time→ Stopping ─Exited→ ┘
//!                  └─StartFailed, Exited→ Emptying
//! ```
//!
//! The theory: the main process going away ends nothing. Every way leads through `Emptying`, and `Emptying` is left on
//! one of two events only: the tree is proven empty, or the last deadline has passed and the survivors are named.
//! There is one `match` on state and event and it has no wildcard, so that a new state or event does not compile
//! before each pair was thought of.

use super::exit::Exit;
use super::{Action, Event, Supervisor, Target, Time};
use crate::signal::Signal;
use std::time::Duration;

/// A second request this long after the first means it. A burst (one Ctrl-C and a TERM of the manager; a whole control
/// group that gets the same signal) is one request.
const SECOND_REQUEST_AFTER: Duration = Duration::from_secs(1);

/// Two looks for newborns are at least this far apart, so that a slow death of many is not a walk for each.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// As long as the last look took they are apart, too, up to this: looking must leave time for dying.
const LONGEST_LOOK: Duration = Duration::from_millis(100);

/// How many times over the kill timeout is given while the killing gets on: the dead of a large tree, or of a fork bomb, are
/// a long time in going, and a chain of processes that fork and exit dies without end.
const MOST_PATIENCE: u32 = 12;

/// The longest pause between two looks: a newborn below a leftover that goes on tells nobody of its birth, so with
/// doubling pauses we look.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not running.
    Down,
    /// The main process was made and has not executed the command yet.
    Starting,
    /// The main process runs.
    Up,
    /// The main process was asked to end.
    Stopping { until: Time, killed: bool },
    /// The main process ended, or was given up; the rest is being ended.
    Emptying { rung: Rung, until: Time, looked: Time, look_at: Time, pause: Duration },
}

/// How the leftovers are asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rung {
    Terminate,
    /// Patience begins anew with each death, but is at an end at last.
    Kill {
        at_last: Time,
    },
}

impl State {
    pub(super) fn is_wanted_up(self) -> bool {
        match self {
            State::Starting | State::Up => true,
            State::Down | State::Stopping { .. } | State::Emptying { .. } => false,
        }
    }

    pub(super) fn deadline(self) -> Option<Time> {
        match self {
            State::Down | State::Starting | State::Up => None,
            State::Stopping { until, .. } => Some(until),
            State::Emptying { until, look_at, .. } => Some(until.min(look_at)),
        }
    }
}

impl Supervisor {
    /// Takes one event and says what is to be done about it.
    #[must_use]
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Action> {
        use State::{Down, Emptying, Starting, Stopping, Up};
        match (self.state, event) {
            (Down, Event::Start) => self.start(now),
            (Down, Event::Sweep) => self.sweep(now),

            (Starting, Event::Started) => {
                self.verdict.started = true;
                self.state = Up;
                vec![]
            }
            (Stopping { .. } | Emptying { .. }, Event::Started) => {
                self.verdict.started = true;
                vec![]
            }
            (Starting | Stopping { .. }, Event::StartFailed) => self.empty(now),

            (Starting | Up | Stopping { .. }, Event::Exited(exit)) => {
                self.ended(exit);
                self.empty(now)
            }
            (Emptying { .. }, Event::Exited(exit)) => {
                self.ended(exit);
                vec![]
            }

            (Starting | Up, Event::Signal { received, wanted }) => self.signal(now, received, wanted),
            (Stopping { .. }, Event::Signal { received, wanted }) => self.signal_while_stopping(now, received, wanted),
            (Emptying { .. }, Event::Signal { received, wanted }) => self.signal_while_emptying(now, received, wanted),

            // Before the command is executed, too: the key reaches what will be the service.
            (Starting | Up, Event::MainStopped) => self.suspend(),

            (Starting | Up, Event::Tick) => self.check_run_time(now),
            (Stopping { until, killed }, Event::Tick) => self.check_stop(now, until, killed),
            (Emptying { .. }, Event::Tick) => self.advance(now),

            (Emptying { .. }, Event::TreeChanged) => {
                self.note_death(now);
                self.advance(now)
            }
            (Emptying { .. }, Event::TreeEmpty) => self.end(),
            (Emptying { rung: Rung::Kill { .. }, .. }, Event::SurvivorsNamed) => {
                self.verdict.survivors = true;
                self.end()
            }

            (Starting | Up | Stopping { .. } | Emptying { .. }, Event::GuardLost) => self.guard_lost(now),

            // The end is behind us, or nothing was begun.
            (Down, Event::Started | Event::StartFailed | Event::Exited(_) | Event::MainStopped) => vec![],
            (Down, Event::Signal { .. } | Event::TreeChanged | Event::TreeEmpty) => vec![],
            (Down, Event::SurvivorsNamed | Event::GuardLost | Event::Tick) => vec![],
            // One service has one invocation at a time.
            (Starting | Up | Stopping { .. } | Emptying { .. }, Event::Start | Event::Sweep) => vec![],
            (Up | Emptying { .. }, Event::StartFailed) | (Up, Event::Started) => vec![],
            // Orphans of a running service come and go.
            (Starting | Up | Stopping { .. }, Event::TreeChanged | Event::TreeEmpty) => vec![],
            // Nobody asked for it.
            (Starting | Up | Stopping { .. } | Emptying { rung: Rung::Terminate, .. }, Event::SurvivorsNamed) => vec![],
            // The way out is not held up: its deadlines go on.
            (Stopping { .. } | Emptying { .. }, Event::MainStopped) => vec![],
        }
    }

    fn start(&mut self, now: Time) -> Vec<Action> {
        self.run_ends = self.policy.run_timeout.map(|limit| now.after(limit));
        self.state = State::Starting;
        vec![Action::Spawn]
    }

    /// The end of a run that never was: the ladder for what others left, from its second rung on.
    fn sweep(&mut self, now: Time) -> Vec<Action> {
        self.sweeping = true;
        self.empty(now);
        // At once: a look at everybody on a busy machine may take all the time that they are given.
        self.advance(now)
    }

    fn ended(&mut self, exit: Exit) {
        self.verdict.exit.get_or_insert(exit);
    }

    fn signal(&mut self, now: Time, received: Signal, wanted: Signal) -> Vec<Action> {
        if is_a_stop(received, wanted) {
            return self.stop(now, received, self.passed_on(received, wanted));
        }
        self.forward(wanted)
    }

    /// TERM means "stop", in the way this service is stopped; everything else is passed on as itself.
    fn passed_on(&self, received: Signal, wanted: Signal) -> Signal {
        if received == Signal::TERM && wanted == Signal::TERM { self.policy.stop_signal } else { wanted }
    }

    fn forward(&mut self, signal: Signal) -> Vec<Action> {
        if signal == Signal::CONT {
            self.suspend_asked = false;
            return vec![Action::Resume];
        }
        if !signal.stops_a_process() {
            return vec![Action::Signal(Target::Main, signal)];
        }
        self.suspend_asked = true;
        // In a session of its own the service's group is orphaned, and the kernel drops all but SIGSTOP.
        let stop = if self.policy.job_control { signal } else { Signal::STOP };
        vec![Action::Signal(Target::Group, stop)]
    }

    fn suspend(&mut self) -> Vec<Action> {
        let with_us = self.policy.job_control || self.suspend_asked;
        self.suspend_asked = false;
        if with_us { vec![Action::Suspend] } else { vec![] }
    }

    fn stop(&mut self, now: Time, received: Signal, signal: Signal) -> Vec<Action> {
        self.verdict.stop = Some(received);
        self.stop_asked_at = Some(now);
        self.stop_with(now, signal)
    }

    fn stop_with(&mut self, now: Time, signal: Signal) -> Vec<Action> {
        self.state = State::Stopping { until: now.after(self.policy.stop_timeout), killed: false };
        let target = self.policy.stop_target;
        // A stopped process takes the signal only when it goes on.
        vec![Action::Signal(target, signal), Action::Signal(target, Signal::CONT)]
    }

    fn check_run_time(&mut self, now: Time) -> Vec<Action> {
        if self.run_ends.is_none_or(|ends| now < ends) {
            return vec![];
        }
        self.verdict.timed_out = true;
        self.stop_with(now, self.policy.stop_signal)
    }

    fn signal_while_stopping(&mut self, now: Time, received: Signal, wanted: Signal) -> Vec<Action> {
        if is_a_stop(received, wanted) {
            self.verdict.stop.get_or_insert(received);
            return if self.is_second_request(now) { self.kill(now) } else { vec![] };
        }
        // Stopped, it could not do what it was asked for.
        if wanted.stops_a_process() { vec![] } else { self.forward(wanted) }
    }

    /// Nobody would end what we leave if we were killed next, so there is no time to ask.
    fn guard_lost(&mut self, now: Time) -> Vec<Action> {
        self.verdict.guard_lost = true;
        let is_killing = matches!(self.state, State::Emptying { rung: Rung::Kill { .. }, .. });
        if is_killing { vec![] } else { self.kill(now) }
    }

    fn signal_while_emptying(&mut self, now: Time, received: Signal, wanted: Signal) -> Vec<Action> {
        let State::Emptying { rung, .. } = self.state else { return vec![] };
        if self.sweeping && (is_a_stop(received, wanted) || received == Signal::HUP) {
            // Nothing is to be started after this. (A hang-up ends who makes nothing of it, and there is no service that could.)
            self.verdict.stop.get_or_insert(received);
        }
        let impatient = is_a_stop(received, wanted) && self.is_second_request(now);
        if impatient && rung == Rung::Terminate { self.kill(now) } else { vec![] }
    }

    /// Notes the first request, and says whether this one is a second.
    fn is_second_request(&mut self, now: Time) -> bool {
        let first = *self.stop_asked_at.get_or_insert(now);
        first.until(now) >= SECOND_REQUEST_AFTER
    }

    fn check_stop(&mut self, now: Time, until: Time, killed: bool) -> Vec<Action> {
        if now < until {
            return vec![];
        }
        if killed {
            // SIGKILL did not end it: see to the others, who may still do as they are asked, and name it in the end.
            self.empty(now);
            return self.advance(now);
        }
        self.state = State::Stopping { until: now.after(self.policy.kill_timeout), killed: true };
        vec![Action::Signal(Target::Main, Signal::KILL)]
    }

    /// The main process is gone. Whether anything is left is said by the event that closes this batch of reaping, so
    /// that a service that leaves nothing costs no look.
    fn empty(&mut self, now: Time) -> Vec<Action> {
        self.state = State::Emptying {
            rung: Rung::Terminate,
            until: now.after(self.policy.leftover_timeout),
            looked: now,
            look_at: now,
            pause: SHORTEST_PAUSE,
        };
        vec![]
    }

    fn kill(&mut self, now: Time) -> Vec<Action> {
        let patience = self.policy.kill_timeout;
        let at_last = now.after(patience.saturating_mul(MOST_PATIENCE));
        self.state = State::Emptying {
            rung: Rung::Kill { at_last },
            until: now.after(patience),
            looked: now,
            look_at: now.after(SHORTEST_PAUSE),
            pause: SHORTEST_PAUSE,
        };
        // A pass over a fork bomb is not broken off while it finds more to kill: reaping in between would make room for it.
        vec![Action::KillTree(at_last)]
    }

    /// A death may have brought orphans: the next look is due soon, when killing at once.
    fn note_death(&mut self, now: Time) {
        let patience = now.after(self.policy.kill_timeout);
        if let State::Emptying { rung, until, looked, look_at, .. } = &mut self.state {
            match *rung {
                Rung::Terminate => {
                    let pause = looked.until(now).clamp(SHORTEST_PAUSE, LONGEST_LOOK);
                    *look_at = now.after(pause).min(*look_at);
                }
                Rung::Kill { at_last } => {
                    *look_at = now;
                    *until = patience.min(at_last);
                }
            }
        }
    }

    /// The next rung, or the next look, if it is time for one.
    fn advance(&mut self, now: Time) -> Vec<Action> {
        let State::Emptying { rung, until, look_at, pause, .. } = self.state else { return vec![] };
        if now >= until {
            return match rung {
                Rung::Terminate => self.kill(now),
                Rung::Kill { .. } => vec![Action::NameSurvivors],
            };
        }
        if now < look_at {
            return vec![];
        }
        let next = pause.saturating_mul(2).min(LONGEST_PAUSE);
        self.state = State::Emptying { rung, until, looked: now, look_at: now.after(pause), pause: next };
        match rung {
            Rung::Terminate => vec![Action::TerminateLeftovers(until)],
            Rung::Kill { at_last } => vec![Action::KillTree(at_last)],
        }
    }

    fn end(&mut self) -> Vec<Action> {
        self.state = State::Down;
        vec![Action::End(self.verdict)]
    }
}

fn is_a_stop(received: Signal, wanted: Signal) -> bool {
    received.asks_for_a_stop() || wanted.asks_for_a_stop()
}
