//! The log: to standard error, for people, for the journal, or as JSON lines. It never blocks and never ends us.
//!
//! Standard error is shared with the service, so its flags are not ours to change: a line is written only when the kernel
//! says that it can be taken at once, and a line is at most as long as a pipe takes whole. What could not be written is
//! counted, and said with the next line that could.

use crate::config::LogFormat;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;
use tracing::{Event, Level, Subscriber, info};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Starts the log. Once in the life of the program; a second call changes nothing.
pub fn start(format: LogFormat, level: Level) {
    let style = match format {
        LogFormat::Json => Style::Json,
        LogFormat::Auto if is_the_journal() => Style::Journal,
        LogFormat::Auto | LogFormat::Text => Style::People,
    };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(Stderr(style));
    let done = if style == Style::Json {
        let builder = builder.json().flatten_event(true).with_target(false).with_current_span(false);
        tracing::subscriber::set_global_default(builder.with_span_list(false).finish())
    } else {
        tracing::subscriber::set_global_default(builder.event_format(style).finish())
    };
    // An error says that there is a log already.
    drop(done);
}

/// Something that is said once in the life of the program, however often it is so.
#[derive(Debug, Default)]
pub struct Once(AtomicBool);

impl Once {
    /// Not said yet.
    pub const fn new() -> Once {
        Once(AtomicBool::new(false))
    }

    /// Says it, if it was not said. What the kernel or a sandbox does not have is no fault: this is for people who wonder why a
    /// promise is smaller here.
    pub fn say(&self, text: impl FnOnce() -> String) {
        if !self.0.swap(true, Ordering::Relaxed) {
            info!("{}", text());
        }
    }
}

/// Why a system call failed, in the C library's words.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    // Rust puts the number behind them.
    text.split_once(" (os error ").map_or(text.as_str(), |(words, _)| words).to_owned()
}

/// Whether standard error goes to systemd's journal (systemd.exec(5), JOURNAL_STREAM): its device and inode are named.
fn is_the_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(meta) = stderr().metadata() else { return false };
    stream == format!("{}:{}", meta.dev(), meta.ino())
}

/// Standard error, borrowed: it is not closed with the file.
fn stderr() -> ManuallyDrop<File> {
    // SAFETY: 2 is occupied from the start (see `process::descriptors`) and never closed; ManuallyDrop keeps it open.
    ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDERR_FILENO) })
}

/// How a line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Style {
    /// `supervise: warning: …`
    People,
    /// `<4>…`: the journal takes the level from there (sd-daemon(3)) and knows who speaks.
    Journal,
    /// An object.
    Json,
}

impl Style {
    fn before(self, level: Level) -> &'static str {
        match (self, level) {
            (Style::Json, _) => "",
            (Style::People, Level::ERROR) => "supervise: error: ",
            (Style::People, Level::WARN) => "supervise: warning: ",
            (Style::People, _) => "supervise: ",
            (Style::Journal, Level::ERROR) => "<3>",
            (Style::Journal, Level::WARN) => "<4>",
            (Style::Journal, Level::INFO) => "<6>",
            (Style::Journal, _) => "<7>",
        }
    }

    /// The line that says how many have no line.
    fn count(self, dropped: u64) -> String {
        let lines = if dropped == 1 { "line" } else { "lines" };
        let text = format!("{dropped} log {lines} dropped: nobody read standard error");
        if self == Style::Json {
            let now = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
            return json!({ "timestamp": now, "level": "WARN", "message": text }).to_string() + "\n";
        }
        format!("{}{text}\n", self.before(Level::WARN))
    }

    /// The line, or as much of it as a pipe takes whole.
    fn cut(self, line: &[u8]) -> Cow<'_, [u8]> {
        match self {
            _ if line.len() <= libc::PIPE_BUF => line.into(),
            Style::Json => shorter_object(line).unwrap_or_else(|| shorter_text(line)).into(),
            Style::People | Style::Journal => shorter_text(line).into(),
        }
    }
}

impl<S, N> FormatEvent<S, N> for Style
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let before = self.before(*event.metadata().level());
        let mut text = String::new();
        ctx.format_fields(Writer::new(&mut text), event)?;
        if *self == Style::Journal {
            // It makes an entry of every line.
            text = text.replace('\n', &format!("\n{before}"));
        }
        writeln!(writer, "{before}{text}")
    }
}

/// Lines that nobody took.
static DROPPED: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy, Debug)]
struct Stderr(Style);

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Stderr;

    fn make_writer(&'a self) -> Stderr {
        *self
    }
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let dropped = DROPPED.load(Ordering::Relaxed);
        if dropped > 0 && offer(self.0.count(dropped).as_bytes()) {
            DROPPED.fetch_sub(dropped, Ordering::Relaxed);
        }
        if DROPPED.load(Ordering::Relaxed) > 0 || !offer(&self.0.cut(line)) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn shorter_text(line: &[u8]) -> Vec<u8> {
    let end = "…\n".as_bytes();
    let within_a_character = |at: &usize| line[*at] & 0b1100_0000 == 0b1000_0000;
    let room = libc::PIPE_BUF - end.len();
    let cut = (1..=room).rev().find(|at| !within_a_character(at)).unwrap_or(room);
    [&line[..cut], end].concat()
}

/// With as much of the message as fits; none when it is no object with a message.
fn shorter_object(line: &[u8]) -> Option<Vec<u8>> {
    let mut object: Map<String, Value> = serde_json::from_slice(line).ok()?;
    let message = object.get("message")?.as_str()?.to_owned();
    let mut length = message.chars().count().min(libc::PIPE_BUF);
    loop {
        let short: String = message.chars().take(length).chain(['…']).collect();
        object.insert("message".to_owned(), short.into());
        let text = serde_json::to_string(&object).ok()? + "\n";
        let over = text.len().saturating_sub(libc::PIPE_BUF);
        if over == 0 || length == 0 {
            return Some(text.into_bytes());
        }
        // A character takes six bytes at the most.
        length = length.saturating_sub(over.div_ceil(6));
    }
}

/// Writes if that can be done at once. True when it was, also when nobody will ever read it (EPIPE).
fn offer(line: &[u8]) -> bool {
    let mut poll = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd, and no waiting.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) } == 1;
    if ready && poll.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0 {
        return true;
    }
    ready && write_at_once(line) == Ok(line.len())
}

/// The service writes to the same place, and may have filled it since it was asked about: so this refuses to wait where the
/// kernel knows how to, which is for pipes and sockets.
fn write_at_once(line: &[u8]) -> Result<usize, i32> {
    let (fd, text, length) = (libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
    let kind = stderr().metadata().map(|meta| meta.file_type());
    if kind.as_ref().is_ok_and(FileTypeExt::is_socket) {
        // SAFETY: text and length are those of `line`.
        return result(unsafe { libc::send(fd, text, length, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) });
    }
    // Not for files: some file systems (XFS, Btrfs) answer "again" to whatever changes a time stamp.
    if kind.as_ref().is_ok_and(FileTypeExt::is_fifo) {
        let part = libc::iovec { iov_base: text.cast_mut(), iov_len: length };
        // SAFETY: one part, which is only read from.
        match result(unsafe { libc::pwritev2(fd, &raw const part, 1, -1, libc::RWF_NOWAIT) }) {
            Err(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ESPIPE | libc::EPERM) => {}
            written => return written,
        }
    }
    // SAFETY: text and length are those of `line`. SIGPIPE is blocked.
    result(unsafe { libc::write(fd, text, length) })
}

fn result(written: isize) -> Result<usize, i32> {
    usize::try_from(written).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}
