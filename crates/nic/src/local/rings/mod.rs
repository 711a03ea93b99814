//! Packets between same-host peers through rings in memory ([`terrace_shm`]): all messages, and everything
//! that direct access cannot do. They are the packets that would go over the network, but without an ICRC, and without
//! the kernel.
//!
//! A ring belongs to a connection of the local path, and leads from the process that has connected to the one that has
//! accepted. A queue pair begins to use it when nothing is outstanding, so that nothing overtakes packets on the other
//! path. It uses the ring as long as the connection and the same two ends exist. A receive pass handles a packet that
//! came by another path than the packet before it only after everything that had come by the previous path.

pub(crate) mod fill;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrace_fabric::Gid;
use terrace_shm::{Origin, PeerMemory, RUN_BYTES_MAX, RxPacket, RxRing, TxRing, Writer};
use terrace_transport::{Sink, Time};
use terrace_wire::{Opcode, Path, Psn, RxMeta};

/// Packets that one pass takes from a ring at most.
const PACKETS_PER_PASS: usize = 64;
/// While packets come by rings, the network is read once for so many passes and packets: a system call takes much
/// longer than polling a ring, and a program that polls mostly finds nothing.
const PASSES_PER_NETWORK_READ: u32 = 128;
/// The same while the program has completions without any packet, because its accesses end as they are posted.
const PASSES_PER_NETWORK_READ_IF_FED: u32 = 4096;
/// For so many passes without a packet rings still count as busy: some dozens of microseconds.
const WARM_PASSES: u32 = 1024;
/// Pauses of a poll that finds nothing in the middle of a message: the sender is writing the next packet, and each poll
/// takes cache lines away from it.
const MESSAGE_PAUSES: u32 = 8;
/// Bytes after which written packets are published: the reader copies one part of a long message while the next is
/// written.
const PUBLISH_BYTES: u64 = 8 << 10;
// The transport sends no packet that a ring takes for a run, and accepts the ring's longest run.
const _: () = assert!(
    terrace_shm::PACKET_BYTES_MAX as u64 == terrace_transport::PACKET_BYTES_MAX
        && RUN_BYTES_MAX <= terrace_transport::RUN_DATA_MAX
);
/// A full ring is retried at once for so long, and from then on at intervals of so long.
const FULL_RETRY_NS: u64 = 1_000_000;
/// A ring that has been full for so long belongs to a stopped process. Packets that do not fit are lost, as in the full
/// socket of such a process; over the network they would overtake the packets in the ring.
const STALLED_NS: u64 = 1_000_000_000;
/// From then on queue pairs whose packets may not be lost are retried at intervals of so long.
const STALLED_RETRY_NS: u64 = 10_000_000;
/// At most so much counts between two tries: a writer that did not run itself cannot tell whether its reader ran.
const FULL_STEP_NS: u64 = 100_000_000;
/// Packets that one fill of a queue pair loses at most.
const LOST_PER_FILL: u64 = 64;

/// The TX ring to one peer.
pub(crate) struct PeerTx {
    tx_ring: TxRing,
    doorbell: OwnedFd,
    /// When the ring was last seen to be full, 0 if it is not; and for how long it had been full then. In nanoseconds,
    /// and changed by the writer.
    full_at: AtomicU64,
    full_ns: AtomicU64,
    /// Packets so far. Changed by the writer.
    sent: AtomicU64,
    gone: AtomicBool,
}

impl PeerTx {
    /// The producer's side of a ring, and the doorbell of its consumer.
    ///
    /// # Errors
    /// When the doorbell is no descriptor that can be made non-blocking.
    pub fn new(tx_ring: TxRing, doorbell: OwnedFd) -> rustix::io::Result<PeerTx> {
        rustix::fs::fcntl_setfl(&doorbell, rustix::fs::OFlags::NONBLOCK)?;
        let [full_at, full_ns, sent] = [(); 3].map(|()| AtomicU64::new(0));
        Ok(PeerTx { tx_ring, doorbell, full_at, full_ns, sent, gone: AtomicBool::new(false) })
    }

    /// Packets so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Counts packets that were written; the ring is not full.
    #[inline]
    fn note_sent(&self, packets: u64) {
        self.sent.store(self.sent() + packets, Ordering::Relaxed);
        self.full_at.store(0, Ordering::Relaxed);
    }

    /// The consumer has gone.
    pub fn note_gone(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    /// Notes that the ring is full, and returns for how long it has been, in nanoseconds.
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

/// A ring as the transport's sink.
pub(crate) struct RingSink<'a> {
    writer: Writer<'a>,
    peer_tx: &'a PeerTx,
    gids: &'a [Gid],
    port: u16,
    /// Packets since the last flush.
    packets: u64,
    /// Whether the reader sleeps and has to be woken.
    sleeps: bool,
}

impl RingSink<'_> {
    /// Publishes what was written.
    #[inline]
    fn publish(&mut self) {
        self.sleeps |= self.writer.publish();
    }
}

impl Sink for RingSink<'_> {
    const RUN_BYTES_MAX: u64 = RUN_BYTES_MAX;

    #[inline(always)]
    fn push(&mut self, path: &Path, len: usize) -> Option<&mut [u8]> {
        if self.writer.unpublished_bytes() >= PUBLISH_BYTES {
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

    /// Publishes what was written, if anything, counts it, and wakes the reader if it sleeps.
    #[inline(always)]
    fn flush(&mut self) {
        let packets = std::mem::take(&mut self.packets);
        if packets == 0 {
            return;
        }
        self.peer_tx.note_sent(packets);
        self.publish();
        if std::mem::take(&mut self.sleeps) {
            // A write fails only when the doorbell's counter is at its limit: then it is rung anyway.
            let _ = rustix::io::write(&self.peer_tx.doorbell, &1u64.to_ne_bytes());
        }
    }
}

/// Discards the packets that do not fit into the ring of a stalled reader.
#[derive(Default)]
struct LostSink {
    packet: Vec<u8>,
    packets: u64,
}

impl Sink for LostSink {
    fn push(&mut self, _path: &Path, len: usize) -> Option<&mut [u8]> {
        if self.packets == LOST_PER_FILL {
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

/// Outcome of filling a ring from a queue pair.
pub(crate) enum Filled {
    /// Nothing is left to send.
    Sent,
    /// The ring is full: to be retried then, or at once.
    Full(Option<Time>),
    /// Packets of the queue pair go by the network, or still do.
    NotHere,
}

/// The RX rings. Protected by the receive lock.
#[derive(Default)]
pub(crate) struct PeerRxSet {
    list: Vec<PeerRx>,
    /// Passes and packets since the network was read last.
    passes: u32,
    /// Passes for which rings still count as busy.
    warm: u32,
}

struct PeerRx {
    number: u64,
    rx_ring: RxRing,
    /// The index of the own GID that the peer has connected to.
    gid_index: u8,
    /// The source of the last packet, in the format of the ring and of the network.
    last: Option<(Origin, RxMeta)>,
    /// Whether a packet was pending in the last pass.
    had_pending: bool,
    /// Whether packets come faster than passes, or no thread polls for one. Behind a message that a thread polls for
    /// there is most likely nothing, and to see that takes as long as to fetch the message.
    streams: bool,
    /// Whether the last packet was not the last one of its message.
    is_in_message: bool,
    /// The peer has gone. What it has sent before is read.
    has_ended: bool,
}

/// The result of `PeerRxSet::poll`.
#[derive(Clone, Copy, Default)]
pub(crate) struct RxPending {
    /// Packets are pending.
    pub have_packets: bool,
    /// The network is to be read as well.
    pub network_is_due: bool,
}

impl PeerRxSet {
    /// Whether packets are pending: for a thread that polls for one, or for a pass that takes all of them. `is_fed` says
    /// that the thread has completions to take already.
    #[inline]
    pub fn poll(&mut self, for_all: bool, is_fed: bool) -> RxPending {
        if self.list.is_empty() {
            return RxPending { have_packets: false, network_is_due: true };
        }
        let (mut have_packets, mut is_in_message) = (false, false);
        for peer_rx in &mut self.list {
            let has_pending = peer_rx.rx_ring.has_pending();
            peer_rx.streams |= has_pending && (for_all || peer_rx.had_pending);
            peer_rx.had_pending = has_pending;
            is_in_message |= peer_rx.is_in_message;
            have_packets |= has_pending;
        }
        if is_in_message && !have_packets && !for_all {
            (0..MESSAGE_PAUSES).for_each(|_| std::hint::spin_loop());
        }
        self.warm = if have_packets { WARM_PASSES } else { self.warm.saturating_sub(1) };
        self.passes += 1;
        let network_is_due = match is_fed {
            false => self.warm == 0 || self.passes >= PASSES_PER_NETWORK_READ,
            true => self.passes >= PASSES_PER_NETWORK_READ_IF_FED,
        };
        if network_is_due {
            self.passes = 0;
        }
        RxPending { have_packets, network_is_due }
    }

    /// Passes the packets that were found pending to `each`.
    #[inline]
    fn read(&mut self, gids: &[Gid], mut each: impl FnMut(&RxMeta, RxPacket<'_>)) -> Read {
        let mut read = Read { count: 0, is_over: false };
        for peer_rx in &mut self.list {
            let destination = gids.get(usize::from(peer_rx.gid_index)).map(|gid| gid.addr);
            let Some(destination) = destination else { continue };
            let (gid_index, last) = (peer_rx.gid_index, &mut peer_rx.last);
            let max = if peer_rx.streams { PACKETS_PER_PASS } else { usize::from(peer_rx.had_pending) };
            let is_in_message = &mut peer_rx.is_in_message;
            let count = peer_rx.rx_ring.read(max, |packet| {
                let origin = packet.origin;
                let meta = match last {
                    Some((of, meta)) if of == origin => meta,
                    _ => {
                        let (source, traffic_class) = (socket_address(origin), origin.traffic_class);
                        let meta = RxMeta { source, destination, gid_index, traffic_class };
                        &mut last.insert((*origin, meta)).1
                    }
                };
                *is_in_message = packet.bytes.first().is_some_and(|byte| is_continued(*byte));
                each(meta, packet);
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
        self.passes = self.passes.saturating_add(read.count as u32);
        read
    }

    /// Removes the rings that have ended, and returns whether any are left.
    fn tidy(&mut self) -> bool {
        self.list.retain(|peer_rx| !peer_rx.has_ended || !peer_rx.rx_ring.is_empty());
        !self.list.is_empty()
    }

    /// Removes all rings.
    pub fn clear(&mut self) {
        self.list.clear();
    }
}

/// The outcome of reading the rings.
struct Read {
    count: u64,
    /// Whether a ring whose peer has gone is read to its end.
    is_over: bool,
}

/// Whether packets of the same message follow one with this opcode.
fn is_continued(opcode: u8) -> bool {
    Opcode::from_byte(opcode).is_some_and(|opcode| !opcode.info().position.is_last())
}

fn socket_address(origin: &Origin) -> SocketAddr {
    SocketAddr::new(IpAddr::V6(origin.address).to_canonical(), origin.port)
}

/// Another process of the host: its memory and its ring.
#[derive(Clone)]
pub(super) struct SameHostPeer {
    pub memory: Arc<PeerMemory>,
    pub peer_tx: Arc<PeerTx>,
}

impl SameHostPeer {
    /// The process has ended, or withdraws its memory and ring.
    pub fn note_gone(&self) {
        self.memory.note_gone();
        self.peer_tx.note_gone();
    }
}
