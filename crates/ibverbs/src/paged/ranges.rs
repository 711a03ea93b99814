//! The ranges of the paged mappings, for calls that change mappings. The list is read before every `munmap` and `mprotect`
//! of the program, and from within allocators. So no function that these call takes a lock or allocates, and the list is
//! consistent at a fork.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use terrace_hostmem::HostRange;
use terrace_vm::maps::FileId;

/// The range of a paged mapping; free while `end` is 0.
struct Slot {
    start: AtomicU64,
    end: AtomicU64,
    /// [`LEASED`] and [`SWAPPED`].
    flags: AtomicU64,
    /// The inode's number of the file.
    inode: AtomicU64,
}

/// Regions are registered there.
const LEASED: u64 = 1;
/// The memory was private, and is a mapping of a swap file.
const SWAPPED: u64 = 2;

/// Capacity of the list: more than there are regions over swap files. After an overflow every change of a mapping is
/// checked against the table.
const SLOTS_MAX: usize = 1024;

static SLOTS: [Slot; SLOTS_MAX] = [const {
    Slot {
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
        flags: AtomicU64::new(0),
        inode: AtomicU64::new(0),
    }
}; SLOTS_MAX];
/// Whether the list has ever overflown.
static OVERFLOWN: AtomicBool = AtomicBool::new(false);
/// Number of slots that were ever used. Most programs use none.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A mapping's place in the list; `None` if the list was full.
#[derive(Clone, Copy, Debug)]
pub struct Listed(Option<usize>);

/// Adds a leased mapping. Calls of `add`, [`Listed::set_leased`] and [`Listed::remove`] exclude each other.
pub fn add(range: HostRange, file: FileId, is_swapped: bool) -> Listed {
    let Some(index) = SLOTS.iter().position(|slot| slot.end.load(Ordering::Relaxed) == 0) else {
        OVERFLOWN.store(true, Ordering::SeqCst);
        return Listed(None);
    };
    let flags = LEASED | if is_swapped { SWAPPED } else { 0 };
    SLOTS[index].start.store(range.addr, Ordering::SeqCst);
    SLOTS[index].flags.store(flags, Ordering::SeqCst);
    SLOTS[index].inode.store(file.inode(), Ordering::SeqCst);
    SLOTS[index].end.store(range.addr + range.len, Ordering::SeqCst);
    USED.fetch_max(index + 1, Ordering::SeqCst);
    Listed(Some(index))
}

impl Listed {
    /// Sets whether regions are registered in the mapping.
    pub fn set_leased(self, is_leased: bool) {
        let Some(index) = self.0 else { return };
        let flags = &SLOTS[index].flags;
        if is_leased {
            flags.fetch_or(LEASED, Ordering::SeqCst)
        } else {
            flags.fetch_and(!LEASED, Ordering::SeqCst)
        };
    }

    /// Removes the mapping.
    pub fn remove(self) {
        if let Some(index) = self.0 {
            SLOTS[index].end.store(0, Ordering::SeqCst);
        }
    }
}

/// Empties the list, in a forked child.
pub fn clear() {
    SLOTS.iter().for_each(|slot| slot.end.store(0, Ordering::Relaxed));
    OVERFLOWN.store(false, Ordering::Relaxed);
    USED.store(0, Ordering::SeqCst);
}

/// Whether a range may overlap a leased mapping.
#[inline]
pub fn may_overlap(range: HostRange) -> bool {
    any(range, LEASED) || OVERFLOWN.load(Ordering::Relaxed)
}

/// Whether a range may overlap memory that was private. What the program has moved, or unmapped without notice, is listed
/// where it was.
#[inline]
pub fn may_be_swapped(range: HostRange) -> bool {
    any(range, SWAPPED)
}

/// Whether a range overlaps any mapping that has this flag.
#[inline]
fn any(range: HostRange, flag: u64) -> bool {
    let used = USED.load(Ordering::Relaxed);
    used != 0 && any_of(used, range, flag)
}

#[cold]
fn any_of(used: usize, range: HostRange, flag: u64) -> bool {
    SLOTS[..used].iter().any(|slot| slot.flags.load(Ordering::SeqCst) & flag != 0 && slot.overlaps(range))
}

/// Whether same-host peers may map a file that is mapped at a range. A swap file's mapping may become private again unless
/// all of it is leased: what they stored to the file then would not be the program's memory.
pub fn may_be_shared(range: HostRange, file: FileId) -> bool {
    let used = USED.load(Ordering::SeqCst);
    SLOTS[..used].iter().all(|slot| {
        let flags = slot.flags.load(Ordering::SeqCst);
        let is_its =
            slot.end.load(Ordering::SeqCst) != 0 && slot.inode.load(Ordering::SeqCst) == file.inode();
        flags & SWAPPED == 0 || !is_its || flags & LEASED != 0 && slot.whole() == range
    })
}

/// What to tell the user of a SIGBUS at an address. Called by a signal handler.
pub fn explain_bus_error(addr: u64) -> Option<&'static str> {
    terrace_vm::has_swapped(HostRange { addr, len: 1 }).then_some(
        "terrace: the program has touched registered memory that its swap file cannot keep or give back: the disk of --swap \
         is full, or fails\n",
    )
}

impl Slot {
    fn whole(&self) -> HostRange {
        let (addr, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        HostRange { addr, len: end.saturating_sub(addr) }
    }

    fn overlaps(&self, range: HostRange) -> bool {
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        start.max(range.addr) < end.min(range.addr.saturating_add(range.len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address range that other tests do not map.
    const BASE: u64 = 1 << 50;

    fn range(addr: u64, len: u64) -> HostRange {
        HostRange { addr: BASE + addr, len }
    }

    /// That of this program.
    fn some_file() -> FileId {
        terrace_vm::maps::file_at(some_file as fn() -> FileId as usize as u64)
            .expect("a list")
            .expect("a file")
    }

    #[test]
    fn peers_map_swap_files_only_of_mappings_that_are_leased_as_a_whole() {
        // That of the C library: other tests list this program's at the same time.
        let file = terrace_vm::maps::file_at(libc::getpid as unsafe extern "C" fn() -> i32 as usize as u64);
        let file = file.expect("a list").expect("a file");
        let at = |addr, len| range((1u64 << 32) + addr, len);
        assert!(may_be_shared(at(0, 100), file));
        let listed = add(at(0, 100), file, true);
        assert!(may_be_shared(at(0, 100), file) && !may_be_shared(at(0, 50), file));
        assert!(!may_be_shared(at(500, 100), file), "the program has moved it");
        listed.set_leased(false);
        assert!(!may_be_shared(at(0, 100), file));
        listed.remove();
        assert!(may_be_shared(at(0, 50), file));
    }

    #[test]
    fn only_listed_ranges_overlap() {
        assert!(!may_overlap(range(0, 100)));
        let first = add(range(10, 10), some_file(), false);
        let second = add(range(30, 10), some_file(), false);
        for (addr, len, touched) in
            [(0, 10, false), (0, 11, true), (19, 1, true), (20, 10, false), (0, 100, true)]
        {
            assert_eq!(may_overlap(range(addr, len)), touched, "{addr} {len}");
        }
        assert!(may_overlap(HostRange { addr: BASE, len: u64::MAX }));
        assert!(!may_be_swapped(range(0, 100)));
        first.remove();
        assert!(!may_overlap(range(0, 30)) && may_overlap(range(0, 31)));
        second.set_leased(false);
        assert!(!may_overlap(range(0, 100)));
        second.set_leased(true);
        assert!(may_overlap(range(0, 100)));
        second.remove();
        assert!(!may_overlap(range(0, 100)));
    }
}
