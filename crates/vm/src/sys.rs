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

/// For a mapping wherever the kernel has room.
const ANYWHERE: u64 = 0;

/// `mmap(2)`. Its arguments have types: of a literal, only 32 bits of a register or of the stack would be defined.
///
/// # Safety
/// As for the system call: what is mapped at these addresses is replaced with `MAP_FIXED`.
unsafe fn map(
    addr: u64,
    len: u64,
    rights: libc::c_int,
    flags: libc::c_int,
    file: Option<BorrowedFd<'_>>,
    offset: u64,
) -> io::Result<u64> {
    let (rights, flags) = (libc::c_long::from(rights), libc::c_long::from(flags));
    let descriptor = libc::c_long::from(file.map_or(-1, |file| file.as_raw_fd()));
    // SAFETY: the caller's.
    check(unsafe { libc::syscall(libc::SYS_mmap, addr, len, rights, flags, descriptor, offset) })
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
    unsafe { map(range.addr, range.len, rights, kind | libc::MAP_FIXED, Some(file), offset) }.map(|_| ())
}

/// Maps memory without a file, which reads as zeros, in the place of what is mapped at a range.
///
/// # Safety
/// The program has given up the contents of the range.
pub(crate) unsafe fn map_zeros(range: HostRange, rights: libc::c_int) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the caller's.
    unsafe { map(range.addr, range.len, rights, flags, None, 0) }.map(|_| ())
}

/// Maps the first bytes of a file, shared, wherever the kernel has room.
pub(crate) fn map_shared(file: BorrowedFd<'_>, len: u64) -> io::Result<u64> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping.
    unsafe { map(ANYWHERE, len, rights, libc::MAP_SHARED, Some(file), 0) }
}

/// How the kernel lists a mapping of a file.
pub(crate) fn list_mapping_of(file: BorrowedFd<'_>) -> io::Result<Mapping> {
    // SAFETY: a new mapping that nobody can access.
    let addr = unsafe { map(ANYWHERE, PAGE_BYTES, libc::PROT_NONE, libc::MAP_SHARED, Some(file), 0) }?;
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
        // SAFETY: a new mapping.
        let addr = unsafe { map(ANYWHERE, len, rights, flags, None, 0) }?;
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
    // SAFETY: a new mapping.
    unsafe { map(ANYWHERE, len, libc::PROT_NONE, flags, None, 0) }
}

/// Moves the pages of a range to other addresses, over what is mapped there. With `is_kept`, the range stays mapped, and
/// is empty.
///
/// # Safety
/// Both are whole pages of this process. Nobody needs what is mapped at the other addresses, and those who need the
/// pages at their old ones wait until they are back, or find the same bytes there.
pub(crate) unsafe fn move_pages(range: HostRange, to: u64, is_kept: bool) -> io::Result<()> {
    let kept = if is_kept { libc::MREMAP_DONTUNMAP } else { 0 };
    let flags = libc::c_long::from(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | kept);
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
