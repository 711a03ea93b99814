//! The versions of a peer's pages: where they are, and which of them are known.
//!
//! A version is odd while its page is mapped, and increases by one when the page comes or goes. The peer counts after it
//! has mapped a page, and before it unmaps it; so a page whose version is the same odd number at two times was mapped all
//! the time between.
//!
//! The number wraps. A page would have to come or go 2^29 times between the two times for the same number to mean
//! something else; at one change in a microsecond that takes 537 s. [`AGE_NS_MAX`] keeps the two times closer.

use std::collections::HashMap;

use terrace_transport::Time;

use crate::proto::Table;

/// The most time between the two times at which a version is compared, in nanoseconds.
pub(super) const AGE_NS_MAX: u64 = 100_000_000_000;

/// The most versions that are known at a time; beyond, all are forgotten.
const KNOWN_MAX: usize = 1 << 16;

/// The version table of a region, in the peer's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct VersionTable {
    table: Table,
    entry_bytes: u64,
}

impl VersionTable {
    /// The table of a region with so many pages; `None` if it has another form.
    pub(super) fn new(table: Table, page_count: u64) -> Option<VersionTable> {
        let entry_bytes = table.length_bytes.checked_div(page_count)?;
        let is_whole = entry_bytes.checked_mul(page_count) == Some(table.length_bytes);
        (is_whole && matches!(entry_bytes, 4 | 8)).then_some(VersionTable { table, entry_bytes })
    }

    /// Key, address and length of the versions of `count` pages.
    pub(super) fn part(&self, first_page: u64, count: u64) -> (u32, u64, u32) {
        let va = self.table.va + first_page * self.entry_bytes;
        (self.table.rkey, va, (count * self.entry_bytes) as u32)
    }

    /// How many versions fit into so many bytes.
    pub(super) fn versions_in(&self, bytes: u32) -> u64 {
        u64::from(bytes) / self.entry_bytes
    }

    /// The version at an index of what was read.
    pub(super) fn version(&self, bytes: &[u8], index: usize) -> Option<u32> {
        let at = index * self.entry_bytes as usize;
        let entry = bytes.get(at..at + self.entry_bytes as usize)?;
        match self.entry_bytes {
            4 => entry.try_into().ok().map(u32::from_le_bytes),
            _ => entry.try_into().ok().map(|entry| (u64::from_le_bytes(entry) >> 35) as u32),
        }
    }
}

/// Versions that were read, of pages that were present then.
#[derive(Debug, Default)]
pub(super) struct KnownVersions {
    /// By region id and page.
    known: HashMap<(u64, u64), (u32, Time)>,
}

impl KnownVersions {
    /// The version that a page had, and when. Only versions are known of which the peer's answer has arrived, so that what
    /// is posted now is executed after the version was read: of two READs and a WRITE that are posted together, the first
    /// may be repeated after the WRITE when its answer is lost.
    pub(super) fn get(&self, region_id: u64, page: u64, now: Time, age_ns_max: u64) -> Option<(u32, Time)> {
        let known = self.known.get(&(region_id, page)).copied();
        known.filter(|(_, at)| now.0.saturating_sub(at.0) <= age_ns_max)
    }

    /// Notes a version whose READ was posted at `at`. Those of absent pages are forgotten.
    pub(super) fn note(&mut self, region_id: u64, page: u64, version: u32, at: Time) {
        if version.is_multiple_of(2) {
            return self.forget(region_id, page);
        }
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        self.known.insert((region_id, page), (version, at));
    }

    /// Forgets a page's version.
    pub(super) fn forget(&mut self, region_id: u64, page: u64) {
        self.known.remove(&(region_id, page));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(length_bytes: u64) -> Table {
        Table { va: 0x1000, length_bytes, rkey: 7 }
    }

    #[test]
    fn tables_have_4_or_8_bytes_for_each_page() {
        assert!(VersionTable::new(table(12), 4).is_none() && VersionTable::new(table(17), 4).is_none());
        assert!(VersionTable::new(table(16), 0).is_none());
        let small = VersionTable::new(table(16), 4).expect("4 bytes each");
        assert_eq!(small.part(1, 2), (7, 0x1004, 8));
        assert_eq!(small.version(&[0, 0, 0, 0, 5, 0, 0, 0], 1), Some(5));
        assert_eq!(small.version(&[0; 7], 1), None);
        let large = VersionTable::new(table(32), 4).expect("8 bytes each");
        assert_eq!(large.version(&(9_u64 << 35 | 0x3_ffff).to_le_bytes(), 0), Some(9));
        assert_eq!(large.versions_in(64), 8);
    }

    #[test]
    fn only_versions_of_present_pages_are_known_and_not_for_long() {
        let mut known = KnownVersions::default();
        known.note(1, 2, 3, Time(100));
        assert_eq!(known.get(1, 2, Time(150), 50), Some((3, Time(100))));
        assert_eq!(known.get(1, 2, Time(151), 50), None);
        assert_eq!(known.get(2, 2, Time(100), 50), None);
        known.note(1, 2, 4, Time(120));
        assert_eq!(known.get(1, 2, Time(120), 50), None);
    }
}
