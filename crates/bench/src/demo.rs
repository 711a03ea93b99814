//! The demo: a region four times as large as the server's memory, in five modes.

use serde::Serialize;

use crate::plan::{Mode, Point, Settings, Timing};
use crate::progress::Progress;
use crate::runner::{Outcome, Runner, estimates};
use crate::test_harness::{REHEARSAL_REGION_BYTES, TestHarness};

/// The modes, in the order of the table. `pin` has memory for all data, `odp` and `rpc` are the prior art.
const MODES: [Mode; 5] = [Mode::Pin, Mode::Odp, Mode::Rpc, Mode::Term, Mode::Wait];
/// The measured times. The modes for comparison get the shortest time with a stable result, so that the demo takes less
/// than a minute and a half.
const TERM_S: f64 = 20.0;
const OTHERS_S: f64 = 8.0;
const WARM_UP_S: f64 = 2.0;

/// A line of the table.
#[derive(Clone, Debug, Serialize)]
pub struct DemoRow {
    /// The server's mode.
    pub mode: Mode,
    /// The measured time.
    pub seconds: f64,
    /// READs and WRITEs per second.
    pub ops_per_s: f64,
    /// Median latency.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// The share of accesses to resident units; `None` if the server does not count.
    pub hit_ratio: Option<f64>,
    /// Data of READs that was verified.
    pub verified_mib: f64,
    /// The server's peak memory use, including page cache.
    pub server_peak_mib: Option<f64>,
    /// The error, for a mode that failed.
    pub error: Option<String>,
}

/// Titles of [`DemoRow::cells`].
pub const HEADER: [&str; 8] =
    ["mode", "seconds", "accesses/s", "p50 us", "p99 us", "hit ratio", "MiB verified", "server's peak MiB"];

impl DemoRow {
    fn new(point: &Point, timing: &Timing, outcome: Result<Outcome, String>) -> DemoRow {
        let empty = DemoRow {
            mode: point.mode,
            seconds: timing.measured_s,
            ops_per_s: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            hit_ratio: None,
            verified_mib: 0.0,
            server_peak_mib: None,
            error: None,
        };
        match outcome {
            Err(error) => DemoRow { error: Some(error), ..empty },
            Ok(Outcome { measured, hit_ratio, peak_bytes, .. }) => DemoRow {
                ops_per_s: measured.ops_per_s(),
                p50_us: measured.latency_us(50.0),
                p99_us: measured.latency_us(99.0),
                hit_ratio,
                verified_mib: measured.verified.granules as f64 * 64.0 / f64::from(1 << 20),
                server_peak_mib: peak_bytes.map(|bytes| (bytes >> 20) as f64),
                ..empty
            },
        }
    }

    /// The cells of the line. Errors are printed below the table.
    pub fn cells(&self) -> Vec<String> {
        if self.error.is_some() {
            let mut cells = vec![self.mode.to_string()];
            cells.resize(HEADER.len(), "-".to_owned());
            return cells;
        }
        vec![
            self.mode.to_string(),
            format!("{:.0}", self.seconds),
            format!("{:.0}", self.ops_per_s),
            format!("{:.1}", self.p50_us),
            format!("{:.1}", self.p99_us),
            self.hit_ratio.map_or("-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0)),
            format!("{:.0}", self.verified_mib),
            self.server_peak_mib.map_or("-".to_owned(), |peak| format!("{peak:.0}")),
        ]
    }
}

/// A line for each mode that failed.
pub fn failures(rows: &[DemoRow]) -> String {
    let failed = rows.iter().filter_map(|row| row.error.as_ref().map(|error| (row.mode, error)));
    failed.map(|(mode, error)| format!("{mode} FAILED: {error}\n")).collect()
}

/// The title above the table.
pub const TITLE: &str = "a 2 GiB region on a server with 512 MiB of memory: 64 accesses in flight, half READs, half WRITEs of 4 KiB, \
    Zipf 0.99, every byte READ verified (pin: memory for the whole region)";

/// The memory that the server of mode `pin` locks, in bytes: the whole region.
pub fn pinned_bytes() -> u64 {
    Settings::default().region
}

/// All modes, or, where this user may not lock so much memory, all but `pin`.
pub fn modes(may_pin: bool) -> Vec<Mode> {
    MODES.into_iter().filter(|mode| may_pin || *mode != Mode::Pin).collect()
}

/// Measures modes. A rehearsal uses a small region and a short time.
pub fn run(harness: &mut dyn TestHarness, modes: &[Mode], is_rehearsal: bool) -> Vec<DemoRow> {
    let settings = Settings { dram_percent: 25, write_percent: 50, ..Settings::default() };
    let settings = match is_rehearsal {
        true => Settings { region: REHEARSAL_REGION_BYTES, ..settings },
        false => settings,
    };
    let points: Vec<(Point, Timing)> = modes
        .iter()
        .map(|&mode| {
            let seconds = if mode == Mode::Term { TERM_S } else { OTHERS_S };
            let (warm_up_s, measured_s) = if is_rehearsal { (0.0, 0.2) } else { (WARM_UP_S, seconds) };
            let timing = Timing { warm_up_s, rewarm_s: warm_up_s, measured_s, repeats: 1 };
            (Point { mode, x: String::new(), settings: settings.clone() }, timing)
        })
        .collect();
    let mut progress = Progress::new(estimates(&points));
    let mut runner = Runner::new(harness);
    let mut rows = Vec::new();
    for (point, timing) in &points {
        let name = point.mode.to_string();
        progress.begin(&name);
        let row = DemoRow::new(point, timing, runner.run(point, timing));
        progress.end(&name, &row.error.clone().unwrap_or_else(|| format!("{:.0} accesses/s", row.ops_per_s)));
        rows.push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_harness::Rehearsal;

    #[test]
    fn all_five_modes_have_a_line() {
        let rows = run(&mut Rehearsal::default(), &modes(true), true);
        assert_eq!((rows.len(), modes(false).len()), (5, 4));
        for row in &rows {
            assert!(row.error.is_none() && row.ops_per_s > 0.0 && row.verified_mib > 0.0, "{row:?}");
            assert_eq!(row.cells().len(), HEADER.len());
        }
    }

    #[test]
    fn a_failed_mode_has_its_error() {
        let timing = Timing::SHORT;
        let point = Point { mode: Mode::Odp, x: String::new(), settings: Settings::default() };
        let row = DemoRow::new(&point, &timing, Err("no rights".into()));
        let cells = row.cells();
        assert_eq!((cells.len(), cells[2].as_str()), (HEADER.len(), "-"));
        assert_eq!(failures(&[row]), "odp FAILED: no rights\n");
    }
}
