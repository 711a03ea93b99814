//! Destination and source of a packet: the part of an address vector that reaches the wire.

use std::net::{IpAddr, SocketAddr};

/// First UDP port of RoCEv2 (IBTA annex A17). A process's instance index is added to it.
pub const ROCE_PORT: u16 = 4791;

/// Bits of a queue pair number within one process; the bits above them are the process's instance index.
pub const QPN_INSTANCE_SHIFT: u32 = 16;

/// The destination of datagrams to a multicast group, in place of a queue pair number (IBTA volume 1, 9.2.2).
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// The UDP port of the owner of a queue pair number. It is 4791 for instance index 0, so that a single process
/// interoperates with other RoCEv2 implementations whose queue pair numbers are below 65,536. The upper bits of a
/// larger number are read as an instance index, and the peer is not reached.
pub fn port_of(qpn: u32) -> u16 {
    ROCE_PORT + ((qpn & 0xff_ffff) >> QPN_INSTANCE_SHIFT) as u16
}

/// The path to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Address of the peer and the UDP port of its instance index.
    pub remote: SocketAddr,
    /// Index of the local GID (and so the local address) from which packets are sent.
    pub source_gid_index: u8,
    /// IPv4 type of service or IPv6 traffic class; the low two bits are ECN.
    pub traffic_class: u8,
    /// IPv4 time to live or IPv6 hop limit; 0 selects the system's default.
    pub hop_limit: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
}

/// Network metadata of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxMeta {
    /// Address and port of the sender.
    pub source: SocketAddr,
    /// Local destination address.
    pub destination: IpAddr,
    /// Index of the local GID with that address.
    pub gid_index: u8,
    /// IPv4 type of service or IPv6 traffic class; the low two bits are ECN (3 = congestion experienced).
    pub traffic_class: u8,
}
