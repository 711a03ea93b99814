//! Received packets: from the network and from rings, to their queue pairs.

use std::cell::OnceCell;
use std::sync::atomic::Ordering;

use terrace_fabric::RxBatch;
use terrace_hostmem::{CopySource, SharedBytes};
use terrace_shm::RxPacket;
use terrace_wire::{Packet, Psn, Reth, RxMeta};

use super::add_to_work_list;
use crate::ack::{AckEvent, AckState};
use crate::clock::LazyTimestamp;
use crate::cq::poll::CompletionBypass;
use crate::device::Device;
use crate::local::PeerRxSet;
use crate::management::is_management;
use crate::qp::{QpCore, QueuePair, RxPath};
use crate::table::TableReader;
use crate::tx::{AckList, WorkList};

/// Receive calls at most before a ring is used or a timer expires. Each call brings up to 32 datagrams.
const RECEIVES_TO_CATCH_UP: u32 = 64;

/// After so many passes everything is read that was in a ring at the start: a ring holds 8192 of the shortest packets,
/// and a pass reads 64.
const PASSES_PER_RING: u32 = 128;

/// Packets from the network that are kept at most until the rings are read.
const EARLY_MAX: usize = 1024;

/// The default partition, and the mask that leaves the membership bit out (IBTA volume 1, 10.9.3).
const DEFAULT_PARTITION: u16 = 0x7fff;

impl Device {
    /// Receives from the network and returns the number of datagrams.
    pub(super) fn receive(&self, rx: &mut RxBatch) -> usize {
        let received = self.port.receive(rx);
        self.engine.note_burst(received);
        received
    }

    pub(super) fn handle_burst<'a>(&'a self, rx: &mut RxBatch, pass: &mut ReceivePass<'a, '_>) {
        while let Some(packet) = rx.next() {
            if let Some(reth) = Reth::of_unverified(packet.following) {
                self.memory.prefetch_announced(reth.rkey, reth.va);
            }
            let (meta, bytes) = (&packet.meta, packet.bytes);
            if meta.destination.is_multicast() {
                self.deliver_to_group(meta, bytes);
                continue;
            }
            // A flooding peer may not fill the memory: beyond the limit its packets are handled out of order.
            let is_next = pass.early.len() >= EARLY_MAX;
            let packet = Arrived::from_network(meta, bytes, is_next);
            if self.handle_packet(packet, pass) == Arrival::TooEarly {
                pass.early.push(EarlyPacket { meta: *meta, bytes: bytes.into() });
            }
        }
    }

    pub(super) fn handle_rx_rings<'a>(
        &'a self,
        peer_rx: &mut PeerRxSet,
        rx: &mut RxBatch,
        pass: &mut ReceivePass<'a, '_>,
    ) {
        self.read_peer_rx(peer_rx, |meta, RxPacket { acknowledged, bytes, run, .. }| {
            let (ack, run) = (acknowledged.map(Psn::new), run.as_ref());
            let mut packet = Arrived { meta, ack, bytes, run, path: RxPath::Ring, is_next: false };
            while self.handle_packet(packet, pass) == Arrival::TooEarly {
                self.catch_up_with_network(rx, pass);
                packet.is_next = true;
            }
        });
    }

    /// Handles packets from the network for queue pairs whose previous packets came through rings. The packets in the
    /// rings come first: their peers have written them before.
    #[cold]
    pub(super) fn handle_early<'a>(
        &'a self,
        peer_rx: &mut PeerRxSet,
        rx: &mut RxBatch,
        pass: &mut ReceivePass<'a, '_>,
    ) {
        for _ in 0..PASSES_PER_RING {
            if !peer_rx.poll(true, false).have_packets {
                break;
            }
            self.handle_rx_rings(peer_rx, rx, pass);
        }
        for EarlyPacket { meta, bytes } in std::mem::take(&mut pass.early) {
            self.handle_packet(Arrived::from_network(&meta, &bytes, true), pass);
        }
    }

    /// Handles everything that has arrived over the network: before timers take it for lost, or before a queue pair's
    /// packets come through a ring, because unreliable services take overtaken packets for lost.
    #[cold]
    pub(super) fn catch_up_with_network<'a>(&'a self, rx: &mut RxBatch, pass: &mut ReceivePass<'a, '_>) {
        for _ in 0..RECEIVES_TO_CATCH_UP {
            if self.receive(rx) == 0 {
                return;
            }
            self.handle_burst(rx, pass);
        }
    }

    /// No bytes do harm: a bad packet only increments a counter.
    fn handle_packet<'a>(&'a self, arrived: Arrived<'_>, pass: &mut ReceivePass<'a, '_>) -> Arrival {
        let Arrived { meta, bytes, .. } = arrived;
        let mut packet = Packet::default();
        if !self.read(meta, bytes, &mut packet) {
            return Arrival::Done;
        }
        let arrival = self.deliver(arrived, &packet, pass);
        if arrival == Arrival::Nowhere {
            // Two devices may forward to each other: with its own table locked, each would wait for the other's, behind
            // threads that wait to write.
            drop(pass.table.take());
            // A run is for this process: its sender has found the queue pair's process.
            if arrived.run.is_some() || !self.forward(meta, &packet, bytes) {
                self.counters.unknown_qp.fetch_add(1, Ordering::Relaxed);
            }
        }
        arrival
    }

    /// Parses a packet. False if it is malformed or of another partition.
    #[inline]
    pub(crate) fn read<'a>(&self, meta: &RxMeta, bytes: &'a [u8], packet: &mut Packet<'a>) -> bool {
        if let Err(error) = packet.read(bytes) {
            self.counters.malformed.fetch_add(1, Ordering::Relaxed);
            tracing::trace!(%error, source = %meta.source, "malformed packet dropped");
            return false;
        }
        let is_ours = packet.bth.pkey & DEFAULT_PARTITION == DEFAULT_PARTITION;
        if !is_ours {
            self.counters.wrong_partition.fetch_add(1, Ordering::Relaxed);
        }
        is_ours
    }

    /// Delivers a packet to its queue pair.
    fn deliver<'a>(
        &'a self,
        arrived: Arrived<'_>,
        packet: &Packet<'_>,
        pass: &mut ReceivePass<'a, '_>,
    ) -> Arrival {
        let Arrived { meta, ack, run, path, is_next, .. } = arrived;
        if is_management(packet.bth.qpn) && !self.is_for_other_instance(packet.bth.qpn) {
            self.management.take(pass.now.get(), self.port.instance(), meta, packet);
            return Arrival::Done;
        }
        let known = pass.acks.find(packet.bth.qpn);
        let found = known.or_else(|| pass.table.get_or_init(|| self.table.read()).get(packet.bth.qpn));
        let Some(qp) = found else { return Arrival::Nowhere };
        // Packets of other senders than the peer are dropped before they take the lock or change `last_path`.
        if !qp.source.admits(meta.source) {
            return Arrival::Done;
        }
        let mut core = qp.lock();
        if core.nic.dead {
            return Arrival::Nowhere;
        }
        if core.nic.last_path != path && !is_next {
            return Arrival::TooEarly;
        }
        core.nic.last_path = path;
        match run {
            None => {
                let (transport, host) = core.parts(qp, pass.bypass);
                transport.handle_packet(|| pass.now.get(), meta, packet, ack, &host);
            }
            Some(run) => handle_run(qp, &mut core, arrived, run, packet, pass),
        }
        self.publish_state(qp, &mut core);
        self.arm(qp, &core);
        if qp.schedule.ack.state() == AckState::Urgent && path == RxPath::Ring && core.qp.holds_ack() {
            // The program is waking, and may answer before this pass is over: through another queue pair, if this one is
            // an XRC target. Then a peer that sleeps would find the answer's completion before its message's.
            self.fill_by_ring(qp, &mut core, pass.now);
        }
        if core.qp.wants_only_to_acknowledge() && !core.nic.is_on_work_list {
            qp.schedule.ack.note(AckEvent::Deferred);
            pass.has_deferred = true;
            if !qp.schedule.is_on_ack_list.load(Ordering::Relaxed) {
                qp.schedule.is_on_ack_list.store(true, Ordering::Relaxed);
                let added = qp.clone();
                drop(core);
                pass.acks.add(added);
            }
        } else if core.qp.wants_transmit() {
            add_to_work_list(qp, &mut core, pass.work);
        }
        Arrival::Done
    }
}

/// The state of one receive pass.
pub(super) struct ReceivePass<'a, 'b> {
    pub(super) now: &'b LazyTimestamp<'b>,
    /// Queue pairs with deferred ACKs: most packets are for the first of them.
    pub(super) acks: &'b mut AckList<QueuePair>,
    /// Whether the pass has deferred an ACK.
    pub(super) has_deferred: bool,
    /// The table of all queue pairs, read on first use.
    pub(super) table: OnceCell<TableReader<'a, QueuePair>>,
    pub(super) work: &'b mut WorkList<QueuePair>,
    pub(super) bypass: Option<&'b CompletionBypass<'b>>,
    /// Packets from the network that are handled after those in rings.
    pub(super) early: Vec<EarlyPacket>,
}

/// A packet that is kept for [`Device::handle_early`].
pub(super) struct EarlyPacket {
    meta: RxMeta,
    bytes: Box<[u8]>,
}

/// A received packet.
#[derive(Clone, Copy)]
struct Arrived<'a> {
    meta: &'a RxMeta,
    /// The PSN up to which a ring's entry acknowledges beside the packet itself.
    ack: Option<Psn>,
    /// All of it, or the first bytes of a run.
    bytes: &'a [u8],
    /// All of a run.
    run: Option<&'a SharedBytes<'a>>,
    path: RxPath,
    /// Whether everything that had arrived by the other path was handled before.
    is_next: bool,
}

impl<'a> Arrived<'a> {
    fn from_network(meta: &'a RxMeta, bytes: &'a [u8], is_next: bool) -> Arrived<'a> {
        Arrived { meta, ack: None, bytes, run: None, path: RxPath::Network, is_next }
    }
}

/// The outcome of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Done,
    /// There is no such queue pair.
    Nowhere,
    /// It came by another path than the packet before it and was not handled: packets may still wait on the previous
    /// path.
    TooEarly,
}

/// Handles a run, whose data are still in the ring.
#[inline(never)]
fn handle_run(
    qp: &QueuePair,
    core: &mut QpCore,
    Arrived { meta, ack, .. }: Arrived<'_>,
    run: &SharedBytes<'_>,
    packet: &Packet<'_>,
    pass: &ReceivePass<'_, '_>,
) {
    let data_at = packet.bth.opcode.info().header_len;
    let len = run.bytes().saturating_sub(data_at + usize::from(packet.bth.pad));
    let (transport, host) = core.parts(qp, pass.bypass);
    let host = host.with_run(run.part(data_at, len));
    transport.handle_run(|| pass.now.get(), meta, packet, len as u64, ack, &host);
}
