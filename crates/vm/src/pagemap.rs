//! Which pages of a range have bytes of their own, from `/proc/PID/pagemap` (see the kernel's `pagemap.rst`).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use terrace_hostmem::{HostRange, PAGE_BYTES};

/// The page is mapped.
const PRESENT: u64 = 1 << 63;
/// The page is in the kernel's swap.
const SWAPPED: u64 = 1 << 62;
/// The page is one of a file, or of shared memory.
const OF_FILE: u64 = 1 << 61;

/// `struct page_region` of `linux/fs.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong =
    3 << 30 | (size_of::<ScanArgument>() as libc::c_ulong) << 16 | (b'f' as libc::c_ulong) << 8 | 16;
/// Regions that one request gives.
const REGIONS: usize = 512;

/// Bytes of the table for one page.
pub(crate) const WORD_BYTES: u64 = 8;

/// The kernel's table.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    pub(crate) fn open() -> io::Result<Pagemap> {
        Ok(Pagemap(File::open("/proc/self/pagemap")?))
    }

    /// The table of another process.
    ///
    /// # Errors
    /// The system's.
    pub fn open_of(pid: u32) -> io::Result<Pagemap> {
        Ok(Pagemap(File::open(format!("/proc/{pid}/pagemap"))?))
    }

    /// The addresses of the pages of a range that are private to the process, and not only zeros that were never touched.
    /// `words` has room for [`WORD_BYTES`] for each page. Nothing is allocated.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn private_pages<'a>(
        &self,
        range: HostRange,
        words: &'a mut [u8],
    ) -> io::Result<impl Iterator<Item = u64> + use<'a>> {
        let words = &mut words[..(range.len / PAGE_BYTES * WORD_BYTES) as usize];
        self.0.read_exact_at(words, range.addr / PAGE_BYTES * WORD_BYTES)?;
        let words = words.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word));
        let pages = (range.addr..range.addr + range.len).step_by(PAGE_BYTES as usize);
        let is_private = |word: u64| word & SWAPPED != 0 || word & PRESENT != 0 && word & OF_FILE == 0;
        Ok(pages.zip(words).filter_map(move |(page, word)| is_private(word).then_some(page)))
    }
    /// The parts of a range that `Pagemap::private_pages` would give. Where no page has ever been, nothing is read: memory that is
    /// only reserved costs nothing. Linux 6.7.
    ///
    /// # Errors
    /// The system's.
    pub fn private_ranges(&self, range: HostRange) -> io::Result<Vec<HostRange>> {
        let (mut found, mut start, end) = (Vec::new(), range.addr, range.addr + range.len);
        let mut regions = [PageRegion::default(); REGIONS];
        while start < end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                flags: 0,
                start,
                end,
                walk_end: 0,
                vec: regions.as_mut_ptr().addr() as u64,
                vec_len: REGIONS as u64,
                max_pages: 0,
                category_inverted: PAGE_IS_FILE,
                category_mask: PAGE_IS_FILE,
                category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            };
            // SAFETY: the structure of this request, with room for so many regions.
            let count = unsafe { libc::ioctl(self.0.as_raw_fd(), PAGEMAP_SCAN as _, &raw mut argument) };
            let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
            let given = regions.iter().take(count);
            found
                .extend(given.map(|region| HostRange { addr: region.start, len: region.end - region.start }));
            if argument.walk_end <= start {
                break;
            }
            start = argument.walk_end;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::sys;

    #[test]
    fn the_few_pages_of_a_large_reservation_are_found_at_once() {
        let range = HostRange { addr: sys::reserve(4 << 40).unwrap(), len: 4 << 40 };
        let places = [(1 << 30, 3), (3 << 40, 1), (range.len - PAGE_BYTES, 1)];
        let places =
            places.map(|(offset, pages)| HostRange { addr: range.addr + offset, len: pages * PAGE_BYTES });
        for place in places {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a part of this test's reservation, which is stored to when it is accessible.
            unsafe {
                assert_eq!(libc::mprotect(place.addr as *mut _, place.len as usize, rights), 0);
                std::ptr::write_bytes(place.addr as *mut u8, 1, place.len as usize);
            }
        }
        let begin = Instant::now();
        let found = Pagemap::open().unwrap().private_ranges(range).unwrap();
        let elapsed = begin.elapsed();
        assert_eq!(found, places);
        // Reading the entries of all pages takes 2 s.
        assert!(elapsed < Duration::from_millis(500), "{elapsed:?}");
        // SAFETY: nobody uses it any more.
        unsafe { sys::unmap(range) };
    }

    #[test]
    fn more_regions_than_one_request_gives_are_found() {
        let pages = 3 * REGIONS as u64;
        let range = HostRange { addr: sys::reserve(pages * PAGE_BYTES).unwrap(), len: pages * PAGE_BYTES };
        // SAFETY: every other page of this test's memory is stored to. Huge pages would have all of them come.
        unsafe {
            sys::advise(range, libc::MADV_NOHUGEPAGE).unwrap();
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(range.addr as *mut _, range.len as usize, rights), 0);
            for page in (0..pages).step_by(2) {
                std::ptr::write_volatile((range.addr + page * PAGE_BYTES) as *mut u8, 1);
            }
        }
        let found = Pagemap::open().unwrap().private_ranges(range).unwrap();
        let expected: Vec<_> = (0..pages)
            .step_by(2)
            .map(|page| HostRange { addr: range.addr + page * PAGE_BYTES, len: PAGE_BYTES })
            .collect();
        assert_eq!(found, expected);
        // SAFETY: nobody uses it any more.
        unsafe { sys::unmap(range) };
    }
}
