//! A process without address space: regions of same-host peers are mapped when there is some again.

mod common;
#[path = "common/same_host.rs"]
mod same_host;
#[path = "common/shared.rs"]
mod shared;

use std::time::Duration;

use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use same_host::joined;
use shared::SharedRegion;
use terrace_nic::*;

/// Longer than what the process maps for anything else meanwhile.
const REGION_BYTES: u64 = 4 << 30;

/// Bytes of address space that this process uses.
fn address_space_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
    statm.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
}

#[test]
fn a_region_that_could_not_be_mapped_is_mapped_later() {
    let (a, b, qa, _qb) = joined();
    let shared = SharedRegion::new(&b, REGION_BYTES as usize);
    // Only in memory that is mapped.
    let add =
        || qa.atomic_now(shared.mr.rkey(), shared.addr, AtomicOp::FetchAdd { add: 1 }).expect("a queue pair");
    let usual = getrlimit(Resource::As);
    let limit = Rlimit { current: Some(address_space_bytes() + REGION_BYTES / 2), ..usual };
    setrlimit(Resource::As, limit).expect("a lower limit");
    let op = SendOp::Read { va: shared.addr, rkey: shared.mr.rkey() };
    qa.post_send([Ok(a.wr(1, op, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    // Time for the answer.
    std::thread::sleep(Duration::from_millis(200));
    assert!(add().is_none());
    setrlimit(Resource::As, usual).expect("the limit of before");
    wait_until("the region is mapped", || add().is_some());
}
