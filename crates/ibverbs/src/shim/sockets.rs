//! Functions of the C library for sockets, for netlink sockets that ask about RDMA devices (`rdma_netlink`). Other sockets
//! cost one lookup in a bitmap.

use std::ffi::{c_int, c_void};

use libc::{msghdr, sockaddr, socklen_t};

use super::real::call_real;
use crate::rdma_netlink;

/// `socket(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let instead = rdma_netlink::family_instead(domain, protocol);
    let protocol = instead.unwrap_or(protocol);
    let fd = call_real!(socket: fn(c_int, c_int, c_int) -> c_int, domain, kind, protocol);
    if instead.is_some() && fd >= 0 {
        rdma_netlink::record(fd);
    }
    fd
}

/// `connect(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the program's address.
    if unsafe { rdma_netlink::is_connection(fd, address, len) } {
        return 0;
    }
    call_real!(connect: fn(c_int, *const sockaddr, socklen_t) -> c_int, fd, address, len)
}

/// `send(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, data: *const c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: no address; the program's data.
    if let Some(sent) = unsafe { answer(fd, data, len, std::ptr::null(), 0) } {
        return sent;
    }
    call_real!(send: fn(c_int, *const c_void, usize, c_int) -> isize, fd, data, len, flags)
}

/// `sendto(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    data: *const c_void,
    len: usize,
    flags: c_int,
    address: *const sockaddr,
    address_len: socklen_t,
) -> isize {
    // SAFETY: the program's address and data.
    if let Some(sent) = unsafe { answer(fd, data, len, address, address_len) } {
        return sent;
    }
    call_real!(
        sendto: fn(c_int, *const c_void, usize, c_int, *const sockaddr, socklen_t) -> isize,
        fd, data, len, flags, address, address_len
    )
}

/// Answers the requests in data that a program sends; `None` if the data are for the kernel or for another program.
///
/// # Safety
/// As for `sendto`.
pub unsafe fn answer(
    fd: c_int,
    data: *const c_void,
    len: usize,
    address: *const sockaddr,
    address_len: socklen_t,
) -> Option<isize> {
    // SAFETY: the caller's.
    if !unsafe { rdma_netlink::is_request(fd, address, address_len) } || data.is_null() {
        return None;
    }
    // SAFETY: the caller's.
    Some(rdma_netlink::answer(fd, unsafe { std::slice::from_raw_parts(data.cast(), len) }))
}

/// `sendmsg(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    // SAFETY: null, or the program's message.
    if let Some(message) = unsafe { message.as_ref() }
        // SAFETY: as above.
        && unsafe { rdma_netlink::is_request(fd, message.msg_name.cast(), message.msg_namelen) }
    {
        // SAFETY: as above.
        return rdma_netlink::answer(fd, &unsafe { gathered(message) });
    }
    call_real!(sendmsg: fn(c_int, *const msghdr, c_int) -> isize, fd, message, flags)
}

/// The data of a message in one piece.
///
/// # Safety
/// The message's pieces may be read.
unsafe fn gathered(message: &msghdr) -> Vec<u8> {
    if message.msg_iov.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller's.
    let pieces = unsafe { std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen) };
    let bytes = pieces.iter().filter(|piece| !piece.iov_base.is_null()).flat_map(|piece| {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts(piece.iov_base.cast::<u8>(), piece.iov_len) }
    });
    bytes.copied().collect()
}
