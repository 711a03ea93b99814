//! Filling TX rings from queue pairs, and reading the RX rings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_shm::{RxPacket, RxRing};
use terrace_sync::SpinBudget;
use terrace_transport::{AckPolicy, Qp, Sink, Time, Transmit, ack_timeout_ns};
use terrace_wire::RxMeta;

use super::{
    FULL_RETRY_NS, Filled, LostSink, PeerRx, PeerRxSet, PeerTx, RingSink, STALLED_NS, STALLED_RETRY_NS,
};
use crate::clock::LazyTimestamp;
use crate::device::Device;
use crate::host::QpHost;

/// The clock for the deadlines of packets in a ring, which loses none: a late coarse clock costs one retransmission.
/// Without retransmissions the exact time is read.
#[inline]
pub(crate) fn deadline_clock<'a>(transport: &Qp, now: &'a LazyTimestamp<'_>) -> impl Fn() -> Time + use<'a> {
    let retransmits = transport.attr().retry_cnt > 0;
    move || if retransmits { now.coarse() } else { now.get() }
}

/// Whether a reliable queue pair waits for ACKs without a limit.
fn waits_for_ever(transport: &Qp) -> bool {
    let is_reliable = transport.config().qp_type.is_reliable();
    is_reliable && ack_timeout_ns(transport.attr().timeout).is_none()
}

impl Device {
    /// Whether this ring may be used.
    #[inline]
    pub(crate) fn may_use(&self, peer_tx: &PeerTx) -> bool {
        self.local.is_on() && !peer_tx.is_gone()
    }

    /// A ring as the transport's sink, locked.
    #[inline]
    pub(crate) fn ring_sink<'a>(&'a self, peer_tx: &'a PeerTx) -> RingSink<'a> {
        let (gids, port) = (self.port.gids(), self.port.udp_port());
        RingSink { writer: peer_tx.tx_ring.write(), peer_tx, gids, port, packets: 0, sleeps: false }
    }

    /// Fills a ring with what a queue pair has to send.
    #[inline]
    pub(crate) fn fill_ring(
        &self,
        transport: &mut Qp,
        host: &QpHost<'_>,
        peer_tx: &PeerTx,
        now: &LazyTimestamp<'_>,
    ) -> Filled {
        let mut sink = self.ring_sink(peer_tx);
        let outcome =
            transport.poll_transmit(deadline_clock(transport, now), host, &mut sink, AckPolicy::Now);
        let has_sent = sink.packets > 0;
        sink.flush();
        match outcome {
            Transmit::Idle => Filled::Sent,
            Transmit::SinkFull if has_sent => Filled::Full(None),
            Transmit::SinkFull => self.handle_full_ring(transport, host, peer_tx, now.get()),
        }
    }

    /// What becomes of packets that a full ring does not take: they are retried, or lost once its reader has stalled.
    /// Those of a queue pair without an ACK timeout are never lost: nothing would send them again, or fail them.
    #[cold]
    fn handle_full_ring(&self, transport: &mut Qp, host: &QpHost<'_>, peer_tx: &PeerTx, now: Time) -> Filled {
        match peer_tx.note_full(now) {
            ..FULL_RETRY_NS => Filled::Full(None),
            FULL_RETRY_NS..STALLED_NS => Filled::Full(Some(now.after_ns(FULL_RETRY_NS))),
            STALLED_NS.. if waits_for_ever(transport) => Filled::Full(Some(now.after_ns(STALLED_RETRY_NS))),
            STALLED_NS.. => self.discard(transport, host, now),
        }
    }

    /// Discards what a queue pair has to send. Retransmission timers keep running.
    fn discard(&self, transport: &mut Qp, host: &QpHost<'_>, now: Time) -> Filled {
        let mut lost = LostSink::default();
        let outcome = transport.poll_transmit(|| now, host, &mut lost, AckPolicy::Now);
        self.local.lost.fetch_add(lost.packets, Ordering::Relaxed);
        match outcome {
            Transmit::Idle => Filled::Sent,
            Transmit::SinkFull => Filled::Full(None),
        }
    }
}

/// A thread that polls for packets. Until it is dropped, writers do not ring the doorbell.
struct Polling<'a>(&'a Device);

impl Polling<'_> {
    fn begin(device: &Device) -> Polling<'_> {
        device.local.pollers.fetch_add(1, Ordering::SeqCst);
        device.wake_up_at_rings();
        Polling(device)
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        let device = self.0;
        // Before the rings are looked at: an engine that is about to sleep leaves them to the last thread that polls.
        let is_last = device.local.pollers.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && device.fall_asleep_at_rings() {
            device.engine.wake();
        }
    }
}

impl Device {
    /// Adds a ring to those that are read.
    pub(in crate::local) fn add_peer_rx(&self, number: u64, rx_ring: RxRing, gid_index: u8) {
        let (last, had_pending, streams, is_in_message, has_ended) = (None, false, false, false, false);
        let peer_rx =
            PeerRx { number, rx_ring, gid_index, last, had_pending, streams, is_in_message, has_ended };
        self.rx.lock().peer_rx.list.push(peer_rx);
        self.local.has_rx_rings.store(true, Ordering::SeqCst);
    }

    /// Marks the ring of a peer that has gone.
    pub(in crate::local) fn end_peer_rx(&self, number: u64) {
        let mut rx = self.rx.lock();
        let ended = rx.peer_rx.list.iter_mut().filter(|peer_rx| peer_rx.number == number);
        ended.for_each(|peer_rx| {
            peer_rx.has_ended = true;
            peer_rx.rx_ring.end();
        });
        self.local.has_rx_rings.store(rx.peer_rx.tidy(), Ordering::SeqCst);
    }

    /// Passes the packets that are pending in rings to `each`.
    #[inline]
    pub(crate) fn read_peer_rx(&self, peer_rx: &mut PeerRxSet, each: impl FnMut(&RxMeta, RxPacket<'_>)) {
        let read = peer_rx.read(self.gids(), each);
        let received = &self.local.received;
        received.store(received.load(Ordering::Relaxed) + read.count, Ordering::Relaxed);
        if read.is_over {
            self.local.has_rx_rings.store(peer_rx.tidy(), Ordering::SeqCst);
        }
    }

    /// Has writers ring the doorbell from now on, or once no thread polls. True if packets are pending already.
    pub(crate) fn fall_asleep_at_rings(&self) -> bool {
        if !self.local.has_rx_rings.load(Ordering::SeqCst) {
            return false;
        }
        let list = &self.rx.lock().peer_rx.list;
        if self.local.pollers.load(Ordering::SeqCst) == 0 {
            list.iter().for_each(|peer_rx| peer_rx.rx_ring.fall_asleep());
        }
        list.iter().any(|peer_rx| !peer_rx.rx_ring.is_empty())
    }

    /// Makes progress until `done`, for as long as the budget permits, and returns whether it is done. Peers of this host do not wake
    /// the engine meanwhile, and other threads get the processor if they need it. Without such peers the engine leaves the network to
    /// this thread, as to one that polls a completion queue: a thread that sleeps afterwards calls [`Device::leave_to_engine`].
    pub fn poll_until(self: &Arc<Self>, budget: &SpinBudget, done: impl FnMut() -> bool) -> bool {
        let limit = budget.take();
        let is_done = !limit.is_zero() && {
            let _polling = Polling::begin(self);
            let by_network = !self.local.has_rx_rings.load(Ordering::Relaxed);
            self.spin(limit, done, || {
                if by_network {
                    self.note_poll();
                }
                std::thread::yield_now();
            })
        };
        budget.note(is_done);
        is_done
    }

    /// Has writers not ring the doorbell any more.
    pub(crate) fn wake_up_at_rings(&self) {
        if self.local.has_rx_rings.load(Ordering::Relaxed) {
            self.rx.lock().peer_rx.list.iter().for_each(|peer_rx| peer_rx.rx_ring.wake_up());
        }
    }
}
