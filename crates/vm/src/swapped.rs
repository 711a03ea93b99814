//! A range of the program's memory that is a mapping of a swap file.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use terrace_hostmem::HostRange;

use crate::maps::{self, FileId};
use crate::swap_file::SwapFile;
use crate::sys::{self, Sharing};

/// A range of the program's memory that is a mapping of a swap file. Its first byte is the file's first byte.
///
/// Children do not inherit it (`MADV_DONTFORK`): they would share the parent's pages. Dropping this leaves it so;
/// [`Swapped::end`] makes it private memory.
#[derive(Debug)]
pub struct Swapped {
    pages: HostRange,
    file: SwapFile,
    id: FileId,
}

impl Swapped {
    /// # Errors
    /// The system's, when the mappings cannot be listed.
    pub(crate) fn new(pages: HostRange, file: SwapFile) -> io::Result<Swapped> {
        let id = maps::file_at(pages.addr)?.ok_or(io::ErrorKind::NotFound)?;
        Ok(Swapped { pages, file, id })
    }

    /// The pages.
    pub fn pages(&self) -> HostRange {
        self.pages
    }

    /// Another description of the swap file.
    ///
    /// # Errors
    /// The system's.
    pub fn open_file(&self) -> io::Result<OwnedFd> {
        self.file.open_again()
    }

    /// The swap file: the page at the first address is its first one.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether the mapping of any part is still there, among the files that are mapped.
    pub fn is_among(&self, mapped: &HashSet<FileId>) -> bool {
        mapped.contains(&self.id)
    }

    /// Makes the memory private again, as far as the program has not unmapped it, and wherever it has moved it: for all
    /// threads at all times, it has the same bytes. What is not stored to from then on stays in the file.
    ///
    /// # Errors
    /// The system's. The memory then stays a mapping that children do not inherit, or in part.
    pub fn end(self) -> io::Result<()> {
        for mapping in maps::list(maps::EVERYTHING)? {
            if let Some(offset) = mapping.offset_if_shared(self.id) {
                // SAFETY: a mapping of the same part of the same file, which has all that was stored until now.
                unsafe { sys::map_file(mapping.range(), self.file.as_fd(), offset, Sharing::Private) }?;
            }
        }
        Ok(())
    }
}
