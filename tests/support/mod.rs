//! The harness below the behaviour tests; start reading at [`supervise`].
//!
//! * [`supervise`]: the builder for the program under test, with an example.
//! * [`running`]: what a test does with it while it runs; [`ended`]: the verdict at its end.
//! * [`tree`]: the process trees it has to cope with.
//! * [`ours`]: guard and supervisor, and their deaths.
//! * [`fault`]: system calls that fail, disks that are full.
//! * [`pty`]: a terminal with a shell's job control.
//! * [`need`]: what a test needs of the machine.
#![allow(dead_code, reason = "each test crate uses its part")]
#![allow(unused_imports, reason = "each test crate uses its part")]

pub(crate) mod ended;
pub(crate) mod fault;
pub(crate) mod need;
pub(crate) mod ours;
mod program;
pub(crate) mod pty;
pub(crate) mod running;
mod spec;
pub(crate) mod supervise;
pub(crate) mod sys;
pub(crate) mod told;
pub(crate) mod tree;
mod wire;

pub(crate) use ended::Ended;
pub(crate) use need::{need_program, need_root};
pub(crate) use program::node_program;
pub(crate) use running::Running;
pub(crate) use supervise::{Io, Supervise};
pub(crate) use told::Proc;
pub(crate) use tree::{Act, Born, node};
pub(crate) use wire::Left;
