//! A process without descriptors: same-host peers stay connected, and what needed one is done when there is one again.

mod common;
#[path = "common/paged.rs"]
mod paged;
#[path = "common/same_host.rs"]
mod same_host;

use std::fs::File;
use std::time::Duration;

use common::*;
use paged::Paged;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use same_host::joined;
use terrace_nic::*;

/// Opens files until the process may open no more of them.
fn take_all_descriptors() -> Vec<File> {
    let limit = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("a lower limit");
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

#[test]
fn a_region_whose_files_could_not_be_received_is_reached_later() {
    let (a, b, qa, _qb) = joined();
    let served = Paged::new(&b, 1 << 20, 1 << 20, REMOTE_ALL);
    let mr = &served.mr;
    let read = |mr: &Mr| qa.read_now(mr.rkey(), mr.addr(), &mut [0; 8]).expect("a queue pair");
    let taken = take_all_descriptors();
    assert!(!taken.is_empty());
    // By packets: then the page is in memory.
    let op = SendOp::Read { va: mr.addr(), rkey: mr.rkey() };
    qa.post_send([Ok(a.wr(1, op, 0, 8))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    // Time for the answer.
    std::thread::sleep(Duration::from_millis(200));
    assert!(!read(mr));
    assert!(read(&b.mr), "the peer is still connected");
    drop(taken);
    wait_until("the region is reached without packets", || read(mr));
}
