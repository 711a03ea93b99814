//! A record of the frame directory, in one word.
//!
//! ```text
//!   63        48 47  46   45      44      43     36 35                     0
//!  ┌────────────┬──────┬───────┬─────────┬─────────┬────────────────────────┐
//!  │ checksum   │ 0  0 │ valid │ dirty   │ slot    │ page of the region     │
//!  └────────────┴──────┴───────┴─────────┴─────────┴────────────────────────┘
//! ```

/// Regions have fewer pages than this.
pub(crate) const PAGES_MAX: u64 = 1 << 36;
const SLOT_SHIFT: u32 = 36;
const DIRTY: u64 = 1 << 44;
const VALID: u64 = 1 << 45;
const CHECKSUM_SHIFT: u32 = 48;

/// Which page a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Record {
    /// The slot of the region.
    pub(crate) slot: u8,
    /// The page of the region.
    pub(crate) page: u64,
    /// The file lacks the newest bytes.
    pub(crate) dirty: bool,
}

impl Record {
    /// The word of a frame's record.
    pub(super) fn to_word(self, frame: u32) -> u64 {
        debug_assert!(self.page < PAGES_MAX);
        let dirty = if self.dirty { DIRTY } else { 0 };
        let word = self.page | u64::from(self.slot) << SLOT_SHIFT | dirty | VALID;
        word | checksum(frame, word) << CHECKSUM_SHIFT
    }

    /// The record in a word. `None` of a frame that holds no page.
    pub(super) fn from_word(frame: u32, word: u64) -> Option<Record> {
        let content = word & ((1 << CHECKSUM_SHIFT) - 1);
        if content & VALID == 0 || word >> CHECKSUM_SHIFT != checksum(frame, content) {
            return None;
        }
        let (slot, page) = ((word >> SLOT_SHIFT) as u8, word & (PAGES_MAX - 1));
        Some(Record { slot, page, dirty: content & DIRTY != 0 })
    }
}

/// 16 bits that depend on the frame, so that a record in the wrong place is none.
fn checksum(frame: u32, content: u64) -> u64 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&frame.to_le_bytes());
    hasher.update(&content.to_le_bytes());
    u64::from(hasher.finalize() & 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_damaged_ones_do_not() {
        for (slot, page, dirty) in [(0, 0, false), (254, PAGES_MAX - 1, true), (7, 12345, true)] {
            let record = Record { slot, page, dirty };
            let word = record.to_word(9);
            assert_eq!(Record::from_word(9, word), Some(record));
            assert_eq!(Record::from_word(10, word), None, "another frame");
            for bit in (0..64).filter(|bit| !(46..48).contains(bit)) {
                assert_eq!(Record::from_word(9, word ^ 1 << bit), None, "bit {bit}");
            }
        }
        assert_eq!(Record::from_word(0, 0), None);
    }
}
