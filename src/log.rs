//! The log: to standard error, for people, for the journal, or as JSON lines. It never blocks and never ends us.
//!
//! Standard error is shared with the service, so its flags are not ours to change: a line is written only when the kernel
//! says that it can be taken at once, and a line is at most as long as a pipe takes whole. What could not be written is
//! counted, and said with the next line that could.

use crate::config::LogFormat;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// Starts the log. Once in the life of the program; a second call changes nothing.
pub fn start(format: LogFormat, level: Level) {
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(Stderr);
    let done = match format {
        LogFormat::Json => {
            let builder = builder.json().flatten_event(true).with_target(false).with_current_span(false);
            tracing::subscriber::set_global_default(builder.with_span_list(false).finish())
        }
        LogFormat::Text => tracing::subscriber::set_global_default(builder.event_format(Text::People).finish()),
        LogFormat::Auto => {
            let text = if is_the_journal() { Text::Journal } else { Text::People };
            tracing::subscriber::set_global_default(builder.event_format(text).finish())
        }
    };
    // An error says that there is a log already.
    drop(done);
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

/// A line as text.
enum Text {
    /// `supervise: warning: …`
    People,
    /// `<4>…`: the journal takes the level from there (sd-daemon(3)) and knows who speaks.
    Journal,
}

impl<S, N> FormatEvent<S, N> for Text
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let level = *event.metadata().level();
        match self {
            Text::People => writer.write_str(match level {
                Level::ERROR => "supervise: error: ",
                Level::WARN => "supervise: warning: ",
                _ => "supervise: ",
            })?,
            Text::Journal => writer.write_str(match level {
                Level::ERROR => "<3>",
                Level::WARN => "<4>",
                Level::INFO => "<6>",
                _ => "<7>",
            })?,
        }
        ctx.format_fields(writer.by_ref(), event)?;
        writer.write_str("\n")
    }
}

/// Lines that nobody took.
static DROPPED: AtomicU64 = AtomicU64::new(0);

#[derive(Clone, Copy)]
struct Stderr;

impl<'a> MakeWriter<'a> for Stderr {
    type Writer = Stderr;

    fn make_writer(&'a self) -> Stderr {
        Stderr
    }
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let dropped = DROPPED.load(Ordering::Relaxed);
        if dropped > 0 {
            let lines = if dropped == 1 { "line" } else { "lines" };
            let note = format!("supervise: warning: {dropped} log {lines} dropped: nobody read standard error\n");
            if offer(note.as_bytes()) {
                DROPPED.fetch_sub(dropped, Ordering::Relaxed);
            }
        }
        let cut = cut(line);
        if DROPPED.load(Ordering::Relaxed) > 0 || !offer(&cut) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The line, or as much of it as a pipe takes whole.
fn cut(line: &[u8]) -> std::borrow::Cow<'_, [u8]> {
    if line.len() <= libc::PIPE_BUF {
        return line.into();
    }
    let end = "…\n".as_bytes();
    let mut short = line[..libc::PIPE_BUF - end.len()].to_vec();
    short.extend(end);
    short.into()
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
    let is_socket = stderr().metadata().is_ok_and(|meta| meta.file_type().is_socket());
    if is_socket {
        // SAFETY: text and length are those of `line`.
        return result(unsafe { libc::send(fd, text, length, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) });
    }
    let part = libc::iovec { iov_base: text.cast_mut(), iov_len: length };
    // SAFETY: one part, which is only read from.
    match result(unsafe { libc::pwritev2(fd, &raw const part, 1, -1, libc::RWF_NOWAIT) }) {
        Err(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ESPIPE | libc::EPERM) => {
            // SAFETY: text and length are those of `line`. SIGPIPE is blocked.
            result(unsafe { libc::write(fd, text, length) })
        }
        written => written,
    }
}

fn result(written: isize) -> Result<usize, i32> {
    usize::try_from(written).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(0))
}
