//! Received packets.

use std::net::SocketAddr;
use std::sync::Arc;

use terrace_wire::icrc::{self, Flow, Verdict};
use terrace_wire::{ICRC_LEN, RxMeta};

use crate::counters::{PortCounters, add};

/// Buffer size for one datagram: the maximum of UDP, for a whole GRO run.
pub(crate) const DATAGRAM_BYTES_MAX: usize = 65_536;

/// A batch accepts no further datagram once it contains this many bytes. More bytes would be evicted from the
/// processor's second-level cache before they are read.
const FILL_BYTES: usize = 192 << 10;

/// Most datagrams in a batch.
const DATAGRAMS_MAX: usize = 64;

/// Datagrams start at multiples of a cache line.
const ALIGNMENT: usize = 64;

/// The shortest packet: a base transport header and an ICRC.
const PACKET_BYTES_MIN: usize = 12 + ICRC_LEN;

/// Received packets, as [`Port::receive`](crate::Port::receive) stored them: whole GRO runs in one buffer.
///
/// [`RxBatch::next`] splits the runs and checks each packet's ICRC, so that the bytes are still in the cache when the
/// transport reads them.
#[derive(Debug)]
pub struct RxBatch {
    buffer: Box<[u8]>,
    datagrams: Vec<Datagram>,
    /// The datagram and offset of the next packet.
    current: usize,
    offset: usize,
    /// The likely IPv4 identification of the next packet of this datagram.
    likely_ip_id: u16,
    counters: Option<Arc<PortCounters>>,
    /// Packets and bytes that are not yet added to the counters.
    good_packets: u64,
    good_bytes: u64,
}

/// A received datagram, or a run of datagrams that GRO merged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Datagram {
    pub meta: RxMeta,
    /// The local destination port.
    pub udp_port: u16,
    pub start: usize,
    pub len: usize,
    /// Length of each packet but the last.
    pub segment: usize,
}

/// A received packet without its ICRC, which was correct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxPacket<'a> {
    /// The packet's source and destination.
    pub meta: RxMeta,
    /// The bytes from the BTH to the end of the padding; at least 12.
    pub bytes: &'a [u8],
    /// What is behind it in the batch, unchecked: it begins with the next packet. Empty at the end.
    pub following: &'a [u8],
}

impl Default for RxBatch {
    fn default() -> RxBatch {
        RxBatch::new()
    }
}

impl RxBatch {
    /// An empty batch, whose buffer has its full size (256 KiB).
    pub fn new() -> RxBatch {
        RxBatch {
            // Zeros would be unmapped pages: the kernel would fault them in during a receive, and wait for another
            // thread that holds the lock of the address space.
            buffer: vec![0xff; FILL_BYTES + DATAGRAM_BYTES_MAX].into(),
            datagrams: Vec::with_capacity(DATAGRAMS_MAX),
            current: 0,
            offset: 0,
            likely_ip_id: 0,
            counters: None,
            good_packets: 0,
            good_bytes: 0,
        }
    }

    /// The next packet with a correct ICRC. Other packets are counted and skipped. `None` at the end of the batch.
    #[allow(clippy::should_implement_trait)] // The packet borrows from the batch, which an iterator's item cannot.
    pub fn next(&mut self) -> Option<RxPacket<'_>> {
        loop {
            let Some(datagram) = self.datagrams.get(self.current) else {
                self.flush_counts();
                return None;
            };
            let meta = datagram.meta;
            let start = datagram.start + self.offset;
            let len = datagram.segment.min(datagram.len - self.offset);
            let good = check(datagram, &self.buffer[start..start + len], self.likely_ip_id, &self.counters);
            self.step(len, good.unwrap_or(self.likely_ip_id));
            if good.is_some() {
                self.good_packets += 1;
                self.good_bytes += len as u64;
                let bytes = &self.buffer[start..start + len - ICRC_LEN];
                return Some(RxPacket { meta, bytes, following: self.following() });
            }
        }
    }

    /// What [`RxBatch::next`] has not looked at of the current datagram.
    fn following(&self) -> &[u8] {
        self.datagrams
            .get(self.current)
            .map_or(&[], |datagram| &self.buffer[datagram.start + self.offset..datagram.start + datagram.len])
    }

    /// Whether [`RxBatch::next`] has no more packets.
    pub fn is_empty(&self) -> bool {
        self.current >= self.datagrams.len()
    }

    /// Drops all packets.
    pub fn clear(&mut self) {
        self.flush_counts();
        self.datagrams.clear();
        self.current = 0;
        self.offset = 0;
        self.likely_ip_id = 0;
    }

    /// Advances past a packet of `len` bytes with this identification.
    fn step(&mut self, len: usize, ip_id: u16) {
        self.offset += len;
        self.likely_ip_id = ip_id.wrapping_add(1);
        let done = self.datagrams.get(self.current).is_none_or(|datagram| self.offset >= datagram.len);
        if done {
            self.current += 1;
            self.offset = 0;
            self.likely_ip_id = 0;
        }
    }

    /// Adds the good packets to the counters.
    fn flush_counts(&mut self) {
        if self.good_packets == 0 {
            return;
        }
        if let Some(counters) = &self.counters {
            add(&counters.rx.packets, self.good_packets);
            add(&counters.rx.bytes, self.good_bytes);
        }
        self.good_packets = 0;
        self.good_bytes = 0;
    }

    /// Drops the packets for which `keep` returns false, without checking or counting them, as if the network had lost
    /// them. Calls `keep` in the order of arrival.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&RxMeta) -> bool) {
        let mut kept: Vec<Datagram> = Vec::with_capacity(self.datagrams.len());
        for datagram in &self.datagrams[self.current.min(self.datagrams.len())..] {
            let mut is_adjacent = false;
            for offset in (0..datagram.len).step_by(datagram.segment) {
                let len = datagram.segment.min(datagram.len - offset);
                let is_kept = keep(&datagram.meta);
                match kept.last_mut() {
                    Some(last) if is_kept && is_adjacent => last.len += len,
                    _ if is_kept => kept.push(Datagram { start: datagram.start + offset, len, ..*datagram }),
                    _ => {}
                }
                is_adjacent = is_kept;
            }
        }
        self.flush_counts();
        self.datagrams = kept;
        (self.current, self.offset, self.likely_ip_id) = (0, 0, 0);
    }

    /// Starts a new burst of the port with these counters.
    pub(crate) fn begin(&mut self, counters: &Arc<PortCounters>) {
        self.clear();
        if !self.counters.as_ref().is_some_and(|held| Arc::ptr_eq(held, counters)) {
            self.counters = Some(Arc::clone(counters));
        }
    }

    /// The buffer for one more datagram of any size, or `None` if the batch is full.
    pub(crate) fn free_buffer(&mut self) -> Option<&mut [u8]> {
        let start = self.fill_start();
        if start >= FILL_BYTES || self.datagrams.len() >= DATAGRAMS_MAX {
            return None;
        }
        Some(&mut self.buffer[start..start + DATAGRAM_BYTES_MAX])
    }

    /// Commits the `len` bytes that were written to the buffer: packets of `segment` bytes each, of which the last may
    /// be shorter. Lengths include the ICRC.
    pub(crate) fn commit(&mut self, meta: RxMeta, udp_port: u16, len: usize, segment: usize) {
        let segment = if segment == 0 { len } else { segment };
        let start = self.fill_start();
        if len == 0 || start + len > self.buffer.len() {
            if let Some(counters) = &self.counters {
                add(&counters.rx.truncated, 1);
            }
            return;
        }
        self.datagrams.push(Datagram { meta, udp_port, start, len, segment });
    }

    /// The packets that `next` has not returned yet, with their unchecked ICRC, and the likely identification of each.
    pub(crate) fn unchecked(&self) -> impl Iterator<Item = (&Datagram, &[u8], u16)> {
        self.datagrams[self.current.min(self.datagrams.len())..].iter().flat_map(|datagram| {
            let bytes = &self.buffer[datagram.start..datagram.start + datagram.len];
            bytes.chunks(datagram.segment).zip(0u16..).map(move |(packet, index)| (datagram, packet, index))
        })
    }

    fn fill_start(&self) -> usize {
        self.datagrams.last().map_or(0, |last| (last.start + last.len).next_multiple_of(ALIGNMENT))
    }
}

impl Datagram {
    pub fn flow(&self) -> Flow {
        Flow { source: self.meta.source, destination: SocketAddr::new(self.meta.destination, self.udp_port) }
    }
}

/// The identification of a packet with a correct ICRC. Counts the packet and returns `None` if the ICRC is wrong.
fn check(
    datagram: &Datagram,
    packet: &[u8],
    likely_ip_id: u16,
    counters: &Option<Arc<PortCounters>>,
) -> Option<u16> {
    let too_short = packet.len() < PACKET_BYTES_MIN;
    if !too_short && let Verdict::Good { ip_id } = icrc::verify(&datagram.flow(), packet, likely_ip_id) {
        return Some(ip_id);
    }
    if let Some(counters) = counters {
        add(if too_short { &counters.rx.truncated } else { &counters.rx.bad_icrc }, 1);
    }
    None
}
