//! Chains over a simulated network that loses, doubles, reorders, corrupts and delays: what a chain does, and what it does
//! first, is the same as over a good one.

#[path = "common/chains.rs"]
mod chains;
mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use chains::*;
use common::*;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_nic::*;

/// Memory for data, behind that of three chains.
const DATA: u64 = 4 * CHAIN_BYTES;
const CALLS: u32 = 60;

struct World {
    net: SimNet,
    clock: Arc<ManualClock>,
    nodes: [Node; 2],
}

impl World {
    fn new(seed: u64, config: SimConfig) -> World {
        let net = SimNet::new(seed, config);
        let clock = Arc::new(ManualClock::new());
        let nodes = [1, 2].map(|last| {
            let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
            let seed = seed + u64::from(last);
            Node::with(DeviceConfig::simulated(Box::new(port), clock.clone(), seed), 1 << 20)
        });
        World { net, clock, nodes }
    }

    fn run_until(&self, done: impl Fn() -> bool) {
        for _ in 0..1_000_000 {
            if done() {
                return;
            }
            let now = Time(self.net.now());
            for node in &self.nodes {
                node.device.step(now);
            }
            let deadlines = self.nodes.iter().filter_map(|node| node.device.next_deadline());
            let next = deadlines.map(|time| time.0).chain(self.net.next_delivery()).min();
            self.net.advance_to(next.expect("something will happen").max(now.0));
            self.clock.set(Time(self.net.now()));
        }
        panic!("too many turns");
    }
}

/// Calls a chain that fetches a ticket by a masked FAA with a ring of 64 entries, stores it where the message says, and
/// answers. Returns the tickets that the client has got.
fn tickets(seed: u64, config: SimConfig) -> Vec<u64> {
    let world = World::new(seed, config);
    let [client, server] = &world.nodes;
    let (qp, reply) = (client.qp(QpType::Rc), Chain::new(server, 0, MANAGED));
    connect(&qp, server, reply.qp.qpn(), &Tuning::default());
    connect(&reply.qp, client, qp.qpn(), &Tuning::default());
    let (work, _other) = Chain::loopback(server, CHAIN_BYTES, MANAGED);
    let (control, _end) = Chain::loopback(server, 2 * CHAIN_BYTES, CONTROL);
    let (counter, ticket) = (DATA, DATA + 64);
    for call in 0..CALLS {
        let (at, index) = (reply.posted() % BLOCKS, work.posted());
        let op = SendOp::Write { va: 0, rkey: client.mr.rkey() };
        let end = reply.post([
            (request(op, Payload::Sge(server.sge(ticket, 8))), NONE),
            (request(SendOp::Send, Payload::Sge(server.sge(ticket, 8))), SIGNALED),
        ]);
        work.post([(masked_add(server, counter, 8, 1 << 8, ticket), SIGNALED)]);
        let sges = SgeList::from_slice(&[server.sge(reply.place(at, 1), 8)]);
        let receives = reply.post_recv([RecvWr { wr_id: 0, sges }]);
        reply.qp.enable_recv(receives).expect("enabled");
        control.post([
            (wait(&reply.recv_cq, call + 1), NONE),
            (enable(&work.qp, index + 1), NONE),
            (wait(&work.send_cq, call + 1), NONE),
            (enable(&reply.qp, end), NONE),
        ]);
        let answer = 4096 + u64::from(call) * 8;
        client.memory.fill(0, &(client.memory.addr() + answer).to_be_bytes());
        qp.post_recv([client.recv(1, 1024, 64)]).expect("posted");
        qp.post_send([Ok(client.wr(2, SendOp::Send, 0, 8))]).expect("posted");
        world.run_until(|| client.cq.count() == 2 * call + 2);
    }
    (0..CALLS as usize).map(|call| client.memory.u64_at(4096 + call * 8)).collect()
}

#[test]
fn loss_and_reordering_do_not_change_what_a_chain_does() {
    let expected: Vec<u64> = (0..u64::from(CALLS)).map(|call| call * 8 % 512).collect();
    assert_eq!(tickets(1, SimConfig::default()), expected);
    for seed in 10..30 {
        assert_eq!(tickets(seed, bad_weather()), expected, "seed {seed}");
    }
}
