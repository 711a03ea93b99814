//! Log levels, and the logging of commands that run a NIC themselves.

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::LevelFilter;

use crate::output::complain;
use crate::standard_error::{self, StandardError};

/// The log level of the NIC.
#[derive(Clone, Copy, ValueEnum)]
pub enum LogLevel {
    /// No log
    Off,
    /// What a program or its peers lose
    Error,
    /// What the user should know
    Warn,
    /// What happens to devices and connections
    Info,
    /// The same in detail
    Debug,
    /// Every packet
    Trace,
}

impl LogLevel {
    /// The name in the option and in `TERRACE_LOG`.
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

/// The option of commands that log themselves.
#[derive(Args, Clone)]
pub struct LogOption {
    /// Log level; the log goes to standard error
    #[arg(
        long = "log",
        value_name = "LEVEL",
        ignore_case = true,
        env = "TERRACE_LOG",
        hide_env_values = true,
        default_value = "warn"
    )]
    level: LogLevel,
}

impl LogOption {
    /// Installs a subscriber that logs to standard error, as the library does in programs. Threads that log wait for no reader.
    pub fn install(&self) {
        if let Err(error) = standard_error::start() {
            return complain(&format!("terrace: there is no log: {error}"));
        }
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(self.level.name().parse().unwrap_or(LevelFilter::WARN))
            .with_writer(|| StandardError)
            .with_ansi(false)
            .finish();
        // This fails only if a subscriber is set already; this program sets no other.
        drop(tracing::subscriber::set_global_default(subscriber));
    }
}
