//! Counts of injected faults.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// A packet was lost.
    PacketLost,
    /// A packet was duplicated.
    PacketDuplicated,
    /// A bit of a packet was flipped.
    PacketCorrupted,
    /// A packet was delayed so that later packets overtake it.
    PacketReordered,
    /// A packet and the packets after it were delayed.
    PacketDelayed,
    /// A packet was marked with "congestion experienced".
    PacketMarked,
    /// A packet was dropped by a blackhole.
    PacketBlackholed,
    /// A request was answered with an RNR NAK although a receive may be posted.
    RnrNak,
    /// A storage request was delayed.
    StorageSlowed,
    /// A storage request failed.
    StorageFailed,
}

/// All faults, with their names in statistics.
const NAMES: [(Injected, &str); 10] = [
    (Injected::PacketLost, "packets_lost"),
    (Injected::PacketDuplicated, "packets_duplicated"),
    (Injected::PacketCorrupted, "packets_corrupted"),
    (Injected::PacketReordered, "packets_reordered"),
    (Injected::PacketDelayed, "packets_delayed"),
    (Injected::PacketMarked, "packets_marked"),
    (Injected::PacketBlackholed, "packets_blackholed"),
    (Injected::RnrNak, "rnr_naks"),
    (Injected::StorageSlowed, "storage_slowed"),
    (Injected::StorageFailed, "storage_failed"),
];

/// Count of each fault. The atomics are relaxed: each count is exact, but a set of counts is no snapshot.
#[derive(Debug, Default)]
pub struct Counts([AtomicU64; NAMES.len()]);

impl Counts {
    /// Counts one fault.
    pub fn add(&self, fault: Injected) {
        self.0[fault as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Count of a fault.
    pub fn get(&self, fault: Injected) -> u64 {
        self.0[fault as usize].load(Ordering::Relaxed)
    }

    /// All counts, by name.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        NAMES.iter().map(|(fault, name)| (*name, self.get(*fault)))
    }
}

/// One line for users: the nonzero counts, or "nothing".
impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for (name, count) in self.named().filter(|(_, count)| *count > 0) {
            write!(f, "{separator}{name} {count}")?;
            separator = ", ";
        }
        if separator.is_empty() { f.write_str("nothing") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_count_has_its_own_index_and_name() {
        let counts = Counts::default();
        for (index, (fault, _)) in NAMES.iter().enumerate() {
            assert_eq!(*fault as usize, index);
            (0..=index).for_each(|_| counts.add(*fault));
        }
        assert!(counts.named().map(|(_, count)| count).eq(1..=NAMES.len() as u64));
    }

    #[test]
    fn the_summary_lists_nonzero_counts() {
        let counts = Counts::default();
        assert_eq!(counts.to_string(), "nothing");
        counts.add(Injected::RnrNak);
        counts.add(Injected::PacketLost);
        assert_eq!(counts.to_string(), "packets_lost 1, rnr_naks 1");
    }
}
