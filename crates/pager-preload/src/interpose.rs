//! Functions that give the program memory. Large memory is registered for faults before the program touches it. What comes
//! by other calls (the heap of small allocations, raw system calls), the pager finds in the list of mappings.
//!
//! `libibverbs.so.1` has functions of some of these names, too (`ibverbs`, `shim/mappings.rs`). They are not shared: those act
//! before a mapping changes, and make the system call, because allocators call them before a lookup is possible. These act on
//! what was given, by the next library, which may be a preloaded allocator. `--remote-memory` and `--dram` exclude one another.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{off_t, off64_t, size_t};
use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::join;
use crate::next::call_next;
use crate::output::report;

/// Smaller memory is not registered at once.
const LARGE: usize = 256 << 10;

/// Shared memory of this length is reported.
const SHARED_REPORT: usize = 1 << 20;

/// Registers the whole pages of memory that was just given, or what the heap has grown by.
fn register(addr: *mut c_void, len: usize) {
    if len < LARGE || addr.is_null() {
        return join::register_heap();
    }
    let start = (addr as u64).next_multiple_of(PAGE_BYTES);
    let end = (addr as u64).saturating_add(len as u64) / PAGE_BYTES * PAGE_BYTES;
    join::register(HostRange { addr: start, len: end.saturating_sub(start) });
}

/// `malloc(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: size_t) -> *mut c_void {
    let given = call_next!(malloc: fn(size_t) -> *mut c_void, size);
    register(given, size);
    given
}

/// `calloc(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: size_t, size: size_t) -> *mut c_void {
    let given = call_next!(calloc: fn(size_t, size_t) -> *mut c_void, count, size);
    register(given, count.saturating_mul(size));
    given
}

/// `realloc(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(old: *mut c_void, size: size_t) -> *mut c_void {
    let given = call_next!(realloc: fn(*mut c_void, size_t) -> *mut c_void, old, size);
    register(given, size);
    given
}

/// `memalign(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: size_t, size: size_t) -> *mut c_void {
    let given = call_next!(memalign: fn(size_t, size_t) -> *mut c_void, alignment, size);
    register(given, size);
    given
}

/// `aligned_alloc(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: size_t, size: size_t) -> *mut c_void {
    let given = call_next!(aligned_alloc: fn(size_t, size_t) -> *mut c_void, alignment, size);
    register(given, size);
    given
}

/// `posix_memalign(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(given: *mut *mut c_void, alignment: size_t, size: size_t) -> c_int {
    let result =
        call_next!(posix_memalign: fn(*mut *mut c_void, size_t, size_t) -> c_int, given, alignment, size);
    if result == 0 {
        // SAFETY: the function has succeeded, so it has stored a pointer there.
        register(unsafe { *given }, size);
    }
    result
}

/// `mmap(2)`. Private memory without a file is registered. It is not populated then: the pager counts its pages.
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
    const EXCLUDED: c_int = libc::MAP_HUGETLB | libc::MAP_GROWSDOWN | libc::MAP_STACK | libc::MAP_LOCKED;
    let is_private = flags & libc::MAP_ANONYMOUS != 0 && flags & libc::MAP_TYPE == libc::MAP_PRIVATE;
    let is_paged = is_private && flags & EXCLUDED == 0 && len >= LARGE && join::is_paged();
    let flags = if is_paged { flags & !libc::MAP_POPULATE } else { flags };
    if flags & libc::MAP_ANONYMOUS != 0 && !is_private && len >= SHARED_REPORT {
        report_shared(len);
    }
    let given = call_next!(mmap64: fn(*mut c_void, size_t, c_int, c_int, c_int, off64_t) -> *mut c_void, addr, len, protection, flags, fd, offset);
    if is_paged && given != libc::MAP_FAILED {
        join::register(HostRange { addr: given as u64, len: (len as u64).next_multiple_of(PAGE_BYTES) });
    }
    given
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

/// Says once that shared memory stays local.
fn report_shared(len: usize) {
    static IS_REPORTED: AtomicBool = AtomicBool::new(false);
    if join::is_paged() && !IS_REPORTED.swap(true, Ordering::Relaxed) {
        report(format_args!(
            "{} MiB of shared memory is not paged: it stays local, beside the memory of --local",
            len >> 20
        ));
    }
}

/// `madvise(2)`. What the program permits the kernel to free is freed at once: the kernel would keep the pages, and the pager
/// could not tell. The kernel does not tell the pager either which memory children lack.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: size_t, advice: c_int) -> c_int {
    if matches!(advice, libc::MADV_DONTFORK | libc::MADV_WIPEONFORK) {
        join::note_uninherited_memory();
    }
    let result = call_next!(madvise: fn(*mut c_void, size_t, c_int) -> c_int, addr, len, advice);
    // The kernel has checked that all of it is private memory without a file.
    if result == 0 && advice == libc::MADV_FREE && join::has_registered() {
        let advice = libc::MADV_DONTNEED;
        call_next!(madvise: fn(*mut c_void, size_t, c_int) -> c_int, addr, len, advice);
    }
    result
}

/// `mremap(2)`. What becomes shorter on its way to a given address is cut first: kernels from before the rework of that call in
/// 2025 report that the old length has moved, and the pager would take what is behind the new memory for a part of it.
///
/// # Safety
/// As for the C library's, which reads the last argument with `MREMAP_FIXED` and `MREMAP_DONTUNMAP` alone.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    addr: *mut c_void,
    len: size_t,
    new_len: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let mut len = len;
    if let Some(tail) = cut_of_move(addr as usize, len, new_len, flags, to as usize)
        && join::has_registered()
    {
        // Of huge pages it fails, and the kernel rounds the lengths of the call itself.
        // SAFETY: the call gives this range up.
        if unsafe { libc::munmap(tail.addr as *mut c_void, tail.len as usize) } == 0 {
            len = new_len;
        }
    }
    // The C library's function has a variable number of arguments, and makes this system call.
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_mremap, addr, len, new_len, flags, to) as *mut c_void }
}

/// What a call of `mremap(2)` unmaps behind the memory that it moves to a given address. `None` if that is nothing, or if the
/// kernel refuses the arguments.
fn cut_of_move(addr: usize, len: usize, new_len: usize, flags: c_int, to: usize) -> Option<HostRange> {
    const PAGE: usize = PAGE_BYTES as usize;
    let (end, new_end) = (addr.checked_add(len)?, to.checked_add(new_len)?);
    let cut = addr + new_len.checked_next_multiple_of(PAGE)?;
    let is_move = flags == libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED && new_len > 0;
    let is_aligned = addr.is_multiple_of(PAGE) && to.is_multiple_of(PAGE);
    let is_apart = end <= to || new_end <= addr;
    (is_move && is_aligned && is_apart && cut < end)
        .then(|| HostRange { addr: cut as u64, len: (end - cut).next_multiple_of(PAGE) as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_shrinks_on_its_way_to_a_given_address_is_cut_first() {
        const TO_ADDRESS: c_int = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let cut = |addr, len, new_len, flags, to| {
            cut_of_move(addr, len, new_len, flags, to).map(|range| (range.addr, range.len))
        };
        assert_eq!(cut(0x10000, 0x4000, 0x1000, TO_ADDRESS, 0x20000), Some((0x11000, 0x3000)));
        // Lengths become whole pages.
        assert_eq!(cut(0x10000, 0x3001, 0xfff, TO_ADDRESS, 0x20000), Some((0x11000, 0x3000)));
        assert_eq!(cut(0x10000, 0x4000, 0x3001, TO_ADDRESS, 0x20000), None);
        assert_eq!(cut(0x10000, 0x1000, 0x4000, TO_ADDRESS, 0x20000), None);
        assert_eq!(cut(0x10000, 0x4000, 0x1000, libc::MREMAP_MAYMOVE, 0x20000), None);
        // The kernel refuses these, and nothing is to be unmapped.
        assert_eq!(cut(0x10000, 0x4000, 0, TO_ADDRESS, 0x20000), None);
        assert_eq!(cut(0x10000, 0x4000, 0x1000, TO_ADDRESS, 0x20001), None);
        assert_eq!(cut(0x10001, 0x4000, 0x1000, TO_ADDRESS, 0x20000), None);
        assert_eq!(cut(0x10000, 0x4000, 0x1000, TO_ADDRESS, 0x13000), None);
        assert_eq!(cut(0x10000, 0x4000, 0x2000, TO_ADDRESS, 0xf000), None);
        assert_eq!(cut(0x10000, usize::MAX, 0x1000, TO_ADDRESS, 0x20000), None);
        assert_eq!(cut(0x10000, 0x4000, usize::MAX, TO_ADDRESS, 0x20000), None);
    }
}
