//! Multicast: groups of UD queue pairs, on the loopback and in a simulated network.

mod common;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use common::*;
use terrace_fabric::TxBatch;
use terrace_fabric::sim::{SimConfig, SimNet, SimPort};
use terrace_nic::*;
use terrace_wire::{Bth, Deth, Extensions, MULTICAST_QPN, Opcode, Psn, ROCE_PORT, emit_headers};

const QKEY: u32 = 0x77;
const GRH_BYTES: usize = 40;

fn gid(group: &str) -> [u8; 16] {
    match group.parse().expect("an address") {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// A UD queue pair with a receive for a GRH and 24 bytes.
fn member(node: &Node, qkey: u32, offset: u64) -> Arc<QueuePair> {
    let qp = node.qp(QpType::Ud);
    ready_datagrams(&qp, qkey);
    qp.post_recv([node.recv(offset, offset, 64)]).expect("posted");
    qp
}

/// Sends bytes to a group.
fn send(node: &Node, qp: &Arc<QueuePair>, group: [u8; 16], text: &[u8]) {
    let ah = node.pd.create_ah(&AddressVector { dgid: group, ..node.av() }).expect("an address handle");
    node.memory.fill(4096, text);
    let mut wr = node.wr(99, SendOp::Send, 4096, text.len() as u32);
    wr.target = Some(ah.target(MULTICAST_QPN, QKEY));
    qp.post_send([Ok(wr)]).expect("posted");
    assert_eq!(ah.destroy(), Ok(()));
}

/// Devices of three processes at two addresses of this host, which no other test has.
fn host(test: u8) -> [Node; 3] {
    [1, 1, 2].map(|number| {
        let address = Some(IpAddr::from([127, 84, test, number]));
        let port = PortConfig { address, path: PathChoice::Udp, ..PortConfig::default() };
        Node::with(port.device().expect("a port on the loopback"), 1 << 16)
    })
}

#[test]
fn every_member_of_the_host_receives_a_datagram_and_its_sender_too() {
    let group = gid("239.84.9.1");
    let nodes = host(9);
    assert_eq!(nodes.each_ref().map(|node| node.device.instance()), [0, 1, 0]);
    let members = nodes.each_ref().map(|node| [0, 128].map(|offset| member(node, QKEY, offset)));
    members.iter().flatten().for_each(|qp| qp.attach_multicast(&group).expect("attached"));
    // Neither is a member: one has another Q_Key, and the other is in another group.
    let (stranger, other) = (member(&nodes[0], QKEY + 1, 256), member(&nodes[0], QKEY, 384));
    stranger.attach_multicast(&group).expect("attached");
    other.attach_multicast(&gid("239.84.9.2")).expect("attached");

    send(&nodes[0], &members[0][0], group, b"to all of them");
    // The sender's own queue has the completion of its SEND, too.
    for (node, count) in nodes.iter().zip([3, 2, 2]) {
        let received = node.completions(count).into_iter().filter(|wc| wc.opcode == WcOpcode::Recv);
        for wc in received {
            assert_eq!((wc.status, wc.byte_len as usize), (WcStatus::Success, GRH_BYTES + 14));
            assert_eq!(wc.src_qp, members[0][0].qpn());
            let at = wc.wr_id as usize;
            // The route: from the sender to the group.
            assert_eq!(node.memory.bytes(at + 32, 8), [127, 84, 9, 1, 239, 84, 9, 1]);
            assert_eq!(node.memory.bytes(at + GRH_BYTES, 14), b"to all of them");
        }
    }
    assert_eq!(other.counters().rx_packets, 0);
    wait_until("the stranger has dropped it", || stranger.counters().dropped == 1);
}

#[test]
fn a_detached_queue_pair_receives_nothing_and_an_attached_one_is_not_destroyed() {
    let group = gid("239.84.9.3");
    let [a, b, _] = host(10);
    let (sender, [stays, goes]) = (member(&a, QKEY, 0), [0, 128].map(|offset| member(&b, QKEY, offset)));
    for qp in [&stays, &goes] {
        qp.attach_multicast(&group).expect("attached");
        qp.attach_multicast(&group).expect("attached twice");
    }
    assert_eq!(b.device.snapshot().objects["multicast_attachments"], 2);
    assert!(matches!(goes.destroy(), Err(Error::Busy(_))));
    goes.detach_multicast(&group).expect("detached");
    assert!(matches!(goes.detach_multicast(&group), Err(Error::Invalid(_))));
    send(&a, &sender, group, b"one");
    assert_eq!(b.completion().wr_id, 0);
    assert_eq!(goes.counters().rx_packets, 0);
    assert_eq!(goes.destroy(), Ok(()));
    // With the device's end all are detached.
    b.device.close();
    assert_eq!(b.device.snapshot().objects["multicast_attachments"], 0);
    assert_eq!(stays.destroy(), Ok(()));
}

#[test]
fn queue_pairs_may_refuse_what_their_own_device_has_sent() {
    let group = gid("239.84.9.4");
    let [a, b, _] = host(11);
    let refuses = a.pd.create_qp(QpInit { blocks_own_multicast: true, ..a.init(QpType::Ud) }).expect("made");
    ready_datagrams(&refuses, QKEY);
    refuses.post_recv([a.recv(128, 128, 64), a.recv(256, 256, 64)]).expect("posted");
    let (sender, peer) = (member(&a, QKEY, 0), member(&b, QKEY, 0));
    for qp in [&refuses, &sender, &peer] {
        qp.attach_multicast(&group).expect("attached");
    }
    send(&a, &sender, group, b"own");
    let received: Vec<u64> = a.completions(2).iter().map(|wc| wc.wr_id).collect();
    assert!(received.contains(&0) && received.contains(&99), "{received:?}");
    send(&b, &peer, group, b"another's");
    assert_eq!(a.completion().wr_id, 128);
}

#[test]
fn only_groups_and_datagrams_are_accepted_and_limits_hold() {
    let net = SimNet::new(1, SimConfig::default());
    let port = Box::new(net.port(Ipv4Addr::new(10, 0, 0, 1).into()));
    let limits = Limits { max_mcast_groups: 2, max_mcast_qp_attach: 2, ..Limits::default() };
    let config = DeviceConfig { limits, ..DeviceConfig::simulated(port, Arc::new(ManualClock::new()), 1) };
    let node = Node::with(config, 4096);
    let [first, second, third] = [(); 3].map(|()| node.qp(QpType::Ud));
    for invalid in ["10.0.0.1", "fe80::1", "::"] {
        assert!(matches!(first.attach_multicast(&gid(invalid)), Err(Error::Invalid(_))), "{invalid}");
    }
    let reliable = node.qp(QpType::Rc);
    assert!(matches!(reliable.attach_multicast(&gid("239.0.0.1")), Err(Error::Invalid(_))));
    // There is no address of the family.
    assert!(matches!(first.attach_multicast(&gid("ff0e::1")), Err(Error::System(_))));
    // A queue pair is connected to no group.
    let group = AddressVector { dgid: gid("239.0.0.1"), ..node.av() };
    assert!(matches!(node.device.resolve(&group, reliable.qpn()), Err(Error::Invalid(_))));
    assert_eq!(first.attach_multicast(&gid("239.0.0.1")), Ok(()));
    // The same group, as RoCEv1 writes it.
    assert_eq!(second.attach_multicast(&gid("ff0e::ffff:239.0.0.1")), Ok(()));
    assert!(matches!(third.attach_multicast(&gid("239.0.0.1")), Err(Error::NoMemory(_))));
    assert_eq!(first.attach_multicast(&gid("239.0.0.2")), Ok(()));
    assert!(matches!(first.attach_multicast(&gid("239.0.0.3")), Err(Error::NoMemory(_))));
    assert_eq!(third.destroy(), Ok(()));
}

/// A device with a member of a group, and a port whose packets the test makes.
struct Hostile {
    net: SimNet,
    port: SimPort,
    node: Node,
    member: Arc<QueuePair>,
}

const HOSTILE_GROUP: Ipv6Addr = Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 1, 2);

impl Hostile {
    fn new() -> Hostile {
        let net = SimNet::new(1, SimConfig::default());
        let at = |last| IpAddr::from(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last));
        let port = net.port(at(2));
        let own = Box::new(net.port(at(1)));
        let node = Node::with(DeviceConfig::simulated(own, Arc::new(ManualClock::new()), 1), 4096);
        let member = member(&node, QKEY, 0);
        member.attach_multicast(&HOSTILE_GROUP.octets()).expect("attached");
        Hostile { net, port, node, member }
    }

    fn send(&self, to: IpAddr, qpn: u32, opcode: Opcode) {
        let path = Path {
            remote: SocketAddr::new(to, ROCE_PORT),
            source_gid_index: 0,
            traffic_class: 0,
            hop_limit: 1,
            flow_label: 0,
        };
        let bth = Bth {
            opcode,
            solicited: false,
            migrated: true,
            pad: 0,
            pkey: 0xffff,
            fecn: false,
            becn: false,
            qpn,
            ack_request: false,
            psn: Psn::new(0),
        };
        let deth = Deth { qkey: QKEY, source_qpn: 5 };
        let ext = Extensions { deth: Some(deth), imm: Some(9), ..Extensions::default() };
        let header_len = opcode.info().header_len;
        let mut batch = TxBatch::new(4096);
        let packet = batch.push(&path, header_len + 8).expect("room");
        emit_headers(&bth, &ext, &mut packet[..header_len]).expect("headers");
        packet[header_len..].fill(7);
        assert!(self.port.transmit(&mut batch));
        while let Some(next) = self.net.next_delivery() {
            self.net.advance_to(next);
        }
        self.node.device.step(Time(self.net.now()));
    }

    /// What the member received and dropped, and what was dropped before it and other queue pairs.
    fn counts(&self) -> [u64; 4] {
        let (counters, snapshot) = (self.member.counters(), self.node.device.snapshot());
        let [group, qp] = ["unknown_group", "unknown_qp"].map(|name| snapshot.dropped[name]);
        [counters.rx_packets, counters.dropped, group, qp]
    }
}

#[test]
fn datagrams_that_are_no_members_business_are_dropped_and_counted() {
    let hostile = Hostile::new();
    let (group, other) = (HOSTILE_GROUP.into(), Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 1, 3).into());
    hostile.send(group, MULTICAST_QPN, Opcode::UdSendOnly);
    assert_eq!(hostile.counts(), [1, 0, 0, 0]);
    // A number of a queue pair is none of a group's, not even the member's own.
    hostile.send(group, hostile.member.qpn(), Opcode::UdSendOnly);
    hostile.send(group, 1, Opcode::UdSendOnly);
    assert_eq!(hostile.counts(), [1, 0, 2, 0]);
    // Groups get datagrams only.
    hostile.send(group, MULTICAST_QPN, Opcode::RcSendOnly);
    assert_eq!(hostile.counts(), [1, 1, 2, 0]);
    // The group's number is no queue pair's.
    hostile.send(hostile.node.device.gids()[0].addr, MULTICAST_QPN, Opcode::UdSendOnly);
    assert_eq!(hostile.counts(), [1, 1, 2, 1]);
    // The port has not joined this group.
    hostile.send(other, MULTICAST_QPN, Opcode::UdSendOnly);
    assert_eq!(hostile.counts(), [1, 1, 2, 1]);
    // Datagrams without a receive.
    hostile.send(group, MULTICAST_QPN, Opcode::UdSendOnly);
    assert_eq!(hostile.counts()[..2], [2, 2]);
}
