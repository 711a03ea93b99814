//! A device's port in the simulated network, with the limits of a real one. Its buffers have the plan's size, and at
//! random it accepts only a part of a batch.

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_fabric::sim::SimPort;
use terrace_fabric::{Gid, Port, PortCounters, RxBatch, TxBatch};
use terrace_nic::{Clock, ManualClock};
use terrace_sync::Mutex;
use terrace_wire::Packet;

use crate::rng::SimRng;

/// Longest time for which a port accepts no packets, in nanoseconds.
const BLOCKED_NS_MAX: u64 = 200_000;

/// The time when the port accepts packets again, in nanoseconds; 0 while it accepts them.
pub(crate) type BlockedUntil = Arc<AtomicU64>;

pub(crate) struct LimitedPort {
    pub inner: SimPort,
    pub receive_buffer_bytes: usize,
    pub clock: Arc<ManualClock>,
    /// Probability that the port accepts only a part of a batch.
    pub block: f64,
    pub rng: Mutex<SimRng>,
    pub blocked_until: BlockedUntil,
    /// Whether to print sent packets.
    pub trace: bool,
}

impl LimitedPort {
    fn print(&self, tx: &TxBatch) {
        for sent in tx.packets() {
            let (now, from, to) = (self.clock.now().0, self.inner.gids()[0].addr, sent.path.remote);
            match Packet::parse(sent.bytes) {
                Ok(packet) => println!("{now:>12} {from} to {to}: {}", describe(&packet)),
                Err(error) => println!("{now:>12} {from} to {to}: {error}"),
            }
        }
    }

    /// Sends a random number of packets, and blocks the port for some time.
    fn send_some(&self, tx: &mut TxBatch, rng: &mut SimRng) {
        let packets: Vec<_> = tx.packets().map(|packet| (packet.path, packet.bytes.to_vec())).collect();
        let sent_count = rng.index(packets.len());
        tx.clear();
        copy_to(tx, &packets[..sent_count]);
        self.inner.transmit(tx);
        copy_to(tx, &packets[sent_count..]);
        let until_ns = self.clock.now().0 + rng.within(1..=BLOCKED_NS_MAX);
        self.blocked_until.store(until_ns, Ordering::Relaxed);
    }
}

fn describe(packet: &Packet<'_>) -> String {
    let Packet { bth, ext, payload } = packet;
    let mut line = format!("{:?} to {:#x} PSN {}", bth.opcode, bth.qpn, bth.psn.get());
    if bth.ack_request {
        line += " requests an ACK";
    }
    let extensions = format!("{ext:x?}");
    // Only the present headers are printed.
    for part in extensions.trim_end_matches('}').split("Some(").skip(1) {
        line += &format!(" {}", part.trim_end_matches(", ").trim_end_matches(')'));
    }
    format!("{line}, {} bytes", payload.len())
}

fn copy_to(tx: &mut TxBatch, packets: &[(terrace_wire::Path, Vec<u8>)]) {
    for (path, bytes) in packets {
        tx.push(path, bytes.len()).expect("the batch contained these packets before").copy_from_slice(bytes);
    }
}

impl Port for LimitedPort {
    fn gids(&self) -> &[Gid] {
        self.inner.gids()
    }

    fn instance(&self) -> u8 {
        self.inner.instance()
    }

    fn mtu_limit(&self) -> u32 {
        self.inner.mtu_limit()
    }

    fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    fn counters(&self) -> &PortCounters {
        self.inner.counters()
    }

    fn transmit(&self, tx: &mut TxBatch) -> bool {
        if tx.is_empty() {
            return true;
        }
        if self.blocked_until.load(Ordering::Relaxed) > self.clock.now().0 {
            return false;
        }
        self.blocked_until.store(0, Ordering::Relaxed);
        if self.trace {
            self.print(tx);
        }
        let mut rng = self.rng.lock();
        if rng.chance(self.block) {
            self.send_some(tx, &mut rng);
            return false;
        }
        self.inner.transmit(tx)
    }

    fn receive(&self, rx: &mut RxBatch) -> usize {
        self.inner.receive(rx)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn activate(&self, gid_index: u8) {
        self.inner.activate(gid_index);
    }

    fn join(&self, group: IpAddr) -> io::Result<()> {
        self.inner.join(group)
    }

    fn leave(&self, group: IpAddr) {
        self.inner.leave(group);
    }
}
