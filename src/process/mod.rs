//! EFFECTS on processes: making one, waiting for it, reading about it, signalling it.
//!
//! One file for each dangerous thing: `child` is all that runs between fork and exec, [`reap`] the only reader of a
//! raw wait status, [`proc`](mod@proc) the only reader of `/proc`.

pub(crate) mod child;
pub mod descriptors;
pub mod marks;
pub mod memory;
pub mod names;
pub mod oom;
pub mod privileges;
pub mod proc;
mod reader;
pub mod reap;
pub mod signals;
pub mod spawn;
pub mod terminal;
pub mod title;

use nix::libc::pid_t;

/// A process by number. A number proves nothing by itself: it stands for the same process only while that process is a
/// direct child which was not reaped yet, or beside its start time.
pub type Pid = pid_t;
