//! More queue pairs than a device may have in flight at once: each gets a grant in turn, all of them finish, and queue
//! pairs that are reset or destroyed while they wait block none of the others.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use common::*;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_nic::*;

const PAIRS: usize = 400;
/// WRITEs of each queue pair.
const WRITES: u64 = 8;
const LEN: u32 = 1024;
/// Queue pairs with a READ, and its length: more than half a window.
const READS: usize = 100;
const READ_LEN: u32 = 256 << 10;
/// Budget for the receive buffer of a simulated port: two windows of half a MiB, where each packet counts 512 bytes
/// extra.
const PACKETS_IN_FLIGHT_MAX: u64 = (1 << 20) / (LEN as u64 + 512);

struct Many {
    net: SimNet,
    clock: Arc<ManualClock>,
    nodes: [Node; 2],
    pairs: Vec<(Arc<QueuePair>, Arc<QueuePair>)>,
}

/// Two devices, all queue pairs connected.
fn connected(config: SimConfig) -> Many {
    let net = SimNet::new(1, config);
    let clock = Arc::new(ManualClock::new());
    let nodes = [1, 2].map(|last| {
        let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        Node::with(DeviceConfig::simulated(Box::new(port), clock.clone(), u64::from(last)), 1 << 20)
    });
    let pairs: Vec<_> = (0..PAIRS).map(|_| rc_pair(&nodes[0], &nodes[1])).collect();
    Many { net, clock, nodes, pairs }
}

/// The same, all WRITEs posted.
fn posted(config: SimConfig) -> Many {
    let many = connected(config);
    let [a, b] = &many.nodes;
    a.memory.fill(0, &pattern(LEN as usize, 3));
    for (index, (qp, _)) in (0u64..).zip(&many.pairs) {
        for number in 0..WRITES {
            let va = b.memory.addr() + index * u64::from(LEN);
            let write = SendOp::Write { va, rkey: b.mr.rkey() };
            qp.post_send([Ok(a.wr(index * WRITES + number, write, 0, LEN))]).expect("posted");
        }
    }
    many
}

fn packets_sent(node: &Node) -> u64 {
    node.device.snapshot().port["tx_packets"]
}

impl Many {
    /// Advances the time until there are `count` completions, all of them successes.
    fn finish(&self, count: usize) {
        let [a, b] = &self.nodes;
        let mut done = 0;
        for _ in 0..1_000_000 {
            let now = Time(self.net.now());
            a.device.step(now);
            b.device.step(now);
            let succeeded = |wc: &Wc| assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            done += a.cq.poll(4096, &mut { succeeded }).expect("healthy");
            if done == count {
                return;
            }
            let deadlines = self.nodes.iter().filter_map(|node| node.device.next_deadline());
            let next = deadlines.map(|time| time.0).chain(self.net.next_delivery()).min();
            let next = next.unwrap_or_else(|| panic!("{done} of {count}, and nothing will happen any more"));
            self.net.advance_to(next.max(now.0));
            self.clock.set(Time(self.net.now()));
        }
        panic!("{done} of {count} after so many turns");
    }
}

#[test]
fn a_device_stays_within_its_in_flight_budget() {
    let many = posted(SimConfig::default());
    many.nodes[0].device.step(Time(many.net.now()));
    let sent = packets_sent(&many.nodes[0]);
    assert!(sent >= PACKETS_IN_FLIGHT_MAX, "{sent}");
    // A packet that begins below the bound may end above it.
    assert!(sent <= PACKETS_IN_FLIGHT_MAX + 1, "{sent}");
    many.finish(PAIRS * WRITES as usize);
    let expected = pattern(LEN as usize, 3);
    for index in 0..PAIRS {
        assert_eq!(many.nodes[1].memory.bytes(index * LEN as usize, LEN as usize), expected, "{index}");
    }
}

/// What is in flight when a round begins is answered in that round, which is longer than the packets' delay.
#[test]
fn reads_of_any_length_stay_within_the_in_flight_budget() {
    let many = connected(SimConfig::default());
    let [a, b] = &many.nodes;
    let expected = pattern(READ_LEN as usize, 5);
    b.memory.fill(0, &expected);
    for (qp, _) in &many.pairs[..READS] {
        let read = SendOp::Read { va: b.memory.addr(), rkey: b.mr.rkey() };
        qp.post_send([Ok(a.wr(0, read, 0, READ_LEN))]).expect("posted");
    }
    let mut done = 0;
    for now in (0..1_000).map(|round| Time(round * 10_000)) {
        many.net.advance_to(now.0);
        many.clock.set(now);
        let before = packets_sent(b);
        many.nodes.iter().for_each(|node| _ = node.device.step(now));
        let answers = packets_sent(b) - before;
        // The last grant may exceed the budget: three packets.
        assert!(answers <= PACKETS_IN_FLIGHT_MAX + 3, "{answers}");
        let succeeded = |wc: &Wc| assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
        done += a.cq.poll(4096, &mut { succeeded }).expect("healthy");
    }
    assert_eq!((done, a.memory.bytes(0, READ_LEN as usize) == expected), (READS, true));
}

#[test]
fn grants_are_given_over_a_lossy_link_too() {
    let many = posted(SimConfig {
        loss: 0.02,
        duplicate: 0.01,
        reorder: 0.02,
        delay_ns: 1_000..20_000,
        ..SimConfig::default()
    });
    many.finish(PAIRS * WRITES as usize);
}

#[test]
fn ending_queue_pairs_free_budget_and_waiting_ones_can_end() {
    let many = posted(SimConfig::default());
    many.nodes[0].device.step(Time(many.net.now()));
    // The RESET discards the in-flight packets: the first half sent first. The others must take over the budget.
    let error = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    let (first, second) = many.pairs.split_at(PAIRS / 2);
    for (qp, _) in first {
        qp.modify(&error, QpAttrMask::STATE).expect("RESET");
    }
    // Some queue pairs that still wait are destroyed.
    let (gone, staying) = second.split_at(PAIRS / 8);
    for (qp, _) in gone {
        qp.destroy().expect("destroyed");
    }
    many.finish(staying.len() * WRITES as usize);
}

/// A peer that is stopped, with timers that never fire, holds only the budget of its own address.
#[test]
fn a_peer_that_does_not_answer_holds_no_budget_of_others() {
    let net = SimNet::new(1, SimConfig::default());
    let clock = Arc::new(ManualClock::new());
    let [a, healthy, stopped] = [1, 2, 3].map(|last| {
        let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        Node::with(DeviceConfig::simulated(Box::new(port), clock.clone(), u64::from(last)), 1 << 20)
    });
    let write = |peer: &Node| SendOp::Write { va: peer.memory.addr(), rkey: peer.mr.rkey() };
    let never = Tuning { timeout: 0, ..Tuning::default() };
    let _silent = [(); 3].map(|()| {
        let (qp, peer) = pair_on(&a, &stopped, QpType::Rc, &never);
        qp.post_send([Ok(a.wr(0, write(&stopped), 0, 1 << 20))]).expect("posted");
        (qp, peer)
    });
    a.device.step(Time(net.now()));
    let (qp, _peer) = rc_pair(&a, &healthy);
    qp.post_send((0..100).map(|number| Ok(a.wr(number, write(&healthy), 0, 4096)))).expect("posted");
    Many { net, clock, nodes: [a, healthy], pairs: Vec::new() }.finish(100);
}
