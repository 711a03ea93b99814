//! A plan: the definition of one figure or table of the paper.

mod settings;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use settings::{Axis, Mode, Settings, Storage};

/// An error of a plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The file cannot be read.
    #[error("cannot read the plan {path}: {error}")]
    Read {
        /// The plan's file.
        path: PathBuf,
        /// The error.
        error: std::io::Error,
    },
    /// Not TOML, or not a plan.
    #[error("the plan {path} is invalid: {error}")]
    Syntax {
        /// The plan's file.
        path: PathBuf,
        /// The position and the error, in several lines.
        error: toml::de::Error,
    },
    /// An invalid value.
    #[error("the plan {path} is invalid: {problem}")]
    Value {
        /// The plan's file.
        path: PathBuf,
        /// The error.
        problem: String,
    },
}

/// The kind of plot for a plan's results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Throughput over the axis, with a line for each mode.
    Lines,
    /// Throughput, with a group of bars for each value of the axis and a bar for each mode.
    Bars,
    /// Throughput over time, with a line for each mode and without an axis.
    Time,
    /// Latency percentiles on a logarithmic scale, with a group of bars for each value of the axis.
    Latency,
}

/// A metric of a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// READs and WRITEs per second.
    OpsPerS,
    /// Median latency in microseconds.
    P50Us,
    /// 99th percentile.
    P99Us,
    /// 99.9th percentile.
    P999Us,
    /// Throughput as a share of that of mode `pin` at the same value of the axis.
    OfPin,
}

impl Metric {
    /// All metrics.
    pub const ALL: [Metric; 5] =
        [Metric::OpsPerS, Metric::P50Us, Metric::P99Us, Metric::P999Us, Metric::OfPin];

    /// The name of the CSV column.
    pub fn name(self) -> &'static str {
        match self {
            Metric::OpsPerS => "ops_per_s",
            Metric::P50Us => "p50_us",
            Metric::P99Us => "p99_us",
            Metric::P999Us => "p999_us",
            Metric::OfPin => "of_pin",
        }
    }
}

/// A value that the paper states for a point, and its source.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PaperValue {
    /// The point's mode.
    pub mode: Mode,
    /// The point's value on the axis, as in the plan.
    #[serde(default)]
    pub x: String,
    /// The metric of the value.
    pub metric: Metric,
    /// In the metric's unit.
    pub value: f64,
    /// The source of the value.
    pub source: String,
}

/// The axis of a plan.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct AxisPlan {
    /// The setting that varies.
    pub axis: Axis,
    /// The label below the axis.
    pub label: String,
    /// The values in order.
    pub values: Vec<String>,
    /// The values for the short setting; all if empty.
    #[serde(default)]
    pub short: Vec<String>,
}

/// The times for a point, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Timing {
    /// The warm-up after a server start.
    pub warm_up_s: f64,
    /// The warm-up if the server is shared with the previous point.
    pub rewarm_s: f64,
    /// The measured time.
    pub measured_s: f64,
    /// The measurements of each point. The one with the median throughput is reported, with the minimum and the maximum.
    pub repeats: u32,
}

impl Timing {
    /// The default with `--short`.
    pub const SHORT: Timing = Timing { warm_up_s: 1.5, rewarm_s: 0.6, measured_s: 1.2, repeats: 1 };
    /// The default with `--full`.
    pub const FULL: Timing = Timing { warm_up_s: 2.0, rewarm_s: 0.7, measured_s: 1.5, repeats: 1 };

    /// The error in these times, if any.
    pub(crate) fn check(&self) -> Result<(), String> {
        let is_time = |seconds: f64| (0.0..=86_400.0).contains(&seconds);
        match is_time(self.warm_up_s) && is_time(self.rewarm_s) && is_time(self.measured_s) {
            false => Err("times are 0 to 86400 seconds".to_owned()),
            true if self.measured_s < 0.1 => Err("measured-s is less than 0.1".to_owned()),
            true if !(1..=100).contains(&self.repeats) => Err("repeats is not 1 to 100".to_owned()),
            true => Ok(()),
        }
    }
}

/// The variant of a plan to run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Length {
    /// Few points, short times.
    #[default]
    Short,
    /// All points, longer times.
    Full,
}

/// One figure or table.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Plan {
    /// The name of the results, such as `figure-8`.
    pub figure: String,
    /// The title above the plot.
    pub title: String,
    /// The paper's figure or table, and the source of its axes and settings.
    pub source: String,
    /// The kind of plot.
    pub kind: Kind,
    /// The axis; a plan without one has one point for each mode.
    #[serde(default)]
    pub x: Option<AxisPlan>,
    /// The modes, each with a line or a bar.
    pub modes: Vec<Mode>,
    /// The settings that do not vary.
    #[serde(default)]
    pub settings: Settings,
    /// Times of the short setting.
    #[serde(default = "short")]
    pub short: Timing,
    /// Times of the full setting.
    #[serde(default = "full")]
    pub full: Timing,
    /// Values that the paper states.
    #[serde(default)]
    pub paper: Vec<PaperValue>,
}

fn short() -> Timing {
    Timing::SHORT
}

fn full() -> Timing {
    Timing::FULL
}

/// One measurement of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The server's mode.
    pub mode: Mode,
    /// The point's value on the axis; empty without an axis.
    pub x: String,
    /// The settings of the measurement.
    pub settings: Settings,
}

impl Plan {
    /// Reads a plan and checks all of its points.
    pub fn load(path: &Path) -> Result<Plan, PlanError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| PlanError::Read { path: path.to_owned(), error })?;
        Plan::parse(&text, path)
    }

    /// Parses a plan from text; `path` is for error messages.
    pub fn parse(text: &str, path: &Path) -> Result<Plan, PlanError> {
        let plan: Plan =
            toml::from_str(text).map_err(|error| PlanError::Syntax { path: path.to_owned(), error })?;
        plan.check().map_err(|problem| PlanError::Value { path: path.to_owned(), problem })?;
        Ok(plan)
    }

    fn check(&self) -> Result<(), String> {
        let is_name = |text: &str| text.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '-');
        if self.figure.is_empty() || !is_name(&self.figure) {
            return Err(format!("figure '{}' is not letters, digits and hyphens", self.figure));
        }
        if self.modes.is_empty() {
            return Err("there are no modes".to_owned());
        }
        if matches!((self.kind, &self.x), (Kind::Time, Some(_)) | (Kind::Lines, None)) {
            return Err("kind 'lines' needs an axis, kind 'time' has none".to_owned());
        }
        self.short.check().map_err(|problem| format!("[short]: {problem}"))?;
        self.full.check().map_err(|problem| format!("[full]: {problem}"))?;
        let full = self.points(Length::Full)?;
        if let Some(x) = &self.x {
            let unknown = x.short.iter().find(|value| !x.values.contains(value));
            if let Some(unknown) = unknown {
                return Err(format!("x.short has '{unknown}', which is not in x.values"));
            }
        }
        for stated in &self.paper {
            if !full.iter().any(|point| point.mode == stated.mode && point.x == stated.x) {
                return Err(format!("[[paper]]: no point has mode {} and x '{}'", stated.mode, stated.x));
            }
        }
        Ok(())
    }

    /// The points of a setting. Points of one mode are adjacent, so that they can share a server.
    pub fn points(&self, length: Length) -> Result<Vec<Point>, String> {
        let values: &[String] = match &self.x {
            None => &[String::new()],
            Some(x) if x.values.is_empty() => return Err("x.values is empty".to_owned()),
            Some(x) if length == Length::Short && !x.short.is_empty() => &x.short,
            Some(x) => &x.values,
        };
        let mut points = Vec::new();
        for &mode in &self.modes {
            for value in values {
                let settings = match &self.x {
                    None => self.settings.clone(),
                    Some(x) => (self.settings.with(x.axis, value))
                        .map_err(|problem| format!("x.values: {problem}"))?,
                };
                settings.check()?;
                points.push(Point { mode, x: value.clone(), settings });
            }
        }
        Ok(points)
    }

    /// The times of a setting.
    pub fn timing(&self, length: Length) -> Timing {
        match length {
            Length::Short => self.short,
            Length::Full => self.full,
        }
    }

    /// The value that the paper states for a point, if any.
    pub fn stated(&self, point: &Point, metric: Metric) -> Option<&PaperValue> {
        self.paper
            .iter()
            .find(|stated| stated.mode == point.mode && stated.x == point.x && stated.metric == metric)
    }
}

/// Seconds of a plan as a duration.
pub fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        figure = "figure-8"
        title = "READ sizes"
        source = "figure-8.py"
        kind = "lines"
        modes = ["pin", "rpc-tiering-promote"]
        [x]
        axis = "size"
        label = "Read size"
        values = ["64", "4K", "16K"]
        short = ["4K"]
        [settings]
        region = "1G"
        dram-percent = 25
        [[paper]]
        mode = "pin"
        x = "4K"
        metric = "p50-us"
        value = 3.5
        source = "somewhere"
    "#;

    fn problem(text: &str) -> String {
        Plan::parse(text, Path::new("a.toml")).expect_err(text).to_string()
    }

    #[test]
    fn a_plan_becomes_points() {
        let plan = Plan::parse(GOOD, Path::new("a.toml")).unwrap();
        let points = plan.points(Length::Full).unwrap();
        assert_eq!(points.len(), 6);
        assert_eq!((points[1].mode, points[1].settings.size), (Mode::Pin, 4096));
        assert_eq!((points[5].mode, points[5].settings.size), (Mode::RpcTieringPromote, 16384));
        assert_eq!((points[0].settings.region, points[0].settings.dram_bytes()), (1 << 30, 256 << 20));
        let short = plan.points(Length::Short).unwrap();
        assert_eq!(short.iter().map(|point| point.x.as_str()).collect::<Vec<_>>(), ["4K", "4K"]);
        assert_eq!(plan.stated(&short[0], Metric::P50Us).unwrap().value, 3.5);
        assert!(plan.stated(&short[1], Metric::P50Us).is_none());
        assert_eq!(plan.timing(Length::Short), Timing::SHORT);
    }

    #[test]
    fn errors_state_the_mistake() {
        for (from, to, expected) in [
            ("kind = \"lines\"", "kind = \"pie\"", "pie"),
            ("kind = \"lines\"", "kind = \"time\"", "kind 'time' has none"),
            ("\"pin\", ", "\"pinned\", ", "pinned"),
            ("modes = [\"pin\", \"rpc-tiering-promote\"]", "modes = []", "no modes"),
            ("\"16K\"", "\"16Q\"", "16Q"),
            ("\"16K\"", "\"100\"", "multiple of 64"),
            ("\"16K\"", "\"8M\"", "larger than 4M"),
            ("short = [\"4K\"]", "short = [\"8K\"]", "not in x.values"),
            ("dram-percent = 25", "dram-percent = 0", "dram-percent 0"),
            ("dram-percent = 25", "dram-present = 25", "dram-present"),
            ("region = \"1G\"", "region = \"1000\"", "region 1000"),
            ("x = \"4K\"", "x = \"5K\"", "no point has mode pin and x '5K'"),
            ("figure-8\"", "figure 8\"", "letters, digits and hyphens"),
            ("axis = \"size\"", "axis = \"colour\"", "colour"),
            ("region = \"1G\"", "application = \"database\"", "database"),
            ("region = \"1G\"", "application = \"file-system\"", "depth 64 is more than 32"),
            ("region = \"1G\"", "application = \"key-value-store\"", "values of 128 bytes only"),
            ("axis = \"size\"", "axis = \"operation\"", "'64' is not"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let message = problem(&GOOD.replacen(from, to, 1));
            assert!(message.contains(expected), "{to}: {message}");
            assert!(message.contains("a.toml"), "{message}");
        }
        let timing = "[short]\nwarm-up-s = 1.0\nrewarm-s = 1.0\nmeasured-s = 0.0\nrepeats = 1\n";
        assert!(problem(&format!("{GOOD}\n{timing}")).contains("measured-s"));
    }

    #[test]
    fn an_operation_is_reads_or_writes_of_a_size() {
        let text = GOOD.replace("axis = \"size\"", "axis = \"operation\"");
        let text = text.replace("\"64\", \"4K\", \"16K\"", "\"Read 4K\", \"Write 16K\"");
        let text = text.replace("short = [\"4K\"]", "").replace("x = \"4K\"", "x = \"Read 4K\"");
        let points = Plan::parse(&text, Path::new("a.toml")).unwrap().points(Length::Full).unwrap();
        let operations: Vec<_> =
            points.iter().map(|point| (point.settings.size, point.settings.write_percent)).collect();
        assert_eq!(operations[..2], [(4096, 0), (16384, 100)]);
    }

    #[test]
    fn a_missing_file_is_named() {
        let message = Plan::load(Path::new("/nowhere/plan.toml")).unwrap_err().to_string();
        assert!(message.contains("/nowhere/plan.toml"), "{message}");
    }
}
