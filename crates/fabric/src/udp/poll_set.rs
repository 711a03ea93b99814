//! Selection of the sockets to poll.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A GID without traffic is polled once in this many polls while another GID has traffic.
const IDLE_POLL_INTERVAL: u32 = 16;

/// The set of GIDs with traffic is reviewed after this many polls.
const REVIEW_INTERVAL: u32 = 4096;

/// The GIDs to poll. A poll of an empty socket costs a system call, nearly half a microsecond, and most processes use
/// one GID only. So GIDs with recent traffic are polled every time, and the others rarely. If no GID has traffic, all
/// are polled. Only the receiving thread writes the fields.
#[derive(Debug, Default)]
pub(super) struct PollSet {
    polls: AtomicU32,
    /// Bit i: GID i had traffic in the previous review interval, or has had in this one.
    busy: AtomicU32,
    /// Bit i: GID i has had traffic since the last review.
    seen: AtomicU32,
}

impl PollSet {
    /// The GIDs to poll next, as bits.
    pub fn next_poll(&self, active: u32) -> u32 {
        if active.count_ones() <= 1 {
            return active;
        }
        let gids = self.polls.load(Relaxed).wrapping_add(1);
        self.polls.store(gids, Relaxed);
        if gids.is_multiple_of(REVIEW_INTERVAL) {
            self.busy.store(self.seen.load(Relaxed), Relaxed);
            self.seen.store(0, Relaxed);
        }
        let busy = self.busy.load(Relaxed) & active;
        if busy == 0 || gids.is_multiple_of(IDLE_POLL_INTERVAL) { active } else { busy }
    }

    /// Records that a GID had traffic.
    pub fn record_traffic(&self, gid_index: usize) {
        let bit = 1 << gid_index;
        if self.seen.load(Relaxed) & bit == 0 {
            self.seen.store(self.seen.load(Relaxed) | bit, Relaxed);
            self.busy.store(self.busy.load(Relaxed) | bit, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polls(poll_set: &PollSet, active: u32, count: u32) -> Vec<u32> {
        (0..count).map(|_| poll_set.next_poll(active)).collect()
    }

    #[test]
    fn a_single_gid_is_polled_every_time() {
        assert_eq!(polls(&PollSet::default(), 0b100, 50), [0b100; 50]);
    }

    #[test]
    fn without_traffic_all_gids_are_polled() {
        assert_eq!(polls(&PollSet::default(), 0b101, 50), [0b101; 50]);
    }

    #[test]
    fn idle_gids_are_polled_rarely_while_another_has_traffic() {
        let poll_set = PollSet::default();
        poll_set.record_traffic(2);
        let polls = polls(&poll_set, 0b101, 160);
        assert!(polls.iter().all(|gids| gids & 0b100 != 0));
        assert_eq!(polls.iter().filter(|gids| **gids == 0b101).count(), 10);
    }

    #[test]
    fn a_gid_without_traffic_becomes_idle() {
        let poll_set = PollSet::default();
        poll_set.record_traffic(2);
        polls(&poll_set, 0b101, REVIEW_INTERVAL);
        poll_set.record_traffic(0);
        polls(&poll_set, 0b101, REVIEW_INTERVAL);
        assert_eq!(poll_set.next_poll(0b101), 0b001);
    }
}
