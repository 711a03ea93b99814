//! Counts of events in runs, so that a test can check its coverage.

use std::collections::BTreeMap;
use std::fmt;

/// The named counts of one or more runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<String, u64>);

impl Tally {
    /// Adds to a count.
    pub fn add(&mut self, name: impl Into<String>, count: u64) {
        *self.0.entry(name.into()).or_default() += count;
    }

    /// Adds all of another tally's counts.
    pub fn merge(&mut self, other: &Tally) {
        other.0.iter().for_each(|(name, count)| self.add(name.clone(), *count));
    }

    /// Returns a count; 0 if it does not exist.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in &self.0 {
            writeln!(f, "{name:<40} {count:>14}")?;
        }
        Ok(())
    }
}
