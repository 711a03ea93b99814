//! A process without descriptors: same-host peers stay connected, and what needed one is done when there is one again.

mod common;
#[path = "common/paged.rs"]
mod paged;
#[path = "common/same_host.rs"]
mod same_host;
#[path = "common/shared.rs"]
mod shared;

use std::fs::File;
use std::time::Duration;

use common::*;
use paged::Paged;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use same_host::{find_route, joined};
use shared::SharedRegion;
use terrace_nic::*;

/// Opens files until the process may open no more of them.
fn take_all_descriptors() -> Vec<File> {
    let limit = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("a lower limit");
    std::iter::from_fn(|| File::open("/dev/null").ok()).collect()
}

/// The files of one region could not be received, and that of the other one not be opened for the peer.
#[test]
fn regions_whose_files_were_not_to_be_had_are_reached_later() {
    let (a, b, qa, _qb) = joined();
    let served = Paged::new(&b, 1 << 20, 1 << 20, REMOTE_ALL);
    let shared = SharedRegion::new(&b, 1 << 20);
    let mr = &served.mr;
    // A queue pair asks of a region again when it has asked of another one: each has its own.
    let (qc, _qd) = rc_pair(&a, &b);
    find_route(&a, &qc, b.memory.addr(), b.mr.rkey());
    let read = |mr: &Mr| qa.read_now(mr.rkey(), mr.addr(), &mut [0; 8]).expect("a queue pair");
    // Only in memory that is mapped.
    let add =
        || qc.atomic_now(shared.mr.rkey(), shared.addr, AtomicOp::FetchAdd { add: 1 }).expect("a queue pair");
    let taken = take_all_descriptors();
    assert!(!taken.is_empty());
    // By packets: then the page is in memory.
    for (qp, mr) in [(&qa, mr), (&qc, &shared.mr)] {
        let op = SendOp::Read { va: mr.addr(), rkey: mr.rkey() };
        qp.post_send([Ok(a.wr(1, op, 0, 8))]).expect("posted");
        assert_eq!(a.completion().status, WcStatus::Success);
    }
    // Time for the answers.
    std::thread::sleep(Duration::from_millis(200));
    assert!(!read(mr) && add().is_none());
    assert!(read(&b.mr), "the peer is still connected");
    drop(taken);
    wait_until("the first region is reached without packets", || read(mr));
    wait_until("the other region is mapped", || add().is_some());
}

/// Otherwise peers that know only the standard port would not reach it, although there are descriptors later.
#[test]
fn a_device_without_descriptors_for_forwarding_says_so() {
    let node = Node::udp();
    let taken = take_all_descriptors();
    let errno = rustix::io::Errno::MFILE.raw_os_error();
    assert_eq!(node.device.join_colocated(), Err(Error::System(errno)));
    drop(taken);
    node.device.join_colocated().expect("descriptors");
}
