//! The invariant CRC against other implementations, and the errors that its check misses.

use std::net::{IpAddr, SocketAddr};

use proptest::prelude::*;
use terrace_wire::icrc::{Flow, Verdict, compute, seal, verify};

fn flow(source: &str, destination: &str) -> Flow {
    let parse = |address: &str| address.parse().expect("a literal socket address");
    Flow { source: parse(source), destination: parse(destination) }
}

/// CRC-32 of Ethernet, one bit at a time, as the specification's figure draws the shift register.
fn bitwise_crc(bytes: &[u8]) -> u32 {
    let mut register = u32::MAX;
    for byte in bytes {
        for bit in 0..8 {
            let feedback = (register ^ u32::from(byte >> bit)) & 1;
            register = register >> 1 ^ if feedback != 0 { 0xedb8_8320 } else { 0 };
        }
    }
    !register
}

/// Values that routers and hosts may write into the fields that the ICRC does not cover.
#[derive(Clone, Copy, Debug)]
struct Variable {
    class: u8,
    hop_limit: u8,
    flow_label: u32,
    ip_checksum: u16,
    udp_checksum: u16,
}

fn ipv4_header(flow: &Flow, udp_len: u16, ip_id: u16, v: Variable) -> Vec<u8> {
    let (IpAddr::V4(source), IpAddr::V4(destination)) = (flow.source.ip(), flow.destination.ip()) else {
        panic!("not an IPv4 flow");
    };
    let mut bytes = vec![0x45, v.class];
    bytes.extend((udp_len + 20).to_be_bytes());
    bytes.extend(ip_id.to_be_bytes());
    bytes.extend([0x40, 0x00, v.hop_limit, 17]);
    bytes.extend(v.ip_checksum.to_be_bytes());
    bytes.extend(source.octets());
    bytes.extend(destination.octets());
    bytes
}

fn ipv6_header(flow: &Flow, udp_len: u16, v: Variable) -> Vec<u8> {
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (flow.source.ip(), flow.destination.ip()) else {
        panic!("not an IPv6 flow");
    };
    let first_word = 6 << 28 | u32::from(v.class) << 20 | v.flow_label & 0xf_ffff;
    let mut bytes = first_word.to_be_bytes().to_vec();
    bytes.extend(udp_len.to_be_bytes());
    bytes.extend([17, v.hop_limit]);
    bytes.extend(source.octets());
    bytes.extend(destination.octets());
    bytes
}

/// The ICRC by definition: builds the whole IP packet, masks its variable fields at their offsets, and computes the CRC
/// bit by bit.
fn reference_icrc(flow: &Flow, packet: &[u8], ip_id: u16, v: Variable) -> u32 {
    let udp_len = packet.len() as u16 + 8 + 4;
    let is_v4 = flow.source.is_ipv4();
    let mut ip = if is_v4 { ipv4_header(flow, udp_len, ip_id, v) } else { ipv6_header(flow, udp_len, v) };
    let udp_at = ip.len();
    ip.extend(flow.source.port().to_be_bytes());
    ip.extend(flow.destination.port().to_be_bytes());
    ip.extend(udp_len.to_be_bytes());
    ip.extend(v.udp_checksum.to_be_bytes());
    ip.extend(packet);
    let masked: &[usize] = if is_v4 { &[1, 8, 10, 11] } else { &[1, 2, 3, 7] };
    for &at in masked.iter().chain(&[udp_at + 6, udp_at + 7, udp_at + 8 + 4]) {
        ip[at] = 0xff;
    }
    if !is_v4 {
        ip[0] |= 0x0f;
    }
    bitwise_crc(&[&[0xff; 8][..], &ip].concat())
}

fn hex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex digits");
    (0..text.len()).step_by(2).map(byte).collect()
}

/// Checks that `seal` reproduces a datagram's ICRC.
fn check_vector(flow: &Flow, datagram: &str, ip_id: u16) {
    let expected = hex(datagram);
    let mut sealed = expected.clone();
    let room = sealed.len() - 4;
    sealed[room..].fill(0);
    seal(flow, &mut sealed, ip_id);
    assert_eq!(sealed, expected);
    assert_eq!(verify(flow, &expected, ip_id), Verdict::Good { ip_id });
    assert_eq!(verify(flow, &expected, ip_id.wrapping_add(77)), Verdict::Good { ip_id });
}

/// Made by scapy 2.8.0's RoCE layer (`scapy.contrib.roce`, from PyPI), which fills in the ICRC by its own code:
/// `IP(src="10.0.0.1", dst="10.0.0.2", id=0, flags="DF", ttl=64, tos=2) / UDP(sport=49152, dport=4791) /
/// BTH(opcode=0x11, migreq=1, dqpn=0x12, psn=0x55aa01) / AETH(syndrome=0x1f, msn=7)`.
#[test]
fn scapy_acknowledgement_ipv4() {
    let flow = flow("10.0.0.1:49152", "10.0.0.2:4791");
    check_vector(&flow, "1140ffff000000120055aa011f000007323341de", 0);
}

/// As above: `IP(src="192.168.7.9", dst="192.168.7.10", id=0xbeef, flags="DF", ttl=63) / UDP(sport=0xc123, dport=4791)
/// / BTH(opcode=0x04, solicited=1, padcount=3, dqpn=0x10011, ackreq=1, psn=0xffffff) / Raw(b"hello" + 3 * b"\0")`.
#[test]
fn scapy_send_ipv4_with_identification() {
    let flow = flow("192.168.7.9:49443", "192.168.7.10:4791");
    check_vector(&flow, "04b0ffff0001001180ffffff68656c6c6f000000bb8b19aa", 0xbeef);
}

/// As above: `IPv6(src="fd00::1", dst="fe80::42", tc=0x69, fl=0x12345, hlim=3) / UDP(sport=4792, dport=4791) /
/// BTH(opcode=0x0a, dqpn=0xabcdef, psn=3, ackreq=1) / Raw(RETH and b"12345678")`.
#[test]
fn scapy_write_ipv6() {
    let flow = flow("[fd00::1]:4792", "[fe80::42]:4791");
    let datagram = hex("0a00ffff00abcdef800000031122334455667788deadbeef000000083132333435363738353e48d6");
    assert_eq!(verify(&flow, &datagram, 0), Verdict::Good { ip_id: 0 });
    assert_eq!(verify(&flow, &datagram, 9), Verdict::Good { ip_id: 0 }, "IPv6 has no identification");
}

/// A CNP that a ConnectX-4 Lx sent, from scapy's own tests: real hardware's ICRC, with an identification of 0x718c,
/// traffic class 0xc2 and source port 0.
#[test]
fn connectx_congestion_notification() {
    let flow = flow("10.0.17.1:0", "10.0.18.1:4791");
    let datagram = format!("8100ffff4000011800000000{}82fd002a", "00".repeat(16));
    check_vector(&flow, &datagram, 0x718c);
}

#[test]
fn an_ipv4_mapped_address_is_ipv4() {
    let mapped = flow("[::ffff:10.0.0.1]:49152", "[::ffff:10.0.0.2]:4791");
    check_vector(&mapped, "1140ffff000000120055aa011f000007323341de", 0);
}

fn address(v4: bool) -> BoxedStrategy<IpAddr> {
    if v4 { any::<[u8; 4]>().prop_map(IpAddr::from).boxed() } else { global_v6().boxed() }
}

/// IPv6 addresses that map no IPv4 address.
fn global_v6() -> impl Strategy<Value = IpAddr> {
    any::<[u8; 16]>().prop_map(|mut octets| {
        octets[0] = 0xfd;
        IpAddr::from(octets)
    })
}

fn any_flow() -> impl Strategy<Value = Flow> {
    any::<bool>().prop_flat_map(|v4| {
        (address(v4), address(v4), any::<(u16, u16)>()).prop_map(|(source, destination, ports)| Flow {
            source: SocketAddr::new(source, ports.0),
            destination: SocketAddr::new(destination, ports.1),
        })
    })
}

prop_compose! {
    fn variable()(class: u8, hop_limit: u8, flow_label: u32, ip_checksum: u16, udp_checksum: u16) -> Variable {
        Variable { class, hop_limit, flow_label, ip_checksum, udp_checksum }
    }
}

fn packet() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 12..300)
}

fn with_icrc(packet: &[u8], icrc: u32) -> Vec<u8> {
    [packet, &icrc.to_le_bytes()].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn agrees_with_the_definition(flow in any_flow(), packet in packet(), ip_id: u16, variable in variable()) {
        let expected = reference_icrc(&flow, &packet, ip_id, variable);
        prop_assert_eq!(compute(&flow, &packet, ip_id), expected);
    }

    #[test]
    fn the_identification_is_found(
        flow in any_flow(),
        packet in proptest::collection::vec(any::<u8>(), 12..5_000),
        ip_id: u16,
        likely: u16,
    ) {
        let datagram = with_icrc(&packet, compute(&flow, &packet, ip_id));
        let expected = if flow.source.is_ipv4() { ip_id } else { 0 };
        prop_assert_eq!(verify(&flow, &datagram, likely), Verdict::Good { ip_id: expected });
    }

    #[test]
    fn congestion_bits_may_change(flow in any_flow(), packet in packet(), bits: u8) {
        let mut datagram = with_icrc(&packet, compute(&flow, &packet, 0));
        datagram[4] ^= bits;
        prop_assert_eq!(verify(&flow, &datagram, 0), Verdict::Good { ip_id: 0 });
    }

    #[test]
    fn any_bytes_return_a_verdict(flow in any_flow(), datagram in proptest::collection::vec(any::<u8>(), 0..40)) {
        let verdict = verify(&flow, &datagram, 0);
        if datagram.len() < 16 {
            prop_assert_eq!(verdict, Verdict::Bad);
        }
        let mut sealed = datagram.clone();
        seal(&flow, &mut sealed, 0);
        let covered = datagram.len().saturating_sub(4);
        prop_assert_eq!(&sealed[..covered], &datagram[..covered]);
    }
}

/// Flips each bit of a datagram outside the masked byte, and counts the verdicts that are not `Bad`.
fn undetected_flips(flow: &Flow, packet: &[u8]) -> usize {
    let sound = with_icrc(packet, compute(flow, packet, 0));
    let flips = (0..sound.len() * 8).filter(|bit| bit / 8 != 4);
    flips
        .filter(|bit| {
            let mut damaged = sound.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            verify(flow, &damaged, 0) != Verdict::Bad
        })
        .count()
}

#[test]
fn a_flipped_bit_is_detected() {
    let packet: Vec<u8> = (0..200).collect();
    assert_eq!(undetected_flips(&flow("[fd00::1]:1", "[fd00::2]:4791"), &packet), 0);
    assert_eq!(undetected_flips(&flow("10.0.0.1:1", "10.0.0.2:4791"), &packet), 0);
}

#[test]
fn a_foreign_address_or_port_is_detected() {
    let packet = [7; 60];
    let sent = flow("10.0.0.1:49152", "10.0.0.2:4791");
    let datagram = with_icrc(&packet, compute(&sent, &packet, 0));
    for seen in [
        flow("10.0.0.3:49152", "10.0.0.2:4791"),
        flow("10.0.0.1:49153", "10.0.0.2:4791"),
        flow("10.0.0.1:49152", "10.0.0.4:4791"),
        flow("10.0.0.1:49152", "10.0.0.2:4792"),
    ] {
        assert_eq!(verify(&seen, &datagram, 0), Verdict::Bad, "{seen:?}");
    }
}

/// Solving for the identification costs 16 bits of the check: 65,536 of the 2^32 ICRCs pass, one per identification.
/// With IPv6 exactly one passes.
#[test]
fn solving_leaves_sixteen_bits_of_check() {
    let packet = [0x5a; 36];
    let v4 = flow("10.0.0.1:49152", "10.0.0.2:4791");
    let v6 = flow("[fd00::1]:49152", "[fd00::2]:4791");
    let tries = 1 << 20;
    // An odd multiplier visits every value once in 2^32 steps, spread evenly.
    let forged = (0..tries).map(|i: u32| with_icrc(&packet, i.wrapping_mul(0x9e37_79b1)));
    let (mut passed_v4, mut passed_v6) = (0, 0);
    for datagram in forged {
        passed_v4 += u32::from(verify(&v4, &datagram, 0) != Verdict::Bad);
        passed_v6 += u32::from(verify(&v6, &datagram, 0) != Verdict::Bad);
    }
    let expected = tries >> 16;
    assert!(passed_v4 > 0 && passed_v4 < 4 * expected, "{passed_v4} passed, about {expected} expected");
    assert_eq!(passed_v6, 0);
}

#[test]
fn a_buffer_too_short_for_an_icrc_is_unchanged() {
    let mut short = [1, 2, 3];
    seal(&flow("10.0.0.1:1", "10.0.0.2:2"), &mut short, 0);
    assert_eq!(short, [1, 2, 3]);
}

#[test]
fn lengths_beyond_a_datagram_do_not_panic() {
    let huge = vec![0; 300_000];
    for flow in [flow("10.0.0.1:1", "10.0.0.2:2"), flow("[fd00::1]:1", "[fd00::2]:2")] {
        let sealed = with_icrc(&huge, compute(&flow, &huge, 0));
        assert_eq!(verify(&flow, &sealed, 0), Verdict::Good { ip_id: 0 });
    }
}
