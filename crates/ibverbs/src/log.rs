//! Output for the user on standard error: the log, at the level of `TERRACE_LOG`, and single lines.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_sync::write_line_now;
use tracing_subscriber::filter::LevelFilter;

/// Standard error without the lock of `std::io::stderr`: another thread may hold that lock when the process forks, and
/// the child would deadlock. A line is one write, which does not wait, does not fail, and raises no signal: the reader may be stopped or gone, and
/// the disk full. Such lines are lost.
struct StandardError;

/// Lines of the log that were lost lately.
static LOST: AtomicU64 = AtomicU64::new(0);

impl Write for StandardError {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if !write_line_now(line) {
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
    write_line_now(format!("terrace: {what}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_level_is_told_from_no_level() {
        assert_eq!(
            (level(""), level("Debug"), level("off")),
            (Some(DEFAULT), Some(LevelFilter::DEBUG), Some(LevelFilter::OFF))
        );
        assert_eq!(level("loud"), None);
    }
}
