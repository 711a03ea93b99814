//! What a person writes in a file.

use std::io;
use std::path::{Path as FilePath, PathBuf};

use serde::{Deserialize, Serialize};

use super::Faults;

/// Faults to inject into the packets that a port sends, as a TOML file says it. Every key may be left out.
///
/// ```toml
/// seed = 7              # the same seed draws the same faults for the same packets
/// loss = 0.01           # probabilities for each packet, 0 to 1
/// duplicate = 0.01
/// corrupt = 0.001       # one bit flipped after the ICRC was computed
/// reorder = 0.01        # held back for up to reorder_us_max, so that others overtake it
/// reorder_us_max = 100
/// ecn_mark = 0.0        # marked "congestion experienced"
/// delay_us_min = 0      # every packet waits this long ...
/// delay_us_max = 0      # ... to this long, order kept
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultPlan {
    /// Where the random draws start.
    pub seed: u64,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Probability that a bit of a packet is flipped.
    pub corrupt: f64,
    /// Probability that a packet is held back so that others overtake it.
    pub reorder: f64,
    /// How long it is held back at most, in microseconds.
    pub reorder_us_max: u64,
    /// Probability that a packet is marked with "congestion experienced".
    pub ecn_mark: f64,
    /// Shortest delay of every packet in microseconds.
    pub delay_us_min: u64,
    /// Longest delay of every packet in microseconds; packets stay in order.
    pub delay_us_max: u64,
}

impl Default for FaultPlan {
    fn default() -> FaultPlan {
        FaultPlan {
            seed: 0,
            loss: 0.0,
            duplicate: 0.0,
            corrupt: 0.0,
            reorder: 0.0,
            reorder_us_max: 100,
            ecn_mark: 0.0,
            delay_us_min: 0,
            delay_us_max: 0,
        }
    }
}

/// Why a fault plan was not accepted.
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
    /// It is not TOML, or has a key that means nothing. Shows the line.
    #[error("the fault plan is not valid: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A probability is not between 0 and 1.
    #[error("the fault plan's `{key}` is {value}; a probability lies between 0 and 1")]
    Probability {
        /// The key.
        key: &'static str,
        /// Its value.
        value: f64,
    },
    /// A time is longer than any test should last.
    #[error("the fault plan's `{key}` is {value} microseconds; at most {DELAY_US_MAX} (a minute) is allowed")]
    Delay {
        /// The key.
        key: &'static str,
        /// Its value.
        value: u64,
    },
    /// The delay's ends are the wrong way round.
    #[error("the fault plan's `delay_us_min` ({min}) is above its `delay_us_max` ({max})")]
    DelayOrder {
        /// The lower end.
        min: u64,
        /// The upper end.
        max: u64,
    },
}

const DELAY_US_MAX: u64 = 60_000_000;

impl FaultPlan {
    /// Reads a plan from a file.
    ///
    /// # Errors
    /// The file cannot be read, or holds no valid plan.
    pub fn load(path: &FilePath) -> Result<FaultPlan, FaultPlanError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| FaultPlanError::Read { path: path.to_owned(), source })?;
        FaultPlan::parse(&text)
    }

    /// Reads a plan from its text.
    ///
    /// # Errors
    /// The text holds no valid plan.
    pub fn parse(text: &str) -> Result<FaultPlan, FaultPlanError> {
        let plan: FaultPlan = toml::from_str(text)?;
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), FaultPlanError> {
        let probabilities = [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("corrupt", self.corrupt),
            ("reorder", self.reorder),
            ("ecn_mark", self.ecn_mark),
        ];
        for (key, value) in probabilities {
            if !(0.0..=1.0).contains(&value) {
                return Err(FaultPlanError::Probability { key, value });
            }
        }
        for (key, value) in [("delay_us_max", self.delay_us_max), ("reorder_us_max", self.reorder_us_max)] {
            if value > DELAY_US_MAX {
                return Err(FaultPlanError::Delay { key, value });
            }
        }
        if self.delay_us_min > self.delay_us_max {
            return Err(FaultPlanError::DelayOrder { min: self.delay_us_min, max: self.delay_us_max });
        }
        Ok(())
    }

    pub(super) fn faults(&self) -> Faults {
        Faults {
            loss: self.loss,
            duplicate: self.duplicate,
            corrupt: self.corrupt,
            reorder: self.reorder,
            ecn_mark: self.ecn_mark,
            delay_ns: self.delay_us_min * 1000..self.delay_us_max * 1000 + 1,
            reorder_ns_max: self.reorder_us_max * 1000,
        }
    }
}
