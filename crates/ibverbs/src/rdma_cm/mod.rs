//! `/dev/infiniband/rdma_cm`: the character device through which librdmacm reaches the kernel's connection manager. In
//! this process it reaches `terrace_cm` instead.
//!
//! Programs open the device, write commands to it, and poll it for events. `open` returns one end of a socket pair: its
//! poll events are those of the device, and the other end reports a hangup when its last copy is closed in any manner.
//! The path shim passes `write` and `fstat` of such descriptors to this module; other descriptors cost one lookup in a
//! bitmap.
//!
//! | module | contents |
//! |---|---|
//! | `descriptor` | the descriptors of the device |
//! | `abi` | the layout of commands and answers (`rdma/rdma_user_cm.h`) |
//! | `command`, `connecting` | the execution of commands; those that lead to a connection |
//! | `id` | programs' `rdma_cm_id`s, and their events |
//! | `multicast` | memberships in multicast groups |
//! | `attributes` | answers about routes and queue pairs |
//! | `resolve` | selection of the local address and of the peer's queue pair 1 for a connection |
//! | `rendezvous` | the host's registry of listeners and their processes |
//! | `report` | translation of the connection manager's events for programs |
//! | `service`, `clock` | the process's connection manager with its NIC, thread and lock; its clock |
//! | `probes` | the sockets of keepalive probes |
//! | `forwarding` | forwarding of datagrams to other processes of this host; service without a connection manager |
//!
//! `docs/decisions/0027-connections-by-address.md` gives the reasons for this design.

mod abi;
mod attributes;
mod clock;
mod command;
mod connecting;
mod descriptor;
pub mod forwarding;
mod id;
mod multicast;
mod probes;
mod rendezvous;
mod report;
mod resolve;
pub mod service;

use std::ffi::{c_int, c_void};

pub use descriptor::{device_number, is_channel};

use crate::errno::Errno;
use crate::fork;
use crate::shim::signals::without_signals;

/// Whether a path is that of the device.
pub fn is_device(path: &[u8]) -> bool {
    path == b"/dev/infiniband/rdma_cm"
}

/// Whether a descriptor belongs to the device, by its inode.
pub fn is_ours(fd: c_int) -> bool {
    descriptor::lookup(fd).is_some()
}

/// `open(2)` of the device.
pub fn open(flags: c_int) -> c_int {
    // A signal handler may use the device as well, or fork.
    match without_signals(|| fork::install().and_then(|()| service::open_channel(flags))) {
        Ok(fd) => fd,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// `write(2)` to a descriptor; `None` if it does not belong to the device.
///
/// # Safety
/// As for the C library's.
pub unsafe fn write(fd: c_int, data: *const c_void, len: usize) -> Option<isize> {
    let file = descriptor::lookup(fd)?;
    // SAFETY: the caller's.
    let result = unsafe { command::execute(fd, file, data as u64, len) };
    Some(result.map_or_else(
        |errno: Errno| {
            errno.set();
            -1
        },
        |()| len as isize,
    ))
}
