//! Pairs of nodes that reach each other within the host.
#![allow(dead_code)] // Every test file uses its own part of this.

use std::sync::Arc;

use terrace_nic::*;

use crate::common::{Node, rc_pair, wait_until};

/// Requests that were executed without packets.
pub fn direct(qp: &QueuePair) -> u64 {
    qp.counters().direct
}

/// Posts READs until one of them needs no packets: the peer must be found first.
pub fn find_route(node: &Node, qp: &Arc<QueuePair>, va: u64, rkey: u32) {
    let before = direct(qp);
    wait_until("a READ needs no packets", || {
        qp.post_send([Ok(node.wr(99, SendOp::Read { va, rkey }, 0, 8))]).expect("posted");
        assert_eq!(node.completion().status, WcStatus::Success);
        direct(qp) > before
    });
}

/// Two nodes, connected, of which the first one reaches the memory of the second one.
pub fn joined() -> (Node, Node, Arc<QueuePair>, Arc<QueuePair>) {
    let (a, b) = (Node::local(), Node::local());
    let (qa, qb) = rc_pair(&a, &b);
    find_route(&a, &qa, b.memory.addr(), b.mr.rkey());
    (a, b, qa, qb)
}
