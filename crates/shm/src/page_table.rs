//! The tables of regions that are paged by 4 KiB pages, for the owner: entries that same-host peers read, and counters
//! of accesses that they add to.

use std::io;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::segment::{Others, Segment};

/// The page table of a region of this process: entry `n` is that of page `n` ([`PageEntry`](crate::PageEntry)). Other
/// processes can map it for reading. Entries that are never accessed cost no memory.
#[derive(Debug)]
pub struct PageEntries {
    segment: Segment,
    page_count: usize,
}

/// Length of the segment: the entries, and behind them a number that is not 0 once other processes may not use the
/// table any more.
fn table_bytes(page_count: usize) -> usize {
    (page_count + 1) * size_of::<u64>()
}

impl PageEntries {
    /// All entries are 0: every page is absent.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left.
    pub fn new(page_count: usize) -> io::Result<PageEntries> {
        let segment = Segment::create(c"terrace-page-table", table_bytes(page_count), Others::Read)?;
        Ok(PageEntries { segment, page_count })
    }

    /// Maps the table of another process.
    ///
    /// # Errors
    /// `InvalidData` when it is something else, or of another length; otherwise the system's.
    pub(crate) fn open(file: OwnedFd, page_count: usize) -> io::Result<PageEntries> {
        Ok(PageEntries { segment: Segment::open(file, table_bytes(page_count), false)?, page_count })
    }

    /// To be sent to other processes, unless it is withdrawn from them.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.is_shared().then(|| self.segment.file())
    }

    /// Whether it is not withdrawn.
    pub(crate) fn is_shared(&self) -> bool {
        self.withdrawn().load(Ordering::Relaxed) == 0
    }

    /// Withdraws it from other processes for good. Accesses that they have begun end with a grace period.
    pub fn withdraw(&self) {
        self.withdrawn().store(1, Ordering::Relaxed);
    }

    fn withdrawn(&self) -> &AtomicU64 {
        &self.segment.quads(self.page_count * size_of::<u64>(), 1)[0]
    }
}

impl Deref for PageEntries {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        self.segment.quads(0, self.page_count)
    }
}

/// Bits of a counter of accesses: no more than it needs, so that the counters of a large pool stay in the caches.
const COUNTER_BITS: usize = 2;
/// Counters in a word.
const COUNTERS: usize = u32::BITS as usize / COUNTER_BITS;
const COUNTER_MASK: u32 = (1 << COUNTER_BITS) - 1;

/// Length of the counters' segment.
fn counters_bytes(count: usize) -> usize {
    (count.div_ceil(COUNTERS) * size_of::<u32>()).max(size_of::<u32>())
}

/// A counter of accesses for each frame of this process's pool. Other processes may map it for writing: wrong values
/// make for a worse choice of the pages that are evicted, and nothing else.
#[derive(Debug)]
pub struct AccessCounters {
    segment: Segment,
    count: usize,
}

impl AccessCounters {
    /// The value at which a counter stays.
    pub const MAX: u8 = COUNTER_MASK as u8;

    /// All are 0.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left.
    pub fn new(count: usize) -> io::Result<AccessCounters> {
        let segment = Segment::create(c"terrace-accesses", counters_bytes(count), Others::Write)?;
        Ok(AccessCounters { segment, count })
    }

    /// Maps the counters of another process.
    ///
    /// # Errors
    /// `InvalidData` when they are something else, or another number; otherwise the system's.
    pub(crate) fn open(file: OwnedFd, count: usize) -> io::Result<AccessCounters> {
        Ok(AccessCounters { segment: Segment::open(file, counters_bytes(count), true)?, count })
    }

    /// To be sent to other processes.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// How many counters there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Counts an access. A counter at its limit is not stored to, so hot frames share their cache line. Accesses that
    /// count at once may lose counts, also of adjacent pages.
    #[inline]
    pub fn count(&self, index: usize) {
        let (word, shift) = self.place(index);
        let value = word.load(Ordering::Relaxed);
        if value >> shift & COUNTER_MASK < u32::from(AccessCounters::MAX) {
            word.store(value.wrapping_add(1 << shift), Ordering::Relaxed);
        }
    }

    /// The value of a counter, at most [`AccessCounters::MAX`].
    #[inline]
    pub fn get(&self, index: usize) -> u8 {
        let (word, shift) = self.place(index);
        (word.load(Ordering::Relaxed) >> shift & COUNTER_MASK) as u8
    }

    /// Sets a counter, to [`AccessCounters::MAX`] at most.
    #[inline]
    pub fn set(&self, index: usize, value: u8) {
        let (word, shift) = self.place(index);
        let others = word.load(Ordering::Relaxed) & !(COUNTER_MASK << shift);
        word.store(others | u32::from(value.min(AccessCounters::MAX)) << shift, Ordering::Relaxed);
    }

    #[inline]
    fn place(&self, index: usize) -> (&AtomicU32, u32) {
        assert!(index < self.count);
        let words = self.segment.words(0, self.segment.len() / size_of::<u32>());
        (&words[index / COUNTERS], (index % COUNTERS * COUNTER_BITS) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_stay_at_their_limit_and_apart() {
        let counters = AccessCounters::new(9).expect("made");
        (0..20).for_each(|_| counters.count(5));
        counters.count(4);
        assert_eq!([3, 4, 5, 6, 8].map(|index| counters.get(index)), [0, 1, AccessCounters::MAX, 0, 0]);
        counters.set(5, 2);
        assert_eq!([4, 5, 6].map(|index| counters.get(index)), [1, 2, 0]);
        assert_eq!(counters.len(), 9);
    }

    #[test]
    fn a_withdrawn_table_is_sent_to_nobody() {
        let entries = PageEntries::new(3).expect("made");
        assert_eq!(entries.len(), 3);
        assert!(entries.file().is_some());
        entries.withdraw();
        assert!(entries.file().is_none());
        assert!(entries.iter().all(|entry| entry.load(Ordering::Relaxed) == 0));
    }
}
