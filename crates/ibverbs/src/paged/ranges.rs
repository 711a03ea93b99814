//! The ranges of the paged mappings, for calls that change mappings. The list is read before every `munmap` and `madvise`
//! of the program, and from within allocators. So no function that these call takes a lock or allocates, and the list is
//! consistent at a fork.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

use terrace_hostmem::HostRange;

/// The range of a paged mapping; free while `end` is 0.
struct Slot {
    start: AtomicU64,
    end: AtomicU64,
    /// Regions are registered there.
    is_leased: AtomicBool,
    /// The swap file of memory that was private, whose first byte is that of the range; otherwise [`NO_FILE`].
    swap_file: AtomicI32,
}

const NO_FILE: i32 = -1;

/// Capacity of the list. After an overflow every change of a mapping is checked against the table.
const SLOTS_MAX: usize = 1024;

static SLOTS: [Slot; SLOTS_MAX] = [const {
    Slot {
        start: AtomicU64::new(0),
        end: AtomicU64::new(0),
        is_leased: AtomicBool::new(false),
        swap_file: AtomicI32::new(NO_FILE),
    }
}; SLOTS_MAX];
/// Number of slots that were ever used. Most programs use none.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Whether the list has ever overflown.
static OVERFLOWN: AtomicBool = AtomicBool::new(false);
/// Threads that may be using a swap file of the list.
static DISCARDING: AtomicUsize = AtomicUsize::new(0);

/// Adds a leased mapping. The swap file stays open until the mapping is removed. Calls of `add`, [`set_leased`] and
/// [`remove`] exclude each other.
pub fn add(range: HostRange, swap_file: Option<BorrowedFd<'_>>) {
    let Some(slot) = SLOTS.iter().find(|slot| slot.end.load(Ordering::Relaxed) == 0) else {
        return OVERFLOWN.store(true, Ordering::SeqCst);
    };
    slot.start.store(range.addr, Ordering::SeqCst);
    slot.is_leased.store(true, Ordering::SeqCst);
    slot.swap_file.store(swap_file.map_or(NO_FILE, |file| file.as_raw_fd()), Ordering::SeqCst);
    slot.end.store(range.addr + range.len, Ordering::SeqCst);
    let index = SLOTS.iter().position(|other| std::ptr::eq(other, slot)).unwrap_or(SLOTS_MAX - 1);
    USED.fetch_max(index + 1, Ordering::SeqCst);
}

/// Sets whether regions are registered in a mapping of the list.
pub fn set_leased(range: HostRange, is_leased: bool) {
    if let Some(slot) = find(range) {
        slot.is_leased.store(is_leased, Ordering::SeqCst);
    }
}

/// Removes a mapping. Nobody uses its swap file any more when this returns.
pub fn remove(range: HostRange) {
    let Some(slot) = find(range) else { return };
    slot.end.store(0, Ordering::SeqCst);
    while DISCARDING.load(Ordering::SeqCst) != 0 {
        std::thread::yield_now();
    }
}

fn find(range: HostRange) -> Option<&'static Slot> {
    SLOTS.iter().find(|slot| {
        slot.start.load(Ordering::Relaxed) == range.addr
            && slot.end.load(Ordering::Relaxed) == range.addr + range.len
    })
}

/// Empties the list, in a forked child.
pub fn clear() {
    SLOTS.iter().for_each(|slot| slot.end.store(0, Ordering::Relaxed));
    OVERFLOWN.store(false, Ordering::Relaxed);
    USED.store(0, Ordering::SeqCst);
    DISCARDING.store(0, Ordering::SeqCst);
}

/// Whether a range may overlap a leased mapping.
#[inline]
pub fn may_overlap(range: HostRange) -> bool {
    let used = USED.load(Ordering::Relaxed);
    used != 0 && overlaps_leased(range, used)
}

#[cold]
fn overlaps_leased(range: HostRange, used: usize) -> bool {
    let is_its = |slot: &Slot| slot.is_leased.load(Ordering::SeqCst) && slot.overlap(range).is_some();
    OVERFLOWN.load(Ordering::SeqCst) || SLOTS[..used].iter().any(is_its)
}

/// Has memory that was private read as zeros, as far as it is in a range: it becomes a hole of its swap file. Returns
/// whether there was any.
///
/// # Errors
/// The system's.
#[inline]
pub fn discard(range: HostRange) -> std::io::Result<bool> {
    match USED.load(Ordering::Relaxed) {
        0 => Ok(false),
        used => discard_in(range, used),
    }
}

#[cold]
fn discard_in(range: HostRange, used: usize) -> std::io::Result<bool> {
    DISCARDING.fetch_add(1, Ordering::SeqCst);
    let mut result = Ok(false);
    for slot in &SLOTS[..used] {
        // The overlap is read after the counter was incremented: the file is open until it is decremented.
        let (Some((offset, len)), file) = (slot.overlap(range), slot.swap_file.load(Ordering::SeqCst)) else {
            continue;
        };
        if file != NO_FILE {
            let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: takes a descriptor and numbers.
            if unsafe { libc::fallocate64(file, flags, offset as i64, len as i64) } != 0 {
                result = Err(std::io::Error::last_os_error());
                break;
            }
            result = Ok(true);
        }
    }
    DISCARDING.fetch_sub(1, Ordering::SeqCst);
    result
}

/// What to tell the user of a SIGBUS at an address. Called by a signal handler.
pub fn explain_bus_error(addr: u64) -> Option<&'static str> {
    let byte = HostRange { addr, len: 1 };
    let is_its =
        |slot: &Slot| slot.swap_file.load(Ordering::SeqCst) != NO_FILE && slot.overlap(byte).is_some();
    SLOTS.iter().any(is_its).then_some(
        "terrace: the program has touched registered memory that its swap file cannot keep or give back: the disk of --swap \
         is full, or fails\n",
    )
}

impl Slot {
    /// Where in the mapping its overlap with a range begins, and its length.
    fn overlap(&self, range: HostRange) -> Option<(u64, u64)> {
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let from = start.max(range.addr);
        let to = end.min(range.addr.saturating_add(range.len));
        (from < to).then(|| (from - start, to - from))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd};
    use std::os::unix::fs::FileExt;

    use super::*;

    /// An address range that other tests do not map.
    const BASE: u64 = 1 << 50;

    fn range(addr: u64, len: u64) -> HostRange {
        HostRange { addr: BASE + addr, len }
    }

    #[test]
    fn only_listed_ranges_overlap() {
        assert!(!may_overlap(range(0, 100)));
        add(range(10, 10), None);
        add(range(30, 10), None);
        for (addr, len, touched) in
            [(0, 10, false), (0, 11, true), (19, 1, true), (20, 10, false), (0, 100, true)]
        {
            assert_eq!(may_overlap(range(addr, len)), touched, "{addr} {len}");
        }
        assert!(may_overlap(HostRange { addr: BASE, len: u64::MAX }));
        remove(range(10, 10));
        assert!(!may_overlap(range(0, 30)) && may_overlap(range(0, 31)));
        set_leased(range(30, 10), false);
        assert!(!may_overlap(range(0, 100)));
        set_leased(range(30, 10), true);
        assert!(may_overlap(range(0, 100)));
        remove(range(30, 10));
        assert!(!may_overlap(range(0, 100)));
    }

    #[test]
    fn what_is_discarded_becomes_a_hole() {
        // SAFETY: a string that ends.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: just created.
        let file = unsafe { File::from_raw_fd(fd) };
        file.write_all_at(&[7; 4 * 4096], 0).expect("written");
        let first = 1 << 30;
        add(range(first, 4 * 4096), Some(file.as_fd()));
        set_leased(range(first, 4 * 4096), false);
        assert!(discard(range(first + 4096, 2 * 4096)).expect("discarded"));
        assert!(!discard(range(first - 4096, 4096)).expect("nothing to do"));
        let mut bytes = [1; 4 * 4096];
        file.read_exact_at(&mut bytes, 0).expect("read");
        let page = |index: usize| bytes[index * 4096];
        assert_eq!([page(0), page(1), page(2), page(3)], [7, 0, 0, 7]);
        remove(range(first, 4 * 4096));
        assert!(!discard(range(first, 4096)).expect("nothing to do"));
    }
}
