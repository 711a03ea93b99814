//! Ports that follow fault plans.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrace_fabric::fault::FaultyPort;
use terrace_fabric::udp::UdpPort;
use terrace_fabric::{Port, TxBatch};
use terrace_faults::{FaultPlan, Faults, Injected};
use terrace_wire::Path;

/// A faulty port, and a port without faults on the next address.
fn pair(network: u8, plan: &str) -> (FaultyPort<UdpPort>, UdpPort) {
    let (sender, receiver, _) = pair_with(network, plan);
    (sender, receiver)
}

/// As [`pair`], and the plan in force.
fn pair_with(network: u8, plan: &str) -> (FaultyPort<UdpPort>, UdpPort, Arc<Faults>) {
    let faults = Arc::new(Faults::new(FaultPlan::parse(plan).expect("a plan"), "test"));
    let sender = port_at(&format!("127.82.{network}.1"));
    let sender = FaultyPort::new(sender, faults.clone()).expect("a timer");
    (sender, port_at(&format!("127.82.{network}.2")), faults)
}

fn send_many(sender: &dyn Port, receiver: &UdpPort, count: u32) {
    let mut tx = TxBatch::new(4 << 20);
    let path = Path { traffic_class: 2, ..path_to(address_of(receiver)) };
    for number in 0..count {
        push(&mut tx, &path, &packet(number, 200));
    }
    assert!(sender.transmit(&mut tx));
    assert!(tx.is_empty());
}

#[test]
fn a_plan_without_faults_changes_nothing() {
    let (sender, receiver) = pair(1, "");
    send_many(&sender, &receiver, 300);
    let numbers: Vec<u32> = receive(&receiver, 300).iter().map(|(_, bytes)| number_of(bytes)).collect();
    assert_eq!(numbers, (0..300).collect::<Vec<_>>());
}

#[test]
fn lost_packets_do_not_arrive() {
    let (sender, receiver) = pair(2, "loss = 1.0");
    send_many(&sender, &receiver, 100);
    assert!(receive_rest(&receiver).is_empty());
}

#[test]
fn duplicated_packets_arrive_twice() {
    let (sender, receiver) = pair(3, "duplicate = 1.0");
    send_many(&sender, &receiver, 50);
    let numbers: Vec<u32> = receive(&receiver, 100).iter().map(|(_, bytes)| number_of(bytes)).collect();
    assert_eq!(numbers, (0..100).map(|at| at / 2).collect::<Vec<_>>());
}

#[test]
fn corrupted_packets_arrive_with_a_bad_icrc() {
    let (sender, receiver) = pair(4, "corrupt = 1.0");
    send_many(&sender, &receiver, 200);
    assert!(receive_rest(&receiver).is_empty());
    assert_eq!(receiver.counters().snapshot().bad_icrc, 200);
}

#[test]
fn marked_packets_have_congestion_experienced() {
    let (sender, receiver) = pair(5, "ecn_mark = 1.0");
    send_many(&sender, &receiver, 20);
    assert!(receive(&receiver, 20).iter().all(|(meta, _)| meta.traffic_class == 3));
}

#[test]
fn the_same_seed_loses_the_same_packets() {
    let arrived = |network| {
        let (sender, receiver) = pair(network, "seed = 11\nloss = 0.5");
        send_many(&sender, &receiver, 200);
        receive_rest(&receiver).iter().map(|(_, bytes)| number_of(bytes)).collect::<Vec<_>>()
    };
    let first = arrived(6);
    assert!((50..150).contains(&first.len()));
    assert_eq!(first, arrived(7));
}

#[test]
fn delayed_packets_are_sent_when_the_timer_expires() {
    let (sender, receiver) = pair(8, "delay_us_min = 30000\ndelay_us_max = 30000");
    let start = Instant::now();
    send_many(&sender, &receiver, 3);
    let mut rx = terrace_fabric::RxBatch::new();
    assert_eq!(receiver.receive(&mut rx), 0);
    wait_readable(&sender);
    assert!(start.elapsed() >= Duration::from_millis(30));
    sender.receive(&mut rx);
    assert_eq!(receive(&receiver, 3).len(), 3);
    assert!(sender.descriptors().len() > 1);
}

/// Sleeps until one of the port's descriptors is readable.
fn wait_readable(port: &dyn Port) {
    let descriptors = port.descriptors();
    let mut polled: Vec<PollFd<'_>> =
        descriptors.iter().map(|descriptor| PollFd::new(descriptor, PollFlags::IN)).collect();
    let second = Timespec { tv_sec: 1, tv_nsec: 0 };
    assert_eq!(poll(&mut polled, Some(&second)).expect("polled"), 1);
}

#[test]
fn reordered_packets_are_overtaken_but_arrive() {
    let (sender, receiver) = pair(9, "seed = 5\nreorder = 0.3\nreorder_us_max = 2000");
    send_many(&sender, &receiver, 200);
    let mut numbers = Vec::new();
    let mut rx = terrace_fabric::RxBatch::new();
    let until = Instant::now() + Duration::from_secs(2);
    while numbers.len() < 200 && Instant::now() < until {
        sender.receive(&mut rx);
        numbers.extend(receive_for(&receiver, 1, Duration::from_millis(1)).iter().map(|(_, b)| number_of(b)));
    }
    assert!(!numbers.is_sorted());
    numbers.sort_unstable();
    assert_eq!(numbers, (0..200).collect::<Vec<_>>());
}

/// The numbers of the packets that arrive, in their order.
fn numbers_that_arrive(receiver: &UdpPort) -> Vec<u32> {
    receive_rest(receiver).iter().map(|(_, bytes)| number_of(bytes)).collect()
}

#[test]
fn injected_faults_are_counted() {
    let plan = "seed = 4\nloss = 0.2\nduplicate = 0.2\ncorrupt = 0.2\necn_mark = 0.2\ndelay_us_max = 10";
    let (sender, receiver, faults) = pair_with(10, plan);
    send_many(&sender, &receiver, 200);
    let counted = |what| faults.counts().get(what);
    let lost = counted(Injected::PacketLost);
    assert!((20..70).contains(&lost));
    assert_eq!(counted(Injected::PacketDelayed), 200 - lost);
    for what in [Injected::PacketDuplicated, Injected::PacketCorrupted, Injected::PacketMarked] {
        assert!((10..70).contains(&counted(what)), "{what:?}: {}", counted(what));
    }
    assert_eq!(counted(Injected::PacketReordered), 0);
}

#[test]
fn a_fault_by_count_applies_to_the_scheduled_packets() {
    let plan = "[[fault]]\nkind = \"loss\"\nafter_packets = 3\nfor_packets = 4";
    let (sender, receiver, faults) = pair_with(11, plan);
    send_many(&sender, &receiver, 10);
    assert_eq!(numbers_that_arrive(&receiver), [0, 1, 2, 7, 8, 9]);
    assert_eq!(faults.counts().get(Injected::PacketLost), 4);
}

#[test]
fn a_fault_of_one_peer_does_not_affect_others() {
    let plan = "[[fault]]\nkind = \"blackhole\"\npeer = \"127.82.12.2\"";
    let (sender, receiver, faults) = pair_with(12, plan);
    let other = port_at("127.82.12.3");
    send_many(&sender, &receiver, 5);
    send_many(&sender, &other, 5);
    assert_eq!(numbers_that_arrive(&other).len(), 5);
    assert!(receive_rest(&receiver).is_empty());
    assert_eq!(faults.counts().get(Injected::PacketBlackholed), 5);
}

#[test]
fn received_packets_can_be_dropped_within_a_gro_run() {
    // The packets arrive in order, as one GRO run or several. The plan drops the second to the fourth.
    let plan = "[[fault]]\nkind = \"loss\"\ndirection = \"in\"\nafter_packets = 1\nfor_packets = 3";
    let (receiver, sender, faults) = pair_with(13, plan);
    let mut tx = TxBatch::new(1 << 20);
    for number in 0..8 {
        push(&mut tx, &path_to(address_of(&receiver)), &packet(number, 200));
    }
    assert!(sender.transmit(&mut tx));
    let mut rx = terrace_fabric::RxBatch::new();
    let mut numbers = Vec::new();
    let until = Instant::now() + Duration::from_secs(2);
    while numbers.len() < 5 && Instant::now() < until {
        receiver.receive(&mut rx);
        while let Some(packet) = rx.next() {
            numbers.push(number_of(packet.bytes));
        }
    }
    assert_eq!(numbers, [0, 4, 5, 6, 7]);
    assert_eq!(faults.counts().get(Injected::PacketLost), 3);
    assert_eq!(receiver.counters().snapshot().rx_packets, 5);
}

#[test]
fn several_faults_apply_to_one_packet() {
    let fault = |kind: &str| format!("[[fault]]\nkind = \"{kind}\"\nafter_packets = 1\nfor_packets = 1\n");
    let (sender, receiver) = pair(14, &["duplicate", "reorder"].map(fault).concat());
    send_many(&sender, &receiver, 4);
    let mut numbers = Vec::new();
    let mut rx = terrace_fabric::RxBatch::new();
    let until = Instant::now() + Duration::from_secs(2);
    while numbers.len() < 5 && Instant::now() < until {
        sender.receive(&mut rx);
        numbers.extend(receive_for(&receiver, 1, Duration::from_millis(1)).iter().map(|(_, b)| number_of(b)));
    }
    assert_eq!(numbers[..1], [0]);
    numbers.sort_unstable();
    assert_eq!(numbers, [0, 1, 1, 2, 3]);
    let (sender, receiver) = pair(15, &fault("corrupt"));
    send_many(&sender, &receiver, 3);
    assert_eq!(numbers_that_arrive(&receiver), [0, 2]);
}
