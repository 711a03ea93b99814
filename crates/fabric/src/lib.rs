//! Sends and receives packets. A [`Port`] is a NIC's port in a network: real UDP sockets ([`udp`]), or a seeded
//! simulation ([`sim`]). The ports of [`fault`] and [`pcap`] wrap another one, to inject faults and to record packets.
//!
//! In this crate a packet is bytes with a path to the destination ([`terrace_wire::Path`]) or with metadata of the
//! arrival ([`terrace_wire::RxMeta`]). The only field that this crate writes is the ICRC at the end of each packet. The
//! ICRC is added when a packet is sent, and checked when a received packet is read. Its value depends on addresses,
//! ports and the IPv4 identification, which only this crate knows.
//!
//! No function blocks, and none allocates memory per packet once buffers have grown to their working size.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod corrupt;
mod counters;
pub mod fault;
pub mod pcap;
mod rx;
pub mod sim;
mod tx;
pub mod udp;

use std::io;
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
    /// The GID as an IP address.
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
/// Any number of threads may transmit concurrently. One thread at a time may receive, under the NIC's receive lock.
pub trait Port: Send + Sync {
    /// The local addresses, the configured one first. The table does not change while the port is open.
    fn gids(&self) -> &[Gid];

    /// The process's instance index on this host: the upper 8 bits of its queue pair numbers.
    fn instance(&self) -> u8;

    /// The UDP port of the instance index.
    fn udp_port(&self) -> u16 {
        ROCE_PORT + u16::from(self.instance())
    }

    /// The largest path MTU, in bytes of payload per packet: 256, 512, 1024, 2048 or 4096.
    fn mtu_limit(&self) -> u32;

    /// The receive buffer's size in bytes, as the kernel accounts it. A single packet is charged more than its length:
    /// up to 128 bytes 832, 1 KiB 2304, 4 KiB 8456 (measured on Linux 6.18). In a GSO run that arrives as a whole, a
    /// packet is charged little more than its length.
    fn receive_buffer_bytes(&self) -> usize;

    /// The port's counters since it was opened.
    fn counters(&self) -> &PortCounters;

    /// Sends packets and removes them from the batch. Returns false if the network would block: the other packets stay
    /// in the batch, and [`Port::sending_descriptor`] becomes writable when a retry can succeed. Packets whose send fails for another
    /// reason are counted in `send_errors` and removed, as if the network had lost them.
    fn transmit(&self, tx: &mut TxBatch) -> bool;

    /// Fills the batch with received datagrams and returns their number (a GRO run counts once). Never blocks. Drops
    /// the packets that were still in the batch.
    ///
    /// A value above 0 guarantees neither a valid packet (all may fail the ICRC check) nor that the sockets are empty.
    /// After a 0, a GID without recent traffic may still have datagrams. A few more calls receive them, and the
    /// descriptors stay readable (level-triggered) until then.
    fn receive(&self, rx: &mut RxBatch) -> usize;

    /// The descriptors to poll for the arrival of a packet. The list may grow when a GID is activated. The descriptors
    /// are open as long as the port.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;

    /// The descriptor that becomes writable when the network takes packets from this GID again; `None` if all of
    /// [`Port::descriptors`] are to be waited for.
    fn sending_descriptor(&self, _gid_index: u8) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Starts to receive on a GID other than the first. Polling costs a system call per active GID, so only active GIDs
    /// are polled. Unknown indexes are ignored. Idempotent.
    fn activate(&self, gid_index: u8);

    /// Joins a multicast group on the interface of the first GID of its family: [`Port::receive`] returns the datagrams
    /// that anyone sends to the group, this port included. Their destination is the group. Idempotent.
    ///
    /// # Errors
    /// `AddrNotAvailable` without a GID of the family; the system's errors.
    fn join(&self, group: IpAddr) -> io::Result<()>;

    /// Leaves a multicast group. Unknown groups are ignored.
    fn leave(&self, group: IpAddr);
}

impl<P: Port + ?Sized> Port for Box<P> {
    fn gids(&self) -> &[Gid] {
        (**self).gids()
    }
    fn instance(&self) -> u8 {
        (**self).instance()
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
    fn sending_descriptor(&self, gid_index: u8) -> Option<BorrowedFd<'_>> {
        (**self).sending_descriptor(gid_index)
    }
    fn activate(&self, gid_index: u8) {
        (**self).activate(gid_index)
    }
    fn join(&self, group: IpAddr) -> io::Result<()> {
        (**self).join(group)
    }
    fn leave(&self, group: IpAddr) {
        (**self).leave(group)
    }
}
