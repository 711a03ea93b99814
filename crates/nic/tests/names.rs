//! Names of sockets that another process has bound: a device does without them.

mod common;
#[path = "common/same_host.rs"]
mod same_host;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{Node, rc_pair};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, accept, bind, listen, socket};
use same_host::joined;
use terrace_wire::ROCE_PORT;

/// Binds a name in the abstract name space, unless it is bound.
fn bind_name(name: &str) -> Option<OwnedFd> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    bind(&socket, &address).ok().map(|()| socket)
}

/// Devices on the loopback have the address `::1`, too, and whichever instances these get: the name for it is taken.
#[test]
fn a_name_that_another_process_has_bound_costs_no_other_address() {
    let instances = (0..=u16::from(u8::MAX)).map(|instance| ROCE_PORT + instance);
    let taken: Vec<_> =
        instances.filter_map(|port| bind_name(&format!("terrace/reach/[::1]:{port}"))).collect();
    assert!(taken.len() > 100, "{}", taken.len());
    let (_a, _b, _qa, _qb) = joined();
}

/// A process with another version of the library, or with as many peers as it can have.
#[test]
fn a_peer_that_closes_each_connection_has_not_gone() {
    let (a, b) = (Node::local(), Node::udp());
    let gone = Arc::new(AtomicUsize::new(0));
    let counted = gone.clone();
    a.device.on_peer_gone(Arc::new(move |_| _ = counted.fetch_add(1, Ordering::Relaxed)));
    let name = format!("terrace/reach/{}:{}", b.device.gids()[0].addr, b.device.snapshot().udp_port);
    let listener = bind_name(&name).expect("a free name");
    listen(&listener, 16).expect("a listener");
    rc_pair(&a, &b);
    for _ in 0..4 {
        drop(accept(&listener).expect("a connection"));
    }
    assert_eq!(gone.load(Ordering::Relaxed), 0);
}
