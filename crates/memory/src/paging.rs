//! Regions whose bytes need not all be in memory.
//!
//! A [`Pager`] knows where the bytes are instead, and translates addresses ([`Translation`]). One translation is a page
//! table ([`Presence`]): which units of the region are resident, that is, locked into memory, so that a copy does not
//! fault. The data path copies what is present at once,
//! and leaves the rest to the pager, which performs the access asynchronously ([`Transfer`]). A copy holds the page
//! table while it runs. A pager that takes a unit away first marks it absent, and then waits until no copy runs that
//! saw it present.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES, UNIT_BYTES, fault};
use terrace_shm::{GracePeriod, HitCounters, ResidencyBitmap, unit_count};

use crate::access::AccessError;
use crate::pin::{PinLock, Pinned};
use crate::residency;
use crate::translation::{PeerTables, Translation};

const UNIT_PAGES: usize = (UNIT_BYTES / PAGE_BYTES) as usize;

/// The signature page, which a peer reads in place of absent pages. Byte `n` of it stands for every byte that lies `n`
/// bytes into a page, counted from the first byte of [`Presence::range`].
pub type Pattern = Arc<[u8; PAGE_BYTES as usize]>;

/// A region's fault policy: what an access to absent memory does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RegionPolicy {
    /// The pager performs the access, and the peer waits. (A peer that asked for the signature page gets that instead.)
    #[default]
    Wait,
    /// The peer is told to retry, while the pager brings the memory: as hardware does with on-demand paging.
    Fault,
    /// The NIC does not know of absence, as hardware behind an IOMMU does not (NP-RDMA, section 3.1): absent pages are
    /// mapped to the signature page for reading, and to a black-hole page for writing. Nothing waits, nothing is refused.
    Commodity,
}

/// The page table of a range of memory. Unit 0 begins at the range's first byte; the last unit may be shorter.
///
/// Two tables are laid out for others to read, also over RDMA: the residency bitmap (one bit per unit, unit `n` is bit
/// `n % 64` of word `n / 64`) and the version table (one 32-bit number per page; odd: present; incremented with each
/// change).
pub struct Presence {
    range: HostRange,
    bitmap: ResidencyBitmap,
    versions: Box<[AtomicU32]>,
    /// Accesses per unit that found all that they touch present, since the last [`Presence::take_counts`].
    hits: HitCounters,
    /// The other accesses.
    misses: Box<[AtomicU32]>,
    /// Pinned by a copy that saw its units present, while it runs.
    copies: PinLock<()>,
}

impl Debug for Presence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let present = (0..self.unit_count()).filter(|&unit| self.is_present(unit)).count();
        f.debug_struct("Presence").field("range", &self.range).field("units_present", &present).finish()
    }
}

impl Presence {
    /// A table in which nothing is present. The range starts at a page.
    pub fn new(range: HostRange) -> Presence {
        let unit_count = unit_count(range.len);
        let page_count = range.len.div_ceil(PAGE_BYTES) as usize;
        Presence {
            range,
            bitmap: ResidencyBitmap::new(unit_count),
            versions: (0..page_count).map(|_| AtomicU32::new(0)).collect(),
            hits: HitCounters::new(unit_count),
            misses: (0..unit_count).map(|_| AtomicU32::new(0)).collect(),
            copies: PinLock::new(()),
        }
    }

    /// The program's addresses that the table covers.
    pub fn range(&self) -> HostRange {
        self.range
    }

    /// How many units there are.
    pub fn unit_count(&self) -> usize {
        self.hits.len()
    }

    /// The residency bitmap.
    pub fn bitmap(&self) -> &[AtomicU64] {
        &self.bitmap
    }

    /// Withdraws the tables from other processes for good: the bitmap no longer describes the file. Accesses that they
    /// have begun end with the returned grace period.
    pub fn withdraw(&self) -> GracePeriod {
        if self.bitmap.withdraw() { GracePeriod::of_pages(self.range) } else { GracePeriod::default() }
    }

    /// The version table.
    pub fn versions(&self) -> &[AtomicU32] {
        &self.versions
    }

    /// The memory of a unit.
    pub fn unit_range(&self, unit: usize) -> HostRange {
        let offset = unit as u64 * UNIT_BYTES;
        HostRange { addr: self.range.addr + offset, len: UNIT_BYTES.min(self.range.len - offset) }
    }

    /// The units that a range within this one touches.
    pub fn units_of(&self, part: HostRange) -> std::ops::Range<usize> {
        if part.len == 0 {
            return 0..0;
        }
        let first = part.addr - self.range.addr;
        (first / UNIT_BYTES) as usize..((first + part.len - 1) / UNIT_BYTES) as usize + 1
    }

    /// Whether a unit is present now.
    #[inline]
    pub fn is_present(&self, unit: usize) -> bool {
        residency::is_present(&self.bitmap, unit)
    }

    /// Whether a range lies within this one.
    #[inline]
    pub fn covers(&self, part: HostRange) -> bool {
        self.range.covers(part)
    }

    /// Marks a unit present. Its memory is resident, and its backing store is written only through memory from now on.
    pub fn admit(&self, unit: usize) {
        residency::admit(&self.bitmap, self.versions_of(unit), unit);
    }

    /// Marks a unit absent, and returns when no copy of this process runs any more that saw it present. Copies of other
    /// processes end with the returned grace period.
    pub fn expel(&self, unit: usize) -> GracePeriod {
        residency::expel(&self.bitmap, self.versions_of(unit), &self.copies, unit);
        GracePeriod::of_pages(self.unit_range(unit))
    }

    /// The versions of a unit's pages.
    fn versions_of(&self, unit: usize) -> &[AtomicU32] {
        let first = unit * UNIT_PAGES;
        &self.versions[first..(first + UNIT_PAGES).min(self.versions.len())]
    }

    /// Pins the table for a copy of a range, which the caller has found covered; `None` when part of it is absent.
    #[inline]
    fn hold(&self, part: HostRange) -> Option<Pinned<'_, ()>> {
        residency::hold(&self.bitmap, &self.copies, self.units_of(part))
    }

    /// The accesses of a unit since the last call.
    pub fn take_counts(&self, unit: usize) -> AccessCounts {
        let take = |counts: &[AtomicU32]| counts[unit].swap(0, Ordering::Relaxed);
        AccessCounts { hits: take(&self.hits), misses: take(&self.misses) }
    }
}

impl Translation for Presence {
    fn range(&self) -> HostRange {
        self.range
    }

    fn unit_bytes(&self) -> u64 {
        UNIT_BYTES
    }

    fn is_present(&self, part: HostRange) -> bool {
        self.hold(part).is_some()
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        let _held = self.hold(part)?;
        // SAFETY: the range is memory that a program registered, as the caller has checked.
        Some(unsafe { fault::copy_from(part.addr, out) }.map_err(|fault::Fault| AccessError::Fault))
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        let _held = self.hold(HostRange { addr, len: data.len() as u64 })?;
        // SAFETY: as above.
        Some(unsafe { fault::copy_to(addr, data) }.map_err(|fault::Fault| AccessError::Fault))
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let _held = self.hold(HostRange { addr, len: 8 })?;
        // SAFETY: as above; the caller has checked the alignment, too.
        Some(unsafe { fault::atomic(addr, op) }.map_err(|fault::Fault| AccessError::Fault))
    }

    /// Several threads that count at once may lose counts. Counters are loaded and stored, not added to atomically: no
    /// access waits for another one's.
    #[inline]
    fn count(&self, part: HostRange, is_hit: bool) {
        let counts: &[AtomicU32] = if is_hit { &self.hits } else { &self.misses };
        for unit in self.units_of(part) {
            let total = counts[unit].load(Ordering::Relaxed).saturating_add(1);
            counts[unit].store(total, Ordering::Relaxed);
        }
    }

    fn bitmap(&self) -> &[AtomicU64] {
        &self.bitmap
    }

    fn versions(&self) -> HostRange {
        let versions = &*self.versions;
        HostRange { addr: versions.as_ptr() as u64, len: size_of_val(versions) as u64 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        let (bitmap, hits) = self.bitmap.file().zip(self.hits.file())?;
        Some(PeerTables::Units { bitmap, hits })
    }

    fn forget_copies(&self) {
        self.copies.forget_pins();
    }
}

/// How often a unit was accessed. Accesses of several units count for each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounts {
    /// Accesses that found all that they touch present.
    pub hits: u32,
    /// Accesses that found part of it absent, though perhaps not of this unit.
    pub misses: u32,
}

/// Called when a transfer has an outcome, or when a pager that was full has space: from any thread, and without locks
/// of the pager held.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// An access that the pager performs asynchronously. Dropping this does not cancel the access.
pub trait Transfer: Send + Sync + Debug {
    /// How the access ended; `None` while it is under way.
    fn outcome(&self) -> Option<Result<(), AccessError>>;

    /// Copies what a finished read brought, from `offset` within the requested range; of an atomic, the 8 bytes before
    /// it; of an append, the 8 bytes of the offset.
    ///
    /// # Errors
    /// The outcome's; `OutOfRange` beyond the requested range.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError>;
}

/// Pages a region: knows where the absent bytes are, and performs accesses to them.
///
/// Every method returns at once. Accesses that overlap take effect in the order of these calls, whether or not the
/// units become present meanwhile: a read sees the writes that were requested before. A full pager answers `NotReady`,
/// without any effect, and calls the waker when it has space.
///
/// The data path copies to present units without asking the pager, so two things must never happen: a unit is admitted
/// while a write or an atomic on it is under way; and a write or an atomic is requested while its unit is present, and
/// takes effect later. The unit may have become present between the check that found it absent and the call, so the
/// pager has to check again, and to carry out what falls into present units before it returns.
///
/// Ranges lie within [`Translation::range`]; a pager may rely on that.
pub trait Pager: Send + Sync + Debug {
    /// Where the bytes are.
    fn translation(&self) -> &dyn Translation;

    /// Reads a range, present or not.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Writes; the data is copied before this returns. The outcome comes when every later read, local or remote, sees
    /// the data and the data survives the process.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Performs an atomic operation on 8 aligned bytes.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Makes all that was written to a range durable, however it was written.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Keeps the pages of a range from leaving, from the time on when each is present, until [`Pager::unpin`] is called with
    /// the same range as often as this. Absent pages are not brought. False if too many are pinned, or the pager pins none.
    fn pin(&self, _range: HostRange) -> bool {
        false
    }

    /// Ends a [`Pager::pin`] that has returned true.
    fn unpin(&self, _range: HostRange) {}

    /// Adds `data` as one record at the end of the file behind the region; it is copied before this returns. Records
    /// neither overlap nor leave holes between them. With `commit` the record is durable before the outcome comes. The
    /// transfer's 8 bytes are the offset of the record in the file, as the host stores integers.
    ///
    /// # Errors
    /// `Permission` when nothing can be appended to the region; `NoSpace`; `NotReady` when the pager is full. No part of
    /// the record is in the file then. An outcome of `Flush`: the record is in the file, and not durable.
    fn append(&self, _data: &[u8], _commit: bool, _waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Permission)
    }
}

/// A pager whose units are present at the program's own addresses.
pub trait UnitPager: Pager {
    /// The page table, which is the pager's translation.
    fn presence(&self) -> &Presence;
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: HostRange = HostRange { addr: 0x10_0000_1000, len: 2 * UNIT_BYTES + 3 * PAGE_BYTES };

    #[test]
    fn units_cover_the_range_and_the_last_is_shorter() {
        let presence = Presence::new(RANGE);
        assert_eq!(presence.unit_count(), 3);
        assert_eq!(presence.versions().len(), 2 * 256 + 3);
        let last = HostRange { addr: RANGE.addr + 2 * UNIT_BYTES, len: 3 * PAGE_BYTES };
        assert_eq!(presence.unit_range(2), last);
        assert_eq!(presence.units_of(last), 2..3);
        assert_eq!(presence.units_of(HostRange { addr: last.addr - 1, len: 2 }), 1..3);
        assert!(presence.covers(last) && !presence.covers(HostRange { len: last.len + 1, ..last }));
        assert!(!presence.covers(HostRange { addr: RANGE.addr - 1, len: 1 }));
        assert!(!presence.covers(HostRange { addr: u64::MAX, len: u64::MAX }));
    }

    #[test]
    fn a_range_can_be_held_while_all_of_it_is_present() {
        let presence = Presence::new(RANGE);
        let across = HostRange { addr: RANGE.addr + UNIT_BYTES - 1, len: 2 };
        presence.admit(0);
        assert!(presence.hold(across).is_none());
        presence.admit(1);
        assert!(presence.hold(across).is_some());
        assert!(presence.versions()[..512].iter().all(|version| version.load(Ordering::Relaxed) == 1));
        assert!(presence.expel(0).is_over());
        assert!(presence.hold(across).is_none());
        assert_eq!(presence.versions()[0].load(Ordering::Relaxed), 2);
        assert_eq!(presence.bitmap()[0].load(Ordering::Relaxed), 0b10);
    }

    #[test]
    fn accesses_are_counted_per_unit_and_by_whether_all_is_present() {
        let presence = Presence::new(RANGE);
        presence.admit(0);
        presence.count(HostRange { addr: RANGE.addr + UNIT_BYTES - 1, len: 2 }, false);
        presence.count(HostRange { addr: RANGE.addr, len: 8 }, true);
        let counts = |hits, misses| AccessCounts { hits, misses };
        assert_eq!(
            [0, 1, 2].map(|unit| presence.take_counts(unit)),
            [counts(1, 1), counts(0, 1), counts(0, 0)]
        );
        assert_eq!(presence.take_counts(0), counts(0, 0));
    }
}
