//! The entry of a page in a page table: one 64-bit word that a single load reads whole.
//!
//! ```text
//!   63              35 34  32 31                              0
//!  ┌──────────────────┬──────┬─────────────────────────────────┐
//!  │ version (29 bits)│state │ frame; of a ghost, its stamp    │
//!  └──────────────────┴──────┴─────────────────────────────────┘
//! ```
//!
//! The version is odd only while the page is mapped. It is incremented when the page is mapped and when it is unmapped,
//! so a reader that finds the same frame and the same odd version before and after a copy has copied the page.

/// Bits of the frame number.
const FRAME_BITS: u32 = 32;
const STATE_BITS: u32 = 3;
const VERSION_SHIFT: u32 = FRAME_BITS + STATE_BITS;
const VERSION_MASK: u64 = (1 << (64 - VERSION_SHIFT)) - 1;

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PageState {
    /// Only in the file.
    Absent = 0,
    /// Only in the file, and evicted not long ago: the entry holds the stamp of its eviction.
    Ghost = 1,
    /// Being read into its frame.
    Filling = 2,
    /// Mapped for reads. The frame holds what the file holds, or is being written back.
    Clean = 3,
    /// Mapped for reads and writes.
    Dirty = 4,
    /// Unmapped, but readers that saw it mapped may not have ended. The frame still holds the page.
    Leaving = 5,
}

impl PageState {
    const ALL: [PageState; 6] = [
        PageState::Absent,
        PageState::Ghost,
        PageState::Filling,
        PageState::Clean,
        PageState::Dirty,
        PageState::Leaving,
    ];

    /// Whether copies may read the frame.
    #[inline]
    pub fn is_mapped(self) -> bool {
        matches!(self, PageState::Clean | PageState::Dirty)
    }
}

/// The value of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageEntry(u64);

impl PageEntry {
    /// An entry of these parts. Of the version, the lower 29 bits.
    pub fn new(state: PageState, frame: u32, version: u32) -> PageEntry {
        let version = u64::from(version) & VERSION_MASK;
        PageEntry(version << VERSION_SHIFT | (state as u64) << FRAME_BITS | u64::from(frame))
    }

    /// The entry in a word of a table.
    #[inline]
    pub fn from_word(word: u64) -> PageEntry {
        PageEntry(word)
    }

    /// The word of a table.
    #[inline]
    pub fn word(self) -> u64 {
        self.0
    }

    /// The state; `Absent` if another process wrote a number that is none.
    #[inline]
    pub fn state(self) -> PageState {
        let number = (self.0 >> FRAME_BITS) as usize & ((1 << STATE_BITS) - 1);
        PageState::ALL.get(number).copied().unwrap_or(PageState::Absent)
    }

    /// The frame of a page that has one; the stamp of a ghost.
    #[inline]
    pub fn frame(self) -> u32 {
        self.0 as u32
    }

    /// The version.
    #[inline]
    pub fn version(self) -> u32 {
        (self.0 >> VERSION_SHIFT) as u32
    }

    /// Whether copies may read the frame.
    #[inline]
    pub fn is_readable(self) -> bool {
        self.state().is_mapped()
    }

    /// Whether copies may write to the frame.
    #[inline]
    pub fn is_writable(self) -> bool {
        self.state() == PageState::Dirty
    }

    /// Whether the page has been mapped to one frame from the time of one entry to that of the other.
    #[inline]
    pub fn is_same_mapping(self, other: PageEntry) -> bool {
        let state_mask = ((1 << STATE_BITS) - 1) << FRAME_BITS;
        self.is_readable() && other.is_readable() && (self.0 ^ other.0) & !state_mask == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_back_and_versions_wrap() {
        for state in PageState::ALL {
            for (frame, version) in [(0, 0), (u32::MAX, 1), (7, (1 << 29) - 1)] {
                let entry = PageEntry::from_word(PageEntry::new(state, frame, version).word());
                assert_eq!((entry.state(), entry.frame(), entry.version()), (state, frame, version));
            }
        }
        assert_eq!(PageEntry::new(PageState::Absent, 0, 1 << 29).version(), 0);
        assert_eq!(PageEntry::default().state(), PageState::Absent);
        assert_eq!(PageEntry::from_word(u64::MAX).state(), PageState::Absent);
    }

    #[test]
    fn a_page_that_becomes_dirty_is_the_same_mapping() {
        let clean = PageEntry::new(PageState::Clean, 5, 3);
        assert!(clean.is_same_mapping(PageEntry::new(PageState::Dirty, 5, 3)));
        assert!(!clean.is_same_mapping(PageEntry::new(PageState::Clean, 5, 5)));
        assert!(!clean.is_same_mapping(PageEntry::new(PageState::Clean, 6, 3)));
        let leaving = PageEntry::new(PageState::Leaving, 5, 3);
        assert!(!leaving.is_same_mapping(leaving));
    }
}
