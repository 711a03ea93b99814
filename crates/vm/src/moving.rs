//! Private memory moves into a file.
//!
//! Chunk by chunk: the chunk's pages are moved to other addresses, where nobody stores to them; a thread that touches the
//! chunk waits meanwhile ([`Guard`]); the pages are written to the file; a shared mapping of the file takes the chunk's
//! place; those who waited go on. If anything fails, the pages move back.

use std::os::fd::AsFd;

use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::guard::Guard;
use crate::pagemap::Pagemap;
use crate::refusal::Refusal;
use crate::swap_file::SwapFile;
use crate::sys::{self, Sharing};

/// The length of a chunk. The longest wait of a thread that touches it: writing it to the page cache takes some 30 ms.
const CHUNK_BYTES: u64 = 64 << 20;

/// What moves memory.
pub(crate) struct Mover<'a> {
    /// Of the process.
    pub(crate) pagemap: &'a Pagemap,
    /// `None` if no other thread can touch the memory.
    pub(crate) guard: Option<&'a Guard>,
    /// A sparse file.
    pub(crate) file: &'a SwapFile,
}

impl Mover<'_> {
    /// Moves the pages of a private mapping, or of a part of it, into the file from `offset` on.
    ///
    /// # Errors
    /// `OtherUserfaultfd`, `System`. The chunks before the failed one have moved.
    ///
    /// # Safety
    /// The range is whole pages of private memory without a file, which the program may load from and store to.
    pub(crate) unsafe fn move_mapping(&self, range: HostRange, offset: u64) -> Result<(), Refusal> {
        for before in (0..range.len).step_by(CHUNK_BYTES as usize) {
            let chunk = HostRange { addr: range.addr + before, len: CHUNK_BYTES.min(range.len - before) };
            // SAFETY: the caller's.
            unsafe { self.move_chunk(chunk, offset + before) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Mover::move_mapping`].
    unsafe fn move_chunk(&self, chunk: HostRange, offset: u64) -> Result<(), Refusal> {
        if let Some(guard) = self.guard {
            guard.cover(chunk)?;
        }
        let aside = HostRange {
            addr: sys::reserve(chunk.len).map_err(Refusal::system("reserve addresses"))?,
            ..chunk
        };
        // SAFETY: `aside` is new. Those who touch the chunk wait from now on; without a guard, nobody does.
        let moved = unsafe { sys::move_pages(chunk, aside.addr, true) };
        let done = moved.map_err(Refusal::system("move it aside")).and_then(|()| {
            let replaced = self.copy_to_file(aside, offset).and_then(|()| self.replace(chunk, offset));
            if replaced.is_err() {
                // SAFETY: the pages return to their place, which is empty.
                unsafe { sys::move_pages(aside, chunk.addr, false) }
                    .map_err(Refusal::system("move it back"))?;
            }
            replaced
        });
        // SAFETY: the addresses of this function, whose pages are in the file, or back in their place.
        unsafe { sys::unmap(aside) };
        if let Some(guard) = self.guard {
            guard.wake(chunk);
        }
        done
    }

    /// Writes what is not only zeros. One page at a time: the page cache then has folios of one page, which leave alone
    /// (decision 51).
    fn copy_to_file(&self, aside: HostRange, offset: u64) -> Result<(), Refusal> {
        let pages = self.pagemap.private_pages(aside).map_err(Refusal::system("read /proc/self/pagemap"))?;
        for page in pages {
            // SAFETY: a page that only this function knows of, as long as the slice lives.
            let bytes = unsafe { std::slice::from_raw_parts(page as *const u8, PAGE_BYTES as usize) };
            if bytes.iter().any(|byte| *byte != 0) {
                let written = rustix::io::pwrite(self.file, bytes, offset + (page - aside.addr));
                let is_whole = written.map_err(Refusal::system("write to the swap file"))? == bytes.len();
                if !is_whole {
                    return Err(Refusal::system("write to the swap file")(rustix::io::Errno::NOSPC));
                }
            }
        }
        Ok(())
    }

    fn replace(&self, chunk: HostRange, offset: u64) -> Result<(), Refusal> {
        // SAFETY: the bytes of the chunk are in the file; it is empty in its place.
        unsafe { sys::map_file(chunk, self.file.as_fd(), offset, Sharing::Shared) }
            .map_err(Refusal::system("map the swap file"))?;
        // SAFETY: both are about a child's memory, and about what page faults read.
        let advised = unsafe {
            sys::advise(chunk, libc::MADV_DONTFORK).and_then(|()| sys::advise(chunk, libc::MADV_RANDOM))
        };
        debug_assert!(advised.is_ok(), "a mapping takes advice: {advised:?}");
        Ok(())
    }
}
