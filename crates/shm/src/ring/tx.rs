//! The producer's side of a ring.

use std::io;
use std::os::fd::OwnedFd;

use terrace_sync::{Mutex, MutexGuard};

use super::record::*;
use super::{CONSUMER_PAGE_BYTES, RingFile, SLEEP_AT};
use crate::handshake;
use crate::segment::Segment;
use crate::sync::{Ordering, PACKET_BYTES_MAX, RING_BYTES};

/// The first record of a batch is staged if it is at most this long, and written when the batch is published: the
/// consumer polls the line on which the record begins, and would fetch it from a producer that has other work
/// meanwhile.
const STAGE_BYTES: usize = 256;

/// The producer's side of a ring.
#[derive(Debug)]
pub struct TxRing {
    pub(super) ring: Segment,
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
    pub(super) fn is_empty(&self) -> bool {
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
