//! A fault with a kind and a schedule: raw and checked.

use std::net::IpAddr;
use std::ops::Range;

use serde::Deserialize;

use crate::plan::DELAY_US_MAX;
use crate::schedule::{Length, Schedule, Start};

/// A `[[fault]]` as in the file. [`RawRule::check`] rejects keys that do not belong to its kind.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawRule {
    pub kind: KindName,
    probability: Option<f64>,
    peer: Option<IpAddr>,
    direction: Option<Directions>,
    operation: Option<Operations>,
    error: Option<StorageError>,
    reorder_us_max: Option<u64>,
    delay_us_min: Option<u64>,
    delay_us_max: Option<u64>,
    after_ms: Option<u64>,
    after_packets: Option<u64>,
    after_operations: Option<u64>,
    for_ms: Option<u64>,
    for_packets: Option<u64>,
    for_operations: Option<u64>,
    every_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KindName {
    Loss,
    Duplicate,
    Corrupt,
    Reorder,
    Delay,
    EcnMark,
    Blackhole,
    Rnr,
    SlowStorage,
    FailingStorage,
}

/// Direction of packets: sent, received, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Directions {
    Out,
    In,
    Both,
}

/// Kinds of storage requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Operations {
    Any,
    Read,
    Write,
    Sync,
    WriteBack,
}

/// Error of a failed storage request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum StorageError {
    /// EIO.
    Io,
    /// ENOSPC.
    NoSpace,
}

/// A fault's kind and parameters.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    Loss(Directions),
    Duplicate,
    Corrupt,
    Reorder { hold_ns_max: u64 },
    Delay { ns: Range<u64> },
    EcnMark,
    Blackhole(Directions),
    Rnr,
    SlowStorage { ns: Range<u64>, operations: Operations },
    FailingStorage { error: StorageError, operations: Operations },
}

/// A checked fault.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rule {
    pub kind: Kind,
    pub name: &'static str,
    pub probability: f64,
    /// `None`: all peers.
    pub peer: Option<IpAddr>,
    pub schedule: Schedule,
}

const PACKETS: &[&str] = &["peer", "after_ms", "after_packets", "for_ms", "for_packets", "every_ms"];
const OPERATIONS: &[&str] = &["after_ms", "after_operations", "for_ms", "for_operations", "every_ms"];
const OUT_ONLY: &str =
    "applies to packets that this process sends; give the peer such a plan for the other direction";

/// Longest time in a schedule: a week.
const SCHEDULE_MS_MAX: u64 = 7 * 24 * 60 * 60 * 1000;

impl KindName {
    pub fn name(self) -> &'static str {
        match self {
            KindName::Loss => "loss",
            KindName::Duplicate => "duplicate",
            KindName::Corrupt => "corrupt",
            KindName::Reorder => "reorder",
            KindName::Delay => "delay",
            KindName::EcnMark => "ecn-mark",
            KindName::Blackhole => "blackhole",
            KindName::Rnr => "rnr",
            KindName::SlowStorage => "slow-storage",
            KindName::FailingStorage => "failing-storage",
        }
    }

    /// The keys of a fault of this kind: its parameters, and those of its schedule.
    fn keys(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            KindName::Loss => (&["probability", "direction"], PACKETS),
            KindName::Duplicate | KindName::Corrupt | KindName::EcnMark => (&["probability"], PACKETS),
            KindName::Reorder => (&["probability", "reorder_us_max"], PACKETS),
            KindName::Delay => (&["probability", "delay_us_min", "delay_us_max"], PACKETS),
            KindName::Blackhole => (&["direction"], PACKETS),
            KindName::Rnr => (&["probability", "peer"], OPERATIONS),
            KindName::SlowStorage => {
                (&["probability", "operation", "delay_us_min", "delay_us_max"], OPERATIONS)
            }
            KindName::FailingStorage => (&["probability", "operation", "error"], OPERATIONS),
        }
    }
}

impl Kind {
    pub fn is_storage_fault(&self) -> bool {
        matches!(self, Kind::SlowStorage { .. } | Kind::FailingStorage { .. })
    }

    pub fn is_packet_fault(&self) -> bool {
        !self.is_storage_fault() && *self != Kind::Rnr
    }
}

impl RawRule {
    /// The keys in the file.
    fn given(&self) -> impl Iterator<Item = &'static str> {
        let given = [
            ("probability", self.probability.is_some()),
            ("peer", self.peer.is_some()),
            ("direction", self.direction.is_some()),
            ("operation", self.operation.is_some()),
            ("error", self.error.is_some()),
            ("reorder_us_max", self.reorder_us_max.is_some()),
            ("delay_us_min", self.delay_us_min.is_some()),
            ("delay_us_max", self.delay_us_max.is_some()),
            ("after_ms", self.after_ms.is_some()),
            ("after_packets", self.after_packets.is_some()),
            ("after_operations", self.after_operations.is_some()),
            ("for_ms", self.for_ms.is_some()),
            ("for_packets", self.for_packets.is_some()),
            ("for_operations", self.for_operations.is_some()),
            ("every_ms", self.every_ms.is_some()),
        ];
        given.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| key)
    }

    /// Checks the fault. The error names the problem.
    pub fn check(&self) -> Result<Rule, String> {
        let (own, scheduling) = self.kind.keys();
        if let Some(unknown) = self.given().find(|key| !own.contains(key) && !scheduling.contains(key)) {
            if unknown == "direction" {
                return Err(format!("`direction` is no key of this kind, which {OUT_ONLY}"));
            }
            let keys = own.iter().chain(scheduling).copied().collect::<Vec<_>>().join(", ");
            return Err(format!("`{unknown}` is no key of this kind; it has {keys}"));
        }
        let probability = self.probability.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&probability) {
            return Err(format!("`probability` is {probability}; a probability lies between 0 and 1"));
        }
        let (kind, schedule) = (self.checked_kind()?, self.schedule()?);
        Ok(Rule { kind, name: self.kind.name(), probability, peer: self.peer, schedule })
    }

    fn checked_kind(&self) -> Result<Kind, String> {
        let operations = self.operation.unwrap_or(Operations::Any);
        Ok(match self.kind {
            KindName::Loss => Kind::Loss(self.direction.unwrap_or(Directions::Out)),
            KindName::Duplicate => Kind::Duplicate,
            KindName::Corrupt => Kind::Corrupt,
            KindName::Reorder => {
                let hold_us_max = self.reorder_us_max.unwrap_or(100);
                Kind::Reorder { hold_ns_max: within("reorder_us_max", hold_us_max, 1, DELAY_US_MAX)? * 1000 }
            }
            KindName::Delay => Kind::Delay { ns: self.delay()? },
            KindName::EcnMark => Kind::EcnMark,
            KindName::Blackhole => Kind::Blackhole(self.direction.unwrap_or(Directions::Both)),
            KindName::Rnr => Kind::Rnr,
            KindName::SlowStorage => Kind::SlowStorage { ns: self.delay()?, operations },
            KindName::FailingStorage => {
                let error = self.error.unwrap_or(StorageError::Io);
                if error == StorageError::NoSpace
                    && !matches!(operations, Operations::Any | Operations::Write)
                {
                    return Err(
                        "only writes run out of space: leave `operation` out, or make it \"write\"".into()
                    );
                }
                Kind::FailingStorage { error, operations }
            }
        })
    }

    /// Bounds of the delay. A single bound is a fixed delay.
    fn delay(&self) -> Result<Range<u64>, String> {
        let (min, max) = match (self.delay_us_min, self.delay_us_max) {
            (None, None) => return Err("the fault needs `delay_us_min`, `delay_us_max` or both".into()),
            (Some(only), None) => (only, only),
            (min, Some(max)) => (min.unwrap_or(max), max),
        };
        if min > max {
            return Err(format!("`delay_us_min` ({min}) is above `delay_us_max` ({max})"));
        }
        within("delay_us_max", max, 1, DELAY_US_MAX)?;
        Ok(min * 1000..max * 1000 + 1)
    }

    fn schedule(&self) -> Result<Schedule, String> {
        let start = match one_of("after", self.after_ms, self.after_packets.or(self.after_operations))? {
            Some(Measure::Ms(ms)) => Start::AfterNs(within("after_ms", ms, 0, SCHEDULE_MS_MAX)? * 1_000_000),
            Some(Measure::Count(count)) => Start::AfterCount(count),
            None => Start::AfterNs(0),
        };
        let length = match one_of("for", self.for_ms, self.for_packets.or(self.for_operations))? {
            Some(Measure::Ms(ms)) => Length::Ns(within("for_ms", ms, 1, SCHEDULE_MS_MAX)? * 1_000_000),
            Some(Measure::Count(0)) => {
                return Err("a count of 0 disables the fault: remove the fault instead".into());
            }
            Some(Measure::Count(count)) => Length::Count(count),
            None => Length::Forever,
        };
        let every_ms = self.every_ms.map(|ms| within("every_ms", ms, 1, SCHEDULE_MS_MAX)).transpose()?;
        if every_ms.is_some() && length == Length::Forever {
            return Err(
                "`every_ms` needs a duration to repeat: add `for_ms`, `for_packets` or `for_operations`"
                    .into(),
            );
        }
        if let (Some(every), Some(lasts)) = (every_ms, self.for_ms)
            && lasts >= every
        {
            return Err(format!(
                "`for_ms` ({lasts}) must be below `every_ms` ({every}), or it would never end"
            ));
        }
        Ok(Schedule { start, length, every_ns: every_ms.map(|ms| ms * 1_000_000) })
    }
}

enum Measure {
    Ms(u64),
    Count(u64),
}

fn one_of(what: &str, ms: Option<u64>, count: Option<u64>) -> Result<Option<Measure>, String> {
    match (ms, count) {
        (Some(_), Some(_)) => Err(format!(
            "`{what}_ms` and a count exclude each other: keep one; a second fault can have the other"
        )),
        (ms, count) => Ok(ms.map(Measure::Ms).or(count.map(Measure::Count))),
    }
}

fn within(key: &str, value: u64, min: u64, max: u64) -> Result<u64, String> {
    if (min..=max).contains(&value) {
        Ok(value)
    } else {
        Err(format!("`{key}` is {value}; choose {min} to {max}"))
    }
}
