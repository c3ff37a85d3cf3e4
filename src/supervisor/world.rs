//! The random world.
