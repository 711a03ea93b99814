//! The log: to standard error, as much as `TERRACE_LOG` says.

use std::sync::Once;

use tracing_subscriber::filter::LevelFilter;

/// Starts the log once per process. Unknown levels mean the default, warnings; a program's own subscriber stays.
pub fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let wanted = std::env::var("TERRACE_LOG").ok();
        let level = wanted.and_then(|name| name.parse::<LevelFilter>().ok()).unwrap_or(LevelFilter::WARN);
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .with_target(true)
            .finish();
        // Fails when another copy of this library in the process was first; then its log is as good.
        drop(tracing::subscriber::set_global_default(subscriber));
    });
}
