//! The program below every behaviour test. It plays a process tree, it is the warden above the program under test, and
//! it tells what a started process sees.
//!
//!     node tree DIR     the process tree of DIR/spec.json, this process is its root
//!     node warden       runs a program as a subreaper above it; stdin is the harness' socket
//!     node look [FILE]  what this process was started with, as JSON to FILE or stdout
//!
//! `main` is the C entry point, so that nothing has touched descriptors, signals or mask before we look at them.
#![no_main]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, reason = "a test's program")]

#[path = "node/bursts.rs"]
mod bursts;
#[path = "node/launch.rs"]
mod launch;
#[path = "node/look.rs"]
mod look;
#[path = "node/place.rs"]
mod place;
#[path = "node/play.rs"]
mod play;
#[path = "node/signals.rs"]
mod signals;
#[path = "node/warden.rs"]
mod warden;

mod spec;
mod sys;
mod wire;

use std::ffi::{CStr, c_char, c_int};

// SAFETY: the one `main` of this program, with C's signature.
#[unsafe(no_mangle)]
extern "C" fn main(count: c_int, argv: *const *mut c_char) -> c_int {
    // SAFETY: `argv` has `count` C strings, which live as long as the process.
    let args: Vec<String> = (0..usize::try_from(count).unwrap_or(0))
        .map(|i| unsafe { CStr::from_ptr(*argv.add(i)) }.to_string_lossy().into_owned())
        .collect();
    if let Ok(text) = std::env::var(play::EXECED) {
        play::go_on(&text);
    }
    match args.get(1).map(String::as_str) {
        Some("tree") => {
            place::keep_title_area(argv, &args);
            play::start(&args[2])
        }
        Some("warden") => warden::run(),
        Some("look") => look::look(args.get(2).map(String::as_str)),
        _ => {
            eprintln!("node tree DIR | node warden | node look [FILE]");
            2
        }
    }
}
