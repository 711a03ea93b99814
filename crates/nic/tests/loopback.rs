//! Every operation between two devices of one process, over real UDP sockets and with their engines running.

mod common;

use common::*;
use terrace_nic::*;

#[test]
fn send_and_receive_of_many_sizes() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    for (round, len) in [0usize, 1, 3, 8, 1023, 1024, 1025, 4096, 65_537, 500_000].into_iter().enumerate() {
        let data = pattern(len, round as u8);
        a.memory.fill(0, &data);
        qb.post_recv([b.recv(100 + round as u64, 0, 1 << 20)]).expect("posted");
        qa.post_send([Ok(a.wr(round as u64, SendOp::Send, 0, len as u32))]).expect("posted");
        let sent = a.completion();
        assert_eq!((sent.status, sent.opcode, sent.wr_id), (WcStatus::Success, WcOpcode::Send, round as u64));
        let received = b.completion();
        assert_eq!((received.status, received.opcode), (WcStatus::Success, WcOpcode::Recv));
        assert_eq!((received.wr_id, received.byte_len as usize), (100 + round as u64, len));
        assert_eq!(b.memory.bytes(0, len), data);
    }
}

#[test]
fn immediate_and_solicited_arrive_with_the_message() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    let imm = 0x1234_5678u32.to_be();
    qb.post_recv([b.recv(1, 0, 64), b.recv(2, 0, 64)]).expect("posted");
    let mut wr = a.wr(1, SendOp::SendImm(imm), 0, 8);
    wr.flags |= SendFlags::SOLICITED;
    let write = SendOp::WriteImm { va: b.memory.addr() + 100, rkey: b.mr.rkey(), imm };
    a.memory.fill(0, b"payload!");
    qa.post_send([Ok(wr), Ok(a.wr(2, write, 0, 8))]).expect("posted");
    let received = b.completions(2);
    assert!(received[0].flags.contains(WcFlags::WITH_IMM) && received[0].solicited);
    assert_eq!((received[0].imm, received[1].imm), (imm, imm));
    assert_eq!(received[1].opcode, WcOpcode::RecvRdmaWithImm);
    assert_eq!(b.memory.bytes(100, 8), b"payload!");
    assert!(a.completions(2).iter().all(|wc| wc.status == WcStatus::Success));
}

#[test]
fn write_and_read_a_passive_target() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    let data = pattern(300_000, 5);
    a.memory.fill(0, &data);
    let remote = b.memory.addr() + 10;
    let rkey = b.mr.rkey();
    qa.post_send([Ok(a.wr(1, SendOp::Write { va: remote, rkey }, 0, 300_000))]).expect("posted");
    qa.post_send([Ok(a.wr(2, SendOp::Read { va: remote, rkey }, 400_000, 300_000))]).expect("posted");
    let done = a.completions(2);
    assert_eq!(done[0].opcode, WcOpcode::RdmaWrite);
    assert_eq!((done[1].opcode, done[1].byte_len), (WcOpcode::RdmaRead, 300_000));
    assert!(done.iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(b.memory.bytes(10, 300_000), data);
    assert_eq!(a.memory.bytes(400_000, 300_000), data);
}

#[test]
fn atomics_return_the_value_before() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    b.memory.fill(64, &40u64.to_ne_bytes());
    let (va, rkey) = (b.memory.addr() + 64, b.mr.rkey());
    qa.post_send([
        Ok(a.wr(1, SendOp::FetchAdd { va, rkey, add: 2 }, 0, 8)),
        Ok(a.wr(2, SendOp::CompareSwap { va, rkey, compare: 42, swap: 7 }, 8, 8)),
        Ok(a.wr(3, SendOp::CompareSwap { va, rkey, compare: 42, swap: 8 }, 16, 8)),
    ])
    .expect("posted");
    assert!(a.completions(3).iter().all(|wc| wc.status == WcStatus::Success && wc.byte_len == 8));
    assert_eq!((a.memory.u64_at(0), a.memory.u64_at(8), a.memory.u64_at(16)), (40, 42, 7));
    assert_eq!(b.memory.u64_at(64), 7);
}

#[test]
fn inline_data_is_taken_when_posted_and_lists_are_gathered() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    qb.post_recv([b.recv(1, 0, 64)]).expect("posted");
    let sges = SgeList::from_slice(&[b.sge(100, 3), b.sge(200, 0), b.sge(300, 60)]);
    qb.post_recv([Ok(RecvWr { wr_id: 2, sges })]).expect("posted");
    let mut inline = a.wr(1, SendOp::Send, 0, 0);
    inline.payload = Payload::Inline(b"inline data".as_slice().into());
    inline.flags |= SendFlags::INLINE;
    a.memory.fill(0, b"scatter gather");
    let mut list = a.wr(2, SendOp::Send, 0, 0);
    list.payload = Payload::Sges(SgeList::from_slice(&[a.sge(0, 8), a.sge(8, 6)]));
    qa.post_send([Ok(inline), Ok(list)]).expect("posted");
    assert!(b.completions(2).iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(b.memory.bytes(0, 11), b"inline data");
    assert_eq!((b.memory.bytes(100, 3), b.memory.bytes(300, 11)), (b"sca".to_vec(), b"tter gather".to_vec()));
}

#[test]
fn unreliable_connection_carries_sends_and_writes() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = pair_on(&a, &b, QpType::Uc, &Tuning::default());
    let data = pattern(5000, 9);
    a.memory.fill(0, &data);
    qb.post_recv([b.recv(1, 0, 8192), b.recv(2, 0, 0)]).expect("posted");
    let write = SendOp::WriteImm { va: b.memory.addr() + 10_000, rkey: b.mr.rkey(), imm: 5 };
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 5000)), Ok(a.wr(2, write, 0, 5000))]).expect("posted");
    assert_eq!(a.completions(2).len(), 2);
    assert!(b.completions(2).iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(b.memory.bytes(0, 5000), data);
    assert_eq!(b.memory.bytes(10_000, 5000), data);
}

#[test]
fn datagrams_bring_the_route_and_the_sender() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    ready_datagrams(&qa, 0x11);
    ready_datagrams(&qb, 0x22);
    qb.post_recv([b.recv(1, 0, 40 + 100)]).expect("posted");
    let ah = a.pd.create_ah(&b.av()).expect("an address handle");
    a.memory.fill(0, b"datagram");
    let mut wrong_key = a.wr(1, SendOp::Send, 0, 8);
    wrong_key.target = Some(ah.target(qb.qpn(), 0x99));
    let mut wr = a.wr(2, SendOp::SendImm(3), 0, 8);
    wr.target = Some(ah.target(qb.qpn(), 0x22));
    qa.post_send([Ok(wrong_key), Ok(wr)]).expect("posted");
    assert_eq!(a.completions(2).len(), 2);
    let received = b.completion();
    assert_eq!((received.status, received.byte_len), (WcStatus::Success, 48));
    assert_eq!((received.src_qp, received.imm), (qa.qpn(), 3));
    assert!(received.flags.contains(WcFlags::GRH));
    // An IPv4 header in the last 20 bytes of the route: version, and the sender's address.
    assert_eq!(b.memory.bytes(20, 1), [0x45]);
    assert_eq!(b.memory.bytes(32, 4), [127, 0, 0, 1]);
    assert_eq!(b.memory.bytes(40, 8), b"datagram");
    assert_eq!(ah.destroy(), Ok(()));
}

#[test]
fn a_device_talks_to_itself_and_a_queue_pair_too() {
    let a = Node::udp();
    let qp = a.qp(QpType::Rc);
    connect(&qp, &a, qp.qpn(), &Tuning::default());
    qp.post_recv([a.recv(1, 512, 64)]).expect("posted");
    a.memory.fill(0, b"to myself");
    qp.post_send([Ok(a.wr(2, SendOp::Send, 0, 9))]).expect("posted");
    assert!(a.completions(2).iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(a.memory.bytes(512, 9), b"to myself");
}

#[test]
fn shared_receives_serve_several_queue_pairs_and_raise_the_limit_event() {
    let (a, b) = (Node::udp(), Node::udp());
    let srq = b.pd.create_srq(SrqInit { max_wr: 16, max_sge: 1, limit: 0, cookie: 5 }).expect("a queue");
    let mut qps = Vec::new();
    for _ in 0..2 {
        let qb =
            b.pd.create_qp(QpInit { srq: Some(srq.clone()), ..b.init(QpType::Rc) }).expect("a queue pair");
        let qa = a.qp(QpType::Rc);
        connect(&qa, &b, qb.qpn(), &Tuning::default());
        connect(&qb, &a, qa.qpn(), &Tuning::default());
        assert_eq!(
            qb.post_recv([b.recv(0, 0, 8)]),
            Err((0, Error::Invalid("the queue pair's state does not take work requests")))
        );
        qps.push((qa, qb));
    }
    srq.post((0..4).map(|index| b.recv(index, index * 100, 100))).expect("posted");
    srq.modify(None, Some(3)).expect("armed");
    for (qa, _) in qps.iter().cycle().take(4) {
        qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 10))]).expect("posted");
    }
    assert!(a.completions(4).iter().all(|wc| wc.status == WcStatus::Success));
    let received = b.completions(4);
    assert!(received.iter().all(|wc| wc.status == WcStatus::Success && wc.byte_len == 10));
    let event = b.device.get_async_event().expect("an event");
    let established = |event: &AsyncEvent| matches!(event, AsyncEvent::CommunicationEstablished(_));
    assert!(!established(&event), "the queue pairs were in RTS");
    assert!(matches!(&event, AsyncEvent::SrqLimitReached(reached) if reached.cookie() == 5));
    event.ack();
    assert_eq!(srq.query().limit, 0, "the limit is armed once");
    assert!(matches!(srq.destroy(), Err(Error::Busy(_))));
}

/// Anybody who knows the Q_Key can send one.
#[test]
fn a_datagram_that_is_too_long_takes_no_receive_from_other_queue_pairs() {
    let (a, b) = (Node::udp(), Node::udp());
    let srq = b.pd.create_srq(SrqInit { max_wr: 1, max_sge: 1, limit: 0, cookie: 5 }).expect("a queue");
    let qa = a.qp(QpType::Ud);
    let sharing = || QpInit { srq: Some(srq.clone()), ..b.init(QpType::Ud) };
    let [first, second] = [(); 2].map(|()| b.pd.create_qp(sharing()).expect("a queue pair"));
    [&qa, &first, &second].into_iter().for_each(|qp| ready_datagrams(qp, 0x22));
    srq.post([b.recv(1, 0, 40 + 100)]).expect("posted");
    let ah = a.pd.create_ah(&b.av()).expect("an address handle");
    let wr = |qp: &QueuePair, len| SendWr {
        target: Some(ah.target(qp.qpn(), 0x22)),
        ..a.wr(2, SendOp::Send, 0, len)
    };
    qa.post_send([Ok(wr(&first, 101)), Ok(wr(&second, 100))]).expect("posted");
    assert_eq!(a.completions(2).len(), 2);
    let received = b.completion();
    assert_eq!((received.status, received.qpn), (WcStatus::Success, second.qpn()));
}

#[test]
fn windows_open_and_close_a_part_of_a_region() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    let access = 1 | 2 | 4 | 1 << 4;
    let request =
        MrRequest { addr: b.memory.addr(), length: 4096, iova: b.memory.addr(), access, paging: None };
    let region = b.pd.reg_mr(request).expect("a region");
    let mw = b.pd.alloc_mw(MwKind::Type1).expect("a window");
    let bind = MwBind {
        wr_id: 9,
        flags: SendFlags::SIGNALED,
        region_lkey: region.lkey(),
        addr: b.memory.addr() + 100,
        length: 50,
        access: 4,
    };
    let rkey = qb.bind_mw(&mw, &bind).expect("bound");
    assert_eq!(rkey, mw.rkey());
    let bound = b.completion();
    assert_eq!((bound.status, bound.opcode, bound.wr_id), (WcStatus::Success, WcOpcode::BindMw, 9));
    assert!(matches!(region.dereg(), Err(Error::Busy(_))));
    b.memory.fill(100, b"through the window");
    let read = SendOp::Read { va: b.memory.addr() + 100, rkey };
    qa.post_send([Ok(a.wr(1, read, 0, 18))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    assert_eq!(a.memory.bytes(0, 18), b"through the window");
    mw.dealloc().expect("freed");
    region.dereg().expect("no window is bound any more");
    qa.post_send([Ok(a.wr(2, read, 0, 18))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RemoteAccess);
}
