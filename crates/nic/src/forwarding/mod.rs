//! Forwarding: packets that arrive at an address's standard port and are for another process of the host.
//!
//! A peer that knows nothing of instances sends everything to UDP port 4791: the port of instance 0. The process
//! with instance 0 of an address forwards packets for the other instances, by the upper bits of the queue pair number.
//! Management datagrams, which all instances get at number 1, are forwarded by the handler that reads them
//! ([`Device::forward_management`](crate::Device::forward_management)).
//!
//! ```text
//!   peer, anywhere -- packet for instance 3 -> A:4791  process with instance 0
//!                                                |    a message on a unix socket: the packet, and where it came from
//!                                                v
//!                              terrace/passing/A:4794  process with instance 3 --- answers --> peer
//! ```
//!
//! Any user may have the standard port, and may claim any source for any packet. So a process takes forwarded packets
//! on that socket only from processes of its own user and of root, as the kernel names them, and what comes to a UDP
//! port is never taken for forwarded. A process that does not read loses what does not fit into its socket, as it does
//! with its UDP socket.
//!
//! The process with instance 0 listens at its first address, and at others as far as it needs them itself. A process
//! with another instance that uses such an address asks it to listen there, too: when it begins to, and when another
//! process takes instance 0 over, which announces itself.

mod messages;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use terrace_sync::{ArcMutexGuard, Mutex};

use crate::unix_socket::{self, Spare};

/// The service that the sockets are named after.
const SERVICE: &str = "passing";

/// In front of a forwarded packet: its kind, the traffic class, and the source's port and address.
const PREFIX_BYTES: usize = 20;

/// A device's forwarding sockets.
#[derive(Default)]
pub(crate) struct Forwarding {
    /// Where others forward to this device, once it has joined them.
    inbound: Arc<Mutex<Option<Arc<Inbound>>>>,
    /// To others, by their address and UDP port.
    outbound: Arc<Mutex<Outbound>>,
}

type Outbound = HashMap<SocketAddr, OwnedFd>;

/// The locked sockets, while the process forks.
pub(crate) struct ForkLock {
    inbound: ArcMutexGuard<Option<Arc<Inbound>>>,
    outbound: ArcMutexGuard<Outbound>,
}

impl ForkLock {
    /// In the child: the sockets are the parent's.
    pub fn forget(&mut self) {
        *self.inbound = None;
        self.outbound.clear();
    }
}

impl Forwarding {
    /// Where others forward to this device.
    pub fn inbound(&self) -> Option<Arc<Inbound>> {
        self.inbound.lock().clone()
    }

    /// Ends forwarding in both directions.
    pub fn close(&self) {
        *self.inbound.lock() = None;
        self.outbound.lock().clear();
    }

    /// Locks the sockets while the process forks.
    pub fn lock_for_fork(&self) -> ForkLock {
        ForkLock { inbound: self.inbound.lock_arc(), outbound: self.outbound.lock_arc() }
    }

    /// Sends a message to the process that has that address and UDP port. False if it is lost.
    fn send(&self, to: SocketAddr, prefix: &[u8; PREFIX_BYTES], bytes: &[u8]) -> bool {
        let mut outbound = self.outbound.lock();
        // Twice: another process may have the port by now.
        for _ in 0..2 {
            let socket = match outbound.entry(to) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => {
                    let Some(socket) = connect(to) else { return false };
                    place.insert(socket)
                }
            };
            let parts = [IoSlice::new(prefix), IoSlice::new(bytes)];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&*socket, &parts, &mut SendAncillaryBuffer::default(), flags) {
                Ok(_) => return true,
                Err(Errno::AGAIN | Errno::INTR) => return false,
                Err(_) => drop(outbound.remove(&to)),
            }
        }
        false
    }
}

/// A connection to the process with that address and UDP port, if it is of the same user, or this one is root's.
fn connect(to: SocketAddr) -> Option<OwnedFd> {
    let socket = unix_socket::connect_to(SERVICE, to).ok()?;
    let (peer, own) = (unix_socket::peer_of(&socket)?, rustix::process::geteuid());
    (peer.uid == own || own.is_root()).then_some(socket)
}

/// Where others forward to a device.
pub(crate) struct Inbound {
    /// Readable when a listener or a sender is.
    waits: OwnedFd,
    /// One for each of the device's addresses, with the index of its GID.
    listeners: Vec<(u8, OwnedFd)>,
    spare: Spare,
    senders: Mutex<Vec<Sender>>,
}

/// A process that forwards to this one.
struct Sender {
    socket: OwnedFd,
    /// The GID that its packets came to.
    gid_index: u8,
}

impl Inbound {
    /// Readable when there is something for `serve`.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.waits.as_fd()
    }
}
