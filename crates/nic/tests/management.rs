//! Datagrams between devices, on the queue pair for management.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};

use common::*;
use terrace_fabric::TxBatch;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_nic::*;
use terrace_wire::{Bth, Deth, Extensions, Opcode, Psn, emit_headers};

type Received = Arc<Mutex<Vec<(Path, Vec<u8>)>>>;

/// Records the datagrams that a device receives.
fn listen(device: &Device) -> Received {
    let received = Received::default();
    let kept = received.clone();
    let handler = move |path: &Path, data: &[u8]| kept.lock().unwrap().push((*path, data.to_vec()));
    device.on_management(Arc::new(handler));
    received
}

fn path(from: &Node, to: &Node) -> Path {
    let qpn = to.qp(QpType::Ud).qpn();
    from.device.resolve(&to.av(), qpn).expect("a path")
}

#[test]
fn a_handler_can_answer_a_datagram() {
    let (a, b) = (Node::udp(), Node::udp());
    let answers = listen(&a.device);
    let device = Arc::downgrade(&b.device);
    b.device.on_management(Arc::new(move |path, data| {
        // A handler may call verbs.
        let device = device.upgrade().expect("it calls");
        let pd = device.alloc_pd().expect("a protection domain");
        pd.dealloc().expect("nobody uses it");
        device.send_management(path, &[data, b"!"].concat()).expect("sent");
    }));
    a.device.send_management(&path(&a, &b), b"anybody there?").expect("sent");
    wait_until("there is an answer", || !answers.lock().unwrap().is_empty());
    let answers = answers.lock().unwrap();
    assert_eq!(answers[0].1, b"anybody there?!");
    // The answer's source is the answering device's own port, whatever its instance index.
    assert_eq!(answers[0].0.remote, path(&a, &b).remote);
    b.device.close();
}

#[test]
fn lengths_and_ports_are_checked() {
    let (a, b) = (Node::udp(), Node::udp());
    let received = listen(&b.device);
    let to = path(&a, &b);
    let sent = |path: &Path, len| a.device.send_management(path, &vec![7; len]);
    assert!(matches!(sent(&to, 0), Err(Error::Invalid(_))));
    assert!(matches!(sent(&to, MANAGEMENT_BYTES_MAX + 1), Err(Error::Invalid(_))));
    let mut elsewhere = to;
    elsewhere.remote.set_port(80);
    assert!(matches!(sent(&elsewhere, 1), Err(Error::Invalid(_))));
    for len in [1, 2, 3, MANAGEMENT_BYTES_MAX] {
        sent(&to, len).expect("sent");
    }
    wait_until("all have arrived", || received.lock().unwrap().len() == 4);
    let lens: Vec<_> = received.lock().unwrap().iter().map(|(_, data)| data.len()).collect();
    assert_eq!(lens, [1, 2, 3, MANAGEMENT_BYTES_MAX]);
    a.device.close();
    assert!(matches!(sent(&to, 1), Err(Error::NoDevice(_))));
}

/// A device, and a port whose packets the test makes.
struct Stranger {
    net: SimNet,
    port: terrace_fabric::sim::SimPort,
    node: Node,
    received: Received,
    now: u64,
}

fn stranger(listens: bool) -> Stranger {
    let net = SimNet::new(1, SimConfig::default());
    let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));
    let own = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)));
    let node = Node::with(DeviceConfig::simulated(Box::new(own), Arc::new(ManualClock::new()), 1), 4096);
    let received = if listens { listen(&node.device) } else { Received::default() };
    Stranger { net, port, node, received, now: 0 }
}

fn good() -> (Bth, Deth) {
    let bth = Bth {
        opcode: Opcode::UdSendOnly,
        solicited: false,
        migrated: true,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn: 1,
        ack_request: false,
        psn: Psn::new(0),
    };
    (bth, Deth { qkey: 0x8001_0000, source_qpn: 1 })
}

impl Stranger {
    fn send(&mut self, bth: &Bth, deth: Deth, len: usize) {
        use terrace_nic::Port;
        let path = Path {
            remote: (Ipv4Addr::new(10, 0, 0, 1), terrace_wire::ROCE_PORT).into(),
            source_gid_index: 0,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
        };
        let ext = Extensions { deth: Some(deth), imm: Some(9), ..Extensions::default() };
        let header_len = bth.opcode.info().header_len;
        let mut batch = TxBatch::new(4096);
        let packet = batch.push(&path, header_len + len).expect("room");
        emit_headers(bth, &ext, &mut packet[..header_len]).expect("headers");
        packet[header_len..].fill(7);
        assert!(self.port.transmit(&mut batch));
        self.step_until_idle();
    }

    fn step_until_idle(&mut self) {
        while let Some(next) = self.net.next_delivery() {
            self.net.advance_to(next);
        }
        self.now = self.now.max(self.net.now());
        self.node.device.step(Time(self.now));
    }

    fn counts(&self) -> (usize, u64) {
        let dropped = self.node.device.snapshot().dropped["management"];
        (self.received.lock().unwrap().len(), dropped)
    }
}

#[test]
fn what_is_no_management_datagram_is_dropped_and_counted() {
    let mut stranger = stranger(true);
    let (bth, deth) = good();
    stranger.send(&bth, deth, 8);
    assert_eq!(stranger.counts(), (1, 0));
    stranger.send(&bth, Deth { qkey: 0x1234, ..deth }, 8);
    stranger.send(&bth, Deth { source_qpn: 2, ..deth }, 8);
    stranger.send(&Bth { opcode: Opcode::UdSendOnlyImm, ..bth }, deth, 8);
    stranger.send(&Bth { qpn: 1 << 16 | 1, ..bth }, deth, 8);
    stranger.send(&bth, deth, 0);
    stranger.send(&bth, deth, MANAGEMENT_BYTES_MAX + 4);
    assert_eq!(stranger.counts(), (1, 6));
    stranger.send(&bth, deth, 8);
    assert_eq!(stranger.counts(), (2, 6));
}

#[test]
fn a_flood_is_accepted_at_a_bounded_rate() {
    let mut stranger = stranger(true);
    let (bth, deth) = good();
    for _ in 0..1000 {
        stranger.send(&bth, deth, 8);
    }
    let (first, dropped) = stranger.counts();
    assert_eq!(first as u64 + dropped, 1000);
    assert!((60..100).contains(&first), "{first}");
    // Half of the credit is back after half of the time.
    stranger.now += 16_000_000;
    for _ in 0..100 {
        stranger.send(&bth, deth, 8);
    }
    let more = stranger.counts().0 - first;
    assert!((30..36).contains(&more), "{more}");
}

#[test]
fn a_flood_from_one_address_leaves_the_quota_of_others() {
    let mut stranger = stranger(true);
    let (bth, deth) = good();
    for _ in 0..1000 {
        stranger.send(&bth, deth, 8);
    }
    let (from_one, _) = stranger.counts();
    let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3));
    stranger.port = stranger.net.port(other);
    stranger.send(&bth, deth, 8);
    assert_eq!(stranger.counts().0, from_one + 1, "another one's datagram right after them");
    // All sources together have a limit, too: forged source addresses gain nothing.
    for last in 4..250 {
        stranger.port = stranger.net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 1, last)));
        (0..10).for_each(|_| stranger.send(&bth, deth, 8));
    }
    let all = stranger.counts().0;
    assert!((120..200).contains(&all), "{all}");
}

#[test]
fn datagrams_without_a_handler_are_dropped() {
    let mut stranger = stranger(false);
    let (bth, deth) = good();
    stranger.send(&bth, deth, 8);
    assert_eq!(stranger.counts(), (0, 1));
}

#[test]
fn a_class_can_have_its_own_handler() {
    let (a, b) = (Node::udp(), Node::udp());
    let rest = listen(&b.device);
    let own = Received::default();
    let kept = own.clone();
    let handler = move |path: &Path, data: &[u8]| kept.lock().unwrap().push((*path, data.to_vec()));
    b.device.on_management_class(0x07, Arc::new(handler));
    let to = path(&a, &b);
    for payload in [&[1, 0x07, 2][..], &[1, 0x3d], &[7]] {
        a.device.send_management(&to, payload).expect("sent");
    }
    wait_until("all have arrived", || own.lock().unwrap().len() + rest.lock().unwrap().len() == 3);
    assert_eq!(own.lock().unwrap()[0].1, [1, 0x07, 2]);
    let rest: Vec<_> = rest.lock().unwrap().iter().map(|(_, data)| data.clone()).collect();
    assert_eq!(rest, [vec![1, 0x3d], vec![7]]);
}
