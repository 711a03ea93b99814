//! The entries of a completion queue.

use std::ops::Deref;

use terrace_transport::Wc;

/// An entry, in a cache line of its own. A store across the end of a cache line or, worse, of a page cannot be
/// forwarded to a read just afterwards: that read waits until all earlier stores are in the cache.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Entry(Wc);

impl Deref for Entry {
    type Target = Wc;

    #[inline(always)]
    fn deref(&self) -> &Wc {
        &self.0
    }
}

/// Entries in the order of completion. A `VecDeque` would do, but its `push_back` is a call that gets the entry in
/// memory and moves it from there in wide pieces, just after it was written in narrow ones. The processor cannot
/// forward those, and waits until all earlier stores are in the cache. After a WRITE of a page, that is the page.
#[derive(Debug)]
pub(crate) struct Entries {
    all: Vec<Entry>,
    /// How many of them were taken.
    taken: usize,
}

impl Entries {
    /// No entries, and capacity for so many.
    pub fn with_capacity(capacity: usize) -> Entries {
        Entries { all: Vec::with_capacity(capacity), taken: 0 }
    }

    /// The number of entries.
    #[inline]
    pub fn len(&self) -> usize {
        self.all.len() - self.taken
    }

    /// Adds one at the end.
    #[inline(always)]
    pub fn push(&mut self, wc: Wc) {
        if self.all.len() == self.all.capacity() {
            self.make_room();
        }
        self.all.push(Entry(wc));
    }

    /// The space of taken entries is reused once it is half of all, so that no more entries are moved than were taken.
    /// Until then the vector grows: never to four times as many as there were entries at a time.
    #[cold]
    #[inline(never)]
    fn make_room(&mut self) {
        if self.taken >= self.len() {
            self.all.drain(..self.taken);
            self.taken = 0;
        } else {
            self.all.reserve(1);
        }
    }

    /// All, the oldest first.
    #[inline]
    pub fn as_slice(&self) -> &[Entry] {
        &self.all[self.taken..]
    }

    /// Discards so many of the oldest; there are as many.
    #[inline]
    pub fn forget_first(&mut self, count: usize) {
        self.taken += count;
        if self.taken == self.all.len() {
            self.all.clear();
            self.taken = 0;
        }
    }

    /// Discards all but those that stay.
    pub fn retain(&mut self, stays: impl Fn(&Wc) -> bool) {
        self.all.drain(..self.taken);
        self.taken = 0;
        self.all.retain(|entry| stays(entry));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push(usize),
        Forget(usize),
        Retain(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..40usize).prop_map(Step::Push),
            (1..40usize).prop_map(Step::Forget),
            (2..5u64).prop_map(Step::Retain),
        ];
        prop::collection::vec(step, 1..60)
    }

    fn ids(entries: &Entries) -> Vec<u64> {
        entries.as_slice().iter().map(|wc| wc.wr_id).collect()
    }

    proptest! {
        #[test]
        fn entries_come_out_in_order(steps in steps()) {
            let (mut entries, mut model, mut next) = (Entries::with_capacity(4), VecDeque::new(), 0);
            for step in steps {
                match step {
                    Step::Push(count) => (0..count).for_each(|_| {
                        entries.push(Wc { wr_id: next, ..Wc::default() });
                        model.push_back(next);
                        next += 1;
                    }),
                    Step::Forget(count) => {
                        let count = count.min(model.len());
                        entries.forget_first(count);
                        model.drain(..count);
                    }
                    Step::Retain(divisor) => {
                        entries.retain(|wc| wc.wr_id % divisor != 0);
                        model.retain(|id| id % divisor != 0);
                    }
                }
                prop_assert_eq!(ids(&entries), Vec::from(model.clone()));
                prop_assert_eq!(entries.len(), model.len());
            }
        }
    }

    #[test]
    fn a_queue_that_is_never_empty_needs_no_more_memory() {
        let mut entries = Entries::with_capacity(8);
        entries.push(Wc::default());
        for _ in 0..10_000 {
            entries.push(Wc::default());
            entries.forget_first(1);
        }
        assert_eq!((entries.len(), entries.all.capacity()), (1, 8));
    }

    #[test]
    fn memory_is_bounded_by_the_longest_queue() {
        for step in 1..=64 {
            let mut entries = Entries::with_capacity(0);
            for _ in 0..200 {
                (entries.len()..64).for_each(|_| entries.push(Wc::default()));
                entries.forget_first(step);
            }
            let capacity = entries.all.capacity();
            assert!(capacity < 4 * 64, "{step} at a time: {capacity}");
        }
    }
}
