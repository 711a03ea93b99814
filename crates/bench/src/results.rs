//! The output files: a CSV file for each figure, and a JSON file of all results with the machine's description.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::disk::DiskLimit;
use crate::machine::Machine;
use crate::plan::{Metric, Mode, Plan, Point, Settings, Timing};
use crate::ratios::Verdict;
use crate::runner::Outcome;
use crate::workload::STEP;

/// An error of writing results.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {error}")]
pub struct ResultsError {
    /// The file.
    pub path: PathBuf,
    /// The error.
    pub error: io::Error,
}

/// One point: a line of a CSV file.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Row {
    /// The plan's name.
    pub figure: String,
    /// The server's mode.
    pub mode: String,
    /// The setting that varies; empty without an axis.
    pub axis: String,
    /// The point's value on the axis.
    pub x: String,
    /// READs and WRITEs per second: the median of the repeats. Empty if the point failed.
    pub ops_per_s: Option<f64>,
    /// The throughput that the paper states.
    pub paper_ops_per_s: Option<f64>,
    /// The throughput as a share of that of `pin`; empty without such a point.
    pub of_pin: Option<f64>,
    /// The share that the paper states.
    pub paper_of_pin: Option<f64>,
    /// The minimum throughput of the repeats.
    pub ops_per_s_min: Option<f64>,
    /// The maximum throughput of the repeats.
    pub ops_per_s_max: Option<f64>,
    /// The number of repeats.
    pub repeats: u32,
    /// Data of READs and WRITEs.
    pub mib_per_s: Option<f64>,
    /// Median latency of READs and WRITEs.
    pub p50_us: Option<f64>,
    /// The median that the paper states.
    pub paper_p50_us: Option<f64>,
    /// 99th percentile.
    pub p99_us: Option<f64>,
    /// The 99th percentile that the paper states.
    pub paper_p99_us: Option<f64>,
    /// 99.9th percentile.
    pub p999_us: Option<f64>,
    /// The 99.9th percentile that the paper states.
    pub paper_p999_us: Option<f64>,
    /// READs per second.
    pub reads_per_s: Option<f64>,
    /// WRITEs per second.
    pub writes_per_s: Option<f64>,
    /// Metadata requests and READs of keys that came before an access, for an access; empty without an application that
    /// has them.
    pub lookups_per_access: Option<f64>,
    /// Median latency of READs; empty without READs.
    pub read_p50_us: Option<f64>,
    /// 99th percentile of READs; empty without READs.
    pub read_p99_us: Option<f64>,
    /// Median latency of WRITEs; empty without WRITEs.
    pub write_p50_us: Option<f64>,
    /// 99th percentile of WRITEs; empty without WRITEs.
    pub write_p99_us: Option<f64>,
    /// The share of pages that were resident when they were accessed; empty if the server does not count.
    pub hit_ratio: Option<f64>,
    /// Processor time of the server for an access, in microseconds.
    pub server_core_us: Option<f64>,
    /// Processor time of the clients for an access, in microseconds.
    pub client_core_us: Option<f64>,
    /// Pages of the region's file that were read or written for an access; empty if the server does not count them.
    pub ios_per_access: Option<f64>,
    /// Random reads of 4 KiB per second that fio measured beside the point; empty if the disk does not limit it.
    pub disk_iops: Option<f64>,
    /// The throughput as a share of what the disk allows: its reads, of which each miss takes one.
    pub share_of_disk: Option<f64>,
    /// Why the disk was not measured.
    pub disk_not_measured: String,
    /// The server's peak memory use, including page cache.
    pub server_peak_mib: Option<f64>,
    /// Data of READs that was verified.
    pub verified_mib: Option<f64>,
    /// Granules of 64 bytes that were mixtures, because of a concurrent WRITE.
    pub mixed_granules: Option<u64>,
    /// The source of the paper's values.
    pub paper_source: String,
    /// The error, for a point that failed.
    pub error: String,
}

impl Row {
    /// The row of a point.
    pub fn new(plan: &Plan, point: &Point, outcome: &Result<Outcome, String>) -> Row {
        let stated = |metric| plan.stated(point, metric).map(|stated| stated.value);
        let mut sources: Vec<&str> = Metric::ALL
            .iter()
            .filter_map(|&metric| plan.stated(point, metric).map(|stated| stated.source.as_str()))
            .collect();
        sources.dedup();
        let row = Row {
            figure: plan.figure.clone(),
            mode: point.mode.to_string(),
            axis: plan.x.as_ref().map_or(String::new(), |x| x.label.clone()),
            x: point.x.clone(),
            paper_ops_per_s: stated(Metric::OpsPerS),
            paper_p50_us: stated(Metric::P50Us),
            paper_p99_us: stated(Metric::P99Us),
            paper_p999_us: stated(Metric::P999Us),
            paper_of_pin: stated(Metric::OfPin),
            paper_source: sources.join("; "),
            ..Row::default()
        };
        match outcome {
            Ok(outcome) => row.with_outcome(&point.settings, outcome),
            Err(error) => Row { error: error.clone(), ..row },
        }
    }

    fn with_outcome(self, settings: &Settings, outcome: &Outcome) -> Row {
        let measured = &outcome.measured;
        let per_s = |count: u64| count as f64 / measured.seconds;
        let (reads, writes) = (&measured.read_latencies, &measured.write_latencies);
        let micros = |latencies: &crate::workload::Latencies, percentile| {
            (!latencies.is_empty()).then(|| round(latencies.value_at_percentile(percentile) as f64 / 1e3))
        };
        Row {
            ops_per_s: Some(round(measured.ops_per_s())),
            ops_per_s_min: Some(round(outcome.range_ops_per_s.0)),
            ops_per_s_max: Some(round(outcome.range_ops_per_s.1)),
            repeats: outcome.repeats,
            mib_per_s: Some(round(measured.ops_per_s() * settings.size as f64 / f64::from(1 << 20))),
            p50_us: Some(round(measured.latency_us(50.0))),
            p99_us: Some(round(measured.latency_us(99.0))),
            p999_us: Some(round(measured.latency_us(99.9))),
            reads_per_s: Some(round(per_s(measured.reads))),
            lookups_per_access: (measured.lookups > 0)
                .then(|| round(measured.lookups as f64 / (measured.reads + measured.writes) as f64)),
            writes_per_s: Some(round(per_s(measured.writes))),
            read_p50_us: micros(reads, 50.0),
            read_p99_us: micros(reads, 99.0),
            write_p50_us: micros(writes, 50.0),
            write_p99_us: micros(writes, 99.0),
            hit_ratio: outcome.hit_ratio.map(share),
            server_core_us: outcome.costs.server_us.map(round),
            client_core_us: outcome.costs.client_us.map(round),
            ios_per_access: outcome.costs.ios.map(share),
            disk_iops: match outcome.disk {
                Some(DiskLimit::Iops(iops)) => Some(round(iops)),
                _ => None,
            },
            share_of_disk: outcome
                .disk_allows_ops_per_s()
                .map(|allowed| share(measured.ops_per_s() / allowed)),
            disk_not_measured: match &outcome.disk {
                Some(DiskLimit::NotMeasured(reason)) => reason.clone(),
                _ => String::new(),
            },
            server_peak_mib: outcome.peak_bytes.map(|bytes| (bytes >> 20) as f64),
            verified_mib: Some(round(measured.verified.granules as f64 * 64.0 / f64::from(1 << 20))),
            mixed_granules: Some(measured.verified.mixed),
            ..self
        }
    }

    /// The share of what the disk allows, for tables; empty if the disk does not limit the point.
    pub fn share_of_disk_text(&self) -> String {
        match (self.share_of_disk, &*self.disk_not_measured) {
            (Some(share), _) => format!(
                "{share:.2} of {:.0} IOPS / {:.1} %",
                self.disk_iops.unwrap_or_default(),
                self.miss_percent()
            ),
            (None, "") => String::new(),
            (None, reason) => format!("not measured: {reason}"),
        }
    }

    fn miss_percent(&self) -> f64 {
        (1.0 - self.hit_ratio.unwrap_or(1.0)) * 100.0
    }

    /// The value of a metric.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        match metric {
            Metric::OpsPerS => self.ops_per_s,
            Metric::P50Us => self.p50_us,
            Metric::P99Us => self.p99_us,
            Metric::P999Us => self.p999_us,
            Metric::OfPin => self.of_pin,
        }
    }
}

/// Rounds to hundredths, since further digits are noise.
fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// Rounds to a hundredth of a percent.
fn share(ratio: f64) -> f64 {
    (ratio * 1e4).round() / 1e4
}

/// The throughput of a point over time, for a second CSV file.
#[derive(Clone, Debug, Serialize)]
pub struct Timeline {
    /// The server's mode.
    pub mode: String,
    /// Accesses per second in each tenth of a second.
    pub ops_per_s: Vec<f64>,
}

impl Timeline {
    /// The timeline of a point.
    pub fn new(point: &Point, outcome: &Outcome) -> Timeline {
        let per_s = |&count: &u64| count as f64 / STEP.as_secs_f64();
        Timeline {
            mode: point.mode.to_string(),
            ops_per_s: outcome.measured.timeline.iter().map(per_s).collect(),
        }
    }
}

/// The results of a plan's figure.
#[derive(Clone, Debug, Serialize)]
pub struct FigureResults {
    /// The plan.
    pub plan: Plan,
    /// The times that were used.
    pub timing: Timing,
    /// The rows, one for each point.
    pub rows: Vec<Row>,
    /// The timelines, one for each mode; only for plans over time.
    pub timelines: Vec<Timeline>,
}

impl FigureResults {
    /// Adds a point's row. Rows of mode `pin` come before those that are compared with them.
    pub fn push(&mut self, mut row: Row) {
        let is_pin = |other: &&Row| other.mode == Mode::Pin.to_string() && other.x == row.x;
        let pin = self.rows.iter().chain([&row]).find(is_pin);
        let pin_ops_per_s = pin.and_then(|pin| pin.ops_per_s);
        row.of_pin = row.ops_per_s.zip(pin_ops_per_s).map(|(ops_per_s, pin)| share(ops_per_s / pin));
        self.rows.push(row);
    }

    /// Writes `FIGURE.csv`, and `FIGURE.timeline.csv` if there are timelines.
    pub fn write_csv(&self, dir: &Path) -> Result<(), ResultsError> {
        let path = dir.join(format!("{}.csv", self.plan.figure));
        write_rows(&path, self.rows.iter())?;
        if self.timelines.is_empty() {
            return Ok(());
        }
        #[derive(Serialize)]
        struct Step<'a> {
            mode: &'a str,
            second: f64,
            ops_per_s: f64,
        }
        let steps = self.timelines.iter().flat_map(|timeline| {
            timeline.ops_per_s.iter().enumerate().map(|(step, &ops_per_s)| Step {
                mode: &timeline.mode,
                second: round(step as f64 * STEP.as_secs_f64()),
                ops_per_s,
            })
        });
        write_rows(&dir.join(format!("{}.timeline.csv", self.plan.figure)), steps)
    }
}

fn write_rows<T: Serialize>(path: &Path, rows: impl Iterator<Item = T>) -> Result<(), ResultsError> {
    let failed = |error: io::Error| ResultsError { path: path.to_owned(), error };
    let mut file = csv::Writer::from_path(path).map_err(|error| failed(error.into()))?;
    for row in rows {
        file.serialize(row).map_err(|error| failed(error.into()))?;
    }
    file.flush().map_err(failed)
}

/// Writes `ratios.csv`.
pub fn write_verdicts(dir: &Path, verdicts: &[Verdict]) -> Result<(), ResultsError> {
    #[derive(Serialize)]
    struct Line<'a> {
        ratio: &'a str,
        measured: Option<f64>,
        least: Option<f64>,
        most: Option<f64>,
        unit: &'a str,
        threshold: f64,
        target: Option<f64>,
        verdict: &'a str,
        from: &'a str,
    }
    let lines = verdicts.iter().map(|verdict| Line {
        ratio: &verdict.name,
        measured: verdict.value.map(round),
        least: verdict.range.map(|(least, _)| round(least)),
        most: verdict.range.map(|(_, most)| round(most)),
        unit: verdict.unit,
        threshold: verdict.threshold,
        target: verdict.target,
        verdict: verdict.label(),
        from: &verdict.note,
    });
    write_rows(&dir.join("ratios.csv"), lines)
}

/// All figures of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Document {
    /// The machine of the measurements.
    pub machine: Machine,
    /// The processors of server and clients.
    pub processors: String,
    /// `short` or `full`.
    pub length: &'static str,
    /// Whether this was a rehearsal, without meaningful numbers.
    pub is_rehearsal: bool,
    /// The figures, one for each plan.
    pub figures: Vec<FigureResults>,
    /// Verdicts on the promised ratios, if they were measured.
    pub ratios: Vec<Verdict>,
}

impl Document {
    /// The document as JSON text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and numbers always serialize") + "\n"
    }

    /// Writes `results.json`.
    pub fn write(&self, dir: &Path) -> Result<(), ResultsError> {
        let path = dir.join("results.json");
        std::fs::write(&path, self.to_json()).map_err(|error| ResultsError { path, error })
    }
}
