//! The page table of a region: which states follow each other, and how an entry changes.

use std::io;

use terrace_hostmem::prefetch;
use terrace_shm::{PageEntries, PageEntry, PageState};

use crate::mapping;

use PageState::{Absent, Clean, Dirty, Filling, Ghost, Leaving};

/// The changes of state that exist.
///
/// ```text
///                 miss                   read, or written whole
///   ┌────────────────┐      ┌─────────┐            ┌─────────┐  first write   ┌───────┐
///   │ Absent, Ghost  │─────>│ Filling │───────────>│  Clean  │───────────────>│ Dirty │
///   └────────────────┘      └─────────┘            └─────────┘<───────────────└───────┘
///      ^      ^                │   └────────────────────│──────────────────────────^
///      │      └────────────────┘      read with writes  │   ^       write-back begun
///      │           read failed          in the queue    │   │
///      │                             evict (version     v   │ accessed before the frame was reused
///      │                              even)        ┌─────────┐
///      └───────────────────────────────────────────│ Leaving │
///              no reader is left: frame free       └─────────┘
/// ```
///
/// - The version is odd exactly while the state is `Clean` or `Dirty`.
/// - A page that is not `Absent` or `Ghost` has a frame of its own.
/// - A frame whose record says dirty is not evicted. The record is set before the entry becomes `Dirty`; it is reset
///   when a write-back has ended that began with the change to `Clean`, if the page is still `Clean`.
/// - All changes are made with the page's shard locked.
const CHANGES: [(PageState, PageState); 12] = [
    (Absent, Filling),
    (Ghost, Filling),
    (Filling, Clean),
    (Filling, Dirty),
    (Filling, Absent),
    (Clean, Dirty),
    (Dirty, Clean),
    (Clean, Leaving),
    (Leaving, Clean),
    (Leaving, Absent),
    (Leaving, Ghost),
    (Ghost, Absent),
];

/// The entry that follows `from` in state `to`. `number` is the frame, or the stamp of a ghost.
///
/// # Panics
/// When no such change exists.
fn successor(from: PageEntry, to: PageState, number: u32) -> PageEntry {
    let state = from.state();
    assert!(CHANGES.contains(&(state, to)), "a page that is {state:?} does not become {to:?}");
    let step = u32::from(state.is_mapped() != to.is_mapped());
    PageEntry::new(to, number, from.version().wrapping_add(step))
}

/// The page table of a region.
#[derive(Debug)]
pub(crate) struct PageTable {
    entries: PageEntries,
}

impl PageTable {
    /// Nothing is mapped.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left.
    pub(crate) fn new(page_count: u64) -> io::Result<PageTable> {
        Ok(PageTable { entries: PageEntries::new(page_count as usize)? })
    }

    /// The words, for copies and for other processes.
    pub(crate) fn entries(&self) -> &PageEntries {
        &self.entries
    }

    /// The number of pages.
    pub(crate) fn page_count(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The entry of a page.
    pub(crate) fn entry(&self, page: u64) -> PageEntry {
        PageEntry::from_word(self.entries[page as usize].load(crate::sync::Ordering::Acquire))
    }

    /// Has the processor load the entry of a page, which may be beyond the table.
    pub(crate) fn prefetch(&self, page: u64) {
        if let Some(word) = self.entries.get(page as usize) {
            prefetch(word.as_ptr() as u64);
        }
    }

    /// Changes the state of a page; the caller has its shard locked. A change that permits less is in force for all
    /// later copies when this returns. Those under way are found by [`mapping::is_pinned`] and a grace period.
    ///
    /// # Panics
    /// When no such change exists.
    pub(crate) fn change(&self, page: u64, to: PageState, number: u32) {
        let before = self.entry(page);
        let after = successor(before, to, number);
        let word = &self.entries[page as usize];
        let permits_less = before.is_readable() && !after.is_readable() || before.is_writable();
        if permits_less { mapping::revoke(word, after) } else { mapping::publish(word, after) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a page is, without the encoding.
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Page {
        state: PageState,
        maps: u32,
        unmaps: u32,
    }

    proptest! {
        #[test]
        fn any_path_through_the_table_keeps_the_invariants(steps in prop::collection::vec((0..CHANGES.len(), any::<u32>()), 1..200)) {
            let table = PageTable::new(3).expect("made");
            let mut model = Page { state: Absent, maps: 0, unmaps: 0 };
            for (step, number) in steps {
                let (from, to) = CHANGES[step];
                if from != model.state {
                    continue;
                }
                table.change(1, to, number);
                model.maps += u32::from(!from.is_mapped() && to.is_mapped());
                model.unmaps += u32::from(from.is_mapped() && !to.is_mapped());
                model.state = to;
                let entry = table.entry(1);
                prop_assert_eq!((entry.state(), entry.frame()), (to, number));
                prop_assert_eq!(entry.version(), model.maps + model.unmaps);
                prop_assert_eq!(entry.version() % 2 == 1, to.is_mapped());
                prop_assert_eq!((table.entry(0), table.entry(2)), (PageEntry::default(), PageEntry::default()));
            }
        }
    }

    #[test]
    fn every_state_is_reached_and_left() {
        for state in [Absent, Ghost, Filling, Clean, Dirty, Leaving] {
            assert!(CHANGES.iter().any(|(from, _)| *from == state), "{state:?} is left");
            assert!(CHANGES.iter().any(|(_, to)| *to == state), "{state:?} is reached");
        }
    }

    #[test]
    #[should_panic(expected = "a page that is Dirty does not become Leaving")]
    fn dirty_pages_do_not_leave() {
        let _ = successor(PageEntry::new(Dirty, 0, 1), Leaving, 0);
    }
}
