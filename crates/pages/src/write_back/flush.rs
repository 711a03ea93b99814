//! FLUSH: making a range durable.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use terrace_memory::AccessError;
use terrace_shm::PageState;

use super::writing::Ticket;
use crate::access::{Access, Kind};
use crate::engine::Engine;
use crate::frames::Record;
use crate::key::{GROUP_PAGES, PageKey};
use crate::region::Region;
use crate::shard::Shard;
use crate::stats::add;

/// For how long a flush waits before it looks again for a page that another thread writes.
const BUSY_PATIENCE: Duration = Duration::from_millis(1);

impl Engine {
    /// Carries a flush out. Returns whether it succeeded.
    pub(super) fn carry_out_flush(&self, access: &Arc<Access>) -> bool {
        let Kind::Flush { first, end } = access.kind else { unreachable!("only flushes are queued") };
        // By its counters, because another region may have its slot by now.
        let find =
            |shard: &Shard| shard.regions.values().find(|region| access.is_to(&region.counters)).cloned();
        let region = find(&self.shards()[0].lock());
        let result = match region {
            Some(region) => self.flush(&region, first..end),
            None => Err(AccessError::Fault),
        };
        access.end(result)();
        result.is_ok()
    }

    /// Makes pages durable.
    ///
    /// # Errors
    /// `Flush` when one of them cannot be written.
    pub(crate) fn flush(&self, region: &Arc<Region>, pages: std::ops::Range<u64>) -> Result<(), AccessError> {
        add(&region.counters.flushes, 1);
        let failures = region.syncs.failures();
        let mut keys = self.dirty_pages(region, pages);
        while !keys.is_empty() {
            let (tickets, busy) = self.begin_writes(region, &keys);
            if self.write_tickets(tickets, |_| Some(region.clone())) {
                return Err(AccessError::Flush);
            }
            if !busy.is_empty() {
                std::thread::sleep(BUSY_PATIENCE);
            }
            keys = busy;
        }
        self.sync(region, failures)
    }

    /// Has the device store what was written. `failures`: of syncs, before the first page of the flush was written.
    fn sync(&self, region: &Arc<Region>, failures: u64) -> Result<(), AccessError> {
        let sync = || {
            let synced = self.writes.sync(region.files.buffered().as_fd());
            synced.inspect_err(|error| region.note_write_failure(*error))
        };
        let were_lost = region.syncs.are_pages_lost();
        let synced = region.syncs.sync(failures, sync, || self.make_all_dirty(region));
        if synced.is_ok() {
            region.note_write_success();
        } else if !were_lost && region.syncs.are_pages_lost() {
            region.note_pages_lost();
        }
        synced.map_err(|_| AccessError::Flush)
    }

    /// The dirty pages of a range, in order. Looks at entries or at frames, whichever are fewer: entries that were never
    /// used cost memory when they are read.
    fn dirty_pages(&self, region: &Region, pages: std::ops::Range<u64>) -> Vec<PageKey> {
        if pages.end - pages.start <= u64::from(self.pool.frame_count()) {
            let is_dirty = |page: &u64| {
                let entry = region.table.entry(*page);
                let has_frame = entry.is_readable() || entry.state() == PageState::Leaving;
                has_frame && self.pool.record(entry.frame()).is_some_and(|record| record.dirty)
            };
            return pages.filter(is_dirty).map(|page| region.key(page)).collect();
        }
        let records = (0..self.pool.frame_count()).filter_map(|frame| self.pool.record(frame));
        let is_its =
            |record: &Record| record.dirty && record.slot == region.slot && pages.contains(&record.page);
        let mut keys: Vec<_> = records.filter(is_its).map(|record| region.key(record.page)).collect();
        keys.sort_unstable();
        keys
    }

    /// Begins to write pages. Also returns those that another thread is writing: it may have begun before the last write
    /// to them.
    fn begin_writes(&self, region: &Region, keys: &[PageKey]) -> (Vec<Ticket>, Vec<PageKey>) {
        let (mut tickets, mut busy) = (Vec::new(), Vec::new());
        for group in keys.chunk_by(|before, next| before.page / GROUP_PAGES == next.page / GROUP_PAGES) {
            let mut shard = self.lock(group[0]);
            for key in group {
                if shard.writing.contains(key) {
                    busy.push(*key);
                    continue;
                }
                let entry = region.table.entry(key.page);
                if entry.is_readable() {
                    tickets.extend(self.begin_write(&mut shard, *key, entry.frame()));
                }
            }
        }
        (tickets, busy)
    }

    /// After a failed sync, what was written before may not be on the device: all pages in memory are written again.
    fn make_all_dirty(&self, region: &Arc<Region>) {
        for shard in self.shards() {
            let mut shard = shard.lock();
            // Another region has the slot when this one was removed.
            if !shard.regions.get(&region.slot).is_some_and(|known| Arc::ptr_eq(known, region)) {
                continue;
            }
            for frame in shard.frames() {
                let record = self.pool.record(frame).filter(|record| record.slot == region.slot);
                if let Some(record) = record {
                    shard.rescue(region.key(record.page));
                    shard.make_dirty(region, record.page);
                }
            }
        }
    }
}
