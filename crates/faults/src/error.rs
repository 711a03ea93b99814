//! What is wrong with a plan.

use std::io;
use std::path::PathBuf;

/// Why a fault plan was not accepted, in one line that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum FaultPlanError {
    /// The file could not be read.
    #[error("cannot read the fault plan {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// It is not TOML, or has a key that means nothing, or a value of the wrong type.
    #[error("the fault plan is not valid: line {line} (`{text}`): {reason}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What is written there.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A probability is not between 0 and 1.
    #[error("the fault plan's `{key}` is {value}; a probability lies between 0 and 1")]
    Probability {
        /// The key.
        key: &'static str,
        /// Its value.
        value: f64,
    },
    /// A time is longer than any test should last.
    #[error("the fault plan's `{key}` is {value} microseconds; at most {max} (a minute) is allowed")]
    Delay {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// The delay's ends are the wrong way round.
    #[error("the fault plan's `delay_us_min` ({min}) is above its `delay_us_max` ({max})")]
    DelayOrder {
        /// The lower end.
        min: u64,
        /// The upper end.
        max: u64,
    },
    /// More faults than anybody keeps in mind.
    #[error("the fault plan has {0} faults; at most {max} are allowed", max = crate::plan::FAULTS_MAX)]
    TooMany(usize),
    /// One of the faults makes no sense.
    #[error("the fault plan's fault {number} (kind = \"{kind}\"): {problem}")]
    Fault {
        /// Which one, counted from 1.
        number: usize,
        /// Its kind.
        kind: &'static str,
        /// What is wrong with it, and what to write.
        problem: String,
    },
}

impl FaultPlanError {
    /// The parser's error, with the line that it is about.
    pub(crate) fn syntax(text: &str, error: &toml::de::Error) -> FaultPlanError {
        let at = error.span().map_or(0, |span| span.start.min(text.len()));
        let before = text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
        let shown = text.lines().nth(before).unwrap_or("").trim().chars().take(60).collect();
        let reason = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        FaultPlanError::Syntax { line: before + 1, text: shown, reason }
    }
}
