//! The translation of a range that is absent or present as a whole.

use std::sync::atomic::{AtomicU64, Ordering};

use terrace_hostmem::{AtomicOp, HostRange, fault};

use crate::access::AccessError;
use crate::translation::{PeerTables, Translation};

/// Bytes of a unit of residency: the largest that clients accept, because units come together.
const UNIT_BYTES: u64 = 1 << 30;

/// A range of the program's memory that is absent until it is present for good. Accesses to absent memory are the
/// pager's.
#[derive(Debug)]
pub struct WholeRange {
    range: HostRange,
    /// The residency bitmap; its words are equal.
    bitmap: Box<[AtomicU64]>,
}

impl WholeRange {
    /// An absent range.
    pub fn absent(range: HostRange) -> WholeRange {
        let word_count = range.len.div_ceil(64 * UNIT_BYTES).max(1);
        WholeRange { range, bitmap: (0..word_count).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Marks the range present for good: its bytes are those at its addresses.
    pub fn make_present(&self) {
        // Release: what was stored to the memory before is there for accesses that find the range present.
        self.bitmap.iter().for_each(|word| word.store(u64::MAX, Ordering::Release));
    }

    /// Calls `copy`, if the range is present.
    fn if_present<T>(
        &self,
        copy: impl FnOnce() -> Result<T, fault::Fault>,
    ) -> Option<Result<T, AccessError>> {
        let is_present = self.bitmap[0].load(Ordering::Acquire) != 0;
        is_present.then(|| copy().map_err(|fault::Fault| AccessError::Fault))
    }
}

impl Translation for WholeRange {
    fn range(&self) -> HostRange {
        self.range
    }

    fn unit_bytes(&self) -> u64 {
        UNIT_BYTES
    }

    fn is_present(&self, _: HostRange) -> bool {
        self.if_present(|| Ok(())).is_some()
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        // SAFETY: the range is memory that a program registered, as the caller has checked.
        self.if_present(|| unsafe { fault::copy_from(part.addr, out) })
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        // SAFETY: as above.
        self.if_present(|| unsafe { fault::copy_to(addr, data) })
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        // SAFETY: as above; the caller has checked the alignment, too.
        self.if_present(|| unsafe { fault::atomic(addr, op) })
    }

    /// The pager counts the accesses that it carries out.
    fn count(&self, _: HostRange, _: bool) {}

    fn bitmap(&self) -> &[AtomicU64] {
        &self.bitmap
    }

    /// None: no client writes to such a range by the versions of its pages.
    fn versions(&self) -> HostRange {
        HostRange { addr: 0, len: 0 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    /// Nothing becomes absent, so no copy is waited for.
    fn forget_copies(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_present_as_a_whole() {
        let memory = [7u8; 16];
        let range = HostRange { addr: memory.as_ptr() as u64, len: 16 };
        let whole = WholeRange::absent(range);
        let mut out = [0; 16];
        assert_eq!(whole.read(range, &mut out), None);
        assert!(!whole.is_present(range));
        whole.make_present();
        assert!(whole.is_present(range));
        assert_eq!(whole.read(range, &mut out), Some(Ok(())));
        assert_eq!(out, memory);
    }

    #[test]
    fn the_bitmap_has_a_bit_for_each_unit() {
        let words = |len| WholeRange::absent(HostRange { addr: 0, len }).bitmap().len();
        assert_eq!([0, 1, 64 << 30, (64 << 30) + 1].map(words), [1, 1, 1, 2]);
    }
}
