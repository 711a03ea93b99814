//! The ranges of the served mappings, for calls that change mappings: read before every `munmap` of the program, and
//! from within allocators. So nothing here locks or allocates, and a fork finds nothing half done.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use terrace_hostmem::HostRange;

/// A served mapping; free while `end` is 0.
struct Slot {
    start: AtomicU64,
    end: AtomicU64,
}

/// Further served mappings are not listed; from then on every change of a mapping is checked against the table.
const SLOTS_MAX: usize = 1024;

static SLOTS: [Slot; SLOTS_MAX] =
    [const { Slot { start: AtomicU64::new(0), end: AtomicU64::new(0) } }; SLOTS_MAX];
/// The slots from here on have never been used. Most programs use none.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Whether there have ever been too many.
static OVERFLOWN: AtomicBool = AtomicBool::new(false);

/// Lists a mapping. Calls of this and of [`remove`] exclude each other.
pub fn add(range: HostRange) {
    let Some(index) = SLOTS.iter().position(|slot| slot.end.load(Ordering::Relaxed) == 0) else {
        return OVERFLOWN.store(true, Ordering::SeqCst);
    };
    SLOTS[index].start.store(range.addr, Ordering::SeqCst);
    SLOTS[index].end.store(range.addr + range.len, Ordering::SeqCst);
    USED.fetch_max(index + 1, Ordering::SeqCst);
}

/// Takes a mapping off the list.
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

/// Whether a range may have something in common with a served mapping.
#[inline]
pub fn may_touch(range: HostRange) -> bool {
    let used = USED.load(Ordering::Relaxed);
    used != 0 && touches(range, used)
}

#[cold]
fn touches(range: HostRange, used: usize) -> bool {
    let end = range.addr.saturating_add(range.len);
    let overlaps =
        |slot: &Slot| slot.start.load(Ordering::SeqCst) < end && range.addr < slot.end.load(Ordering::SeqCst);
    OVERFLOWN.load(Ordering::SeqCst) || SLOTS[..used].iter().any(overlaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far from what other tests map.
    const BASE: u64 = 1 << 50;

    #[test]
    fn only_what_is_listed_is_touched() {
        let range = |addr, len| HostRange { addr: BASE + addr, len };
        assert!(!may_touch(range(0, 100)));
        add(range(10, 10));
        add(range(30, 10));
        for (addr, len, touched) in
            [(0, 10, false), (0, 11, true), (19, 1, true), (20, 10, false), (0, 100, true)]
        {
            assert_eq!(may_touch(range(addr, len)), touched, "{addr} {len}");
        }
        assert!(may_touch(HostRange { addr: BASE, len: u64::MAX }));
        remove(range(10, 10));
        assert!(!may_touch(range(0, 30)) && may_touch(range(0, 31)));
        remove(range(30, 10));
        assert!(!may_touch(range(0, 100)));
    }
}
