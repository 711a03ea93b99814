//! `/dev/infiniband/rdma_cm`: the character device through which librdmacm reaches the kernel's connection manager.
//! Here it reaches ours (`terrace_cm`).
//!
//! Programs open the device, write commands to it, and poll it for events. `open` returns one end of a socket pair: it
//! polls as the device does, and when its last copy is closed in any manner, the other end reports a hangup. The path
//! shim passes `write` and `fstat` of such descriptors to this module; for other descriptors that costs one lookup in
//! a bitmap.
//!
//! | module | contents |
//! |---|---|
//! | `descriptor` | which descriptors are ours |
//! | `abi` | the layout of commands and answers (`rdma/rdma_user_cm.h`) |
//! | `command`, `connecting` | what each command does; those that lead to a connection |
//! | `id` | programs' `rdma_cm_id`s, and their events |
//! | `attributes` | answers about routes and queue pairs |
//! | `resolve` | which of our addresses, and which queue pair 1 of the peer, a connection uses |
//! | `rendezvous` | which process of this host listens where |
//! | `tell` | the connection manager's events for programs |
//! | `service`, `clock` | the process's connection manager: its NIC, its thread, its lock; its clock |
//! | `forwarding` | datagrams for other processes of this host, and those that come without a connection manager |
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
mod rendezvous;
mod resolve;
pub mod service;
mod tell;

use std::ffi::{c_int, c_void};

pub use descriptor::{device_number, is_channel};

use crate::errno::Errno;
use crate::fork;
use crate::shim::signals::without_signals;

/// Whether a path is the device's.
pub fn is_device(path: &[u8]) -> bool {
    path == b"/dev/infiniband/rdma_cm"
}

/// Whether a descriptor is ours; checks the inode.
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

/// `write(2)` to a descriptor that may be ours: `None` if it is not.
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
