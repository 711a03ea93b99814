//! The packets on the wire, sniffed from an interface without segmentation offload.
//!
//! The outer tests run the inner ones in a separate network namespace. Its loopback interface has no segmentation
//! offload, so the kernel segments GSO sends before the sniffer receives them. Where namespaces are not allowed, the
//! tests are skipped.

mod common;

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;
use socket2::{Domain, Protocol, Socket, Type};
use terrace_fabric::{Port, TxBatch};
use terrace_wire::icrc::{self, Flow};

const ETH_P_ALL: u16 = 3;

/// Runs an ignored test of this file in a new network namespace.
fn in_namespace(test: &str) {
    let script = "ip link set lo up && ip link set lo gso_max_segs 1 && exec \"$0\" --exact \"$1\" --ignored --nocapture";
    let exe = std::env::current_exe().expect("this program");
    let possible = Command::new("unshare").args(["-rn", "ip", "link"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no network namespace, or no `ip`, for this user");
        return;
    }
    let output =
        Command::new("unshare").args(["-rn", "sh", "-c", script]).arg(exe).arg(test).output().expect("run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
}

#[test]
fn identification_and_icrc_of_ipv4_packets() {
    in_namespace("inner_ipv4");
}

#[test]
fn icrc_of_ipv6_packets() {
    in_namespace("inner_ipv6");
}

/// One sniffed UDP packet.
struct Sniffed {
    flow: Flow,
    ip_id: u16,
    dont_fragment: bool,
    sealed: Vec<u8>,
}

fn sniffer() -> Socket {
    let protocol = Protocol::from(i32::from(ETH_P_ALL.to_be()));
    let socket = Socket::new(Domain::PACKET, Type::RAW, Some(protocol)).expect("a packet socket");
    socket.set_nonblocking(true).expect("non-blocking");
    socket.set_recv_buffer_size(4 << 20).expect("a buffer");
    socket
}

/// Sniffs until no more packets arrive. The loopback interface reports each packet twice, when sent and when received;
/// one of the two is kept.
fn sniffed(mut socket: Socket) -> Vec<Sniffed> {
    let mut frame = vec![0; 70_000];
    let mut packets: Vec<Sniffed> = Vec::new();
    let mut until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until {
        if let Ok(len) = socket.read(&mut frame) {
            let packet = parse(&frame[14..len]);
            packets.extend(packet.filter(|new| packets.iter().all(|old| old.sealed != new.sealed)));
            until = Instant::now() + Duration::from_millis(200);
        }
    }
    packets
}

fn parse(ip: &[u8]) -> Option<Sniffed> {
    let word = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
    let (source, destination, header_len): (IpAddr, IpAddr, usize) = match ip[0] >> 4 {
        4 if ip[9] == 17 => (v4(&ip[12..16]), v4(&ip[16..20]), 20),
        6 if ip[6] == 17 => (v6(&ip[8..24]), v6(&ip[24..40]), 40),
        _ => return None,
    };
    let udp_len = usize::from(word(header_len + 4));
    Some(Sniffed {
        flow: Flow {
            source: SocketAddr::new(source, word(header_len)),
            destination: SocketAddr::new(destination, word(header_len + 2)),
        },
        ip_id: if header_len == 20 { word(4) } else { 0 },
        dont_fragment: header_len == 40 || ip[6] == 0x40,
        sealed: ip[header_len + 8..header_len + udp_len].to_vec(),
    })
}

fn v4(octets: &[u8]) -> IpAddr {
    Ipv4Addr::from(<[u8; 4]>::try_from(octets).expect("four bytes")).into()
}

fn v6(octets: &[u8]) -> IpAddr {
    Ipv6Addr::from(<[u8; 16]>::try_from(octets).expect("sixteen bytes")).into()
}

/// Sends single packets and runs, and returns the sniffed packets, whose ICRCs are checked.
fn exchange(addr: &str) -> Vec<Sniffed> {
    let [sender, receiver] = [(); 2].map(|()| port_at(addr));
    let socket = sniffer();
    let path = path_to(address_of(&receiver));
    let mut tx = TxBatch::new(1 << 20);
    for (number, len) in [(0, 60), (1, 4108), (2, 4108), (3, 4108), (4, 1000), (5, 60)] {
        push(&mut tx, &path, &packet(number, len));
    }
    assert!(sender.transmit(&mut tx));
    // 60 | 4108 4108 4108 1000 | 60, but a shorter packet may end the run that it follows: 4108 4108 4108 1000.
    assert_eq!(sender.counters().snapshot().tx_calls, 3);
    let received = receive(&receiver, 6);
    assert_eq!(received.len(), 6, "the receiver takes what was cut up");
    let packets = sniffed(socket);
    assert_eq!(packets.len(), 6);
    for (packet, number) in packets.iter().zip(0..) {
        let (bytes, icrc) = packet.sealed.split_last_chunk::<4>().expect("an ICRC");
        assert_eq!(number_of(bytes), number);
        assert_eq!(packet.flow, Flow { source: address_of(&sender), destination: address_of(&receiver) });
        assert!(packet.dont_fragment);
        assert_eq!(
            icrc::compute(&packet.flow, bytes, packet.ip_id),
            u32::from_le_bytes(*icrc),
            "packet {number}"
        );
    }
    packets
}

#[test]
#[ignore = "runs in a namespace made by identification_and_icrc_of_ipv4_packets"]
fn inner_ipv4() {
    let ids: Vec<u16> = exchange("127.0.0.1").iter().map(|packet| packet.ip_id).collect();
    assert_eq!(ids, [0, 0, 1, 2, 3, 0]);
}

#[test]
#[ignore = "runs in a namespace made by icrc_of_ipv6_packets"]
fn inner_ipv6() {
    exchange("::1");
}
