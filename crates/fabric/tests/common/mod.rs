//! Helpers of the tests: packets with a recognisable content, and loops around a port.
#![allow(dead_code)] // Each test file uses a part of it.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use terrace_fabric::udp::{UdpConfig, UdpPort};
use terrace_fabric::{Port, RxBatch, TxBatch};
use terrace_wire::{Path, RxMeta};

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A port on a loopback address that no other test uses: all of 127.0.0.0/8 is local, and instance indexes are per
/// address.
pub fn port_at(addr: &str) -> UdpPort {
    open(UdpConfig { addr: Some(ip(addr)), ..UdpConfig::default() })
}

pub fn open(config: UdpConfig) -> UdpPort {
    UdpPort::open(&config).expect("the port opens")
}

pub fn address_of(port: &dyn Port) -> SocketAddr {
    SocketAddr::new(port.gids()[0].addr, port.udp_port())
}

pub fn path_to(remote: SocketAddr) -> Path {
    Path { remote, source_gid_index: 0, traffic_class: 0, hop_limit: 0, flow_label: 0 }
}

/// A packet of `len` bytes that depend on the number.
pub fn packet(number: u32, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..len).map(|at| (at as u32).wrapping_mul(31).wrapping_add(number) as u8).collect();
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

pub fn number_of(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().expect("four bytes"))
}

pub fn push(tx: &mut TxBatch, path: &Path, bytes: &[u8]) {
    tx.push(path, bytes.len()).expect("space in the batch").copy_from_slice(bytes);
}

/// Sends one packet.
pub fn send(port: &dyn Port, path: &Path, bytes: &[u8]) {
    let mut tx = TxBatch::new(0);
    push(&mut tx, path, bytes);
    assert!(port.transmit(&mut tx), "a loopback does not block");
}

/// Receives until there are `count` packets, or for two seconds.
pub fn receive(port: &dyn Port, count: usize) -> Vec<(RxMeta, Vec<u8>)> {
    receive_for(port, count, Duration::from_secs(2))
}

/// Receives until there are `count` packets, or for `time`.
pub fn receive_for(port: &dyn Port, count: usize, time: Duration) -> Vec<(RxMeta, Vec<u8>)> {
    let until = Instant::now() + time;
    let mut rx = RxBatch::new();
    let mut packets = Vec::new();
    while packets.len() < count && Instant::now() < until {
        if port.receive(&mut rx) == 0 {
            std::thread::yield_now();
        }
        let mut following = Vec::new();
        while let Some(packet) = rx.next() {
            let is_next = following.is_empty() || following.starts_with(packet.bytes);
            assert!(
                is_next || port.counters().snapshot().bad_icrc > 0,
                "the packet before has announced another"
            );
            following = packet.following.to_vec();
            packets.push((packet.meta, packet.bytes.to_vec()));
        }
        assert!(
            following.is_empty() || port.counters().snapshot().bad_icrc > 0,
            "a packet has announced one more"
        );
    }
    packets
}

/// Receives the packets that are queued or arrive soon.
pub fn receive_rest(port: &dyn Port) -> Vec<(RxMeta, Vec<u8>)> {
    receive_for(port, usize::MAX, Duration::from_millis(100))
}
