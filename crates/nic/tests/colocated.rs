//! Forwarding between co-located devices: packets that came to another device's port. Between processes:
//! `tests/negative/test_forwarding.py`.

mod common;

use std::net::UdpSocket;
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::*;
use terrace_nic::*;
use terrace_wire::{QPN_INSTANCE_SHIFT, ROCE_PORT};

/// A node with the first free instance of an address.
fn instance_of(address: [u8; 4]) -> Node {
    let port = PortConfig { address: Some(address.into()), path: PathChoice::Udp, ..PortConfig::default() };
    Node::with(port.device().expect("a port"), 1 << 20)
}

/// Only instance 0 forwards, so each test has an address of its own.
fn instances_0_and_1_of(address: [u8; 4]) -> (Node, Node) {
    let nodes = (instance_of(address), instance_of(address));
    assert_eq!((nodes.0.device.instance(), nodes.1.device.instance()), (0, 1));
    nodes
}

/// Connects a queue pair as `common::connect` does, but to the UDP port of another device than that of the peer's queue
/// pair, like a peer without instance indices.
fn connect_through(qp: &Arc<QueuePair>, peer: &Node, peer_qpn: u32, through: &Device, tuning: &Tuning) {
    let mut attr = QpAttr { state: QpState::Init, port_num: 1, access: REMOTE_ALL, ..QpAttr::default() };
    let identity = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT;
    qp.modify(&attr, identity | QpAttrMask::ACCESS_FLAGS).expect("INIT");
    let mut path = qp.pd().device().resolve(&peer.av(), peer_qpn).expect("a path");
    path.remote.set_port(ROCE_PORT + u16::from(through.instance()));
    attr.state = QpState::Rtr;
    attr.path = Some(path);
    attr.dest_qpn = peer_qpn;
    attr.path_mtu = 1024;
    let mask = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    let responder = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    qp.modify(&attr, QpAttrMask::STATE | mask | responder).expect("RTR");
    (attr.state, attr.timeout, attr.retry_cnt, attr.rnr_retry) =
        (QpState::Rts, tuning.timeout, tuning.retry_cnt, tuning.rnr_retry);
    let requester =
        QpAttrMask::TIMEOUT | QpAttrMask::RETRY_CNT | QpAttrMask::RNR_RETRY | QpAttrMask::MAX_QP_RD_ATOMIC;
    qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::SQ_PSN | requester).expect("RTS");
}

/// Sends to a queue pair of `home` through the port of `demultiplexer`. Returns the SEND's status.
fn send_through(demultiplexer: &Node, home: &Node, tuning: &Tuning) -> WcStatus {
    let peer = Node::udp();
    let (theirs, ours) = (peer.qp(QpType::Rc), home.qp(QpType::Rc));
    connect(&ours, &peer, theirs.qpn(), &Tuning::default());
    connect_through(&theirs, home, ours.qpn(), &demultiplexer.device, tuning);
    ours.post_recv([home.recv(1, 0, 64)]).expect("posted");
    peer.memory.fill(0, b"passed on");
    theirs.post_send([Ok(peer.wr(2, SendOp::Send, 0, 9))]).expect("posted");
    let status = peer.completion().status;
    if status == WcStatus::Success {
        assert_eq!(home.completion().status, WcStatus::Success);
        assert_eq!(home.memory.bytes(0, 9), b"passed on");
    }
    status
}

#[test]
fn a_packet_to_a_colocated_devices_port_arrives() {
    let (demultiplexer, home) = instances_0_and_1_of([127, 84, 7, 2]);
    demultiplexer.device.join_colocated().expect("descriptors");
    home.device.join_colocated().expect("descriptors");
    assert_eq!(send_through(&demultiplexer, &home, &Tuning::default()), WcStatus::Success);
    // A closed device is no longer co-located.
    home.device.close();
}

#[test]
fn devices_that_have_not_joined_get_no_forwarded_packets() {
    let (demultiplexer, home) = instances_0_and_1_of([127, 84, 7, 3]);
    demultiplexer.device.join_colocated().expect("descriptors");
    let tuning = Tuning { timeout: 10, retry_cnt: 2, ..Tuning::default() };
    assert_eq!(send_through(&demultiplexer, &home, &tuning), WcStatus::RetryExceeded);
}

#[test]
fn a_management_datagram_for_another_instance_arrives_unchanged() {
    let (demultiplexer, home) = instances_0_and_1_of([127, 84, 7, 1]);
    let heard = Arc::new(Mutex::new(Vec::new()));
    let kept = heard.clone();
    let handler = move |path: &Path, data: &[u8]| kept.lock().unwrap().push((*path, data.to_vec()));
    home.device.on_management(Arc::new(handler));
    let mut from = demultiplexer.device.resolve(&home.av(), 0).expect("a path");
    from.remote = ([10, 1, 2, 3], ROCE_PORT + 9).into();
    let forward = |slot, from: &Path, data: &[u8]| demultiplexer.device.forward_management(slot, from, data);
    // Forwarding starts when both have joined.
    assert!(matches!(forward(1, &from, b"early"), Ok(false)));
    demultiplexer.device.join_colocated().expect("descriptors");
    assert!(matches!(forward(1, &from, b"too early"), Ok(true)));
    home.device.join_colocated().expect("descriptors");
    assert!(matches!(forward(1, &from, b"hello"), Ok(true)));
    wait_until("it has arrived", || !heard.lock().unwrap().is_empty());
    assert_eq!(heard.lock().unwrap()[0], (from, b"hello".to_vec()));
    // Nothing is forwarded to the demultiplexer, and nothing else forwards.
    assert!(matches!(forward(0, &from, b"x"), Ok(false)));
    assert!(matches!(home.device.forward_management(2, &from, b"x"), Ok(false)));
    from.remote.set_port(80);
    assert!(matches!(forward(1, &from, b"x"), Err(Error::Invalid(_))));
    assert_eq!(demultiplexer.device.snapshot().passed_on, 2);
}

/// In a network namespace of its own: the addresses of the loopback interface are other tests', too.
#[test]
fn a_new_demultiplexer_listens_where_others_need_it() {
    let possible = Command::new("unshare").args(["-rn", "ip", "link"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no network namespace, or no `ip`, for this user");
        return;
    }
    let script = "ip link set lo up && exec \"$0\" --exact inner_new_demultiplexer --ignored --nocapture";
    let exe = std::env::current_exe().expect("this program");
    let output = Command::new("unshare").args(["-rn", "sh", "-c", script]).arg(exe).output().expect("run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&[output.stdout, output.stderr].concat()));
}

#[test]
#[ignore = "runs in a namespace made by a_new_demultiplexer_listens_where_others_need_it"]
fn inner_new_demultiplexer() {
    const LOOPBACK: [u8; 4] = [127, 0, 0, 1];
    let (first, home) = instances_0_and_1_of(LOOPBACK);
    first.device.join_colocated().expect("descriptors");
    home.device.join_colocated().expect("descriptors");
    // A datagram may come to any address.
    ready_datagrams(&home.qp(QpType::Ud), 0x11);
    reads_at_second_address(&first);
    drop(first);
    let second = instance_of(LOOPBACK);
    assert_eq!(second.device.instance(), 0);
    second.device.join_colocated().expect("descriptors");
    reads_at_second_address(&second);
}

/// Waits until the demultiplexer reads what comes to `::1`.
fn reads_at_second_address(demultiplexer: &Node) {
    let socket = UdpSocket::bind("[::1]:0").expect("a socket");
    wait_until("a datagram is read", || {
        socket.send_to(&[1; 40], ("::1", ROCE_PORT)).expect("sent");
        demultiplexer.device.snapshot().port["bad_icrc"] > 0
    });
}

/// Queue pairs that a thread creates and destroys.
const CREATIONS: usize = 1_000_000;

/// A receive pass that kept its own table locked would wait for the other device's, behind a thread that waits to write.
#[test]
fn devices_that_forward_to_each_other_leave_their_tables_to_threads_that_create_queue_pairs() {
    let (first, second) = instances_0_and_1_of([127, 84, 7, 4]);
    let nodes = [Arc::new(first), Arc::new(second)];
    nodes.iter().for_each(|node| node.device.join_colocated().expect("descriptors"));
    let peer = Node::udp();
    let sender = peer.qp(QpType::Ud);
    ready_datagrams(&sender, 0);
    // To the port of one device, for a queue pair number of the other: one that no queue pair gets.
    let datagram = |through: &Node, home: &Node| {
        let qpn = u32::from(home.device.instance()) << QPN_INSTANCE_SHIFT | 0xffff;
        let mut path = peer.device.resolve(&home.av(), qpn).expect("a path");
        path.remote.set_port(ROCE_PORT + u16::from(through.device.instance()));
        let target = Some(Target::Datagram(Box::new(Datagram { path, qpn, qkey: 0 })));
        SendWr { target, ..peer.wr(1, SendOp::Send, 0, 8) }
    };
    let [a, b] = &nodes;
    let datagrams = [datagram(a, b), datagram(b, a)];
    let creators = nodes.clone().map(|node| {
        std::thread::spawn(move || {
            (0..CREATIONS).for_each(|_| node.qp(QpType::Rc).destroy().expect("destroyed"));
        })
    });
    while !creators.iter().all(|creator| creator.is_finished()) {
        sender.post_send(datagrams.iter().cycle().take(64).cloned().map(Ok)).expect("posted");
        peer.completions(64);
    }
    let unknown = |node: &Node| node.device.snapshot().dropped["unknown_qp"];
    assert!(nodes.iter().all(|node| unknown(node) > 0), "no packet was forwarded");
}
