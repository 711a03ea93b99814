//! A client's access counts: a table of a counter per unit, which the server READs.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// A counter for each unit of a region. Counters only grow, and wrap. The server computes differences, so that a lost
/// READ of the table loses no counts. Queue pairs may share the counters.
#[derive(Debug)]
pub struct Counts {
    table: Box<[AtomicU32]>,
}

impl Counts {
    /// Counters of 0 for `unit_count` units.
    pub fn new(unit_count: usize) -> Counts {
        Counts { table: (0..unit_count).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Counts one access of each unit of the range; none if the range exceeds the region. Concurrent threads may lose
    /// counts: relative hotness stays correct, and the increment needs no locked instruction.
    #[inline]
    pub fn count_access(&self, units: Range<usize>) {
        for count in self.table.get(units).unwrap_or_default() {
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// The counters. Their address is stable, so that they can be registered.
    pub fn table(&self) -> &[AtomicU32] {
        &self.table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_accessed_unit_is_counted_once() {
        let counts = Counts::new(3);
        counts.count_access(0..2);
        counts.count_access(1..3);
        counts.count_access(2..4);
        counts.count_access(0..0);
        let seen: Vec<u32> = counts.table().iter().map(|count| count.load(Ordering::Relaxed)).collect();
        assert_eq!(seen, [1, 2, 1]);
        counts.table()[0].store(u32::MAX, Ordering::Relaxed);
        counts.count_access(0..1);
        assert_eq!(counts.table()[0].load(Ordering::Relaxed), 0, "counters wrap");
    }
}
