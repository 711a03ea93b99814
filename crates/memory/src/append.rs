//! APPEND: adds records at the end of a region that grows, by its pager.

use std::sync::Arc;

use crate::access::{AccessError, AccessNeed, Accessor};
use crate::entry::{Entry, Kind};
use crate::paging::{Pager, Transfer, Waker};
use crate::registry::Registry;
use crate::table::tag_of;

impl Registry {
    /// Checks whether a peer may append through this key, as far as that is known without a record.
    ///
    /// # Errors
    /// As for [`Registry::check`]; `Permission` also for a memory window, which cannot grow, and for a region without a
    /// pager.
    pub fn check_append(&self, who: Accessor, key: u32) -> Result<(), AccessError> {
        let entry = self.slot(key)?.pin();
        pager_of(&entry, who, key).map(|_| ())
    }

    /// Has the pager append a record; it is copied before this returns. Records have their places in the order of these
    /// calls. An empty record changes nothing: its offset is the region's end. The waker is called when the transfer has
    /// ended or, after `NotReady`, when the pager has space.
    ///
    /// # Errors
    /// As for [`Registry::check_append`] and [`Pager::append`].
    pub fn append(
        &self,
        who: Accessor,
        key: u32,
        record: &[u8],
        commit: bool,
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        let entry = self.slot(key)?.pin();
        pager_of(&entry, who, key)?.append(record, commit, waker)
    }
}

/// The pager of the region of a key through which this accessor may append.
fn pager_of(entry: &Entry, who: Accessor, key: u32) -> Result<&Arc<dyn Pager>, AccessError> {
    entry.locate(tag_of(key), who, AccessNeed::Write, entry.start, 0)?;
    if entry.kind != Kind::Region {
        return Err(AccessError::Permission);
    }
    entry.pager_for(who).ok_or(AccessError::Permission)
}
