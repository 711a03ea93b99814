//! Moves packets. A [`Port`] is a NIC's port in a network: real UDP sockets ([`udp`]), or a seeded simulation
//! ([`sim`]). [`fault`] and [`pcap`] are ports that wrap another one, to inject faults and to record packets.
//!
//! To this crate packets are bytes with a path to their destination ([`terrace_wire::Path`]) or metadata of their
//! arrival ([`terrace_wire::RxMeta`]). The one field it owns is the ICRC at the end of each packet. It is added when a
//! packet is sent and checked when a received one is read, because its value depends on addresses, ports and the IPv4
//! identification, which only this crate knows.
//!
//! Nothing here blocks, and nothing here allocates per packet once buffers have grown to their working size.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod counters;
pub mod fault;
pub mod pcap;
mod rx;
pub mod sim;
mod spoil;
mod tx;
pub mod udp;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;

pub use counters::{CountersSnapshot, PortCounters, RxCounters, TxCounters};
pub use rx::{RxBatch, RxPacket};
pub use tx::{TxBatch, TxPacket};

use terrace_wire::ROCE_PORT;

/// An entry of the GID table: one local address of the port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// The GID in verbs: an IPv6 address, or an IPv4 address mapped into IPv6 (IBTA annex A17).
    pub raw: [u8; 16],
    /// The same as an address.
    pub addr: IpAddr,
    /// Name of the address's interface.
    pub interface: String,
    /// Index of that interface, which is also the scope of a link-local address. 0 in a simulated network.
    pub ifindex: u32,
}

impl Gid {
    /// The table entry for an address of an interface.
    pub fn new(addr: IpAddr, interface: impl Into<String>, ifindex: u32) -> Gid {
        let raw = match addr {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        Gid { raw, addr, interface: interface.into(), ifindex }
    }
}

/// A NIC's port in a network.
///
/// Any number of threads may transmit at once. Only one at a time may receive, under the NIC's receive lock.
pub trait Port: Send + Sync {
    /// The local addresses, the configured one first. The table does not change while the port is open.
    fn gids(&self) -> &[Gid];

    /// The process's instance index on this host: the upper 8 bits of its queue pair numbers.
    fn slot(&self) -> u8;

    /// The UDP port of the instance index.
    fn udp_port(&self) -> u16 {
        ROCE_PORT + u16::from(self.slot())
    }

    /// The largest path MTU, in bytes of payload per packet: 256, 512, 1024, 2048 or 4096.
    fn mtu_limit(&self) -> u32;

    /// How many bytes the network buffers for this port before it drops, as the kernel counts them. A lone packet
    /// counts for more than its length: up to 128 bytes 832, one of 1 KiB 2304, one of 4 KiB 8456 (measured on Linux
    /// 6.18). In a GSO run that arrives whole, a packet counts for little more than its length.
    fn receive_buffer_bytes(&self) -> usize;

    /// The port's counters since it was opened.
    fn counters(&self) -> &PortCounters;

    /// Sends packets and removes them from the batch. False means that the network would block: the rest stays
    /// in the batch, and the descriptors become writable when a retry can succeed. Packets that the system
    /// refuses for another reason are counted in `send_errors` and removed, as a network would lose them.
    fn transmit(&self, tx: &mut TxBatch) -> bool;

    /// Fills the batch with received datagrams and returns their number (a GRO run counts once). Never
    /// blocks. Drops the packets that the batch still held.
    ///
    /// A value above 0 does not promise a packet (all may fail their ICRC), nor that the sockets are empty. After a 0,
    /// a GID without recent traffic may still have datagrams. Repeated calls find them within a few times, and
    /// the descriptors stay readable (level-triggered) until they are received.
    fn receive(&self, rx: &mut RxBatch) -> usize;

    /// Descriptors to sleep on until a packet arrives. The list may grow when a GID is activated. They live as long
    /// as the port.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// Starts to receive on a GID other than the first. Polling costs a system call per active GID, so only GIDs
    /// in use are polled. Unknown indexes are ignored. Idempotent.
    fn activate(&self, gid_index: u8);
}

impl<P: Port + ?Sized> Port for Box<P> {
    fn gids(&self) -> &[Gid] {
        (**self).gids()
    }
    fn slot(&self) -> u8 {
        (**self).slot()
    }
    fn udp_port(&self) -> u16 {
        (**self).udp_port()
    }
    fn mtu_limit(&self) -> u32 {
        (**self).mtu_limit()
    }
    fn receive_buffer_bytes(&self) -> usize {
        (**self).receive_buffer_bytes()
    }
    fn counters(&self) -> &PortCounters {
        (**self).counters()
    }
    fn transmit(&self, tx: &mut TxBatch) -> bool {
        (**self).transmit(tx)
    }
    fn receive(&self, rx: &mut RxBatch) -> usize {
        (**self).receive(rx)
    }
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        (**self).descriptors()
    }
    fn activate(&self, gid_index: u8) {
        (**self).activate(gid_index)
    }
}
