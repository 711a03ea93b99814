//! Output for the user on standard error: the log, at the level of `TERRACE_LOG`, and single lines.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::Once;

use terrace_sync::Uncancelled;
use tracing_subscriber::filter::LevelFilter;

/// Standard error without the lock of `std::io::stderr`: another thread may hold that lock when the process forks, and
/// the child would deadlock. A line is one write.
struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _uncancelled = Uncancelled::new();
        // SAFETY: as many readable bytes.
        let written = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
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
    // There is no place to report an error.
    let _ = StandardError.write_all(format!("terrace: {what}\n").as_bytes());
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
