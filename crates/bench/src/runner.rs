//! The runner: measures the points of plans in order, and starts servers for them.

use std::time::{Duration, Instant};

use crate::application::Application;
use crate::costs::{Costs, Sample, counts_of};
use crate::disk::DiskLimit;
use crate::measure::{SampleTime, measure};
use crate::plan::{Mode, Point, Settings, Storage, Timing, seconds};
use crate::test_harness::{ServerSpec, TestHarness, TestServer};
use crate::workload::Measured;

/// The result of a point.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The repeat with the median throughput.
    pub measured: Measured,
    /// The minimum and the maximum throughput of the repeats.
    pub range_ops_per_s: (f64, f64),
    /// The share of pages that were resident when they were accessed, in that repeat.
    pub hit_ratio: Option<f64>,
    /// What an access cost in that repeat.
    pub costs: Costs,
    /// What the disk allows, measured after the repeats; only of points that it may limit.
    pub disk: Option<DiskLimit>,
    /// The server's peak memory use.
    pub peak_bytes: Option<u64>,
    /// The number of repeats.
    pub repeats: u32,
}

impl Outcome {
    /// The accesses per second that the disk allows: its reads per second, of which each miss takes one. `None` where it
    /// was not measured, or where there are no misses.
    pub fn disk_allows_ops_per_s(&self) -> Option<f64> {
        match (&self.disk, self.hit_ratio) {
            (Some(DiskLimit::Iops(iops)), Some(hit_ratio)) if hit_ratio < 1.0 => {
                Some(iops / (1.0 - hit_ratio))
            }
            _ => None,
        }
    }
}

/// Whether the disk may limit a point, so that it is measured, too: the reads are uniform, and each miss takes one read of
/// the disk.
pub fn is_disk_bound(point: &Point) -> bool {
    let Settings { application, theta, write_percent, size, storage, dram_percent, .. } = point.settings;
    let is_read_per_miss =
        matches!(point.mode, Mode::Term | Mode::Wait) && size <= 4096 && application == Application::Blocks;
    is_read_per_miss && theta == 0.0 && write_percent == 0 && storage == Storage::Disk && dram_percent < 100
}

/// Measures points, and retains the server for the next point.
pub struct Runner<'a> {
    harness: &'a mut dyn TestHarness,
    server: Option<(ServerSpec, Box<dyn TestServer>)>,
    epoch: u16,
}

impl<'a> Runner<'a> {
    /// A runner without a server. Consecutive points that differ only in the clients share a server, each with its own
    /// warm-up.
    pub fn new(harness: &'a mut dyn TestHarness) -> Runner<'a> {
        Runner { harness, server: None, epoch: 0 }
    }

    /// Measures a point. The error is one line of text. After an error, the next point gets a new server.
    pub fn run(&mut self, point: &Point, timing: &Timing) -> Result<Outcome, String> {
        let outcome = self.attempt(point, timing);
        let Err(error) = &outcome else { return outcome };
        match self.server.take().and_then(|(_, mut server)| server.exit_status_text()) {
            Some(exit) => Err(format!("{error} ({exit})")),
            None => outcome,
        }
    }

    fn attempt(&mut self, point: &Point, timing: &Timing) -> Result<Outcome, String> {
        let spec = ServerSpec::new(point.mode, &point.settings);
        let is_same = self.server.as_ref().is_some_and(|(running, _)| *running == spec);
        if !is_same {
            // The old server ends first, because memory does not suffice for both.
            self.server = None;
            let server = self.harness.start(&spec).map_err(|error| error.to_string())?;
            self.server = Some((spec, server));
        }
        let (_, server) = self.server.as_ref().expect("the server was started above");
        let mut repeats: Vec<(Measured, Costs, Option<f64>)> = Vec::new();
        for repeat in 0..timing.repeats {
            let is_warm = is_same || repeat > 0;
            let warm_up = seconds(if is_warm { timing.rewarm_s } else { timing.warm_up_s });
            self.epoch = self.epoch.checked_add(1).ok_or("too many measurements in one run")?;
            let workload = point.settings.workload(warm_up, seconds(timing.measured_s));
            let mut samples = [Sample::default(); 2];
            let measured = measure(&workload, self.epoch, server.connect(), &mut |time| match time {
                SampleTime::Begin => samples[0] = Sample::take(&**server),
                SampleTime::End => samples[1] = Sample::take(&**server),
            })
            .map_err(|error| error.to_string())?;
            let accesses = measured.reads + measured.writes;
            let [before, after] = &samples;
            let lookups = if point.settings.application.looks_up_by_read() { measured.lookups } else { 0 };
            let hit_ratio = counts_of(before, after, workload.measured)
                .and_then(|(before, after)| after.hit_ratio(before, accesses + lookups, point.settings.size));
            repeats.push((measured, Costs::between(before, after, accesses, workload.measured), hit_ratio));
        }
        repeats.sort_by(|(one, ..), (other, ..)| one.ops_per_s().total_cmp(&other.ops_per_s()));
        let range_ops_per_s = (repeats[0].0.ops_per_s(), repeats[repeats.len() - 1].0.ops_per_s());
        let (measured, costs, hit_ratio) = repeats.swap_remove(repeats.len() / 2);
        let peak_bytes = server.peak_bytes();
        let in_flight = point.settings.threads * point.settings.depth;
        let disk = is_disk_bound(point).then(|| self.harness.measure_disk(&spec, in_flight));
        Ok(Outcome { measured, range_ops_per_s, hit_ratio, costs, disk, peak_bytes, repeats: timing.repeats })
    }

    /// Which processors the ends are on.
    pub fn processors(&self) -> String {
        self.harness.processors()
    }
}

/// The estimated time to start and stop a server.
const START: Duration = Duration::from_millis(900);
/// The estimated time to preload a GiB.
const START_PER_GIB: Duration = Duration::from_millis(1500);

/// The estimated time to measure the disk.
const DISK: Duration = Duration::from_millis(2200);

/// The estimated time of a server's start.
fn start_estimate(spec: &ServerSpec) -> Duration {
    let bytes = match (spec.mode, spec.preload) {
        (Mode::Pin, _) => spec.region,
        (_, Some(_)) => spec.dram,
        (_, None) => 0,
    };
    START + START_PER_GIB.mul_f64(bytes as f64 / f64::from(1 << 30))
}

/// The estimated times of points, in order.
pub fn estimates(points: &[(Point, Timing)]) -> Vec<Duration> {
    let mut before = None;
    points
        .iter()
        .map(|(point, timing)| {
            let spec = ServerSpec::new(point.mode, &point.settings);
            let is_same = before == Some(spec);
            before = Some(spec);
            let first = if is_same {
                seconds(timing.rewarm_s)
            } else {
                start_estimate(&spec) + seconds(timing.warm_up_s)
            };
            let disk = if is_disk_bound(point) { DISK } else { Duration::ZERO };
            first
                + disk
                + seconds(timing.rewarm_s) * (timing.repeats - 1)
                + seconds(timing.measured_s) * timing.repeats
        })
        .collect()
}

/// The remaining time: the rest of the estimates, scaled by their error so far.
#[derive(Debug)]
pub struct Clock {
    begun: Instant,
    done: Duration,
    total: Duration,
}

impl Clock {
    /// A clock at the start of the run.
    pub fn new(estimates: &[Duration]) -> Clock {
        Clock { begun: Instant::now(), done: Duration::ZERO, total: estimates.iter().sum() }
    }

    /// Records a finished point.
    pub fn advance(&mut self, estimate: Duration) {
        self.done += estimate;
    }

    /// The remaining time.
    pub fn remaining(&self) -> Duration {
        let left = self.total.saturating_sub(self.done);
        // The first point includes the time to write the region's file, so that its error does not apply to others.
        match self.done < self.total / 10 {
            true => left,
            false => left.mul_f64(self.begun.elapsed().as_secs_f64() / self.done.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Settings;
    use crate::test_harness::{Rehearsal, TestHarnessError};

    const TIMING: Timing = Timing { warm_up_s: 0.0, rewarm_s: 0.0, measured_s: 0.1, repeats: 3 };

    fn point(mode: Mode, size: u64) -> Point {
        let settings = Settings { region: 1 << 20, size, write_percent: 30, ..Settings::default() };
        Point { mode, x: String::new(), settings }
    }

    #[derive(Default)]
    struct Counting {
        inner: Rehearsal,
        started: u32,
        refuse: bool,
    }

    impl TestHarness for Counting {
        fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn TestServer>, TestHarnessError> {
            self.started += 1;
            match self.refuse {
                true => Err(TestHarnessError("no memory controller".into())),
                false => self.inner.start(spec),
            }
        }

        fn measure_disk(&mut self, _: &ServerSpec, in_flight: usize) -> DiskLimit {
            DiskLimit::Iops(in_flight as f64)
        }

        fn processors(&self) -> String {
            self.inner.processors()
        }
    }

    fn started_for(points: &[Point]) -> u32 {
        let mut harness = Counting::default();
        let mut runner = Runner::new(&mut harness);
        for point in points {
            let outcome = runner.run(point, &TIMING).unwrap();
            let (least, most) = outcome.range_ops_per_s;
            let median = outcome.measured.ops_per_s();
            assert!(least <= median && median <= most && least > 0.0);
        }
        harness.started
    }

    #[test]
    fn points_that_differ_only_in_the_clients_share_a_server() {
        let points = [point(Mode::Term, 4096), point(Mode::Term, 256), point(Mode::Pin, 256)];
        assert_eq!(started_for(&points), 2);
        // In this mode the contents of memory depend on earlier accesses, so that other sizes need another server.
        let points = [point(Mode::Rpc, 4096), point(Mode::Rpc, 256), point(Mode::Rpc, 256)];
        assert_eq!(started_for(&points), 2);
    }

    #[test]
    fn the_disk_is_measured_beside_points_that_it_may_limit() {
        let mut uniform = point(Mode::Term, 4096);
        (uniform.settings.theta, uniform.settings.write_percent) = (0.0, 0);
        let mut harness = Counting::default();
        let mut runner = Runner::new(&mut harness);
        let mut outcome = runner.run(&uniform, &TIMING).unwrap();
        // One thread with 64 accesses.
        assert_eq!(outcome.disk, Some(DiskLimit::Iops(64.0)));
        assert_eq!(outcome.disk_allows_ops_per_s(), None, "the rehearsal counts no misses");
        outcome.hit_ratio = Some(0.75);
        assert_eq!(outcome.disk_allows_ops_per_s(), Some(256.0));
        assert_eq!(runner.run(&point(Mode::Term, 4096), &TIMING).unwrap().disk, None);
    }

    #[test]
    fn a_failed_start_fails_only_its_point() {
        let mut harness = Counting { refuse: true, ..Counting::default() };
        let error = Runner::new(&mut harness).run(&point(Mode::Pin, 4096), &TIMING).unwrap_err();
        assert_eq!(error, "no memory controller");
    }

    #[test]
    fn estimates_count_a_shared_server_once() {
        let timing = Timing { warm_up_s: 2.0, rewarm_s: 1.0, measured_s: 3.0, repeats: 2 };
        let points = [(point(Mode::Term, 4096), timing), (point(Mode::Term, 256), timing)];
        assert_eq!(estimates(&points), [START + seconds(9.0), seconds(8.0)]);
    }
}
