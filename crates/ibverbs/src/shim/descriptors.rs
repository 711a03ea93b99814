//! Functions of the C library that take a descriptor, for channels to the connection manager (`rdma_cm`) and for netlink sockets. Other
//! descriptors cost one lookup in a bitmap.

use std::ffi::{c_int, c_void};

use super::real::call_real;
use super::sockets;
use crate::rdma_cm;

unsafe extern "C" {
    /// The C library's `write` by its other name, because a lookup is not possible in every caller of `write`.
    fn __write(fd: c_int, data: *const c_void, len: usize) -> isize;
}

/// `write(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, data: *const c_void, len: usize) -> isize {
    if rdma_cm::is_channel(fd) {
        // SAFETY: the caller's.
        if let Some(written) = unsafe { rdma_cm::write(fd, data, len) } {
            return written;
        }
    }
    // SAFETY: the caller's; no address.
    if let Some(sent) = unsafe { sockets::answer(fd, data, len, std::ptr::null(), 0) } {
        return sent;
    }
    // SAFETY: the caller's.
    unsafe { __write(fd, data, len) }
}

/// Replaces a socket's status by that of the character device.
///
/// # Safety
/// `answer` is null or may be written, if the call before it has succeeded.
unsafe fn replace_status(fd: c_int, answer: *mut libc::stat) {
    const READABLE_AND_WRITABLE_BY_ALL: libc::mode_t = 0o666;
    if rdma_cm::is_channel(fd) && rdma_cm::is_ours(fd) {
        // SAFETY: the C library has just written there.
        let status = unsafe { &mut *answer };
        status.st_mode = libc::S_IFCHR | READABLE_AND_WRITABLE_BY_ALL;
        status.st_rdev = rdma_cm::device_number();
    }
}

/// `fstat(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fstat(fd: c_int, answer: *mut libc::stat) -> c_int {
    let failed = call_real!(fstat: fn(c_int, *mut libc::stat) -> c_int, fd, answer);
    if failed == 0 {
        // SAFETY: filled.
        unsafe { replace_status(fd, answer) };
    }
    failed
}

/// `fstat64(2)`: the same structure on 64-bit systems.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fstat64(fd: c_int, answer: *mut libc::stat) -> c_int {
    let failed = call_real!(fstat64: fn(c_int, *mut libc::stat) -> c_int, fd, answer);
    if failed == 0 {
        // SAFETY: filled.
        unsafe { replace_status(fd, answer) };
    }
    failed
}

/// `fstat(2)` of programs that were built for older C libraries.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __fxstat(version: c_int, fd: c_int, answer: *mut libc::stat) -> c_int {
    let failed = call_real!(
        __fxstat: fn(c_int, c_int, *mut libc::stat) -> c_int, version, fd, answer
    );
    if failed == 0 {
        // SAFETY: filled.
        unsafe { replace_status(fd, answer) };
    }
    failed
}

/// As `__fxstat`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __fxstat64(version: c_int, fd: c_int, answer: *mut libc::stat) -> c_int {
    let failed = call_real!(
        __fxstat64: fn(c_int, c_int, *mut libc::stat) -> c_int, version, fd, answer
    );
    if failed == 0 {
        // SAFETY: filled.
        unsafe { replace_status(fd, answer) };
    }
    failed
}
