//! A ring of packets in shared memory, from one process to another of the same host: one producer, one consumer.
//!
//! There are two segments, each written by one side only, so that neither side can change what the other relies on:
//!
//! ```text
//!   the producer's                                  the consumer's (the consumer page)
//!   record | record | 0 ...                         head | sleep
//!
//!   writes records, and 0 behind them;              reads records up to the 0, head = behind them
//!   the first record's first word comes last
//!   -- full fence --                                sleep = odd
//!   sleep is odd, and no doorbell was rung for it?  -- full fence --
//!   rings the doorbell                              is there a record? then it does not sleep
//! ```
//! There is no tail that the consumer would have to fetch from the producer's cache before the record: the consumer
//! polls the place of the next record. Positions count bytes and never wrap; a record never crosses a multiple of the
//! ring's size. A process that dies leaves nothing locked: its unfinished records are behind a 0, and the consumer has
//! not seen them.

use std::io;
use std::net::Ipv6Addr;
use std::os::fd::{BorrowedFd, OwnedFd};

use terrace_hostmem::{SharedBytes, fault};
use terrace_sync::{Mutex, MutexGuard};

use crate::handshake;
use crate::segment::{Others, Segment};
use crate::sync::{AtomicU64, HEADERS_BYTES_MAX, Ordering, PACKET_BYTES_MAX, RING_BYTES, RUN_HEAD_BYTES};

/// Size of the consumer page.
const CONSUMER_PAGE_BYTES: usize = 4096;
/// Where in the consumer page `sleep` is: on another cache line than the head.
const SLEEP_AT: usize = 64;
/// Records begin at multiples of a cache line.
const RECORD_ALIGNMENT: u64 = 64;
const HEADER_BYTES: usize = 24;
/// A run begins here in its record: the data behind a base transport header (12 bytes) are at the start of a cache line.
/// String instructions are slow between some misaligned places.
const RUN_AT: usize = 52;
/// A header's first word is stored by itself; behind it is the address.
const WORD_BYTES: usize = 8;
const ADDRESS_BYTES: usize = HEADER_BYTES - WORD_BYTES;
/// The first record of a batch is staged if it is at most this long, and written when the batch is published: the
/// consumer polls the line on which the record begins, and would fetch it from a producer that has other work
/// meanwhile.
const STAGE_BYTES: usize = 256;
/// The data of a run of packets that has one record, in bytes at most.
pub const RUN_BYTES_MAX: u64 = 8 << 10;
const RUN_RECORD_BYTES_MAX: usize = RUN_BYTES_MAX as usize + HEADERS_BYTES_MAX;
/// In place of a packet's length: the next record is at the ring's start.
const SKIP: u64 = LEN_MASK;
/// In place of a record's first word: there is no record yet.
const NOTHING: u64 = 0;

/// The first word of a header: the packet's length, whether it carries an acknowledgement, the port, the traffic class,
/// and the PSN up to which it acknowledges.
const LEN_MASK: u64 = 0x7fff;
const CARRIES_ACK: u64 = 1 << 15;
const PORT_SHIFT: u32 = 16;
const TRAFFIC_CLASS_SHIFT: u32 = 32;
const ACKNOWLEDGED_SHIFT: u32 = 40;
/// The bits of the first word that belong to a packet's origin.
const ORIGIN_MASK: u64 = 0xff_ffff << PORT_SHIFT;
const PSN_MASK: u32 = 0xff_ffff;

/// Where a packet in a ring comes from, as its UDP datagram would say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The address (an IPv4 address mapped into IPv6).
    pub address: Ipv6Addr,
    /// The UDP port.
    pub port: u16,
    /// The traffic class of the packet's IP header.
    pub traffic_class: u8,
}

/// The producer's segment, before the consumer has answered.
#[derive(Debug)]
pub struct RingFile(Segment);

impl RingFile {
    /// An empty ring.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<RingFile> {
        Segment::create(c"terrace-ring", RING_BYTES as usize, Others::Read).map(RingFile)
    }

    /// To be sent to the consumer.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.0.file()
    }
}

/// The producer's side of a ring.
#[derive(Debug)]
pub struct TxRing {
    ring: Segment,
    consumer_page: Segment,
    state: Mutex<State>,
}

#[derive(Debug)]
#[repr(C, align(8))]
struct Stage {
    bytes: [u8; STAGE_BYTES],
    /// Length of the staged packet, if there is one.
    len: Option<usize>,
}

impl Default for Stage {
    fn default() -> Stage {
        Stage { bytes: [0; STAGE_BYTES], len: None }
    }
}

impl Stage {
    /// Copies what follows the first word, as far as `to` reaches. The stage was written just now, the headers in
    /// pieces of four bytes. A processor forwards to a load only what one store has stored, and otherwise waits until
    /// all of it is in the cache ([decision 41](../../../docs/decisions/0041-operations-wait-for-earlier-stores.md)):
    /// `memcpy` loads more at a time, and would wait.
    #[inline]
    fn copy_to(&self, to: &mut [u8]) {
        let (words, rest) = self.bytes[WORD_BYTES..WORD_BYTES + to.len()].as_chunks::<4>();
        let (to_words, to_rest) = to.as_chunks_mut::<4>();
        for (word, to) in words.iter().zip(to_words) {
            // Volatile: compilers make wider loads of these.
            // SAFETY: four bytes of `bytes`, aligned as the stage is, with a multiple of four before them.
            *to = unsafe { std::ptr::from_ref(word).cast::<u32>().read_volatile() }.to_ne_bytes();
        }
        to_rest.copy_from_slice(rest);
    }
}

#[derive(Debug, Default)]
struct State {
    /// The end of the last record, and its start (with what is skipped before it).
    tail: u64,
    last_start: u64,
    /// Where in the ring the last record's header is, unless the record was cancelled.
    last_at: Option<u64>,
    /// The word that publishes the batch, once it is stored at the batch's start.
    opening: u64,
    /// The consumer's head when it was last read.
    head: u64,
    /// The value of `sleep` for which the doorbell was rung last.
    rung: u64,
    /// The first record, until it is in the ring: without its first word, which is `opening`.
    stage: Stage,
}

impl TxRing {
    /// A ring whose consumer has sent the descriptor of [`RxRing::consumer_page`].
    ///
    /// # Errors
    /// `InvalidData` when it is something else; otherwise the system's.
    pub fn new(ring: RingFile, consumer_page: OwnedFd) -> io::Result<TxRing> {
        let consumer_page = Segment::open(consumer_page, CONSUMER_PAGE_BYTES, false)?;
        Ok(TxRing { ring: ring.0, consumer_page, state: Mutex::default() })
    }

    /// Locks the ring to write a batch of packets.
    #[inline]
    pub fn write(&self) -> Writer<'_> {
        let state = self.state.lock();
        Writer { tx_ring: self, start: state.tail, state }
    }
}

/// Writes a batch of packets. [`Writer::publish`] makes them visible; otherwise they are cancelled.
#[derive(Debug)]
pub struct Writer<'a> {
    tx_ring: &'a TxRing,
    state: MutexGuard<'a, State>,
    start: u64,
}

impl Writer<'_> {
    /// Space for a packet of `len` bytes, which the caller must write; `None` if the ring is full or the packet is too
    /// long.
    #[inline(always)]
    pub fn push(&mut self, from: &Origin, len: usize) -> Option<&mut [u8]> {
        let record = record_bytes(len)?;
        let at = self.state.tail % RING_BYTES;
        let skipped = if at + record > RING_BYTES { RING_BYTES - at } else { 0 };
        // The 0 behind the record needs space, too.
        if !self.has_room(skipped + record + RECORD_ALIGNMENT) {
            return None;
        }
        self.write_stage();
        let is_first = self.is_empty();
        let numbers = len as u64
            | u64::from(from.port) << PORT_SHIFT
            | u64::from(from.traffic_class) << TRAFFIC_CLASS_SHIFT;
        if skipped > 0 {
            self.open(at, SKIP, is_first);
        }
        let is_opening = is_first && skipped == 0;
        let at = if skipped > 0 { 0 } else { at };
        self.open(at, numbers, is_opening);
        self.state.last_start = self.state.tail;
        self.state.last_at = Some(at);
        self.state.tail += skipped + record;
        if is_opening && HEADER_BYTES + len <= STAGE_BYTES.min(PACKET_BYTES_MAX) {
            // All of these lines are needed when the record is published. They have been in the consumer's cache since
            // the last lap, and the consumer polls the first one: without a prefetch they would be fetched one after
            // the other.
            for line in (0..=record / RECORD_ALIGNMENT).rev() {
                self.tx_ring.ring.prefetch_to_write((at + line * RECORD_ALIGNMENT) as usize);
            }
            let stage = &mut self.state.stage;
            stage.len = Some(len);
            stage.bytes[WORD_BYTES..HEADER_BYTES].copy_from_slice(&from.address.octets());
            return Some(&mut stage.bytes[HEADER_BYTES..HEADER_BYTES + len]);
        }
        self.end_at(at + record);
        // SAFETY: within our own mapping, which the consumer cannot write to, and where the consumer first checks the
        // word that is not stored yet; the borrow is of the only writer, so no other thread of this process writes
        // there, or still has an earlier slice.
        let rest = unsafe { &mut *rest_of_record(&self.tx_ring.ring, at, len) };
        rest[..ADDRESS_BYTES].copy_from_slice(&from.address.octets());
        Some(&mut rest[packet_at(len) - WORD_BYTES..])
    }

    /// Stores the 0 that says that there is no record there.
    #[inline]
    fn end_at(&self, at: u64) {
        header(&self.tx_ring.ring, at % RING_BYTES)[0].store(NOTHING, Ordering::Relaxed);
    }

    /// Copies the staged record into the ring, if there is one.
    #[inline(always)]
    fn write_stage(&mut self) {
        let Some(len) = self.state.stage.len.take() else { return };
        self.end_at(self.state.tail);
        let at = self.start % RING_BYTES;
        // SAFETY: as in `push`.
        let rest = unsafe { &mut *rest_of_record(&self.tx_ring.ring, at, len) };
        self.state.stage.copy_to(rest);
    }

    /// Keeps the batch's opening word, or stores the first word of a later header at once: the consumer does not see
    /// that before the opening word.
    #[inline]
    fn open(&mut self, at: u64, word: u64, is_opening: bool) {
        match is_opening {
            true => self.state.opening = word,
            false => header(&self.tx_ring.ring, at)[0].store(word, Ordering::Relaxed),
        }
    }

    /// Cancels the last packet.
    pub fn cancel(&mut self) {
        self.state.tail = self.state.last_start;
        self.state.last_at = None;
        if self.state.stage.len.take().is_none() {
            self.end_at(self.state.tail);
        }
    }

    /// Lets the last packet carry an acknowledgement of everything up to a PSN, of which the lower 24 bits count. False
    /// if nothing was written yet, or the last packet was cancelled, or carries an acknowledgement already.
    #[inline]
    pub fn carry_ack(&mut self, psn: u32) -> bool {
        let Some(at) = self.state.last_at.filter(|_| !self.is_empty()) else { return false };
        let is_opening = at == self.start % RING_BYTES;
        let numbers = match is_opening {
            true => self.state.opening,
            false => header(&self.tx_ring.ring, at)[0].load(Ordering::Relaxed),
        };
        if numbers & CARRIES_ACK != 0 {
            return false;
        }
        let acknowledged = u64::from(psn & PSN_MASK) << ACKNOWLEDGED_SHIFT;
        self.open(at, numbers | CARRIES_ACK | acknowledged, is_opening);
        true
    }

    /// Whether nothing was written since the last [`Writer::publish`].
    #[inline]
    fn is_empty(&self) -> bool {
        self.unpublished_bytes() == 0
    }

    /// Bytes of the ring that were written since the last [`Writer::publish`].
    #[inline]
    pub fn unpublished_bytes(&self) -> u64 {
        self.state.tail - self.start
    }

    /// Makes the batch visible to the consumer. True if the consumer sleeps and the caller has to ring its doorbell.
    #[inline(always)]
    pub fn publish(&mut self) -> bool {
        if self.is_empty() {
            return false;
        }
        self.write_stage();
        let first = &header(&self.tx_ring.ring, self.start % RING_BYTES)[0];
        self.start = self.state.tail;
        let sleep = &self.tx_ring.consumer_page.quads(SLEEP_AT, 1)[0];
        let sleep = handshake::publish(first, self.state.opening, sleep);
        let is_new = sleep % 2 == 1 && sleep != self.state.rung;
        if is_new {
            self.state.rung = sleep;
        }
        is_new
    }

    fn has_room(&mut self, wanted: u64) -> bool {
        let fits = |state: &State| state.tail.wrapping_sub(state.head).saturating_add(wanted) <= RING_BYTES;
        if fits(&self.state) {
            return true;
        }
        // Acquire: the consumer has finished reading up to there. A head that makes no sense leaves no space.
        self.state.head = self.tx_ring.consumer_page.quads(0, 1)[0].load(Ordering::Acquire);
        fits(&self.state)
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.state.tail = self.start;
        self.state.stage.len = None;
    }
}

/// The consumer's side of a ring.
#[derive(Debug)]
pub struct RxRing {
    ring: Segment,
    consumer_page: Segment,
    head: u64,
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

/// The origin that a record's header gives.
#[cold]
fn origin_of([numbers, high, low]: [u64; 3]) -> Origin {
    // The words hold the address's bytes as they are on the wire.
    let bits = u128::from(u64::from_be(high)) << 64 | u128::from(u64::from_be(low));
    let address = Ipv6Addr::from_bits(bits);
    let (port, traffic_class) = ((numbers >> PORT_SHIFT) as u16, (numbers >> TRAFFIC_CLASS_SHIFT) as u8);
    Origin { address, port, traffic_class }
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

/// The space that a packet takes in the ring; `None` if it is too long.
#[inline]
fn record_bytes(len: usize) -> Option<u64> {
    let record = (packet_at(len) + len) as u64;
    (len <= RUN_RECORD_BYTES_MAX).then(|| record.next_multiple_of(RECORD_ALIGNMENT))
}

/// Where in a record a packet of this length begins. A branch, which the processor predicts: if the place were computed
/// from the length, the packet's second line would be fetched only when the first one, with the length, has arrived.
#[inline(always)]
fn packet_at(len: usize) -> usize {
    if len <= PACKET_BYTES_MAX { HEADER_BYTES } else { run_at() }
}

#[cold]
#[inline(never)]
fn run_at() -> usize {
    RUN_AT
}

/// A record without its first word. Only the producer may write there, and the consumer does not read it before the
/// first word is stored.
#[inline]
fn rest_of_record(ring: &Segment, at: u64, len: usize) -> *mut [u8] {
    let len = packet_at(len) - WORD_BYTES + len;
    std::ptr::slice_from_raw_parts_mut(ring.bytes_at(at as usize + WORD_BYTES, len) as *mut u8, len)
}

#[inline]
fn header(ring: &Segment, at: u64) -> &[AtomicU64] {
    ring.quads(at as usize, HEADER_BYTES / WORD_BYTES)
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};
    use terrace_hostmem::CopySource;

    use super::*;

    const FROM: Origin =
        Origin { address: Ipv6Addr::new(1, 2, 3, 4, 5, 6, 7, 8), port: 4799, traffic_class: 7 };

    fn pair() -> (TxRing, RxRing) {
        let ring = RingFile::new().expect("made");
        let rx_ring = RxRing::new(ring.file().try_clone_to_owned().expect("a descriptor")).expect("mapped");
        let consumer_page = rx_ring.consumer_page().try_clone_to_owned().expect("a descriptor");
        (TxRing::new(ring, consumer_page).expect("mapped"), rx_ring)
    }

    fn send(tx_ring: &TxRing, bytes: &[u8]) -> Option<bool> {
        let mut writer = tx_ring.write();
        writer.push(&FROM, bytes.len())?.copy_from_slice(bytes);
        Some(writer.publish())
    }

    fn received(rx_ring: &mut RxRing) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        rx_ring.read(usize::MAX, |packet| {
            assert_eq!(*packet.origin, FROM);
            let bytes = match packet.run {
                None => packet.bytes.to_vec(),
                Some(run) => run.with_bytes(<[u8]>::to_vec).expect("mapped"),
            };
            assert!(bytes.starts_with(packet.bytes));
            all.push(bytes);
        });
        all
    }

    #[test]
    fn a_packet_carries_one_acknowledgement() {
        let (tx_ring, mut rx_ring) = pair();
        let mut writer = tx_ring.write();
        assert!(!writer.carry_ack(1), "there is no packet");
        writer.push(&FROM, 12).expect("room").fill(1);
        writer.push(&FROM, 16).expect("room").fill(2);
        assert_eq!(writer.unpublished_bytes(), 2 * RECORD_ALIGNMENT);
        assert!(writer.carry_ack(0x8100_0203));
        assert!(!writer.carry_ack(4));
        writer.publish();
        assert_eq!(writer.unpublished_bytes(), 0);
        assert!(!writer.carry_ack(5), "it may have been read");
        writer.push(&FROM, 24).expect("room").fill(4);
        writer.push(&FROM, 28).expect("room").fill(5);
        writer.cancel();
        assert!(!writer.carry_ack(6), "it is not there any more");
        writer.publish();
        writer.push(&FROM, 20).expect("room").fill(3);
        writer.publish();
        drop(writer);
        let mut all = Vec::new();
        rx_ring.read(9, |packet| {
            assert_eq!(*packet.origin, FROM);
            all.push((packet.acknowledged, packet.bytes.len()));
        });
        assert_eq!(all, [(None, 12), (Some(0x00_0203), 16), (None, 24), (None, 20)]);
    }

    #[test]
    fn each_packet_says_where_it_comes_from() {
        let (tx_ring, mut rx_ring) = pair();
        let nowhere = Origin { address: Ipv6Addr::UNSPECIFIED, port: 0, traffic_class: 0 };
        let others = [
            Origin { port: 4798, ..FROM },
            Origin { traffic_class: 3, ..FROM },
            Origin { address: Ipv6Addr::new(1, 2, 3, 9, 5, 6, 7, 8), ..FROM },
            Origin { address: Ipv6Addr::new(1, 2, 3, 4, 5, 6, 7, 9), ..FROM },
        ];
        let sent: Vec<_> =
            [nowhere].into_iter().chain(others.into_iter().flat_map(|other| [FROM, other, other])).collect();
        for from in &sent {
            let mut writer = tx_ring.write();
            writer.push(from, 16).expect("room").fill(1);
            // The acknowledgement in the same word is no part of the origin.
            writer.carry_ack(0xff_ffff);
            writer.publish();
        }
        let mut got = Vec::new();
        rx_ring.read(usize::MAX, |packet| got.push(*packet.origin));
        assert_eq!(got, sent);
    }

    #[test]
    fn a_record_of_no_packet_is_one() {
        let (tx_ring, mut rx_ring) = pair();
        assert_eq!(send(&tx_ring, &[]), Some(false));
        assert_eq!(send(&tx_ring, &[1; 12]), Some(false));
        assert_eq!(received(&mut rx_ring), [vec![], vec![1; 12]]);
    }

    #[test]
    fn packets_arrive_in_order_round_and_round() {
        let (tx_ring, mut rx_ring) = pair();
        let mut rng = StdRng::seed_from_u64(5);
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for round in 0..20_000u32 {
            let len = rng.random_range(12..PACKET_BYTES_MAX);
            let packet = vec![round as u8; len];
            if send(&tx_ring, &packet).is_some() {
                sent.push(packet);
            }
            if rng.random_ratio(1, 60) {
                got.extend(received(&mut rx_ring));
            }
            if got.len() == sent.len() {
                assert_eq!(got, sent);
                got.clear();
                sent.clear();
            }
        }
        got.extend(received(&mut rx_ring));
        assert_eq!(got, sent);
        assert!(!rx_ring.is_broken());
    }

    #[test]
    fn a_full_ring_takes_nothing_until_something_was_read() {
        let (tx_ring, mut rx_ring) = pair();
        let count = (0..).take_while(|_| send(&tx_ring, &[1; 4096]).is_some()).count();
        assert_eq!(count as u64, RING_BYTES / (4096 + 64));
        assert_eq!(rx_ring.read(1, |_| ()), 1);
        assert_eq!(send(&tx_ring, &[1; 4096]), None, "there is no room for the word behind it");
        assert_eq!(rx_ring.read(1, |_| ()), 1);
        assert_eq!(send(&tx_ring, &[1; 4096]), Some(false));
        assert_eq!(send(&tx_ring, &[1; 4096]), None);
        assert!(tx_ring.write().push(&FROM, PACKET_BYTES_MAX + 1).is_none());
    }

    #[test]
    fn what_is_not_published_was_never_there() {
        let (tx_ring, mut rx_ring) = pair();
        {
            let mut writer = tx_ring.write();
            writer.push(&FROM, 100).expect("room").fill(1);
            writer.push(&FROM, 100).expect("room").fill(2);
            writer.cancel();
            assert!(!writer.is_empty());
            assert!(!writer.publish());
        }
        {
            let mut writer = tx_ring.write();
            writer.push(&FROM, 100).expect("room").fill(3);
        }
        assert_eq!(received(&mut rx_ring), [vec![1; 100]]);
        assert!(rx_ring.is_empty());
    }

    #[test]
    fn the_bell_is_rung_once_for_each_sleep() {
        let (tx_ring, mut rx_ring) = pair();
        assert_eq!(send(&tx_ring, &[0; 12]), Some(false));
        rx_ring.fall_asleep();
        assert!(!rx_ring.is_empty(), "so it does not sleep");
        assert_eq!(send(&tx_ring, &[0; 12]), Some(true));
        assert_eq!(send(&tx_ring, &[0; 12]), Some(false));
        rx_ring.wake_up();
        assert_eq!(received(&mut rx_ring).len(), 3);
        assert_eq!(send(&tx_ring, &[0; 12]), Some(false));
        rx_ring.fall_asleep();
        rx_ring.fall_asleep();
        assert_eq!(send(&tx_ring, &[0; 12]), Some(true));
    }

    #[test]
    fn a_writer_that_writes_nonsense_is_not_read_any_more() {
        let too_long = RUN_RECORD_BYTES_MAX as u64 + 1;
        for (records_before, numbers) in [(0, LEN_MASK - 1), (0, too_long), (0, SKIP), (125, 4096 + 200)] {
            let (tx_ring, mut rx_ring) = pair();
            for _ in 0..records_before {
                send(&tx_ring, &[1; 4096]).expect("room");
            }
            assert_eq!(rx_ring.read(usize::MAX, |_| ()), records_before);
            header(&tx_ring.ring, rx_ring.head)[0].store(numbers, Ordering::Release);
            assert_eq!(rx_ring.read(10, |_| ()), 0);
            assert!(rx_ring.is_broken() && rx_ring.is_empty(), "{records_before} {numbers}");
        }
    }

    #[test]
    fn a_writer_that_has_gone_without_an_end_is_read_for_one_lap() {
        let (tx_ring, mut rx_ring) = pair();
        for at in (0..RING_BYTES).step_by(RECORD_ALIGNMENT as usize) {
            header(&tx_ring.ring, at)[0].store(12, Ordering::Release);
        }
        assert_eq!(rx_ring.read(100, |_| ()), 100);
        rx_ring.end();
        rx_ring.end();
        assert_eq!(rx_ring.read(usize::MAX, |_| ()) as u64, RING_BYTES / RECORD_ALIGNMENT);
        assert!(rx_ring.is_empty() && !rx_ring.is_broken());
    }

    /// What an earlier lap left in the ring is no record, whatever it looks like.
    #[test]
    fn what_looks_like_a_record_is_none_until_it_is_written() {
        let (tx_ring, mut rx_ring) = pair();
        let mut rng = StdRng::seed_from_u64(6);
        let header = (12u64 | u64::from(FROM.port) << PORT_SHIFT).to_ne_bytes();
        for _ in 0..20_000 {
            let packet = header.repeat(rng.random_range(2..60));
            let mut writer = tx_ring.write();
            for _ in 0..rng.random_range(1..4) {
                writer.push(&FROM, packet.len()).expect("room").copy_from_slice(&packet);
                if rng.random_ratio(1, 3) {
                    writer.push(&FROM, packet.len()).expect("room").copy_from_slice(&packet);
                    writer.cancel();
                }
            }
            if rng.random_ratio(1, 4) {
                // Cancelled.
                drop(writer);
                assert!(rx_ring.is_empty());
                continue;
            }
            writer.publish();
            rx_ring.read(usize::MAX, |read| assert_eq!(read.bytes, packet));
            assert!(rx_ring.is_empty() && !rx_ring.is_broken());
        }
    }

    #[test]
    fn a_reader_whose_head_makes_no_sense_only_gets_nothing() {
        let (tx_ring, rx_ring) = pair();
        rx_ring.consumer_page.quads(0, 1)[0].store(u64::MAX / 2, Ordering::Release);
        let count = (0..1000).take_while(|_| send(&tx_ring, &[1; 4096]).is_some()).count();
        assert!(count as u64 <= RING_BYTES / 4096);
    }
}
