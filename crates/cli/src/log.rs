//! Log levels, and the logging of `terrace serve`, which runs a NIC itself.

use clap::ValueEnum;
use tracing_subscriber::filter::LevelFilter;

/// How much the NIC logs.
#[derive(Clone, Copy, ValueEnum)]
pub enum LogLevel {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// The name, as in the option and in `TERRACE_LOG`.
    pub fn name(self) -> &'static str {
        match self {
            LogLevel::Off => "off",
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }
}

/// Logs to standard error from now on, as the library does in other programs.
pub fn install(level: LogLevel) {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level.name().parse().unwrap_or(LevelFilter::WARN))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .finish();
    // Fails only if a subscriber is set already; this program sets no other.
    drop(tracing::subscriber::set_global_default(subscriber));
}
