//! Our own processes below a test: guard and supervisor, and how they are killed.

use std::time::Duration;

use super::running::Running;
use super::sys;

/// The limit of the waits here.
const LIMIT: Duration = Duration::from_secs(30);

impl Running {
    /// The supervisor, in whichever containment; in a pid namespace that is its PID 1.
    pub(crate) fn inner(&mut self) -> i32 {
        let guard = self.pid();
        let mut found = None;
        sys::spin(LIMIT, || {
            let named = |pid: &i32| sys::stat(*pid).is_some_and(|stat| stat.comm == "supervisor" && stat.state != 'Z');
            // One that hands over to PID 1 of a new namespace is one no more.
            let hands_over = |pid: &i32| sys::children(*pid).iter().any(named);
            found = sys::children(guard).into_iter().find(|pid| named(pid) && !hands_over(pid));
            found.is_some()
        });
        found.unwrap_or_else(|| self.fail("there is no supervisor below the guard"))
    }

    /// Kills guard and supervisor, and neither has seen the other's death: what they have started is alone then. Sets the
    /// mark.
    pub(crate) fn kill_both(&mut self) {
        let (guard, supervisor) = (self.pid(), self.inner());
        for pid in [guard, supervisor] {
            sys::kill(pid, libc::SIGSTOP).unwrap();
            wait_state(pid, &['T']);
        }
        self.mark();
        // The guard's death would continue the supervisor; the supervisor's does not continue the guard.
        sys::kill(supervisor, libc::SIGKILL).unwrap();
        wait_state(supervisor, &['Z']);
        sys::kill(guard, libc::SIGKILL).unwrap();
        self.wait_end();
    }

    /// Waits for a process of the run with this command line; its pid as we see it.
    pub(crate) fn wait_command(&mut self, command: &str) -> i32 {
        let mut found = None;
        sys::spin(LIMIT, || {
            found = self.processes().into_iter().map(|stat| stat.pid).find(|pid| sys::command(*pid) == command);
            found.is_some()
        });
        found.unwrap_or_else(|| self.fail(&format!("nobody is {command:?}")))
    }
}

/// Waits until a process is in one of these states, or gone.
#[track_caller]
pub(crate) fn wait_state(pid: i32, wanted: &[char]) {
    let state = || sys::stat(pid).map(|stat| stat.state);
    assert!(sys::spin(LIMIT, || state().is_none_or(|now| wanted.contains(&now))), "{pid} is {:?}", state());
}

/// Whether this process has ended, reaped or not.
pub(crate) fn is_dead(pid: i32) -> bool {
    sys::stat(pid).is_none_or(|stat| stat.state == 'Z')
}
