//! Statistics of memory and its regions.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use crate::histogram::{Histogram, LatencyStats};

/// Statistics of a region so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionStats {
    /// The name that the server gives; empty without one.
    pub name: String,
    /// The address of the region's first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// The bytes of the region that are in memory.
    pub resident_bytes: u64,
    /// Accesses, counted by page, that found the page in memory.
    pub hits: u64,
    /// The others.
    pub misses: u64,
    /// Pages read from the file.
    pub pages_read: u64,
    /// Pages that came into memory without a read, because they were written whole, or the file had nothing there.
    pub pages_placed: u64,
    /// Pages that left memory.
    pub evictions: u64,
    /// Pages written to the file.
    pub pages_written: u64,
    /// Writes to the file that failed.
    pub write_backs_failed: u64,
    /// Whether the last write to the file failed.
    pub is_failing: bool,
    /// Flushes.
    pub flushes: u64,
    /// Accesses that failed.
    pub errors: u64,
    /// Pages that an earlier process left in memory, and that were taken over.
    pub pages_adopted: u64,
    /// Latencies of accesses that did not find all of their pages in memory, from the request to the outcome.
    pub latency: LatencyStats,
}

/// Statistics of the memory that regions share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryStats {
    /// The limit on the memory for pages, in bytes.
    pub budget_bytes: u64,
    /// The bytes of pages in memory.
    pub resident_bytes: u64,
    /// The part of them that the files lack.
    pub dirty_bytes: u64,
    /// The most memory that accesses under way take, in bytes.
    pub buffer_bytes: u64,
    /// Requests queued or submitted to the files' devices.
    pub io_in_flight: u64,
    /// In the order in which they were added.
    pub regions: Vec<RegionStats>,
}

/// The counters of a region.
#[derive(Debug, Default)]
pub(crate) struct RegionCounters {
    pub(crate) resident: AtomicU64,
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) pages_read: AtomicU64,
    pub(crate) pages_placed: AtomicU64,
    pub(crate) evictions: AtomicU64,
    pub(crate) pages_written: AtomicU64,
    pub(crate) write_backs_failed: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) pages_adopted: AtomicU64,
    pub(crate) latency: Histogram,
}

/// Adds to a counter.
#[inline]
pub(crate) fn add(counter: &AtomicU64, count: u64) {
    if count > 0 {
        counter.fetch_add(count, Ordering::Relaxed);
    }
}

impl RegionCounters {
    /// The counters as statistics. The fields that only the region knows have defaults.
    pub(crate) fn read(&self) -> RegionStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RegionStats {
            resident_bytes: load(&self.resident) * terrace_hostmem::PAGE_BYTES,
            hits: load(&self.hits),
            misses: load(&self.misses),
            pages_read: load(&self.pages_read),
            pages_placed: load(&self.pages_placed),
            evictions: load(&self.evictions),
            pages_written: load(&self.pages_written),
            write_backs_failed: load(&self.write_backs_failed),
            flushes: load(&self.flushes),
            errors: load(&self.errors),
            pages_adopted: load(&self.pages_adopted),
            latency: self.latency.read(),
            ..RegionStats::default()
        }
    }
}
