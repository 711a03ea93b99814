//! Statistics of a tier and its regions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How an access through the pager was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A copy to or from the mapping of a unit that had become resident meanwhile.
    Late,
    /// A copy to or from the mapping, because the method is [`crate::IoMethod::Mapping`].
    Mapping,
    /// From the page cache, without waiting.
    Cached,
    /// Through the page cache.
    Buffered,
    /// Bypassing the page cache.
    Direct,
}

/// Accesses by how they were carried out. An access to two units counts for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindCounts {
    /// The unit had become resident when the access started.
    pub late_hits: u64,
    /// By copies to or from the mapping, including page faults. With the fault pager: pages that faults have mapped.
    pub mapping: u64,
    /// From the page cache, without waiting.
    pub cached: u64,
    /// Through the page cache.
    pub buffered: u64,
    /// Bypassing the page cache.
    pub direct: u64,
}

impl KindCounts {
    /// The accesses that were no hits.
    pub fn misses(&self) -> u64 {
        self.mapping + self.cached + self.buffered + self.direct
    }
}

/// Latencies of misses, from the call to the outcome, in microseconds. Percentiles are exact to a quarter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyStats {
    /// The number of misses.
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

/// Statistics of a region so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RegionStats {
    /// The name that the server gives; empty without one.
    #[serde(default)]
    pub name: String,
    /// The address of the region's mapping.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// The number of resident units.
    pub units_resident: u64,
    /// Accesses whose memory was all resident. An access to two units counts for each, here and in `misses`; both are
    /// as of the last period.
    pub hits: u64,
    /// All other accesses. A long access may take several I/Os, which `reads` and `writes` count.
    pub misses: u64,
    /// Reads through the pager.
    pub reads: KindCounts,
    /// Writes and atomics through the pager.
    pub writes: KindCounts,
    /// Flushes.
    pub flushes: u64,
    /// Accesses that failed.
    pub errors: u64,
    /// Bytes that misses read.
    pub bytes_read: u64,
    /// Bytes that misses wrote.
    pub bytes_written: u64,
    /// Units promoted.
    pub promotions: u64,
    /// Units demoted.
    pub demotions: u64,
    /// Units that could not be promoted, or written back.
    pub moves_failed: u64,
    /// Latencies of misses.
    pub latency: LatencyStats,
}

/// Statistics of a tier so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TierStats {
    /// The limit on locked memory, in bytes.
    pub dram_bytes: u64,
    /// Locked memory, in bytes.
    pub locked_bytes: u64,
    /// The size of the buffer pool, in bytes.
    pub buffer_bytes: u64,
    /// Requests queued or submitted to the device.
    pub io_in_flight: u64,
    /// In the order in which they were added.
    pub regions: Vec<RegionStats>,
}

/// Atomic counters for [`KindCounts`].
#[derive(Debug, Default)]
pub(crate) struct KindCounters([AtomicU64; 5]);

impl KindCounters {
    pub(crate) fn add(&self, kind: Kind) {
        self.0[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self) -> KindCounts {
        let count = |kind: Kind| self.0[kind as usize].load(Ordering::Relaxed);
        KindCounts {
            late_hits: count(Kind::Late),
            mapping: count(Kind::Mapping),
            cached: count(Kind::Cached),
            buffered: count(Kind::Buffered),
            direct: count(Kind::Direct),
        }
    }
}

/// The counters of a region.
#[derive(Debug, Default)]
pub(crate) struct RegionCounters {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) reads: KindCounters,
    pub(crate) writes: KindCounters,
    pub(crate) flushes: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) promotions: AtomicU64,
    pub(crate) demotions: AtomicU64,
    pub(crate) moves_failed: AtomicU64,
    pub(crate) latency: Histogram,
}

impl RegionCounters {
    /// The counters as statistics. The fields that only the region knows have defaults.
    pub(crate) fn read(&self) -> RegionStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RegionStats {
            hits: load(&self.hits),
            misses: load(&self.misses),
            reads: self.reads.read(),
            writes: self.writes.read(),
            flushes: load(&self.flushes),
            errors: load(&self.errors),
            bytes_read: load(&self.bytes_read),
            bytes_written: load(&self.bytes_written),
            promotions: load(&self.promotions),
            demotions: load(&self.demotions),
            moves_failed: load(&self.moves_failed),
            latency: self.latency.read(),
            ..RegionStats::default()
        }
    }
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
