//! A shard: some of the slots, and the pages that may have them. All changes of these pages' states are made with the
//! shard locked. The lock is never held while a thread waits.

use std::collections::HashMap;
use std::ops::Range;

use terrace_shm::{AccessCounters, PageState};

use super::region::Region;
use crate::access::Part;
use crate::key::PageKey;
use crate::replacement::S3Fifo;
use crate::starved::Starved;
use crate::stats::add;
use crate::store::ReadRequest;

/// A page that is being read.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) slot: u32,
    /// The page's stamp, if it was a ghost.
    pub(super) stamp: Option<u32>,
    /// In the order of the requests.
    pub(super) waiting: Vec<Part>,
}

/// A page that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Leaver {
    pub(super) key: PageKey,
    pub(super) slot: u32,
    stamp: Option<u32>,
}

#[derive(Debug)]
pub(super) struct Shard {
    slots: Range<u32>,
    policy: S3Fifo,
    /// The page of each slot.
    owners: Box<[Option<PageKey>]>,
    free_count: usize,
    leaving_count: usize,
    /// Slots whose pages the kernel has dropped. They have no owner, and are in a queue of the policy until
    /// [`Shard::free_lost`] or [`Shard::choose`] frees them: taking one slot out of a queue takes as long as taking all.
    lost_count: usize,
    pub(super) fills: HashMap<PageKey, Fill>,
    pub(super) starved: Starved,
    /// Pages that do not leave, and how often each is pinned.
    pins: HashMap<PageKey, u32>,
    /// Reads to be submitted.
    pub(super) to_read: Vec<ReadRequest>,
}

impl Shard {
    pub(super) fn new(slots: Range<u32>) -> Shard {
        let mut policy = S3Fifo::new(slots.len());
        (0..slots.len() as u32).for_each(|index| policy.free(index));
        Shard {
            policy,
            owners: vec![None; slots.len()].into(),
            free_count: slots.len(),
            leaving_count: 0,
            lost_count: 0,
            fills: HashMap::new(),
            starved: Starved::default(),
            pins: HashMap::new(),
            to_read: Vec::new(),
            slots,
        }
    }

    /// Slots are freed ahead of need below this many, up to twice as many.
    fn reserve(&self) -> usize {
        (self.slots.len() / 64).clamp(4, 256)
    }

    /// Whether slots have to be freed.
    pub(super) fn is_short(&self) -> bool {
        self.free_count + self.leaving_count < self.reserve()
    }

    fn index(&self, slot: u32) -> u32 {
        slot - self.slots.start
    }

    /// The page of a slot.
    pub(super) fn owner(&self, slot: u32) -> Option<PageKey> {
        self.owners[self.index(slot) as usize]
    }

    /// A slot for a page, unless all are in use.
    pub(super) fn take_slot(&mut self, key: PageKey) -> Option<u32> {
        let index = self.policy.take_free()?;
        self.free_count -= 1;
        self.owners[index as usize] = Some(key);
        Some(self.slots.start + index)
    }

    /// The number of free slots.
    pub(super) fn free_count(&self) -> usize {
        self.free_count
    }

    pub(super) fn free_slot(&mut self, slot: u32) {
        let index = self.index(slot);
        self.owners[index as usize] = None;
        self.policy.free(index);
        self.free_count += 1;
    }

    /// A page is present now.
    pub(super) fn insert(&mut self, slot: u32, stamp: Option<u32>) {
        let index = self.index(slot);
        self.policy.insert(index, stamp);
    }

    /// Chooses pages that leave until there are enough free slots, and marks them. `region_of` gives the region of a
    /// page that may leave.
    pub(super) fn choose<'a>(
        &mut self,
        counters: &AccessCounters,
        region_of: impl Fn(PageKey) -> Option<&'a Region>,
    ) -> Vec<Leaver> {
        let mut leavers = Vec::new();
        // Pages that may not leave go round again.
        for _ in 0..2 * self.reserve() {
            if self.free_count + self.leaving_count >= 2 * self.reserve() {
                break;
            }
            let Some(victim) = self.policy.evict(counters, self.slots.start as usize) else { break };
            let slot = self.slots.start + victim.slot;
            let Some(key) = self.owner(slot) else {
                self.lost_count -= 1;
                self.free_slot(slot);
                continue;
            };
            match region_of(key).filter(|_| !self.pins.contains_key(&key)) {
                Some(region) => leavers.push(self.begin_leaving(region, key, slot, victim.stamp)),
                None => self.policy.insert_main(victim.slot),
            }
        }
        leavers
    }

    /// Keeps a page from leaving. False if half of the slots would be pinned.
    pub(super) fn pin(&mut self, key: PageKey) -> bool {
        let has_room = self.pins.len() < self.slots.len() / 2;
        if has_room || self.pins.contains_key(&key) {
            *self.pins.entry(key).or_default() += 1;
            return true;
        }
        false
    }

    /// Ends a [`Shard::pin`].
    pub(super) fn unpin(&mut self, key: PageKey) {
        if let Some(count) = self.pins.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.pins.remove(&key);
            }
        }
    }

    /// Marks the present ones of some pages of a region as leaving, whatever the policy says, except for pinned ones.
    pub(super) fn choose_pages(&mut self, region: &Region, pages: Range<u64>) -> Vec<Leaver> {
        let present: Vec<(u64, u32)> = pages
            .map(|page| (page, region.table.entry(page)))
            .filter(|(page, entry)| entry.is_readable() && !self.pins.contains_key(&region.key(*page)))
            .map(|(page, entry)| (page, entry.frame()))
            .collect();
        let indexes: Vec<u32> = present.iter().map(|(_, slot)| self.index(*slot)).collect();
        self.policy.remove(|index| indexes.contains(&index));
        present
            .into_iter()
            .map(|(page, slot)| self.begin_leaving(region, region.key(page), slot, None))
            .collect()
    }

    fn begin_leaving(&mut self, region: &Region, key: PageKey, slot: u32, stamp: Option<u32>) -> Leaver {
        region.change(key.page, PageState::Leaving, slot);
        self.leaving_count += 1;
        Leaver { key, slot, stamp }
    }

    /// Whether a page is still leaving, and has not been asked for meanwhile.
    fn is_leaving(&self, region: &Region, leaver: &Leaver) -> bool {
        let entry = region.table.entry(leaver.key.page);
        entry.state() == PageState::Leaving && entry.frame() == leaver.slot
    }

    /// A page has left. Without `is_ghost`, it is not remembered: somebody else keeps it in memory.
    pub(super) fn end_leaving(&mut self, region: &Region, leaver: &Leaver, is_ghost: bool) {
        if !self.is_leaving(region, leaver) {
            return;
        }
        self.leaving_count -= 1;
        match leaver.stamp.filter(|_| is_ghost) {
            Some(stamp) => region.change(leaver.key.page, PageState::Ghost, stamp),
            None => region.change(leaver.key.page, PageState::Absent, 0),
        }
        self.free_slot(leaver.slot);
        add(&region.counters.evictions, 1);
    }

    /// A page cannot leave now: it is present again.
    pub(super) fn keep(&mut self, region: &Region, leaver: &Leaver) {
        if !self.is_leaving(region, leaver) {
            return;
        }
        self.leaving_count -= 1;
        region.change(leaver.key.page, PageState::Clean, leaver.slot);
        let index = self.index(leaver.slot);
        self.policy.insert_main(index);
    }

    /// Takes the slot of a page that was leaving and is needed again.
    pub(super) fn take_back(&mut self, region: &Region, page: u64) -> u32 {
        let slot = region.table.entry(page).frame();
        self.leaving_count -= 1;
        region.change(page, PageState::Absent, 0);
        slot
    }

    /// The stamp with which a page enters the main queue.
    pub(super) fn fresh_stamp(&mut self) -> u32 {
        self.policy.next_stamp()
    }

    /// Forgets a page that the kernel has dropped, unless it is pinned. Its slot is lost.
    pub(super) fn forget(&mut self, region: &Region, page: u64) {
        let (key, entry) = (region.key(page), region.table.entry(page));
        if !entry.is_readable() || self.pins.contains_key(&key) {
            return;
        }
        region.change(page, PageState::Leaving, entry.frame());
        region.change(page, PageState::Absent, 0);
        let index = self.index(entry.frame());
        self.owners[index as usize] = None;
        self.lost_count += 1;
        add(&region.counters.evictions, 1);
    }

    /// Frees lost slots, once there are enough of them for a walk through all slots, or no other slot is free.
    pub(super) fn free_lost(&mut self) {
        let is_worth_it = self.lost_count >= self.reserve() || self.free_count == 0;
        if self.lost_count == 0 || !is_worth_it {
            return;
        }
        let mut lost = Vec::with_capacity(self.lost_count);
        self.policy.remove(|index| {
            let is_lost = self.owners[index as usize].is_none();
            if is_lost {
                lost.push(self.slots.start + index);
            }
            is_lost
        });
        self.lost_count -= lost.len();
        lost.into_iter().for_each(|slot| self.free_slot(slot));
    }

    /// Whether an access to a region is under way.
    pub(super) fn is_in_use(&self, region: u8) -> bool {
        let is_its = |key: &PageKey| key.slot == region;
        self.fills.keys().any(is_its) || !self.starved.keys(is_its).is_empty()
    }

    /// Frees the slots of a region that is in no use, and none of whose pages is leaving.
    pub(super) fn discard(&mut self, region: &Region) {
        let (first, owners) = (self.slots.start, &self.owners);
        let is_its = |index: u32| owners[index as usize].is_some_and(|key| key.slot == region.slot);
        self.policy.remove(is_its);
        self.pins.retain(|key, _| key.slot != region.slot);
        let slots: Vec<u32> =
            (0..owners.len() as u32).filter(|index| is_its(*index)).map(|index| first + index).collect();
        for slot in slots {
            let Some(key) = self.owner(slot) else { continue };
            region.change(key.page, PageState::Leaving, slot);
            region.change(key.page, PageState::Absent, 0);
            self.free_slot(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use terrace_hostmem::PAGE_BYTES;

    use super::*;
    use crate::cached::region::CachedSource;
    use crate::sys::Mapping;

    const SLOTS: u32 = 1 << 16;

    #[test]
    fn dropped_pages_are_forgotten_in_a_time_that_is_linear_in_their_number() {
        let path = std::env::temp_dir().join(format!("terrace-pages-{}-forgotten", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).expect("a file");
        std::fs::remove_file(&path).expect("removed");
        let len = u64::from(SLOTS) * PAGE_BYTES;
        file.set_len(len).expect("a sparse file");
        let mapping = Mapping::of_file(file.as_fd(), len).expect("mapped");
        let source = CachedSource {
            file: Arc::new(file.into()),
            file_offset: 0,
            map: mapping.range(),
            is_writable: true,
            is_swap_file: false,
        };
        let region = Region::new(0, source).expect("a region");
        let counters = AccessCounters::new(SLOTS as usize).expect("counters");
        let mut shard = Shard::new(0..SLOTS);
        let bring = |shard: &mut Shard, page| {
            let slot = shard.take_slot(region.key(page)).expect("a free slot");
            region.change(page, PageState::Filling, slot);
            region.change(page, PageState::Clean, slot);
            shard.insert(slot, None);
        };
        (0..u64::from(SLOTS)).for_each(|page| bring(&mut shard, page));
        let started = Instant::now();
        (1..u64::from(SLOTS)).for_each(|page| shard.forget(&region, page));
        assert!(shard.is_short());
        shard.free_lost();
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        assert_eq!(shard.free_count(), SLOTS as usize - 1);
        // A few lost slots are freed at once if no other is free, because no page may be able to leave.
        (1..u64::from(SLOTS)).for_each(|page| bring(&mut shard, page));
        shard.forget(&region, u64::from(SLOTS) - 1);
        shard.free_lost();
        assert_eq!((shard.free_count(), shard.lost_count), (1, 0));
        // Otherwise they are freed when they would be the next to leave; what is in memory stays.
        (1..4).for_each(|page| shard.forget(&region, page));
        shard.free_lost();
        assert_eq!(shard.free_count(), 1);
        let leavers = shard.choose(&counters, |_| Some(&region));
        assert_eq!((shard.free_count(), shard.lost_count), (4, 0));
        assert_eq!(leavers.len() + 4, 2 * shard.reserve());
        assert!(
            leavers.iter().all(|leaver| region.table.entry(leaver.key.page).state() == PageState::Leaving)
        );
    }
}
