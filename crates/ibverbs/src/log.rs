//! Output for the user on standard error: the log, at the level of `TERRACE_LOG`, and single lines.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing_subscriber::filter::LevelFilter;

use crate::shim::signals::without_signals;

/// Standard error without the lock of `std::io::stderr`: another thread may hold that lock when the process forks, and
/// the child would deadlock. A line is one write, which does not wait, does not fail, and raises no signal: the reader may be stopped or gone, and
/// the disk full. Such lines are lost.
struct StandardError;

/// Lines of the log that were lost lately.
static LOST: AtomicU64 = AtomicU64::new(0);

impl Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if !write_now(libc::STDERR_FILENO, line) {
            LOST.fetch_add(1, Ordering::Relaxed);
        } else if let lost @ 1.. = LOST.swap(0, Ordering::Relaxed) {
            write_line(format_args!("{lost} lines of the log are lost: standard error had no room for them"));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line, cut to what a pipe takes at once, if there is room for it. Returns whether it has.
fn write_now(fd: RawFd, line: &[u8]) -> bool {
    let line = match line.get(..libc::PIPE_BUF) {
        Some(most) if most.len() < line.len() => Cow::Owned([&most[..most.len() - 1], b"\n"].concat()),
        _ => Cow::Borrowed(line),
    };
    without_signals(|| {
        let mut room = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one valid entry.
        if unsafe { libc::poll(&raw mut room, 1, 0) } != 1 || room.revents != libc::POLLOUT {
            return false;
        }
        // SAFETY: sets of signals are plain data; both are written before they are read.
        let (mut ours, mut pending): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
        // SAFETY: valid sets, a valid time, and as many readable bytes.
        unsafe {
            libc::sigemptyset(&raw mut ours);
            libc::sigpending(&raw mut pending);
            for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
                if libc::sigismember(&raw const pending, signal) == 0 {
                    libc::sigaddset(&raw mut ours, signal);
                }
            }
            let is_written = libc::write(fd, line.as_ptr().cast(), line.len()) >= 0;
            if !is_written {
                // What the write has raised. The program's action for it may be to end.
                let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                libc::sigtimedwait(&raw const ours, std::ptr::null_mut(), &raw const now);
            }
            is_written
        }
    })
}

const DEFAULT: LevelFilter = LevelFilter::WARN;

/// The level of a name. An empty one means the default.
fn level(name: &str) -> Option<LevelFilter> {
    if name.is_empty() { Some(DEFAULT) } else { name.parse().ok() }
}

/// Starts the log once per process. A line tells of an unknown level. A program's own subscriber stays
/// installed. The caller holds [`once`](crate::once::once).
pub fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let name = std::env::var_os("TERRACE_LOG").unwrap_or_default();
        let name = name.to_string_lossy();
        let level = level(&name).unwrap_or_else(|| {
            write_line(format_args!(
                "TERRACE_LOG is `{name}`, which is not off, error, warn, info, debug or trace; the log has warnings"
            ));
            DEFAULT
        });
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(|| StandardError)
            .with_ansi(false)
            .with_target(true)
            .finish();
        // The call fails if another copy of this library in the process was first. That copy's log is then used.
        drop(tracing::subscriber::set_global_default(subscriber));
    });
}

/// Writes a line to standard error, at any log level.
pub fn write_line(what: impl Display) {
    write_now(libc::STDERR_FILENO, format!("terrace: {what}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::AtomicU32;

    use super::*;

    static SIGNALS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_line_for_which_there_is_no_reader_or_no_room_is_lost_without_a_signal() {
        let handler: extern "C" fn(libc::c_int) = count;
        // SAFETY: a handler that only counts.
        unsafe { libc::signal(libc::SIGPIPE, handler as libc::sighandler_t) };
        let (reader, writer) = io::pipe().unwrap();
        // A pipe has room for 64 KiB.
        let count = (0..32).filter(|_| write_now(writer.as_raw_fd(), &[b'x'; 3000])).count();
        assert!((16..=21).contains(&count), "{count}");
        drop(reader);
        assert!(!write_now(writer.as_raw_fd(), b"line"));
        // SAFETY: one readable byte.
        let written = unsafe { libc::write(writer.as_raw_fd(), b"x".as_ptr().cast(), 1) };
        assert_eq!((written, SIGNALS.load(Ordering::Relaxed)), (-1, 1), "only this write raises one");
    }

    #[test]
    fn an_unknown_level_is_told_from_no_level() {
        assert_eq!(
            (level(""), level("Debug"), level("off")),
            (Some(DEFAULT), Some(LevelFilter::DEBUG), Some(LevelFilter::OFF))
        );
        assert_eq!(level("loud"), None);
    }
}
