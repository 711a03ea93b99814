//! Measures the points of plans in order, with a server for each point or for several.

use std::time::{Duration, Instant};

use crate::measure::{Moment, measure};
use crate::plan::{Mode, Point, Timing, seconds};
use crate::test_harness::{Served, ServerCounts, ServerSpec, TestHarness};
use crate::workload::Measured;

/// The result of a point.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The repeat with the median throughput.
    pub measured: Measured,
    /// Least and greatest throughput of all repeats.
    pub range_ops_per_s: (f64, f64),
    /// Share of accesses to resident units in that repeat.
    pub hit_ratio: Option<f64>,
    /// The most memory that the server held.
    pub peak_bytes: Option<u64>,
    /// The number of repeats.
    pub repeats: u32,
}

/// Runs points, and keeps the last point's server.
pub struct Runner<'a> {
    bed: &'a mut dyn TestHarness,
    server: Option<(ServerSpec, Box<dyn Served>)>,
    epoch: u16,
}

impl<'a> Runner<'a> {
    /// A runner without a server. Consecutive points that differ only on the client side share a server, each after a
    /// warm-up of its own.
    pub fn new(bed: &'a mut dyn TestHarness) -> Runner<'a> {
        Runner { bed, server: None, epoch: 0 }
    }

    /// Measures a point. The error is one line for people; after an error, the next point gets a new server.
    pub fn run(&mut self, point: &Point, timing: &Timing) -> Result<Outcome, String> {
        let outcome = self.attempt(point, timing);
        let Err(error) = &outcome else { return outcome };
        match self.server.take().and_then(|(_, mut server)| server.exit_status_text()) {
            Some(ended) => Err(format!("{error} ({ended})")),
            None => outcome,
        }
    }

    fn attempt(&mut self, point: &Point, timing: &Timing) -> Result<Outcome, String> {
        let spec = ServerSpec::new(point.mode, &point.settings);
        let is_same = self.server.as_ref().is_some_and(|(running, _)| *running == spec);
        if !is_same {
            // The old server goes first: memory does not suffice for both.
            self.server = None;
            let server = self.bed.start(&spec).map_err(|error| error.to_string())?;
            self.server = Some((spec, server));
        }
        let (_, server) = self.server.as_ref().expect("just started");
        let mut repeats: Vec<(Measured, Option<f64>)> = Vec::new();
        for repeat in 0..timing.repeats {
            let is_warm = is_same || repeat > 0;
            let warm_up = seconds(if is_warm { timing.rewarm_s } else { timing.warm_up_s });
            self.epoch = self.epoch.checked_add(1).ok_or("too many measurements in one run")?;
            let workload = point.settings.workload(warm_up, seconds(timing.measured_s));
            let mut looks: [Option<ServerCounts>; 2] = [None; 2];
            let measured = measure(&workload, self.epoch, server.connect(), &mut |moment| match moment {
                Moment::Begin => looks[0] = server.counts(),
                Moment::End => looks[1] = server.counts(),
            })
            .map_err(|error| error.to_string())?;
            let accesses = measured.reads + measured.writes;
            let hit_ratio =
                looks[0].zip(looks[1]).and_then(|(before, after)| after.hit_ratio(before, accesses));
            repeats.push((measured, hit_ratio));
        }
        repeats.sort_by(|(one, _), (other, _)| one.ops_per_s().total_cmp(&other.ops_per_s()));
        let range_ops_per_s = (repeats[0].0.ops_per_s(), repeats[repeats.len() - 1].0.ops_per_s());
        let (measured, hit_ratio) = repeats.swap_remove(repeats.len() / 2);
        let peak_bytes = server.peak_bytes();
        Ok(Outcome { measured, range_ops_per_s, hit_ratio, peak_bytes, repeats: timing.repeats })
    }
}

/// The time to start and stop a server, for the estimate only.
const START: Duration = Duration::from_millis(900);
/// The time to preload a GiB, for the estimate only.
const START_PER_GIB: Duration = Duration::from_millis(1500);

fn start(spec: &ServerSpec) -> Duration {
    let bytes = match (spec.mode, spec.preload) {
        (Mode::Pin, _) => spec.region,
        (_, Some(_)) => spec.dram,
        (_, None) => 0,
    };
    START + START_PER_GIB.mul_f64(bytes as f64 / f64::from(1 << 30))
}

/// Estimated times of points, in order.
pub fn estimates(points: &[(Point, Timing)]) -> Vec<Duration> {
    let mut before = None;
    points
        .iter()
        .map(|(point, timing)| {
            let spec = ServerSpec::new(point.mode, &point.settings);
            let is_same = before == Some(spec);
            before = Some(spec);
            let first =
                if is_same { seconds(timing.rewarm_s) } else { start(&spec) + seconds(timing.warm_up_s) };
            first
                + seconds(timing.rewarm_s) * (timing.repeats - 1)
                + seconds(timing.measured_s) * timing.repeats
        })
        .collect()
}

/// The time left: the rest of the estimates, corrected by their error so far.
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

    /// Records another finished point.
    pub fn advance(&mut self, estimate: Duration) {
        self.done += estimate;
    }

    /// The time left.
    pub fn left(&self) -> Duration {
        let left = self.total.saturating_sub(self.done);
        // The first point includes writing the region's file, and predicts little about the others.
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
        fn start(&mut self, spec: &ServerSpec) -> Result<Box<dyn Served>, TestHarnessError> {
            self.started += 1;
            match self.refuse {
                true => Err(TestHarnessError("no memory controller".into())),
                false => self.inner.start(spec),
            }
        }
    }

    fn started_for(points: &[Point]) -> u32 {
        let mut bed = Counting::default();
        let mut runner = Runner::new(&mut bed);
        for point in points {
            let outcome = runner.run(point, &TIMING).unwrap();
            let (least, most) = outcome.range_ops_per_s;
            let median = outcome.measured.ops_per_s();
            assert!(least <= median && median <= most && least > 0.0);
        }
        bed.started
    }

    #[test]
    fn points_that_differ_in_the_clients_only_share_a_server() {
        let points = [point(Mode::Term, 4096), point(Mode::Term, 256), point(Mode::Pin, 256)];
        assert_eq!(started_for(&points), 2);
        // The contents of these servers' memory depend on earlier accesses.
        let points = [point(Mode::Rpc, 4096), point(Mode::Rpc, 256), point(Mode::Rpc, 256)];
        assert_eq!(started_for(&points), 2);
    }

    #[test]
    fn a_server_that_does_not_start_fails_its_point_only() {
        let mut bed = Counting { refuse: true, ..Counting::default() };
        let error = Runner::new(&mut bed).run(&point(Mode::Pin, 4096), &TIMING).unwrap_err();
        assert_eq!(error, "no memory controller");
    }

    #[test]
    fn estimates_count_a_shared_server_once() {
        let timing = Timing { warm_up_s: 2.0, rewarm_s: 1.0, measured_s: 3.0, repeats: 2 };
        let points = [(point(Mode::Term, 4096), timing), (point(Mode::Term, 256), timing)];
        assert_eq!(estimates(&points), [START + seconds(9.0), seconds(8.0)]);
    }
}
