//! Packets of one queue pair that switch between a ring and the network: nothing overtakes the packets in the ring.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::*;
use terrace_fabric::{Port, TxBatch};
use terrace_nic::*;
use terrace_wire::{Bth, Extensions, Opcode, Psn, emit_headers};

/// A queue pair of `a`, whose device has an engine, connected to one of `b`.
struct Ends {
    a: Node,
    b: Node,
    qa: Arc<QueuePair>,
    qb: Arc<QueuePair>,
}

fn port(last: u8) -> PortConfig {
    let address = Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, last)));
    PortConfig { address, path: PathChoice::Local, ..PortConfig::default() }
}

/// Packets sent by rings, and by the network.
fn packets(node: &Node) -> (u64, u64) {
    let snapshot = node.device.snapshot();
    (snapshot.same_host["packets_sent"], snapshot.port["tx_packets"])
}

impl Ends {
    /// Ends at two addresses, whose packets take the ring in both directions. `b` receives only when the test polls.
    fn new(qp_type: QpType, a_last: u8, b_last: u8) -> Ends {
        Ends::with_engine(qp_type, a_last, b_last, false)
    }

    /// The same, with or without an engine at `b`.
    fn with_engine(qp_type: QpType, a_last: u8, b_last: u8, engine: bool) -> Ends {
        let a = Node::with(port(a_last).device().expect("a port"), 1 << 20);
        let config = DeviceConfig { engine, ..port(b_last).device().expect("a port") };
        let b = Node::with(config, 1 << 20);
        let (qa, qb) = pair_on(&a, &b, qp_type, &Tuning::default());
        let ends = Ends { a, b, qa, qb };
        wait_until("both take the ring", || {
            let before = [packets(&ends.a), packets(&ends.b)];
            ends.pass(&ends.a, &ends.qa, &ends.b, &ends.qb);
            ends.pass(&ends.b, &ends.qb, &ends.a, &ends.qa);
            let after = [packets(&ends.a), packets(&ends.b)];
            (0..2).all(|end| after[end].0 > before[end].0 && after[end].1 == before[end].1)
        });
        ends
    }

    /// Sends one message and waits for both of its completions. The end without an engine acknowledges when polled.
    fn pass(&self, from: &Node, by: &Arc<QueuePair>, to: &Node, at: &Arc<QueuePair>) {
        at.post_recv([to.recv(1, 0, 64)]).expect("posted");
        by.post_send([Ok(from.wr(2, SendOp::Send, 0, 8))]).expect("posted");
        let mut done = Vec::new();
        wait_until_polled("a message and its acknowledgement", || {
            for node in [from, to] {
                node.cq.poll(4, &mut |wc| done.push(*wc)).expect("a healthy queue");
            }
            done.len() == 2
        });
        assert!(done.iter().all(|wc| wc.status == WcStatus::Success), "{done:?}");
    }

    fn post(&self, number: u32, length: u32) {
        let wr = self.a.wr(number.into(), SendOp::SendImm(number), 0, length);
        self.qa.post_send([Ok(wr)]).expect("posted");
    }

    fn post_receives(&self, count: u64, length: u32) {
        self.qb.post_recv((0..count).map(|number| self.b.recv(number, 0, length))).expect("posted");
    }

    /// Posts more than fits into the ring, which `b` does not read.
    fn overfill(&self) {
        self.post_receives(64, 1 << 16);
        (0..MESSAGES_TOO_MANY).for_each(|number| self.post(number, 1 << 16));
        wait_until("the ring is full", || {
            let before = packets(&self.a).0;
            std::thread::sleep(Duration::from_millis(20));
            packets(&self.a).0 == before
        });
    }
}

/// This many messages of 64 KiB are twice the ring's capacity.
const MESSAGES_TOO_MANY: u32 = 16;

/// Like `wait_until`, for a condition that itself makes progress.
fn wait_until_polled(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !condition() {
        assert!(std::time::Instant::now() < deadline, "polled in vain for {what}");
    }
}

fn immediates(wcs: &[Wc]) -> Vec<u32> {
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
    wcs.iter().map(|wc| wc.imm).collect()
}

/// RTS to RTS, while messages and acknowledgements are in the ring and more are queued: UC sends a burst, then at its
/// rate limit.
#[test]
fn attributes_change_and_the_ring_stays() {
    for (qp_type, last, length, batch) in [(QpType::Uc, 10, 1 << 16, 4), (QpType::Rc, 12, 8, 10)] {
        let ends = Ends::new(qp_type, last, last + 1);
        let before = [packets(&ends.a).1, packets(&ends.b).1];
        let attr = QpAttr { state: QpState::Rts, access: REMOTE_ALL, ..QpAttr::default() };
        ends.post_receives(100, length);
        for number in 0..100 {
            ends.post(number, length);
            for qp in [&ends.qa, &ends.qb] {
                qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS).expect("RTS");
            }
            if (number + 1) % batch == 0 {
                let got = immediates(&ends.b.completions(batch as usize));
                assert_eq!(got, Vec::from_iter(number + 1 - batch..=number), "{qp_type:?}");
            }
        }
        let naks = ends.qa.counters().sequence_naks_received;
        let by_network = [packets(&ends.a).1 - before[0], packets(&ends.b).1 - before[1]];
        assert_eq!((naks, by_network), (0, [0, 0]), "{qp_type:?}: sequence NAKs, packets by the network");
    }
}

/// The same, with both ends sending.
#[test]
fn attributes_change_under_load_and_every_message_arrives() {
    const MESSAGES: u32 = 20_000;
    for (qp_type, last) in [(QpType::Uc, 10), (QpType::Rc, 12)] {
        let ends = Ends::with_engine(qp_type, last, last + 1, true);
        let Ends { a, b, qa, qb } = &ends;
        let before = [packets(a).1, packets(b).1];
        let attr = QpAttr { state: QpState::Rts, access: REMOTE_ALL, ..QpAttr::default() };
        ends.post_receives(200, 64);
        let received = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..MESSAGES {
                    assert_eq!(immediates(&b.completions(1)), [number], "{qp_type:?}");
                    qb.post_recv([b.recv(number.into(), 0, 64)]).expect("posted");
                    received.store(number + 1, Ordering::SeqCst);
                }
            });
            let mut sent = 0;
            for number in 0..MESSAGES {
                wait_until_polled("the other end", || {
                    let count = |wc: &Wc| {
                        assert_eq!(wc.status, WcStatus::Success);
                        sent += 1;
                    };
                    a.cq.poll(64, &mut { count }).expect("a healthy queue");
                    number - sent < 100 && number - received.load(Ordering::SeqCst) < 100
                });
                ends.post(number, 32);
                if number % 100 == 99 {
                    for qp in [qa, qb] {
                        qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS).expect("RTS");
                    }
                }
            }
        });
        let naks = qa.counters().sequence_naks_received;
        let by_network = [packets(a).1 - before[0], packets(b).1 - before[1]];
        assert_eq!((naks, by_network), (0, [0, 0]), "{qp_type:?}: sequence NAKs, packets by the network");
    }
}

/// On a machine with too few processors, a reader may get none for longer than this.
#[test]
fn a_late_reader_gets_all_packets_in_order() {
    let ends = Ends::new(QpType::Uc, 14, 15);
    ends.overfill();
    std::thread::sleep(Duration::from_millis(100));
    let numbers = 0..MESSAGES_TOO_MANY + 4;
    (MESSAGES_TOO_MANY..numbers.end).for_each(|number| ends.post(number, 8));
    assert_eq!(immediates(&ends.b.completions(numbers.len())), Vec::from_iter(numbers));
}

/// A full ring of a stopped process blocks no sender for ever: further packets are lost, as at a full socket.
#[test]
fn a_stalled_reader_blocks_no_other_queue_pair() {
    let ends = Ends::new(QpType::Uc, 16, 17);
    let hasty = Tuning { timeout: 8, retry_cnt: 1, ..Tuning::default() };
    let (qc, _qd) = pair_on(&ends.a, &ends.b, QpType::Rc, &hasty);
    let before = packets(&ends.a).1;
    ends.overfill();
    let late = [MESSAGES_TOO_MANY, MESSAGES_TOO_MANY + 1];
    late.iter().for_each(|number| ends.post(*number, 8));
    let sent = ends.a.completions(MESSAGES_TOO_MANY as usize + 2);
    assert!(sent.iter().all(|wc| wc.status == WcStatus::Success), "{sent:?}");
    qc.post_send([Ok(ends.a.wr(99, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(ends.a.completion().status, WcStatus::RetryExceeded);
    // The reader continues, and gets the rest in order.
    let mut got = ends.b.completions(2);
    ends.post(98, 8);
    wait_until_polled("what is sent from now on", || {
        ends.b.cq.poll(64, &mut |wc| got.push(*wc)).expect("a healthy queue");
        got.last().is_some_and(|wc| wc.imm == 98)
    });
    let got = immediates(&got);
    assert!(got.len() > 2 && got.starts_with(&[0, 1]) && got.ends_with(&[98]), "{got:?}");
    assert!(got.is_sorted() && got.len() < late[1] as usize, "{got:?}");
    assert_eq!(packets(&ends.a).1, before, "nothing by the network");
}

/// Nothing would send a lost packet again. The messages are as long as those that fill the ring: short ones would fit. Another queue pair's error shows when the ring counts as that of a stopped
/// process.
#[test]
fn queue_pairs_without_a_timeout_lose_nothing_to_a_stopped_reader() {
    let ends = Ends::new(QpType::Uc, 20, 21);
    let [never, hasty] =
        [(0, 7), (8, 1)].map(|(timeout, retry_cnt)| Tuning { timeout, retry_cnt, ..Tuning::default() });
    let pairs = [(); 4].map(|()| pair_on(&ends.a, &ends.b, QpType::Rc, &never));
    let (qc, _qd) = pair_on(&ends.a, &ends.b, QpType::Rc, &hasty);
    ends.overfill();
    for (qa, qb) in &pairs {
        qb.post_recv([ends.b.recv(201, 0, 1 << 16)]).expect("posted");
        qa.post_send([Ok(ends.a.wr(200, SendOp::Send, 0, 1 << 16))]).expect("posted");
    }
    qc.post_send([Ok(ends.a.wr(99, SendOp::Send, 0, 1 << 16))]).expect("posted");
    let mut done = Vec::new();
    wait_until_polled("an error", || {
        ends.a.cq.poll(64, &mut |wc| done.push(*wc)).expect("a healthy queue");
        done.iter().any(|wc| (wc.wr_id, wc.status) == (99, WcStatus::RetryExceeded))
    });
    wait_until_polled("the other messages and their acknowledgements", || {
        for node in [&ends.a, &ends.b] {
            node.cq.poll(64, &mut |wc| done.push(*wc)).expect("a healthy queue");
        }
        let succeeded = |wr_id| {
            done.iter().filter(|wc| (wc.wr_id, wc.status) == (wr_id, WcStatus::Success)).count()
                == pairs.len()
        };
        succeeded(200) && succeeded(201)
    });
}

/// Packets come by the network when the peer has given the ring up.
#[test]
fn packets_from_the_network_do_not_overtake_packets_in_the_ring() {
    let ends = Ends::new(QpType::Uc, 18, 19);
    ends.post_receives(10, 64);
    // Another device at the same address: a peer may send from any port.
    let network = port(18).open().expect("a port");
    // One in many polls of a ring in use polls the network, too, and that first. The empty polls below shift its phase.
    for round in 0..300 {
        (0..3).for_each(|number| ends.post(number, 8));
        let psn = Psn::new(ends.qa.query().sq_psn);
        (0..2).for_each(|index| send_by_network(&*network, &ends, psn.plus(index), 3 + index));
        assert_eq!(immediates(&ends.b.completions(5)), [0, 1, 2, 3, 4], "round {round}");
        (5..8).for_each(|number| ends.post(number, 8));
        assert_eq!(immediates(&ends.b.completions(3)), [5, 6, 7], "round {round}: and back");
        ends.post_receives(8, 64);
        (0..round % 128).for_each(|_| assert_eq!(ends.b.cq.poll(1, &mut |_| ()), Ok(0)));
    }
}

/// Sends an empty message from `a` to `b`.
fn send_by_network(network: &dyn Port, ends: &Ends, psn: Psn, number: u32) {
    let bth = Bth {
        opcode: Opcode::UcSendOnlyImm,
        solicited: false,
        migrated: true,
        pad: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        qpn: ends.qb.qpn(),
        ack_request: false,
        psn,
    };
    let ext = Extensions { imm: Some(number), ..Extensions::default() };
    let path = ends.a.device.resolve(&ends.b.av(), ends.qb.qpn()).expect("a path");
    let mut batch = TxBatch::new(4096);
    let packet = batch.push(&path, bth.opcode.info().header_len).expect("room");
    emit_headers(&bth, &ext, packet).expect("headers");
    assert!(network.transmit(&mut batch));
}
