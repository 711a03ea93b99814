//! Parts of accesses find their pages, or bring them.

use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use terrace_faults::{Faults, StorageOperation};
use terrace_hostmem::PAGE_BYTES;
use terrace_hostmem::fault::Fault;
use terrace_memory::AccessError;
use terrace_shm::{AccessCounters, PageState};
use terrace_sync::{Mutex, MutexGuard, RwLock};

use super::config::CachedConfig;
use super::flush_queue::FlushQueue;
use super::reclaim_signal::ReclaimSignal;
use super::region::Region;
use super::shard::{Fill, Shard};
use super::sink::Sink;
use crate::access::{Part, Task};
use crate::ended::Ended;
use crate::error::PagesError;
use crate::key::PageKey;
use crate::quota::Quota;
use crate::read_queue::ReadQueue;
use crate::shard::shard_count;
use crate::stats::add;

/// Reads submitted at a time.
const DEPTH: u32 = 512;
/// Regions at a time.
pub(super) const REGIONS_MAX: usize = 1 << u8::BITS;

/// What is done after the locks are released.
#[derive(Default)]
pub(super) struct Work {
    pub(super) ended: Ended,
    /// Slots are missing, or soon will be.
    is_short: bool,
}

/// The state that all threads share.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) shards: Box<[Mutex<Shard>]>,
    pub(super) counters: AccessCounters,
    regions: RwLock<Vec<Option<Arc<Region>>>>,
    pub(super) reads: ReadQueue,
    pub(super) sink: Arc<Sink>,
    pub(super) quota: Arc<Quota>,
    pub(super) flushes: FlushQueue,
    pub(super) reclaim: ReclaimSignal,
    faults: Option<Arc<Faults>>,
}

impl Engine {
    pub(super) fn open(config: &CachedConfig) -> Result<Engine, PagesError> {
        let slot_count = config.slot_count();
        let sink = Arc::new(Sink::new().map_err(PagesError::system("map memory"))?);
        let store = config.store().open(DEPTH, sink.file.as_fd());
        let reads = store.map_err(PagesError::system("set up io_uring"))?.reads;
        let count = shard_count(slot_count);
        let border = |index: u32| (u64::from(slot_count) * u64::from(index) / u64::from(count)) as u32;
        let shards = (0..count).map(|index| Mutex::new(Shard::new(border(index)..border(index + 1))));
        let counters = AccessCounters::new(slot_count as usize);
        Ok(Engine {
            shards: shards.collect(),
            counters: counters.map_err(PagesError::system("make counters"))?,
            regions: RwLock::default(),
            reads: ReadQueue::new(reads)?,
            sink,
            quota: Quota::new(config.quota_bytes()),
            flushes: FlushQueue::default(),
            reclaim: ReclaimSignal::default(),
            faults: config.faults.clone().filter(|faults| faults.plan().has_storage_faults()),
        })
    }

    pub(super) fn shards(&self) -> &[Mutex<Shard>] {
        &self.shards
    }

    pub(super) fn shard_index(&self, key: PageKey) -> usize {
        key.shard(self.shards.len())
    }

    pub(super) fn lock(&self, key: PageKey) -> MutexGuard<'_, Shard> {
        self.shards[self.shard_index(key)].lock()
    }

    /// Adds the region that `make` makes with a slot.
    ///
    /// # Errors
    /// `Regions` when there are [`REGIONS_MAX`]; those of `make`.
    pub(super) fn add_region(
        &self,
        make: impl FnOnce(u8) -> Result<Region, PagesError>,
    ) -> Result<Arc<Region>, PagesError> {
        let mut regions = self.regions.write();
        let free = regions.iter().position(Option::is_none).unwrap_or(regions.len());
        let slot = u8::try_from(free).map_err(|_| PagesError::Regions(REGIONS_MAX))?;
        let region = Arc::new(make(slot)?);
        if free == regions.len() {
            regions.push(None);
        }
        regions[free] = Some(region.clone());
        Ok(region)
    }

    pub(super) fn remove_region(&self, region: &Region) {
        self.regions.write()[usize::from(region.slot)] = None;
    }

    pub(super) fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.read().iter().flatten().cloned().collect()
    }

    /// The region of a page that has a slot, or is asked for.
    pub(super) fn region(&self, key: PageKey) -> Arc<Region> {
        let region = self.regions.read()[usize::from(key.slot)].clone();
        region.expect("a region with pages in use is there")
    }

    /// Applies the fault plan to an operation: sleeps for the plan's delay, then returns its error.
    ///
    /// # Errors
    /// The error that the plan gives.
    pub(super) fn suffer(&self, operation: StorageOperation) -> std::io::Result<()> {
        let Some(faults) = &self.faults else { return Ok(()) };
        let fate = faults.storage(operation);
        std::thread::sleep(fate.delay);
        fate.error.map_or(Ok(()), |error| Err(std::io::Error::from_raw_os_error(error)))
    }

    /// Begins a part of an access; the caller has the page's shard locked.
    pub(super) fn begin_part(
        &self,
        shard: &mut Shard,
        region: &Region,
        page: u64,
        part: Part,
        work: &mut Work,
    ) {
        let key = region.key(page);
        match region.table.entry(page).state() {
            PageState::Clean | PageState::Dirty => {
                let result = carry_out(region, page, &part);
                work.ended.end_part(&part, result);
            }
            PageState::Filling => match shard.fills.entry(key) {
                Entry::Occupied(mut fill) => fill.get_mut().waiting.push(part),
                Entry::Vacant(_) => unreachable!("a page that is being read has a fill"),
            },
            PageState::Leaving => {
                // It may be out of memory already.
                let slot = shard.take_back(region, page);
                let stamp = Some(shard.fresh_stamp());
                self.begin_fill(shard, region, page, Fill { slot, stamp, waiting: vec![part] }, work);
            }
            PageState::Absent | PageState::Ghost => {
                // A slot goes to the part that has waited for longest.
                let is_first = shard.starved.is_empty();
                shard.starved.push(key, part);
                if is_first {
                    self.feed_starved(shard, work);
                }
            }
        }
    }

    /// Gives slots to the parts that wait for them, as long as there are any.
    pub(super) fn feed_starved(&self, shard: &mut Shard, work: &mut Work) {
        while let Some(key) = shard.starved.first() {
            let region = self.region(key);
            if let Some(part) = shard.starved.pop_barrier() {
                work.ended.end_part(&part, Ok(()));
                continue;
            }
            let Some(slot) = shard.take_slot(key) else { break };
            let waiting = shard.starved.take(key);
            let entry = region.table.entry(key.page);
            let stamp = (entry.state() == PageState::Ghost).then_some(entry.frame());
            self.begin_fill(shard, &region, key.page, Fill { slot, stamp, waiting }, work);
        }
        work.is_short |= shard.is_short() || !shard.starved.is_empty();
    }

    /// Has a page read that has a slot now. A hole of the file needs no read: the waiting parts are carried out now, and
    /// the page fault of the first one brings zeros. If a hole is none any more by then, the fault reads the disk.
    fn begin_fill(&self, shard: &mut Shard, region: &Region, page: u64, fill: Fill, work: &mut Work) {
        let (key, slot) = (region.key(page), fill.slot);
        region.change(page, PageState::Filling, slot);
        shard.fills.insert(key, fill);
        if self.faults.is_none() && region.is_hole(page) {
            add(&region.counters.pages_placed, 1);
            self.end_fill(shard, key, Ok(()), work);
        } else {
            self.queue_read(shard, region, page, slot);
        }
    }

    /// Ends the fill of a page, which is in the page cache now, or cannot be. Carries the waiting parts out in order.
    pub(super) fn end_fill(
        &self,
        shard: &mut Shard,
        key: PageKey,
        read: Result<(), AccessError>,
        work: &mut Work,
    ) {
        let Some(Fill { slot, stamp, waiting }) = shard.fills.remove(&key) else { return };
        let region = self.region(key);
        let access_count = waiting.iter().filter(|part| !matches!(part.task, Task::Barrier)).count();
        for part in waiting {
            let result = read.and_then(|()| carry_out(&region, key.page, &part));
            work.ended.end_part(&part, result);
        }
        if read.is_err() {
            region.change(key.page, PageState::Absent, 0);
            return shard.free_slot(slot);
        }
        region.change(key.page, PageState::Clean, slot);
        let count = access_count.saturating_sub(1).min(usize::from(AccessCounters::MAX));
        self.counters.set(slot as usize, count as u8);
        shard.insert(slot, stamp);
        // Perhaps no page could leave until now.
        work.is_short |= !shard.starved.is_empty();
    }

    /// Gives a slot to a page that somebody else has brought into the page cache. False if there is none.
    pub(super) fn adopt(&self, region: &Region, page: u64) -> bool {
        let key = region.key(page);
        let mut shard = self.lock(key);
        let entry = region.table.entry(page);
        if !matches!(entry.state(), PageState::Absent | PageState::Ghost) {
            return true;
        }
        let Some(slot) = shard.take_slot(key) else { return false };
        let stamp = (entry.state() == PageState::Ghost).then_some(entry.frame());
        region.change(page, PageState::Filling, slot);
        // Parts that wait for a slot wait for an absent page, and go before later ones.
        let mut work = Work::default();
        for part in shard.starved.take(key) {
            work.ended.end_part(&part, carry_out(region, page, &part));
        }
        region.change(page, PageState::Clean, slot);
        self.counters.set(slot as usize, 0);
        shard.insert(slot, stamp);
        add(&region.counters.pages_adopted, 1);
        drop(shard);
        self.settle(work);
        true
    }

    /// Fails the parts that wait for slots of a shard and are for one of these regions.
    pub(super) fn fail_starved(&self, shard: &Mutex<Shard>, is_one: impl Fn(u8) -> bool, error: AccessError) {
        let mut work = Work::default();
        let mut shard = shard.lock();
        for key in shard.starved.keys(|key| is_one(key.slot)) {
            for part in shard.starved.take(key) {
                work.ended.end_part(&part, Err(error));
            }
        }
        drop(shard);
        self.settle(work);
    }

    /// Does what is to be done without locks.
    pub(super) fn settle(&self, work: Work) {
        let Work { ended, is_short } = work;
        if is_short {
            self.reclaim.ask();
        }
        self.flushes.add(ended.tell());
    }

    /// The descriptor of the device.
    pub(super) fn device_descriptor(&self) -> BorrowedFd<'_> {
        self.reads.descriptor()
    }
}

/// Carries a part out in the mapping: the page is in the page cache.
///
/// # Errors
/// [`Region::error_of`].
fn carry_out(region: &Region, page: u64, part: &Part) -> Result<(), AccessError> {
    let page_addr = region.map.addr + page * PAGE_BYTES;
    part.carry_out_in_program(page_addr).map_err(|Fault| region.error_of(page, part.is_write()))
}
