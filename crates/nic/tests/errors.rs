//! Errors: statuses of completions, errno of verbs, and that nothing else is affected.

mod common;

use common::*;
use terrace_nic::*;

const SIGNALED_WRITE: u32 = 16;

#[test]
fn a_bad_key_breaks_its_queue_pair_and_no_other() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    let (other_a, _other_b) = rc_pair(&a, &b);
    qb.post_recv([b.recv(50, 0, 8)]).expect("posted");
    let va = b.memory.addr();
    let bad = SendOp::Write { va, rkey: b.mr.rkey() ^ 0x4000_0000 };
    qa.post_send([Ok(a.wr(1, bad, 0, SIGNALED_WRITE)), Ok(a.wr(2, SendOp::Send, 0, 8))]).expect("posted");
    let done = a.completions(2);
    assert_eq!((done[0].wr_id, done[0].status), (1, WcStatus::RemoteAccess));
    assert_eq!((done[1].wr_id, done[1].status), (2, WcStatus::Flushed));
    assert_eq!(qa.state(), QpState::Err);
    let flushed = b.completion();
    assert_eq!((flushed.wr_id, flushed.status), (50, WcStatus::Flushed));
    let event = b.device.get_async_event().expect("an event");
    assert!(matches!(&event, AsyncEvent::QpAccessError(qp) if qp.qpn() == qb.qpn()));
    event.ack();
    let good = SendOp::Write { va, rkey: b.mr.rkey() };
    other_a.post_send([Ok(a.wr(3, good, 0, SIGNALED_WRITE))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
}

#[test]
fn ranges_and_permissions_are_checked_by_the_peer() {
    let (a, b) = (Node::udp(), Node::udp());
    let request = MrRequest { addr: b.memory.addr(), length: 100, iova: 5000, access: 4, paging: None };
    let readable = b.pd.reg_mr(request).expect("a region");
    let rkey = readable.rkey();
    let cases = [
        (SendOp::Read { va: 5000, rkey }, 100, WcStatus::Success),
        (SendOp::Read { va: 5001, rkey }, 100, WcStatus::RemoteAccess),
        (SendOp::Read { va: 4999, rkey }, 1, WcStatus::RemoteAccess),
        (SendOp::Read { va: u64::MAX, rkey }, 8, WcStatus::RemoteAccess),
        (SendOp::Write { va: 5000, rkey }, 1, WcStatus::RemoteAccess),
        (SendOp::FetchAdd { va: 5000, rkey, add: 1 }, 8, WcStatus::RemoteAccess),
        (
            SendOp::FetchAdd { va: b.memory.addr() + 1, rkey: b.mr.rkey(), add: 1 },
            8,
            WcStatus::RemoteInvalidRequest,
        ),
    ];
    for (op, length, status) in cases {
        let (qa, qb) = rc_pair(&a, &b);
        qa.post_send([Ok(a.wr(1, op, 0, length))]).expect("posted");
        assert_eq!(a.completion().status, status, "{op:?}");
        qa.destroy().expect("destroyed");
        drop(qb);
    }
}

#[test]
fn local_protection_errors_complete_locally() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    qb.post_recv([b.recv(1, 0, 64)]).expect("posted");
    let mut wr = a.wr(1, SendOp::Send, 0, 8);
    wr.payload = Payload::Sges(SgeList::from_slice(&[Sge { addr: 16, length: 8, lkey: a.mr.lkey() }]));
    qa.post_send([Ok(wr)]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::LocalProtection);
    assert_eq!(qa.state(), QpState::Err);
}

#[test]
fn a_receive_that_is_too_short_fails_at_both_ends() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    qb.post_recv([b.recv(1, 0, 4)]).expect("posted");
    qa.post_send([Ok(a.wr(2, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(b.completion().status, WcStatus::LocalLength);
    assert_eq!(a.completion().status, WcStatus::RemoteInvalidRequest);
}

#[test]
fn a_receiver_that_is_not_ready_gets_retries_until_they_are_exhausted() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
    wait_until("the receiver is not ready", || qb.counters().rnr_naks_sent > 0);
    qb.post_recv([b.recv(2, 0, 8)]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    assert_eq!(b.completion().status, WcStatus::Success);

    let tuning = Tuning { rnr_retry: 2, ..Tuning::default() };
    let (qa, _qb) = pair_on(&a, &b, QpType::Rc, &tuning);
    qa.post_send([Ok(a.wr(3, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RnrRetryExceeded);
}

#[test]
fn a_peer_that_vanishes_exhausts_the_retries() {
    let (a, b) = (Node::udp(), Node::udp());
    let tuning = Tuning { timeout: 1, retry_cnt: 2, ..Tuning::default() };
    let (qa, qb) = pair_on(&a, &b, QpType::Rc, &tuning);
    qb.destroy().expect("destroyed");
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8)), Ok(a.wr(2, SendOp::Send, 0, 8))]).expect("posted");
    let done = a.completions(2);
    assert_eq!((done[0].status, done[1].status), (WcStatus::RetryExceeded, WcStatus::Flushed));
    assert!(b.device.snapshot().dropped["unknown_qp"] >= 3);
}

#[test]
fn an_overrun_queue_raises_an_event_and_stops_its_queue_pairs() {
    let (a, b) = (Node::udp(), Node::udp());
    let small = a.device.create_cq(CqInit { depth: 2, channel: None, cookie: 3 }).expect("a queue");
    let qa = a.pd.create_qp(QpInit { send_cq: small.clone(), ..a.init(QpType::Rc) }).expect("a queue pair");
    let qb = b.qp(QpType::Rc);
    connect(&qa, &b, qb.qpn(), &Tuning::default());
    connect(&qb, &a, qa.qpn(), &Tuning::default());
    let op = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send((0..4).map(|index| Ok(a.wr(index, op, 0, 8)))).expect("posted");
    let event = a.device.get_async_event().expect("an event");
    assert!(matches!(&event, AsyncEvent::CqError(cq) if cq.cookie() == 3));
    event.ack();
    wait_until("the queue pair fails", || qa.state() == QpState::Err);
    assert_eq!(small.poll(8, &mut |wc| assert_eq!(wc.status, WcStatus::Success)), Ok(2));
    assert_eq!(small.poll(8, &mut |_| ()), Err(Error::Overrun));
}

#[test]
fn verbs_return_the_errors_of_the_man_pages() {
    const EINVAL: i32 = 22;
    const EBUSY: i32 = 16;
    const ENOMEM: i32 = 12;
    const EOPNOTSUPP: i32 = 95;
    let errno = |result: Result<(), Error>| result.expect_err("refused").errno();
    let a = Node::udp();
    let device = &a.device;
    let cq = |depth| device.create_cq(CqInit { depth, channel: None, cookie: 0 }).map(drop);
    assert_eq!(errno(cq(0)), EINVAL);
    assert_eq!(errno(cq(u32::MAX)), EINVAL);
    let mr = |addr, length, access| {
        a.pd.reg_mr(MrRequest { addr, length, iova: addr, access, paging: None }).map(drop)
    };
    assert_eq!(errno(mr(a.memory.addr(), u64::MAX, 1)), EINVAL);
    assert_eq!(errno(mr(a.memory.addr(), 10, 2)), EINVAL, "remote write needs local write");
    assert_eq!(errno(a.pd.dealloc()), EBUSY);
    let srq = |max_wr| a.pd.create_srq(SrqInit { max_wr, max_sge: 1, limit: 0, cookie: 0 }).map(drop);
    assert_eq!(errno(srq(0)), EINVAL);
    let mut init = a.init(QpType::Rc);
    init.cap.max_send_wr = u32::MAX;
    assert_eq!(errno(a.pd.create_qp(init).map(drop)), EINVAL);
    assert_eq!(errno(a.pd.advise_mr(9, 0, &[a.sge(0, 1)])), EOPNOTSUPP);

    let qp = a.qp(QpType::Rc);
    let post = |result: Result<(), (usize, Error)>| result.expect_err("refused");
    let (index, error) = post(qp.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]));
    assert_eq!((index, error.errno()), (0, EINVAL), "RESET takes no sends");
    connect(&qp, &a, qp.qpn(), &Tuning::default());
    let full = qp.post_recv((0..300).map(|index| a.recv(index, 0, 8)));
    assert_eq!(full.expect_err("full"), (256, Error::NoMemory("the work queue is full")));
    assert_eq!(post(full).1.errno(), ENOMEM);
    let rts = QpAttr { state: QpState::Rts, ..QpAttr::default() };
    let other = a.qp(QpType::Rc);
    assert_eq!(errno(other.modify(&rts, QpAttrMask::STATE)), EINVAL);
    assert_eq!(errno(a.cq.destroy()), EBUSY);

    let av = AddressVector { is_global: false, ..a.av() };
    assert_eq!(errno(a.pd.create_ah(&av).map(drop)), EINVAL);
    let av = AddressVector { sgid_index: 200, ..a.av() };
    assert_eq!(errno(a.pd.create_ah(&av).map(drop)), EINVAL);
    let av = AddressVector { dgid: [0; 16], ..a.av() };
    assert_eq!(errno(a.pd.create_ah(&av).map(drop)), EINVAL);

    for qp in [qp, other] {
        assert_eq!(qp.destroy(), Ok(()));
        assert_eq!(errno(qp.destroy()), EINVAL);
    }
    assert_eq!(a.cq.destroy(), Ok(()));
    let late = a.pd.create_qp(a.init(QpType::Rc)).map(drop);
    assert_eq!(errno(late), EINVAL, "its completion queue is destroyed");
    assert_eq!(a.mr.dereg(), Ok(()));
    assert_eq!(a.pd.dealloc(), Ok(()));
}

#[test]
fn reset_forgets_what_the_queue_pair_has_completed() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    let (other, _other_b) = rc_pair(&a, &b);
    let op = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send([Ok(a.wr(1, op, 0, 8))]).expect("posted");
    other.post_send([Ok(a.wr(2, op, 0, 8))]).expect("posted");
    wait_until("both are done", || {
        a.device.progress();
        a.device.snapshot().queue_pairs.iter().all(|qp| qp.send_queue_len == 0)
    });
    let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    qa.modify(&reset, QpAttrMask::STATE).expect("RESET");
    assert_eq!(a.completion().wr_id, 2);
    assert_eq!(a.cq.poll(1, &mut |_| ()), Ok(0));
}

#[test]
fn a_released_region_does_not_keep_its_protection_domain() {
    let a = Node::udp();
    let pd = a.device.alloc_pd().expect("a protection domain");
    let request =
        MrRequest { addr: a.memory.addr(), length: 64, iova: a.memory.addr(), access: 1, paging: None };
    let mr = pd.reg_mr(request).expect("a region");
    assert!(matches!(pd.dealloc(), Err(Error::Busy(_))));
    mr.release_pd();
    assert_eq!(pd.dealloc(), Ok(()));
    assert_eq!(mr.dereg(), Ok(()), "it is counted once");
}
