//! The fault plan in a user's file.

use std::path::Path;

use serde::Deserialize;

use crate::error::FaultPlanError;
use crate::rule::{RawRule, Rule};

/// Faults to inject, from a TOML file. Every key is optional.
///
/// ```toml
/// seed = 7              # the same seed draws the same faults for the same packets loss = 0.01           #
/// probabilities for each sent packet, 0 to 1, always in force duplicate = 0.01 corrupt = 0.001       # one bit flipped
/// after the ICRC was computed reorder = 0.01        # delayed by up to reorder_us_max, so that later packets overtake
/// it reorder_us_max = 100 ecn_mark = 0.0        # marked "congestion experienced" delay_us_min = 0      # shortest
/// delay of every packet ... delay_us_max = 0      # ... and longest; the order is kept
///
/// [[fault]]             # any number of them: scheduled faults, and faults of a peer, of receives or of storage
/// kind = "blackhole"
/// after_ms = 2000
/// for_ms = 500
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultPlan {
    /// Seed of the random draws.
    pub seed: u64,
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Probability that a bit of a packet is flipped.
    pub corrupt: f64,
    /// Probability that a packet is delayed so that later packets overtake it.
    pub reorder: f64,
    /// Longest delay of such a packet, in microseconds.
    pub reorder_us_max: u64,
    /// Probability that a packet is marked with "congestion experienced".
    pub ecn_mark: f64,
    /// Shortest delay of every packet in microseconds.
    pub delay_us_min: u64,
    /// Longest delay of every packet in microseconds; packets stay in order.
    pub delay_us_max: u64,
    /// Faults with a kind and a schedule, as in the file.
    fault: Vec<RawRule>,
    /// The checked faults.
    #[serde(skip)]
    pub(crate) rules: Vec<Rule>,
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
            fault: Vec::new(),
            rules: Vec::new(),
        }
    }
}

/// Longest delay: a minute.
pub(crate) const DELAY_US_MAX: u64 = 60_000_000;

/// Most scheduled faults.
pub(crate) const FAULTS_MAX: usize = 100;

impl FaultPlan {
    /// Reads a plan from a file.
    ///
    /// # Errors
    /// The file cannot be read, or contains no valid plan.
    pub fn load(path: &Path) -> Result<FaultPlan, FaultPlanError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| FaultPlanError::Read { path: path.to_owned(), source })?;
        FaultPlan::parse(&text)
    }

    /// Reads a plan from its text.
    ///
    /// # Errors
    /// The text contains no valid plan.
    pub fn parse(text: &str) -> Result<FaultPlan, FaultPlanError> {
        let mut plan: FaultPlan =
            toml::from_str(text).map_err(|error| FaultPlanError::syntax(text, &error))?;
        plan.check()?;
        if plan.fault.len() > FAULTS_MAX {
            return Err(FaultPlanError::TooMany(plan.fault.len()));
        }
        let checked = |(index, raw): (usize, &RawRule)| {
            raw.check().map_err(|problem| FaultPlanError::Fault {
                number: index + 1,
                kind: raw.kind.name(),
                problem,
            })
        };
        plan.rules = plan.fault.iter().enumerate().map(checked).collect::<Result<_, _>>()?;
        Ok(plan)
    }

    /// Whether the plan has packet faults.
    pub fn has_packet_faults(&self) -> bool {
        let always = [self.loss, self.duplicate, self.corrupt, self.reorder, self.ecn_mark];
        self.delay_us_max > 0
            || always.iter().any(|probability| *probability > 0.0)
            || self.rules.iter().any(|rule| rule.kind.is_packet_fault())
    }

    /// Whether the plan has storage faults.
    pub fn has_storage_faults(&self) -> bool {
        self.rules.iter().any(|rule| rule.kind.is_storage_fault())
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
                return Err(FaultPlanError::Delay { key, value, max: DELAY_US_MAX });
            }
        }
        if self.delay_us_min > self.delay_us_max {
            return Err(FaultPlanError::DelayOrder { min: self.delay_us_min, max: self.delay_us_max });
        }
        Ok(())
    }
}
