//! Functions that change mappings. Regions larger than memory (`paged`) depend on the program's mappings, and are
//! notified before the program changes one.
//!
//! These functions execute the system calls themselves instead of looking up the C library's functions: allocators call
//! them before a lookup is possible. The C library's own allocator maps and unmaps large blocks by system calls that nothing
//! interposes, so its functions that unmap them are interposed, too.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{off_t, off64_t, size_t};
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_vm::Change;

use crate::errno::{ENOMEM, Errno, minus_one};
use crate::paged;
use crate::shim::real::{call_real, functions};

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
    let _change = Change::begin();
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
    let _change = Change::begin();
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
            let _change = Change::begin();
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
    let _change = Change::begin();
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
    let is_over_others = flags & libc::MAP_FIXED != 0 && flags & libc::MAP_FIXED_NOREPLACE == 0;
    if is_over_others {
        paged::before_change(range(addr, len));
    }
    let _change = is_over_others.then(Change::begin);
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

/// Whether the next `free` is that of the C library, and not of an allocator with blocks of another layout.
static IS_OF_C_LIBRARY: AtomicBool = AtomicBool::new(false);

/// Finds out which allocator the program has, when the library is loaded. Other allocators define `__libc_free`, too, so the
/// library counts that the function is in.
pub fn find_allocator() {
    let next = library_of(functions::free.address());
    let is_of_c_library = next.is_some() && next == library_of(functions::gnu_get_libc_version.address());
    IS_OF_C_LIBRARY.store(is_of_c_library, Ordering::Relaxed);
}

/// Where the library with this address is loaded.
fn library_of(address: *const c_void) -> Option<usize> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be looked up.
    let is_found = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
    // SAFETY: zeros are valid, and so is what the function has written.
    is_found.then(|| unsafe { found.assume_init() }.dli_fbase.addr())
}

/// Begins the change that the end of a block is, if it has a mapping of its own. The C library takes no lock while it unmaps
/// one, or moves one to another place.
///
/// # Safety
/// It is null, or a block of the next allocator.
unsafe fn begin_end_of(block: *const c_void) -> Option<Change> {
    /// `IS_MMAPPED` of the C library's malloc, in the size in front of a block.
    const IS_MAPPED: usize = 2;
    Change::begin_if(|| {
        // SAFETY: the size in front of a block of the C library.
        let size = || unsafe { block.cast::<usize>().sub(1).read() };
        !block.is_null() && IS_OF_C_LIBRARY.load(Ordering::Relaxed) && size() & IS_MAPPED != 0
    })
}

/// `free(3)`. `dlsym` frees the text of an earlier error: before this function's own address is known, that text stays.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    static IS_LOOKED_UP: AtomicBool = AtomicBool::new(false);
    if !functions::free.is_found() {
        if IS_LOOKED_UP.swap(true, Ordering::Relaxed) {
            return;
        }
        functions::free.address();
        IS_LOOKED_UP.store(false, Ordering::Relaxed);
    }
    // SAFETY: the caller's.
    let _change = unsafe { begin_end_of(block) };
    call_real!(free: fn(*mut c_void) -> (), block)
}

/// `realloc(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, len: size_t) -> *mut c_void {
    // SAFETY: the caller's.
    let _change = unsafe { begin_end_of(block) };
    call_real!(realloc: fn(*mut c_void, size_t) -> *mut c_void, block, len)
}

/// `reallocarray(3)`.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(block: *mut c_void, count: size_t, len: size_t) -> *mut c_void {
    // SAFETY: the caller's.
    let _change = unsafe { begin_end_of(block) };
    call_real!(reallocarray: fn(*mut c_void, size_t, size_t) -> *mut c_void, block, count, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program's `free` is the one above, here, too.
    #[test]
    fn the_end_of_a_large_block_is_a_change_while_there_is_a_swap_file() {
        const LEN: usize = 4 << 20;
        // SAFETY: takes a length.
        let (small, large) = unsafe { (libc::malloc(100), libc::malloc(LEN)) };
        // SAFETY: null, and blocks of the C library.
        let begun = |block: *mut c_void| unsafe { begin_end_of(block) }.is_some();
        assert!(!begun(large), "no memory has moved");
        let space = terrace_vm::SwapSpace::open("/var/tmp".as_ref()).expect("a disk");
        let swapped = space.back(range(large, LEN), |_| false).expect("moved");
        assert!(begun(large) && !begun(small) && !begun(std::ptr::null_mut()));
        swapped.end().expect("private");
        // SAFETY: blocks that nobody uses any more.
        unsafe {
            let large = libc::realloc(large, 2 * LEN);
            libc::free(large);
            libc::free(small);
        }
    }
}
