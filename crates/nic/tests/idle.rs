//! An idle device uses no processor. A process of its own, so that nothing else runs in it.

mod common;

use std::time::Duration;

use common::*;
use terrace_nic::*;

/// Processor time that the engines have used, in clock ticks of 10 ms.
fn engine_ticks() -> u64 {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task").expect("a list of threads").flatten() {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        if stat.contains("terrace-engine") {
            let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
            ticks += fields[11].parse::<u64>().unwrap_or(0) + fields[12].parse::<u64>().unwrap_or(0);
        }
    }
    ticks
}

/// How often the engines went to sleep of their own accord.
fn engine_sleeps() -> u64 {
    let mut sleeps = 0;
    for task in std::fs::read_dir("/proc/self/task").expect("a list of threads").flatten() {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        if status.contains("terrace-engine") {
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            sleeps += line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sleeps
}

#[test]
fn connected_and_idle_uses_no_processor() {
    let nodes: Vec<Node> = (0..4).map(|_| Node::udp()).collect();
    let (qa, qb) = rc_pair(&nodes[0], &nodes[1]);
    let op = SendOp::Write { va: nodes[1].memory.addr(), rkey: nodes[1].mr.rkey() };
    for _ in 0..100 {
        qa.post_send([Ok(nodes[0].wr(1, op, 0, 8))]).expect("posted");
        assert_eq!(nodes[0].completion().status, WcStatus::Success);
    }
    qb.post_recv([nodes[1].recv(1, 0, 8)]).expect("posted");
    // The last ACK timer expires once more, without effect.
    std::thread::sleep(Duration::from_millis(300));
    let (ticks, sleeps) = (engine_ticks(), engine_sleeps());
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(engine_ticks() - ticks, 0);
    assert_eq!(engine_sleeps() - sleeps, 0, "nobody wakes up for nothing");
}
