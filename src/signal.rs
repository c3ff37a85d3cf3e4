//! The name of a signal: every number the kernel knows, real-time ones included.
//!
//! `nix::Signal` has no real-time signals, so the whole program speaks in [`Signal`]. It is a name only; nothing
//! here sends or receives one.

use std::fmt;
use std::str::FromStr;

/// A signal by number, 1 to `SIGRTMAX` (64 on Linux).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Signal(i32);

impl Signal {
    /// Hang-up.
    pub const HUP: Signal = Signal(libc::SIGHUP);
    /// Interrupt, what Ctrl-C sends.
    pub const INT: Signal = Signal(libc::SIGINT);
    /// Quit, what Ctrl-\ sends.
    pub const QUIT: Signal = Signal(libc::SIGQUIT);
    /// The end that can be neither caught nor ignored.
    pub const KILL: Signal = Signal(libc::SIGKILL);
    /// The polite request to end.
    pub const TERM: Signal = Signal(libc::SIGTERM);
    /// Go on after a stop.
    pub const CONT: Signal = Signal(libc::SIGCONT);
    /// The stop that can be neither caught nor ignored.
    pub const STOP: Signal = Signal(libc::SIGSTOP);
    /// The stop that Ctrl-Z sends.
    pub const TSTP: Signal = Signal(libc::SIGTSTP);
    /// A direct child changed its state.
    pub const CHLD: Signal = Signal(libc::SIGCHLD);
    /// A pipe without a reader.
    pub const PIPE: Signal = Signal(libc::SIGPIPE);
    /// A read from the terminal in the background.
    pub const TTIN: Signal = Signal(libc::SIGTTIN);
    /// A write to the terminal in the background.
    pub const TTOU: Signal = Signal(libc::SIGTTOU);

    /// The signal with this number, if the kernel has one.
    pub fn from_number(number: i32) -> Option<Signal> {
        (1..=libc::SIGRTMAX()).contains(&number).then_some(Signal(number))
    }

    /// Its number, as `kill -l` prints it.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// True for the signals that ask for a stop: TERM, INT and QUIT.
    pub fn asks_for_a_stop(self) -> bool {
        [Signal::TERM, Signal::INT, Signal::QUIT].contains(&self)
    }

    /// True for the signals whose default is to stop the process.
    pub fn stops_a_process(self) -> bool {
        [Signal::STOP, Signal::TSTP, Signal::TTIN, Signal::TTOU].contains(&self)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Ok(named) = nix::sys::signal::Signal::try_from(self.0) {
            return f.write_str(named.as_str());
        }
        match self.0 - libc::SIGRTMIN() {
            0 => f.write_str("SIGRTMIN"),
            above if above > 0 => write!(f, "SIGRTMIN+{above}"),
            // 32 and 33 belong to the C library.
            _ => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What was written is no signal.
#[derive(Debug, PartialEq, Eq)]
pub struct NotASignal(String);

impl fmt::Display for NotASignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a signal; write a name such as \"TERM\" or \"SIGTERM\", \"SIGRTMIN+3\", or a number from 1 to {}",
            self.0,
            libc::SIGRTMAX()
        )
    }
}

impl std::error::Error for NotASignal {}

impl FromStr for Signal {
    type Err = NotASignal;

    fn from_str(text: &str) -> Result<Signal, NotASignal> {
        parse(text).ok_or_else(|| NotASignal(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Signal> {
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return Signal::from_number(text.parse().ok()?);
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some(offset) = name.strip_prefix("RTMIN") {
        return real_time(libc::SIGRTMIN(), offset, '+', 1);
    }
    if let Some(offset) = name.strip_prefix("RTMAX") {
        return real_time(libc::SIGRTMAX(), offset, '-', -1);
    }
    let named = nix::sys::signal::Signal::from_str(&format!("SIG{name}")).ok()?;
    Some(Signal(named as i32))
}

fn real_time(base: i32, offset: &str, sign: char, direction: i32) -> Option<Signal> {
    let distance: i32 = if offset.is_empty() {
        0
    } else {
        let digits = offset.strip_prefix(sign)?;
        digits.starts_with(|c: char| c.is_ascii_digit()).then(|| digits.parse().ok())??
    };
    let number = base.checked_add(direction * distance)?;
    (libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&number).then_some(Signal(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signal_reads_back_what_it_prints() {
        for number in 1..=libc::SIGRTMAX() {
            let signal = Signal::from_number(number).unwrap();
            assert_eq!(signal.to_string().parse(), Ok(signal));
        }
    }

    #[test]
    fn names_are_taken_with_and_without_sig_in_any_case_and_by_number() {
        for text in ["TERM", "SIGTERM", "term", "SigTerm", "15"] {
            assert_eq!(text.parse(), Ok(Signal::TERM), "{text}");
        }
        assert_eq!("RTMIN+3".parse::<Signal>().unwrap().number(), libc::SIGRTMIN() + 3);
        assert_eq!("SIGRTMAX-1".parse::<Signal>().unwrap().number(), libc::SIGRTMAX() - 1);
    }

    #[test]
    fn what_is_no_signal_is_refused() {
        for text in ["", "SIG", "0", "65", "-1", "15x", "RTMIN-1", "RTMIN+99", "RTMIN++1", "RTMAX+1", "TERMINATE"] {
            assert!(text.parse::<Signal>().is_err(), "{text}");
        }
    }
}
