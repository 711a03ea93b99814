//! The plan of promised ratios.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::plan::{Length, Mode, PlanError, Point, Settings, Timing};
use crate::runner::is_disk_bound;

/// A plan of points and of promises about them.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RatioPlan {
    /// The title above the table.
    pub title: String,
    /// The settings common to all points.
    #[serde(default)]
    pub settings: toml::Table,
    /// Times of the short setting.
    pub short: Timing,
    /// Times of the full setting.
    pub full: Timing,
    /// The points to measure.
    #[serde(rename = "point")]
    pub points: Vec<NamedPoint>,
    /// Promised ratios between two points.
    #[serde(rename = "ratio", default)]
    pub ratios: Vec<Ratio>,
    /// Promised shares of what the disk allows.
    #[serde(rename = "disk", default)]
    pub disks: Vec<DiskShare>,
    /// Promised hit ratios.
    #[serde(default)]
    pub hits: Vec<Hits>,
    /// Limits around a switch of the hotspot.
    #[serde(rename = "switch", default)]
    pub switches: Vec<Switch>,
}

/// A named measurement.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NamedPoint {
    /// The name of the point.
    pub name: String,
    /// The server's mode.
    pub mode: Mode,
    /// Settings that differ from the common ones.
    #[serde(default)]
    pub set: toml::Table,
    /// The measured time, if it differs from the common one. A switch of the hotspot requires a longer time.
    #[serde(default)]
    pub measured_s: Option<f64>,
    /// The warm-up of the full setting, if it differs from the common one. Modes that fill memory by page faults require a
    /// longer one.
    #[serde(default)]
    pub full_warm_up_s: Option<f64>,
    /// The rounds in which the point is measured, if not in all: for results that hardly differ from round to round.
    #[serde(default)]
    pub rounds_max: Option<u32>,
}

/// The throughput of one point divided by that of another.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Ratio {
    /// The name in the table.
    pub name: String,
    /// The point of the numerator.
    pub of: String,
    /// The point of the denominator.
    pub to: String,
    /// The threshold that must be counts.
    pub threshold: f64,
    /// The target that should be counts.
    #[serde(default)]
    pub target: Option<f64>,
}

/// The throughput of a point divided by what the disk allows: its reads, of which each miss takes one.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskShare {
    /// The name in the table.
    pub name: String,
    /// The point.
    pub point: String,
    /// The threshold of the share.
    pub threshold: f64,
}

/// The hit ratio of a point beside the best possible one.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Hits {
    /// The name in the table.
    pub name: String,
    /// The point.
    pub point: String,
    /// By how many percentage points the hit ratio may be lower.
    pub points_below_optimum_max: f64,
}

/// Limits for a point whose hotspot switches.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Switch {
    /// The name in the table.
    pub name: String,
    /// The point.
    pub point: String,
    /// The largest drop of throughput in the worst half second, in percent of the throughput before.
    pub drop_percent_max: f64,
    /// The maximum time until throughput is at 95 % of the throughput before, in seconds.
    pub recovery_s_max: f64,
}

impl RatioPlan {
    /// Whether the text is a plan of ratios, not of a figure.
    pub fn is_ratio_plan(text: &str) -> bool {
        toml::from_str::<toml::Table>(text).is_ok_and(|table| table.contains_key("point"))
    }

    /// Parses and checks the text; `path` is for error messages.
    pub fn parse(text: &str, path: &Path) -> Result<RatioPlan, PlanError> {
        let plan: RatioPlan =
            toml::from_str(text).map_err(|error| PlanError::Syntax { path: path.to_owned(), error })?;
        plan.check().map_err(|problem| PlanError::Value { path: path.to_owned(), problem })?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), String> {
        self.short.check().and(self.full.check())?;
        self.round(Length::Short).and(self.round(Length::Full))?;
        for (index, named) in self.points.iter().enumerate() {
            self.point(named)?;
            if self.points[..index].iter().any(|other| other.name == named.name) {
                return Err(format!("two points are named '{}'", named.name));
            }
        }
        let used = self.ratios.iter().flat_map(|ratio| [&ratio.of, &ratio.to]);
        let used = used.chain(self.disks.iter().map(|disk| &disk.point));
        let used = used.chain(self.hits.iter().map(|hits| &hits.point));
        for name in used.chain(self.switches.iter().map(|switch| &switch.point)) {
            if !self.points.iter().any(|named| named.name == *name) {
                return Err(format!("no point is named '{name}'"));
            }
        }
        for disk in &self.disks {
            let named = self.points.iter().find(|named| named.name == disk.point);
            if !named.is_some_and(|named| self.point(named).is_ok_and(|point| is_disk_bound(&point))) {
                return Err(format!("the disk does not limit '{}'", disk.point));
            }
        }
        for named in self.points.iter().filter(|named| self.hits.iter().any(|hits| hits.point == named.name))
        {
            let optimum = super::hits::optimum(&self.point(named)?.settings);
            optimum.map_err(|problem| format!("point '{}': {problem}", named.name))?;
        }
        for switch in &self.switches {
            let named = self.points.iter().find(|named| named.name == switch.point);
            let switches = named.is_some_and(|named| {
                self.point(named).is_ok_and(|point| point.settings.switch_at_percent.is_some())
            });
            if !switches {
                return Err(format!("'{}' has no switch-at-percent", switch.point));
            }
        }
        Ok(())
    }

    /// A point with its common and own settings.
    pub fn point(&self, named: &NamedPoint) -> Result<Point, String> {
        let mut table = self.settings.clone();
        table.extend(named.set.clone());
        let settings = Settings::deserialize(table)
            .map_err(|error| format!("point '{}': {}", named.name, error.message()))?;
        settings.check().map_err(|problem| format!("point '{}': {problem}", named.name))?;
        Ok(Point { mode: named.mode, x: named.name.clone(), settings })
    }

    /// All points in order, each with its times for one round.
    fn round(&self, length: Length) -> Result<Vec<(Point, Timing)>, String> {
        let timing = if length == Length::Full { self.full } else { self.short };
        let timed = |named: &NamedPoint| {
            let measured_s = named.measured_s.unwrap_or(timing.measured_s);
            let longer = named.full_warm_up_s.filter(|_| length == Length::Full);
            let warm_up_s = longer.unwrap_or(timing.warm_up_s);
            let timing = Timing { warm_up_s, measured_s, repeats: 1, ..timing };
            timing.check().map_err(|problem| format!("point '{}': {problem}", named.name))?;
            Ok((self.point(named)?, timing))
        };
        self.points.iter().map(timed).collect()
    }

    /// All measurements of all rounds in order, each with the index of its point.
    ///
    /// # Errors
    /// If a point is invalid.
    pub fn schedule(&self, length: Length) -> Result<Vec<(usize, Point, Timing)>, String> {
        let points = self.round(length)?;
        let rounds = if length == Length::Full { self.full.repeats } else { self.short.repeats };
        let is_due = |round: u32, index: usize| self.points[index].rounds_max.is_none_or(|max| round < max);
        let of_round = |round: u32| {
            let indexed = points.iter().enumerate().filter(move |(index, _)| is_due(round, *index));
            indexed.map(|(index, (point, timing))| (index, point.clone(), *timing))
        };
        Ok((0..rounds).flat_map(of_round).collect())
    }
}
