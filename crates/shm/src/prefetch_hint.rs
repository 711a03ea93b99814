//! Where an access is likely to go, before it is checked.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrace_hostmem::{PAGE_BYTES, prefetch, prefetch_to_write};

use crate::page_entry::PageEntry;

/// No key has so many bits.
const NO_KEY: u64 = u64::MAX;

/// Where a queue pair's next access is likely to go in this process: a guess from the region that it accessed last,
/// good only for prefetches. In a large region the page table's entry and the first line are far from the processor.
/// Prefetched when the access is requested, they arrive while locks are taken and keys are checked. Prefetched before
/// the first of those locks, they also arrive while the last copy is still being stored, which that lock waits for.
///
/// Of a region in frames it is the page's entry, which says where the page is.
#[derive(Debug)]
pub struct PrefetchHint {
    key: AtomicU64,
    /// What to add to get an address of ours, which may be unmapped by now: to the peer's address, or to the offset of
    /// an entry in a table of entries for all pages from address 0 on.
    shift: AtomicU64,
    has_entries: AtomicBool,
}

/// Where a region is, for a [`PrefetchHint`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Likely {
    /// This process has the region's `va` here.
    Bytes {
        /// An address of the region.
        va: u64,
        /// Where that is.
        at: u64,
    },
    /// This process has the page table's entry of the page with `va` here.
    Entry {
        /// An address of the region.
        va: u64,
        /// Where its entry is.
        at: u64,
    },
    /// Neither.
    #[default]
    Unknown,
}

/// The offset of a page's entry in a table of all pages.
fn entry_offset(va: u64) -> u64 {
    va / PAGE_BYTES * size_of::<PageEntry>() as u64
}

impl Default for PrefetchHint {
    fn default() -> PrefetchHint {
        PrefetchHint {
            key: AtomicU64::new(NO_KEY),
            shift: AtomicU64::new(0),
            has_entries: AtomicBool::new(false),
        }
    }
}

impl PrefetchHint {
    /// Prefetches the first line of an access, or its page's entry.
    #[inline]
    pub fn prefetch(&self, key: u32, va: u64, writes: bool) {
        if let Some(addr) = self.place(key, va) {
            if writes && !self.has_entries() { prefetch_to_write(addr) } else { prefetch(addr) }
        }
    }

    /// Where the first line would be, or the entry.
    #[inline]
    pub fn place(&self, key: u32, va: u64) -> Option<u64> {
        // The fields may be of different regions while another thread changes them: then the guess is wrong.
        let is_known = self.key.load(Ordering::Relaxed) == u64::from(key);
        let from = if self.has_entries() { entry_offset(va) } else { va };
        is_known.then(|| from.wrapping_add(self.shift.load(Ordering::Relaxed)))
    }

    /// Whether it is of a region in frames.
    #[inline]
    pub fn has_entries(&self) -> bool {
        self.has_entries.load(Ordering::Relaxed)
    }

    /// Takes a region's key, and where it is.
    pub(crate) fn note(&self, key: u32, likely: Likely) {
        let shift = match likely {
            Likely::Bytes { va, at } => Some(at.wrapping_sub(va)),
            Likely::Entry { va, at } => Some(at.wrapping_sub(entry_offset(va))),
            Likely::Unknown => None,
        };
        self.has_entries.store(matches!(likely, Likely::Entry { .. }), Ordering::Relaxed);
        self.shift.store(shift.unwrap_or_default(), Ordering::Relaxed);
        self.key.store(shift.map_or(NO_KEY, |_| key.into()), Ordering::Relaxed);
    }
}
