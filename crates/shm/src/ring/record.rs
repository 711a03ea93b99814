//! Records: where a packet is in its record, and the words of a record's header.

use std::net::Ipv6Addr;

use crate::segment::Segment;
use crate::sync::{AtomicU64, HEADERS_BYTES_MAX, PACKET_BYTES_MAX};

/// Records begin at multiples of a cache line.
pub(super) const RECORD_ALIGNMENT: u64 = 64;
pub(super) const HEADER_BYTES: usize = 24;
/// A run begins here in its record: the data behind a base transport header (12 bytes) are at the start of a cache line.
/// String instructions are slow between some misaligned places.
pub(super) const RUN_AT: usize = 52;
/// A header's first word is stored by itself; behind it is the address.
pub(super) const WORD_BYTES: usize = 8;
pub(super) const ADDRESS_BYTES: usize = HEADER_BYTES - WORD_BYTES;
/// The data of a run of packets that has one record, in bytes at most.
pub const RUN_BYTES_MAX: u64 = 8 << 10;
pub(super) const RUN_RECORD_BYTES_MAX: usize = RUN_BYTES_MAX as usize + HEADERS_BYTES_MAX;
/// In place of a packet's length: the next record is at the ring's start.
pub(super) const SKIP: u64 = LEN_MASK;
/// In place of a record's first word: there is no record yet.
pub(super) const NOTHING: u64 = 0;

/// The first word of a header: the packet's length, whether it carries an acknowledgement, the port, the traffic class,
/// and the PSN up to which it acknowledges.
pub(super) const LEN_MASK: u64 = 0x7fff;
pub(super) const CARRIES_ACK: u64 = 1 << 15;
pub(super) const PORT_SHIFT: u32 = 16;
pub(super) const TRAFFIC_CLASS_SHIFT: u32 = 32;
pub(super) const ACKNOWLEDGED_SHIFT: u32 = 40;
/// The bits of the first word that belong to a packet's origin.
pub(super) const ORIGIN_MASK: u64 = 0xff_ffff << PORT_SHIFT;
pub(super) const PSN_MASK: u32 = 0xff_ffff;

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

/// The origin that a record's header gives.
#[cold]
pub(super) fn origin_of([numbers, high, low]: [u64; 3]) -> Origin {
    // The words hold the address's bytes as they are on the wire.
    let bits = u128::from(u64::from_be(high)) << 64 | u128::from(u64::from_be(low));
    let address = Ipv6Addr::from_bits(bits);
    let (port, traffic_class) = ((numbers >> PORT_SHIFT) as u16, (numbers >> TRAFFIC_CLASS_SHIFT) as u8);
    Origin { address, port, traffic_class }
}

/// The space that a packet takes in the ring; `None` if it is too long.
#[inline]
pub(super) fn record_bytes(len: usize) -> Option<u64> {
    let record = (packet_at(len) + len) as u64;
    (len <= RUN_RECORD_BYTES_MAX).then(|| record.next_multiple_of(RECORD_ALIGNMENT))
}

/// Where in a record a packet of this length begins. A branch, which the processor predicts: if the place were computed
/// from the length, the packet's second line would be fetched only when the first one, with the length, has arrived.
#[inline(always)]
pub(super) fn packet_at(len: usize) -> usize {
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
pub(super) fn rest_of_record(ring: &Segment, at: u64, len: usize) -> *mut [u8] {
    let len = packet_at(len) - WORD_BYTES + len;
    std::ptr::slice_from_raw_parts_mut(ring.bytes_at(at as usize + WORD_BYTES, len) as *mut u8, len)
}

#[inline]
pub(super) fn header(ring: &Segment, at: u64) -> &[AtomicU64] {
    ring.quads(at as usize, HEADER_BYTES / WORD_BYTES)
}
