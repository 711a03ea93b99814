//! Parts of accesses find their pages, or bring them; what waited for a page goes on.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use terrace_hostmem::PAGE_BYTES;
use terrace_memory::AccessError;
use terrace_shm::PageState;
use terrace_sync::{Mutex, MutexGuard};

use crate::access::{Part, Task};
use crate::ended::Ended;
use crate::error::PagesError;
use crate::frames::{Pool, Record};
use crate::key::PageKey;
use crate::quota::Quota;
use crate::read_queue::ReadQueue;
use crate::region::Region;
use crate::shard::{Fill, LOST_FRAME, Shard, failed_until_overwritten, shard_count};
use crate::stats::add;
use crate::store::{StoreFactory, WriteDevice};
use crate::write_queue::WriteQueue;

/// Reads submitted at a time.
const DEPTH: u32 = 512;
/// Write-back begins when more than one in so many frames are dirty.
const DIRTY_SHARE: usize = 2;

/// What is done after the locks are released.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) ended: Ended,
    /// Frames are missing, or many are dirty: dirty pages have to be written back.
    pub(crate) is_starved: bool,
}

/// The state that all threads share.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) pool: Arc<Pool>,
    shards: Box<[Mutex<Shard>]>,
    pub(crate) reads: ReadQueue,
    pub(crate) writes: Arc<dyn WriteDevice>,
    pub(crate) quota: Arc<Quota>,
    /// Flushes that have not begun, and whether dirty pages have to be written back.
    pub(crate) to_write: WriteQueue,
}

impl Engine {
    pub(crate) fn open(
        pool: Pool,
        store: &dyn StoreFactory,
        quota_bytes: usize,
    ) -> Result<Engine, PagesError> {
        let pool = Arc::new(pool);
        let store = store.open(DEPTH, pool.file()).map_err(PagesError::system("set up io_uring"))?;
        let count = shard_count(pool.frame_count());
        let border =
            |index: u32| (u64::from(pool.frame_count()) * u64::from(index) / u64::from(count)) as u32;
        let shards =
            (0..count).map(|index| Mutex::new(Shard::new(pool.clone(), border(index)..border(index + 1))));
        Ok(Engine {
            shards: shards.collect(),
            pool,
            reads: ReadQueue::new(store.reads)?,
            writes: store.writes,
            quota: Quota::new(quota_bytes),
            to_write: WriteQueue::default(),
        })
    }

    pub(crate) fn shards(&self) -> &[Mutex<Shard>] {
        &self.shards
    }

    pub(crate) fn shard_index(&self, key: PageKey) -> usize {
        key.shard(self.shards.len())
    }

    pub(crate) fn lock(&self, key: PageKey) -> MutexGuard<'_, Shard> {
        self.shards[self.shard_index(key)].lock()
    }

    /// Begins a part of an access; the caller has the page's shard locked.
    pub(crate) fn begin_part(
        &self,
        shard: &mut Shard,
        region: &Region,
        page: u64,
        part: Part,
        work: &mut Work,
    ) {
        let key = region.key(page);
        let state = region.table.entry(page).state();
        if part.is_write()
            && state != PageState::Dirty
            && let Some(refusal) = region.write_refusal()
        {
            return work.ended.end_part(&part, Err(refusal));
        }
        match state {
            PageState::Leaving => {
                shard.rescue(key);
                self.carry_out_mapped(shard, region, page, part, work);
            }
            PageState::Clean | PageState::Dirty => self.carry_out_mapped(shard, region, page, part, work),
            PageState::Filling => match shard.fills.entry(key) {
                Entry::Occupied(mut fill) => fill.get_mut().waiting.push(part),
                Entry::Vacant(_) => unreachable!("a page that is being filled has a fill"),
            },
            PageState::Absent | PageState::Ghost => {
                // A frame goes to the part that has waited for longest.
                let is_first = shard.starved.is_empty();
                shard.starved.push(key, part);
                if is_first {
                    self.feed_starved(shard, work);
                }
            }
        }
    }

    /// Gives frames to the parts that wait for them, as long as there are any.
    pub(crate) fn feed_starved(&self, shard: &mut Shard, work: &mut Work) {
        while let Some(key) = shard.starved.first() {
            if let Some(part) = shard.starved.pop_barrier() {
                work.ended.end_part(&part, Ok(()));
                continue;
            }
            let Some(frame) = shard.take_frame() else {
                work.is_starved = true;
                return;
            };
            let parts = shard.starved.take(key);
            self.begin_fill(shard, key, frame, parts, work);
        }
        work.is_starved |= shard.policy.laundry_len() > 0;
    }

    /// Begins to fill a frame, for parts of which there is at least one.
    fn begin_fill(&self, shard: &mut Shard, key: PageKey, frame: u32, parts: Vec<Part>, work: &mut Work) {
        let region = shard.region(key);
        let entry = region.table.entry(key.page);
        let stamp = (entry.state() == PageState::Ghost).then_some(entry.frame());
        region.change(key.page, PageState::Filling, frame);
        let needs_no_read = parts.first().is_some_and(Part::is_whole_write);
        // A write-back would fail, long after the write was acknowledged.
        let offset = region.file_offset(key.page);
        if needs_no_read && !region.files.reaches(offset + PAGE_BYTES) {
            let error = region.too_short(offset);
            parts.iter().for_each(|part| work.ended.end_part(part, Err(error)));
            return shard.give_up_fill(&region, key.page, frame);
        }
        shard.fills.insert(key, Fill { frame, stamp, waiting: parts });
        if needs_no_read {
            add(&region.counters.pages_placed, 1);
            return self.end_fill(shard, key, Ok(()), work);
        }
        self.queue_read(shard, &region, key.page, frame);
    }

    /// Ends the fill of a page: its frame holds the page now, or cannot. Carries the waiting parts out in order, and
    /// maps the page.
    pub(crate) fn end_fill(
        &self,
        shard: &mut Shard,
        key: PageKey,
        read: Result<(), AccessError>,
        work: &mut Work,
    ) {
        let Some(Fill { frame, stamp, waiting }) = shard.fills.remove(&key) else { return };
        let region = shard.region(key);
        let failed_count = if read.is_err() { failed_until_overwritten(&waiting) } else { 0 };
        let is_lost = read.is_err() && failed_count == waiting.len();
        let mut dirty = false;
        let mut reads = 0u8;
        let mut results = SmallVec::<[_; 4]>::new();
        for (index, part) in waiting.iter().enumerate() {
            let result = if index < failed_count { read } else { self.carry_out(part, frame) };
            dirty |= part.is_write() && result.is_ok();
            let is_access = result.is_ok() && !matches!(part.task, Task::Barrier);
            reads = reads.saturating_add(is_access.into());
            results.push(result);
        }
        if !is_lost {
            self.pool.set_record(frame, Record { slot: key.slot, page: key.page, dirty });
        }
        // After the record: without it, a write that was acknowledged would not survive a kill.
        for (part, result) in waiting.iter().zip(results) {
            work.ended.end_part(part, result);
        }
        if is_lost {
            return shard.give_up_fill(&region, key.page, frame);
        }
        let state = if dirty { PageState::Dirty } else { PageState::Clean };
        region.change(key.page, state, frame);
        let limit = terrace_shm::AccessCounters::MAX;
        self.pool.counters().set(frame as usize, reads.saturating_sub(1).min(limit));
        let slot = shard.slot_of(frame);
        shard.policy.insert(slot, stamp);
        work.is_starved |= dirty && self.has_many_dirty();
    }

    /// Whether so many frames are dirty that some are written back before they are needed.
    pub(crate) fn has_many_dirty(&self) -> bool {
        self.pool.dirty_count() > self.pool.frame_count() as usize / DIRTY_SHARE
    }

    /// Carries out a part on a page that is mapped, with its shard locked.
    fn carry_out_mapped(&self, shard: &mut Shard, region: &Region, page: u64, part: Part, work: &mut Work) {
        if part.is_write() {
            shard.make_dirty(region, page);
            work.is_starved |= self.has_many_dirty();
        }
        let frame = region.table.entry(page).frame();
        let result = self.carry_out(&part, frame);
        work.ended.end_part(&part, result);
    }

    fn carry_out(&self, part: &Part, frame: u32) -> Result<(), AccessError> {
        part.carry_out(self.pool.addr(frame)).map_err(|_| LOST_FRAME)
    }

    /// Fails the parts of a region that takes no new accesses, as far as they wait for frames.
    pub(crate) fn fail_starved(&self, region: &Region) {
        self.fail_starved_of(|_| true, |key| key.slot == region.slot, |_| AccessError::Fault);
    }

    /// Fails the parts that wait for frames in shards that have pages that cannot be written, or no memory, if one has waited
    /// for longer than this.
    pub(crate) fn fail_starved_of_stuck(&self, patience: Duration) {
        let is_stuck = |shard: &Shard| shard.is_stuck() && shard.starved.have_waited(patience);
        self.fail_starved_of(
            is_stuck,
            |_| true,
            |shard| {
                let failing = shard.unwritable.iter().next().and_then(|key| shard.regions.get(&key.slot));
                failing.map_or(AccessError::Device, |region| region.write_error())
            },
        );
    }

    fn fail_starved_of(
        &self,
        is_shard: impl Fn(&Shard) -> bool,
        is_one: impl Fn(&PageKey) -> bool,
        error: impl Fn(&Shard) -> AccessError,
    ) {
        let mut work = Work::default();
        for shard in self.shards() {
            let mut shard = shard.lock();
            if !is_shard(&shard) {
                continue;
            }
            let error = error(&shard);
            for key in shard.starved.keys(&is_one) {
                for part in shard.starved.take(key) {
                    work.ended.end_part(&part, Err(error));
                }
            }
        }
        self.settle(work);
    }

    /// Does what is to be done without locks.
    pub(crate) fn settle(&self, work: Work) {
        let Work { ended, is_starved } = work;
        self.to_write.add(ended.tell(), is_starved);
    }
}
