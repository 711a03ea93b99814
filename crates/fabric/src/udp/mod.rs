//! Real sockets: RoCEv2 as UDP datagrams of this host (IBTA annex A17).
//!
//! There is one unconnected socket per GID, so that user space can compute the ICRC: an unconnected IPv4 socket
//! that may not fragment sends identification 0, and segment *i* of a GSO send has identification *i*. Multicast groups
//! have sockets of their own.

mod addresses;
mod error;
mod groups;
mod open;
mod poll_set;
mod probe;
mod segmentation;
mod socket;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use terrace_wire::RxMeta;

use crate::counters::add;
use crate::{Gid, Port, PortCounters, RxBatch, TxBatch};

pub use error::OpenError;
use groups::Groups;
use poll_set::PollSet;
pub use probe::Probe;
use segmentation::Segmentation;
pub use socket::{Buffers, SocketHook};
use socket::{RECEIVE_BUFFER_BYTES, Received, Sent, UdpSocket};

/// Configuration of a [`UdpPort`].
#[derive(Clone, Debug, Default)]
pub struct UdpConfig {
    /// The local address; `None` selects the first IPv4 address of an interface that is up and is not the loopback,
    /// or the loopback when there is no such interface.
    pub addr: Option<IpAddr>,
    /// Largest path MTU: 256, 512, 1024, 2048 or 4096. `None` selects the largest that fits the interface.
    pub mtu: Option<u32>,
    /// The instance index; `None` selects the first free one.
    pub instance: Option<u8>,
    /// Requested size of the receive buffer in bytes; `None` requests 16 MiB. The kernel may grant less.
    pub receive_buffer_bytes: Option<usize>,
    /// Sets socket options that have no safe interface. IPv6 packets of the kernel's rxe have no UDP checksum and are
    /// received only if the hook sets `UDP_NO_CHECK6_RX`. An error is logged and otherwise ignored.
    pub socket_hook: Option<SocketHook>,
}

/// A [`Port`] on the host's network.
#[derive(Debug)]
pub struct UdpPort {
    gids: Vec<Gid>,
    sockets: Vec<UdpSocket>,
    instance: u8,
    mtu_limit: u32,
    receive_buffer_bytes: usize,
    counters: Arc<PortCounters>,
    /// Bit i: GID i is active.
    active: AtomicU32,
    /// Datagrams to request in the next receive, see [`UdpPort::receive`].
    burst: AtomicU32,
    /// Selects the active GIDs to poll.
    poll_set: PollSet,
    segmentation: Segmentation,
    /// Failed sends so far. Some of them are logged.
    logged_errors: AtomicU64,
    groups: Groups,
    /// What the port was opened with.
    config: UdpConfig,
}

/// The most datagrams that one receive gets from a GID's socket. If it returns this many, more may be queued.
pub const BURST_MAX: u32 = 32;

impl UdpPort {
    /// Selects the address, claims an instance index by binding its UDP port, and fills the GID table.
    ///
    /// # Errors
    /// See [`OpenError`]; each message names a remedy.
    pub fn open(config: &UdpConfig) -> Result<UdpPort, OpenError> {
        open::open(config)
    }

    /// Sends the first run of the batch, or a part of it. Returns false if the network would block.
    fn transmit_first_run(&self, tx: &mut TxBatch) -> bool {
        let Some((run, bytes)) = tx.first() else { return true };
        let destination = run.path.remote.ip();
        let whole_run = self.segmentation.permits(destination);
        let Some(socket) = self.sockets.get(usize::from(run.path.source_gid_index)) else {
            add(&self.counters.tx.send_errors, run.count as u64);
            tx.advance(run.count);
            return true;
        };
        let mut count = if whole_run { run.count } else { 1 };
        let mut len = if whole_run { run.len() } else { run.segment };
        let mut sent = socket.send(&run, &mut bytes[..len], count);
        if let Sent::SegmentationRefused = sent {
            // The send of a single packet distinguishes a failure of segmentation from one of the destination.
            (count, len) = (1, run.segment);
            sent = socket.send(&run, &mut bytes[..len], count);
            match sent {
                Sent::All => self.segmentation.note_refusal(destination, Instant::now()),
                _ => count = run.count,
            }
        }
        match sent {
            Sent::All => self.count_sent(count, len),
            Sent::WouldBlock => {
                add(&self.counters.tx.would_block, 1);
                return false;
            }
            Sent::Failed(error) => self.record_failure(&run.path.remote, count, run.segment, &error),
            Sent::SegmentationRefused => add(&self.counters.tx.send_errors, count as u64),
        }
        tx.advance(count);
        true
    }

    fn count_sent(&self, packets: usize, bytes: usize) {
        add(&self.counters.tx.calls, 1);
        add(&self.counters.tx.packets, packets as u64);
        add(&self.counters.tx.bytes, bytes as u64);
    }

    /// Counts packets whose send failed, and logs the 1st, 10th, 100th … failure.
    fn record_failure(&self, remote: &SocketAddr, packets: usize, packet_len: usize, error: &io::Error) {
        add(&self.counters.tx.send_errors, packets as u64);
        let failures = self.logged_errors.fetch_add(1, Relaxed) + 1;
        if 10u64.pow(failures.ilog10()) == failures {
            tracing::warn!("cannot send {packet_len} bytes to {remote}: {error} ({failures} so far)");
        }
    }

    /// Receives up to `requested` datagrams from one socket. Returns how many it received.
    fn receive_from(
        &self,
        socket: &UdpSocket,
        (gid_index, destination): (u8, IpAddr),
        requested: usize,
        rx: &mut RxBatch,
    ) -> usize {
        let mut received = 0;
        while received < requested {
            let Some(buffer) = rx.free_buffer() else { break };
            match socket.receive(buffer) {
                Received::Datagram { source, len, segment, traffic_class, overflows } => {
                    received += 1;
                    if let Some(total) = overflows {
                        socket.record_overflows(total, &self.counters.rx.overflows);
                    }
                    let meta = RxMeta { source, destination, gid_index, traffic_class };
                    rx.commit(meta, socket.local().port(), len, segment);
                }
                Received::Truncated => {
                    received += 1;
                    add(&self.counters.rx.truncated, 1);
                }
                Received::Nothing => break,
                Received::Failed(error) => {
                    add(&self.counters.rx.receive_errors, 1);
                    tracing::debug!("receiving on {}: {error}", socket.local());
                    break;
                }
            }
        }
        received
    }
}

impl Port for UdpPort {
    fn gids(&self) -> &[Gid] {
        &self.gids
    }

    fn instance(&self) -> u8 {
        self.instance
    }

    fn mtu_limit(&self) -> u32 {
        self.mtu_limit
    }

    fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    fn counters(&self) -> &PortCounters {
        &self.counters
    }

    fn transmit(&self, tx: &mut TxBatch) -> bool {
        while !tx.is_empty() {
            if !self.transmit_first_run(tx) {
                return false;
            }
        }
        true
    }

    /// Requests one datagram at first, and twice as many after each receive that returned the requested number. So a
    /// second poll of the empty socket does not delay a single packet, and a stream is received in large bursts.
    fn receive(&self, rx: &mut RxBatch) -> usize {
        rx.begin(&self.counters);
        let requested = self.burst.load(Relaxed);
        let mut gids = self.poll_set.next_poll(self.active.load(Relaxed));
        let mut received = 0;
        let mut is_burst_full = false;
        while gids != 0 {
            let gid_index = gids.trailing_zeros() as usize;
            gids &= gids - 1;
            let (socket, gid) = (&self.sockets[gid_index], &self.gids[gid_index]);
            let count = self.receive_from(socket, (gid_index as u8, gid.addr), requested as usize, rx);
            if count > 0 {
                self.poll_set.record_traffic(gid_index);
            }
            is_burst_full |= count == requested as usize;
            received += count;
        }
        self.groups.for_each_readable(|group| {
            let destination = (group.gid_index, group.address);
            received += self.receive_from(&group.socket, destination, BURST_MAX as usize, rx);
        });
        if received > 0 {
            add(&self.counters.rx.calls, received as u64);
        }
        let next = if is_burst_full { (requested * 2).min(BURST_MAX) } else { 1 };
        if next != requested {
            self.burst.store(next, Relaxed);
        }
        received
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let active = self.active.load(Relaxed);
        (0..self.sockets.len())
            .filter(|index| active & (1 << index) != 0)
            .map(|index| self.sockets[index].as_fd())
            .chain(self.groups.descriptor())
            .collect()
    }

    fn sending_descriptor(&self, gid_index: u8) -> Option<BorrowedFd<'_>> {
        self.sockets.get(usize::from(gid_index)).map(|socket| socket.as_fd())
    }

    fn activate(&self, gid_index: u8) {
        if usize::from(gid_index) < self.sockets.len() {
            self.active.fetch_or(1 << gid_index, Relaxed);
        }
    }

    fn join(&self, group: IpAddr) -> io::Result<()> {
        let of_family = |(_, gid): &(u8, &Gid)| gid.addr.is_ipv4() == group.is_ipv4();
        let gid = (0u8..).zip(&self.gids).find(of_family).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let receive_buffer_bytes = self.config.receive_buffer_bytes.unwrap_or(RECEIVE_BUFFER_BYTES);
        self.groups.join(group, gid, receive_buffer_bytes, self.config.socket_hook)
    }

    fn leave(&self, group: IpAddr) {
        self.groups.leave(group);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use terrace_wire::Path;

    use super::*;

    fn port(addr: &str) -> UdpPort {
        UdpPort::open(&UdpConfig { addr: addr.parse().ok(), ..UdpConfig::default() }).expect("a port")
    }

    fn path_to(port: &UdpPort) -> Path {
        Path {
            remote: port.sockets[0].local(),
            source_gid_index: 0,
            traffic_class: 0,
            hop_limit: 0,
            flow_label: 0,
        }
    }

    fn received(port: &UdpPort, requested: usize) -> Vec<Vec<u8>> {
        let mut rx = RxBatch::new();
        let mut packets = Vec::new();
        for _ in 0..100_000 {
            port.receive(&mut rx);
            while let Some(packet) = rx.next() {
                packets.push(packet.bytes.to_vec());
            }
            if packets.len() >= requested {
                break;
            }
        }
        packets
    }

    #[test]
    fn without_segmentation_offload_packets_are_sent_one_by_one() {
        for addr in ["127.84.0.1", "::1"] {
            let [sender, receiver] = [(); 2].map(|()| port(addr));
            let path = path_to(&receiver);
            sender.segmentation.note_refusal(path.remote.ip(), Instant::now() + Duration::from_secs(60));
            let mut tx = TxBatch::new(1 << 20);
            let lens = [500, 500, 500, 500, 100, 500, 60];
            for (len, number) in lens.into_iter().zip(0u8..) {
                tx.push(&path, len).expect("buffer").fill(number);
            }
            assert!(sender.transmit(&mut tx));
            assert!(tx.is_empty());
            let expected: Vec<Vec<u8>> =
                lens.into_iter().zip(0u8..).map(|(len, number)| vec![number; len]).collect();
            assert_eq!(received(&receiver, lens.len()), expected);
            assert_eq!(sender.counters.snapshot().tx_calls, lens.len() as u64);
        }
    }

    #[test]
    fn a_refusal_leaves_other_destinations_their_runs() {
        let [sender, refusing, other] = ["127.84.2.1", "127.84.2.2", "127.84.2.3"].map(port);
        sender
            .segmentation
            .note_refusal(path_to(&refusing).remote.ip(), Instant::now() + Duration::from_secs(60));
        let mut tx = TxBatch::new(1 << 20);
        for _ in 0..4 {
            tx.push(&path_to(&other), 500).expect("buffer").fill(1);
        }
        assert!(sender.transmit(&mut tx));
        assert_eq!(received(&other, 4).len(), 4);
        assert_eq!(sender.counters.snapshot().tx_calls, 1);
    }

    #[test]
    fn bursts_double_while_full_and_reset_when_not() {
        let [sender, receiver] = ["127.84.1.1", "127.84.1.2"].map(port);
        let path = path_to(&receiver);
        let mut tx = TxBatch::new(1 << 20);
        for number in 0..100 {
            // The lengths alternate, so that each packet is a separate datagram.
            let len = if number % 2 == 0 { 100 } else { 200 };
            tx.push(&path, len).expect("buffer").fill(1);
            sender.transmit(&mut tx);
        }
        let mut rx = RxBatch::new();
        let bursts: Vec<usize> = (0..8).map(|_| receiver.receive(&mut rx)).collect();
        assert_eq!(bursts, [1, 2, 4, 8, 16, 32, 32, 5]);
        assert_eq!(receiver.burst.load(Relaxed), 1);
    }
}
