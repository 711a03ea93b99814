//! What the user is told: the log to standard error, as much as `TERRACE_LOG` says, and single lines.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::Once;

use tracing_subscriber::filter::LevelFilter;

/// Standard error, without the lock of `std::io::stderr`: another thread may have that when the process forks, and the child
/// would wait for it for ever. A line is one write.
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

/// Starts the log once per process. Unknown levels mean the default, warnings; a program's own subscriber stays. The caller has
/// [`fork::once`](crate::fork::once).
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
        // Fails when another copy of this library in the process was first; then its log is as good.
        drop(tracing::subscriber::set_global_default(subscriber));
    });
}

/// Tells the user something in one line, whatever the log's level is.
pub fn tell_user(what: impl Display) {
    // Nobody to tell is no reason to do otherwise.
    let _ = StandardError.write_all(format!("terrace: {what}\n").as_bytes());
}
