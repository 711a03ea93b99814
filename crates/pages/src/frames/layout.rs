//! The offsets in the file of a pool, and its header.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use terrace_hostmem::PAGE_BYTES;

use crate::sys::Mapping;

/// `"TERRPAGE"`.
const MAGIC: u64 = u64::from_le_bytes(*b"TERRPAGE");
/// The version of everything in the file. A build discards, after write-back, only pools of its own version.
pub(super) const LAYOUT: u64 = 2;
/// Regions that a pool can have.
pub(crate) const SLOTS: usize = 255;
/// Length of a region slot.
pub(super) const SLOT_BYTES: u64 = 512;
const SLOTS_OFFSET: u64 = PAGE_BYTES;
const DIRECTORY_OFFSET: u64 = (SLOTS_OFFSET + SLOTS as u64 * SLOT_BYTES).next_multiple_of(PAGE_BYTES);
/// Frames begin at a multiple of this, and the file's length is one: both fit hugetlbfs.
pub(super) const CHUNK_BYTES: u64 = 2 << 20;
/// Memory for each frame outside the file: a pin counter, an access counter and a link of a queue.
const OUTSIDE_BYTES: u64 = 2 + 1 + 4;
const RECORD_BYTES: u64 = 8;

/// How many frames a budget is enough for.
pub(crate) fn frames_within(budget_bytes: u64) -> u32 {
    u32::try_from(budget_bytes / PAGE_BYTES).unwrap_or(u32::MAX)
}

/// The memory that is kept about the frames of a budget, in bytes.
pub(crate) fn overhead_bytes(budget_bytes: u64) -> u64 {
    DIRECTORY_OFFSET + u64::from(frames_within(budget_bytes)) * (RECORD_BYTES + OUTSIDE_BYTES)
}

/// The offsets for a number of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) frame_count: u32,
}

impl Layout {
    pub(super) fn slot(index: usize) -> u64 {
        SLOTS_OFFSET + index as u64 * SLOT_BYTES
    }

    pub(super) fn directory() -> u64 {
        DIRECTORY_OFFSET
    }

    pub(super) fn frames(self) -> u64 {
        (DIRECTORY_OFFSET + u64::from(self.frame_count) * RECORD_BYTES).next_multiple_of(CHUNK_BYTES)
    }

    /// Length of the file.
    pub(super) fn bytes(self) -> u64 {
        (self.frames() + u64::from(self.frame_count) * PAGE_BYTES).next_multiple_of(CHUNK_BYTES)
    }

    /// The part of the file before the frames.
    pub(super) fn before_frames(self) -> Range<u64> {
        0..DIRECTORY_OFFSET + u64::from(self.frame_count) * RECORD_BYTES
    }
}

/// What the header of a file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// No pool, or one whose making did not end.
    None,
    /// A pool of another layout.
    Other(u64),
    /// A pool of this layout.
    Known(Layout),
}

const HEADER_QUADS: usize = 3;

/// Reads the header at the start of a mapping.
pub(super) fn read_header(mapping: &Mapping) -> Header {
    let quads = mapping.quads(0, HEADER_QUADS);
    let [magic, layout, frame_count] = [0, 1, 2].map(|index: usize| quads[index].load(Ordering::Acquire));
    match (magic, layout, u32::try_from(frame_count)) {
        (MAGIC, LAYOUT, Ok(frame_count)) => Header::Known(Layout { frame_count }),
        (MAGIC, LAYOUT, Err(_)) => Header::None,
        (MAGIC, other, _) => Header::Other(other),
        _ => Header::None,
    }
}

/// Whether a file begins as pools do.
pub(super) fn has_magic(file: &File) -> bool {
    let mut magic = [0; 8];
    file.read_exact_at(&mut magic, 0).is_ok_and(|()| u64::from_le_bytes(magic) == MAGIC)
}

/// Writes the header. The file counts as a pool from then on.
pub(super) fn write_header(mapping: &Mapping, layout: Layout) {
    let quads = mapping.quads(0, HEADER_QUADS);
    quads[1].store(LAYOUT, Ordering::Relaxed);
    quads[2].store(u64::from(layout.frame_count), Ordering::Relaxed);
    quads[0].store(MAGIC, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_for_frames_and_little_is_kept_about_them() {
        for budget in [1u64 << 20, 1 << 30, 20 << 30] {
            let layout = Layout { frame_count: frames_within(budget) };
            let frames = u64::from(layout.frame_count);
            assert_eq!(frames * PAGE_BYTES, budget);
            let kept = frames * OUTSIDE_BYTES + layout.before_frames().end;
            assert!(kept <= overhead_bytes(budget) && overhead_bytes(budget) - kept < PAGE_BYTES);
            assert!((kept - DIRECTORY_OFFSET) * 1000 < budget * 4, "0.4 %");
        }
        assert_eq!(frames_within(1000), 0);
    }
}
