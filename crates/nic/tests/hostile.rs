//! Limits on a peer: it may neither starve other peers of a device nor guess numbers and keys that it was not given.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use common::*;
use terrace_fabric::sim::{SimConfig, SimNet, SimPort};
use terrace_fabric::{RxBatch, TxBatch};
use terrace_nic::*;
use terrace_wire::{Bth, Extensions, Opcode, Packet, Psn, ROCE_PORT, Reth, emit_headers};

const MEMORY_LEN: usize = 32 << 20;
const PEER_QPN: u32 = 0x123;

fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn path_to(last: u8) -> Path {
    let remote = (address(last), ROCE_PORT).into();
    Path { remote, source_gid_index: 0, traffic_class: 0, hop_limit: 64, flow_label: 0 }
}

fn node(net: &SimNet, seed: u64, memory_len: usize) -> Node {
    let port = Box::new(net.port(address(1)));
    Node::with(DeviceConfig::simulated(port, Arc::new(ManualClock::new()), seed), memory_len)
}

/// A queue pair of the node in RTR, whose peer's packets the test makes.
fn open_to(node: &Node, peer: Path, peer_qpn: u32) -> Arc<QueuePair> {
    let qp = node.qp(QpType::Rc);
    let mut attr = QpAttr { state: QpState::Init, port_num: 1, access: REMOTE_ALL, ..QpAttr::default() };
    let identity = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    qp.modify(&attr, identity | QpAttrMask::ACCESS_FLAGS).expect("INIT");
    attr.state = QpState::Rtr;
    (attr.path, attr.dest_qpn) = (Some(peer), peer_qpn);
    (attr.path_mtu, attr.max_dest_rd_atomic, attr.min_rnr_timer) = (4096, 16, 1);
    let path = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    qp.modify(&attr, QpAttrMask::STATE | path | responder).expect("RTR");
    qp
}

/// Sends a READ request for the first `length` bytes of the node's memory.
fn read(port: &SimPort, node: &Node, qpn: u32, psn: u32, length: u32) {
    let bth = Bth {
        opcode: Opcode::RcReadRequest,
        solicited: false,
        migrated: true,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn,
        ack_request: true,
        psn: Psn::new(psn),
    };
    let reth = Reth { va: node.memory.addr(), rkey: node.mr.rkey(), length };
    let ext = Extensions { reth: Some(reth), ..Extensions::default() };
    let mut batch = TxBatch::new(4096);
    let packet = batch.push(&path_to(1), bth.opcode.info().header_len).expect("room");
    emit_headers(&bth, &ext, packet).expect("headers");
    assert!(port.transmit(&mut batch));
}

fn deliver(net: &SimNet) {
    while let Some(next) = net.next_delivery() {
        net.advance_to(next);
    }
}

/// Receives at a port and returns the number of packets.
fn arrived(port: &SimPort) -> usize {
    let (mut rx, mut count) = (RxBatch::new(), 0);
    while port.receive(&mut rx) > 0 {
        while let Some(packet) = rx.next() {
            Packet::parse(packet.bytes).expect("a packet");
            count += 1;
        }
    }
    count
}

#[test]
fn a_peer_with_many_reads_does_not_starve_others() {
    let net = SimNet::new(1, SimConfig::default());
    let [greedy, modest] = [2, 3].map(|last| net.port(address(last)));
    let node = node(&net, 1, MEMORY_LEN);
    let [to_greedy, to_modest] = [2, 3].map(|last| open_to(&node, path_to(last), PEER_QPN));
    let packets = MEMORY_LEN / 4096;
    for number in 0..16 {
        read(&greedy, &node, to_greedy.qpn(), number * packets as u32, MEMORY_LEN as u32);
    }
    deliver(&net);
    assert!(node.device.progress());
    deliver(&net);
    let first = arrived(&greedy);
    assert!((1..1000).contains(&first), "{first} packets before anybody else was looked at");
    // Many responses are still pending; the next pass receives first all the same.
    read(&modest, &node, to_modest.qpn(), 0, 4096);
    deliver(&net);
    assert!(node.device.progress());
    deliver(&net);
    assert_eq!(arrived(&modest), 1);
    // All of the greedy peer's pending responses are sent.
    let mut total = first + arrived(&greedy);
    while node.device.progress() {
        deliver(&net);
        total += arrived(&greedy);
    }
    assert_eq!(total, 16 * packets);
}

#[test]
fn a_packet_from_another_port_than_the_peers_is_dropped() {
    let net = SimNet::new(1, SimConfig::default());
    // The peer has instance index 1 at its address, and a stranger index 0.
    let [other, peer] = [(); 2].map(|()| net.port(address(2)));
    let node = node(&net, 1, 4096);
    let mut path = path_to(2);
    path.remote.set_port(ROCE_PORT + 1);
    let qp = open_to(&node, path, 1 << QPN_INSTANCE_SHIFT | PEER_QPN);
    read(&other, &node, qp.qpn(), 0, 8);
    deliver(&net);
    node.device.progress();
    assert_eq!(qp.counters().dropped, 1);
    read(&peer, &node, qp.qpn(), 0, 8);
    deliver(&net);
    node.device.progress();
    deliver(&net);
    assert_eq!((qp.counters().dropped, arrived(&peer)), (1, 1));
}

/// Blocks inside the completion hook, and so holds the queue pair's lock, until the test lets it go on.
struct Holder {
    is_inside: Sender<()>,
    may_go_on: Mutex<Receiver<()>>,
    went_on: Sender<bool>,
}

impl CompletionHook for Holder {
    fn completed(&self, _wc: Wc) {
        self.is_inside.send(()).expect("the test listens");
        let reported = self.may_go_on.lock().expect("nobody panics").recv_timeout(PATIENCE);
        self.went_on.send(reported.is_ok()).expect("the test listens");
    }
}

/// Packets that any host can send must not revoke a thread's bias to the queue pair's lock.
#[test]
fn a_packet_of_another_source_does_not_take_the_queue_pairs_lock() {
    let net = SimNet::new(1, SimConfig::default());
    let (stranger, node) = (net.port(address(3)), node(&net, 1, 4096));
    let qp = open_to(&node, path_to(2), PEER_QPN);
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    qp.modify(&error, QpAttrMask::STATE).expect("ERR");
    let [(is_inside, inside), (go_on, may_go_on)] = [channel(), channel()];
    let (went_on, how) = channel();
    qp.set_completion_hook(Some(Arc::new(Holder { is_inside, may_go_on: Mutex::new(may_go_on), went_on })));
    std::thread::scope(|scope| {
        scope
            .spawn(|| qp.post_send([Ok(node.wr(1, SendOp::Read { va: 0, rkey: 0 }, 0, 8))]).expect("posted"));
        inside.recv_timeout(PATIENCE).expect("what is posted in ERR completes at once");
        read(&stranger, &node, qp.qpn(), 0, 8);
        deliver(&net);
        assert!(node.device.progress());
        // The holder may have timed out.
        let _ = go_on.send(());
    });
    assert_eq!(how.recv(), Ok(true), "the packet waited for the lock");
    assert_eq!(qp.counters().dropped, 1);
}

/// From consecutive numbers and keys, a peer could infer those of others.
#[test]
fn numbers_and_keys_do_not_follow_from_each_other() {
    let net = SimNet::new(1, SimConfig::default());
    let [one, other] = [1, 2].map(|seed| numbers_and_keys(&node(&net, seed, 4096)));
    for (values, others, mask) in [(&one.0, &other.0, 0xffff), (&one.1, &other.1, u32::MAX)] {
        let step = |pair: &[u32]| pair[1].wrapping_sub(pair[0]) & mask;
        let mut steps: Vec<u32> = values.windows(2).map(step).collect();
        steps.sort_unstable();
        steps.dedup();
        assert!(steps.len() > 190, "{} different steps of 199", steps.len());
        let same = values.iter().zip(others).filter(|(one, other)| one == other).count();
        assert!(same < 5, "{same} of 200 are those of another device");
    }
}

/// The numbers of 200 queue pairs, and the keys of 200 regions, one after the other.
fn numbers_and_keys(node: &Node) -> (Vec<u32>, Vec<u32>) {
    let pairs: Vec<_> = (0..200).map(|_| node.qp(QpType::Rc)).collect();
    let addr = node.memory.addr();
    let request = || MrRequest { addr, length: 4096, iova: addr, access: REMOTE_ALL, paging: None };
    let regions: Vec<_> = (0..200).map(|_| node.pd.reg_mr(request()).expect("a region")).collect();
    (pairs.iter().map(|qp| qp.qpn()).collect(), regions.iter().map(|mr| mr.rkey()).collect())
}
