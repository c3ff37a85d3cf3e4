//! How a process ended: one type from `waitid` to the report.

use crate::signal::Signal;
use std::fmt;

/// How a process ended. `128+n` is no part of it: that is a convention of exit codes, and lives in `cli`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It called `exit` with this code.
    Code(u8),
    /// A signal killed it.
    Signal {
        /// The signal.
        signal: Signal,
        /// Whether the kernel wrote a core dump.
        core_dumped: bool,
    },
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exited with code {code}"),
            Exit::Signal { signal, core_dumped: false } => write!(f, "was killed by {signal}"),
            Exit::Signal { signal, core_dumped: true } => write!(f, "was killed by {signal} and dumped core"),
        }
    }
}
