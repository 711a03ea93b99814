//! The words of a reader slot, and the orders of stores and loads by which a copy and a change of what is copied
//! exclude each other. `tests/reader_model.rs` tries them in every interleaving.

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::handshake;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// In place of a key table slot: none.
const NO_SLOT: u32 = u32::MAX;
/// Bits of a hazard pointer that hold the number of pages; above them is the number of the first page.
pub(crate) const HAZARD_COUNT_BITS: u32 = 16;
/// In place of the number of pages: as many or more. The pages of a list of copies may lie far apart.
pub(crate) const HAZARD_COUNT_MAX: u64 = (1 << HAZARD_COUNT_BITS) - 1;

/// A reader slot's cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Line {
    /// The epoch.
    epoch: AtomicU32,
    /// The key table slot of the copying process that the epoch protects, or `NO_SLOT`.
    key_slot: AtomicU32,
    /// The hazard pointer.
    hazard: AtomicU64,
    /// The number of the other process's queue pair.
    qpn: AtomicU32,
    /// The protection domain of the other process's region.
    domain: AtomicU32,
}

impl Line {
    /// Gives the slot to a connection to the other process's queue pair `qpn`.
    pub(crate) fn set_queue_pair(&self, qpn: u32) {
        // A grace period that sees the epoch odd sees this.
        self.qpn.store(qpn, Ordering::Relaxed);
    }

    /// Makes the epoch odd until the returned value is dropped. The epoch protects these pages of a region of the other
    /// process, which is of protection domain `domain` there, and key table slot `slot` of this one, if there is one.
    #[inline(always)]
    pub(crate) fn enter(&self, slot: Option<u32>, domain: u32, pages: HostRange) -> EpochGuard<'_> {
        let slot = slot.unwrap_or(NO_SLOT);
        // A grace period that sees the epoch sees all three.
        self.domain.store(domain, Ordering::Relaxed);
        self.key_slot.store(slot, Ordering::Relaxed);
        self.hazard.store(hazard_of(pages), Ordering::Relaxed);
        EpochGuard { epoch: &self.epoch, even: handshake::enter(&self.epoch), slot }
    }

    /// The epoch, if it is odd and `concerns` selects the line.
    fn odd_epoch(&self, concerns: impl Fn(&Line) -> bool) -> Option<u32> {
        // The rest of the line is read after the epoch: if it is of a later access already, this epoch's access is
        // over.
        let seen = handshake::odd_epoch(&self.epoch)?;
        concerns(self).then_some(seen)
    }

    /// Whether the access has ended during which the epoch was `seen`.
    pub(crate) fn has_left(&self, seen: u32) -> bool {
        handshake::has_changed(&self.epoch, seen)
    }

    /// Whether the epoch protects a page of this range.
    pub(crate) fn is_for_pages(&self, pages: HostRange) -> bool {
        is_hazard_for(self.hazard.load(Ordering::Relaxed), pages)
    }

    /// Whether the epoch protects a region of this protection domain.
    pub(crate) fn is_for_domain(&self, domain: u32) -> bool {
        self.domain.load(Ordering::Relaxed) == domain
    }

    /// Whether the slot is of a connection to this queue pair.
    pub(crate) fn is_for_queue_pair(&self, qpn: u32) -> bool {
        self.qpn.load(Ordering::Relaxed) == qpn
    }

    /// Whether the epoch protects this key table slot.
    pub(crate) fn is_for_slot(&self, slot: u32) -> bool {
        self.key_slot.load(Ordering::Relaxed) == slot
    }
}

/// Counts another slot as used; `None` if there are `slots_max` already. Called under a lock.
pub(crate) fn add_line(used: &AtomicU32, slots_max: usize) -> Option<u32> {
    let next = used.load(Ordering::Relaxed);
    // A grace period that has to see the slot's epoch sees this: it comes before the full fence of `enter`.
    ((next as usize) < slots_max).then(|| used.store(next + 1, Ordering::Relaxed)).map(|()| next)
}

/// The index and the value of every epoch that is odd now and whose line `concerns` selects. To be called after
/// [`handshake::fence_after_withdrawal`].
pub(crate) fn odd_epochs<'a>(
    used: &AtomicU32,
    slots_max: usize,
    line_of: impl Fn(usize) -> &'a Line,
    concerns: impl Fn(&Line) -> bool,
) -> impl Iterator<Item = (usize, u32)> {
    // Another process may write any number there.
    let used = (used.load(Ordering::Relaxed) as usize).min(slots_max);
    (0..used).filter_map(move |index| Some((index, line_of(index).odd_epoch(&concerns)?)))
}

/// A copy may run: the epoch is odd.
#[derive(Debug)]
#[must_use = "the epoch is odd only until this is dropped"]
pub struct EpochGuard<'a> {
    epoch: &'a AtomicU32,
    even: u32,
    slot: u32,
}

impl EpochGuard<'_> {
    /// The key table slot of this process that does not change meanwhile.
    #[inline(always)]
    pub fn slot(&self) -> Option<u32> {
        (self.slot != NO_SLOT).then_some(self.slot)
    }
}

impl Drop for EpochGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        handshake::leave(self.epoch, self.even);
    }
}

/// The hazard pointer for the pages of a range.
#[inline(always)]
fn hazard_of(range: HostRange) -> u64 {
    let first = range.addr / PAGE_BYTES;
    let count = (range.addr % PAGE_BYTES).saturating_add(range.len).div_ceil(PAGE_BYTES);
    first << HAZARD_COUNT_BITS | count.min(HAZARD_COUNT_MAX)
}

/// Whether a hazard pointer names a page of a range. Another process may have written any value.
pub(crate) fn is_hazard_for(hazard: u64, range: HostRange) -> bool {
    let (first, count) = (hazard >> HAZARD_COUNT_BITS, hazard & HAZARD_COUNT_MAX);
    // A hazard pointer counts as one page at least.
    let end = match count {
        HAZARD_COUNT_MAX => u64::MAX,
        count => (first + count.max(1)).saturating_mul(PAGE_BYTES),
    };
    first.saturating_mul(PAGE_BYTES) < range.addr.saturating_add(range.len) && range.addr < end
}
