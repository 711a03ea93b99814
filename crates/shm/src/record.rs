//! Seqlock records: one process writes them, others read them without locks. `tests/record_model.rs` tries them in
//! every interleaving.

use crate::sync::{AtomicU64, Ordering, fence};

/// 8-byte numbers of a record: the sequence number and the content.
pub(crate) const QUADS: usize = 8;
/// Bytes of a record: a cache line.
pub(crate) const BYTES: usize = QUADS * 8;

/// The content of a record.
pub(crate) type Content = [u64; QUADS - 1];

/// A version of a record: it names this content for as long as the record is not written again. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version(pub u64);

/// Writes a record. There is one writer at a time.
pub(crate) fn write(record: &[AtomicU64], content: &Content) {
    // Odd while the content changes, so that no reader takes half of it.
    let before = record[0].load(Ordering::Relaxed);
    record[0].store(before + 1, Ordering::Relaxed);
    fence(Ordering::Release);
    record[1..].iter().zip(content).for_each(|(place, &value)| place.store(value, Ordering::Relaxed));
    record[0].store(before + 2, Ordering::Release);
}

/// Reads a record; `None` while it is being written, or if it never was.
#[inline]
pub(crate) fn read(record: &[AtomicU64]) -> Option<(Version, Content)> {
    let version = record[0].load(Ordering::Acquire);
    if version == 0 || !version.is_multiple_of(2) {
        return None;
    }
    let mut content = Content::default();
    content.iter_mut().zip(&record[1..]).for_each(|(value, place)| *value = place.load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    (record[0].load(Ordering::Relaxed) == version).then_some((Version(version), content))
}

/// The version of a record now, if it has one. While that is the same, so is the content.
#[inline]
pub(crate) fn version(record: &[AtomicU64]) -> Version {
    Version(record[0].load(Ordering::Acquire))
}
