//! Ports over real sockets, on the loopback.

mod common;

use std::net::{SocketAddr, UdpSocket};

use common::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_fabric::udp::{OpenError, Probe, UdpConfig, UdpPort};
use terrace_fabric::{Port, TxBatch};
use terrace_wire::icrc::{self, Flow};
use terrace_wire::{Path, ROCE_PORT};

/// Sends runs of random lengths from one port to several, and checks that each receives its packets complete and in
/// order.
fn exchange(sender: &UdpPort, receivers: &[UdpPort], seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut tx = TxBatch::new(256 << 10);
    let mut expected = vec![Vec::new(); receivers.len()];
    let mut number = 0;
    while number < 2000 {
        let to = rng.random_range(0..receivers.len());
        let path = path_to(address_of(&receivers[to]));
        let len = if rng.random_bool(0.5) { 4108 } else { rng.random_range(12..4200) };
        for _ in 0..rng.random_range(1..40) {
            number += 1;
            let bytes = packet(number, len);
            if tx.len() > 100 || tx.push(&path, len).is_none() {
                assert!(sender.transmit(&mut tx));
            } else {
                tx.cancel();
            }
            push(&mut tx, &path, &bytes);
            expected[to].push(bytes);
            if rng.random_bool(0.1) {
                let last = packet(number + 100_000, rng.random_range(12..=len));
                push(&mut tx, &path, &last);
                expected[to].push(last);
            }
        }
        assert!(sender.transmit(&mut tx));
        assert!(tx.is_empty());
        for (receiver, expected) in receivers.iter().zip(&mut expected) {
            let received = receive(receiver, expected.len());
            assert!(received.iter().all(|(meta, _)| meta.source == address_of(sender)));
            assert!(received.iter().all(|(meta, _)| meta.destination == receiver.gids()[0].addr));
            let bytes: Vec<Vec<u8>> = received.into_iter().map(|(_, bytes)| bytes).collect();
            assert_eq!(bytes.len(), expected.len());
            assert!(bytes == *expected, "packets differ, seed {seed}");
            expected.clear();
        }
    }
    let sent = sender.counters().snapshot();
    assert_eq!(sent.send_errors, 0);
    assert!(sent.tx_calls * 4 < sent.tx_packets, "runs leave in one call: {sent:?}");
    let received: u64 = receivers.iter().map(|port| port.counters().snapshot().rx_packets).sum();
    assert_eq!(received, sent.tx_packets);
    assert!(receivers.iter().all(|port| port.counters().snapshot().bad_icrc == 0));
}

#[test]
fn batches_of_mixed_sizes_and_paths_arrive_complete_over_ipv4() {
    let receivers = ["127.81.0.2", "127.81.0.2", "127.81.0.3"].map(port_at);
    exchange(&port_at("127.81.0.1"), &receivers, 1);
}

#[test]
fn batches_of_mixed_sizes_and_paths_arrive_complete_over_ipv6() {
    let receivers = ["::1", "::1"].map(port_at);
    exchange(&port_at("::1"), &receivers, 2);
}

#[test]
fn link_local_addresses_need_no_scope_from_the_caller() {
    let gid = UdpPort::open(&UdpConfig::default()).expect("a port").gids().to_vec();
    let Some(addr) = gid.iter().map(|gid| gid.addr).find(|addr| addr.to_string().starts_with("fe80")) else {
        eprintln!("skipped: the default interface has no link-local address");
        return;
    };
    let [sender, receiver] = [(); 2].map(|()| open(UdpConfig { addr: Some(addr), ..UdpConfig::default() }));
    let bytes = packet(5, 100);
    send(&sender, &path_to(address_of(&receiver)), &bytes);
    let received = receive(&receiver, 1);
    assert_eq!(received.len(), 1);
    assert_eq!(received[0].1, bytes);
    // The response goes to the packet's source address, including its scope.
    send(&receiver, &path_to(received[0].0.source), &bytes);
    assert_eq!(receive(&sender, 1).len(), 1);
}

#[test]
fn a_further_gid_receives_once_it_is_active() {
    let sender = open(UdpConfig { addr: Some(ip("127.0.0.1")), ..UdpConfig::default() });
    let receiver = open(UdpConfig { addr: Some(ip("127.0.0.1")), ..UdpConfig::default() });
    let (Some(from), Some(to)) = (sender.gids().get(1), receiver.gids().get(1)) else {
        eprintln!("skipped: ::1 is not there or taken");
        return;
    };
    assert_eq!((from.addr, to.addr), (ip("::1"), ip("::1")));
    let path = Path { source_gid_index: 1, ..path_to(SocketAddr::new(to.addr, receiver.udp_port())) };
    send(&sender, &path, &packet(1, 64));
    assert!(receive_rest(&receiver).is_empty());
    assert_eq!(receiver.descriptors().len(), 1);
    receiver.activate(1);
    receiver.activate(1);
    receiver.activate(77);
    assert_eq!(receiver.descriptors().len(), 2);
    let received = receive(&receiver, 1);
    assert_eq!(received[0].0.gid_index, 1);
    assert_eq!(received[0].0.source, SocketAddr::new(from.addr, sender.udp_port()));
}

#[test]
fn a_packet_from_an_unknown_gid_is_a_send_error() {
    let port = port_at("127.81.1.1");
    send(&port, &Path { source_gid_index: 9, ..path_to(address_of(&port)) }, &packet(1, 64));
    assert_eq!(port.counters().snapshot().send_errors, 1);
}

#[test]
fn failed_sends_are_counted_and_do_not_stop_the_others() {
    let [sender, receiver] = ["127.81.2.1", "127.81.2.2"].map(port_at);
    let mut tx = TxBatch::new(1 << 20);
    let nowhere = path_to("255.255.255.255:4791".parse().unwrap());
    for number in 0..5 {
        push(&mut tx, &nowhere, &packet(number, 500));
    }
    for number in 0..5 {
        push(&mut tx, &path_to(address_of(&receiver)), &packet(number, 500));
    }
    assert!(sender.transmit(&mut tx));
    assert_eq!(receive(&receiver, 5).len(), 5);
    let counters = sender.counters().snapshot();
    assert_eq!((counters.send_errors, counters.tx_packets, counters.tx_calls), (5, 5, 1));
}

#[test]
fn traffic_class_and_ecn_are_transmitted() {
    for (from, to) in [("127.81.3.1", "127.81.3.2"), ("::1", "::1")] {
        let [sender, receiver] = [from, to].map(port_at);
        let mut tx = TxBatch::new(0);
        for (number, traffic_class) in [0, 0x6a, 3, 3].into_iter().enumerate() {
            let path = Path { traffic_class, hop_limit: 9, ..path_to(address_of(&receiver)) };
            push(&mut tx, &path, &packet(number as u32, 64));
        }
        assert!(sender.transmit(&mut tx));
        let classes: Vec<u8> = receive(&receiver, 4).iter().map(|(meta, _)| meta.traffic_class).collect();
        assert_eq!(classes, [0, 0x6a, 3, 3], "from {from}");
    }
}

/// A packet as another RoCEv2 stack sends it, from its own socket and with its own identification.
fn foreign(socket: &UdpSocket, to: SocketAddr, bytes: &[u8], ip_id: u16) -> Vec<u8> {
    let flow = Flow { source: socket.local_addr().expect("bound"), destination: to };
    let mut sealed = [bytes, &[0; 4]].concat();
    icrc::seal(&flow, &mut sealed, ip_id);
    sealed
}

#[test]
fn any_ipv4_identification_of_a_foreign_peer_is_accepted() {
    let port = port_at("127.81.4.1");
    let to = address_of(&port);
    let peer = UdpSocket::bind("127.81.4.2:50001").expect("a socket");
    for ip_id in [0, 1, 0x00ff, 0x1234, 0xffff] {
        let bytes = packet(u32::from(ip_id), 300);
        peer.send_to(&foreign(&peer, to, &bytes, ip_id), to).expect("sent");
        let received = receive(&port, 1);
        assert_eq!(received.len(), 1, "identification {ip_id:#x}");
        assert_eq!(received[0].1, bytes);
        assert_eq!(received[0].0.source, peer.local_addr().unwrap());
    }
    assert_eq!(port.counters().snapshot().bad_icrc, 0);
}

#[test]
fn corrupt_and_short_packets_are_dropped_and_counted() {
    for (addr, peer_addr) in [("127.81.5.1", "127.81.5.2:50001"), ("::1", "[::1]:0")] {
        let port = port_at(addr);
        let to = address_of(&port);
        let peer = UdpSocket::bind(peer_addr).expect("a socket");
        let good = foreign(&peer, to, &packet(7, 300), 0);
        let mut damaged = good.clone();
        damaged[200] ^= 0x10;
        for datagram in [&damaged[..], &good[..15], &good[..0], &good[..]] {
            peer.send_to(datagram, to).expect("sent");
        }
        assert_eq!(receive_rest(&port).len(), 1);
        let counters = port.counters().snapshot();
        assert_eq!((counters.bad_icrc, counters.truncated, counters.rx_packets), (1, 2, 1), "on {addr}");
    }
}

#[test]
fn ports_of_one_address_claim_instance_indexes_in_order_and_release_them() {
    let mut ports: Vec<UdpPort> = (0..4).map(|_| port_at("127.81.6.1")).collect();
    assert_eq!(ports.iter().map(|port| port.instance()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(ports[2].udp_port(), ROCE_PORT + 2);
    drop(ports.remove(1));
    assert_eq!(port_at("127.81.6.1").instance(), 1);
    drop(ports);
    assert_eq!(port_at("127.81.6.1").instance(), 0);
}

fn open_error(config: UdpConfig) -> OpenError {
    UdpPort::open(&config).expect_err("the port must not open")
}

#[test]
fn an_instance_index_in_use_is_skipped_or_named() {
    let addr = Some(ip("127.81.7.1"));
    let _other = UdpSocket::bind("127.81.7.1:4791").expect("free before");
    assert_eq!(open(UdpConfig { addr, ..UdpConfig::default() }).instance(), 1);
    let error = open_error(UdpConfig { addr, instance: Some(0), ..UdpConfig::default() }).to_string();
    assert!(error.contains("port 4791 is of") || error.contains("UDP port 4791"), "{error}");
    assert!(error.contains("127.81.7.1") && error.contains("ss -unlp"), "{error}");
}

#[test]
fn errors_of_invalid_addresses_name_a_remedy() {
    let refuse =
        |addr: &str| open_error(UdpConfig { addr: Some(ip(addr)), ..UdpConfig::default() }).to_string();
    let error = refuse("203.0.113.9");
    assert!(error.contains("127.0.0.1 on lo") && error.contains("TERRACE_ADDR"), "{error}");
    assert!(refuse("0.0.0.0").contains("wildcard"));
    assert!(refuse("ff02::1").contains("multicast"));
    assert!(refuse("fe80::dead").contains("not an address of this machine"));
}

#[test]
fn path_mtus_are_checked_and_fit_the_interface() {
    let addr = Some(ip("127.81.8.1"));
    let error = open_error(UdpConfig { addr, mtu: Some(1500), ..UdpConfig::default() }).to_string();
    assert!(error.contains("1500") && error.contains("--mtu"), "{error}");
    assert_eq!(open(UdpConfig { addr, ..UdpConfig::default() }).mtu_limit(), 4096);
    assert_eq!(open(UdpConfig { addr, mtu: Some(512), ..UdpConfig::default() }).mtu_limit(), 512);
}

#[test]
fn the_receive_buffer_has_the_granted_size() {
    let addr = Some(ip("127.81.9.1"));
    let port = open(UdpConfig { addr, receive_buffer_bytes: Some(100_000), ..UdpConfig::default() });
    assert!((100_000..400_000).contains(&port.receive_buffer_bytes()), "{}", port.receive_buffer_bytes());
}

#[test]
fn datagrams_that_the_kernel_drops_are_counted() {
    let addr = Some(ip("127.81.10.1"));
    let port = open(UdpConfig { addr, receive_buffer_bytes: Some(20_000), ..UdpConfig::default() });
    let sender = port_at("127.81.10.2");
    let path = path_to(address_of(&port));
    for number in 0..200 {
        send(&sender, &path, &packet(number, 1000));
    }
    let first = receive_rest(&port).len();
    send(&sender, &path, &packet(200, 1000));
    assert_eq!(receive(&port, 1).len(), 1);
    assert_eq!(first as u64 + port.counters().snapshot().rx_overflows, 200);
}

#[test]
fn a_probe_reports_a_closed_port() {
    let port = UdpPort::open(&UdpConfig { addr: Some([127, 0, 0, 29].into()), ..UdpConfig::default() });
    let port = port.expect("a free instance index");
    let probe = |remote: SocketAddr| {
        let mut tx = TxBatch::new(0);
        push(&mut tx, &path_to(remote), &packet(1, 64));
        Probe::send(&port.gids()[0], &mut tx).expect("sent")
    };
    let open_error = |probe: &Probe| probe.take_error().map(|error| error.kind());
    // On the loopback the ICMP error arrives before the call returns.
    let closed = UdpSocket::bind("127.0.0.28:0").and_then(|socket| socket.local_addr()).expect("a free port");
    assert_eq!(open_error(&probe(closed)), Some(std::io::ErrorKind::ConnectionRefused));
    assert_eq!(open_error(&probe(address_of(&port))), None);
    assert_eq!(receive(&port, 1)[0].1, packet(1, 64));
}
