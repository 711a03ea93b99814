//! Private memory moves into a file.
//!
//! Chunk by chunk: the chunk's pages are moved to other addresses, where nobody stores to them; a thread that touches the
//! chunk waits meanwhile ([`Guard`]); the pages are written to the file; a shared mapping of the file takes the chunk's
//! place; those who waited go on. If anything fails, the pages move back.
//!
//! While a chunk is away, this thread may touch nothing but its stack and its [`Scratch`]: what the allocator keeps may
//! be in the chunk, and a thread that waits for the chunk may hold the allocator's lock. So nothing is allocated or freed.

use std::os::fd::AsFd;

use rustix::io::Errno;
use terrace_hostmem::fault::{self, Fault};
use terrace_hostmem::{HostRange, PAGE_BYTES};

use crate::guard::Guard;
use crate::pagemap::{Pagemap, WORD_BYTES};
use crate::refusal::Refusal;
use crate::swap_file::SwapFile;
use crate::sys::{self, Scratch, Sharing};

/// The length of a chunk. A thread that touches it waits for as long as it takes to write it to the page cache.
const CHUNK_BYTES: u64 = 16 << 20;
const TABLE_BYTES: u64 = CHUNK_BYTES / PAGE_BYTES * WORD_BYTES;

/// What moves memory.
#[derive(Debug)]
pub(crate) struct Mover<'a> {
    pagemap: Pagemap,
    guard: Guard,
    file: &'a SwapFile,
    /// A part of the pagemap, and a page.
    scratch: Scratch,
}

impl<'a> Mover<'a> {
    /// Moves memory into a sparse file.
    ///
    /// # Errors
    /// `Privilege`, `System`.
    pub(crate) fn new(file: &'a SwapFile) -> Result<Mover<'a>, Refusal> {
        let scratch = Scratch::new(TABLE_BYTES + PAGE_BYTES).map_err(Refusal::system("map memory"))?;
        let pagemap = Pagemap::open().map_err(Refusal::system("open /proc/self/pagemap"))?;
        Ok(Mover { pagemap, guard: Guard::open()?, file, scratch })
    }

    /// Moves the pages of a private mapping, or of a part of it, into the file from `offset` on.
    ///
    /// # Errors
    /// `OtherUserfaultfd`, `System`. The chunks before the failed one have moved.
    ///
    /// # Safety
    /// The range is whole pages of private memory without a file, which the program may load from and store to, and
    /// which has none of this thread's stack.
    pub(crate) unsafe fn move_mapping(&mut self, range: HostRange, offset: u64) -> Result<(), Refusal> {
        for before in (0..range.len).step_by(CHUNK_BYTES as usize) {
            let chunk = HostRange { addr: range.addr + before, len: CHUNK_BYTES.min(range.len - before) };
            // SAFETY: the caller's.
            unsafe { self.move_chunk(chunk, offset + before) }?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Mover::move_mapping`].
    unsafe fn move_chunk(&mut self, chunk: HostRange, offset: u64) -> Result<(), Refusal> {
        let aside = sys::reserve(chunk.len).map_err(Refusal::system("reserve addresses"))?;
        let aside = HostRange { addr: aside, ..chunk };
        if let Err(error) = self.guard.cover(chunk) {
            // SAFETY: the addresses of this function, where nothing is.
            unsafe { sys::unmap(aside) };
            return Err(error);
        }
        // SAFETY: `aside` is new. Those who touch the chunk wait from now on.
        let moved = unsafe { sys::move_pages(chunk, aside.addr, true) };
        let (done, is_aside) = match moved {
            // The kernel may have unmapped `aside` before it failed, and another thread may have the addresses by now.
            Err(error) => (Err(Refusal::system("move it aside")(error)), false),
            Ok(()) => match self.copy_to_file(aside, offset).and_then(|()| self.replace(chunk, offset)) {
                Ok(()) => (Ok(()), true),
                Err(error) => (Err(error), !self.move_back(aside, chunk)),
            },
        };
        if is_aside {
            // SAFETY: the addresses of this function, whose pages are in the file, or back in their place.
            unsafe { sys::unmap(aside) };
        }
        self.guard.wake(chunk);
        done
    }

    /// Returns whether the pages have moved; otherwise they were copied.
    fn move_back(&mut self, aside: HostRange, chunk: HostRange) -> bool {
        // SAFETY: the pages return to their place, where nothing is that anybody needs.
        if unsafe { sys::move_pages(aside, chunk.addr, false) }.is_ok() {
            return true;
        }
        // The kernel had no memory for a mapping. The one in the chunk's place is still the empty one.
        let pages = self.pagemap.private_pages(aside, self.scratch.bytes());
        let copied = pages.and_then(|mut pages| {
            pages.try_for_each(|page| self.guard.put_page(page, chunk.addr + (page - aside.addr)))
        });
        if copied.is_err() {
            // The program's bytes cannot be given back, and it must not go on without them.
            let line = b"terrace: memory cannot be moved back to its place: the kernel has no memory left\n";
            // SAFETY: as many readable bytes; the process ends.
            unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
            std::process::abort();
        }
        false
    }

    /// Writes what is not only zeros. One page at a time: the page cache then has folios of one page, which leave alone
    /// (decision 51).
    fn copy_to_file(&mut self, aside: HostRange, offset: u64) -> Result<(), Refusal> {
        let (words, bytes) = self.scratch.bytes().split_at_mut(TABLE_BYTES as usize);
        let pages = self.pagemap.private_pages(aside, words);
        for page in pages.map_err(Refusal::system("read /proc/self/pagemap"))? {
            // SAFETY: a page that only this function uses. It may be one that the program has made inaccessible.
            unsafe { fault::copy_from(page, bytes) }
                .map_err(|Fault| Refusal::system("read it")(Errno::FAULT))?;
            if bytes.iter().any(|byte| *byte != 0) {
                let written = rustix::io::pwrite(self.file, bytes, offset + (page - aside.addr));
                let is_whole = written.map_err(Refusal::system("write to the swap file"))? == bytes.len();
                if !is_whole {
                    return Err(Refusal::system("write to the swap file")(Errno::NOSPC));
                }
            }
        }
        Ok(())
    }

    fn replace(&self, chunk: HostRange, offset: u64) -> Result<(), Refusal> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the bytes of the chunk are in the file; it is empty in its place.
        unsafe { sys::map_file(chunk, self.file.as_fd(), offset, rights, Sharing::Shared) }
            .map_err(Refusal::system("map the swap file"))?;
        // SAFETY: both are about a child's memory, and about what page faults read.
        unsafe {
            sys::advise(chunk, libc::MADV_DONTFORK).and_then(|()| sys::advise(chunk, libc::MADV_RANDOM))
        }
        .map_err(Refusal::system("advise on the swap file's mapping"))
    }
}
