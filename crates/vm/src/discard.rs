//! Memory that the program gives up, as `madvise(2)` gives up private memory. In a swap file, its pages become a hole.
//! Where it was in one before, and is private again, the kernel would read the file's bytes again: memory without a file
//! takes its place. The file keeps them, because children may have private mappings of it.
//!
//! The kernel's list of mappings says where swap files are mapped, because the C library maps, moves and unmaps memory by
//! system calls that nothing interposes: a file of the program's may be in the place of one by now.
//!
//! These functions neither allocate nor take a lock: allocators call them.

use std::io;

use rustix::io::Errno;
use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::maps::{self, Mapping};
use crate::{known_files, sys};

/// `madvise(2)` with `MADV_DONTNEED` or `MADV_FREE`, for memory that may be in swap files.
///
/// # Errors
/// Those of the system call; `NOMEM`, too, when the list of mappings cannot be read: allocators repeat the call for ever after
/// `AGAIN`. A part of the range may be given up then.
///
/// # Safety
/// As for the system call.
pub unsafe fn discard(range: HostRange, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the caller's.
    let advise = |advice| unsafe { sys::advise(range, advice) };
    if !known_files::is_any() {
        return advise(advice);
    }
    // The kernel takes this advice only for memory without a file, and says EINVAL of other memory.
    let is_file = matches!(advise(libc::MADV_FREE), Err(error) if error.raw_os_error() == Some(libc::EINVAL));
    let whole = range.len.checked_next_multiple_of(PAGE_BYTES).map(|len| HostRange { len, ..range });
    match whole {
        Some(pages) if is_file && range.addr.is_multiple_of(PAGE_BYTES) => {
            // SAFETY: the caller's.
            unsafe { discard_mappings(pages, advice) }
        }
        _ => advise(advice),
    }
}

/// # Safety
/// As for [`discard`].
unsafe fn discard_mappings(pages: HostRange, advice: libc::c_int) -> io::Result<()> {
    let (mut at, end) = (pages.addr, pages.addr.saturating_add(pages.len));
    let mut outcome = Ok(());
    let listed = maps::each_overlap(pages, |mapping| {
        let mapped = mapping.range();
        // A part that was mapped anew may be listed again, with adjacent memory.
        let from = mapped.addr.max(at);
        let part = HostRange { addr: from, len: (mapped.addr + mapped.len).saturating_sub(from) };
        if from > at {
            outcome = Err(Errno::NOMEM.into());
        }
        at = from + part.len;
        if part.len == 0 {
            return true;
        }
        // SAFETY: the caller's.
        let discarded = unsafe { discard_part(&mapping, part, advice) };
        if let Err(error) = discarded {
            outcome = Err(error);
        }
        true
    });
    listed.map_err(|_| Errno::NOMEM)?;
    if at < end { Err(Errno::NOMEM.into()) } else { outcome }
}

/// # Safety
/// As for [`discard`]; the part is one of the mapping.
unsafe fn discard_part(mapping: &Mapping<&[u8]>, part: HostRange, advice: libc::c_int) -> io::Result<()> {
    let is_known = known_files::has(mapping);
    let advice = match advice {
        // Only of a swap file, whose pages are this memory alone.
        _ if is_known && mapping.is_shared() => libc::MADV_REMOVE,
        // Of locked memory, this is an error.
        _ if is_known => libc::MADV_DONTNEED,
        _ => advice,
    };
    // SAFETY: the caller's.
    unsafe { sys::advise(part, advice) }?;
    if is_known && !mapping.is_shared() {
        // SAFETY: the program has given it up.
        unsafe { sys::map_zeros(part, mapping.rights()) }?;
    }
    Ok(())
}

/// Whether a part of a range is in a swap file, as far as the list of mappings can be read.
pub fn has_swapped(range: HostRange) -> bool {
    let mut is_found = false;
    if known_files::is_any() {
        let listed = maps::each_overlap(range, |mapping| {
            is_found = mapping.is_shared() && known_files::has(&mapping);
            !is_found
        });
        is_found |= listed.is_err();
    }
    is_found
}
