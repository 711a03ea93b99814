//! A shard: some of the frames, and the pages that may be in them. All changes of these pages' states are made with the
//! shard locked. The lock is never held while a thread waits.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::ops::Range;
use std::sync::Arc;

use terrace_memory::AccessError;
use terrace_shm::{GracePeriod, PageState};

use crate::access::Part;
use crate::frames::{Pool, Record};
use crate::key::PageKey;
use crate::mapping;
use crate::region::Region;
use crate::replacement::{S3Fifo, Victim};
use crate::starved::Starved;
use crate::stats::add;
use crate::store::ReadRequest;

/// Victims that an access tries before it waits for a frame.
const VICTIMS_MAX: usize = 32;
/// Frames that a shard has at least, unless it is the only one.
const SHARD_FRAMES_MIN: u32 = 4096;
pub(crate) const SHARDS_MAX: u32 = 32;

/// How many shards a pool has. A part of the layout: frames that are taken over must be in their pages' shards.
pub(crate) fn shard_count(frame_count: u32) -> u32 {
    let count = (frame_count / SHARD_FRAMES_MIN).clamp(1, SHARDS_MAX);
    1 << count.ilog2()
}

/// A page that is being read.
#[derive(Debug)]
pub(crate) struct Fill {
    pub(crate) frame: u32,
    /// The page's stamp, if it was a ghost.
    pub(crate) stamp: Option<u32>,
    /// In the order of the requests.
    pub(crate) waiting: Vec<Part>,
}

/// A page that is unmapped, and whose readers have not ended.
#[derive(Debug)]
pub(crate) struct Leaving {
    pub(crate) key: PageKey,
    frame: u32,
    stamp: Option<u32>,
    grace: GracePeriod,
}

#[derive(Debug)]
pub(crate) struct Shard {
    pool: Arc<Pool>,
    frames: Range<u32>,
    pub(crate) policy: S3Fifo,
    /// Frames with pages of an earlier process whose region has not been added. They are in no queue. Dirty ones are apart:
    /// there may be many, and no page that needs a frame can have one of them.
    unclaimed: Vec<u32>,
    unclaimed_dirty: Vec<u32>,
    pub(crate) fills: HashMap<PageKey, Fill>,
    /// Pages that are being written back.
    pub(crate) writing: HashSet<PageKey>,
    /// Pages whose last write-back failed.
    pub(crate) unwritable: BTreeSet<PageKey>,
    /// The one of them that was tried again last.
    tried_again: PageKey,
    /// Frames of such pages that are in no queue: they would be chosen to leave again and again.
    parked: HashSet<u32>,
    pub(crate) leaving: Vec<Leaving>,
    pub(crate) starved: Starved,
    /// Reads to be submitted.
    pub(crate) to_read: Vec<ReadRequest>,
    /// The regions, by slot.
    pub(crate) regions: HashMap<u8, Arc<Region>>,
}

impl Shard {
    /// The shard of these frames.
    pub(crate) fn new(pool: Arc<Pool>, frames: Range<u32>) -> Shard {
        let mut policy = S3Fifo::new(frames.len());
        let (mut unclaimed, mut unclaimed_dirty) = (Vec::new(), Vec::new());
        for frame in frames.clone() {
            match pool.record(frame) {
                Some(Record { dirty: true, .. }) => unclaimed_dirty.push(frame),
                Some(_) => unclaimed.push(frame),
                None => policy.free(frame - frames.start),
            }
        }
        Shard {
            pool,
            frames,
            policy,
            unclaimed,
            unclaimed_dirty,
            fills: HashMap::new(),
            writing: HashSet::new(),
            unwritable: BTreeSet::new(),
            tried_again: PageKey { slot: 0, page: 0 },
            parked: HashSet::new(),
            leaving: Vec::new(),
            starved: Starved::default(),
            to_read: Vec::new(),
            regions: HashMap::new(),
        }
    }

    pub(crate) fn frames(&self) -> Range<u32> {
        self.frames.clone()
    }

    /// The region of a page, for which an access or a frame is known.
    pub(crate) fn region(&self, key: PageKey) -> Arc<Region> {
        self.regions.get(&key.slot).expect("a region with pages in use is there").clone()
    }

    pub(crate) fn slot_of(&self, frame: u32) -> u32 {
        frame - self.frames.start
    }

    /// A frame without a page. `None` if all frames are in use and none of them can leave now.
    pub(crate) fn take_frame(&mut self) -> Option<u32> {
        if let Some(slot) = self.policy.take_free() {
            let frame = self.frames.start + slot;
            if self.pool.allocate(frame) {
                return Some(frame);
            }
            self.policy.free(slot);
        }
        if let Some(frame) = self.take_unclaimed() {
            return Some(frame);
        }
        if let Some(index) = self.leaving.iter_mut().position(|leaving| leaving.is_over(&self.pool)) {
            let Leaving { key, frame, stamp, .. } = self.leaving.swap_remove(index);
            self.end_leaving(key, frame, stamp);
            return Some(frame);
        }
        for _ in 0..VICTIMS_MAX {
            let victim = self.next_victim()?;
            if let Some(frame) = self.evict(victim) {
                return Some(frame);
            }
        }
        // Many pages of the main queue are dirty.
        self.policy.evict_small().and_then(|victim| self.evict(victim))
    }

    /// The next page that is to leave. Those that cannot be written leave the queues instead.
    fn next_victim(&mut self) -> Option<Victim> {
        loop {
            let victim = self.policy.evict(self.pool.counters(), self.frames.start as usize)?;
            let frame = self.frames.start + victim.slot;
            let key = self.pool.record(frame).map(|record| PageKey { slot: record.slot, page: record.page });
            if !key.is_some_and(|key| self.unwritable.contains(&key)) {
                return Some(victim);
            }
            self.parked.insert(frame);
        }
    }

    /// Has up to so many pages leave. Returns how many frames are free now.
    pub(crate) fn evict_some(&mut self, pages_max: usize) -> usize {
        let mut left = 0;
        for _ in 0..pages_max {
            let Some(victim) = self.next_victim() else { break };
            if let Some(frame) = self.evict(victim) {
                let slot = self.slot_of(frame);
                self.policy.free(slot);
                left += 1;
            }
        }
        left
    }

    /// A frame with a page that its file has, of a region that has not been added.
    fn take_unclaimed(&mut self) -> Option<u32> {
        let frame = self.unclaimed.pop()?;
        self.pool.clear_record(frame);
        Some(frame)
    }

    /// Takes that pages of regions that have not been added were written back.
    pub(crate) fn note_unclaimed_written(&mut self) {
        let pool = &self.pool;
        let is_clean = |frame: &mut u32| !pool.record(*frame).is_some_and(|record| record.dirty);
        self.unclaimed.extend(self.unclaimed_dirty.extract_if(.., is_clean));
    }

    /// Evicts a page whose frame is in no queue. `None` if it does not leave now; its frame is in a queue again then.
    fn evict(&mut self, Victim { slot, stamp }: Victim) -> Option<u32> {
        let frame = self.frames.start + slot;
        let Some(Record { slot: region, page, dirty }) = self.pool.record(frame) else {
            // Somebody has damaged the record: the page is lost to the pool, and stays mapped.
            return None;
        };
        let key = PageKey { slot: region, page };
        if self.writing.contains(&key) {
            self.policy.insert_main(slot);
            return None;
        }
        if self.unwritable.contains(&key) {
            self.parked.insert(frame);
            return None;
        }
        if dirty {
            self.policy.put_to_laundry(slot);
            return None;
        }
        self.unmap(key, frame, stamp)
    }

    /// Unmaps a clean page whose frame is in no queue. Returns the frame if it can be reused at once.
    fn unmap(&mut self, key: PageKey, frame: u32, stamp: Option<u32>) -> Option<u32> {
        let region = self.region(key);
        region.change(key.page, PageState::Leaving, frame);
        let grace = GracePeriod::of_pages(region.page_range(key.page));
        let mut leaving = Leaving { key, frame, stamp, grace };
        if !leaving.is_over(&self.pool) {
            self.leaving.push(leaving);
            return None;
        }
        self.end_leaving(key, frame, stamp);
        Some(frame)
    }

    /// The frame of an unmapped page becomes reusable.
    fn end_leaving(&mut self, key: PageKey, frame: u32, stamp: Option<u32>) {
        let region = self.region(key);
        self.pool.clear_record(frame);
        let state = if stamp.is_some() { PageState::Ghost } else { PageState::Absent };
        region.change(key.page, state, stamp.unwrap_or(0));
        region.syncs.note_left();
        add(&region.counters.evictions, 1);
    }

    /// Maps a page again that was about to leave.
    pub(crate) fn rescue(&mut self, key: PageKey) {
        let Some(index) = self.leaving.iter().position(|leaving| leaving.key == key) else { return };
        let Leaving { frame, .. } = self.leaving.swap_remove(index);
        self.region(key).change(key.page, PageState::Clean, frame);
        let slot = self.slot_of(frame);
        self.policy.insert_main(slot);
    }

    /// Evicts a page of the laundry that has been written back, unless it was accessed meanwhile or is dirty again.
    pub(crate) fn end_laundry(&mut self, key: PageKey, frame: u32) {
        let slot = self.slot_of(frame);
        if self.unwritable.contains(&key) {
            self.parked.insert(frame);
            return;
        }
        let is_clean = self.pool.record(frame).is_some_and(|record| !record.dirty);
        if !is_clean || self.pool.counters().get(frame as usize) > 0 {
            return self.policy.insert_main(slot);
        }
        let stamp = Some(self.policy.next_stamp());
        if let Some(frame) = self.unmap(key, frame, stamp) {
            let slot = self.slot_of(frame);
            self.policy.free(slot);
        }
    }

    /// Records the outcome of a page's write-back.
    pub(crate) fn note_written(&mut self, region: &Region, key: PageKey, frame: u32, is_written: bool) {
        if is_written && self.unwritable.remove(&key) {
            region.count_writable();
            if self.parked.remove(&frame) {
                let slot = self.slot_of(frame);
                self.policy.insert_main(slot);
            }
        } else if !is_written && self.unwritable.insert(key) {
            region.count_unwritable();
        }
    }

    /// Up to so many pages whose last write-back failed, in turn: those that never succeed keep no others from being tried
    /// again.
    pub(crate) fn next_unwritable(&mut self, count_max: usize) -> Vec<PageKey> {
        let later = self.unwritable.range((Excluded(self.tried_again), Unbounded));
        let earlier = self.unwritable.range(..=self.tried_again);
        let next: Vec<PageKey> = later.chain(earlier).take(count_max).copied().collect();
        self.tried_again = next.last().copied().unwrap_or(self.tried_again);
        next
    }

    /// Has the next call of `next_unwritable` begin behind a page.
    pub(crate) fn try_again_after(&mut self, key: PageKey) {
        self.tried_again = key;
    }

    /// Whether accesses may wait for frames for as long as a disk is full or fails, or the system has too little memory.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.unwritable.is_empty() || self.policy.has_free() && self.pool.is_out_of_memory()
    }

    /// Makes a page writable that is mapped for reads.
    pub(crate) fn make_dirty(&mut self, region: &Region, page: u64) {
        let entry = region.table.entry(page);
        if entry.state() == PageState::Clean {
            self.pool.set_record(entry.frame(), Record { slot: region.slot, page, dirty: true });
            region.change(page, PageState::Dirty, entry.frame());
        }
    }

    /// Gives up a frame that was to be filled.
    pub(crate) fn give_up_fill(&mut self, region: &Region, page: u64, frame: u32) {
        region.change(page, PageState::Absent, 0);
        let slot = self.slot_of(frame);
        self.policy.free(slot);
    }

    /// Takes the unclaimed frames of a region.
    pub(crate) fn take_claims(&mut self, slot: u8) -> Vec<(u32, Record)> {
        let pool = self.pool.clone();
        let record = |frame: u32| pool.record(frame).filter(|record| record.slot == slot);
        let is_its = |frame: &mut u32| record(*frame).is_some();
        let clean = self.unclaimed.extract_if(.., is_its);
        clean
            .chain(self.unclaimed_dirty.extract_if(.., is_its))
            .filter_map(|frame| Some((frame, record(frame)?)))
            .collect()
    }

    /// Whether anything of a region is under way.
    pub(crate) fn is_in_use(&self, slot: u8) -> bool {
        let is_its = |key: &PageKey| key.slot == slot;
        self.fills.keys().any(is_its)
            || self.writing.iter().any(is_its)
            || !self.starved.keys(is_its).is_empty()
    }

    /// Unmaps all pages of a region that is in no use, and frees their frames. Frames that a copy may still be using are
    /// lost to this process.
    pub(crate) fn discard(&mut self, slot: u8) {
        self.take_claims(slot);
        self.unwritable.retain(|key| key.slot != slot);
        let (pool, first) = (self.pool.clone(), self.frames.start);
        let record_of = |frame: u32| pool.record(frame).filter(|record| record.slot == slot);
        self.policy.remove(|index| record_of(first + index).is_some());
        self.parked.retain(|frame| record_of(*frame).is_none());
        let region = self.regions.remove(&slot);
        for frame in self.frames.clone() {
            let Some(Record { page, .. }) = record_of(frame) else { continue };
            let is_unused = region.as_ref().is_none_or(|region| self.unmap_for_good(region, page));
            pool.clear_record(frame);
            if is_unused {
                let index = self.slot_of(frame);
                self.policy.free(index);
            }
        }
    }

    /// Unmaps a page of a region that ends. False if a copy may be under way.
    fn unmap_for_good(&mut self, region: &Region, page: u64) -> bool {
        let frame = region.table.entry(page).frame();
        let is_leaving = |leaving: &Leaving| leaving.key == region.key(page);
        let mut leaving = match self.leaving.iter().position(is_leaving) {
            Some(index) => self.leaving.swap_remove(index),
            None => {
                if region.table.entry(page).state() == PageState::Dirty {
                    region.change(page, PageState::Clean, frame);
                }
                region.change(page, PageState::Leaving, frame);
                let grace = GracePeriod::of_pages(region.page_range(page));
                Leaving { key: region.key(page), frame, stamp: None, grace }
            }
        };
        region.change(page, PageState::Absent, 0);
        leaving.is_over(&self.pool)
    }
}

impl Leaving {
    fn is_over(&mut self, pool: &Pool) -> bool {
        self.grace.is_over() && !mapping::is_pinned(pool.pins(self.frame))
    }
}

/// The parts of a page whose bytes could not be read fail, up to the first one that overwrites all of the page.
pub(crate) fn failed_until_overwritten(parts: &[Part]) -> usize {
    parts.iter().position(Part::is_whole_write).unwrap_or(parts.len())
}

/// What a failed copy means to the requester: the pool's file has been truncated.
pub(crate) const LOST_FRAME: AccessError = AccessError::Fault;
