//! Dirty pages are written back whose frames are needed, or will be soon.

use terrace_shm::PageState;

use super::writing::Ticket;
use crate::engine::{Engine, Work};
use crate::frames::Record;
use crate::key::{GROUP_PAGES, PageKey};
use crate::shard::Shard;

/// Pages that a thread takes at a time.
const BATCH_PAGES: usize = 256;

impl Engine {
    /// Writes the pages of all laundries back, and gives their frames to the parts that wait. Returns whether a write
    /// failed.
    pub(super) fn clean_laundry(&self) -> bool {
        let mut has_failed = false;
        for shard in self.shards() {
            loop {
                let (regions, tickets) = {
                    let mut shard = shard.lock();
                    let tickets = self.take_laundry(&mut shard);
                    (shard.regions.clone(), tickets)
                };
                if tickets.is_empty() {
                    break;
                }
                let region_of = |slot: u8| regions.get(&slot).cloned();
                let failed = self.write_tickets(tickets, region_of);
                has_failed |= failed;
                if failed {
                    break;
                }
            }
            let mut work = Work::default();
            let mut shard = shard.lock();
            if !shard.starved.is_empty() {
                self.feed_starved(&mut shard, &mut work);
            }
            drop(shard);
            // Only from the access that needs frames: pages that cannot be written would keep the threads busy.
            work.is_starved = false;
            self.settle(work);
            self.advance();
        }
        has_failed
    }

    fn take_laundry(&self, shard: &mut Shard) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        for _ in 0..shard.policy.laundry_len() {
            if tickets.len() >= BATCH_PAGES {
                break;
            }
            let Some(slot) = shard.policy.take_from_laundry() else { break };
            let frame = shard.frames().start + slot;
            let Some(record) = self.pool.record(frame) else { continue };
            let key = PageKey { slot: record.slot, page: record.page };
            match self.begin_write(shard, key, frame) {
                Some(ticket) => tickets.push(Ticket { is_from_laundry: true, ..ticket }),
                // It was written for other reasons, or is being written.
                None if record.dirty => shard.policy.insert_main(slot),
                None => shard.end_laundry(key, frame),
            }
        }
        // After all of the laundry, whose pages are often adjacent.
        for index in 0..tickets.len() {
            self.take_adjacent(shard, tickets[index].key, &mut tickets);
        }
        tickets
    }

    /// Begins to write the dirty pages around a page, too: one request writes them all.
    fn take_adjacent(&self, shard: &mut Shard, key: PageKey, tickets: &mut Vec<Ticket>) {
        let region = shard.region(key);
        let first = key.page / GROUP_PAGES * GROUP_PAGES;
        let end = (first + GROUP_PAGES).min(region.table.page_count());
        // Pages whose write-back has begun are `Clean`.
        let is_dirty = |page: &u64| region.table.entry(*page).state() == PageState::Dirty;
        let before = (first..key.page).rev().take_while(is_dirty);
        let pages: Vec<u64> = before.chain((key.page + 1..end).take_while(is_dirty)).collect();
        for page in pages {
            let frame = region.table.entry(page).frame();
            tickets.extend(self.begin_write(shard, region.key(page), frame));
        }
    }

    /// Tries again to write the pages whose write-back has failed. Returns whether there are any left.
    pub(super) fn retry_unwritable(&self) -> bool {
        let mut are_left = false;
        for shard in self.shards() {
            let (regions, tickets) = {
                let mut shard = shard.lock();
                let mut tickets = Vec::new();
                for key in shard.next_unwritable(BATCH_PAGES) {
                    let Some(region) = shard.regions.get(&key.slot).cloned() else { continue };
                    let entry = region.table.entry(key.page);
                    if entry.is_readable() {
                        tickets.extend(self.begin_write(&mut shard, key, entry.frame()));
                    }
                }
                (shard.regions.clone(), tickets)
            };
            self.write_in_order(&tickets, |slot| regions.get(&slot).cloned());
            are_left |= !shard.lock().unwritable.is_empty();
        }
        are_left
    }

    /// Whether accesses wait for frames.
    pub(super) fn has_starved(&self) -> bool {
        self.shards().iter().any(|shard| !shard.lock().starved.is_empty())
    }

    /// Writes dirty pages back that nobody has accessed for a while. Returns whether there are few dirty pages now.
    pub(super) fn clean_ahead(&self) -> bool {
        if !self.to_write.begin_search() {
            return false;
        }
        for shard in self.shards() {
            if !self.has_many_dirty() {
                return true;
            }
            let (regions, tickets) = {
                let mut shard = shard.lock();
                let tickets = self.take_cold(&mut shard);
                (shard.regions.clone(), tickets)
            };
            if self.write_tickets(tickets, |slot| regions.get(&slot).cloned()) {
                return false;
            }
        }
        !self.has_many_dirty()
    }

    fn take_cold(&self, shard: &mut Shard) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        for frame in shard.frames() {
            if tickets.len() >= BATCH_PAGES {
                break;
            }
            let Some(Record { slot, page, dirty: true }) = self.pool.record(frame) else { continue };
            let key = PageKey { slot, page };
            let is_cold = self.pool.counters().get(frame as usize) == 0;
            let is_refused = shard.regions.get(&slot).is_none_or(|region| region.write_refusal().is_some());
            if is_cold && !is_refused {
                tickets.extend(self.begin_write(shard, key, frame));
                self.take_adjacent(shard, key, &mut tickets);
            }
        }
        tickets
    }
}
