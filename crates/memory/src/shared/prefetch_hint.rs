//! Where an access will go before anybody has looked whether it may.

use std::sync::atomic::{AtomicU64, Ordering};

use super::segment::{prefetch, prefetch_to_write};

/// No key has so many bits.
const NO_KEY: u64 = u64::MAX;

/// Where a queue pair's next access is likely to go in this process: a guess, by the region that it accessed last, good for nothing but
/// to prefetch. What is far from the processor in a large region is the page table's entry and the first line. Asked for when the access
/// is asked for, they come while locks are taken and keys are checked; and, before the first of those locks, which waits for it, while what
/// was copied before is still being stored.
#[derive(Debug)]
pub struct PrefetchHint {
    key: AtomicU64,
    /// From the peer's addresses to ours. That may be no memory any more.
    shift: AtomicU64,
}

impl Default for PrefetchHint {
    fn default() -> PrefetchHint {
        PrefetchHint { key: AtomicU64::new(NO_KEY), shift: AtomicU64::new(0) }
    }
}

impl PrefetchHint {
    /// Prefetches what an access is about to touch first.
    #[inline]
    pub fn prefetch(&self, key: u32, va: u64, writes: bool) {
        if let Some(addr) = self.place(key, va) {
            if writes { prefetch_to_write(addr) } else { prefetch(addr) }
        }
    }

    /// Where the access would be.
    #[inline]
    pub fn place(&self, key: u32, va: u64) -> Option<u64> {
        // The two may be of different regions while another thread changes them. That is a guess that fails.
        let is_known = self.key.load(Ordering::Relaxed) == u64::from(key);
        is_known.then(|| va.wrapping_add(self.shift.load(Ordering::Relaxed)))
    }

    /// Takes a region's key, and what lies between the peer's addresses in it and ours; of a region that has none here, nothing.
    pub(super) fn note(&self, key: u32, shift: Option<u64>) {
        self.shift.store(shift.unwrap_or_default(), Ordering::Relaxed);
        self.key.store(shift.map_or(NO_KEY, |_| key.into()), Ordering::Relaxed);
    }
}
