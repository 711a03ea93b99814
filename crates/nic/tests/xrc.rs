//! Extended reliable connections: the queue that receives a message, the protection domain that grants access,
//! refusals, and delivery once and in order through a network that loses, doubles, reorders, corrupts and delays.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use common::*;
use terrace_fabric::sim::SimNet;
use terrace_nic::*;

const SIZES: SrqInit = SrqInit { max_wr: 256, max_sge: 4, limit: 0, cookie: 0 };

/// A shared receive queue with a protection domain, a region and a completion queue of its own.
struct Service {
    pd: Arc<Pd>,
    mr: Arc<Mr>,
    cq: Arc<Cq>,
    srq: Arc<Srq>,
}

impl Service {
    fn new(node: &Node, xrcd: &Arc<Xrcd>) -> Service {
        let pd = node.device.alloc_pd().expect("a protection domain");
        let (addr, length) = (node.memory.addr(), node.memory.0.len() as u64);
        let request = MrRequest { addr, length, iova: addr, access: REMOTE_ALL, paging: None };
        let mr = pd.reg_mr(request).expect("a region");
        let cq = node.device.create_cq(CqInit { depth: 1024, channel: None, cookie: 0 }).expect("a queue");
        let srq = pd.create_xrc_srq(SIZES, xrcd, &cq).expect("a shared receive queue");
        Service { pd, mr, cq, srq }
    }

    fn post(&self, node: &Node, wr_id: u64, offset: u64, length: u32) {
        let sge = Sge { addr: node.memory.addr() + offset, length, lkey: self.mr.lkey() };
        self.srq.post([Ok(RecvWr { wr_id, sges: SgeList::from_slice(&[sge]) })]).expect("posted");
    }

    fn destroy(self) {
        self.srq.destroy().expect("nothing holds it");
        self.cq.destroy().expect("nothing holds it");
        self.mr.dereg().expect("registered");
        self.pd.dealloc().expect("nothing is in it");
    }
}

/// An initiator at `a` and its target at `b`.
fn connected(a: &Node, b: &Node, xrcd: &Arc<Xrcd>, tuning: &Tuning) -> (Arc<QueuePair>, Arc<QueuePair>) {
    let (initiator, target) = (a.qp(QpType::XrcSend), xrcd.create_target(1).expect("a target"));
    connect(&initiator, b, target.qpn(), tuning);
    connect(&target, a, initiator.qpn(), tuning);
    (initiator, target)
}

fn to(srq: u32, wr: SendWr) -> SendWr {
    SendWr { target: Some(Target::SharedQueue(srq)), ..wr }
}

fn one(node: &Node, qp: &Arc<QueuePair>, wr: SendWr) -> Wc {
    qp.post_send([Ok(wr)]).expect("posted");
    node.completion()
}

#[test]
fn one_connection_serves_several_queues_each_with_its_domain() {
    let (a, b) = (Node::udp(), Node::udp());
    let xrcd = b.device.open_xrcd().expect("a domain");
    let services = [(); 2].map(|()| Service::new(&b, &xrcd));
    let (initiator, target) = connected(&a, &b, &xrcd, &Tuning::default());
    a.memory.fill(0, &pattern(5000, 3));
    for (index, service) in services.iter().enumerate() {
        let offset = 10_000 * (index as u64 + 1);
        service.post(&b, 7, offset, 5000);
        let wr = to(service.srq.number(), a.wr(1, SendOp::SendImm(index as u32), 0, 5000));
        assert_eq!(one(&a, &initiator, wr).status, WcStatus::Success);
        let wc = poll_for(&service.cq, 1)[0];
        assert_eq!((wc.wr_id, wc.status, wc.byte_len, wc.imm), (7, WcStatus::Success, 5000, index as u32));
        assert_eq!((wc.qpn, wc.src_qp, wc.srqn), (target.qpn(), initiator.qpn(), service.srq.number()));
        assert_eq!(b.memory.bytes(offset as usize, 5000), pattern(5000, 3));

        let (va, rkey) = (b.memory.addr() + 100_000, service.mr.rkey());
        for op in [SendOp::Write { va, rkey }, SendOp::Read { va, rkey }] {
            let wc = one(&a, &initiator, to(service.srq.number(), a.wr(2, op, 0, 5000)));
            assert_eq!(wc.status, WcStatus::Success, "{op:?}");
        }
        let add = SendOp::FetchAdd { va: va + 8000, rkey, add: 5 };
        let wc = one(&a, &initiator, to(service.srq.number(), a.wr(3, add, 6000, 8)));
        assert_eq!((wc.status, a.memory.u64_at(6000)), (WcStatus::Success, 5 * index as u64));
    }
    // One queue's region is not accessible through the other queue, nor the node's own region through either.
    let foreign = SendOp::Write { va: b.memory.addr(), rkey: services[1].mr.rkey() };
    let wc = one(&a, &initiator, to(services[0].srq.number(), a.wr(4, foreign, 0, 8)));
    assert_eq!(wc.status, WcStatus::RemoteAccess);
    assert_eq!(target.state(), QpState::Err);
    initiator.destroy().expect("alive");
    target.destroy().expect("alive");
    services.into_iter().for_each(Service::destroy);
    xrcd.close().expect("empty");
}

#[test]
fn a_queue_of_another_domain_is_an_invalid_request() {
    let (a, b) = (Node::udp(), Node::udp());
    let domains = [(); 2].map(|()| b.device.open_xrcd().expect("a domain"));
    let foreign = Service::new(&b, &domains[1]);
    foreign.post(&b, 1, 0, 100);
    let (va, rkey) = (b.memory.addr(), foreign.mr.rkey());
    for (op, number) in [
        (SendOp::Send, foreign.srq.number()),
        (SendOp::Read { va, rkey }, foreign.srq.number()),
        // A number without a queue, and an ordinary queue's number.
        (SendOp::Send, foreign.srq.number() ^ 1),
        (SendOp::Send, b.pd.create_srq(SIZES).expect("a queue").number() & 0xff_ffff),
    ] {
        let (initiator, target) = connected(&a, &b, &domains[0], &Tuning::default());
        let wc = one(&a, &initiator, to(number, a.wr(1, op, 0, 8)));
        assert_eq!(wc.status, WcStatus::RemoteInvalidRequest, "{op:?}");
        assert_eq!(target.state(), QpState::Err);
        let event = b.device.get_async_event().expect("an event");
        // The first event is that communication was established.
        let event = if matches!(event, AsyncEvent::CommunicationEstablished(_)) {
            b.device.get_async_event().expect("an event")
        } else {
            event
        };
        assert!(matches!(&event, AsyncEvent::QpRequestError(qp) if Arc::ptr_eq(qp, &target)));
        event.ack();
    }
}

#[test]
fn objects_that_do_not_go_together_are_refused() {
    let (a, b) = (Node::udp(), Node::udp());
    let xrcd = a.device.open_xrcd().expect("a domain");
    let service = Service::new(&a, &xrcd);
    let refused = |result: Result<(), Error>| matches!(result, Err(Error::Invalid(_)));
    // An RC or UD queue pair cannot have an XRC shared receive queue, nor an XRC initiator any.
    let plain = a.pd.create_srq(SIZES).expect("a queue");
    for (qp_type, srq) in [(QpType::Rc, &service.srq), (QpType::Ud, &service.srq), (QpType::XrcSend, &plain)]
    {
        let init = QpInit { srq: Some(srq.clone()), ..a.init(qp_type) };
        assert!(refused(a.pd.create_qp(init).map(drop)), "{qp_type:?}");
    }
    assert!(refused(a.pd.create_qp(a.init(QpType::XrcRecv)).map(drop)), "a target without a domain");
    // Objects of different devices do not mix.
    assert!(refused(b.pd.create_xrc_srq(SIZES, &xrcd, &b.cq).map(drop)));
    assert!(refused(a.pd.create_xrc_srq(SIZES, &xrcd, &b.cq).map(drop)));
    // A domain in use cannot be closed, nor can its completion queue be destroyed.
    assert!(matches!(xrcd.close(), Err(Error::Busy(_))));
    assert!(matches!(service.cq.destroy(), Err(Error::Busy(_))));
    service.destroy();
    let target = xrcd.create_target(1).expect("a target");
    assert!(matches!(xrcd.close(), Err(Error::Busy(_))));
    // Neither end takes receives, and a target takes no sends.
    connect(&target, &b, 5, &Tuning::default());
    assert!(target.post_recv([a.recv(1, 0, 8)]).is_err());
    assert!(target.post_send([Ok(to(1, a.wr(1, SendOp::Send, 0, 8)))]).is_err());
    assert!(a.qp(QpType::XrcSend).post_recv([a.recv(1, 0, 8)]).is_err());
    target.destroy().expect("alive");
    xrcd.close().expect("empty");
    assert!(refused(xrcd.create_target(1).map(drop)));
    assert!(refused(a.pd.create_xrc_srq(SIZES, &xrcd, &a.cq).map(drop)));
}

#[test]
fn a_target_exists_until_its_last_holder_releases_it() {
    let (a, b) = (Node::udp(), Node::udp());
    let xrcd = b.device.open_xrcd().expect("a domain");
    let other = b.device.open_xrcd().expect("another one");
    let service = Service::new(&b, &xrcd);
    let (initiator, target) = connected(&a, &b, &xrcd, &Tuning::default());
    let qpn = target.qpn();
    assert!(other.open_target(qpn, 2).is_err(), "of another domain");
    assert!(xrcd.open_target(b.qp(QpType::Rc).qpn(), 2).is_err(), "of another kind");
    let again = xrcd.open_target(qpn, 2).expect("it is there");
    assert!(Arc::ptr_eq(&again, &target));
    target.release(1).expect("held");
    assert_eq!(again.cookie(), 2, "events go to who is left");
    service.post(&b, 1, 0, 100);
    let wr = to(service.srq.number(), a.wr(1, SendOp::Send, 0, 8));
    assert_eq!(one(&a, &initiator, wr).status, WcStatus::Success);
    again.release(2).expect("held");
    assert!(xrcd.open_target(qpn, 3).is_err(), "it is gone");
}

#[test]
fn destroying_a_queue_discards_its_completions() {
    let (a, b) = (Node::udp(), Node::udp());
    let xrcd = b.device.open_xrcd().expect("a domain");
    let [gone, stays] = [(); 2].map(|()| b.pd.create_xrc_srq(SIZES, &xrcd, &b.cq).expect("a queue"));
    let (initiator, _target) = connected(&a, &b, &xrcd, &Tuning::default());
    for srq in [&gone, &stays] {
        srq.post([b.recv(u64::from(srq.number()), 0, 100)]).expect("posted");
        assert_eq!(
            one(&a, &initiator, to(srq.number(), a.wr(1, SendOp::Send, 0, 8))).status,
            WcStatus::Success
        );
    }
    gone.destroy().expect("targets do not hold it");
    assert_eq!(b.completion().srqn, stays.number());
    assert!(b.cq.is_empty());
}

#[test]
fn a_completion_queue_that_overruns_stops_the_targets_of_its_domain() {
    let (a, b) = (Node::udp(), Node::udp());
    let xrcd = b.device.open_xrcd().expect("a domain");
    let small = b.device.create_cq(CqInit { depth: 1, channel: None, cookie: 0 }).expect("a queue");
    let srq = b.pd.create_xrc_srq(SIZES, &xrcd, &small).expect("a queue");
    srq.post([b.recv(1, 0, 100), b.recv(2, 0, 100)]).expect("posted");
    let (initiator, target) =
        connected(&a, &b, &xrcd, &Tuning { timeout: 14, retry_cnt: 7, ..Tuning::default() });
    for wr_id in 0..2 {
        let _ = one(&a, &initiator, to(srq.number(), a.wr(wr_id, SendOp::Send, 0, 8)));
    }
    wait_until("the target stops", || target.state() == QpState::Err);
}

/// Work requests of a run, connections, queues, and the bound of message lengths.
const REQUESTS: usize = 60;
const CONNECTIONS: usize = 2;
const QUEUES: usize = 3;
const LENGTH_MAX: usize = 9000;
/// Messages land behind this offset in the target's memory, one after the other.
const LANDING: usize = 50_000;
/// Simulation steps before the next receive is posted.
const TURNS_PER_RECEIVE: usize = 25;

/// The part of the sender's pattern that a message carries; it identifies the message.
fn part(index: usize) -> std::ops::Range<usize> {
    index * 16..index * 16 + (index * 577) % LENGTH_MAX
}

/// A work request by its number, its local range, and whether it consumes a receive.
fn request(index: usize, b: &Node, rkey: u32) -> (SendOp, std::ops::Range<usize>, bool) {
    // Each connection has its own target area.
    let (connection, imm) = (index % CONNECTIONS, index as u32);
    let va = b.memory.addr() + 20_000 * connection as u64;
    let area = 0..LENGTH_MAX;
    match index % 5 {
        0 => (SendOp::Write { va: va + 16, rkey }, area, false),
        1 => {
            let into = 30_000 + 10_000 * connection;
            (SendOp::Read { va: va + 16, rkey }, into..into + LENGTH_MAX, false)
        }
        2 => (SendOp::FetchAdd { va, rkey, add: 1 }, 60_000 + index * 8..60_008 + index * 8, false),
        3 => (SendOp::WriteImm { va: va + 16, rkey, imm }, area, true),
        _ => (SendOp::SendImm(imm), part(index), true),
    }
}

/// Runs every XRC operation between two nodes in bad weather. Receives are posted late, so that messages find none.
fn run(seed: u64) -> Vec<DeviceSnapshot> {
    let (net, clock) = (SimNet::new(seed, bad_weather()), Arc::new(ManualClock::new()));
    let [a, b] = [1, 2].map(|last| {
        let port = Box::new(net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))));
        Node::with(DeviceConfig::simulated(port, clock.clone(), seed + u64::from(last)), 1 << 19)
    });
    let xrcd = b.device.open_xrcd().expect("a domain");
    let services = [(); QUEUES].map(|()| Service::new(&b, &xrcd));
    let tuning = Tuning { mtu: 256 << (seed % 5), ..Tuning::default() };
    let pairs = [(); CONNECTIONS].map(|()| connected(&a, &b, &xrcd, &tuning));
    let data = pattern(REQUESTS * 16 + LENGTH_MAX, seed as u8);
    a.memory.fill(0, &data);
    let mut needed = Vec::new();
    for index in 0..REQUESTS {
        let (initiator, service) = (&pairs[index % CONNECTIONS].0, &services[index % QUEUES]);
        let (op, range, consumes) = request(index, &b, service.mr.rkey());
        let wr = a.wr(index as u64, op, range.start as u64, range.len() as u32);
        initiator.post_send([Ok(to(service.srq.number(), wr))]).expect("posted");
        needed.extend(consumes.then_some(service));
    }
    let messages = needed.len();
    let (mut sent, mut received) = (Vec::new(), [const { Vec::new() }; QUEUES]);
    let mut late = needed.into_iter().enumerate();
    for turn in 0.. {
        if turn % TURNS_PER_RECEIVE == 0
            && let Some((slot, service)) = late.next()
        {
            service.post(&b, slot as u64, (LANDING + slot * LENGTH_MAX) as u64, LENGTH_MAX as u32);
        }
        let now = Time(net.now());
        for node in [&a, &b] {
            node.device.step(now);
        }
        a.cq.poll(64, &mut |wc| sent.push(*wc)).expect("healthy");
        for (service, received) in services.iter().zip(&mut received) {
            service.cq.poll(64, &mut |wc| received.push(*wc)).expect("healthy");
        }
        if sent.len() == REQUESTS && received.iter().map(Vec::len).sum::<usize>() == messages {
            break;
        }
        let deadlines = [&a, &b].into_iter().filter_map(|node| node.device.next_deadline());
        let next = deadlines.map(|time| time.0).chain(net.next_delivery()).min();
        net.advance_to(next.unwrap_or(now.0 + 1).max(now.0));
        clock.set(Time(net.now()));
        assert!(now.0 < 600_000_000_000, "seed {seed}: nothing comes any more: {sent:?}");
    }
    check_sent(seed, &sent, &pairs);
    for (service, received) in services.iter().zip(&received) {
        check_received(seed, service, received, &pairs, &b, &data);
    }
    for connection in 0..CONNECTIONS {
        let (there, here) = (20_000 * connection, 30_000 + 10_000 * connection);
        assert_eq!(b.memory.u64_at(there), REQUESTS as u64 / 10, "seed {seed}: atomics happen once");
        assert_eq!(b.memory.bytes(there + 16, LENGTH_MAX), data[..LENGTH_MAX], "seed {seed}");
        assert_eq!(a.memory.bytes(here, LENGTH_MAX), data[..LENGTH_MAX], "seed {seed}");
    }
    [&a, &b].map(|node| node.device.snapshot()).into()
}

type Pairs = [(Arc<QueuePair>, Arc<QueuePair>); CONNECTIONS];

fn check_sent(seed: u64, sent: &[Wc], pairs: &Pairs) {
    assert!(sent.iter().all(|wc| wc.status == WcStatus::Success), "seed {seed}: {sent:?}");
    for (initiator, _) in pairs {
        let ids: Vec<_> = sent.iter().filter(|wc| wc.qpn == initiator.qpn()).map(|wc| wc.wr_id).collect();
        assert!(ids.is_sorted(), "seed {seed}: in order");
    }
}

fn check_received(seed: u64, service: &Service, received: &[Wc], pairs: &Pairs, b: &Node, data: &[u8]) {
    for wc in received {
        let index = wc.imm as usize;
        assert_eq!((wc.srqn, wc.status), (service.srq.number(), WcStatus::Success), "seed {seed}");
        assert_eq!(wc.qpn, pairs[index % CONNECTIONS].1.qpn(), "seed {seed}");
        if wc.opcode == WcOpcode::Recv {
            assert_eq!(wc.byte_len as usize, part(index).len(), "seed {seed}");
            let landed = b.memory.bytes(LANDING + wc.wr_id as usize * LENGTH_MAX, part(index).len());
            assert_eq!(landed, data[part(index)], "seed {seed}: message {index}");
        }
    }
    for (_, target) in pairs {
        let imms: Vec<_> = received.iter().filter(|wc| wc.qpn == target.qpn()).map(|wc| wc.imm).collect();
        assert!(imms.is_sorted_by(|one, other| one < other), "seed {seed}: once each, in order: {imms:?}");
    }
}

#[test]
fn messages_arrive_once_and_in_order_over_a_lossy_network() {
    let counts = ["retransmits", "rnr_naks_received"];
    let sums = (0..200).map(run).fold([0, 0], |sums, devices| {
        let count = |name: &str| devices[0].queue_pairs.iter().map(|qp| qp.counts[name]).sum::<u64>();
        [sums[0] + count(counts[0]), sums[1] + count(counts[1])]
    });
    assert!(sums.iter().all(|sum| *sum > 1000), "the weather was not bad: {counts:?} are {sums:?}");
}

#[test]
fn a_seed_replays() {
    assert_eq!(run(7), run(7));
}

#[test]
fn a_domain_that_cannot_be_made_leaves_nothing() {
    let address = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    let port = SimNet::new(1, Default::default()).port(address);
    let mut config = DeviceConfig::simulated(Box::new(port), Arc::new(ManualClock::new()), 1);
    (config.limits.max_cq, config.limits.max_pd) = (0, 2);
    let device = Device::open(config).expect("a device");
    for _ in 0..3 {
        assert!(device.open_xrcd().is_err());
    }
    device.alloc_pd().expect("a protection domain");
}
