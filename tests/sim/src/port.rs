//! A device's port in the simulated network, limited as a real one is: its buffers have the plan's size, and at
//! random it takes only part of a batch.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_fabric::sim::SimPort;
use terrace_fabric::{Gid, Port, PortCounters, RxBatch, TxBatch};
use terrace_nic::{Clock, ManualClock};
use terrace_sync::Mutex;
use terrace_wire::Packet;

use crate::dice::Dice;

/// Longest time for which a port takes no packets, in nanoseconds.
const BLOCKED_NS_MAX: u64 = 200_000;

/// When the port takes packets again, in nanoseconds; 0 while it does.
pub(crate) type Gate = Arc<AtomicU64>;

pub(crate) struct MoodyPort {
    pub inner: SimPort,
    pub receive_buffer_bytes: usize,
    pub clock: Arc<ManualClock>,
    /// Probability that the port takes only part of a batch.
    pub block: f64,
    pub dice: Mutex<Dice>,
    pub gate: Gate,
    /// Whether to print what is sent.
    pub trace: bool,
}

impl MoodyPort {
    fn print(&self, tx: &TxBatch) {
        for sent in tx.packets() {
            let (now, from, to) = (self.clock.now().0, self.inner.gids()[0].addr, sent.path.remote);
            match Packet::parse(sent.bytes) {
                Ok(packet) => println!("{now:>12} {from} to {to}: {}", describe(&packet)),
                Err(error) => println!("{now:>12} {from} to {to}: {error}"),
            }
        }
    }

    /// Sends a random number of packets and closes the gate for a while.
    fn send_some(&self, tx: &mut TxBatch, dice: &mut Dice) {
        let packets: Vec<_> = tx.packets().map(|packet| (packet.path, packet.bytes.to_vec())).collect();
        let sent_count = dice.index(packets.len());
        tx.clear();
        copy_to(tx, &packets[..sent_count]);
        self.inner.transmit(tx);
        copy_to(tx, &packets[sent_count..]);
        let opens_ns = self.clock.now().0 + dice.within(1..=BLOCKED_NS_MAX);
        self.gate.store(opens_ns, Ordering::Relaxed);
    }
}

fn describe(packet: &Packet<'_>) -> String {
    let Packet { bth, ext, payload } = packet;
    let mut line = format!("{:?} to {:#x} PSN {}", bth.opcode, bth.qpn, bth.psn.get());
    if bth.ack_request {
        line += " asks for an ACK";
    }
    let extensions = format!("{ext:x?}");
    // Only the headers that are present.
    for part in extensions.trim_end_matches('}').split("Some(").skip(1) {
        line += &format!(" {}", part.trim_end_matches(", ").trim_end_matches(')'));
    }
    format!("{line}, {} bytes", payload.len())
}

fn copy_to(tx: &mut TxBatch, packets: &[(terrace_wire::Path, Vec<u8>)]) {
    for (path, bytes) in packets {
        tx.push(path, bytes.len()).expect("they were in it before").copy_from_slice(bytes);
    }
}

impl Port for MoodyPort {
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
        if self.gate.load(Ordering::Relaxed) > self.clock.now().0 {
            return false;
        }
        self.gate.store(0, Ordering::Relaxed);
        if self.trace {
            self.print(tx);
        }
        let mut dice = self.dice.lock();
        if dice.chance(self.block) {
            self.send_some(tx, &mut dice);
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
}
