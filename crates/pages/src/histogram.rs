//! Histograms of latencies.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Latencies in microseconds. Percentiles are exact to a quarter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStats {
    /// How many there were.
    pub count: u64,
    /// The median.
    pub p50_us: f64,
    /// The 90th percentile.
    pub p90_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The 99.9th percentile.
    pub p999_us: f64,
    /// The longest, rounded up to its bucket.
    pub latency_us_max: f64,
}

/// Buckets per power of two.
const SUB_BUCKETS: usize = 4;
/// 2^6 ns to 2^38 ns, more than four minutes.
const POWERS: std::ops::Range<u32> = 6..38;

/// A histogram of times, with buckets of a quarter of a power of two.
#[derive(Debug)]
pub struct Histogram(Box<[AtomicU64]>);

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram((0..POWERS.len() * SUB_BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Histogram {
    /// Adds a time. Several threads may call this at once.
    pub fn add(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1 << POWERS.start);
        let power = ns.ilog2();
        let sub = (ns >> (power - 2)) as usize % SUB_BUCKETS;
        let bucket = ((power - POWERS.start) as usize * SUB_BUCKETS + sub).min(self.0.len() - 1);
        self.0[bucket].fetch_add(1, Ordering::Relaxed);
    }

    /// The statistics so far.
    pub fn read(&self) -> LatencyStats {
        let counts: Vec<u64> = self.0.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let count: u64 = counts.iter().sum();
        let percentile = |share: f64| {
            let rank = (count as f64 * share).ceil().max(1.0) as u64;
            let mut sum = 0;
            let bucket = counts.iter().position(|count| {
                sum += count;
                sum >= rank
            });
            bucket.map_or(0.0, upper_edge_us)
        };
        LatencyStats {
            count,
            p50_us: percentile(0.5),
            p90_us: percentile(0.9),
            p99_us: percentile(0.99),
            p999_us: percentile(0.999),
            latency_us_max: percentile(1.0),
        }
    }
}

fn upper_edge_us(bucket: usize) -> f64 {
    let power = POWERS.start as usize + bucket / SUB_BUCKETS;
    let quarters = SUB_BUCKETS + bucket % SUB_BUCKETS + 1;
    (quarters << (power - 2)) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact_to_a_quarter() {
        let times = Histogram::default();
        for us in 1..=1000 {
            times.add(Duration::from_micros(us));
        }
        let read = times.read();
        assert_eq!(read.count, 1000);
        for (found, wanted) in [(read.p50_us, 500.0), (read.p99_us, 990.0), (read.latency_us_max, 1000.0)] {
            assert!(found >= wanted && found <= wanted * 1.25, "{found} for {wanted}");
        }
        times.add(Duration::ZERO);
        times.add(Duration::from_secs(100_000));
        assert_eq!(times.read().count, 1002);
        assert_eq!(Histogram::default().read(), LatencyStats::default());
    }
}
