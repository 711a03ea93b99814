//! How much is logged, and by `terrace serve`, which is a NIC itself: where.

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
    /// As the option and `TERRACE_LOG` have it.
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
    // Nobody else in this program does.
    drop(tracing::subscriber::set_global_default(subscriber));
}
