//! Behaviour tests: the real binary on real trees. One file per behaviour a user could name.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

#[path = "../support/mod.rs"]
mod support;

mod bombs;
mod cgroup;
mod cgroup_odd;
mod cgroup_refused;
mod command;
mod config;
mod config_example;
mod config_refused;
mod doctor;
mod end;
mod guard;
mod guard_by_name;
mod guard_unseen;
mod harness;
mod harness_terminal;
mod house;
mod keep;
mod life;
mod log;
mod manual;
mod named;
mod pid_one;
mod pidns;
mod real;
mod refused;
mod report;
mod report_file;
mod start;
mod static_build;
mod strangers;
mod survivors;
mod sweep;
mod sweep_spares;
mod terminal;
mod terminal_scripts;
mod trees;
