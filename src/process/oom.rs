//! The score by which the kernel picks whom to kill when memory runs out (proc_pid_oom_score_adj(5)).
//!
//! A supervisor that is killed for memory cannot clean up, and it is too small for its death to help. So we lower our own
//! score, which takes CAP_SYS_RESOURCE; the service starts with the score that we were started with.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};

const FILE: &CStr = c"/proc/self/oom_score_adj";

/// Low enough for all others to go first. Not -1000, which is "never": whatever of ours could not raise it again would be
/// spared as well.
pub const OURS: i16 = -900;

/// The score that the service is to have: as text, made before the fork. Nothing when it is as it was.
#[derive(Clone, Debug, Default)]
pub struct Score(Option<String>);

/// Lowers our score, if we may, and says what it was.
pub fn lower() -> Score {
    let path = FILE.to_str().unwrap_or_default();
    let Ok(mut file) = OpenOptions::new().read(true).write(true).open(path) else { return Score::default() };
    let mut text = [0; 16];
    let length = file.read(&mut text).unwrap_or(0);
    let was: Option<i16> = std::str::from_utf8(&text[..length]).ok().and_then(|text| text.trim().parse().ok());
    match was {
        Some(was) if was > OURS && file.write_all(OURS.to_string().as_bytes()).is_ok() => Score(Some(was.to_string())),
        _ => Score::default(),
    }
}

/// Our score of the moment.
///
/// # Errors
/// When there is no `/proc` to read it in.
pub fn find() -> io::Result<i16> {
    let text = std::fs::read_to_string(FILE.to_str().unwrap_or_default())?;
    text.trim().parse().map_err(io::Error::other)
}

impl Score {
    /// Puts it back. Async-signal-safe, for the child; raising it is always allowed. It is no reason not to start the service.
    pub(super) fn restore(&self) {
        let Some(text) = &self.0 else { return };
        // SAFETY: open, write and close are async-signal-safe; the path is a constant, the text as long as said.
        unsafe {
            let file = libc::open(FILE.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            libc::write(file, text.as_ptr().cast(), text.len());
            libc::close(file);
        }
    }
}
