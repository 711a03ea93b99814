//! Functions that change mappings. Regions larger than memory (`paged`) depend on the program's mappings, and are
//! notified before the program changes one.
//!
//! These functions execute the system calls themselves instead of looking up the C library's functions: allocators call
//! them before a lookup is possible.

use std::ffi::{c_int, c_long, c_void};

use libc::{off_t, off64_t, size_t};
use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::errno::{ENOMEM, Errno, minus_one};
use crate::paged;

fn range(addr: *const c_void, len: size_t) -> HostRange {
    HostRange { addr: addr as u64, len: len as u64 }
}

/// `munmap(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: size_t) -> c_int {
    paged::before_change(range(addr, len));
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_munmap, addr, len) as c_int }
}

/// `mprotect(2)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(addr: *mut c_void, len: size_t, protection: c_int) -> c_int {
    paged::before_change(range(addr, len));
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_mprotect, addr, len, c_long::from(protection)) as c_int }
}

/// `madvise(2)`. Memory that was private, and is a mapping of a swap file now, would keep its bytes with `MADV_DONTNEED`,
/// and takes no `MADV_FREE`: it is emptied. Children would share it with `MADV_DOFORK`: they do not get it.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: size_t, advice: c_int) -> c_int {
    match advice {
        libc::MADV_DONTNEED | libc::MADV_FREE => {
            // SAFETY: the caller's.
            let discarded = unsafe { terrace_vm::discard(range(addr, len), advice) };
            minus_one(discarded.map_err(|error| error.raw_os_error().map_or(ENOMEM, Errno)))
        }
        libc::MADV_DOFORK if terrace_vm::has_swapped(range(addr, len)) => 0,
        // SAFETY: the caller's.
        _ => unsafe { libc::syscall(libc::SYS_madvise, addr, len, c_long::from(advice)) as c_int },
    }
}

/// `mremap(2)`. The last argument is there only with `MREMAP_FIXED`; without it the kernel ignores it. What is added to memory
/// is zero: a swap file may have bytes there of the time before it was shortened.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: size_t,
    new_len: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    paged::before_change(range(old, old_len));
    if flags & libc::MREMAP_FIXED != 0 {
        paged::before_change(range(new, new_len));
    }
    // SAFETY: the caller's.
    let result = unsafe { libc::syscall(libc::SYS_mremap, old, old_len, new_len, c_long::from(flags), new) };
    let kept = old_len.next_multiple_of(PAGE_BYTES as usize);
    if result != -1 && old_len > 0 && new_len > kept {
        let added = HostRange { addr: result as u64 + kept as u64, len: (new_len - kept) as u64 };
        // What is private again would become two mappings, which could not grow together.
        if terrace_vm::has_swapped(added) {
            // SAFETY: new memory, which the caller has not got yet.
            let _ = unsafe { terrace_vm::discard(added, libc::MADV_DONTNEED) };
        }
    }
    result as *mut c_void
}

/// `mmap(2)`, which replaces other mappings with `MAP_FIXED`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    if flags & libc::MAP_FIXED != 0 && flags & libc::MAP_FIXED_NOREPLACE == 0 {
        paged::before_change(range(addr, len));
    }
    let (protection, flags, fd) = (c_long::from(protection), c_long::from(flags), c_long::from(fd));
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_mmap, addr, len, protection, flags, fd, offset) as *mut c_void }
}

/// As `mmap64`; both have 64-bit offsets.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe { mmap64(addr, len, protection, flags, fd, offset) }
}
