//! Output for the user on standard error: the log, at the level of `TERRACE_LOG`, and single lines.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::Once;

use tracing_subscriber::filter::LevelFilter;

/// Standard error without the lock of `std::io::stderr`: another thread may hold that lock when the process forks, and
/// the child would deadlock. A line is one write.
struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: as many readable bytes.
        let written = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the log once per process. Unknown levels mean the default, warnings. A program's own subscriber stays
/// installed. The caller holds [`once`](crate::once::once).
pub fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let wanted = std::env::var("TERRACE_LOG").ok();
        let level = wanted.and_then(|name| name.parse::<LevelFilter>().ok()).unwrap_or(LevelFilter::WARN);
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
