//! Selection of the sockets to poll.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// A GID without traffic is polled once in this many polls while another has traffic.
const COLD_TURNS: u32 = 16;

/// After so many polls the set of GIDs with traffic is reviewed.
const REVIEW_TURNS: u32 = 4096;

/// Polling an empty socket costs a system call, nearly half a microsecond, and most processes use one GID only.
/// So GIDs with recent traffic are polled every time, and the others rarely. If none has traffic, all
/// are polled. Only the one receiver writes here.
#[derive(Debug, Default)]
pub(super) struct Attention {
    turns: AtomicU32,
    /// Bit i: GID i had traffic before the last review, or since.
    hot: AtomicU32,
    /// Bit i: GID i had traffic since the last review.
    seen: AtomicU32,
}

impl Attention {
    /// The GIDs to poll this time, as bits.
    pub fn next_turn(&self, active: u32) -> u32 {
        if active.count_ones() <= 1 {
            return active;
        }
        let turn = self.turns.load(Relaxed).wrapping_add(1);
        self.turns.store(turn, Relaxed);
        if turn.is_multiple_of(REVIEW_TURNS) {
            self.hot.store(self.seen.load(Relaxed), Relaxed);
            self.seen.store(0, Relaxed);
        }
        let hot = self.hot.load(Relaxed) & active;
        if hot == 0 || turn.is_multiple_of(COLD_TURNS) { active } else { hot }
    }

    /// Records that a GID had traffic.
    pub fn note_traffic(&self, gid_index: usize) {
        let bit = 1 << gid_index;
        if self.seen.load(Relaxed) & bit == 0 {
            self.seen.store(self.seen.load(Relaxed) | bit, Relaxed);
            self.hot.store(self.hot.load(Relaxed) | bit, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(attention: &Attention, active: u32, count: u32) -> Vec<u32> {
        (0..count).map(|_| attention.next_turn(active)).collect()
    }

    #[test]
    fn a_single_gid_is_looked_at_every_time() {
        assert_eq!(turns(&Attention::default(), 0b100, 50), [0b100; 50]);
    }

    #[test]
    fn without_traffic_all_are_looked_at() {
        assert_eq!(turns(&Attention::default(), 0b101, 50), [0b101; 50]);
    }

    #[test]
    fn beside_one_with_traffic_the_others_are_looked_at_now_and_then() {
        let attention = Attention::default();
        attention.note_traffic(2);
        let turns = turns(&attention, 0b101, 160);
        assert!(turns.iter().all(|turn| turn & 0b100 != 0));
        assert_eq!(turns.iter().filter(|turn| **turn == 0b101).count(), 10);
    }

    #[test]
    fn what_was_hot_cools_down() {
        let attention = Attention::default();
        attention.note_traffic(2);
        turns(&attention, 0b101, REVIEW_TURNS);
        attention.note_traffic(0);
        turns(&attention, 0b101, REVIEW_TURNS);
        assert_eq!(attention.next_turn(0b101), 0b001);
    }
}
