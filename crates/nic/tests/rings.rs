//! Packets between same-host peers through rings in memory: they arrive in order, without the network, and wake sleepers.

mod common;
#[path = "common/same_host.rs"]
mod same_host;

use std::cell::Cell;

use common::*;
use same_host::joined;
use terrace_nic::*;
use terrace_sync::SpinBudget;

/// Packets sent by rings, and by the network.
fn route_counts(node: &Node) -> (u64, u64) {
    let snapshot = node.device.snapshot();
    (snapshot.same_host["packets_sent"], snapshot.port["tx_packets"])
}

#[test]
fn messages_need_no_network() {
    let (a, b, qa, qb) = joined();
    // A node looks for its same-host peer when it has packets to send.
    wait_until("both have found each other", || {
        let before = (route_counts(&a).1, route_counts(&b).1);
        qb.post_recv([b.recv(1, 4096, 64)]).expect("posted");
        qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
        assert_eq!(a.completion().status, WcStatus::Success);
        assert_eq!(b.completion().wr_id, 1);
        (route_counts(&a).1, route_counts(&b).1) == before
    });
    let before = [route_counts(&a), route_counts(&b)];
    for (round, len) in [1u32, 64, 4095, 4096, 4097, 300_000, 0].into_iter().enumerate() {
        let data = pattern(len as usize, round as u8);
        a.memory.fill(0, &data);
        qb.post_recv([b.recv(round as u64, 400_000, 300_000)]).expect("posted");
        qa.post_send([Ok(a.wr(1, SendOp::SendImm(7), 0, len))]).expect("posted");
        let got = b.completion();
        assert_eq!((got.status, got.wr_id, got.byte_len), (WcStatus::Success, round as u64, len));
        assert_eq!(a.completion().status, WcStatus::Success);
        assert_eq!(b.memory.bytes(400_000, len as usize), data);
    }
    let after = [route_counts(&a), route_counts(&b)];
    assert!(after[0].0 > before[0].0 + 37 && after[1].0 > before[1].0, "{before:?} {after:?}");
    assert_eq!(after.map(|route| route.1), before.map(|route| route.1), "nothing by the network");
}

/// Long messages travel as runs of packets: they are scattered as packets are, and refused as packets are.
#[test]
fn runs_of_packets_do_what_packets_do() {
    let (a, b, qa, qb) = joined();
    wait_until("messages go through the ring", || {
        let before = route_counts(&a).1;
        qb.post_recv([b.recv(1, 4096, 64)]).expect("posted");
        qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
        assert_eq!((a.completion().status, b.completion().wr_id), (WcStatus::Success, 1));
        route_counts(&a).1 == before
    });
    let before = (qa.counters(), qb.counters());
    let mut sent = 0;
    for len in [4097u32, 8192, 8193, 20_000, 300_001] {
        let data = pattern(len as usize, len as u8);
        a.memory.fill(0, &data);
        // The elements end within runs, and one within the first packet.
        let sges = [b.sge(400_000, 100), b.sge(500_000, 5000), b.sge(600_000, 300_000)];
        qb.post_recv([Ok(RecvWr { wr_id: 2, sges: SgeList::from_slice(&sges) })]).expect("posted");
        qa.post_send([Ok(a.wr(1, SendOp::Send, 0, len))]).expect("posted");
        assert_eq!((b.completion().byte_len, a.completion().status), (len, WcStatus::Success));
        let parts =
            sges.map(|sge| b.memory.bytes((sge.addr - b.memory.addr()) as usize, sge.length as usize));
        assert_eq!(parts.concat()[..len as usize], data);

        // With an immediate, a WRITE goes by packets.
        let (va, rkey) = (b.memory.addr() + 10, b.mr.rkey());
        qb.post_recv([b.recv(3, 0, 0)]).expect("posted");
        qa.post_send([Ok(a.wr(1, SendOp::WriteImm { va, rkey, imm: 4 }, 0, len))]).expect("posted");
        assert_eq!((b.completion().byte_len, a.completion().status), (len, WcStatus::Success));
        assert_eq!(b.memory.bytes(10, len as usize), data);
        sent += 2 * u64::from(len.div_ceil(1024));
    }
    let (ours, theirs) = (qa.counters(), qb.counters());
    assert_eq!((ours.tx_packets - before.0.tx_packets, ours.retransmits), (sent, before.0.retransmits));
    assert_eq!(theirs.rx_packets - before.1.rx_packets, sent, "runs count as the packets they stand for");
    let runs = ours.runs_sent - before.0.runs_sent;
    assert!(runs >= 80 && runs == theirs.runs_received - before.1.runs_received, "{runs}");

    // A receive that is too short for a run of the message.
    qb.post_recv([b.recv(5, 400_000, 9000)]).expect("posted");
    qa.post_send([Ok(a.wr(6, SendOp::Send, 0, 20_000))]).expect("posted");
    assert_eq!(b.completion().status, WcStatus::LocalLength);
    assert_eq!(a.completion().status, WcStatus::RemoteInvalidRequest);
}

/// No engine runs here, so only polls acknowledge messages.
#[test]
fn responses_carry_the_acknowledgements_of_requests() {
    let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Local, ..PortConfig::default() };
    let config = || DeviceConfig { engine: false, ..port.clone().device().expect("a port on the loopback") };
    let ends = [Node::with(config(), 1 << 20), Node::with(config(), 1 << 20)];
    let (qa, qb) = rc_pair(&ends[0], &ends[1]);
    let qps = [&qa, &qb];
    let pass = |from: usize| {
        let (to, receiver) = (1 - from, &ends[1 - from]);
        qps[to].post_recv([receiver.recv(1, 0, 64)]).expect("posted");
        qps[from].post_send([Ok(ends[from].wr(2, SendOp::Send, 0, 8))]).expect("posted");
        while receiver.completion().wr_id != 1 {}
    };
    wait_until("both take the ring", || {
        let before = ends.each_ref().map(|end| route_counts(end).1);
        pass(0);
        pass(1);
        ends.each_ref().map(|end| route_counts(end).1) == before
    });
    let before = qps.map(|qp| qp.counters().tx_packets);
    for _ in 0..100 {
        pass(0);
        pass(1);
    }
    assert_eq!(qps.map(|qp| qp.counters().tx_packets), before.map(|packets| packets + 100));
    // No answer carries the last acknowledgement: the next poll sends it.
    let polls_in_vain = |end: &Node| end.cq.poll(1, &mut |_| ()).expect("healthy") == 0;
    assert!(polls_in_vain(&ends[1]) && polls_in_vain(&ends[0]));
    assert_eq!(ends[1].completion().wr_id, 2);
}

/// A UC queue pair sends nothing again, so only the doorbell wakes an engine that sleeps.
#[test]
fn the_first_packet_after_a_thread_has_polled_wakes_the_engine() {
    let (a, b) = (Node::local(), Node::local());
    let (qa, qb) = pair_on(&a, &b, QpType::Uc, &Tuning::default());
    let send = || {
        qb.post_recv([b.recv(1, 0, 8)]).expect("posted");
        qa.post_send([Ok(a.wr(2, SendOp::Send, 0, 8))]).expect("posted");
        for node in [&a, &b] {
            // `take` makes no progress.
            wait_until("the message has come", || node.cq.take(1, &mut |_| ()).expect("healthy") == 1);
        }
    };
    wait_until("messages take the ring", || {
        let before = route_counts(&a).1;
        send();
        route_counts(&a).1 == before
    });
    for pause_us in 0..200 {
        std::thread::sleep(std::time::Duration::from_micros(pause_us));
        assert!(!b.device.poll_until(&SpinBudget::default(), || false));
        send();
    }
}

/// The first messages leave before the two processes have connected. A UC queue pair takes an overtaken message for
/// lost.
#[test]
fn packets_in_a_ring_do_not_overtake_packets_on_the_network() {
    let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Local, ..PortConfig::default() };
    let config = port.device().expect("a port on the loopback");
    // `b` has no engine: it receives nothing before the test polls.
    let (a, b) = (Node::local(), Node::with(DeviceConfig { engine: false, ..config }, 1 << 20));
    let (qa, qb) = pair_on(&a, &b, QpType::Uc, &Tuning::default());
    qb.post_recv((0..250).map(|number| b.recv(number, 0, 8))).expect("posted");
    let sent = Cell::new(0);
    wait_until("messages take the ring", || {
        qa.post_send([Ok(a.wr(1, SendOp::SendImm(sent.get()), 0, 8))]).expect("posted");
        sent.set(sent.get() + 1);
        // With other load on the machine, the processes take longer to connect; the receives are limited.
        std::thread::sleep(std::time::Duration::from_micros(200) * sent.get());
        route_counts(&a).0 == 2
    });
    assert_eq!(route_counts(&a), (2, u64::from(sent.get()) - 2));
    let got: Vec<_> = b.completions(sent.get() as usize).iter().map(|wc| wc.imm).collect();
    assert_eq!(got, Vec::from_iter(0..sent.get()));
}

#[test]
fn packets_beyond_the_rings_size_wait_for_its_reader() {
    let (a, b, qa, qb) = joined();
    // Four messages of 3 MiB and more from four queue pairs at once: several times what the ring holds.
    let mut pairs = vec![(qa, qb)];
    pairs.extend((0..3).map(|_| rc_pair(&a, &b)));
    let data = pattern(1 << 18, 3);
    a.memory.fill(0, &data);
    for round in 0..20 {
        for (qa, qb) in &pairs {
            qb.post_recv([b.recv(round, 1 << 19, 1 << 18), b.recv(round, 1 << 19, 1 << 18)]).expect("posted");
            let wr = || Ok(a.wr(round, SendOp::Send, 0, 1 << 18));
            qa.post_send([wr(), wr()]).expect("posted");
        }
        let done = a.completions(8);
        assert!(done.iter().all(|wc| wc.status == WcStatus::Success), "{done:?}");
        assert_eq!(b.completions(8).iter().filter(|wc| wc.byte_len == 1 << 18).count(), 8);
        assert_eq!(b.memory.bytes(1 << 19, 1 << 18), data);
    }
}

#[test]
fn a_requests_completion_precedes_the_response() {
    let (a, b, qa, qb) = joined();
    for round in 0..2000 {
        qa.post_recv([a.recv(1, 0, 64)]).expect("posted");
        qb.post_recv([b.recv(2, 0, 64)]).expect("posted");
        qa.post_send([Ok(a.wr(3, SendOp::Send, 0, 8))]).expect("posted");
        assert_eq!(b.completion().wr_id, 2);
        qb.post_send([Ok(b.wr(4, SendOp::Send, 0, 8))]).expect("posted");
        let mut order = Vec::new();
        while order.len() < 2 {
            // Polls for one completion, two, and more than there are.
            a.cq.poll(1 + round as usize % 3, &mut |wc| order.push(wc.wr_id)).expect("healthy");
        }
        // The first rounds may have used the network.
        assert!(order == [3, 1] || round < 100, "{round}: {order:?}");
        assert_eq!(b.completion().wr_id, 4);
    }
}

#[test]
fn a_message_wakes_a_sleeping_receiver() {
    let (a, b, qa, qb) = joined();
    let channel = b.device.create_channel().expect("a channel");
    let cq =
        b.device.create_cq(CqInit { depth: 64, channel: Some(channel.clone()), cookie: 1 }).expect("a queue");
    let qc = b.pd.create_qp(QpInit { recv_cq: cq.clone(), ..b.init(QpType::Rc) }).expect("a queue pair");
    let qd = a.qp(QpType::Rc);
    connect(&qc, &a, qd.qpn(), &Tuning::default());
    connect(&qd, &b, qc.qpn(), &Tuning::default());
    drop((qa, qb));
    for round in 0..50 {
        qc.post_recv([b.recv(round, 0, 64)]).expect("posted");
        cq.request_notify(false).expect("armed");
        // Longer than a poller spins before it sleeps.
        std::thread::sleep(std::time::Duration::from_millis(2));
        qd.post_send([Ok(a.wr(round, SendOp::Send, 0, 8))]).expect("posted");
        channel.get_event().expect("an event").ack_events(1);
        assert_eq!(poll_for(&cq, 1)[0].wr_id, round);
        assert_eq!(a.completion().status, WcStatus::Success);
    }
    assert!(route_counts(&a).0 >= 40);
}

/// No engine runs at `b`: the poll that finds the message must still raise the event for the armed channel.
#[test]
fn a_poll_does_not_take_an_event_away() {
    let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Local, ..PortConfig::default() };
    let config = DeviceConfig { engine: false, ..port.device().expect("a port on the loopback") };
    let (a, b) = (Node::local(), Node::with(config, 1 << 20));
    let channel = b.device.create_channel().expect("a channel");
    let init = CqInit { depth: 64, channel: Some(channel.clone()), cookie: 1 };
    let cq = b.device.create_cq(init).expect("a queue");
    let qb = b.pd.create_qp(QpInit { recv_cq: cq.clone(), ..b.init(QpType::Rc) }).expect("a queue pair");
    let qa = a.qp(QpType::Rc);
    connect(&qa, &b, qb.qpn(), &Tuning::default());
    connect(&qb, &a, qa.qpn(), &Tuning::default());
    // Until the processes have connected, messages go by the network.
    for round in (0..).take_while(|_| route_counts(&a).0 < 100) {
        qb.post_recv([b.recv(round, 0, 64)]).expect("posted");
        let sleeps = round % 2 == 0;
        if sleeps {
            cq.request_notify(false).expect("armed");
        }
        qa.post_send([Ok(a.wr(round, SendOp::Send, 0, 8))]).expect("posted");
        assert_eq!(poll_for(&cq, 1)[0].wr_id, round);
        if sleeps {
            channel.get_event().expect("an event").ack_events(1);
        }
        // Only this poll acknowledges it.
        wait_until("it is acknowledged", || {
            assert_eq!(cq.poll(1, &mut |_| ()), Ok(0));
            a.cq.poll(1, &mut |_| ()) == Ok(1)
        });
    }
}

#[test]
fn rings_are_not_used_while_a_process_forks() {
    let (a, b, qa, qb) = joined();
    for round in 0..20 {
        qb.post_recv([b.recv(round, 0, 64)]).expect("posted");
        let pause = b.device.park_for_fork().lock();
        qa.post_send([Ok(a.wr(round, SendOp::Send, 0, 8))]).expect("posted");
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert_eq!(a.cq.poll(1, &mut |_| ()), Ok(0), "nobody receives while the engine rests");
        pause.resume_in_parent();
        assert_eq!((a.completion().wr_id, b.completion().wr_id), (round, round));
    }
}
