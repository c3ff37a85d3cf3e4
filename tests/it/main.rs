//! Behaviour tests: the real binary on real trees. One file per behaviour a user could name.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

#[path = "../support/mod.rs"]
mod support;

mod harness;
mod harness_terminal;
mod house;
mod real;
