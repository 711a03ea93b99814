//! The consumer's side of a ring.

use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{BorrowedFd, OwnedFd};

use terrace_hostmem::{SharedBytes, fault};

use super::record::*;
use super::{CONSUMER_PAGE_BYTES, SLEEP_AT};
use crate::handshake;
use crate::segment::{Others, Segment};
use crate::sync::{AtomicU64, Ordering, PACKET_BYTES_MAX, RING_BYTES, RUN_HEAD_BYTES};

/// The consumer's side of a ring.
#[derive(Debug)]
pub struct RxRing {
    ring: Segment,
    pub(super) consumer_page: Segment,
    pub(super) head: u64,
    /// How far the head may get, once the producer has gone.
    limit: Option<u64>,
    /// A packet, or the head of a run, is copied here before it is processed: the producer could change it meanwhile.
    packet: Box<[u8]>,
    /// The origin of the last packet, and the words of its record that said so. Most packets have the same one.
    from: Origin,
    said: [u64; 3],
    broken: bool,
}

impl RxRing {
    /// Takes the descriptor of [`RingFile::file`].
    ///
    /// # Errors
    /// `InvalidData` when it is something else; otherwise the system's.
    pub fn new(ring: OwnedFd) -> io::Result<RxRing> {
        let ring = Segment::open(ring, RING_BYTES as usize, false)?;
        let consumer_page = Segment::create(c"terrace-consumer-page", CONSUMER_PAGE_BYTES, Others::Read)?;
        Ok(RxRing {
            ring,
            consumer_page,
            head: 0,
            limit: None,
            packet: vec![0; PACKET_BYTES_MAX].into(),
            from: Origin { address: Ipv6Addr::UNSPECIFIED, port: 0, traffic_class: 0 },
            said: [0; 3],
            broken: false,
        })
    }

    /// To be sent to the producer.
    pub fn consumer_page(&self) -> BorrowedFd<'_> {
        self.consumer_page.file()
    }

    /// Whether no record is pending.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.is_over() || self.first_word() == NOTHING
    }

    /// Whether a record is pending. The second line of a record that is just arriving is fetched together with its
    /// first, not after it.
    #[inline]
    pub fn has_pending(&self) -> bool {
        self.ring.prefetch(((self.head + RECORD_ALIGNMENT) % RING_BYTES) as usize);
        !self.is_empty()
    }

    /// The producer has gone: it can have left no more records than fit into the ring.
    pub fn end(&mut self) {
        self.limit.get_or_insert(self.head.saturating_add(RING_BYTES));
    }

    #[inline]
    fn is_over(&self) -> bool {
        self.broken || self.limit.is_some_and(|limit| self.head >= limit)
    }

    /// Whether the producer has written an invalid record. Nothing more is read then.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Passes up to `max` packets and runs to `each`, and returns how many.
    #[inline]
    pub fn read(&mut self, max: usize, mut each: impl FnMut(RxPacket<'_>)) -> usize {
        let mut count = 0;
        while count < max && !self.is_over() {
            let numbers = self.first_word();
            if numbers == NOTHING {
                break;
            }
            let Some((record, behind)) = self.next(numbers) else {
                self.broken = true;
                break;
            };
            if let Some(Record { acknowledged, len }) = record {
                let run = if len > PACKET_BYTES_MAX { Some(self.run(len)) } else { None };
                let bytes = &self.packet[..copied_bytes(len)];
                each(RxPacket { origin: &self.from, acknowledged, bytes, run });
                count += 1;
            }
            self.head = behind;
        }
        if count > 0 {
            // Release: the packets were read before.
            self.consumer_page.quads(0, 1)[0].store(self.head, Ordering::Release);
        }
        count
    }

    /// The run in the record at the head, which was found valid.
    #[cold]
    fn run(&self, len: usize) -> SharedBytes<'_> {
        let at = (self.head % RING_BYTES) as usize + packet_at(len);
        // SAFETY: within our mapping of a file that cannot shrink, and nobody has a reference to it.
        unsafe { SharedBytes::new(self.ring.bytes_at(at, len), len) }
    }

    /// Announces that the consumer is about to sleep. It must not sleep if a record is pending after this.
    pub fn fall_asleep(&self) {
        handshake::fall_asleep(self.sleep());
    }

    /// Announces that the consumer is awake.
    pub fn wake_up(&self) {
        handshake::wake_up(self.sleep());
    }

    /// The first word of the record at the head.
    #[inline]
    fn first_word(&self) -> u64 {
        // Acquire: the rest of the record was written before.
        header(&self.ring, self.head % RING_BYTES)[0].load(Ordering::Acquire)
    }

    fn sleep(&self) -> &AtomicU64 {
        &self.consumer_page.quads(SLEEP_AT, 1)[0]
    }

    /// Copies the packet of the record at the head, or the head of the run, whose first word is `numbers`, and returns
    /// the record's end. There is no packet if the record only skips to the ring's start. `None` if the record is
    /// invalid.
    #[inline]
    fn next(&mut self, numbers: u64) -> Option<(Option<Record>, u64)> {
        let at = self.head % RING_BYTES;
        if numbers & LEN_MASK == SKIP {
            // At the ring's start it would lead to itself.
            return (at > 0).then_some((None, self.head + (RING_BYTES - at)));
        }
        let len = (numbers & LEN_MASK) as usize;
        let record = record_bytes(len).filter(|&record| at + record <= RING_BYTES)?;
        let copied_len = copied_bytes(len);
        let place = self.ring.bytes_at(at as usize + packet_at(len), copied_len);
        // SAFETY: within our mapping of a file that cannot shrink. The copy is made by instructions that the compiler
        // does not know of, so the producer may write meanwhile.
        unsafe { fault::copy_from(place, &mut self.packet[..copied_len]) }.ok()?;
        let header = header(&self.ring, at);
        let address = [1, 2].map(|word: usize| header[word].load(Ordering::Relaxed));
        self.note_origin([numbers & ORIGIN_MASK, address[0], address[1]]);
        let acknowledged = (numbers & CARRIES_ACK != 0).then_some((numbers >> ACKNOWLEDGED_SHIFT) as u32);
        Some((Some(Record { acknowledged, len }), self.head + record))
    }

    /// Decodes an address only if it differs from the last one.
    #[inline]
    fn note_origin(&mut self, said: [u64; 3]) {
        let is_known = said[0] == self.said[0] && said[1] == self.said[1] && said[2] == self.said[2];
        if !is_known {
            self.said = said;
            self.from = origin_of(said);
        }
    }
}

/// A packet, or a run of packets.
#[derive(Clone, Copy, Debug)]
pub struct RxPacket<'a> {
    /// Where it comes from.
    pub origin: &'a Origin,
    /// The PSN up to which it acknowledges beside its own content.
    pub acknowledged: Option<u32>,
    /// The packet, or the first bytes of a run, which include its headers.
    pub bytes: &'a [u8],
    /// All of a run.
    pub run: Option<SharedBytes<'a>>,
}

/// How much of a record with so many bytes is copied before it is processed.
#[inline]
fn copied_bytes(len: usize) -> usize {
    if len <= PACKET_BYTES_MAX { len } else { RUN_HEAD_BYTES }
}

/// What a record has.
struct Record {
    acknowledged: Option<u32>,
    len: usize,
}
