//! The ranges of the tiered mappings, for calls that change mappings. The list is read before every `munmap` of the
//! program, and from within allocators. So no function takes a lock or allocates, and the list is consistent at a fork.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use terrace_hostmem::HostRange;

/// The range of a tiered mapping; free while `end` is 0.
struct Slot {
    start: AtomicU64,
    end: AtomicU64,
}

/// Capacity of the list. After an overflow every change of a mapping is checked against the table.
const SLOTS_MAX: usize = 1024;

static SLOTS: [Slot; SLOTS_MAX] =
    [const { Slot { start: AtomicU64::new(0), end: AtomicU64::new(0) } }; SLOTS_MAX];
/// Number of slots that were ever used. Most programs use none.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Whether the list has ever overflown.
static OVERFLOWN: AtomicBool = AtomicBool::new(false);

/// Adds a mapping. Calls of `add` and [`remove`] exclude each other.
pub fn add(range: HostRange) {
    let Some(index) = SLOTS.iter().position(|slot| slot.end.load(Ordering::Relaxed) == 0) else {
        return OVERFLOWN.store(true, Ordering::SeqCst);
    };
    SLOTS[index].start.store(range.addr, Ordering::SeqCst);
    SLOTS[index].end.store(range.addr + range.len, Ordering::SeqCst);
    USED.fetch_max(index + 1, Ordering::SeqCst);
}

/// Removes a mapping.
pub fn remove(range: HostRange) {
    let is_it = |slot: &&Slot| {
        slot.start.load(Ordering::Relaxed) == range.addr
            && slot.end.load(Ordering::Relaxed) == range.addr + range.len
    };
    if let Some(slot) = SLOTS.iter().find(is_it) {
        slot.end.store(0, Ordering::SeqCst);
    }
}

/// Empties the list, in a forked child.
pub fn clear() {
    SLOTS.iter().for_each(|slot| slot.end.store(0, Ordering::Relaxed));
    OVERFLOWN.store(false, Ordering::Relaxed);
    USED.store(0, Ordering::SeqCst);
}

/// Whether a range may overlap a tiered mapping.
#[inline]
pub fn may_overlap(range: HostRange) -> bool {
    let used = USED.load(Ordering::Relaxed);
    used != 0 && overlaps(range, used)
}

#[cold]
fn overlaps(range: HostRange, used: usize) -> bool {
    let end = range.addr.saturating_add(range.len);
    let overlaps =
        |slot: &Slot| slot.start.load(Ordering::SeqCst) < end && range.addr < slot.end.load(Ordering::SeqCst);
    OVERFLOWN.load(Ordering::SeqCst) || SLOTS[..used].iter().any(overlaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address range that other tests do not map.
    const BASE: u64 = 1 << 50;

    #[test]
    fn only_listed_ranges_overlap() {
        let range = |addr, len| HostRange { addr: BASE + addr, len };
        assert!(!may_overlap(range(0, 100)));
        add(range(10, 10));
        add(range(30, 10));
        for (addr, len, touched) in
            [(0, 10, false), (0, 11, true), (19, 1, true), (20, 10, false), (0, 100, true)]
        {
            assert_eq!(may_overlap(range(addr, len)), touched, "{addr} {len}");
        }
        assert!(may_overlap(HostRange { addr: BASE, len: u64::MAX }));
        remove(range(10, 10));
        assert!(!may_overlap(range(0, 30)) && may_overlap(range(0, 31)));
        remove(range(30, 10));
        assert!(!may_overlap(range(0, 100)));
    }
}
