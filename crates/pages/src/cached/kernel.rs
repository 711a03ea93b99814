//! System calls on shared file mappings and their files.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::sys::Mapping;

/// Pages that one call of `mincore` tells of.
pub(super) const WINDOW_PAGES: u64 = 1024;

/// The advice has no effect on what the memory holds, for a shared mapping of a file; but for `MADV_DONTNEED`, for no
/// memory.
fn advise(range: HostRange, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: the range is a shared mapping of a file, as `CachedSource` demands: the kernel keeps its bytes with each
    // advice that this module gives, and checks the range.
    let result = unsafe { libc::madvise(range.addr as *mut _, range.len as usize, advice) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Has page faults read the page that they need and no others: also in folios of one page, which leave alone.
pub(super) fn expect_random(range: HostRange) -> io::Result<()> {
    advise(range, libc::MADV_RANDOM)
}

/// Undoes [`expect_random`].
pub(super) fn expect_nothing(range: HostRange) {
    // Fails if the mapping is gone.
    let _ = advise(range, libc::MADV_NORMAL);
}

/// Drops clean pages from the page tables and from the page cache. Returns which ones stay, because they are in use.
///
/// `MADV_PAGEOUT` splits large folios, but only finds pages by the page table of this process, and splitting a folio
/// empties the entries of its other pages. `fadvise` finds them in the page cache, but splits no folio. So a page is
/// dropped by both, or mapped and then dropped by both.
///
/// Other memory may be mapped at the range of a swap file's mapping by now, which `MADV_DONTNEED` would empty. A swap file
/// has folios of one page, which leave without it.
pub(super) fn drop_pages(
    file: BorrowedFd<'_>,
    offset: u64,
    range: HostRange,
    is_swap_file: bool,
) -> Vec<bool> {
    // All of these are advice: what they left is found by `cached`.
    let _ = advise(range, libc::MADV_PAGEOUT);
    drop_unmapped(file, offset, range.len);
    if cached_count(file, offset, range.len) == Some(0) {
        return Vec::new();
    }
    let left = cached(file, offset, range.len).unwrap_or_default();
    for index in (0..left.len()).filter(|index| left[*index]) {
        let before = index as u64 * PAGE_BYTES;
        let page = HostRange { addr: range.addr + before, len: PAGE_BYTES.min(range.len - before) };
        let _ = advise(page, libc::MADV_POPULATE_READ);
        let _ = advise(page, libc::MADV_PAGEOUT);
        if !is_swap_file {
            let _ = advise(page, libc::MADV_DONTNEED);
        }
        drop_unmapped(file, offset + before, page.len);
    }
    cached(file, offset, range.len).unwrap_or_default()
}

/// Drops clean pages that no process has mapped from the page cache.
fn drop_unmapped(file: BorrowedFd<'_>, offset: u64, len: u64) {
    let len = std::num::NonZero::new(len.next_multiple_of(PAGE_BYTES));
    let _ = rustix::fs::fadvise(file, offset, len, rustix::fs::Advice::DontNeed);
}

/// Bytes of a range up to the end of its last page that this process has mapped: 0 if it has mapped none, or the kernel
/// does not tell.
pub(super) fn mapped_until(range: HostRange) -> u64 {
    /// In a word of `/proc/self/pagemap`.
    const PRESENT: u64 = 1 << 63;
    let mut words = vec![0; range.len.div_ceil(PAGE_BYTES) as usize * size_of::<u64>()];
    let first = range.addr / PAGE_BYTES * size_of::<u64>() as u64;
    let read = std::fs::File::open("/proc/self/pagemap").and_then(|map| map.read_exact_at(&mut words, first));
    let (words, _) = words.as_chunks();
    let last = words.iter().rposition(|word| u64::from_ne_bytes(*word) & PRESENT != 0);
    read.ok().and(last).map_or(0, |last| (last as u64 + 1) * PAGE_BYTES)
}

/// Begins to read a part of a file into the page cache, in folios of one page.
pub(super) fn read_ahead(file: BorrowedFd<'_>, offset: u64, len: u64) {
    // Advisory: what is not read is read by page faults.
    let _ = rustix::fs::fadvise(file, offset, std::num::NonZero::new(len), rustix::fs::Advice::WillNeed);
}

/// Begins to write the dirty pages of a part of a file.
pub(super) fn begin_write_back(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    sync_range(file, offset, len, libc::SYNC_FILE_RANGE_WRITE)
}

/// Waits until no page of a part of a file is being written.
///
/// # Errors
/// That of any write of this file since the last call for this description.
pub(super) fn end_write_back(file: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    sync_range(file, offset, len, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
}

fn sync_range(file: BorrowedFd<'_>, offset: u64, len: u64, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: takes a descriptor and numbers.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, len as i64, flags) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Which pages of a part of a file, of at most [`WINDOW_PAGES`], are in the page cache. `None` when the kernel does not tell. It is asked
/// about a mapping of our own: at the addresses of a swap file's mapping, other memory may be mapped by now.
pub(super) fn cached(file: BorrowedFd<'_>, offset: u64, len: u64) -> Option<Vec<bool>> {
    let mut pages = vec![0u8; len.div_ceil(PAGE_BYTES) as usize];
    assert!(pages.len() as u64 <= WINDOW_PAGES);
    let window = Mapping::of_file_part(file, offset, len).ok()?;
    // SAFETY: a mapping of this function. The kernel writes one byte for each of its pages; there is room for them.
    let result =
        unsafe { libc::mincore(window.range().addr as *mut _, len as usize, pages.as_mut_ptr().cast()) };
    (result == 0).then(|| pages.into_iter().map(|page| page & 1 != 0).collect())
}

/// How many pages of a part of a file are in the page cache. The cost depends on that number and not on the length.
/// `None` before Linux 6.5.
pub(super) fn cached_count(file: BorrowedFd<'_>, offset: u64, len: u64) -> Option<u64> {
    /// The number of `cachestat`, the same on all architectures.
    const CACHESTAT: libc::c_long = 451;
    let range = [offset, len];
    // Pages in the cache, dirty ones, ones being written, evicted ones, ones evicted recently.
    let mut counts = [0u64; 5];
    // SAFETY: the structures of `cachestat` are two and five numbers of 64 bits.
    let result =
        unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0) };
    (result == 0).then_some(counts[0])
}
