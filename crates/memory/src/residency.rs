//! The orders of loads and stores by which a unit of memory comes and goes. `tests/residency_model.rs` tries them in
//! every interleaving.

use terrace_shm::unit_bit;

use crate::pin::{PinLock, Pinned};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Whether a unit is present now.
#[inline]
pub(crate) fn is_present(bitmap: &[AtomicU64], unit: usize) -> bool {
    // Acquire: the unit's memory was brought before.
    bitmap[unit / 64].load(Ordering::Acquire) & unit_bit(unit) != 0
}

/// Marks a unit present, whose pages have these versions. The versions become odd after the unit is present, and even
/// before it is absent: a peer that reads the same odd version twice knows the page to have been present between.
pub(crate) fn admit(bitmap: &[AtomicU64], versions: &[AtomicU32], unit: usize) {
    bitmap[unit / 64].fetch_or(unit_bit(unit), Ordering::Release);
    step(versions);
}

/// Marks a unit absent, and returns when no copy of this process runs any more that saw it present.
pub(crate) fn expel(bitmap: &[AtomicU64], versions: &[AtomicU32], copies: &PinLock<()>, unit: usize) {
    step(versions);
    bitmap[unit / 64].fetch_and(!unit_bit(unit), Ordering::AcqRel);
    drop(copies.close());
}

fn step(versions: &[AtomicU32]) {
    for version in versions {
        version.fetch_add(1, Ordering::AcqRel);
    }
}

/// Pins `copies` for a copy of these units; `None` when one of them is absent.
#[inline]
pub(crate) fn hold<'a>(
    bitmap: &[AtomicU64],
    copies: &'a PinLock<()>,
    mut units: std::ops::Range<usize>,
) -> Option<Pinned<'a, ()>> {
    // First: what is present under the pin stays so.
    let held = copies.pin();
    units.all(|unit| is_present(bitmap, unit)).then_some(held)
}
