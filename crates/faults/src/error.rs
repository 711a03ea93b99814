//! Errors of a fault plan.

use std::io;
use std::path::PathBuf;

/// The reason why a fault plan was rejected, in one line that names a remedy.
#[derive(Debug, thiserror::Error)]
pub enum FaultPlanError {
    /// The file could not be read.
    #[error("cannot read the fault plan {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file is not TOML, or has an unknown key or a value of the wrong type.
    #[error("the fault plan is not valid: line {line} (`{text}`): {reason}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// The line's text.
        text: String,
        /// The parser's message.
        reason: String,
    },
    /// A probability is not between 0 and 1.
    #[error("the fault plan's `{key}` is {value}; a probability lies between 0 and 1")]
    Probability {
        /// The key.
        key: &'static str,
        /// The key's value.
        value: f64,
    },
    /// A time exceeds the limit.
    #[error("the fault plan's `{key}` is {value} microseconds; at most {max} (a minute) is allowed")]
    Delay {
        /// The key.
        key: &'static str,
        /// The key's value.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// The delay's bounds are in the wrong order.
    #[error("the fault plan's `delay_us_min` ({min}) is above its `delay_us_max` ({max})")]
    DelayOrder {
        /// The lower bound.
        min: u64,
        /// The upper bound.
        max: u64,
    },
    /// Too many faults.
    #[error("the fault plan has {0} faults; at most {max} are allowed", max = crate::plan::FAULTS_MAX)]
    TooMany(usize),
    /// One of the faults is invalid.
    #[error("the fault plan's fault {number} (kind = \"{kind}\"): {problem}")]
    Fault {
        /// The fault's number, counted from 1.
        number: usize,
        /// The fault's kind.
        kind: &'static str,
        /// The problem and its remedy.
        problem: String,
    },
}

impl FaultPlanError {
    /// The parser's error, with its line.
    pub(crate) fn syntax(text: &str, error: &toml::de::Error) -> FaultPlanError {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let before = text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
        let shown = text.lines().nth(before).unwrap_or("").trim().chars().take(60).collect();
        let reason = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        FaultPlanError::Syntax { line: before + 1, text: shown, reason }
    }
}
