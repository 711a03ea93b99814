//! System calls for netlink sockets.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libc::{sockaddr_nl, socklen_t};

use crate::errno::{Errno, Result};
use crate::object;

const ADDRESS_LEN: socklen_t = size_of::<sockaddr_nl>() as socklen_t;

/// The errno of a system call that has failed.
fn checked(result: c_int) -> Result<c_int> {
    if result < 0 { Err(Errno::last()) } else { Ok(result) }
}

/// Whether a descriptor is a netlink socket of a family.
pub fn is_of_family(fd: c_int, family: c_int) -> bool {
    option(fd, libc::SO_DOMAIN) == Ok(libc::AF_NETLINK) && option(fd, libc::SO_PROTOCOL) == Ok(family)
}

/// An option of a socket that is a number.
fn option(fd: c_int, name: c_int) -> Result<c_int> {
    let (mut value, mut len): (c_int, _) = (0, size_of::<c_int>() as socklen_t);
    // SAFETY: both may be written.
    checked(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &raw mut len) })?;
    Ok(value)
}

/// The address of a port ID; 0 is the kernel, and in `bind` any.
fn address(port_id: u32) -> sockaddr_nl {
    // SAFETY: integers only.
    let mut address: sockaddr_nl = unsafe { object::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address.nl_pid = port_id;
    address
}

/// The port ID of a socket. The kernel chooses one if the program has not.
pub fn port_id(fd: c_int) -> Result<u32> {
    let known = own_address(fd)?.nl_pid;
    if known != 0 {
        return Ok(known);
    }
    let any = address(0);
    // SAFETY: an address of that length.
    checked(unsafe { libc::bind(fd, (&raw const any).cast(), ADDRESS_LEN) })?;
    Ok(own_address(fd)?.nl_pid)
}

fn own_address(fd: c_int) -> Result<sockaddr_nl> {
    let (mut own, mut len) = (address(0), ADDRESS_LEN);
    // SAFETY: both may be written.
    checked(unsafe { libc::getsockname(fd, (&raw mut own).cast(), &raw mut len) })?;
    Ok(own)
}

/// Sends datagrams to a port ID of this network name space.
///
/// # Errors
/// ENOBUFS if the receiver's buffer has no room for them: it would make none while it waits for this call.
pub fn send_to(port_id: u32, family: c_int, datagrams: &[Vec<u8>]) -> Result<()> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: no preconditions.
    let fd = checked(unsafe { libc::socket(libc::AF_NETLINK, kind, family) })?;
    // SAFETY: a new descriptor, which nothing else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let to = address(port_id);
    for datagram in datagrams {
        // SAFETY: readable bytes of that length, and an address.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                datagram.as_ptr().cast(),
                datagram.len(),
                libc::MSG_DONTWAIT,
                (&raw const to).cast(),
                ADDRESS_LEN,
            )
        };
        if sent < 0 {
            let errno = Errno::last();
            return Err(if errno.0 == libc::EAGAIN { Errno(libc::ENOBUFS) } else { errno });
        }
    }
    Ok(())
}
