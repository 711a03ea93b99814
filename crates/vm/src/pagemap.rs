//! Which pages of a range have bytes of their own, from `/proc/PID/pagemap` (see the kernel's `pagemap.rst`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use terrace_hostmem::{HostRange, PAGE_BYTES};

/// The page is mapped.
const PRESENT: u64 = 1 << 63;
/// The page is in the kernel's swap.
const SWAPPED: u64 = 1 << 62;
/// The page is one of a file, or of shared memory.
const OF_FILE: u64 = 1 << 61;

/// Bytes of the table for one page.
pub const WORD_BYTES: u64 = 8;

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
    pub fn private_pages<'a>(
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
}
