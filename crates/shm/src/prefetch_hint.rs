//! Where an access is likely to go, before it is checked.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::segment::{prefetch, prefetch_to_write};

/// No key has so many bits.
const NO_KEY: u64 = u64::MAX;

/// Where a queue pair's next access is likely to go in this process: a guess from the region that it accessed last,
/// good only for prefetches. In a large region the page table's entry and the first line are far from the processor.
/// Prefetched when the access is requested, they arrive while locks are taken and keys are checked. Prefetched before
/// the first of those locks, they also arrive while the last copy is still being stored, which that lock waits for.
#[derive(Debug)]
pub struct PrefetchHint {
    key: AtomicU64,
    /// From the peer's addresses to ours. The result may be unmapped by now.
    shift: AtomicU64,
}

impl Default for PrefetchHint {
    fn default() -> PrefetchHint {
        PrefetchHint { key: AtomicU64::new(NO_KEY), shift: AtomicU64::new(0) }
    }
}

impl PrefetchHint {
    /// Prefetches the first line of an access.
    #[inline]
    pub fn prefetch(&self, key: u32, va: u64, writes: bool) {
        if let Some(addr) = self.place(key, va) {
            if writes { prefetch_to_write(addr) } else { prefetch(addr) }
        }
    }

    /// Where the access would be.
    #[inline]
    pub fn place(&self, key: u32, va: u64) -> Option<u64> {
        // The two may be of different regions while another thread changes them: then the guess is wrong.
        let is_known = self.key.load(Ordering::Relaxed) == u64::from(key);
        is_known.then(|| va.wrapping_add(self.shift.load(Ordering::Relaxed)))
    }

    /// Takes a region's key, and the shift from the peer's addresses to ours; `None` if the region is not mapped here.
    pub(crate) fn note(&self, key: u32, shift: Option<u64>) {
        self.shift.store(shift.unwrap_or_default(), Ordering::Relaxed);
        self.key.store(shift.map_or(NO_KEY, |_| key.into()), Ordering::Relaxed);
    }
}
