//! The counters of a region.

use std::sync::atomic::{AtomicU64, Ordering};

use terrace_hostmem::PAGE_BYTES;
use terrace_pages::{Histogram, RegionStats};

/// The counters of a region.
#[derive(Debug, Default)]
pub(crate) struct RegionCounters {
    /// Accesses to locked memory: by the NIC itself, and through the pager.
    pub(crate) hits: AtomicU64,
    /// All other accesses; with the fault pager: pages that faults have mapped.
    pub(crate) misses: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) errors: AtomicU64,
    /// Bytes that accesses through the pager have read and written.
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) write_backs_failed: AtomicU64,
    /// Latencies of misses.
    pub(crate) latency: Histogram,
}

impl RegionCounters {
    /// The counters as statistics. The fields that only the region knows have defaults.
    pub(crate) fn read(&self) -> RegionStats {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RegionStats {
            hits: load(&self.hits),
            misses: load(&self.misses),
            pages_read: load(&self.bytes_read).div_ceil(PAGE_BYTES),
            pages_written: load(&self.bytes_written).div_ceil(PAGE_BYTES),
            write_backs_failed: load(&self.write_backs_failed),
            flushes: load(&self.flushes),
            errors: load(&self.errors),
            latency: self.latency.read(),
            ..RegionStats::default()
        }
    }
}
