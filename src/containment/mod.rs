//! What holds the tree together, so that all of it can be ended.
//!
//! The contract, whatever the means:
//!
//! * *enter*: all that the service makes is inside, from its first instruction on;
//! * *signal* and *kill*: may be repeated at will, reach what was born meanwhile, and never touch a process that may not
//!   be of the tree;
//! * *is empty*: said only when proven.
//!
//! There is one containment now: [`lineage`]. It is always on.

pub mod leftover;
pub mod lineage;
pub mod pid_namespace;
mod strangers;
mod walk;
