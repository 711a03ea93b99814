//! System calls on mappings, made directly.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::maps::{self, Mapping};

/// What [`map_file`] maps a part of a file as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Stores reach the file.
    Shared,
    /// Stores stay in the process.
    Private,
}

fn check(result: libc::c_long) -> io::Result<u64> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result as u64) }
}

/// Puts a mapping of a part of a file, with these rights, in the place of what is mapped at a range. Atomic: another
/// thread finds the one or the other.
///
/// # Safety
/// The range is memory of the program, which finds the same bytes in the file.
pub(crate) unsafe fn map_file(
    range: HostRange,
    file: BorrowedFd<'_>,
    offset: u64,
    rights: libc::c_int,
    sharing: Sharing,
) -> io::Result<()> {
    let kind = match sharing {
        Sharing::Shared => libc::MAP_SHARED,
        Sharing::Private => libc::MAP_PRIVATE | libc::MAP_NORESERVE,
    };
    // SAFETY: the caller's.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            range.addr,
            range.len,
            rights,
            kind | libc::MAP_FIXED,
            file.as_raw_fd(),
            offset,
        )
    };
    check(result).map(|_| ())
}

/// Maps memory without a file, which reads as zeros, in the place of what is mapped at a range.
///
/// # Safety
/// The program has given up the contents of the range.
pub(crate) unsafe fn map_zeros(range: HostRange, rights: libc::c_int) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the caller's.
    check(unsafe { libc::syscall(libc::SYS_mmap, range.addr, range.len, rights, flags, -1, 0) }).map(|_| ())
}

/// Maps the first bytes of a file, shared, wherever the kernel has room.
pub(crate) fn map_shared(file: BorrowedFd<'_>, len: u64) -> io::Result<u64> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // The whole register counts: a literal would have 32 bits.
    let (anywhere, start) = (0u64, 0u64);
    // SAFETY: a new mapping.
    check(unsafe {
        libc::syscall(libc::SYS_mmap, anywhere, len, rights, libc::MAP_SHARED, file.as_raw_fd(), start)
    })
}

/// How the kernel lists a mapping of a file.
pub(crate) fn list_mapping_of(file: BorrowedFd<'_>) -> io::Result<Mapping> {
    let (descriptor, kind) = (file.as_raw_fd(), libc::MAP_SHARED);
    // SAFETY: a new mapping, wherever the kernel has room, that nobody can access.
    let addr =
        check(unsafe { libc::syscall(libc::SYS_mmap, 0, PAGE_BYTES, libc::PROT_NONE, kind, descriptor, 0) })?;
    let found = maps::at(addr);
    // SAFETY: the mapping from above.
    unsafe { unmap(HostRange { addr, len: PAGE_BYTES }) };
    found?.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Private memory of this function's caller, which is not the allocator's: its allocation and its use touch nothing else.
#[derive(Debug)]
pub(crate) struct Scratch(HostRange);

impl Scratch {
    /// # Errors
    /// The system's.
    pub(crate) fn new(len: u64) -> io::Result<Scratch> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, wherever the kernel has room.
        let addr = check(unsafe { libc::syscall(libc::SYS_mmap, 0, len, rights, flags, -1, 0) })?;
        Ok(Scratch(HostRange { addr, len }))
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: memory of this object alone, readable and writable, which is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.0.addr as *mut u8, self.0.len as usize) }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference to it any more.
        unsafe { unmap(self.0) };
    }
}

/// Reserves addresses.
pub(crate) fn reserve(len: u64) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping, wherever the kernel has room.
    check(unsafe { libc::syscall(libc::SYS_mmap, 0, len, libc::PROT_NONE, flags, -1, 0) })
}

/// Moves the pages of a range to other addresses, over what is mapped there. With `is_kept`, the range stays mapped, and
/// is empty.
///
/// # Safety
/// Both are whole pages of this process. Nobody needs what is mapped at the other addresses, and those who need the
/// pages at their old ones wait until they are back, or find the same bytes there.
pub(crate) unsafe fn move_pages(range: HostRange, to: u64, is_kept: bool) -> io::Result<()> {
    let kept = if is_kept { libc::MREMAP_DONTUNMAP } else { 0 };
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | kept;
    // SAFETY: the caller's.
    check(unsafe { libc::syscall(libc::SYS_mremap, range.addr, range.len, range.len, flags, to) }).map(|_| ())
}

/// Unmaps a range.
///
/// # Safety
/// Nobody uses it any more.
pub(crate) unsafe fn unmap(range: HostRange) {
    // SAFETY: the caller's.
    let result = unsafe { libc::syscall(libc::SYS_munmap, range.addr, range.len) };
    debug_assert_eq!(result, 0, "whole pages are unmapped");
}

/// `madvise(2)`.
///
/// # Safety
/// The advice has no effect on the bytes of the range.
pub(crate) unsafe fn advise(range: HostRange, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the caller's.
    check(unsafe { libc::syscall(libc::SYS_madvise, range.addr, range.len, advice) }).map(|_| ())
}
