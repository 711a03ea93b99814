//! Where we have no copy routine of our own, the kernel copies: slower, but it returns an error instead of a fault.
//!
//! `process_vm_readv` and `process_vm_writev` on the own process need no privilege. The kernel writes ascending in
//! practice but promises nothing about the order or the size of its stores.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Fault;
use crate::range::{HostRange, pages_of};

/// Nothing here needs recovering.
///
/// # Safety
/// None needed; the routine that recovers has the same signature.
pub(super) unsafe fn recover(_context: *mut libc::c_void) -> bool {
    false
}

/// Copies `len` bytes. `anchor` equals the address of the side that may fault.
///
/// # Safety
/// The side that `anchor` does not name is valid memory for the access; the other may be overwritten or read by any
/// thread.
pub(super) unsafe fn copy(to: u64, from: u64, len: usize, anchor: u64) -> Result<(), Fault> {
    let (own, foreign) = if anchor == to { (from, to) } else { (to, from) };
    let own = libc::iovec { iov_base: own as *mut _, iov_len: len };
    let foreign = libc::iovec { iov_base: foreign as *mut _, iov_len: len };
    // SAFETY: the vectors live on the stack; the kernel checks both ranges.
    let copied = unsafe {
        if anchor == to {
            libc::process_vm_writev(libc::getpid(), &own, 1, &foreign, 1, 0)
        } else {
            libc::process_vm_readv(libc::getpid(), &own, 1, &foreign, 1, 0)
        }
    };
    if usize::try_from(copied) == Ok(len) { Ok(()) } else { Err(Fault) }
}

/// Copies `len` bytes from or to memory that may not be there.
///
/// # Safety
/// As for [`copy`]; the side that is valid memory may be either.
pub(super) unsafe fn copy_unordered(to: u64, from: u64, len: usize) -> Result<(), Fault> {
    let own = libc::iovec { iov_base: to as *mut _, iov_len: len };
    let foreign = libc::iovec { iov_base: from as *mut _, iov_len: len };
    // SAFETY: the vectors live on the stack; the kernel checks both ranges.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &own, 1, &foreign, 1, 0) };
    if usize::try_from(copied) == Ok(len) { Ok(()) } else { Err(Fault) }
}

/// Runs `change` on the 8 bytes when their page can be written. A page that is unmapped between the check and the
/// access still faults: without a recovering routine that gap cannot be closed.
///
/// # Safety
/// `addr` is a multiple of 8, and memory that may be overwritten, or no memory at all.
unsafe fn atomically(addr: u64, change: impl FnOnce(&AtomicU64) -> u64) -> Result<u64, Fault> {
    let (page, len) = pages_of(HostRange { addr, len: 8 }).ok_or(Fault)?;
    // SAFETY: populating changes no content; the kernel checks the range.
    if unsafe { libc::madvise(page as *mut _, len as usize, libc::MADV_POPULATE_WRITE) } != 0 {
        return Err(Fault);
    }
    // SAFETY: aligned, mapped and writable just before, and any thread may change it, as the caller promises.
    Ok(change(unsafe { AtomicU64::from_ptr(addr as *mut u64) }))
}

/// # Safety
/// As for [`atomically`].
pub(super) unsafe fn compare_swap(addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
    // SAFETY: as the caller promises.
    unsafe {
        atomically(addr, |word| {
            word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|old| old)
        })
    }
}

/// # Safety
/// As for [`atomically`].
pub(super) unsafe fn fetch_add(addr: u64, add: u64) -> Result<u64, Fault> {
    // SAFETY: as the caller promises.
    unsafe { atomically(addr, |word| word.fetch_add(add, Ordering::SeqCst)) }
}

/// # Safety
/// As for [`atomically`].
pub(super) unsafe fn swap(addr: u64, value: u64) -> Result<u64, Fault> {
    // SAFETY: as the caller promises.
    unsafe { atomically(addr, |word| word.swap(value, Ordering::SeqCst)) }
}
