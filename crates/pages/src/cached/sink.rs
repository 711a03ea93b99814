//! Where reads put the bytes that nobody needs.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use terrace_hostmem::PAGE_BYTES;

use crate::store::FrameMemory;
use crate::sys::Mapping;

/// One page for all reads: they bring pages into the page cache, and nobody needs their bytes.
#[derive(Debug)]
pub(super) struct Sink {
    mapping: Mapping,
    pub(super) file: OwnedFd,
}

impl FrameMemory for Sink {
    fn addr(&self, _frame: u32) -> u64 {
        self.mapping.range().addr
    }
}

impl Sink {
    pub(super) fn new() -> std::io::Result<Sink> {
        // SAFETY: a string that ends, and flags.
        let file = unsafe { libc::memfd_create(c"terrace-sink".as_ptr(), libc::MFD_CLOEXEC) };
        if file < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: just opened.
        let file = unsafe { OwnedFd::from_raw_fd(file) };
        rustix::fs::ftruncate(&file, PAGE_BYTES)?;
        Ok(Sink { mapping: Mapping::of_file(file.as_fd(), PAGE_BYTES)?, file })
    }
}
