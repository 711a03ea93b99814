//! The order in which the units of a region are checked for pages that the kernel has read ahead.

use std::time::{Duration, Instant};

/// The longest time that a device takes for a readahead.
const READAHEAD_MAX: Duration = Duration::from_secs(1);

/// The next unit of a region to check for readahead. Checks end when each unit was checked once, [`READAHEAD_MAX`]
/// after the last access through the page cache.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    next: usize,
    left: usize,
    count_from: Option<Instant>,
}

impl Checks {
    /// Starts a new pass over all units.
    pub(crate) fn restart(&mut self, unit_count: usize) {
        self.left = unit_count;
        self.count_from = Some(Instant::now() + READAHEAD_MAX);
    }

    /// The next unit to check, or `None` at the end of the pass.
    pub(crate) fn next(&mut self, unit_count: usize) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        if self.count_from.is_none_or(|from| from <= Instant::now()) {
            self.left -= 1;
        }
        let unit = self.next;
        self.next = (unit + 1) % unit_count;
        Some(unit)
    }
}
