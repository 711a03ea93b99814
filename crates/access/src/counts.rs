//! How often a client has accessed each unit: a table that the server READs.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// A counter for each unit of a region. Counters only grow, and wrap; the server takes differences, so that a lost
/// READ of the table loses no counts. Any number of queue pairs may share them.
#[derive(Debug)]
pub struct Counts {
    table: Box<[AtomicU32]>,
}

impl Counts {
    /// For so many units.
    pub fn new(unit_count: usize) -> Counts {
        Counts { table: (0..unit_count).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Counts one access of these units; none if the range exceeds the region. Threads that count concurrently may
    /// lose counts: the hot units are evident all the same, and no thread waits for another one's cache line more than
    /// necessary.
    #[inline]
    pub fn note(&self, units: Range<usize>) {
        for count in self.table.get(units).unwrap_or_default() {
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// The counters, at a stable address: they may be registered.
    pub fn table(&self) -> &[AtomicU32] {
        &self.table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_touched_unit_is_counted_once() {
        let counts = Counts::new(3);
        counts.note(0..2);
        counts.note(1..3);
        counts.note(2..4);
        counts.note(0..0);
        let seen: Vec<u32> = counts.table().iter().map(|count| count.load(Ordering::Relaxed)).collect();
        assert_eq!(seen, [1, 2, 1]);
        counts.table()[0].store(u32::MAX, Ordering::Relaxed);
        counts.note(0..1);
        assert_eq!(counts.table()[0].load(Ordering::Relaxed), 0, "counters wrap");
    }
}
