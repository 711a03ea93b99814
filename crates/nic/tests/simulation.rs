//! Two devices over a simulated network that loses, doubles, reorders, corrupts and delays, in virtual time and in one
//! thread. Everything must arrive all the same, and a seed must replay.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use common::*;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_nic::*;

struct World {
    net: SimNet,
    clock: Arc<ManualClock>,
    nodes: [Node; 2],
}

fn world(seed: u64, config: SimConfig) -> World {
    let net = SimNet::new(seed, config);
    let clock = Arc::new(ManualClock::new());
    let nodes = [1, 2].map(|last| {
        let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        Node::with(DeviceConfig::simulated(Box::new(port), clock.clone(), seed + u64::from(last)), 1 << 18)
    });
    World { net, clock, nodes }
}

impl World {
    /// Steps both devices, then advances the time to the next deadline or delivery. False when there is none.
    fn turn(&self) -> bool {
        let now = Time(self.net.now());
        for node in &self.nodes {
            node.device.step(now);
        }
        let deadlines = self.nodes.iter().filter_map(|node| node.device.next_deadline());
        let Some(next) = deadlines.map(|time| time.0).chain(self.net.next_delivery()).min() else {
            return false;
        };
        self.net.advance_to(next.max(now.0));
        self.clock.set(Time(self.net.now()));
        true
    }

    fn run_until(&self, done: impl Fn() -> bool) {
        for _ in 0..1_000_000 {
            if done() {
                return;
            }
            assert!(self.turn(), "nothing will happen any more");
        }
        panic!("too many turns");
    }
}

/// Runs writes, reads, sends and atomics, and returns the devices' counters.
fn run(seed: u64, config: SimConfig) -> Vec<DeviceSnapshot> {
    let world = world(seed, config);
    let [a, b] = &world.nodes;
    let (qa, qb) = pair_on(a, b, QpType::Rc, &Tuning { mtu: 1024, ..Tuning::default() });
    let (va, rkey) = (b.memory.addr(), b.mr.rkey());
    let data = pattern(20_000, seed as u8);
    a.memory.fill(0, &data);
    let total = 40u64;
    for index in 0..total {
        let op = match index % 4 {
            0 => SendOp::Write { va: va + 40_000, rkey },
            1 => SendOp::Read { va: va + 40_000, rkey },
            2 => SendOp::FetchAdd { va, rkey, add: 1 },
            _ => SendOp::Send,
        };
        let (offset, length) = match index % 4 {
            0 => (0, 20_000),
            1 => (30_000, 20_000),
            2 => (60_000 + index * 8, 8),
            _ => (0, 5000),
        };
        if index % 4 == 3 {
            qb.post_recv([b.recv(index, 100_000, 5000)]).expect("posted");
        }
        qa.post_send([Ok(a.wr(index, op, offset, length))]).expect("posted");
    }
    let done = std::cell::RefCell::new(Vec::new());
    world.run_until(|| {
        a.cq.poll(64, &mut |wc| done.borrow_mut().push(*wc)).expect("healthy");
        done.borrow().len() as u64 == total
    });
    let done = done.into_inner();
    assert!(done.iter().all(|wc| wc.status == WcStatus::Success), "{done:?}");
    assert!(done.windows(2).all(|pair| pair[0].wr_id < pair[1].wr_id), "in order");
    assert_eq!(b.memory.bytes(40_000, 20_000), data);
    assert_eq!(a.memory.bytes(30_000, 20_000), data);
    assert_eq!(b.memory.bytes(100_000, 5000), data[..5000]);
    assert_eq!(b.memory.u64_at(0), total / 4);
    for index in (2..total).step_by(4) {
        assert_eq!(a.memory.u64_at(60_000 + index as usize * 8), index / 4, "atomics happen once, in order");
    }
    world.nodes.iter().map(|node| node.device.snapshot()).collect()
}

#[test]
fn everything_arrives_through_a_perfect_network_without_repetition() {
    let counted = run(1, SimConfig::default());
    assert_eq!(counted[0].queue_pairs[0].counts["retransmits"], 0);
    assert_eq!(counted[1].queue_pairs[0].counts["duplicates"], 0);
}

/// A peer that has had the last message ends the connection at once, by a message of the connection manager that
/// overtakes the ACK.
#[test]
fn what_has_arrived_counts_before_a_queue_pair_is_put_into_error() {
    let world = world(1, SimConfig::default());
    let [a, b] = &world.nodes;
    let (qa, qb) = rc_pair(a, b);
    qb.post_recv([b.recv(1, 0, 64)]).expect("posted");
    qa.post_send([Ok(a.wr(2, SendOp::Send, 0, 64)), Ok(a.wr(3, SendOp::Send, 0, 64))]).expect("posted");
    let arrive = || {
        while let Some(next) = world.net.next_delivery() {
            world.net.advance_to(next);
        }
    };
    a.device.step(Time(world.net.now()));
    arrive();
    b.device.step(Time(world.net.now()));
    arrive();
    qa.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, QpAttrMask::STATE).expect("modified");
    let ends = poll_for(&a.cq, 2).into_iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>();
    assert_eq!(ends, [(2, WcStatus::Success), (3, WcStatus::Flushed)], "the peer had one receive");
}

#[test]
fn everything_arrives_through_a_bad_network() {
    let mut retransmits = 0;
    for seed in 0..50 {
        println!("seed {seed}");
        retransmits += run(seed, bad_weather())[0].queue_pairs[0].counts["retransmits"];
    }
    assert!(retransmits > 0);
}

#[test]
fn a_seed_replays() {
    assert_eq!(run(7, bad_weather()), run(7, bad_weather()));
}

/// Perftest up to 4.5-0.17 sleeps on one channel for both of its queues, and takes the first event for that of its own
/// message.
#[test]
fn a_sleeping_sender_gets_its_completion_before_the_reply() {
    let world = world(5, SimConfig::default());
    let [a, b] = &world.nodes;
    let listening = |node: &Node, cookies: [u64; 2]| {
        let channel = node.device.create_channel().expect("a channel");
        let queues = cookies.map(|cookie| {
            let init = CqInit { depth: 8, channel: Some(channel.clone()), cookie };
            let cq = node.device.create_cq(init).expect("a queue");
            cq.request_notify(false).expect("armed");
            cq
        });
        let [send_cq, recv_cq] = queues.clone();
        let init = QpInit { send_cq, recv_cq, ..node.init(QpType::Rc) };
        (channel, queues, node.pd.create_qp(init).expect("a queue pair"))
    };
    let (channel, [a_send_cq, a_recv_cq], qa) = listening(a, [1, 2]);
    let (_, [_, b_recv_cq], qb) = listening(b, [3, 4]);
    connect(&qa, b, qb.qpn(), &Tuning::default());
    connect(&qb, a, qa.qpn(), &Tuning::default());
    qa.post_recv([a.recv(1, 0, 64)]).expect("posted");
    qb.post_recv([b.recv(1, 0, 64)]).expect("posted");
    qa.post_send([Ok(a.wr(2, SendOp::Send, 0, 8))]).expect("posted");
    // The poll defers the ACK, for an answer that is posted at once.
    let mut arrived = 0;
    while arrived == 0 {
        world.net.advance_to(world.net.next_delivery().expect("the message is on its way"));
        arrived = b_recv_cq.poll(1, &mut |_| {}).expect("healthy");
    }
    assert_eq!(world.net.next_delivery(), None, "the acknowledgement is held back");
    qb.post_send([Ok(b.wr(2, SendOp::Send, 0, 8))]).expect("posted");
    world.run_until(|| !a_send_cq.is_empty() && !a_recv_cq.is_empty());
    let order = [0; 2].map(|_| channel.get_event().expect("an event").cookie());
    assert_eq!(order, [1, 2], "the sending, then the answer");
    for cq in [a_send_cq, a_recv_cq] {
        cq.ack_events(1);
    }
}

/// A process that got no processor for longer than its timeout finds the answers in its socket, behind many other
/// packets. It handles all of them before it takes its own packets for lost.
#[test]
fn received_packets_are_handled_before_a_timer_fires() {
    let world = world(9, SimConfig::default());
    let [a, b] = &world.nodes;
    let tuning = Tuning { mtu: 256, retry_cnt: 1, ..Tuning::default() };
    let (busy, _busy_b) = pair_on(a, b, QpType::Rc, &tuning);
    let (waiting, waiting_b) = pair_on(a, b, QpType::Rc, &tuning);
    waiting_b.post_recv([b.recv(1, 100_000, 64)]).expect("posted");
    let (va, rkey) = (b.memory.addr(), b.mr.rkey());
    busy.post_send([Ok(a.wr(1, SendOp::Read { va, rkey }, 0, 60_000))]).expect("posted");
    waiting.post_send([Ok(a.wr(2, SendOp::Send, 70_000, 64))]).expect("posted");
    a.device.step(Time(world.net.now()));
    // Meanwhile only the peer is scheduled.
    while let Some(next) = world.net.next_delivery() {
        world.net.advance_to(next);
        world.clock.set(Time(next));
        b.device.step(Time(next));
    }
    let late = Time(world.net.now()).after_ns(10_000_000_000);
    world.net.advance_to(late.0);
    world.clock.set(late);
    a.device.step(late);
    let mut done = Vec::new();
    a.cq.poll(64, &mut |wc| done.push((wc.wr_id, wc.status))).expect("healthy");
    done.sort_unstable_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(done, [(1, WcStatus::Success), (2, WcStatus::Success)]);
    for qp in [&busy, &waiting] {
        let counters = qp.counters();
        assert_eq!((counters.timeouts, counters.retransmits), (0, 0));
    }
}
