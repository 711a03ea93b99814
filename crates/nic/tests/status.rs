//! The status socket of `terrace stat`, which any process on the host can connect to. A process of its own: the name
//! contains the process id.

mod common;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use common::*;
use terrace_nic::*;

const CONNECTIONS: usize = 200;
/// With this many, the status exceeds a socket's buffer: its writer must wait for a reader.
const QUEUE_PAIRS: usize = 1_000;
const SOCKET_BYTES: usize = 256 << 10;

#[test]
fn unread_status_connections_do_not_block_the_engine() {
    let (a, b) = (Node::udp(), Node::udp());
    // A second for each try: on a loaded machine the engine is late, which is not what is tested.
    let (_qa, qb) = pair_on(&a, &b, QpType::Rc, &Tuning { timeout: 18, ..Tuning::default() });
    let many: Vec<_> = (0..QUEUE_PAIRS).map(|_| a.qp(QpType::Rc)).collect();
    assert!(serde_json::to_vec(&a.device.snapshot()).expect("JSON").len() > SOCKET_BYTES);
    let name = format!("terrace/{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    let connecting = std::thread::spawn(move || {
        let connect = |_| UnixStream::connect_addr(&address).expect("taken");
        (0..CONNECTIONS).map(connect).collect::<Vec<_>>()
    });
    let mut rounds = 0;
    while rounds < 200 || !connecting.is_finished() {
        // The first node's engine answers.
        let op = SendOp::Read { va: a.memory.addr(), rkey: a.mr.rkey() };
        qb.post_send([Ok(b.wr(1, op, 0, 4096))]).expect("posted");
        assert_eq!(b.completion().status, WcStatus::Success, "round {rounds}");
        rounds += 1;
    }
    drop((connecting.join().expect("connected"), many));
}
