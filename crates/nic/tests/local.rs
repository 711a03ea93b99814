//! Direct access to the memory of same-host peers: programs observe the same results as with packets.

mod common;
#[path = "common/same_host.rs"]
mod same_host;
#[path = "common/shared.rs"]
mod shared;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use common::*;
use same_host::{direct, find_route, joined};
use shared::SharedRegion;
use terrace_nic::*;

/// Two nodes that reach each other by UDP only.
fn apart() -> (Node, Node, Arc<QueuePair>, Arc<QueuePair>) {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    (a, b, qa, qb)
}

#[test]
fn reads_and_writes_need_no_packets_and_nothing_of_the_target() {
    let (a, b, qa, qb) = joined();
    let (va, rkey) = (b.memory.addr() + 10, b.mr.rkey());
    let (before, packets, requests) = (direct(&qa), qa.counters().tx_packets, qb.counters().requests);
    let data = pattern(300_000, 5);
    a.memory.fill(0, &data);
    let mut quiet = a.wr(1, SendOp::Write { va, rkey }, 0, 300_000);
    quiet.flags = SendFlags::empty();
    let mut inline = a.wr(2, SendOp::Write { va: va - 10, rkey }, 0, 0);
    inline.payload = Payload::Inline(b"inlined".as_slice().into());
    let mut list = a.wr(3, SendOp::Read { va, rkey }, 0, 0);
    list.payload =
        Payload::Sges(SgeList::from_slice(&[a.sge(400_000, 3), a.sge(500_000, 0), a.sge(600_000, 200_000)]));
    qa.post_send([Ok(quiet), Ok(inline), Ok(list)]).expect("posted");
    let done = a.completions(2);
    assert_eq!([done[0].wr_id, done[1].wr_id], [2, 3]);
    assert_eq!((done[1].opcode, done[1].byte_len, done[1].qpn), (WcOpcode::RdmaRead, 200_003, qa.qpn()));
    assert!(done.iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(b.memory.bytes(10, 300_000), data);
    assert_eq!(b.memory.bytes(0, 7), b"inlined");
    assert_eq!([a.memory.bytes(400_000, 3), a.memory.bytes(600_000, 200_000)].concat(), data[..200_003]);
    assert_eq!(
        (direct(&qa), qa.counters().tx_packets, qb.counters().requests),
        (before + 3, packets, requests)
    );
}

#[test]
fn work_requests_do_by_direct_access_what_they_do_by_packets() {
    type Case = fn(&Node, &Node, &Arc<QueuePair>) -> SendWr;
    fn read(a: &Node, b: &Node, len: usize) -> SendWr {
        let (va, rkey, sge) = (b.memory.addr() + 10, b.mr.rkey(), a.sge(500_001, len as u32));
        SendWr::with_sge(5, SendOp::Read { va, rkey }, sge, SendFlags::SIGNALED)
    }
    fn write(a: &Node, b: &Node, len: usize) -> SendWr {
        let (va, rkey) = (b.memory.addr() + 10, b.mr.rkey());
        SendWr { op: SendOp::Write { va, rkey }, ..read(a, b, len) }
    }
    fn at(sge: Sge, wr: SendWr) -> SendWr {
        SendWr { payload: Payload::Sges(SgeList::from_slice(&[sge])), ..wr }
    }
    let cases: [(&str, Case, Option<u64>); 13] = [
        ("a READ", |a, b, _| read(a, b, 8), Some(2)),
        ("a WRITE", |a, b, _| write(a, b, 5000), Some(2)),
        (
            "a READ of which nobody hears",
            |a, b, _| SendWr { flags: SendFlags::empty(), ..read(a, b, 100) },
            Some(2),
        ),
        (
            "a WRITE behind a fence",
            |a, b, _| SendWr { flags: SendFlags::FENCE | SendFlags::SIGNALED, ..write(a, b, 100) },
            Some(2),
        ),
        ("a long READ", |a, b, _| read(a, b, 300_000), Some(2)),
        ("a long WRITE", |a, b, _| write(a, b, 300_000), Some(2)),
        ("nothing", |a, b, _| read(a, b, 0), None),
        (
            "a key that names nothing",
            |a, b, _| {
                let (va, rkey) = (b.memory.addr() + 10, b.mr.rkey() ^ 0x5500);
                SendWr { op: SendOp::Read { va, rkey }, ..read(a, b, 8) }
            },
            Some(0),
        ),
        (
            "a range that goes beyond",
            |a, b, _| {
                let (va, rkey) = (b.memory.addr() + (1 << 20) - 4, b.mr.rkey());
                SendWr { op: SendOp::Write { va, rkey }, ..write(a, b, 8) }
            },
            Some(0),
        ),
        (
            "local memory that is not registered",
            |a, b, _| at(Sge { addr: 64, ..a.sge(0, 8) }, write(a, b, 8)),
            Some(0),
        ),
        (
            "local memory that may not be written",
            |a, b, _| {
                let (addr, length) = (a.memory.addr(), 4096);
                let request = MrRequest { addr, length, iova: addr, access: 0, paging: None };
                let mr = a.pd.reg_mr(request).expect("a region");
                at(Sge { addr, length: 8, lkey: mr.lkey() }, read(a, b, 8))
            },
            Some(0),
        ),
        (
            "behind a message",
            |a, b, qa| {
                qa.post_send([Ok(a.wr(4, SendOp::Send, 0, 64))]).expect("posted");
                write(a, b, 64)
            },
            None,
        ),
        (
            "in the error state",
            |a, b, qa| {
                let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
                qa.modify(&error, QpAttrMask::STATE).expect("ERR");
                read(a, b, 8)
            },
            Some(0),
        ),
    ];
    for (what, case, direct_count) in cases {
        // By packets, and by shared memory.
        let [remote, local] = [false, true].map(|is_local| {
            let (a, b, qa, qb) = if is_local { joined() } else { apart() };
            a.memory.fill(0, &pattern(1 << 20, 5));
            b.memory.fill(0, &pattern(1 << 20, 9));
            qb.post_recv([b.recv(1, 900_000, 64)]).expect("posted");
            let before = qa.counters();
            let wr = case(&a, &b, &qa);
            let posted = qa.post_send([Ok(wr)]);
            let last = SendOp::Read { va: b.memory.addr(), rkey: b.mr.rkey() };
            qa.post_send([Ok(a.wr(6, last, 0, 8))]).expect("posted");
            let mut done = Vec::new();
            while done.last().is_none_or(|wc: &Wc| wc.wr_id != 6) {
                done.push(Wc { qpn: 0, ..a.completion() });
            }
            let memory = [&a, &b].map(|node| node.memory.bytes(0, 1 << 20));
            let after = qa.counters();
            let direct = (after.direct - before.direct, after.direct_bytes - before.direct_bytes);
            ((posted, done, qa.state()), memory, direct)
        });
        assert!(remote.0 == local.0, "{what}: {:?} and {:?}", remote.0, local.0);
        assert!(remote.1 == local.1, "{what}: other memory");
        // Without an expected count, the count depends on when the peer answers.
        let count = local.2.0;
        assert!(direct_count.is_none_or(|expected| count == expected), "{what}: {count} without packets");
    }
}

#[test]
fn lists_do_by_direct_access_what_they_do_by_packets() {
    type Case = fn(&Node, &Node) -> Vec<SendWr>;
    fn keys(b: &Node) -> (u64, u32) {
        (b.memory.addr(), b.mr.rkey())
    }
    /// Work requests that swap pieces of both ends' memory.
    fn swaps(a: &Node, b: &Node, count: u64, len: u32) -> Vec<SendWr> {
        let (va, rkey) = keys(b);
        let reads = (0..count)
            .map(|n| a.wr(n, SendOp::Read { va: va + n * 9_000, rkey }, 500_000 + n * u64::from(len), len));
        let writes =
            (0..count).map(|n| a.wr(100 + n, SendOp::Write { va: va + 700 - n * 8, rkey }, n * 40, 7));
        reads.chain(writes).collect()
    }
    let cases: [(&str, Case, u64); 8] = [
        ("two and two", |a, b| swaps(a, b, 2, 100), 4),
        ("more than one call copies", |a, b| swaps(a, b, 50, 4096), 100),
        ("more bytes than one call copies", |a, b| swaps(a, b, 12, 30_000), 24),
        (
            "some without a completion",
            |a, b| {
                let mut wrs = swaps(a, b, 10, 64);
                wrs.iter_mut().step_by(3).for_each(|wr| wr.flags = SendFlags::empty());
                wrs
            },
            20,
        ),
        (
            "another key in the middle",
            |a, b| {
                let (addr, length) = (b.memory.addr(), 1 << 20);
                let request = MrRequest { addr, length, iova: addr, access: REMOTE_ALL, paging: None };
                let other = b.pd.reg_mr(request).expect("a region").rkey();
                let mut wrs = swaps(a, b, 10, 64);
                if let SendOp::Read { rkey, .. } = &mut wrs[4].op {
                    *rkey = other;
                }
                wrs
            },
            // The other region's source is asked for first.
            4,
        ),
        (
            "several elements and inline data in the middle",
            |a, b| {
                let mut wrs = swaps(a, b, 10, 64);
                wrs[3].payload = Payload::Sges(SgeList::from_slice(&[a.sge(800_000, 3), a.sge(900_000, 30)]));
                wrs[15].payload = Payload::Inline(b"inlined".as_slice().into());
                wrs
            },
            20,
        ),
        (
            "a range that goes beyond, in the middle",
            |a, b| {
                let (va, rkey) = keys(b);
                let mut wrs = swaps(a, b, 10, 64);
                wrs[5].op = SendOp::Read { va: va + (1 << 20) - 4, rkey };
                wrs
            },
            5,
        ),
        (
            "local memory that is not registered, in the middle",
            |a, b| {
                let mut wrs = swaps(a, b, 10, 64);
                wrs[16].payload = Payload::Sge(Sge { addr: 64, ..a.sge(0, 8) });
                wrs
            },
            16,
        ),
    ];
    for (what, case, direct_count) in cases {
        let outcome = |(a, b, qa, _qb): (Node, Node, Arc<QueuePair>, Arc<QueuePair>)| {
            a.memory.fill(0, &pattern(1 << 20, 3));
            b.memory.fill(0, &pattern(1 << 20, 4));
            let before = direct(&qa);
            let mut wrs = case(&a, &b);
            let signaled = wrs.iter().filter(|wr| wr.flags.contains(SendFlags::SIGNALED)).count();
            qa.post_send_batch(&mut wrs).expect("posted");
            assert!(wrs.is_empty(), "{what}");
            let done = a.completions(signaled).into_iter().map(|wc| (wc.wr_id, wc.status, wc.byte_len));
            let done: Vec<_> = done.collect();
            let memories = [&a, &b].map(|node| node.memory.bytes(0, 1 << 20));
            (done, memories, qa.state(), direct(&qa) - before)
        };
        let by_access = outcome(joined());
        let by_packets = outcome(apart());
        assert_eq!((&by_access.0, by_access.2), (&by_packets.0, by_packets.2), "{what}");
        assert!(by_access.1 == by_packets.1, "{what}: the memory");
        assert_eq!((by_access.3, by_packets.3), (direct_count, 0), "{what}");
    }
}

#[test]
fn direct_access_completes_to_the_hook_and_needs_the_queue_pairs_rights() {
    struct Taken(Mutex<Vec<u64>>);
    impl CompletionHook for Taken {
        fn completed(&self, wc: Wc) {
            self.0.lock().expect("nobody panics").push(wc.wr_id);
        }
    }
    let (a, b) = (Node::local(), Node::local());
    let qa = a.pd.create_qp(QpInit { sq_sig_all: true, ..a.init(QpType::Rc) }).expect("a queue pair");
    let qb = b.qp(QpType::Rc);
    connect(&qa, &b, qb.qpn(), &Tuning::default());
    connect(&qb, &a, qa.qpn(), &Tuning::default());
    let (va, rkey, sge) = (b.memory.addr(), b.mr.rkey(), a.sge(0, 8));
    let wr = |wr_id, op| SendWr::with_sge(wr_id, op, sge, SendFlags::empty());
    let (read, write) = (SendOp::Read { va, rkey }, SendOp::Write { va, rkey });
    find_route(&a, &qa, va, rkey);
    let before = direct(&qa);
    qa.post_send([Ok(wr(1, read))]).expect("posted");
    assert_eq!(a.completion().wr_id, 1, "all of them are signaled");
    let taken = Arc::new(Taken(Mutex::default()));
    qa.set_completion_hook(Some(taken.clone()));
    qa.post_send([Ok(wr(2, write))]).expect("posted");
    assert_eq!((a.cq.is_empty(), &*taken.0.lock().expect("nobody panics")), (true, &vec![2]));
    assert_eq!(direct(&qa), before + 2);

    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&qa, &b, qb.qpn(), &Tuning { max_rd_atomic: 0, ..Tuning::default() });
    connect(&qb, &a, qa.qpn(), &Tuning::default());
    wait_until("a WRITE needs no packets", || {
        let signaled = SendWr { flags: SendFlags::SIGNALED, ..wr(3, write) };
        qa.post_send([Ok(signaled)]).expect("posted");
        assert_eq!(a.completion().status, WcStatus::Success);
        direct(&qa) > 0
    });
    let before = direct(&qa);
    qa.post_send([Ok(wr(4, read))]).expect("posted");
    assert_eq!((a.completion().status, direct(&qa)), (WcStatus::LocalQpOperation, before));
}

#[test]
fn atomics_on_memory_that_can_be_mapped_need_no_packets() {
    let (a, b) = (Node::local(), Node::local());
    let (qa, qb) = rc_pair(&a, &b);
    let shared = SharedRegion::new(&b, 1 << 16);
    let (va, rkey) = (shared.addr + 8, shared.mr.rkey());
    let wr = |op, sge| SendWr::with_sge(3, op, sge, SendFlags::SIGNALED);
    let add = |add| SendOp::FetchAdd { va, rkey, add };
    let swap = |compare, swap| SendOp::CompareSwap { va, rkey, compare, swap };
    let done = |wr| {
        qa.post_send([Ok(wr)]).expect("posted");
        a.completion()
    };
    // No READ comes first: atomics alone find the peer.
    wait_until("an atomic needs no packets", || {
        assert_eq!(done(wr(add(0), a.sge(0, 8))).status, WcStatus::Success);
        direct(&qa) > 0
    });
    let listed_before = direct(&qa);
    assert_eq!(done(a.wr(3, add(0), 0, 8)).status, WcStatus::Success);
    assert_eq!(direct(&qa), listed_before + 1, "a list of one element is one element");
    let before = (direct(&qa), qa.counters().tx_packets, qb.counters().requests);
    let operations = [
        (add(5), 0, WcOpcode::FetchAdd),
        (swap(4, 1), 5, WcOpcode::CompSwap),
        (swap(5, u64::MAX - 1), 5, WcOpcode::CompSwap),
        (add(3), u64::MAX - 1, WcOpcode::FetchAdd),
        (add(0), 1, WcOpcode::FetchAdd),
    ];
    for (op, found, opcode) in operations {
        // The result need not be aligned, and is no longer than 8 bytes.
        a.memory.fill(0, &[7; 32]);
        let wc = done(wr(op, a.sge(3, 16)));
        assert_eq!((wc.status, wc.opcode, wc.byte_len, wc.wr_id), (WcStatus::Success, opcode, 8, 3));
        let memory = [vec![7; 3], u64::to_ne_bytes(found).to_vec(), vec![7; 21]].concat();
        assert_eq!(a.memory.bytes(0, 32), memory, "{op:?}");
    }
    let quiet = SendWr { flags: SendFlags::empty(), ..wr(add(1), a.sge(0, 8)) };
    qa.post_send([Ok(quiet)]).expect("posted");
    let after = (direct(&qa), qa.counters().tx_packets, qb.counters().requests);
    assert_eq!(after, (before.0 + operations.len() as u64 + 1, before.1, before.2));

    let short_result = wr(add(1), a.sge(0, 7));
    assert!(
        matches!(qa.post_send([Ok(short_result)]), Err((0, Error::Invalid(_)))),
        "no room for the result"
    );
    let (addr, length) = (a.memory.addr() + 64, 8);
    let narrow = [LOCAL_WRITE, 0].map(|access| {
        let request = MrRequest { addr, length, iova: addr, access, paging: None };
        a.pd.reg_mr(request).expect("a region")
    });
    let before = direct(&qa);
    let into = |mr: &Mr| Sge { addr, length: 16, lkey: mr.lkey() };
    let wc = done(wr(add(0), into(&narrow[0])));
    assert_eq!((wc.status, a.memory.u64_at(64), direct(&qa)), (WcStatus::Success, 2, before + 1));
    let nowhere = wr(add(1), into(&narrow[1]));
    assert_eq!(done(nowhere).status, WcStatus::LocalProtection);
    let (qa, _qb) = rc_pair(&a, &b);
    let misaligned = wr(SendOp::FetchAdd { va: va + 1, rkey, add: 1 }, a.sge(0, 8));
    qa.post_send([Ok(misaligned)]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RemoteInvalidRequest);
    let (qa, _qb) = rc_pair(&a, &b);
    qa.post_send([Ok(wr(SendOp::Read { va, rkey }, a.sge(0, 8)))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    assert_eq!(a.memory.u64_at(0), 3, "that without a place for its result was done, as over a network");
}

#[test]
fn requests_by_packets_and_by_direct_access_take_effect_in_order() {
    let (a, b, qa, qb) = joined();
    let (va, rkey) = (b.memory.addr(), b.mr.rkey());
    for round in 0..500u64 {
        qb.post_recv([b.recv(round, 4096, 64)]).expect("posted");
        a.memory.fill(0, &round.to_ne_bytes());
        // The message must not overtake the WRITE, and the READ must see the atomic before it.
        qa.post_send([
            Ok(a.wr(1, SendOp::Write { va, rkey }, 0, 8)),
            Ok(a.wr(2, SendOp::Send, 0, 8)),
            Ok(a.wr(3, SendOp::FetchAdd { va, rkey, add: 1000 }, 16, 8)),
            Ok(a.wr(4, SendOp::Read { va, rkey }, 24, 8)),
        ])
        .expect("posted");
        assert_eq!(b.completion().wr_id, round);
        assert!(b.memory.u64_at(0) % 1000 == round % 1000 && b.memory.u64_at(0) >= round);
        let done = a.completions(4);
        assert!(done.iter().all(|wc| wc.status == WcStatus::Success), "{done:?}");
        assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!((a.memory.u64_at(16), a.memory.u64_at(24)), (round, round + 1000));
    }
}

#[test]
fn errors_are_those_of_packets() {
    type Mistake = fn(&Node, &Node) -> SendWr;
    let mistakes: [(&str, Mistake, WcStatus); 5] = [
        (
            "a key that names nothing",
            |a, b| a.wr(1, SendOp::Read { va: b.memory.addr(), rkey: b.mr.rkey() ^ 0x5500 }, 0, 8),
            WcStatus::RemoteAccess,
        ),
        (
            "a range that goes beyond",
            |a, b| a.wr(1, SendOp::Write { va: b.memory.addr() + (1 << 20) - 4, rkey: b.mr.rkey() }, 0, 8),
            WcStatus::RemoteAccess,
        ),
        (
            "a region of another protection domain",
            |a, b| {
                let pd = b.device.alloc_pd().expect("a protection domain");
                let (addr, length) = (b.memory.addr(), 4096);
                let request = MrRequest { addr, length, iova: addr, access: REMOTE_ALL, paging: None };
                let rkey = pd.reg_mr(request).expect("a region").rkey();
                a.wr(1, SendOp::Read { va: addr, rkey }, 0, 8)
            },
            WcStatus::RemoteAccess,
        ),
        (
            "a region that is read only",
            |a, b| {
                let (addr, length) = (b.memory.addr(), 4096);
                let request = MrRequest { addr, length, iova: addr, access: 1 << 2, paging: None };
                let rkey = b.pd.reg_mr(request).expect("a region").rkey();
                a.wr(1, SendOp::Write { va: addr, rkey }, 0, 8)
            },
            WcStatus::RemoteAccess,
        ),
        (
            "local memory that is not registered",
            |a, b| {
                let mut wr = a.wr(1, SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() }, 0, 8);
                let sge = Sge { addr: 64, length: 8, lkey: a.mr.lkey() };
                wr.payload = Payload::Sges(SgeList::from_slice(&[sge]));
                wr
            },
            WcStatus::LocalProtection,
        ),
    ];
    for (what, mistake, status) in mistakes {
        let (a, b, qa, _qb) = joined();
        let before = b.memory.bytes(0, 1 << 20);
        qa.post_send([Ok(mistake(&a, &b))]).expect("posted");
        assert_eq!(a.completion().status, status, "{what}");
        assert_eq!(qa.state(), QpState::Err, "{what}");
        assert_eq!(b.memory.bytes(0, 1 << 20), before, "{what}");
        let (va, rkey) = (b.memory.addr(), b.mr.rkey());
        qa.post_send([Ok(a.wr(2, SendOp::Read { va, rkey }, 0, 8))]).expect("posted");
        assert_eq!(a.completion().status, WcStatus::Flushed, "{what}: what follows");
    }
}

#[test]
fn nothing_is_written_any_more_once_the_region_or_the_queue_pair_has_ended() {
    for round in 0..60 {
        let (a, b, qa, qb) = joined();
        let (va, rkey) = (b.memory.addr(), b.mr.rkey());
        a.memory.fill(0, &[0xaa; 4096]);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) && qa.state() == QpState::Rts {
                    let mut wr = a.wr(1, SendOp::Write { va, rkey }, 0, 4096);
                    wr.flags = SendFlags::empty();
                    // The send queue fills up while packets are outstanding.
                    let _ = qa.post_send([Ok(wr)]);
                }
            });
            std::thread::sleep(std::time::Duration::from_micros(500));
            match round % 3 {
                0 => b.mr.dereg().expect("deregistered"),
                1 => qb.destroy().expect("destroyed"),
                _ => {
                    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
                    qb.modify(&error, QpAttrMask::STATE).expect("in error");
                }
            }
            qb.await_readers().expect("nobody is stopped");
            b.memory.fill(0, &[0x11; 4096]);
            std::thread::sleep(std::time::Duration::from_micros(200));
            assert_eq!(b.memory.bytes(0, 4096), [0x11; 4096], "round {round}");
            stop.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn a_withdrawn_queue_pair_stays_so_when_another_peer_connects() {
    let (a, b, qa, qb) = joined();
    assert!(qb.withdraw());
    let c = Node::local();
    let (qc, _qb) = rc_pair(&c, &b);
    let (va, rkey) = (b.memory.addr(), b.mr.rkey());
    find_route(&c, &qc, va, rkey);
    let before = direct(&qa);
    qa.post_send([Ok(a.wr(1, SendOp::Read { va, rkey }, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    assert_eq!(direct(&qa), before, "only packets reach it");
}

#[test]
fn a_peer_that_has_gone_exhausts_the_retries_as_with_packets() {
    let (a, b) = (Node::local(), Node::local());
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    let hasty = Tuning { timeout: 14, retry_cnt: 1, ..Tuning::default() };
    connect(&qa, &b, qb.qpn(), &hasty);
    connect(&qb, &a, qa.qpn(), &hasty);
    let (va, rkey) = (b.memory.addr(), b.mr.rkey());
    find_route(&a, &qa, va, rkey);
    b.device.close();
    qa.post_send([Ok(a.wr(1, SendOp::Read { va, rkey }, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RetryExceeded);
}

#[test]
fn a_process_is_found_that_has_the_address_of_one_whose_end_was_not_noticed_yet() {
    let (a, b, qa, qb) = joined();
    let c = Node::local();
    let (qc, _c_to_a) = rc_pair(&a, &c);
    find_route(&a, &qc, c.memory.addr(), c.mr.rkey());
    // The thread that notices ends is held in the callback for the end of another process.
    let (reported, is_reported) = std::sync::mpsc::channel();
    let (go_on, may_go_on) = std::sync::mpsc::channel::<()>();
    let may_go_on = std::sync::Mutex::new(may_go_on);
    a.device.on_peer_gone(Arc::new(move |_| {
        let _ = reported.send(());
        let _ = may_go_on.lock().expect("whole").recv();
    }));
    c.device.close();
    is_reported.recv_timeout(PATIENCE).expect("the end of that process");
    let slot = Some(b.device.snapshot().slot);
    qa.destroy().expect("it exists");
    qb.destroy().expect("it exists");
    drop((b, qb));
    let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Local, slot, ..PortConfig::default() };
    let next = Node::with(port.device().expect("the same port"), 1 << 20);
    let (qa, _qb) = rc_pair(&a, &next);
    drop(go_on);
    find_route(&a, &qa, next.memory.addr(), next.mr.rkey());
}

#[test]
fn calls_do_what_work_requests_would_do_or_return_that_they_did_not() {
    let (a, b, qa, qb) = joined();
    let (va, rkey) = (b.memory.addr(), b.mr.rkey());
    let before = (direct(&qa), qa.counters().tx_packets, qb.counters().requests);
    // Longer than one copy, and outside the registered local memory.
    let data = pattern(600_001, 3);
    assert!(qa.write_now(rkey, va + 3, &data).expect("a queue pair"));
    let mut back = vec![0; data.len()];
    assert!(qa.read_now(rkey, va + 3, &mut back).expect("a queue pair"));
    assert!(back == data && b.memory.bytes(3, data.len()) == data);
    let after = (direct(&qa), qa.counters().tx_packets, qb.counters().requests);
    assert_eq!(after, (before.0 + 2, before.1, before.2));

    // Atomics need memory that can be mapped, and the first ones find out how.
    let shared = SharedRegion::new(&b, 1 << 20);
    let atomic = |op| qa.atomic_now(shared.mr.rkey(), shared.addr, op).expect("a queue pair");
    wait_until("an atomic needs no packets", || atomic(AtomicOp::FetchAdd { add: 0 }).is_some());
    assert_eq!(atomic(AtomicOp::FetchAdd { add: 5 }), Some(0));
    assert_eq!(atomic(AtomicOp::CompareSwap { compare: 5, swap: 99 }), Some(5));
    assert_eq!(atomic(AtomicOp::CompareSwap { compare: 5, swap: 1 }), Some(99));
    let mut value = [0; 8];
    assert!(qa.read_now(shared.mr.rkey(), shared.addr, &mut value).expect("a queue pair"));
    assert_eq!(u64::from_ne_bytes(value), 99);

    // Calls leave errors to work requests, which complete with them.
    let (good, first, end) = (shared.mr.rkey(), shared.addr, shared.addr + (1 << 20));
    for (rkey, va) in [(good ^ 1, first), (good, end - 7), (good, first - 1), (good, end), (good, u64::MAX)] {
        assert!(!qa.read_now(rkey, va, &mut [0; 8]).expect("a queue pair"));
        assert!(!qa.write_now(rkey, va, &[1; 8]).expect("a queue pair"));
        assert_eq!(qa.atomic_now(rkey, va, AtomicOp::FetchAdd { add: 1 }), Ok(None));
    }
    assert_eq!(qa.atomic_now(good, first + 1, AtomicOp::FetchAdd { add: 1 }), Ok(None));
    assert_eq!(qa.atomic_now(good, first, AtomicOp::Write { value: 1 }), Ok(None));
    assert_eq!(qa.read_now(good, first, &mut []), Ok(false));
    assert_eq!(atomic(AtomicOp::FetchAdd { add: 0 }), Some(99), "nothing of that was done");
    assert_eq!((qa.state(), qb.state()), (QpState::Rts, QpState::Rts));

    // A call does not overtake a message that waits for a receive.
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
    assert!(!qa.write_now(rkey, va, &[1; 8]).expect("a queue pair"));
    qb.post_recv([b.recv(2, 4096, 64)]).expect("posted");
    assert_eq!(b.completion().wr_id, 2);
    assert_eq!(a.completion().wr_id, 1);
    assert!(qa.write_now(rkey, va, &[2; 8]).expect("a queue pair"));

    b.mr.dereg().expect("deregistered");
    assert!(!qa.read_now(rkey, va, &mut [0; 8]).expect("a queue pair"));
    qa.destroy().expect("destroyed");
    assert!(qa.read_now(rkey, va, &mut [0; 8]).is_err());
}

#[test]
fn a_device_without_the_local_path_uses_packets() {
    let (a, b) = (Node::udp(), Node::local());
    let (qa, qb) = rc_pair(&a, &b);
    for round in 0..50 {
        let wr = a.wr(round, SendOp::Read { va: b.memory.addr(), rkey: b.mr.rkey() }, 0, 8);
        qa.post_send([Ok(wr)]).expect("posted");
        assert_eq!(a.completion().status, WcStatus::Success);
        let wr = b.wr(round, SendOp::Read { va: a.memory.addr(), rkey: a.mr.rkey() }, 0, 8);
        qb.post_send([Ok(wr)]).expect("posted");
        assert_eq!(b.completion().status, WcStatus::Success);
    }
    assert_eq!((direct(&qa), direct(&qb)), (0, 0));
}
