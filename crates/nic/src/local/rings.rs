//! Packets to and from peers on the same host by rings in memory ([`terrace_memory::shared`]): what cannot be done by reaching in, and
//! all messages. They are the packets that would go over the network, but without an ICRC, and without the kernel.
//!
//! A ring belongs to a connection of the local path, and leads from the process that has made it to the one that has accepted. A
//! queue pair begins to use it when it has nothing outstanding, so that nothing overtakes what went another way, and uses it as long as
//! there are a connection and the same two ends. Whoever receives looks at what comes by the other way than the packet before only when
//! all that had come by that way was looked at.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrace_fabric::Gid;
use terrace_memory::shared::{Origin, Reach, RxRing, TxRing, Writer};
use terrace_transport::{AckPolicy, SendRequest, Sink, Time, Transmit};
use terrace_wire::{Path, Psn, RxMeta};

use crate::device::Device;
use crate::host::QpHost;
use crate::qp::{QpCore, QueuePair};

/// Packets that one look takes from a ring at most.
const PACKETS_PER_LOOK: usize = 64;
/// While packets come by rings, the network is asked once for so many looks and packets: a system call takes much longer than a look,
/// and a program that polls mostly finds nothing.
const LOOKS_PER_NETWORK: u32 = 128;
/// For so many looks without a packet rings still count as busy: some dozens of microseconds.
const WARM_LOOKS: u32 = 1024;
/// The reader is shown what was written whenever it has become so much: it copies one part of a long message while the next is written.
const SHOW_BYTES: u64 = 8 << 10;
/// A full ring is tried again at once for so long, and from then on at intervals of so long.
const FULL_RETRY_NS: u64 = 1_000_000;
/// A ring that has been full for so long belongs to a process that is stopped. What it has no room for is lost, as in the full socket
/// of such a process; by the network it would overtake what is in the ring.
const STALLED_NS: u64 = 1_000_000_000;
/// No more counts between two tries: a writer that did not run itself has not seen whether its reader had the time.
const FULL_STEP_NS: u64 = 100_000_000;
/// Packets that one turn of a queue pair loses at most.
const LOST_PER_TURN: u64 = 64;

/// The way out to one peer.
pub(super) struct PeerTx {
    tx_ring: TxRing,
    doorbell: OwnedFd,
    /// When it was last seen to be full, 0 if it is not; and for how long it had been then. In nanoseconds, and changed by whoever has
    /// the right to write.
    full_at: AtomicU64,
    full_ns: AtomicU64,
    /// Packets so far. Changed by whoever has the right to write.
    sent: AtomicU64,
    gone: AtomicBool,
}

impl PeerTx {
    /// A way into a ring, and the doorbell of whoever reads it.
    ///
    /// # Errors
    /// When that is no descriptor that can be told not to block.
    pub fn new(tx_ring: TxRing, doorbell: OwnedFd) -> rustix::io::Result<PeerTx> {
        rustix::fs::fcntl_setfl(&doorbell, rustix::fs::OFlags::NONBLOCK)?;
        let [full_at, full_ns, sent] = [(); 3].map(|()| AtomicU64::new(0));
        Ok(PeerTx { tx_ring, doorbell, full_at, full_ns, sent, gone: AtomicBool::new(false) })
    }

    /// Packets so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Notes that it has taken packets.
    #[inline]
    fn note_sent(&self, packets: u64) {
        self.sent.store(self.sent() + packets, Ordering::Relaxed);
        self.full_at.store(0, Ordering::Relaxed);
    }

    /// Nobody reads any more.
    pub fn note_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Notes that it is full, and returns for how long it has been, in nanoseconds.
    fn note_full(&self, now: Time) -> u64 {
        let full_ns = match self.full_at.swap(now.0, Ordering::Relaxed) {
            0 => 0,
            last_at => {
                let step_ns = now.0.saturating_sub(last_at).min(FULL_STEP_NS);
                self.full_ns.load(Ordering::Relaxed).saturating_add(step_ns)
            }
        };
        self.full_ns.store(full_ns, Ordering::Relaxed);
        full_ns
    }
}

/// A ring, as the transport wants to see it.
struct RingSink<'a> {
    writer: Writer<'a>,
    peer_tx: &'a PeerTx,
    gids: &'a [Gid],
    port: u16,
    packets: u64,
    /// Whether the reader sleeps, and is to be woken.
    sleeps: bool,
}

impl RingSink<'_> {
    /// Shows the reader what was written.
    #[inline]
    fn publish(&mut self) {
        self.sleeps |= self.writer.publish();
    }
}

impl Sink for RingSink<'_> {
    #[inline]
    fn push(&mut self, path: &Path, len: usize) -> Option<&mut [u8]> {
        if self.writer.unseen_bytes() >= SHOW_BYTES {
            self.publish();
        }
        let gid = self.gids.get(usize::from(path.source_gid_index))?;
        let origin = Origin { address: gid.raw.into(), port: self.port, traffic_class: path.traffic_class };
        let room = self.writer.push(&origin, len)?;
        self.packets += 1;
        Some(room)
    }

    fn cancel(&mut self) {
        self.packets -= 1;
        self.writer.cancel();
    }

    #[inline]
    fn carry_ack(&mut self, psn: Psn) -> bool {
        self.writer.carry_ack(psn.get())
    }
}

/// Takes the packets for which a ring has no room whose reader stands still.
#[derive(Default)]
struct LostSink {
    packet: Vec<u8>,
    packets: u64,
}

impl Sink for LostSink {
    fn push(&mut self, _path: &Path, len: usize) -> Option<&mut [u8]> {
        if self.packets == LOST_PER_TURN {
            return None;
        }
        self.packets += 1;
        self.packet.resize(len, 0);
        Some(&mut self.packet)
    }

    fn cancel(&mut self) {
        self.packets -= 1;
    }
}

/// How a queue pair's turn at its ring went.
pub(crate) enum Filled {
    /// Everything is on its way.
    Sent,
    /// The ring is full: it is to be tried again then, or at once.
    Full(Option<Time>),
    /// It has no ring, or none that is of use.
    NotHere,
}

impl Device {
    /// Takes what a queue pair has to send and puts it into its ring, if it has one.
    pub(crate) fn fill_ring(
        &self,
        core: &mut QpCore,
        host: &QpHost<'_>,
        now: Time,
        acks: AckPolicy,
    ) -> Filled {
        let mut filled = Filled::NotHere;
        self.with_ring(core, |core, sink| {
            filled = match core.qp.poll_transmit(now, host, sink, acks) {
                Transmit::Idle => Filled::Sent,
                Transmit::SinkFull if sink.packets > 0 => Filled::Full(None),
                Transmit::SinkFull => match sink.peer_tx.note_full(now) {
                    ..FULL_RETRY_NS => Filled::Full(None),
                    FULL_RETRY_NS..STALLED_NS => Filled::Full(Some(now.after_ns(FULL_RETRY_NS))),
                    STALLED_NS.. => self.lose(core, host, now, acks),
                },
            };
        });
        filled
    }

    /// Sends what a queue pair has to send nowhere. What waits for an answer goes on to count the time.
    #[cold]
    fn lose(&self, core: &mut QpCore, host: &QpHost<'_>, now: Time, acks: AckPolicy) -> Filled {
        let mut lost = LostSink::default();
        let outcome = core.qp.poll_transmit(now, host, &mut lost, acks);
        self.local.lost.fetch_add(lost.packets, Ordering::Relaxed);
        match outcome {
            Transmit::Idle => Filled::Sent,
            Transmit::SinkFull => Filled::Full(None),
        }
    }

    /// Puts a work request that was not posted yet into the queue pair's ring, if it can leave at once, and posts it then; it is given
    /// back otherwise. What the peer need not wait for is done when it has left.
    #[inline]
    pub(crate) fn send_at_once<W: SendRequest>(
        &self,
        qp: &QueuePair,
        core: &mut QpCore,
        wr: W,
    ) -> Result<(), W> {
        // Nothing may overtake what is under way over the network.
        if !core.local.has_tx_ring() || !qp.token.is_free() {
            return Err(wr);
        }
        let host = qp.host(core);
        let mut has_sent = false;
        self.with_ring(core, |core, sink| has_sent = core.qp.send_at_once(&host, sink, &wr));
        if !has_sent {
            return Err(wr);
        }
        // A clock that the kernel keeps late costs a repetition, if there is one.
        let is_patient = core.qp.attr().retry_cnt > 0;
        core.qp.note_sent(|| if is_patient { self.clock.soon() } else { self.clock.now() }, wr.into());
        Ok(())
    }

    /// Has somebody write into the queue pair's ring, if it has one of use, and shows what they have written.
    #[inline]
    fn with_ring(&self, core: &mut QpCore, act: impl FnOnce(&mut QpCore, &mut RingSink<'_>)) {
        let is_of_use = |peer_tx: &Arc<PeerTx>| self.local.is_on() && !peer_tx.is_gone();
        let Some(peer_tx) = core.local.peer_tx.take().filter(is_of_use) else { return };
        let (gids, port) = (self.port.gids(), self.port.udp_port());
        let writer = peer_tx.tx_ring.write();
        let mut sink = RingSink { writer, peer_tx: &peer_tx, gids, port, packets: 0, sleeps: false };
        act(core, &mut sink);
        if sink.packets > 0 {
            peer_tx.note_sent(sink.packets);
            sink.publish();
            if sink.sleeps {
                // It can only have been rung so often that it cannot count it.
                let _ = rustix::io::write(&peer_tx.doorbell, &1u64.to_ne_bytes());
            }
        }
        drop(sink);
        core.local.peer_tx = Some(peer_tx);
    }
}

/// The ways in. Whoever has the right to receive has them.
#[derive(Default)]
pub(crate) struct PeerRxSet {
    list: Vec<PeerRx>,
    /// Looks and packets since the network was asked last.
    looks: u32,
    /// Looks for which rings still count as busy.
    warm: u32,
}

struct PeerRx {
    number: u64,
    rx_ring: RxRing,
    /// Which of our addresses the other side has connected to.
    gid_index: u8,
    /// Where the last packet came from, as a ring says it and as the network would.
    last: Option<(Origin, RxMeta)>,
    /// Whether a packet waited at the last look.
    had_pending: bool,
    /// Whether packets come faster than they are looked for, or nobody waits for one. Behind a message that somebody waits for there is
    /// most likely nothing, and to see that takes as long as to fetch the message.
    streams: bool,
    /// The other side has gone. What it has sent before is read.
    has_ended: bool,
}

/// What a look at the rings says.
#[derive(Clone, Copy, Default)]
pub(crate) struct RxPending {
    /// Something has come.
    pub waits: bool,
    /// The network is to be asked as well.
    pub asks_network: bool,
}

impl PeerRxSet {
    /// Whether packets wait: for somebody who polls for one, or for all of them.
    #[inline]
    pub fn look(&mut self, for_all: bool) -> RxPending {
        if self.list.is_empty() {
            return RxPending { waits: false, asks_network: true };
        }
        let mut waits = false;
        for peer_rx in &mut self.list {
            let has_pending = peer_rx.rx_ring.has_pending();
            peer_rx.streams |= has_pending && (for_all || peer_rx.had_pending);
            peer_rx.had_pending = has_pending;
            waits |= has_pending;
        }
        self.warm = if waits { WARM_LOOKS } else { self.warm.saturating_sub(1) };
        self.looks += 1;
        let asks_network = self.warm == 0 || self.looks >= LOOKS_PER_NETWORK;
        if asks_network {
            self.looks = 0;
        }
        RxPending { waits, asks_network }
    }

    /// ReaderSlots the packets that were found to wait to `each`.
    #[inline]
    fn read(&mut self, gids: &[Gid], mut each: impl FnMut(&RxMeta, Option<Psn>, &[u8])) -> Read {
        let mut read = Read { count: 0, is_over: false };
        for peer_rx in &mut self.list {
            let destination = gids.get(usize::from(peer_rx.gid_index)).map(|gid| gid.addr);
            let Some(destination) = destination else { continue };
            let (gid_index, last) = (peer_rx.gid_index, &mut peer_rx.last);
            let max = if peer_rx.streams { PACKETS_PER_LOOK } else { usize::from(peer_rx.had_pending) };
            let count = peer_rx.rx_ring.read(max, |origin, acknowledged, bytes| {
                let meta = match last {
                    Some((of, meta)) if of == origin => meta,
                    _ => {
                        let (source, traffic_class) = (socket_address(origin), origin.traffic_class);
                        let meta = RxMeta { source, destination, gid_index, traffic_class };
                        &mut last.insert((*origin, meta)).1
                    }
                };
                each(meta, acknowledged.map(Psn::new), bytes);
            });
            peer_rx.streams &= count > 1;
            read.count += count as u64;
            if peer_rx.rx_ring.is_broken() && !peer_rx.has_ended {
                tracing::warn!(
                    "a process of this host has written nonsense into its ring; it is not read any more"
                );
                peer_rx.has_ended = true;
            }
            read.is_over |= peer_rx.has_ended && peer_rx.rx_ring.is_empty();
        }
        self.looks = self.looks.saturating_add(read.count as u32);
        read
    }

    /// Forgets those that have ended, and returns whether any are left.
    fn tidy(&mut self) -> bool {
        self.list.retain(|peer_rx| !peer_rx.has_ended || !peer_rx.rx_ring.is_empty());
        !self.list.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.list.clear();
    }
}

/// What a look has read.
struct Read {
    count: u64,
    /// Whether a ring is at its end.
    is_over: bool,
}

impl Device {
    /// From now on this one is read as well.
    pub(super) fn add_peer_rx(&self, number: u64, rx_ring: RxRing, gid_index: u8) {
        let (last, had_pending, streams, has_ended) = (None, false, false, false);
        let peer_rx = PeerRx { number, rx_ring, gid_index, last, had_pending, streams, has_ended };
        self.rx.lock().peer_rx.list.push(peer_rx);
        self.local.has_inlets.store(true, Ordering::SeqCst);
    }

    /// The other side of one has gone.
    pub(super) fn end_peer_rx(&self, number: u64) {
        let mut rx = self.rx.lock();
        let ended = rx.peer_rx.list.iter_mut().filter(|peer_rx| peer_rx.number == number);
        ended.for_each(|peer_rx| {
            peer_rx.has_ended = true;
            peer_rx.rx_ring.end();
        });
        self.local.has_inlets.store(rx.peer_rx.tidy(), Ordering::SeqCst);
    }

    /// ReaderSlots the packets that wait in rings to `each`.
    #[inline]
    pub(crate) fn read_peer_rx(
        &self,
        peer_rx: &mut PeerRxSet,
        each: impl FnMut(&RxMeta, Option<Psn>, &[u8]),
    ) {
        let read = peer_rx.read(self.gids(), each);
        let received = &self.local.received;
        received.store(received.load(Ordering::Relaxed) + read.count, Ordering::Relaxed);
        if read.is_over {
            self.local.has_inlets.store(peer_rx.tidy(), Ordering::SeqCst);
        }
    }

    /// Has writers ring the doorbell from now on. True if something waits already.
    pub(crate) fn fall_asleep_at_rings(&self) -> bool {
        if !self.local.has_inlets.load(Ordering::SeqCst) {
            return false;
        }
        let list = &self.rx.lock().peer_rx.list;
        list.iter().for_each(|peer_rx| peer_rx.rx_ring.fall_asleep());
        list.iter().any(|peer_rx| !peer_rx.rx_ring.is_empty())
    }

    /// Has writers not ring the doorbell.
    pub(crate) fn wake_up_at_rings(&self) {
        if self.local.has_inlets.load(Ordering::Relaxed) {
            self.rx.lock().peer_rx.list.iter().for_each(|peer_rx| peer_rx.rx_ring.wake_up());
        }
    }
}

fn socket_address(origin: &Origin) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(origin.address).to_canonical(), origin.port)
}

/// Another process of the host: how its memory is reached, and how itself.
#[derive(Clone)]
pub(super) struct SameHostPeer {
    pub reach: Arc<Reach>,
    pub peer_tx: Arc<PeerTx>,
}

impl SameHostPeer {
    /// The process has ended, or does not want to be reached any more.
    pub fn note_gone(&self) {
        self.reach.note_gone();
        self.peer_tx.note_gone();
    }
}
