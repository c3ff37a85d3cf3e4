//! DECISIONS: what to do when something happened. Pure: no I/O, no clock, no failure.
//!
//! [`Supervisor::handle`] takes the time and one [`Event`] and gives the [`Action`]s to carry out;
//! [`Supervisor::deadline`] says when to call again with [`Event::Tick`] if nothing happens before. The failure of an
//! action comes back as an event, so nothing here returns a `Result`. Whoever carries the actions out holds to this:
//!
//! * actions are carried out in their order, before the next event is handed in;
//! * after a batch in which somebody was reaped exactly one of [`Event::TreeEmpty`] and [`Event::TreeChanged`] is handed in,
//!   last;
//! * [`Event::TreeEmpty`] is said only when it is proven (see `containment`).
//!
//! What this module must not do: read a clock, touch a process, a file or a descriptor, or know how any of that is
//! done. `tests/it/house.rs` greps for it.

pub mod exit;
#[cfg(test)]
mod invariants;
#[cfg(test)]
mod scripts;
mod service;
#[cfg(test)]
mod world;

use crate::signal::Signal;
use exit::Exit;
use service::State;
use std::time::Duration;

/// Time since the start of the program. A newtype so that a test can write it down, and so that no wall clock can get
/// into a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub Duration);

impl Time {
    /// This much later; the end of time when that is beyond what can be counted.
    #[must_use]
    pub fn after(self, delay: Duration) -> Time {
        Time(self.0.saturating_add(delay))
    }

    /// How long it is until `later`; nothing when that has passed.
    pub fn until(self, later: Time) -> Duration {
        later.0.saturating_sub(self.0)
    }
}

/// What may be asked of the decisions: signals and times of the ladder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// What a run that is over its time, or TERM, sends to the service.
    pub stop_signal: Signal,
    /// Who gets the stop signal.
    pub stop_target: Target,
    /// From the stop signal to SIGKILL of the main process.
    pub stop_timeout: Duration,
    /// From SIGTERM to SIGKILL of the leftovers.
    pub leftover_timeout: Duration,
    /// From SIGKILL to the end of patience.
    pub kill_timeout: Duration,
    /// The longest a whole run may take.
    pub run_timeout: Option<Duration>,
    /// Whether a shell above may stop and continue us together with the service.
    pub job_control: bool,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The service is wanted.
    Start,
    /// What earlier invocations left is to be ended, and nothing is to be started: the tree is theirs.
    Sweep,
    /// The main process executes the command.
    Started,
    /// There is no main process: it could not be made, or could not execute the command.
    StartFailed,
    /// The main process ended.
    Exited(Exit),
    /// The main process was stopped (SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU), not ended.
    MainStopped,
    /// A signal came in: `received` as it came, `wanted` as the service is to get it.
    Signal {
        /// The signal that we received.
        received: Signal,
        /// What the operator's map makes of it.
        wanted: Signal,
    },
    /// Something in the tree ended, and something is left.
    TreeChanged,
    /// It is proven that nothing is left.
    TreeEmpty,
    /// It was taken down by name who is left; or nobody was found, and still it is not proven that nobody is.
    SurvivorsNamed,
    /// The guard above us is gone: nobody will end what we leave.
    GuardLost,
    /// The deadline may have passed.
    Tick,
}

/// Who gets a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The main process alone.
    Main,
    /// The main process and its process group.
    Group,
    /// The main process and all its descendants.
    Tree,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start the main process.
    Spawn,
    /// Send a signal; nothing when there is nobody to get it.
    Signal(Target, Signal),
    /// Stop ourselves as the service is stopped, until SIGCONT.
    Suspend,
    /// Let the service go on, in the foreground if that is where we are.
    Resume,
    /// Look for leftovers; send SIGTERM, then SIGCONT, to each that has not had it yet. Break off at this time.
    TerminateLeftovers(Time),
    /// Look for what is left of the tree; send SIGKILL to all of it. Break off at this time.
    KillTree(Time),
    /// Take down by name what is left of the tree, and say so; or look again, when nobody is found.
    NameSurvivors,
    /// The end of the program.
    End(Verdict),
}

/// How the run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// How the main process ended; nothing when it never ran the command, or could not be ended.
    pub exit: Option<Exit>,
    /// Whether the command was executed.
    pub started: bool,
    /// The signal that asked for the stop, if one did before the main process ended.
    pub stop: Option<Signal>,
    /// Whether the run was over its time.
    pub timed_out: bool,
    /// Whether the guard was lost, and the run was ended for that.
    pub guard_lost: bool,
    /// Whether something could not be ended.
    pub survivors: bool,
}

impl Verdict {
    /// Whether, after a sweep, the service may be started: nothing is left, and nobody wants an end.
    pub fn permits_a_start(&self) -> bool {
        !self.survivors && !self.guard_lost && self.stop.is_none()
    }
}

/// The decisions about one service.
#[derive(Debug)]
pub struct Supervisor {
    policy: Policy,
    state: State,
    verdict: Verdict,
    /// When the first stop signal came.
    stop_asked_at: Option<Time>,
    /// When the run is over its time.
    run_ends: Option<Time>,
    /// Whether a stop of ourselves was asked for from outside.
    suspend_asked: bool,
    /// Whether there is no service, but what others left.
    sweeping: bool,
}

impl Supervisor {
    /// A supervisor whose service is down.
    pub fn new(policy: Policy) -> Supervisor {
        let verdict = Verdict::default();
        Supervisor {
            policy,
            state: State::Down,
            verdict,
            stop_asked_at: None,
            run_ends: None,
            suspend_asked: false,
            sweeping: false,
        }
    }

    /// When to hand in [`Event::Tick`] if no event comes before; `None`: never.
    pub fn deadline(&self) -> Option<Time> {
        if self.state.is_wanted_up() { self.run_ends } else { self.state.deadline() }
    }
}
