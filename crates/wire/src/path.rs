//! Where a packet goes and where it came from: the part of an address vector that reaches the wire.

use std::net::{IpAddr, SocketAddr};

/// First UDP port of RoCEv2 (IBTA annex A17). A process's slot is added to it.
pub const ROCE_PORT: u16 = 4791;

/// Bits of a queue pair number that count within one process; the bits above them are the process's slot.
pub const QPN_SLOT_SHIFT: u32 = 16;

/// The UDP port at which the owner of a queue pair number listens: 4791 for slot 0, so that a single process
/// interoperates with RoCEv2 peers of other makes, as long as their queue pair numbers stay below 65,536. A larger one of theirs is
/// taken for a slot, and not reached.
pub fn port_of(qpn: u32) -> u16 {
    ROCE_PORT + ((qpn & 0xff_ffff) >> QPN_SLOT_SHIFT) as u16
}

/// The way to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Address of the peer and the port of its slot.
    pub remote: SocketAddr,
    /// Index of the local GID (and so the local address) that packets leave from.
    pub source_gid_index: u8,
    /// IPv4 type of service or IPv6 traffic class; the low two bits are ECN.
    pub traffic_class: u8,
    /// IPv4 time to live or IPv6 hop limit; 0 leaves it to the system.
    pub hop_limit: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
}

/// What the network said about a packet that came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxMeta {
    /// Address and port that the packet came from.
    pub source: SocketAddr,
    /// Local address that it was sent to.
    pub destination: IpAddr,
    /// Index of the local GID that has that address.
    pub gid_index: u8,
    /// IPv4 type of service or IPv6 traffic class; the low two bits are ECN (3 = congestion experienced).
    pub traffic_class: u8,
}
