//! Which page leaves memory: S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: "FIFO queues are all you need for cache
//! eviction", SOSP 2023), over the frames of one shard.
//!
//! A page that comes into memory enters a *small* queue, which has a twentieth of the frames. When it reaches the head,
//! it goes on to the *main* queue if it was accessed more than once meanwhile, else it leaves and becomes a ghost. A
//! ghost that is missed soon enters the main queue. At the head of the main queue, a page that was accessed since goes
//! round again, with one access less to its credit. So a scan passes through the small queue only.
//!
//! A hit adds one to a shared counter that stays at 3 ([`AccessCounters`]), and nothing else. A ghost costs no memory:
//! it is the stamp of its eviction in the page's own entry, which has no frame then. A page is a ghost as long as fewer
//! pages became ghosts after it than the main queue holds.
//!
//! Decision 49 has the hit ratios and why the small queue is a twentieth.

mod lists;

use terrace_shm::AccessCounters;

use lists::{Links, List};

/// The small queue has one of so many frames. The paper has a tenth.
pub(crate) const SMALL_SHARE: usize = 20;
/// A page whose counter is above this when it leaves the small queue goes on to the main queue.
const PROMOTED_ABOVE: u8 = 1;
/// After so many pages that go round again, the next one leaves whatever its counter says: an eviction has a bounded
/// time.
const ROUNDS_MAX: usize = 1024;

/// A page that is to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Its frame, counted from the first one of the shard.
    pub slot: u32,
    /// The stamp, if the page becomes a ghost. Never 0.
    pub stamp: Option<u32>,
}

/// The queues of a shard. Frames are counted from the first one of the shard.
#[derive(Debug)]
pub struct S3Fifo {
    links: Links,
    small: List,
    main: List,
    /// Frames that wait to be written back before they leave.
    laundry: List,
    free: List,
    small_max: usize,
    ghosts_max: u32,
    /// The stamp of the last ghost.
    last_stamp: u32,
}

impl S3Fifo {
    /// For so many frames. All are unknown to the queues.
    pub fn new(frame_count: usize) -> S3Fifo {
        let small_max = (frame_count / SMALL_SHARE).max(1);
        S3Fifo {
            links: Links::new(frame_count),
            small: List::default(),
            main: List::default(),
            laundry: List::default(),
            free: List::default(),
            small_max,
            ghosts_max: (frame_count - frame_count / SMALL_SHARE) as u32,
            last_stamp: 0,
        }
    }

    /// Adds a page that has come into memory. `stamp` is that of its entry if it was evicted before.
    pub fn insert(&mut self, slot: u32, stamp: Option<u32>) {
        let is_ghost = stamp.is_some_and(|stamp| self.last_stamp.wrapping_sub(stamp) < self.ghosts_max);
        let queue = if is_ghost { &mut self.main } else { &mut self.small };
        queue.push(&mut self.links, slot);
    }

    /// Adds a page that is known to be worth its frame, or cannot leave now.
    pub fn insert_main(&mut self, slot: u32) {
        self.main.push(&mut self.links, slot);
    }

    /// Removes the page that is to leave from the queues. The counters of the shard begin at `first`.
    pub fn evict(&mut self, counters: &AccessCounters, first: usize) -> Option<Victim> {
        for round in 0.. {
            if self.small.len() >= self.small_max || self.main.len() == 0 {
                let slot = self.small.pop(&mut self.links)?;
                let index = first + slot as usize;
                if counters.get(index) > PROMOTED_ABOVE && round < ROUNDS_MAX {
                    counters.set(index, 0);
                    self.main.push(&mut self.links, slot);
                    continue;
                }
                return Some(Victim { slot, stamp: Some(self.next_stamp()) });
            }
            let slot = self.main.pop(&mut self.links)?;
            let index = first + slot as usize;
            let count = counters.get(index);
            if count == 0 || round >= ROUNDS_MAX {
                return Some(Victim { slot, stamp: None });
            }
            counters.set(index, count - 1);
            self.main.push(&mut self.links, slot);
        }
        None
    }

    /// Removes the page at the head of the small queue, whatever its counter says: for when no page of the main queue can
    /// leave.
    pub fn evict_small(&mut self) -> Option<Victim> {
        let slot = self.small.pop(&mut self.links)?;
        Some(Victim { slot, stamp: Some(self.next_stamp()) })
    }

    /// The stamp of a page that becomes a ghost now.
    pub fn next_stamp(&mut self) -> u32 {
        self.last_stamp = self.last_stamp.checked_add(1).unwrap_or(1);
        self.last_stamp
    }

    /// Sets a victim aside until it is written back.
    pub fn put_to_laundry(&mut self, slot: u32) {
        self.laundry.push(&mut self.links, slot);
    }

    /// Takes the frame that has been in the laundry for longest.
    pub fn take_from_laundry(&mut self) -> Option<u32> {
        self.laundry.pop(&mut self.links)
    }

    /// The number of frames in the laundry.
    pub fn laundry_len(&self) -> usize {
        self.laundry.len()
    }

    /// Adds a frame without a page.
    pub fn free(&mut self, slot: u32) {
        self.free.push(&mut self.links, slot);
    }

    /// Whether there are frames without a page.
    pub fn has_free(&self) -> bool {
        self.free.len() > 0
    }

    /// Takes a frame without a page.
    pub fn take_free(&mut self) -> Option<u32> {
        self.free.pop(&mut self.links)
    }

    /// Removes the frames that `is_removed` selects from all queues but that of free frames.
    pub fn remove(&mut self, mut is_removed: impl FnMut(u32) -> bool) {
        for queue in [&mut self.small, &mut self.main, &mut self.laundry] {
            for _ in 0..queue.len() {
                let Some(slot) = queue.pop(&mut self.links) else { break };
                if !is_removed(slot) {
                    queue.push(&mut self.links, slot);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_accessed_twice_stays_and_one_accessed_once_becomes_a_ghost() {
        let counters = AccessCounters::new(4).expect("made");
        let mut queues = S3Fifo::new(4);
        (0..4).for_each(|slot| queues.insert(slot, None));
        (0..2).for_each(|_| counters.count(0));
        counters.count(1);
        assert_eq!(queues.evict(&counters, 0), Some(Victim { slot: 1, stamp: Some(1) }));
        assert_eq!(counters.get(0), 0, "page 0 starts anew in the main queue");
        // Page 1 is missed again: it is a ghost, and enters the main queue.
        queues.insert(1, Some(1));
        assert_eq!(queues.evict(&counters, 0), Some(Victim { slot: 2, stamp: Some(2) }));
        assert_eq!(queues.evict(&counters, 0), Some(Victim { slot: 3, stamp: Some(3) }));
        assert_eq!(queues.evict(&counters, 0), Some(Victim { slot: 0, stamp: None }));
    }

    #[test]
    fn an_eviction_ends_although_all_pages_are_hot() {
        const FRAMES: usize = 4 * ROUNDS_MAX;
        let counters = AccessCounters::new(FRAMES).expect("made");
        let mut queues = S3Fifo::new(FRAMES);
        (0..FRAMES).for_each(|slot| queues.insert_main(slot as u32));
        (0..FRAMES).for_each(|slot| (0..3).for_each(|_| counters.count(slot)));
        assert_eq!(queues.evict(&counters, 0).map(|victim| victim.slot), Some(ROUNDS_MAX as u32));
    }

    #[test]
    fn removed_frames_are_in_no_queue() {
        let counters = AccessCounters::new(8).expect("made");
        let mut queues = S3Fifo::new(8);
        (0..4).for_each(|slot| queues.insert(slot, None));
        (4..6).for_each(|slot| queues.insert_main(slot));
        queues.put_to_laundry(6);
        queues.free(7);
        queues.remove(|slot| slot % 2 == 0);
        assert_eq!((queues.take_from_laundry(), queues.take_free()), (None, Some(7)));
        let mut left: Vec<_> =
            std::iter::from_fn(|| queues.evict(&counters, 0)).map(|victim| victim.slot).collect();
        left.sort_unstable();
        assert_eq!(left, [1, 3, 5]);
    }
}
