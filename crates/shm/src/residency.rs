//! The two tables of a paged region that same-host peers use: the residency bitmap, which they read, and the counters
//! of hits, which they add to.

use std::io;
use std::ops::{Deref, RangeInclusive};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use terrace_hostmem::UNIT_BYTES;

use crate::segment::{Others, Segment};

/// How many units a range of `len` bytes has, if it begins with one.
pub fn unit_count(len: u64) -> usize {
    len.div_ceil(UNIT_BYTES) as usize
}

/// The bit of a unit in its word of the residency bitmap.
#[inline]
pub fn unit_bit(unit: usize) -> u64 {
    1 << (unit % 64)
}

/// Length of the bitmap's segment: the bits, and behind them a number that is not 0 once other processes may not use
/// the tables any more.
fn bitmap_bytes(unit_count: usize) -> usize {
    (unit_count.div_ceil(64) + 1) * 8
}

/// Length of the counters' segment.
fn counters_bytes(unit_count: usize) -> usize {
    unit_count.next_multiple_of(2) * 4
}

/// The residency bitmap of a region of this process: unit `n` is bit `n % 64` of word `n / 64`. Other processes can
/// read it if a segment could be made.
#[derive(Debug)]
pub struct ResidencyBitmap(Bitmap);

#[derive(Debug)]
enum Bitmap {
    Shared(Segment),
    Own(Box<[AtomicU64]>),
}

impl ResidencyBitmap {
    /// No unit is resident.
    pub fn new(unit_count: usize) -> ResidencyBitmap {
        ResidencyBitmap(match Segment::create(c"terrace-residency", bitmap_bytes(unit_count), Others::Read) {
            Ok(segment) => Bitmap::Shared(segment),
            Err(_) => Bitmap::Own((0..unit_count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()),
        })
    }

    /// To be sent to other processes, unless it is withdrawn from them.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Bitmap::Shared(segment) if withdrawn(segment).load(Ordering::Relaxed) == 0 => {
                Some(segment.file())
            }
            _ => None,
        }
    }

    /// Withdraws it from other processes for good. Accesses that they have begun end with a grace period. False if they
    /// never had it.
    pub fn withdraw(&self) -> bool {
        let Bitmap::Shared(segment) = &self.0 else { return false };
        withdrawn(segment).store(1, Ordering::Relaxed);
        true
    }
}

impl Deref for ResidencyBitmap {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        match &self.0 {
            Bitmap::Shared(segment) => segment.quads(0, segment.len() / 8 - 1),
            Bitmap::Own(words) => words,
        }
    }
}

fn withdrawn(bitmap: &Segment) -> &AtomicU64 {
    &bitmap.quads(bitmap.len() - 8, 1)[0]
}

/// A counter for each unit of a region of this process: accesses that found all that they touch resident. Other
/// processes add to them if a segment could be made.
#[derive(Debug)]
pub struct HitCounters(Counters);

#[derive(Debug)]
enum Counters {
    /// With the number of units.
    Shared(Segment, usize),
    Own(Box<[AtomicU32]>),
}

impl HitCounters {
    /// All are 0.
    pub fn new(unit_count: usize) -> HitCounters {
        HitCounters(match Segment::create(c"terrace-hits", counters_bytes(unit_count), Others::Write) {
            Ok(segment) => Counters::Shared(segment, unit_count),
            Err(_) => Counters::Own((0..unit_count).map(|_| AtomicU32::new(0)).collect()),
        })
    }

    /// To be sent to other processes.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Counters::Shared(segment, _) => Some(segment.file()),
            Counters::Own(_) => None,
        }
    }
}

impl Deref for HitCounters {
    type Target = [AtomicU32];

    #[inline]
    fn deref(&self) -> &[AtomicU32] {
        match &self.0 {
            Counters::Shared(segment, unit_count) => segment.words(0, *unit_count),
            Counters::Own(counters) => counters,
        }
    }
}

/// The tables of another process's region.
#[derive(Debug)]
pub(crate) struct ResidencyView {
    bitmap: Segment,
    hits: Segment,
    unit_count: usize,
}

impl ResidencyView {
    /// Takes the descriptors of [`ResidencyBitmap::file`] and [`HitCounters::file`].
    pub(crate) fn open(bitmap: OwnedFd, hits: OwnedFd, unit_count: usize) -> io::Result<ResidencyView> {
        let bitmap = Segment::open(bitmap, bitmap_bytes(unit_count), false)?;
        let hits = Segment::open(hits, counters_bytes(unit_count), true)?;
        Ok(ResidencyView { bitmap, hits, unit_count })
    }

    /// Whether all these units are resident, and the tables are not withdrawn.
    pub(crate) fn are_resident(&self, mut units: RangeInclusive<usize>) -> bool {
        let words = self.bitmap.quads(0, self.unit_count.div_ceil(64));
        withdrawn(&self.bitmap).load(Ordering::Relaxed) == 0
            && units.all(|unit| words[unit / 64].load(Ordering::Acquire) & unit_bit(unit) != 0)
    }

    /// Counts an access for each of these units. Accesses that count at once may lose counts.
    pub(crate) fn count_hit(&self, units: RangeInclusive<usize>) {
        let hits = self.hits.words(0, self.unit_count);
        for unit in units {
            let total = hits[unit].load(Ordering::Relaxed).saturating_add(1);
            hits[unit].store(total, Ordering::Relaxed);
        }
    }
}
