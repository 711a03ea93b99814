//! A region of 4 KiB pages in frames, far larger than its memory, read and written through the NIC.

mod common;
#[path = "common/paged.rs"]
mod paged;

use std::sync::Arc;

use common::*;
use paged::Paged;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use terrace_memory::Translation;
use terrace_nic::*;

/// What peers may do: everything, FLUSH too.
const ACCESS: u32 = REMOTE_ALL | 1 << 8 | 1 << 9;
const PAGE: u64 = 4096;
const REGION_PAGES: u64 = 400;
const FRAMES: u64 = 100;

/// A queue pair of `a` that is connected to one of `b`.
fn pair(a: &Node, b: &Node) -> Arc<QueuePair> {
    let (qp, other) = rc_pair(a, b);
    let attr = QpAttr { access: ACCESS, ..QpAttr::default() };
    other.modify(&attr, QpAttrMask::ACCESS_FLAGS).expect("more is permitted");
    qp
}

fn carry_out(node: &Node, qp: &Arc<QueuePair>, op: SendOp, len: u32) {
    qp.post_send([Ok(node.wr(1, op, 0, len))]).expect("posted");
    assert_eq!(node.completion().status, WcStatus::Success);
}

/// Random accesses, compared with a plain array. Two in three to a few pages, so that some are hits.
fn compare(a: &Node, qp: &Arc<QueuePair>, served: &Paged, steps: usize) {
    let (base, rkey) = (served.region.range().addr, served.mr.rkey());
    let mut reference = vec![0; (REGION_PAGES * PAGE) as usize];
    let mut random = StdRng::seed_from_u64(7);
    for _ in 0..steps {
        let area = if random.random_range(0..3) > 0 { 20 * PAGE } else { REGION_PAGES * PAGE };
        let len = [8, 300, PAGE, 3 * PAGE, 10_000][random.random_range(0..5)];
        let offset = random.random_range(0..area - len) & !7;
        let (va, start) = (base + offset, offset as usize);
        let here = &mut reference[start..start + len as usize];
        match random.random_range(0..30) {
            0..=14 => {
                carry_out(a, qp, SendOp::Read { va, rkey }, len as u32);
                assert!(a.memory.bytes(0, len as usize) == here, "{len} bytes at {offset}");
            }
            15..=25 => {
                random.fill_bytes(here);
                a.memory.fill(0, here);
                carry_out(a, qp, SendOp::Write { va, rkey }, len as u32);
            }
            26..=28 => {
                let before = u64::from_ne_bytes(here[..8].try_into().expect("8 bytes"));
                here[..8].copy_from_slice(&before.wrapping_add(3).to_ne_bytes());
                carry_out(a, qp, SendOp::FetchAdd { va, rkey, add: 3 }, 8);
                assert_eq!(a.memory.u64_at(0), before);
            }
            _ => {
                let (placement, selectivity, length) = (2, 0, len as u32);
                let flush = SendOp::Flush { va, rkey, length, placement, selectivity };
                let request = SendWr { payload: Payload::Sges(SgeList::default()), ..a.wr(1, flush, 0, 0) };
                qp.post_send([Ok(request)]).expect("posted");
                assert_eq!(a.completion().status, WcStatus::Success);
            }
        }
    }
    let stats = served.region.stats();
    assert!(stats.evictions > 100 && stats.hits > 100, "{stats:?}");
}

#[test]
fn what_packets_read_is_what_they_wrote() {
    let (a, b) = (Node::udp(), Node::udp());
    let qp = pair(&a, &b);
    let served = Paged::new(&b, REGION_PAGES * PAGE, FRAMES * PAGE, ACCESS);
    compare(&a, &qp, &served, 1500);
}

#[test]
fn same_host_peers_reach_the_frames_without_packets() {
    let (a, b) = (Node::local(), Node::local());
    let qp = pair(&a, &b);
    let served = Paged::new(&b, REGION_PAGES * PAGE, FRAMES * PAGE, ACCESS);
    let (va, rkey) = (served.region.range().addr, served.mr.rkey());
    let direct = || qp.counters().direct;
    let before = direct();
    wait_until("a READ needs no packets", || {
        carry_out(&a, &qp, SendOp::Read { va, rkey }, 8);
        direct() > before
    });
    // The first write to a clean page needs the owner.
    let before = direct();
    carry_out(&a, &qp, SendOp::Write { va, rkey }, 8);
    assert_eq!(direct(), before);
    carry_out(&a, &qp, SendOp::Write { va, rkey }, 8);
    carry_out(&a, &qp, SendOp::FetchAdd { va, rkey, add: 1 }, 8);
    assert_eq!(direct(), before + 2);
    carry_out(&a, &qp, SendOp::Write { va, rkey }, 0);
    a.memory.fill(0, &[0; 8]);
    carry_out(&a, &qp, SendOp::Write { va, rkey }, 8);
    let before = direct();
    compare(&a, &qp, &served, 1500);
    let share = (direct() - before) as f64 / 1500.0;
    assert!(share > 0.2, "{share}");
}
