//! System calls on mappings: the only place in this crate that passes addresses of a region to the kernel.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use terrace_hostmem::fault::{self, Fault};
use terrace_hostmem::{AtomicOp, HostRange};

/// The most pages per call of `mincore`.
pub(crate) const MINCORE_PAGES: usize = 256;

/// Locks a range of a shared file mapping into memory, and reads missing pages.
///
/// # Errors
/// `ENOMEM` beyond a limit, or when part of the range is not mapped; `EAGAIN` when a page cannot be read.
pub(crate) fn lock(range: HostRange) -> io::Result<()> {
    // SAFETY: locking changes where pages are, not what they hold; the kernel checks the range.
    Ok(unsafe { rustix::mm::mlock(range.addr as *mut _, range.len as usize) }?)
}

/// Unlocks a range.
///
/// # Errors
/// `ENOMEM` when part of the range is not mapped.
pub(crate) fn unlock(range: HostRange) -> io::Result<()> {
    // SAFETY: as for `lock`.
    Ok(unsafe { rustix::mm::munlock(range.addr as *mut _, range.len as usize) }?)
}

/// Turns readahead around page faults off for a range.
pub(crate) fn expect_random(range: HostRange) -> io::Result<()> {
    advise(range, Advice::Random)
}

/// Undoes [`expect_random`].
pub(crate) fn expect_nothing(range: HostRange) -> io::Result<()> {
    advise(range, Advice::Normal)
}

/// Removes the pages of a shared file mapping from the page table. They stay in the page cache, including stored bytes.
pub(crate) fn unmap_pages(range: HostRange) -> io::Result<()> {
    advise(range, Advice::LinuxDontNeed)
}

fn advise(range: HostRange, advice: Advice) -> io::Result<()> {
    // SAFETY: the range is a shared mapping of a file, as `Source` demands: none of the advices used here changes what
    // such memory holds.
    Ok(unsafe { rustix::mm::madvise(range.addr as *mut _, range.len as usize, advice) }?)
}

/// Whether the page cache contains all pages of a range of a file mapping, at this time. The range starts at a page and
/// is not longer than 1 MiB.
pub(crate) fn is_cached(range: HostRange) -> bool {
    cached_pages(range) == Some((range.len as usize).div_ceil(4096))
}

/// How many pages of such a range the page cache contains; `None` when the kernel does not report it.
pub(crate) fn cached_pages(range: HostRange) -> Option<usize> {
    cached(range).map(|pages| pages.into_iter().filter(|&page| page).count())
}

/// Which pages of such a range the page cache contains; `None` when the kernel does not report it. False beyond the
/// range.
pub(crate) fn cached(range: HostRange) -> Option<[bool; MINCORE_PAGES]> {
    let page_count = (range.len as usize).div_ceil(4096);
    let mut present = [0u8; MINCORE_PAGES];
    if page_count > present.len() {
        return None;
    }
    // SAFETY: the kernel checks the range, and writes one byte for each of its pages; there is room for them.
    let result =
        unsafe { libc::mincore(range.addr as *mut _, range.len as usize, present.as_mut_ptr().cast()) };
    (result == 0).then(|| present.map(|page| page & 1 != 0))
}

/// Writes the dirty pages of a part of a file to the device, and waits for that. Not durable by itself: the device may
/// cache it.
///
/// # Errors
/// The error of the device.
pub(crate) fn write_back(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: takes a descriptor and numbers.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, len as i64, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Locks a part of a file for an open file description (`fcntl`, independent of `flock`). The lock lasts as long as any
/// reference to the description, including those of requests under way.
///
/// # Errors
/// `EAGAIN` or `EACCES` while another description holds the lock.
pub(crate) fn lock_description(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    // SAFETY: all-zero is a valid value: no process, as the kernel demands.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    (lock.l_start, lock.l_len) = (offset as i64, len as i64);
    // SAFETY: the structure is initialised, and outlives the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A shared mapping of a file, or anonymous memory; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    range: HostRange,
}

impl Mapping {
    /// Maps the first `len` bytes of a file.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub(crate) fn of_file(file: impl AsFd, len: u64) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing.
        let addr = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                0,
            )
        }?;
        Ok(Mapping { range: HostRange { addr: addr as u64, len } })
    }

    /// Maps zero pages, which take memory only when touched.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub(crate) fn of_zeros(len: usize) -> io::Result<Mapping> {
        // SAFETY: as for `of_file`.
        let addr = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        Ok(Mapping { range: HostRange { addr: addr as u64, len: len as u64 } })
    }

    pub(crate) fn range(&self) -> HostRange {
        self.range
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps the range that the constructor mapped. Owners of a mapping that hand out its addresses ensure
        // that the addresses are not used afterwards; accesses of peers survive such a use.
        let _ = unsafe { rustix::mm::munmap(self.range.addr as *mut _, self.range.len as usize) };
    }
}

/// Copies from a region's memory. Returns an error if the mapping is gone or the file behind it too short.
///
/// # Errors
/// [`Fault`].
pub(crate) fn copy_out(addr: u64, out: &mut [u8]) -> Result<(), Fault> {
    // SAFETY: `addr` lies in a region's mapping, shared memory without Rust references to it, or the mapping is gone.
    unsafe { fault::copy_from(addr, out) }
}

/// Copies to a region's memory.
///
/// # Errors
/// [`Fault`]; the bytes before the fault are then written.
pub(crate) fn copy_in(addr: u64, data: &[u8]) -> Result<(), Fault> {
    // SAFETY: as for `copy_out`.
    unsafe { fault::copy_to(addr, data) }
}

/// Performs an atomic operation on a region's memory, at a multiple of 8, and returns the prior value.
///
/// # Errors
/// [`Fault`].
pub(crate) fn atomic(addr: u64, op: AtomicOp) -> Result<u64, Fault> {
    // SAFETY: as for `copy_out`, and the address is aligned.
    unsafe { fault::atomic(addr, op) }
}
