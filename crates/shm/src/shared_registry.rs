//! The shared registry: the regions of a process and the queue pairs that give access to them, as records that the
//! process alone writes and other processes of the same host and user read.

use std::ffi::CStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::keys::{HALF, KeyMemo, KeyOrder, ROUNDS};
use crate::record::{self, Content, Version};
use crate::rights::Rights;
use crate::segment::{Others, Segment};

/// Regions beyond so many are accessed by packets only.
const REGIONS: usize = 1 << 20;
/// As many as a process can have.
const QUEUE_PAIRS: usize = 1 << 16;
/// The magic number, and from the second page on the tables that map keys to numbers of records.
const HEADER_BYTES: usize = TABLES_AT + ROUNDS * HALF * 2;
const TABLES_AT: usize = 4096;
const REGIONS_AT: usize = HEADER_BYTES + QUEUE_PAIRS * record::BYTES;
const REGISTRY_BYTES: usize = REGIONS_AT + REGIONS * record::BYTES;
/// "terrace" and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"terrace\x01");

const PUBLISHED: u64 = 1;
const TAG_SHIFT: u32 = 8;
const ACCESS_SHIFT: u32 = 16;

/// A region as other processes see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedRegion {
    /// The lower 8 bits of its key.
    pub tag: u8,
    /// What it permits to peers.
    pub access: Rights,
    /// Protection domain.
    pub pd: u32,
    /// First byte, as users of the key name it.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// What to add (modulo 2^64) to an address that the key's user gives, to get the publishing process's own address.
    pub to_host: u64,
}

/// A queue pair as other processes see it: connected, and able to take requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedQueuePair {
    /// Protection domain of the regions that it gives access to.
    pub pd: u32,
    /// What it permits its peer.
    pub access: Rights,
    /// The number of the queue pair at the other end; no other one may use this.
    pub dest_qpn: u32,
    /// The address of the other end (an IPv4 address mapped into IPv6).
    pub peer: [u8; 16],
}

impl PublishedRegion {
    fn content(&self) -> Content {
        let flags =
            PUBLISHED | u64::from(self.tag) << TAG_SHIFT | u64::from(self.access.bits()) << ACCESS_SHIFT;
        [flags, self.pd.into(), self.start, self.len, self.to_host, 0, 0]
    }

    #[inline]
    fn of(content: &Content) -> Option<PublishedRegion> {
        let [flags, pd, start, len, to_host, ..] = *content;
        (flags & PUBLISHED != 0).then_some(PublishedRegion {
            tag: (flags >> TAG_SHIFT) as u8,
            access: access_of(flags),
            pd: pd as u32,
            start,
            len,
            to_host,
        })
    }
}

impl PublishedQueuePair {
    fn content(&self) -> Content {
        let [high, low] = halves(self.peer);
        let flags = PUBLISHED | u64::from(self.access.bits()) << ACCESS_SHIFT;
        [flags, self.pd.into(), self.dest_qpn.into(), high, low, 0, 0]
    }
}

/// An address as it is in records.
pub(crate) fn halves(address: [u8; 16]) -> [u64; 2] {
    let address = u128::from_be_bytes(address);
    [(address >> 64) as u64, address as u64]
}

fn access_of(flags: u64) -> Rights {
    Rights::from_bits_truncate((flags >> ACCESS_SHIFT) as u32)
}

/// The records of this process.
#[derive(Debug)]
pub struct SharedRegistry {
    segment: Segment,
}

impl SharedRegistry {
    /// The name of its file, which has none in a file system (`memfd_create(2)`).
    pub const NAME: &CStr = c"terrace-shared-registry";

    /// A registry that publishes nothing yet. Keys lead to records by `order`.
    ///
    /// # Errors
    /// When the system has no descriptors or address space left.
    pub fn new(order: &KeyOrder) -> io::Result<SharedRegistry> {
        let segment = Segment::create(SharedRegistry::NAME, REGISTRY_BYTES, Others::Read)?;
        let entries = order.rounds().iter().flatten();
        let quads = tables(&segment);
        for (index, &entry) in entries.enumerate() {
            quads[index / 4].fetch_or(u64::from(entry) << (index % 4 * 16), Ordering::Relaxed);
        }
        segment.quads(0, 1)[0].store(MAGIC, Ordering::Release);
        Ok(SharedRegistry { segment })
    }

    /// To be sent to other processes.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.segment.file()
    }

    /// Publishes the region of a slot, in place of the slot's last one. The caller has exclusive access to the slot.
    pub fn publish_region(&self, number: u32, region: &PublishedRegion) {
        if let Some(record) = region_record(&self.segment, number) {
            record::write(record, &region.content());
        }
    }

    /// Withdraws the region of a slot. A process that has seen it may still be copying.
    pub fn withdraw_region(&self, number: u32) {
        if let Some(record) = region_record(&self.segment, number) {
            record::write(record, &Content::default());
        }
    }

    /// Publishes or withdraws a queue pair. The caller has it locked.
    pub fn set_queue_pair(&self, qpn: u32, published: Option<&PublishedQueuePair>) {
        let content = published.map(PublishedQueuePair::content).unwrap_or_default();
        record::write(queue_pair_record(&self.segment, qpn), &content);
    }

    /// The version of a slot's record.
    pub fn region_version(&self, number: u32) -> Option<Version> {
        let record = region_record(&self.segment, number)?;
        record::read(record).map(|(version, _)| version)
    }
}

/// What one connection has read of another process's records: most accesses find them unchanged.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) region: SeenRegion,
    pub(crate) rights: SeenRights,
}

/// The region that it read last.
#[derive(Debug, Default)]
pub(crate) struct SeenRegion {
    number: KeyMemo,
    /// A key, and the region that it named.
    region: Option<(u32, Version, PublishedRegion)>,
}

/// The rights of the queue pair at the other end.
#[derive(Debug, Default)]
pub(crate) struct SeenRights(Option<(Version, u32, Rights)>);

/// A region as it was read.
#[derive(Debug)]
pub(crate) struct RegionView<'a> {
    record: &'a [AtomicU64],
    pub(crate) version: Version,
    pub(crate) region: &'a PublishedRegion,
}

impl RegionView<'_> {
    /// Whether the record is unchanged since.
    #[inline(always)]
    pub(crate) fn is_current(&self) -> bool {
        record::version(self.record) == self.version
    }
}

/// The records of another process.
#[derive(Debug)]
pub(crate) struct SharedRegistryView {
    segment: Segment,
    order: KeyOrder,
}

impl SharedRegistryView {
    /// Takes the descriptor of [`SharedRegistry::file`].
    pub(crate) fn open(file: OwnedFd) -> io::Result<SharedRegistryView> {
        let segment = Segment::open(file, REGISTRY_BYTES, false)?;
        if segment.quads(0, 1)[0].load(Ordering::Acquire) != MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let quads = tables(&segment);
        let entry = |index: usize| (quads[index / 4].load(Ordering::Relaxed) >> (index % 4 * 16)) as u16;
        let round = |round: usize| std::array::from_fn(|index| entry(round * HALF + index));
        let order = KeyOrder::from_rounds((0..ROUNDS).map(round));
        Ok(SharedRegistryView { segment, order })
    }

    /// The region that a key names, if it is published. A caller that has made its epoch odd since asks
    /// [`RegionView::is_current`] whether the region still is the same.
    #[inline(always)]
    pub(crate) fn region<'a>(&'a self, key: u32, seen: &'a mut SeenRegion) -> Option<RegionView<'a>> {
        let record = region_record(&self.segment, seen.number.number(&self.order, key))?;
        let is_as_seen = matches!(seen.region, Some((known, version, _)) if known == key && version == record::version(record));
        if !is_as_seen {
            seen.region = Some(read_region(record, key)?);
        }
        let (_, version, region) = seen.region.as_ref()?;
        Some(RegionView { record, version: *version, region })
    }

    /// The protection domain of a queue pair, and what it permits; `None` if it is not published, or is connected to
    /// another one than `own_qpn` at `own`. `seen` belongs to the same three.
    #[inline(always)]
    pub(crate) fn rights(
        &self,
        qpn: u32,
        own: [u64; 2],
        own_qpn: u32,
        seen: &mut SeenRights,
    ) -> Option<(u32, Rights)> {
        let record = queue_pair_record(&self.segment, qpn);
        if let Some((version, pd, access)) = seen.0
            && version == record::version(record)
        {
            return Some((pd, access));
        }
        let read @ (_, pd, access) = read_rights(record, own, own_qpn)?;
        seen.0 = Some(read);
        Some((pd, access))
    }
}

#[cold]
fn read_region(record: &[AtomicU64], key: u32) -> Option<(u32, Version, PublishedRegion)> {
    let (version, content) = record::read(record)?;
    let region = PublishedRegion::of(&content).filter(|region| region.tag == key as u8)?;
    Some((key, version, region))
}

#[cold]
fn read_rights(record: &[AtomicU64], own: [u64; 2], own_qpn: u32) -> Option<(Version, u32, Rights)> {
    let (version, [flags, pd, dest_qpn, high, low, ..]) = record::read(record)?;
    if flags & PUBLISHED == 0 || dest_qpn != u64::from(own_qpn) || [high, low] != own {
        return None;
    }
    Some((version, pd as u32, access_of(flags)))
}

fn tables(segment: &Segment) -> &[AtomicU64] {
    segment.quads(TABLES_AT, ROUNDS * HALF / 4)
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
    use std::sync::atomic::AtomicBool;

    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn half_a_record_is_never_read() {
        let record: [AtomicU64; record::QUADS] = Default::default();
        assert_eq!(record::read(&record), None);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1..200_000 {
                    record::write(&record, &[value; record::QUADS - 1]);
                }
                stop.store(true, Ordering::Relaxed);
            });
            let mut last = 0;
            while !stop.load(Ordering::Relaxed) {
                let Some((_, content)) = record::read(&record) else { continue };
                assert!(content.iter().all(|&value| value == content[0]) && content[0] >= last);
                last = content[0];
            }
        });
    }

    fn order() -> KeyOrder {
        KeyOrder::new(&mut StdRng::seed_from_u64(4))
    }

    #[test]
    fn what_is_published_is_seen_until_it_is_withdrawn() {
        let registry = SharedRegistry::new(&order()).expect("made");
        let view = SharedRegistryView::open(registry.file().try_clone_to_owned().expect("a descriptor"))
            .expect("mapped");
        let (number, key) = (7, order().key_of(7) | 0x42);
        let mut seen = SeenRegion::default();
        let mut view = |key| view.region(key, &mut seen).map(|view| (view.version, *view.region));
        assert_eq!(view(key), None);
        let region = PublishedRegion {
            tag: 0x42,
            access: Rights::READ | Rights::ATOMIC,
            pd: 9,
            start: 0x1000,
            len: u64::MAX - 0x1000,
            to_host: u64::MAX - 5,
        };
        registry.publish_region(number, &region);
        let (version, seen) = view(key).expect("published");
        assert_eq!(seen, region);
        assert_eq!(registry.region_version(number), Some(version));
        assert_eq!(view(key ^ 1), None, "another tag");
        registry.withdraw_region(number);
        assert_eq!(view(key), None);
        registry.publish_region(number, &region);
        assert!(view(key).is_some_and(|(again, _)| again != version));
    }

    #[test]
    fn queue_pairs_are_seen_whatever_the_slot_in_their_number() {
        let registry = SharedRegistry::new(&order()).expect("made");
        let view = SharedRegistryView::open(registry.file().try_clone_to_owned().expect("a descriptor"))
            .expect("mapped");
        let mut peer = [0; 16];
        peer.iter_mut().enumerate().for_each(|(index, byte)| *byte = index as u8 * 16 + 1);
        let published = PublishedQueuePair { pd: 3, access: Rights::READ, dest_qpn: 0x80_1234, peer };
        registry.set_queue_pair(0x05_ffff, Some(&published));
        let own = halves(peer);
        let first = |qpn, own, own_qpn| view.rights(qpn, own, own_qpn, &mut SeenRights::default());
        let mut seen = SeenRights::default();
        let mut again = || view.rights(0x05_ffff, own, 0x80_1234, &mut seen);
        for _ in 0..2 {
            assert_eq!(again(), Some((3, Rights::READ)));
        }
        assert_eq!(first(0x05_fffe, own, 0x80_1234), None);
        assert_eq!(first(0x05_ffff, own, 0x80_1235), None, "connected to another one");
        assert_eq!(first(0x05_ffff, [own[0], own[1] ^ 1], 0x80_1234), None, "at another address");
        registry.set_queue_pair(0x05_ffff, None);
        assert_eq!([again(), first(0x05_ffff, own, 0x80_1234)], [None; 2]);
    }
}
