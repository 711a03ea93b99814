//! Statistics of a tier and its regions.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use terrace_hostmem::{PAGE_BYTES, UNIT_BYTES};
use terrace_pages::{Histogram, LatencyStats, MemoryStats};

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

impl From<RegionStats> for terrace_pages::RegionStats {
    /// An access that was carried out through the pager is a miss, unless its unit had become resident by then.
    fn from(region: RegionStats) -> terrace_pages::RegionStats {
        terrace_pages::RegionStats {
            name: region.name,
            addr: region.addr,
            len_bytes: region.len,
            resident_bytes: region.units_resident * UNIT_BYTES,
            hits: region.hits + region.reads.late_hits + region.writes.late_hits,
            misses: region.reads.misses() + region.writes.misses(),
            pages_read: region.bytes_read.div_ceil(PAGE_BYTES),
            pages_written: region.bytes_written.div_ceil(PAGE_BYTES),
            evictions: region.demotions * (UNIT_BYTES / PAGE_BYTES),
            write_backs_failed: region.moves_failed,
            flushes: region.flushes,
            errors: region.errors,
            latency: region.latency,
            ..terrace_pages::RegionStats::default()
        }
    }
}

impl From<TierStats> for MemoryStats {
    fn from(tier: TierStats) -> MemoryStats {
        MemoryStats {
            budget_bytes: tier.dram_bytes,
            resident_bytes: tier.locked_bytes,
            dirty_bytes: 0,
            buffer_bytes: tier.buffer_bytes,
            io_in_flight: tier.io_in_flight,
            regions: tier.regions.into_iter().map(Into::into).collect(),
        }
    }
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
