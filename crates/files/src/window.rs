//! Windows: mappings of parts of a file, and which of their pages are in the page cache.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::budget::Share;
use crate::sys::Mapping;

/// For how long the kernel's answer counts that a page is in the page cache. If the page leaves before, a copy takes a
/// page fault, which costs time and never bytes.
const KNOWN_MS_MAX: u64 = 1000;

/// A mapping of a part of a file. It may reach beyond the end of the file.
#[derive(Debug)]
pub struct Window {
    /// The offset of its first byte in the file.
    start: u64,
    mapping: Mapping,
    /// A bit per page: it was in the page cache at `known_since` or later.
    known: Box<[AtomicU64]>,
    known_since_ms: AtomicU64,
    /// Accessed since the budget looked.
    pub is_used: AtomicBool,
    _share: Share,
}

impl Window {
    /// A window that begins at `start` in the file.
    pub fn new(start: u64, mapping: Mapping, mut share: Share, now_ms: u64) -> Window {
        share.set_bytes(mapping.len());
        let words = mapping.len().div_ceil(PAGE_BYTES).div_ceil(u64::BITS.into());
        Window {
            start,
            known: (0..words).map(|_| AtomicU64::new(0)).collect(),
            mapping,
            known_since_ms: AtomicU64::new(now_ms),
            is_used: AtomicBool::new(true),
            _share: share,
        }
    }

    /// The offset of its first byte in the file.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Whether a range of the file lies within the window.
    #[inline]
    pub fn covers(&self, part: HostRange) -> bool {
        HostRange { addr: self.start, len: self.mapping.len() }.covers(part)
    }

    /// The address of a byte of the file.
    #[inline]
    pub fn place(&self, offset: u64) -> u64 {
        self.mapping.addr() + (offset - self.start)
    }

    /// The pages of a range within the window.
    fn pages(&self, part: HostRange) -> std::ops::Range<u64> {
        let offset = part.addr - self.start;
        offset / PAGE_BYTES..(offset + part.len).div_ceil(PAGE_BYTES)
    }

    /// Whether the kernel has said lately that all pages of a range are in the page cache.
    #[inline]
    pub fn is_known(&self, part: HostRange, now_ms: u64) -> bool {
        if now_ms.wrapping_sub(self.known_since_ms.load(Ordering::Relaxed)) > KNOWN_MS_MAX {
            self.forget_all(now_ms);
            return false;
        }
        self.pages(part).all(|page| {
            let word = &self.known[(page / 64) as usize];
            word.load(Ordering::Relaxed) & 1 << (page % 64) != 0
        })
    }

    /// Forgets which pages are in the page cache.
    #[cold]
    pub fn forget_all(&self, now_ms: u64) {
        self.known.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.known_since_ms.store(now_ms, Ordering::Relaxed);
    }

    /// Asks the kernel about the pages of a range. `is_no_read_needed` is asked about a page that is not in the page
    /// cache, by its range in the file. True if no page has to be read from the disk.
    #[cold]
    pub fn ask(&self, part: HostRange, is_no_read_needed: impl Fn(HostRange) -> bool) -> bool {
        let mut is_present = true;
        let asked = self.mapping.for_pages(part.addr - self.start, part.len, |page, is_cached| {
            if is_cached {
                self.known[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::Relaxed);
                return true;
            }
            let range = HostRange { addr: self.start + page * PAGE_BYTES, len: PAGE_BYTES };
            is_present = is_no_read_needed(range);
            is_present
        });
        is_present && asked.is_ok()
    }
}
