//! Registered memory without unsafe code.

mod common;

use common::*;
use terrace_nic::*;

#[test]
fn a_buffer_is_read_and_written_within_its_bounds() {
    let node = Node::udp();
    let buffer = Buffer::new(&node.pd, 10_000, REMOTE_ALL).expect("a buffer");
    buffer.write(5000, b"here").expect("within");
    let mut out = [0; 6];
    buffer.read(4999, &mut out).expect("within");
    assert_eq!(&out, b"\0here\0");
    assert!(buffer.read(9_995, &mut out).is_err() && buffer.write(usize::MAX, &out).is_err());
    let empty = Buffer::new(&node.pd, 0, REMOTE_ALL).expect("a buffer of no bytes");
    assert!(empty.is_empty() && empty.read(0, &mut out[..1]).is_err());
}

#[test]
fn peers_reach_a_buffer_until_it_is_dropped() {
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    let buffer = Buffer::new(&b.pd, 4096, REMOTE_ALL).expect("a buffer");
    let op = SendOp::Write { va: buffer.addr() + 8, rkey: buffer.mr().rkey() };
    a.memory.fill(0, b"hello");
    qa.post_send([Ok(a.wr(1, op, 0, 5))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::Success);
    let mut out = [0; 5];
    buffer.read(8, &mut out).expect("within");
    assert_eq!(&out, b"hello");
    drop(buffer);
    qa.post_send([Ok(a.wr(2, op, 0, 5))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RemoteAccess);
}
