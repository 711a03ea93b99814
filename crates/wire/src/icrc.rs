//! The invariant CRC: a checksum over all fields that no router may change (IBTA volume 1, 7.8; annex A17).
//!
//! It is Ethernet's CRC-32 over 8 bytes of ones, the IP header, the UDP header and the packet, with the fields that
//! routers change replaced by ones. On the wire it is little-endian, behind the padding.
//!
//! The IPv4 identification is covered although sockets do not report it. A CRC is linear, so one pass with any
//! identification yields the one for which the ICRC is correct: see [`verify`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crc32fast::Hasher;

/// Length of the ICRC in bytes.
pub const ICRC_LEN: usize = 4;

const BTH_LEN: usize = 12;
const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
const UDP_PROTOCOL: u8 = 17;
/// Offset in the base transport header of the byte that routers may change (FECN, BECN).
const MASKED_BTH_BYTE: usize = 4;
/// The masked link header, at the beginning of the covered bytes.
const LEAD: [u8; 8] = [0xff; 8];
/// Length of the lead, the longer IP header, the UDP header and the base transport header.
const PREFIX_MAX: usize = LEAD.len() + IPV6_LEN + UDP_LEN + BTH_LEN;

/// Source and destination of a packet. Both are of one family; an IPv4-mapped IPv6 address counts as IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Address and port of the sender.
    pub source: SocketAddr,
    /// Address and port of the receiver.
    pub destination: SocketAddr,
}

/// Result of an ICRC check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The ICRC is correct for this IPv4 identification (0 for IPv6, which has none).
    Good {
        /// The identification, in host order.
        ip_id: u16,
    },
    /// The packet is corrupt, or too short for an ICRC.
    Bad,
}

/// The covered bytes before the payload.
struct Prefix {
    bytes: [u8; PREFIX_MAX],
    len: usize,
    /// Bytes of the packet in the prefix.
    packet_bytes: usize,
}

impl Prefix {
    fn new(flow: &Flow, packet: &[u8], ip_id: u16) -> Prefix {
        let mut prefix = Prefix { bytes: [0xff; PREFIX_MAX], len: LEAD.len(), packet_bytes: 0 };
        let udp_len = (UDP_LEN + packet.len() + ICRC_LEN) as u16;
        match (flow.source.ip().to_canonical(), flow.destination.ip().to_canonical()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => prefix.ipv4(source, destination, udp_len, ip_id),
            (source, destination) => prefix.ipv6(v6(source), v6(destination), udp_len),
        }
        prefix.udp(flow, udp_len);
        prefix.bth(packet);
        prefix
    }

    fn next<const N: usize>(&mut self) -> &mut [u8] {
        self.len += N;
        &mut self.bytes[self.len - N..self.len]
    }

    /// The IPv4 header with type of service, time to live and checksum masked. "Do not fragment" is set: without it
    /// the kernel gives each packet an identification that cannot be known before it is sent.
    fn ipv4(&mut self, source: Ipv4Addr, destination: Ipv4Addr, udp_len: u16, ip_id: u16) {
        let header = self.next::<IPV4_LEN>();
        header[0] = 0x45;
        header[2..4].copy_from_slice(&udp_len.wrapping_add(IPV4_LEN as u16).to_be_bytes());
        header[4..6].copy_from_slice(&ip_id.to_be_bytes());
        header[6..8].copy_from_slice(&[0x40, 0]);
        header[9] = UDP_PROTOCOL;
        header[12..16].copy_from_slice(&source.octets());
        header[16..20].copy_from_slice(&destination.octets());
    }

    /// The IPv6 header with traffic class, flow label and hop limit masked.
    fn ipv6(&mut self, source: Ipv6Addr, destination: Ipv6Addr, udp_len: u16) {
        let header = self.next::<IPV6_LEN>();
        header[0] = 0x6f;
        header[4..6].copy_from_slice(&udp_len.to_be_bytes());
        header[6] = UDP_PROTOCOL;
        header[8..24].copy_from_slice(&source.octets());
        header[24..40].copy_from_slice(&destination.octets());
    }

    /// The UDP header with its checksum masked.
    fn udp(&mut self, flow: &Flow, udp_len: u16) {
        let header = self.next::<UDP_LEN>();
        header[0..2].copy_from_slice(&flow.source.port().to_be_bytes());
        header[2..4].copy_from_slice(&flow.destination.port().to_be_bytes());
        header[4..6].copy_from_slice(&udp_len.to_be_bytes());
    }

    /// The base transport header with the congestion bits masked.
    fn bth(&mut self, packet: &[u8]) {
        self.packet_bytes = packet.len().min(BTH_LEN);
        let bth = &mut self.bytes[self.len..self.len + self.packet_bytes];
        bth.copy_from_slice(&packet[..self.packet_bytes]);
        if let Some(byte) = bth.get_mut(MASKED_BTH_BYTE) {
            *byte = 0xff;
        }
        self.len += self.packet_bytes;
    }
}

fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

/// The ICRC of a packet without one: base transport header to end of padding. `ip_id` is its IPv4
/// identification, in host order; IPv6 ignores it. Any length is accepted, but the result is only meaningful for
/// packets of 12 bytes or more that fit a datagram (65,507 bytes).
pub fn compute(flow: &Flow, packet: &[u8], ip_id: u16) -> u32 {
    let prefix = Prefix::new(flow, packet, ip_id);
    let mut hasher = Hasher::new();
    hasher.update(&prefix.bytes[..prefix.len]);
    hasher.update(&packet[prefix.packet_bytes..]);
    hasher.finalize()
}

/// Writes the ICRC into the last 4 bytes of `buf`, for the packet before them. A buffer of less than 4 bytes is
/// not changed.
pub fn seal(flow: &Flow, buf: &mut [u8], ip_id: u16) {
    if let Some((packet, out)) = buf.split_last_chunk_mut::<ICRC_LEN>() {
        *out = compute(flow, packet, ip_id).to_le_bytes();
    }
}

/// Checks a datagram: base transport header to ICRC. `likely_ip_id` is the IPv4 identification to try first.
///
/// With IPv6 the check is exact. With IPv4 the identification is unknown, and every identification that makes the ICRC
/// correct is accepted. Of the 32 bits, 16 remain checkable, so one corrupt packet in 65,536 passes. The kernel has
/// checked the UDP checksum before, if the sender computed it. A caller that knows the peer's identifications can
/// compare the verdict's identification.
pub fn verify(flow: &Flow, datagram: &[u8], likely_ip_id: u16) -> Verdict {
    let Some((packet, received)) = datagram.split_last_chunk::<ICRC_LEN>() else {
        return Verdict::Bad;
    };
    if packet.len() < BTH_LEN {
        return Verdict::Bad;
    }
    let difference = compute(flow, packet, likely_ip_id) ^ u32::from_le_bytes(*received);
    let is_v4 = flow.source.ip().to_canonical().is_ipv4() && flow.destination.ip().to_canonical().is_ipv4();
    match (difference, is_v4) {
        (0, true) => Verdict::Good { ip_id: likely_ip_id },
        (0, false) => Verdict::Good { ip_id: 0 },
        (_, false) => Verdict::Bad,
        (_, true) => match solve_ip_id(difference, packet.len()) {
            Some(error) => Verdict::Good { ip_id: likely_ip_id ^ error },
            None => Verdict::Bad,
        },
    }
}

/// The error in the identification that explains `difference` between the computed and the received ICRC. `None` if no
/// error does: then other bytes are corrupt.
///
/// The CRC of the sum of two strings is the sum of their CRCs, so `difference` is what the register holds after an
/// error in two bytes and then zeros to the end. Running it backwards over the zeros and those two bytes leaves the
/// register as if the error had been in it from the start: the first byte in the low 8 bits, the second in the next,
/// and nothing above.
fn solve_ip_id(difference: u32, packet_len: usize) -> Option<u16> {
    /// Offset of the identification in the IPv4 header.
    const IP_ID: usize = 4;
    let at_start = rewind(difference, IPV4_LEN - IP_ID + UDP_LEN + packet_len);
    u16::try_from(at_start).ok().map(u16::swap_bytes)
}

/// The polynomial, least significant bit first: bit 31 is x^0.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// The register `bytes` zero bytes earlier: `register` times x^(-8 `bytes`), modulo the polynomial.
fn rewind(register: u32, bytes: usize) -> u32 {
    /// x^(-8 * 2^i), by i: the factor for rewinding 2^i bytes.
    const POWERS: [u32; 17] = {
        let mut powers = [0; 17];
        // One bit back: the inverse of x. Eight of them make a byte.
        let mut one_byte_back = 1 << 31;
        let mut bit = 0;
        while bit < 8 {
            let carry = one_byte_back >> 31;
            one_byte_back = (one_byte_back ^ (carry * POLYNOMIAL)) << 1 | carry;
            bit += 1;
        }
        powers[0] = one_byte_back;
        let mut i = 1;
        while i < powers.len() {
            powers[i] = multiply(powers[i - 1], powers[i - 1]);
            i += 1;
        }
        powers
    };
    POWERS
        .iter()
        .enumerate()
        .filter(|(i, _)| bytes >> i & 1 != 0)
        .fold(register, |register, (_, &power)| multiply(register, power))
}

/// Product of two polynomials modulo [`POLYNOMIAL`], bits in the same order.
const fn multiply(a: u32, b: u32) -> u32 {
    let mut product = 0;
    let mut shifted = b;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        product ^= shifted & 0u32.wrapping_sub(a >> bit & 1);
        // Times x: towards the less significant bits, reduced when x^31 (bit 0) becomes x^32.
        shifted = shifted >> 1 ^ POLYNOMIAL & 0u32.wrapping_sub(shifted & 1);
    }
    product
}
