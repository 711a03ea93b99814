//! The file that says which ratios are promised.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::plan::{Length, Mode, PlanError, Point, Settings, Timing};

/// Measurements, and what must hold between them.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RatioPlan {
    /// Above the table.
    pub title: String,
    /// What all points have in common.
    #[serde(default)]
    pub settings: toml::Table,
    /// Times of the short setting.
    pub short: Timing,
    /// Times of the full setting.
    pub full: Timing,
    /// What is measured.
    #[serde(rename = "point")]
    pub points: Vec<NamedPoint>,
    /// Between two of them.
    #[serde(rename = "ratio", default)]
    pub ratios: Vec<Ratio>,
    /// What happens when the hotspot switches.
    #[serde(rename = "switch", default)]
    pub switches: Vec<Switch>,
}

/// A measurement that ratios refer to.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct NamedPoint {
    /// What ratios call it.
    pub name: String,
    /// How the server serves.
    pub mode: Mode,
    /// Settings that are not the common ones.
    #[serde(default)]
    pub set: toml::Table,
    /// Measured for this long instead; the switch of the hotspot needs its time.
    #[serde(default)]
    pub measured_s: Option<f64>,
    /// Warmed up for this long instead with the full setting: what fills its memory by page faults needs longer.
    #[serde(default)]
    pub full_warm_up_s: Option<f64>,
}

/// Throughput of one point through that of another.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Ratio {
    /// In the table.
    pub name: String,
    /// Numerator.
    pub of: String,
    /// Denominator.
    pub to: String,
    /// Must be reached.
    pub bar: f64,
    /// Should be reached.
    #[serde(default)]
    pub target: Option<f64>,
}

/// Limits for a point whose hotspot switches.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Switch {
    /// In the table.
    pub name: String,
    /// Which point.
    pub point: String,
    /// How much lower throughput may be in the worst half second, in percent of what it was before.
    pub drop_percent_max: f64,
    /// When it must be back at 95 %, in seconds.
    pub back_s_max: f64,
}

impl RatioPlan {
    /// Whether this is the text of such a file rather than of a figure's plan.
    pub fn is_one(text: &str) -> bool {
        toml::from_str::<toml::Table>(text).is_ok_and(|table| table.contains_key("point"))
    }

    /// Reads the text and checks it; `path` is for messages.
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
                return Err(format!("two points are called '{}'", named.name));
            }
        }
        let used = self.ratios.iter().flat_map(|ratio| [&ratio.of, &ratio.to]);
        for name in used.chain(self.switches.iter().map(|switch| &switch.point)) {
            if !self.points.iter().any(|named| named.name == *name) {
                return Err(format!("no point is called '{name}'"));
            }
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

    /// A point with all of its settings.
    pub fn point(&self, named: &NamedPoint) -> Result<Point, String> {
        let mut table = self.settings.clone();
        table.extend(named.set.clone());
        let settings = Settings::deserialize(table)
            .map_err(|error| format!("point '{}': {}", named.name, error.message()))?;
        settings.check().map_err(|problem| format!("point '{}': {problem}", named.name))?;
        Ok(Point { mode: named.mode, x: named.name.clone(), settings })
    }

    /// All points in order, each with its times for one round.
    pub fn round(&self, length: Length) -> Result<Vec<(Point, Timing)>, String> {
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

    /// How many rounds there are.
    pub fn rounds(&self, length: Length) -> u32 {
        if length == Length::Full { self.full.repeats } else { self.short.repeats }
    }
}
