//! Buffers of `ibv_alloc_buf` (rdma-core 64): pages of ordinary memory.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::abi::ibv_pd;
use crate::abi::newer::{ibv_buf, ibv_mr_init_attr};
use crate::errno::{EINVAL, Errno, Result, pointer};
use crate::object;
use crate::pd::{PdObject, Use};

/// `ibv_buf`, and the reference to its protection domain.
#[repr(C)]
struct Buffer {
    c: ibv_buf,
    _pd: Use,
}

/// `ibv_alloc_buf(3)`: page aligned memory of zeros that is not faulted in yet.
///
/// # Safety
/// `pd` is null or a protection domain, `buf` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void {
    let alloc = || {
        // SAFETY: the caller's.
        let domain = unsafe { object::borrow::<PdObject>(pd)? };
        if buf.is_null() || size == 0 {
            return Err(EINVAL);
        }
        let addr = map(size)?;
        let buffer = Buffer { c: ibv_buf { pd, addr, size }, _pd: domain.in_use() };
        // SAFETY: the caller's; checked above.
        unsafe { buf.write(Box::into_raw(Box::new(buffer)).cast()) };
        Ok(addr)
    };
    pointer(alloc())
}

/// Maps pages of zeros that are not faulted in yet.
pub fn map(size: usize) -> Result<*mut c_void> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address that the kernel chooses.
    let addr = unsafe { libc::mmap(null_mut(), size, protection, flags, -1, 0) };
    if addr == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(addr) }
}

/// Unmaps pages of [`map`].
pub fn unmap(addr: *mut c_void, size: usize) {
    // SAFETY: a mapping of `map`, whose owner is being dropped.
    unsafe { libc::munmap(addr, size) };
}

/// `ibv_free_buf(3)`.
///
/// # Safety
/// `buf` is null or came from `ibv_alloc_buf`, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_buf(buf: *mut ibv_buf) {
    if buf.is_null() {
        return;
    }
    // SAFETY: `ibv_alloc_buf` created it.
    let buffer = unsafe { Box::from_raw(buf.cast::<Buffer>()) };
    unmap(buffer.c.addr, buffer.c.size);
}

/// EINVAL unless the range to register lies within the buffer.
///
/// # Safety
/// `attr.buf` is null or a buffer.
pub unsafe fn check_range(pd: *mut ibv_pd, attr: &ibv_mr_init_attr) -> Result<()> {
    // SAFETY: the caller's.
    let buf = unsafe { object::read(attr.buf)? };
    let offset = (attr.addr as usize).checked_sub(buf.addr as usize).ok_or(EINVAL)?;
    let fits = offset <= buf.size && attr.length <= buf.size - offset;
    if fits && pd == buf.pd { Ok(()) } else { Err(EINVAL) }
}

/// `ibv_export_buf_dmabuf_fd(3)`: ENODATA, because the buffers are no DMA-bufs.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_export_buf_dmabuf_fd(_buf: *mut ibv_buf) -> c_int {
    Errno(libc::ENODATA).set();
    -1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_no_dma_buf() {
        assert_eq!(ibv_export_buf_dmabuf_fd(null_mut()), -1);
        assert_eq!(Errno::last(), Errno(libc::ENODATA));
    }
}
