//! The simulated network.

mod common;

use common::*;
use terrace_fabric::sim::{SimConfig, SimNet, SimPort};
use terrace_fabric::{Port, TxBatch};
use terrace_wire::Path;

/// Sends `count` packets from one port to another, and returns those that arrive, with their times.
fn run(seed: u64, config: SimConfig, count: u32) -> Vec<(u64, u32, u8)> {
    let net = SimNet::new(seed, config);
    let [sender, receiver] = ["10.0.0.1", "fd00::1"].map(|addr| net.port(ip(addr)));
    let path = Path { traffic_class: 2, ..path_to(address_of(&receiver)) };
    let mut arrivals = Vec::new();
    for number in 0..count {
        send(&sender, &path, &packet(number, 64 + number as usize % 100));
        if number % 7 == 0 {
            net.advance_to(net.now() + 500);
        }
        drain(&net, &receiver, &mut arrivals);
    }
    while let Some(at) = net.next_delivery() {
        net.advance_to(at);
        drain(&net, &receiver, &mut arrivals);
    }
    arrivals
}

fn drain(net: &SimNet, port: &SimPort, arrivals: &mut Vec<(u64, u32, u8)>) {
    let mut rx = terrace_fabric::RxBatch::new();
    while port.receive(&mut rx) > 0 {
        while let Some(packet) = rx.next() {
            let number = number_of(packet.bytes);
            assert_eq!(packet.bytes, common::packet(number, 64 + number as usize % 100));
            arrivals.push((net.now(), number, packet.meta.traffic_class));
        }
    }
}

fn all_faults() -> SimConfig {
    SimConfig {
        loss: 0.1,
        duplicate: 0.1,
        corrupt: 0.1,
        reorder: 0.1,
        ecn_mark: 0.1,
        delay_ns: 100..5000,
        mtu: 1024,
    }
}

#[test]
fn equal_seeds_have_equal_results() {
    let first = run(42, all_faults(), 1000);
    assert_eq!(first, run(42, all_faults(), 1000));
    assert_ne!(first, run(43, all_faults(), 1000));
}

#[test]
fn a_network_without_faults_delivers_everything_in_order() {
    let numbers: Vec<u32> =
        run(1, SimConfig::default(), 500).into_iter().map(|(_, number, _)| number).collect();
    assert_eq!(numbers, (0..500).collect::<Vec<_>>());
}

#[test]
fn each_fault_has_about_its_configured_rate() {
    let count = |config: SimConfig| run(7, config, 4000);
    let base = SimConfig::default;
    let near = |value: usize, expected: usize| value.abs_diff(expected) < 130;
    assert!(near(count(SimConfig { loss: 0.1, ..base() }).len(), 3600));
    assert!(near(count(SimConfig { duplicate: 0.1, ..base() }).len(), 4400));
    assert!(near(count(SimConfig { corrupt: 0.1, ..base() }).len(), 3600));
    let marked = count(SimConfig { ecn_mark: 0.1, ..base() });
    assert!(near(marked.iter().filter(|(_, _, class)| *class == 3).count(), 400));
    let reordered = count(SimConfig { reorder: 0.1, ..base() });
    assert_eq!(reordered.len(), 4000);
    assert!(reordered.windows(2).filter(|pair| pair[0].1 > pair[1].1).count() > 100);
}

#[test]
fn every_corrupted_packet_is_detected_over_ipv4_and_ipv6() {
    for addr in ["10.0.0.2", "fd00::2"] {
        let net = SimNet::new(3, SimConfig { corrupt: 1.0, ..SimConfig::default() });
        let [sender, receiver] = [(); 2].map(|()| net.port(ip(addr)));
        for number in 0..3000 {
            send(&sender, &path_to(address_of(&receiver)), &packet(number, 12 + number as usize % 200));
        }
        net.advance_to(1_000_000);
        let mut arrivals = Vec::new();
        drain(&net, &receiver, &mut arrivals);
        assert!(arrivals.is_empty());
        assert_eq!(receiver.counters().snapshot().bad_icrc, 3000);
    }
}

#[test]
fn time_advances_only_by_advance_to() {
    let net = SimNet::new(0, SimConfig { delay_ns: 300..301, ..SimConfig::default() });
    let [a, b] = ["10.0.0.1", "10.0.0.2"].map(|addr| net.port(ip(addr)));
    assert_eq!(net.next_delivery(), None);
    send(&a, &path_to(address_of(&b)), &packet(1, 20));
    assert_eq!((net.now(), net.next_delivery()), (0, Some(300)));
    let mut arrivals = Vec::new();
    drain(&net, &b, &mut arrivals);
    net.advance_to(299);
    drain(&net, &b, &mut arrivals);
    assert!(arrivals.is_empty());
    net.advance_to(300);
    net.advance_to(10);
    assert_eq!(net.now(), 300);
    let received = receive(&b, 1);
    assert_eq!(received[0].0.source, address_of(&a));
}

#[test]
fn ports_have_instance_indexes_and_leave_the_network() {
    let net = SimNet::new(0, SimConfig { delay_ns: 0..1, ..SimConfig::default() });
    let a = net.port(ip("10.0.0.1"));
    let second = net.port_with_gids(&[ip("10.0.0.1"), ip("fd00::1")]);
    assert_eq!((a.instance(), second.instance()), (0, 1));
    let to_second = Path { source_gid_index: 0, ..path_to("[fd00::1]:4792".parse().unwrap()) };
    send(&a, &to_second, &packet(1, 20));
    assert_eq!(receive(&second, 1)[0].0.gid_index, 1);
    drop(second);
    send(&a, &to_second, &packet(1, 20));
    assert_eq!(net.next_delivery(), None);
    assert_eq!(net.port(ip("10.0.0.1")).instance(), 1);
}

#[test]
fn a_batch_larger_than_one_receive_is_delivered() {
    let net = SimNet::new(0, SimConfig { delay_ns: 0..1, ..SimConfig::default() });
    let [a, b] = ["10.0.0.1", "10.0.0.2"].map(|addr| net.port(ip(addr)));
    let mut tx = TxBatch::new(4 << 20);
    for number in 0..900 {
        push(&mut tx, &path_to(address_of(&b)), &packet(number, 4100));
    }
    assert!(a.transmit(&mut tx));
    assert_eq!(receive(&b, 900).len(), 900);
}
