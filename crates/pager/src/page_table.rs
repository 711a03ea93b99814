//! The pages of a process, as far as the pager has handled them.

use std::collections::BTreeMap;

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::slots::Slot;

/// The state of a page.
///
/// ```text
///   Untouched ──fault──> Resident ──evicted──> Absent ──fault──> Loading ──> Resident
///       ^ MADV_DONTNEED, munmap, or zeros that are evicted     Loading ──failed──> Lost
///                                Absent ──forecast──> Loading ──marker──> Ahead ──fault──> Resident
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) enum Page {
    /// Never touched: zeros.
    #[default]
    Untouched,
    /// In memory.
    Resident {
        /// The page of the store that it came from or goes to.
        slot: Option<Slot>,
        /// Whether the store's page has the same bytes. The page is write-protected then.
        is_clean: bool,
        /// Whether it was loaded soon after it had been evicted: it gets a second round in the queue.
        is_hot: bool,
        /// The entry of the queue that counts.
        stamp: u32,
    },
    /// In memory since a fork, and possibly shared with the parent, which has the frame.
    Inherited {
        /// The page of the store with the same bytes. The page is write-protected then.
        slot: Option<Slot>,
    },
    /// In the store, or on its way there.
    Absent {
        /// The page of the store.
        slot: Slot,
        /// The number of evictions before this one.
        evicted_at: u32,
    },
    /// On its way back.
    Loading {
        /// The page of the store.
        slot: Slot,
        /// The buffer that it is loaded into.
        buffer: u16,
        /// Whether a thread waits to store to it.
        is_store: bool,
        /// Whether it was evicted a short time ago.
        is_hot: bool,
        /// What it is loaded for.
        purpose: Purpose,
    },
    /// Loaded ahead of time, and in the pager's buffer until a thread touches it.
    Ahead {
        /// The page of the store.
        slot: Slot,
        /// The buffer.
        buffer: u16,
        /// Whether it was evicted a short time ago.
        is_hot: bool,
    },
    /// Its bytes are nowhere any more: who touches it gets SIGBUS, never zeros.
    Lost,
}

/// What a page is loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A thread waits for it.
    Fault,
    /// A thread is expected to touch it.
    Ahead,
    /// The same, and its fault is to begin the next loads.
    Marker,
}

const CHUNK_PAGES: u64 = 512;
type Chunk = [Page; CHUNK_PAGES as usize];

/// The pages by address.
#[derive(Debug, Default)]
pub(crate) struct PageTable {
    chunks: BTreeMap<u64, Box<Chunk>>,
    absent: u64,
}

impl Page {
    fn is_absent(self) -> bool {
        matches!(self, Page::Absent { .. } | Page::Loading { .. } | Page::Ahead { .. })
    }
}

fn split(addr: u64) -> (u64, usize) {
    let number = addr / PAGE_BYTES;
    (number / CHUNK_PAGES, (number % CHUNK_PAGES) as usize)
}

impl PageTable {
    /// The state of a page.
    pub(crate) fn get(&self, addr: u64) -> Page {
        let (chunk, index) = split(addr);
        self.chunks.get(&chunk).map_or(Page::Untouched, |chunk| chunk[index])
    }

    /// Changes the state of a page.
    pub(crate) fn set(&mut self, addr: u64, page: Page) {
        let (chunk, index) = split(addr);
        let empty = || Box::new([Page::Untouched; CHUNK_PAGES as usize]);
        let old = std::mem::replace(&mut self.chunks.entry(chunk).or_insert_with(empty)[index], page);
        self.absent += u64::from(page.is_absent());
        self.absent -= u64::from(old.is_absent());
    }

    /// Removes the pages of a range that were touched, and returns them with their addresses.
    pub(crate) fn take(&mut self, range: HostRange) -> Vec<(u64, Page)> {
        let mut taken = Vec::new();
        let end = range.addr.saturating_add(range.len);
        let chunks = split(range.addr).0..=split(end).0;
        let mut emptied = Vec::new();
        for (&number, chunk) in self.chunks.range_mut(chunks) {
            for (index, page) in chunk.iter_mut().enumerate() {
                let addr = (number * CHUNK_PAGES + index as u64) * PAGE_BYTES;
                if *page != Page::Untouched && (range.addr..end).contains(&addr) {
                    taken.push((addr, std::mem::take(page)));
                }
            }
            if chunk.iter().all(|page| *page == Page::Untouched) {
                emptied.push(number);
            }
        }
        for number in emptied {
            self.chunks.remove(&number);
        }
        self.absent -= taken.iter().filter(|(_, page)| page.is_absent()).count() as u64;
        taken
    }

    /// A table with other states for the pages that were touched.
    pub(crate) fn map(&self, mut change: impl FnMut(Page) -> Page) -> PageTable {
        let mut absent = 0;
        let chunks = self.chunks.iter().map(|(&number, chunk)| {
            let mut chunk = chunk.clone();
            for page in chunk.iter_mut().filter(|page| **page != Page::Untouched) {
                *page = change(*page);
                absent += u64::from(page.is_absent());
            }
            (number, chunk)
        });
        let chunks = chunks.collect();
        PageTable { chunks, absent }
    }

    /// The number of pages that are in the store, or on their way from or to it.
    pub(crate) fn absent(&self) -> u64 {
        self.absent
    }

    /// All pages that were touched.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Page)> {
        self.chunks.iter().flat_map(|(number, chunk)| {
            let pages = chunk.iter().enumerate().filter(|(_, page)| **page != Page::Untouched);
            pages.map(move |(index, page)| ((number * CHUNK_PAGES + index as u64) * PAGE_BYTES, *page))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_by_range() {
        let mut table = PageTable::default();
        let resident = Page::Resident { slot: None, is_clean: false, is_hot: false, stamp: 0 };
        for addr in [0x1000, 0x2000, 0x1ff000, 0x200000] {
            table.set(addr, resident);
        }
        let taken = table.take(HostRange { addr: 0x2000, len: 0x1fe000 });
        assert_eq!(taken, [(0x2000, resident), (0x1ff000, resident)]);
        assert_eq!(table.iter().map(|(addr, _)| addr).collect::<Vec<_>>(), [0x1000, 0x200000]);
        assert_eq!(table.get(0x2000), Page::Untouched);
        assert_eq!(table.take(HostRange { addr: 0, len: u64::MAX }).len(), 2);
        assert!(table.chunks.is_empty());
    }
}
