//! Fault plans on a device: withheld receives, and the counts of all injected faults.

mod common;

use std::sync::Arc;

use common::*;
use terrace_faults::{FaultPlan, Faults, Injected};
use terrace_nic::*;

fn faults(plan: &str) -> Arc<Faults> {
    Arc::new(Faults::new(FaultPlan::parse(plan).expect("a plan"), "test"))
}

/// A node whose device follows a plan.
fn node_under(plan: &str) -> (Node, Arc<Faults>) {
    let faults = faults(plan);
    let port = PortConfig { address: Some(LOOPBACK), ..PortConfig::default() }.open().expect("a port");
    let config = DeviceConfig { faults: Some(faults.clone()), ..DeviceConfig::new(port) };
    (Node::with(config, 1 << 20), faults)
}

#[test]
fn withheld_receives_only_cost_retries() {
    let a = Node::udp();
    let (b, faults) = node_under("[[fault]]\nkind = \"rnr\"\nafter_operations = 1\nfor_operations = 5");
    let (qa, qb) = rc_pair(&a, &b);
    let data = pattern(3000, 1);
    a.memory.fill(0, &data);
    for number in 0..4 {
        qb.post_recv([b.recv(number, number * 4096, 4096)]).expect("posted");
    }
    let write = SendOp::WriteImm { va: b.memory.addr() + 65_536, rkey: b.mr.rkey(), imm: 0 };
    for (number, op) in (0u64..).zip([SendOp::Send, SendOp::Send, write, SendOp::Send]) {
        qa.post_send([Ok(a.wr(number, op, 0, 3000))]).expect("posted");
    }
    assert!(a.completions(4).iter().all(|wc| wc.status == WcStatus::Success));
    let received: Vec<u64> = b.completions(4).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(received, [0, 1, 2, 3]);
    for place in [0, 4096, 3 * 4096, 65_536] {
        assert_eq!(b.memory.bytes(place, 3000), data);
    }
    assert_eq!(faults.counts().get(Injected::RnrNak), 5);
    assert_eq!(qb.counters().rnr_naks_sent, 5);
    assert_eq!(qa.counters().rnr_naks_received, 5);
    let reported = b.device.snapshot().injected;
    assert_eq!((reported.get("rnr_naks"), reported.get("packets_lost")), (Some(&5), Some(&0)));
    assert!(a.device.snapshot().injected.is_empty());
}

/// Each request counts once, also of messages that would take the fast path.
#[test]
fn withheld_receives_of_short_messages_count_once() {
    let a = Node::udp();
    let (b, faults) = node_under("[[fault]]\nkind = \"rnr\"\nafter_operations = 2\nfor_operations = 3");
    let (qa, qb) = rc_pair(&a, &b);
    for number in 0..6 {
        qb.post_recv([b.recv(number, number * 8, 8)]).expect("posted");
        qa.post_send([Ok(a.wr(number, SendOp::Send, 0, 8))]).expect("posted");
        assert_eq!((a.completion().status, b.completion().status), (WcStatus::Success, WcStatus::Success));
    }
    assert_eq!((faults.counts().get(Injected::RnrNak), qb.counters().rnr_naks_sent), (3, 3));
}

#[test]
fn limited_retries_end_in_an_error_and_the_receive_stays() {
    let a = Node::udp();
    let (b, _) = node_under("[[fault]]\nkind = \"rnr\"");
    let (qa, qb) = pair_on(&a, &b, QpType::Rc, &Tuning { rnr_retry: 2, ..Tuning::default() });
    qb.post_recv([b.recv(1, 0, 64)]).expect("posted");
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RnrRetryExceeded);
    assert_eq!(b.device.snapshot().queue_pairs[0].receive_queue_len, 1);
    assert_eq!(qb.state(), QpState::Rts);
}

#[test]
fn one_sided_requests_and_other_peers_are_not_affected() {
    let a = Node::udp();
    let (b, faults) = node_under(
        "[[fault]]\nkind = \"rnr\"\npeer = \"192.0.2.1\"\n[[fault]]\nkind = \"rnr\"\nafter_operations = 1",
    );
    let (qa, qb) = rc_pair(&a, &b);
    qb.post_recv([b.recv(1, 0, 64)]).expect("posted");
    let (va, rkey) = (b.memory.addr() + 4096, b.mr.rkey());
    qa.post_send([
        Ok(a.wr(1, SendOp::Write { va, rkey }, 0, 8)),
        Ok(a.wr(2, SendOp::Read { va, rkey }, 64, 8)),
        Ok(a.wr(3, SendOp::FetchAdd { va, rkey, add: 1 }, 128, 8)),
        Ok(a.wr(4, SendOp::Send, 0, 8)),
    ])
    .expect("posted");
    assert!(a.completions(4).iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(faults.counts().get(Injected::RnrNak), 0);
}

#[test]
fn unreliable_connections_get_no_rnr_nak() {
    let a = Node::udp();
    let (b, faults) = node_under("[[fault]]\nkind = \"rnr\"");
    let (qa, qb) = pair_on(&a, &b, QpType::Uc, &Tuning::default());
    qb.post_recv([b.recv(1, 0, 64)]).expect("posted");
    qa.post_send([Ok(a.wr(1, SendOp::Send, 0, 8))]).expect("posted");
    assert_eq!(b.completion().status, WcStatus::Success);
    assert_eq!(faults.counts().get(Injected::RnrNak), 0);
}

#[test]
fn an_outage_shorter_than_the_retries_is_survived_and_a_longer_one_is_an_error() {
    let path = std::env::temp_dir().join(format!("terrace-nic-{}-outage.toml", std::process::id()));
    // Drops 6 packets in a row, a WRITE and its first five retransmissions; and every packet from the 41st on.
    let short = "[[fault]]\nkind = \"blackhole\"\nafter_packets = 4\nfor_packets = 6\n";
    let long = "[[fault]]\nkind = \"blackhole\"\nafter_packets = 40\n";
    std::fs::write(&path, [short, long].concat()).expect("a file");
    let config =
        PortConfig { address: Some(LOOPBACK), fault_plan: Some(path.clone()), ..PortConfig::default() };
    let a = Node::with(config.device().expect("a port"), 1 << 20);
    std::fs::remove_file(&path).expect("it was there");
    let b = Node::udp();
    let (qa, _qb) = pair_on(&a, &b, QpType::Rc, &Tuning { timeout: 8, ..Tuning::default() });
    let target = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    let mut succeeded = 0;
    loop {
        qa.post_send([Ok(a.wr(succeeded, target, 0, 8))]).expect("posted");
        match a.completion().status {
            WcStatus::Success => succeeded += 1,
            status => break assert_eq!(status, WcStatus::RetryExceeded),
        }
        assert!(succeeded < 40, "each takes a packet, and the 40th is the last that passes");
    }
    assert!(succeeded >= 5, "{succeeded}: the first outage was to be survived");
    let reported = a.device.snapshot().injected;
    assert!(reported["packets_blackholed"] >= 6 + 7, "{reported:?}");
}
