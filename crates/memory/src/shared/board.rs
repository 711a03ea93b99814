//! What a process lets others of the same host and user reach into: its regions and the queue pairs that lead to them, as
//! records that others read and only it writes.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::record::{self, Content, Version};
use super::segment::{Others, Segment};
use crate::access::Access;

/// Regions beyond so many are reached by packets only.
const REGIONS: usize = 1 << 20;
/// As many as a process can have.
const QUEUE_PAIRS: usize = 1 << 16;
const HEADER_BYTES: usize = 4096;
const REGIONS_AT: usize = HEADER_BYTES + QUEUE_PAIRS * record::BYTES;
const BOARD_BYTES: usize = REGIONS_AT + REGIONS * record::BYTES;
/// "terrace" and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"terrace\x01");

const SHOWN: u64 = 1;
const TAG_SHIFT: u32 = 8;
const ACCESS_SHIFT: u32 = 16;

/// From the index within a key to the number of its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyOrder {
    pub(crate) multiplier: u32,
    pub(crate) offset: u32,
    pub(crate) mask: u32,
}

impl KeyOrder {
    #[inline]
    pub(crate) fn number(self, key: u32) -> u32 {
        ((key >> 8) ^ self.offset).wrapping_mul(self.multiplier) & self.mask
    }
}

/// A region as others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShownRegion {
    pub(crate) tag: u8,
    pub(crate) access: Access,
    pub(crate) pd: u32,
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) to_host: u64,
}

/// A queue pair as others see it: connected, and able to take requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShownQueuePair {
    /// Protection domain of the regions that it leads to.
    pub pd: u32,
    /// What it permits its peer.
    pub access: Access,
    /// The number of the queue pair at the other end, the only one that may use this.
    pub dest_qpn: u32,
    /// The address of the other end (an IPv4 address mapped into IPv6).
    pub peer: [u8; 16],
}

impl ShownRegion {
    fn content(&self) -> Content {
        let flags = SHOWN | u64::from(self.tag) << TAG_SHIFT | u64::from(self.access.bits()) << ACCESS_SHIFT;
        [flags, self.pd.into(), self.start, self.len, self.to_host, 0, 0]
    }

    #[inline]
    fn of(content: &Content) -> Option<ShownRegion> {
        let [flags, pd, start, len, to_host, ..] = *content;
        (flags & SHOWN != 0).then_some(ShownRegion {
            tag: (flags >> TAG_SHIFT) as u8,
            access: access_of(flags),
            pd: pd as u32,
            start,
            len,
            to_host,
        })
    }
}

impl ShownQueuePair {
    fn content(&self) -> Content {
        let [high, low] = self.halves();
        let flags = SHOWN | u64::from(self.access.bits()) << ACCESS_SHIFT;
        [flags, self.pd.into(), self.dest_qpn.into(), high, low, 0, 0]
    }

    fn halves(&self) -> [u64; 2] {
        let peer = u128::from_be_bytes(self.peer);
        [(peer >> 64) as u64, peer as u64]
    }

    #[inline]
    fn of(content: &Content) -> Option<ShownQueuePair> {
        let [flags, pd, dest_qpn, high, low, ..] = *content;
        let peer = (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
        (flags & SHOWN != 0).then_some(ShownQueuePair {
            pd: pd as u32,
            access: access_of(flags),
            dest_qpn: dest_qpn as u32,
            peer,
        })
    }
}

fn access_of(flags: u64) -> Access {
    Access::from_bits_truncate((flags >> ACCESS_SHIFT) as u32)
}

/// The records of this process.
#[derive(Debug)]
pub(crate) struct Board {
    segment: Segment,
    order: KeyOrder,
}

impl Board {
    /// Nothing is shown yet.
    pub(crate) fn new(order: KeyOrder) -> io::Result<Board> {
        let segment = Segment::create(c"terrace-board", BOARD_BYTES, Others::Read)?;
        let header = segment.quads(0, 4);
        header[1].store(order.multiplier.into(), Ordering::Relaxed);
        header[2].store(order.offset.into(), Ordering::Relaxed);
        header[3].store(order.mask.into(), Ordering::Relaxed);
        header[0].store(MAGIC, Ordering::Release);
        Ok(Board { segment, order })
    }

    /// To be sent to others.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// Shows a region, in place of what its slot has shown before. The caller has the slot to itself.
    pub(crate) fn show_region(&self, key: u32, region: &ShownRegion) {
        if let Some(record) = region_record(&self.segment, self.order.number(key)) {
            record::write(record, &region.content());
        }
    }

    /// Shows nothing any more. Who saw what was shown may still be copying.
    pub(crate) fn hide_region(&self, key: u32) {
        if let Some(record) = region_record(&self.segment, self.order.number(key)) {
            record::write(record, &Content::default());
        }
    }

    /// Shows a queue pair, or hides it. The caller has it locked.
    pub(crate) fn set_queue_pair(&self, qpn: u32, shown: Option<&ShownQueuePair>) {
        let content = shown.map(ShownQueuePair::content).unwrap_or_default();
        record::write(queue_pair_record(&self.segment, qpn), &content);
    }

    /// The version of what a key's slot shows.
    pub(crate) fn region_version(&self, key: u32) -> Option<Version> {
        let record = region_record(&self.segment, self.order.number(key))?;
        record::read(record).map(|(version, _)| version)
    }
}

/// The records of another process.
#[derive(Debug)]
pub(super) struct BoardView {
    segment: Segment,
    order: KeyOrder,
}

impl BoardView {
    /// Takes the descriptor of [`Board::file`].
    pub(super) fn open(file: OwnedFd) -> io::Result<BoardView> {
        let segment = Segment::open(file, BOARD_BYTES, false)?;
        let header = segment.quads(0, 4);
        if header[0].load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let field = |index: usize| header[index].load(Ordering::Relaxed) as u32;
        let order = KeyOrder { multiplier: field(1), offset: field(2), mask: field(3) };
        Ok(BoardView { segment, order })
    }

    /// The region that a key names, unless it is not shown.
    #[inline]
    pub(super) fn region(&self, key: u32) -> Option<(Version, ShownRegion)> {
        let (version, content) = record::read(region_record(&self.segment, self.order.number(key))?)?;
        let region = ShownRegion::of(&content)?;
        (region.tag == key as u8).then_some((version, region))
    }

    /// A queue pair, unless it is not shown.
    #[inline]
    pub(super) fn queue_pair(&self, qpn: u32) -> Option<ShownQueuePair> {
        ShownQueuePair::of(&record::read(queue_pair_record(&self.segment, qpn))?.1)
    }
}

#[inline]
fn region_record(segment: &Segment, number: u32) -> Option<&[AtomicU64]> {
    let number = number as usize;
    (number < REGIONS).then(|| segment.quads(REGIONS_AT + number * record::BYTES, record::QUADS))
}

#[inline]
fn queue_pair_record(segment: &Segment, qpn: u32) -> &[AtomicU64] {
    segment.quads(HEADER_BYTES + (qpn as usize % QUEUE_PAIRS) * record::BYTES, record::QUADS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: KeyOrder = KeyOrder { multiplier: 0x35, offset: 0x1234, mask: 0xff_ffff };

    #[test]
    fn what_is_shown_is_seen_until_it_is_hidden() {
        let board = Board::new(ORDER).expect("made");
        let view = BoardView::open(board.file().try_clone_to_owned().expect("a descriptor")).expect("mapped");
        // A key whose record is number 7.
        let key =
            (0..1 << 24).map(|index| index << 8 | 0x42).find(|&key| ORDER.number(key) == 7).expect("one");
        assert_eq!(view.region(key), None);
        let region = ShownRegion {
            tag: 0x42,
            access: Access::REMOTE_READ | Access::LOCAL_WRITE,
            pd: 9,
            start: 0x1000,
            len: u64::MAX - 0x1000,
            to_host: u64::MAX - 5,
        };
        board.show_region(key, &region);
        let (version, seen) = view.region(key).expect("shown");
        assert_eq!(seen, region);
        assert_eq!(board.region_version(key), Some(version));
        assert_eq!(view.region(key ^ 1), None, "another tag");
        board.hide_region(key);
        assert_eq!(view.region(key), None);
        board.show_region(key, &region);
        assert!(view.region(key).is_some_and(|(again, _)| again != version));
    }

    #[test]
    fn queue_pairs_are_seen_whatever_the_slot_in_their_number() {
        let board = Board::new(ORDER).expect("made");
        let view = BoardView::open(board.file().try_clone_to_owned().expect("a descriptor")).expect("mapped");
        let mut peer = [0; 16];
        peer.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8 * 16 + 1);
        let shown = ShownQueuePair { pd: 3, access: Access::REMOTE_READ, dest_qpn: 0x80_1234, peer };
        board.set_queue_pair(0x05_ffff, Some(&shown));
        assert_eq!(view.queue_pair(0x05_ffff), Some(shown));
        assert_eq!(view.queue_pair(0x05_fffe), None);
        board.set_queue_pair(0x05_ffff, None);
        assert_eq!(view.queue_pair(0x05_ffff), None);
    }
}
