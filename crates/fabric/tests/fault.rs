//! Fault plans, and ports that follow them.

mod common;

use std::time::{Duration, Instant};

use common::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrace_fabric::fault::{FaultPlan, FaultyPort};
use terrace_fabric::udp::UdpPort;
use terrace_fabric::{Port, TxBatch};
use terrace_wire::Path;

#[test]
fn a_plan_may_leave_out_every_key() {
    assert_eq!(FaultPlan::parse("").unwrap(), FaultPlan::default());
    let plan = FaultPlan::parse("seed = 7\nloss = 0.25\ndelay_us_max = 40\n").unwrap();
    assert_eq!((plan.seed, plan.loss, plan.delay_us_max), (7, 0.25, 40));
}

#[test]
fn mistakes_in_a_plan_are_named() {
    for (text, words) in [
        ("los = 0.1", "los"),
        ("loss = 1.5", "`loss` is 1.5"),
        ("corrupt = -0.1", "`corrupt` is -0.1"),
        ("duplicate = nan", "`duplicate` is NaN"),
        ("loss = \"much\"", "line 1"),
        ("delay_us_min = 5", "`delay_us_min` (5) is above"),
        ("delay_us_max = 99000000", "`delay_us_max`"),
        ("reorder_us_max = 99000000", "`reorder_us_max`"),
        ("loss = ", "line 1"),
    ] {
        let error = FaultPlan::parse(text).expect_err(text).to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
}

#[test]
fn a_plan_that_cannot_be_read_is_named() {
    let error = FaultPlan::load("/nonexistent/plan.toml".as_ref()).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/plan.toml"), "{error}");
}

/// A faulty port and a sound one on the next address.
fn pair(network: u8, plan: &str) -> (FaultyPort<UdpPort>, UdpPort) {
    let plan = FaultPlan::parse(plan).expect("a plan");
    let sender = FaultyPort::new(port_at(&format!("127.82.{network}.1")), &plan).expect("a timer");
    (sender, port_at(&format!("127.82.{network}.2")))
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
fn marked_packets_say_that_there_was_congestion() {
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
fn delayed_packets_leave_when_the_timer_says_so() {
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
fn held_back_packets_are_overtaken_but_arrive() {
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
