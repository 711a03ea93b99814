//! The 40 bytes before a received datagram in the program's memory. On RoCEv2 they hold the IP header instead of
//! InfiniBand's global route header: an IPv6 header in full, or an IPv4 header in the last 20 bytes (annex A17).
//!
//! A socket does not return the received header, so it is rebuilt from the known fields.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::icrc::ICRC_LEN;
use crate::path::RxMeta;

/// Length of the area in bytes.
pub const GRH_LEN: usize = 40;

const IPV4_LEN: usize = 20;
const UDP_LEN: usize = 8;
const UDP_PROTOCOL: u8 = 17;
/// The hop limit of rebuilt headers. The socket does not report the received one.
const HOP_LIMIT: u8 = 64;

/// The area for a packet received over IPv6. `packet_len` is its length in bytes from base transport header to end of
/// padding. An IPv4 address in `meta` becomes an IPv4-mapped one.
pub fn grh_v6(meta: &RxMeta, packet_len: usize) -> [u8; GRH_LEN] {
    let mut grh = [0; GRH_LEN];
    let payload_len = (UDP_LEN + packet_len + ICRC_LEN) as u16;
    grh[..4].copy_from_slice(&(6 << 28 | u32::from(meta.traffic_class) << 20).to_be_bytes());
    grh[4..6].copy_from_slice(&payload_len.to_be_bytes());
    grh[6] = UDP_PROTOCOL;
    grh[7] = HOP_LIMIT;
    grh[8..24].copy_from_slice(&v6(meta.source.ip()).octets());
    grh[24..].copy_from_slice(&v6(meta.destination).octets());
    grh
}

/// The area for a packet received over IPv4: 20 bytes of zero, then the IPv4 header with its checksum, by which
/// `ibv_init_ah_from_wc` distinguishes the two kinds. `packet_len` is the packet's length in bytes from base transport
/// header to end of padding. An IPv6 address in `meta` that maps no IPv4 address becomes 0.0.0.0.
pub fn grh_v4(meta: &RxMeta, packet_len: usize) -> [u8; GRH_LEN] {
    let mut grh = [0; GRH_LEN];
    let total_len = (IPV4_LEN + UDP_LEN + packet_len + ICRC_LEN) as u16;
    let header = &mut grh[GRH_LEN - IPV4_LEN..];
    header[0] = 0x45;
    header[1] = meta.traffic_class;
    header[2..4].copy_from_slice(&total_len.to_be_bytes());
    header[6] = 0x40; // Do not fragment: RoCEv2 packets never are.
    header[8] = HOP_LIMIT;
    header[9] = UDP_PROTOCOL;
    header[12..16].copy_from_slice(&v4(meta.source.ip()).octets());
    header[16..20].copy_from_slice(&v4(meta.destination).octets());
    let checksum = internet_checksum(header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    grh
}

/// The area for a packet, by its address family. An IPv4-mapped address counts as IPv4, because the packet on the
/// wire was IPv4.
pub fn for_packet(meta: &RxMeta, packet_len: usize) -> [u8; GRH_LEN] {
    match meta.source {
        SocketAddr::V6(source) if source.ip().to_ipv4_mapped().is_none() => grh_v6(meta, packet_len),
        _ => grh_v4(meta, packet_len),
    }
}

fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

fn v4(address: IpAddr) -> Ipv4Addr {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4,
        IpAddr::V6(_) => Ipv4Addr::UNSPECIFIED,
    }
}

/// The RFC 1071 checksum of a header whose checksum field is zero.
fn internet_checksum(header: &[u8]) -> u16 {
    let mut sum: u32 =
        header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
