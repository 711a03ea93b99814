//! The parameters of a measurement, and its results.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::application::Application;
use crate::keys::Distribution;
use crate::ledger::Verified;

/// The parameters of one measurement. The plan's checks ensure that sizes are multiples of a granule and not zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// The steps of each access.
    pub application: Application,
    /// Size of the region.
    pub region_bytes: u64,
    /// Bytes of each access, and its alignment.
    pub access_bytes: usize,
    /// Share of WRITEs; the other accesses are READs.
    pub write_percent: u32,
    /// Popularity of keys.
    pub distribution: Distribution,
    /// The exponent for [`Distribution::Zipf`].
    pub theta: f64,
    /// Client threads.
    pub threads: usize,
    /// The accesses in flight of each thread.
    pub depth: usize,
    /// Whether the data of READs is verified.
    pub verify: bool,
    /// The time from the start of the measurement to the switch of the hotspot.
    pub switch_after: Option<Duration>,
    /// The time before the measurement, which is not counted.
    pub warm_up: Duration,
    /// The measured time.
    pub measured: Duration,
}

impl Workload {
    /// The number of keys.
    pub fn key_count(&self) -> u64 {
        self.application.key_count(self.region_bytes, self.access_bytes as u64)
    }
}

/// The length of a [`Measured::timeline`]'s steps.
pub const STEP: Duration = Duration::from_millis(100);

/// A histogram of nanoseconds, with a precision of three digits.
pub type Latencies = Histogram<u64>;

/// The maximum of the histograms. The timeout of accesses is shorter.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// An empty histogram.
pub fn latencies() -> Latencies {
    // The range is fixed, because a resizable histogram would allocate in `record`, during a measurement.
    Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("the bounds are in order")
}

/// The results of a measurement, for one thread or all.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The time in which the accesses were counted, in seconds.
    pub seconds: f64,
    /// READs completed in that time.
    pub reads: u64,
    /// WRITEs completed in that time.
    pub writes: u64,
    /// The steps completed in that time that came before READs and WRITEs, to look up their addresses.
    pub lookups: u64,
    /// Latencies of those READs.
    pub read_latencies: Latencies,
    /// Latencies of those WRITEs.
    pub write_latencies: Latencies,
    /// Accesses completed in each [`STEP`].
    pub timeline: Vec<u64>,
    /// The verified granules, including those of the warm-up.
    pub verified: Verified,
}

impl Measured {
    /// Empty results.
    pub fn empty(measured: Duration) -> Measured {
        Measured {
            seconds: measured.as_secs_f64(),
            reads: 0,
            writes: 0,
            lookups: 0,
            read_latencies: latencies(),
            write_latencies: latencies(),
            timeline: vec![0; measured.as_nanos().div_ceil(STEP.as_nanos()) as usize],
            verified: Verified::default(),
        }
    }

    /// Adds the results of another thread for the same time.
    pub fn add(&mut self, other: &Measured) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.lookups += other.lookups;
        self.read_latencies += &other.read_latencies;
        self.write_latencies += &other.write_latencies;
        for (sum, more) in self.timeline.iter_mut().zip(&other.timeline) {
            *sum += more;
        }
        self.verified.granules += other.verified.granules;
        self.verified.mixed += other.verified.mixed;
    }

    /// READs and WRITEs per second.
    pub fn ops_per_s(&self) -> f64 {
        (self.reads + self.writes) as f64 / self.seconds
    }

    /// A percentile over READs and WRITEs together, in microseconds.
    pub fn latency_us(&self, percentile: f64) -> f64 {
        let mut all = self.read_latencies.clone();
        all += &self.write_latencies;
        all.value_at_percentile(percentile) as f64 / 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_precise_from_nanoseconds_to_seconds() {
        let mut measured = Measured::empty(Duration::from_secs(1));
        for (count, nanoseconds) in [(50, 100), (40, 70_000), (9, 5_000_000), (1, 2_000_000_000)] {
            measured.read_latencies.record_n(nanoseconds, count).unwrap();
        }
        measured.write_latencies.saturating_record(u64::MAX);
        let near = |percentile, expected: f64| {
            let found = measured.latency_us(percentile);
            assert!((found / expected - 1.0).abs() < 0.002, "p{percentile}: {found}, not {expected}");
        };
        near(40.0, 0.1);
        near(80.0, 70.0);
        near(95.0, 5_000.0);
        near(99.0, 2e6);
        near(100.0, 60e6);
    }
}
