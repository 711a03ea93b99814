//! Netlink sockets of the family `NETLINK_RDMA`, by which programs such as iproute2's `rdma` ask the kernel about RDMA
//! devices.
//!
//! A program gets a netlink socket of the family `NETLINK_USERSOCK`, so the kernel implements addresses, options and
//! receiving. That family has no kernel's end: requests to port ID 0 are answered here while the program sends them, from
//! another socket of that family. So an answer's sender is not port ID 0, and any process of the network name space could
//! send one.
//!
//! | module | contents |
//! |---|---|
//! | `message` | the format of requests and answers |
//! | `nldev` | the answers about devices |
//! | `socket` | system calls for netlink sockets |

mod message;
mod nldev;
mod socket;

use std::ffi::c_int;

use libc::{sockaddr, sockaddr_nl, socklen_t};

use crate::descriptor_bits::DescriptorBits;
use crate::errno::Result;
use crate::shim::signals::without_signals;
use message::{Answer, Request};

/// The descriptors that were such sockets at the last check. No lock is needed, because a fork copies the set, and a
/// number that is left from a closed socket changes nothing: the kernel answers no requests to port ID 0 of
/// `NETLINK_USERSOCK` either.
static NUMBERS: DescriptorBits = DescriptorBits::new();

/// The family in place of `NETLINK_RDMA`.
const FAMILY: c_int = libc::NETLINK_USERSOCK;

/// The family to create in place of the one that a program asks for, if it asks for such a socket.
pub fn family_instead(domain: c_int, protocol: c_int) -> Option<c_int> {
    (domain == libc::AF_NETLINK && protocol == libc::NETLINK_RDMA).then_some(FAMILY)
}

/// Records a socket of that family. Programs close it like any other.
pub fn record(fd: c_int) {
    NUMBERS.insert(fd);
}

/// Whether a descriptor may be such a socket. Cheap, and async-signal-safe.
#[inline]
fn may_be_socket(fd: c_int) -> bool {
    NUMBERS.contains(fd)
}

/// Whether a descriptor is such a socket.
fn is_socket(fd: c_int) -> bool {
    let is = socket::is_of_family(fd, FAMILY);
    if !is {
        NUMBERS.remove(fd);
    }
    is
}

/// Whether an address is that of the kernel: port ID 0 of a netlink family.
///
/// # Safety
/// `address` is null or has `len` bytes.
unsafe fn is_kernel(address: *const sockaddr, len: socklen_t) -> bool {
    if address.is_null() || (len as usize) < size_of::<sockaddr_nl>() {
        return false;
    }
    // SAFETY: the caller's; any bytes are an address.
    let address = unsafe { address.cast::<sockaddr_nl>().read_unaligned() };
    c_int::from(address.nl_family) == libc::AF_NETLINK && address.nl_pid == 0
}

/// Whether what is sent to an address by a descriptor is a request to answer here. Without an address it is: such a
/// socket has no other peer.
///
/// # Safety
/// As for [`is_kernel`].
pub unsafe fn is_request(fd: c_int, address: *const sockaddr, len: socklen_t) -> bool {
    // SAFETY: the caller's.
    may_be_socket(fd) && (address.is_null() || unsafe { is_kernel(address, len) }) && is_socket(fd)
}

/// `connect(2)` to the kernel's port ID, which is the default anyway. The kernel would refuse answers from others then.
///
/// # Safety
/// As for [`is_kernel`].
pub unsafe fn is_connection(fd: c_int, address: *const sockaddr, len: socklen_t) -> bool {
    // SAFETY: the caller's.
    may_be_socket(fd) && unsafe { is_kernel(address, len) } && is_socket(fd)
}

/// Answers the requests of a datagram that a program sends. Returns its length, as a successful send does.
pub fn answer(fd: c_int, datagram: &[u8]) -> isize {
    // A signal handler may use the device, or fork.
    match without_signals(|| answer_all(fd, datagram)) {
        Ok(()) => datagram.len() as isize,
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

fn answer_all(fd: c_int, datagram: &[u8]) -> Result<()> {
    let port_id = socket::port_id(fd)?;
    let mut answer = Answer::new(port_id);
    Request::all_in(datagram).for_each(|request| nldev::answer(&request, &mut answer));
    socket::send_to(port_id, FAMILY, answer.datagrams())
}
