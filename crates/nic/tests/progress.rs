//! Progress: of programs that read memory instead of polling, of many threads and many queue pairs, and under
//! destruction; also the counters for people.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::*;
use terrace_nic::*;

#[test]
fn ping_pong_over_memory_needs_no_polls_by_the_waiting_side() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    let rounds = 500;
    std::thread::scope(|scope| {
        scope.spawn(|| ping_pong(&b, &a, &qb, false, rounds));
        ping_pong(&a, &b, &qa, true, rounds);
    });
}

/// Like `ib_write_lat`: wait for the peer's byte in memory, answer, wait for the completion of the answer.
fn ping_pong(own: &Node, other: &Node, qp: &Arc<QueuePair>, leads: bool, rounds: u32) {
    let (va, rkey) = (other.memory.addr() + 64, other.mr.rkey());
    for round in 1..=rounds {
        let wanted = if leads { round - 1 } else { round } as u8;
        wait_until("the peer's byte is there", || own.memory.0[64].load(Ordering::Acquire) == wanted);
        own.memory.0[0].store(round as u8, Ordering::Release);
        qp.post_send([Ok(own.wr(1, SendOp::Write { va, rkey }, 0, 1))]).expect("posted");
        assert_eq!(own.completion().status, WcStatus::Success);
    }
}

#[test]
fn peers_of_a_program_that_always_finds_completions_are_served() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    let (broken, _peer) = rc_pair(&b, &a);
    let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
    broken.modify(&attr, QpAttrMask::STATE).expect("failed");
    // Requests in the error state complete at once, so the queue is never empty.
    let post = || broken.post_send([Ok(b.wr(1, SendOp::Send, 0, 8))]).expect("posted");
    post();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                post();
                let found = b.cq.poll(1, &mut |wc| assert_eq!(wc.status, WcStatus::Flushed));
                assert_eq!(found, Ok(1));
            }
        });
        let op = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
        let statuses = (0..20).map(|index| {
            qa.post_send([Ok(a.wr(index, op, 0, 100))]).expect("posted");
            a.completion().status
        });
        let statuses: Vec<_> = statuses.collect();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(statuses, [WcStatus::Success; 20]);
    });
    assert_eq!(qa.counters().timeouts, 0, "served without retransmissions");
}

#[test]
fn destroying_under_traffic_disturbs_nobody() {
    let (a, b) = (Node::udp(), Node::udp());
    let stop = AtomicBool::new(false);
    let (steady, _steady_b) = rc_pair(&a, &b);
    let own_cq = a.device.create_cq(CqInit { depth: 64, channel: None, cookie: 0 }).expect("a queue");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..100 {
                let qa =
                    a.pd.create_qp(QpInit { send_cq: own_cq.clone(), ..a.init(QpType::Rc) }).expect("made");
                let qb = b.qp(QpType::Rc);
                connect(&qa, &b, qb.qpn(), &Tuning::default());
                connect(&qb, &a, qa.qpn(), &Tuning::default());
                let op = SendOp::Write { va: b.memory.addr() + 4096, rkey: b.mr.rkey() };
                qa.post_send((0..50).map(|index| Ok(a.wr(index, op, 4096, 100_000)))).expect("posted");
                qb.destroy().expect("destroyed");
                qa.destroy().expect("destroyed");
            }
            stop.store(true, Ordering::SeqCst);
        });
        let mut count = 0;
        while !stop.load(Ordering::SeqCst) {
            let op = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
            steady.post_send([Ok(a.wr(count, op, 0, 2000))]).expect("posted");
            assert_eq!(a.completion().status, WcStatus::Success);
            count += 1;
        }
        assert!(count > 0);
    });
    assert_eq!(own_cq.poll(1, &mut |_| ()), Ok(0), "no completions of destroyed queue pairs");
    assert_eq!(a.device.snapshot().objects["queue_pairs"], 1);
}

#[test]
fn a_thousand_queue_pairs() {
    let (a, b) = (Node::udp(), Node::udp());
    let pairs: Vec<_> = (0..1000).map(|_| rc_pair(&a, &b)).collect();
    let mut numbers: Vec<u32> = pairs.iter().map(|(qa, _)| qa.qpn()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 1000);
    let op = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    for (index, (qa, _)) in pairs.iter().enumerate() {
        qa.post_send([Ok(a.wr(index as u64, op, 0, 100))]).expect("posted");
    }
    assert!(a.completions(1000).iter().all(|wc| wc.status == WcStatus::Success));
    for (qa, qb) in pairs {
        qa.destroy().expect("destroyed");
        qb.destroy().expect("destroyed");
    }
}

#[test]
fn many_threads_use_one_queue_pair_and_one_queue() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, qb) = rc_pair(&a, &b);
    let per_thread = 2000u64;
    let add = SendOp::FetchAdd { va: b.memory.addr(), rkey: b.mr.rkey(), add: 1 };
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (a, qa) = (&a, &qa);
            scope.spawn(move || {
                for index in 0..per_thread {
                    let wr = || Ok(a.wr(index, add, 8 * thread, 8));
                    while let Err((_, error)) = qa.post_send([wr()]) {
                        assert!(matches!(error, Error::NoMemory(_)), "{error}");
                        std::thread::yield_now();
                    }
                    a.cq.poll(4, &mut |wc| assert_eq!(wc.status, WcStatus::Success)).expect("healthy");
                }
            });
        }
    });
    wait_until("everything has arrived", || {
        a.cq.poll(64, &mut |wc| assert_eq!(wc.status, WcStatus::Success)).expect("healthy");
        b.memory.u64_at(0) == 3 * per_thread
    });
    assert_eq!(qb.counters().error_naks_sent, 0);
}

#[test]
fn the_status_socket_shows_the_counters() {
    let a = Node::udp();
    let qp = a.qp(QpType::Ud);
    let snapshots = stat::fetch(std::process::id()).expect("an answer");
    let own = snapshots.iter().find(|snapshot| snapshot.slot == a.device.snapshot().slot).expect("ours");
    assert_eq!(own.queue_pairs[0].qpn, qp.qpn());
    assert_eq!((own.queue_pairs[0].kind.as_str(), own.queue_pairs[0].state.as_str()), ("UD", "RESET"));
    assert!(own.port.contains_key("tx_packets") && own.dropped.contains_key("malformed"));
}

#[test]
fn hostile_datagrams_are_counted_and_nothing_else() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    let instance = b.device.snapshot().slot;
    let target = (LOOPBACK, 4791 + u16::from(instance));
    let socket = std::net::UdpSocket::bind((LOOPBACK, 0)).expect("a socket");
    for len in 0..200usize {
        let garbage: Vec<u8> = (0..len).map(|index| (index * 7 + len) as u8).collect();
        socket.send_to(&garbage, target).expect("sent");
    }
    let op = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send([Ok(a.wr(1, op, 0, 100))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    let port = b.device.snapshot().port;
    assert!(port["bad_icrc"] + port["truncated"] > 150, "{port:?}");
}

#[test]
fn the_status_of_a_process_can_be_had_while_devices_come_and_go() {
    let a = Node::udp();
    let instance = a.device.snapshot().slot;
    std::thread::scope(|scope| {
        let comes_and_goes = scope.spawn(|| (0..60).for_each(|_| Node::udp().device.close()));
        while !comes_and_goes.is_finished() {
            let snapshots = stat::fetch(std::process::id()).expect("an answer");
            assert!(snapshots.iter().any(|snapshot| snapshot.slot == instance));
        }
    });
}

#[test]
fn a_fork_pause_stops_the_engine_until_it_ends() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    let op = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    let pause = b.device.park_for_fork().lock();
    qa.post_send([Ok(a.wr(1, op, 0, 8))]).expect("posted");
    std::thread::sleep(Duration::from_millis(3));
    assert_eq!(a.cq.poll(1, &mut |_| ()), Ok(0), "nobody receives while the engine rests");
    pause.resume_in_parent();
    assert_eq!(a.completion().status, WcStatus::Success);
}
