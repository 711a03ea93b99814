//! The client's copy of the residency bitmap, as of the last pull from the server.
//!
//! The bitmap is a hint. A READ of a unit that is wrongly considered present costs a round trip, since it returns the
//! signature page. A unit that is wrongly considered absent costs the server's processor an RPC. So infrequent pulls
//! suffice, and only while the region is in use. Between two pulls a unit that a READ found absent is marked absent.

use std::sync::atomic::{AtomicU64, Ordering};

use terrace_transport::Time;

/// The interval between pulls in nanoseconds. A server promotes units a few times per second, and a pull transfers a
/// bit per MiB of the region.
pub const PULL_INTERVAL_NS: u64 = 20_000_000;
/// The timeout of a pull in nanoseconds.
const PULL_TIMEOUT_NS: u64 = 500_000_000;

const WORD_BITS: usize = 64;

/// The pulled bitmap. Queue pairs may share it.
#[derive(Debug)]
pub struct PulledBitmap {
    /// Unit `n` is bit `n % 64` of word `n / 64`. Before the first pull all units count as present.
    words: Box<[AtomicU64]>,
    pulled_at_ns: AtomicU64,
    /// The earliest time of the next pull. The caller that begins a pull advances it.
    next_pull_ns: AtomicU64,
}

/// The `pulled_at_ns` of a bitmap that was never pulled.
const NEVER: u64 = u64::MAX;

impl PulledBitmap {
    /// A bitmap for a region of `unit_count` units, all present.
    pub fn new(unit_count: usize) -> PulledBitmap {
        PulledBitmap {
            words: (0..unit_count.div_ceil(WORD_BITS)).map(|_| AtomicU64::new(u64::MAX)).collect(),
            pulled_at_ns: AtomicU64::new(NEVER),
            next_pull_ns: AtomicU64::new(0),
        }
    }

    /// The length of the bitmap that a pull reads, in bytes.
    pub fn length_bytes(&self) -> usize {
        self.words.len() * 8
    }

    /// Whether a unit is considered present; true beyond the region's end.
    #[inline]
    pub fn is_present(&self, unit: usize) -> bool {
        self.words
            .get(unit / WORD_BITS)
            .is_none_or(|word| word.load(Ordering::Relaxed) & (1 << (unit % WORD_BITS)) != 0)
    }

    /// Marks a unit absent, because a READ has found a page of it absent.
    pub fn mark_absent(&self, unit: usize) {
        if let Some(word) = self.words.get(unit / WORD_BITS) {
            word.fetch_and(!(1 << (unit % WORD_BITS)), Ordering::Relaxed);
        }
    }

    /// Whether a pull is due. True for one caller only, which then calls [`PulledBitmap::store`] or
    /// [`PulledBitmap::fail_pull`]. If it does neither, another caller gets true half a second later.
    #[inline]
    pub fn begin_pull(&self, now: Time) -> bool {
        let due = self.next_pull_ns.load(Ordering::Relaxed);
        now.0 >= due
            && self
                .next_pull_ns
                .compare_exchange(due, now.after_ns(PULL_TIMEOUT_NS).0, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Stores the pulled bytes: the first little-endian words of the server's bitmap. Words that are missing stay
    /// unchanged.
    pub fn store(&self, now: Time, bytes: &[u8]) {
        for (word, bytes) in self.words.iter().zip(bytes.as_chunks::<8>().0) {
            word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        self.pulled_at_ns.store(now.0, Ordering::Relaxed);
        self.next_pull_ns.store(now.after_ns(PULL_INTERVAL_NS).0, Ordering::Relaxed);
    }

    /// Marks all units present after a failed pull, and schedules the next pull. READs detect the absent units.
    pub fn fail_pull(&self, now: Time) {
        for word in &self.words {
            word.store(u64::MAX, Ordering::Relaxed);
        }
        self.pulled_at_ns.store(NEVER, Ordering::Relaxed);
        self.next_pull_ns.store(now.after_ns(PULL_INTERVAL_NS).0, Ordering::Relaxed);
    }

    /// The age of the pulled bits in nanoseconds; `None` before the first pull.
    pub fn age_ns(&self, now: Time) -> Option<u64> {
        match self.pulled_at_ns.load(Ordering::Relaxed) {
            NEVER => None,
            pulled_at => Some(now.0.saturating_sub(pulled_at)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_units_count_as_present_until_a_pull_or_a_mark() {
        let bitmap = PulledBitmap::new(70);
        assert_eq!(bitmap.length_bytes(), 16);
        assert!((0..100).all(|unit| bitmap.is_present(unit)));
        bitmap.mark_absent(69);
        bitmap.mark_absent(1000);
        assert!(!bitmap.is_present(69) && bitmap.is_present(68) && bitmap.is_present(5));
        assert_eq!(bitmap.age_ns(Time(5)), None);

        let mut pulled = [0; 16];
        pulled[0] = 0b10;
        pulled[8] = 0b10_0000;
        bitmap.store(Time(7), &pulled);
        let present: Vec<usize> = (0..70).filter(|&unit| bitmap.is_present(unit)).collect();
        assert_eq!(present, [1, 69]);
        assert_eq!(bitmap.age_ns(Time(9)), Some(2));
        bitmap.fail_pull(Time(10));
        assert!(bitmap.is_present(0));
    }

    #[test]
    fn one_caller_pulls_at_each_interval() {
        let bitmap = PulledBitmap::new(1);
        assert!(bitmap.begin_pull(Time(1)));
        assert!(!bitmap.begin_pull(Time(1)));
        bitmap.store(Time(100), &[]);
        assert!(bitmap.is_present(0), "an empty pull changes no bit");
        assert!(!bitmap.begin_pull(Time(99 + PULL_INTERVAL_NS)));
        assert!(bitmap.begin_pull(Time(100 + PULL_INTERVAL_NS)));
        let timeout_ns = 100 + PULL_INTERVAL_NS + PULL_TIMEOUT_NS;
        assert!(!bitmap.begin_pull(Time(timeout_ns - 1)));
        assert!(bitmap.begin_pull(Time(timeout_ns)));
    }
}
