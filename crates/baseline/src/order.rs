//! Page locks in request order: shared for readers, exclusive for writers.
//!
//! An access requests all of its pages at once. Two accesses are therefore in the same order in the queues of all pages
//! that they share, which rules deadlock out.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

/// Identifies an access under way.
pub(crate) type AccessId = usize;

/// The queues of the pages in use.
#[derive(Debug, Default)]
pub(crate) struct PageQueues {
    pages: HashMap<u64, Page>,
}

#[derive(Debug, Default)]
struct Page {
    readers: u32,
    writing: bool,
    /// Waiting accesses, and whether each will write.
    waiting: VecDeque<(AccessId, bool)>,
}

impl Page {
    fn admits(&self, write: bool) -> bool {
        !self.writing && (!write || self.readers == 0)
    }

    fn enter(&mut self, write: bool) {
        if write {
            self.writing = true;
        } else {
            self.readers += 1;
        }
    }
}

impl PageQueues {
    /// Requests pages. Returns how many are not available yet: later calls of [`PageQueues::leave`] grant them.
    pub(crate) fn enter(&mut self, id: AccessId, pages: Range<u64>, write: bool) -> u32 {
        let mut missing = 0;
        for page in pages {
            let page = self.pages.entry(page).or_default();
            if page.waiting.is_empty() && page.admits(write) {
                page.enter(write);
            } else {
                page.waiting.push_back((id, write));
                missing += 1;
            }
        }
        missing
    }

    /// Releases pages. Calls `granted` once for each page that a waiting access gets.
    pub(crate) fn leave(&mut self, pages: Range<u64>, write: bool, mut granted: impl FnMut(AccessId)) {
        for number in pages {
            let Some(page) = self.pages.get_mut(&number) else { continue };
            if write {
                page.writing = false;
            } else {
                page.readers -= 1;
            }
            while let Some(&(id, write)) = page.waiting.front()
                && page.admits(write)
            {
                page.enter(write);
                page.waiting.pop_front();
                granted(id);
            }
            if page.admits(true) {
                self.pages.remove(&number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave(queues: &mut PageQueues, pages: Range<u64>, write: bool) -> Vec<AccessId> {
        let mut all = Vec::new();
        queues.leave(pages, write, |id| all.push(id));
        all
    }

    #[test]
    fn readers_share_and_writers_wait_their_turn() {
        let mut queues = PageQueues::default();
        assert_eq!(queues.enter(1, 0..2, false), 0);
        assert_eq!(queues.enter(2, 1..3, false), 0);
        assert_eq!(queues.enter(3, 1..2, true), 1);
        // A reader does not overtake the waiting writer.
        assert_eq!(queues.enter(4, 0..2, false), 1);
        assert_eq!(leave(&mut queues, 0..2, false), []);
        assert_eq!(leave(&mut queues, 1..3, false), [3]);
        assert_eq!(leave(&mut queues, 1..2, true), [4]);
        assert_eq!(leave(&mut queues, 0..2, false), []);
        assert!(queues.pages.is_empty());
    }

    #[test]
    fn accesses_that_cross_are_served_in_the_order_of_asking() {
        let mut queues = PageQueues::default();
        assert_eq!(queues.enter(1, 0..3, true), 0);
        assert_eq!(queues.enter(2, 1..5, true), 2);
        assert_eq!(queues.enter(3, 2..6, true), 3);
        assert_eq!(leave(&mut queues, 0..3, true), [2, 2]);
        assert_eq!(leave(&mut queues, 1..5, true), [3, 3, 3]);
        assert_eq!(leave(&mut queues, 2..6, true), []);
        assert!(queues.pages.is_empty());
    }
}
