//! A range of the program's memory that is a mapping of a swap file.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use terrace_hostmem::HostRange;

use crate::changes;
use crate::maps::{self, FileId};
use crate::swap_file::SwapFile;
use crate::sys::{self, Sharing};

/// The files of memory that is private again. Private mappings of them may be there: the process keeps their descriptors,
/// so that no other file gets the inode's number, and [`discard`](crate::discard()) knows them. A forked child has them, too.
static ENDED: Mutex<Vec<Ended>> = Mutex::new(Vec::new());

struct Ended {
    file: SwapFile,
    /// The last list of mappings had none of it.
    is_missing: bool,
}

/// Closes files of which the process has no mapping any more: of which two lists in turn have none, because the kernel makes a
/// list in pieces, and a mapping that moves meanwhile may be in none of them.
pub(crate) fn close_unmapped() {
    let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
    if !ended.is_empty()
        && let Ok(mapped) = maps::files()
    {
        ended.retain_mut(|ended| {
            let was_missing = std::mem::replace(&mut ended.is_missing, !mapped.contains(&ended.file.id()));
            !(was_missing && ended.is_missing)
        });
    }
}

/// A range of the program's memory that is a mapping of a swap file. Its first byte is the file's first byte.
///
/// Children do not inherit it (`MADV_DONTFORK`): they would share the parent's pages. Dropping this leaves it so;
/// [`Swapped::end`] makes it private memory.
#[derive(Debug)]
pub struct Swapped {
    pages: HostRange,
    file: SwapFile,
}

impl Swapped {
    pub(crate) fn new(pages: HostRange, file: SwapFile) -> Swapped {
        Swapped { pages, file }
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

    /// Whether the mapping of any part is still there, among the files that are mapped.
    pub fn is_among(&self, mapped: &HashSet<FileId>) -> bool {
        mapped.contains(&self.file.id())
    }

    /// Whether a mapping with this identifier is one of the swap file.
    pub fn is_file(&self, id: FileId) -> bool {
        self.file.id() == id
    }

    /// Makes the memory private again, as far as the program has not unmapped it, and wherever it has moved it: for all
    /// threads at all times, it has the same bytes. What is not stored to from then on stays in the file, which is closed
    /// when memory is moved for the second time after the program has unmapped all of it.
    ///
    /// Changes of mappings ([`Change`](crate::Change)) wait meanwhile. One that is not announced, as the C library's of its heaps,
    /// may unmap a mapping between the look at the list and the system call: what is mapped in its place by then is lost.
    ///
    /// The caller blocks all signals.
    ///
    /// # Errors
    /// The system's; `TIMEDOUT` if a change does not end. The memory then stays a mapping that children do not inherit, or in part.
    pub fn end(self) -> io::Result<()> {
        let ended = self.map_private();
        ENDED
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Ended { file: self.file, is_missing: false });
        ended
    }

    fn map_private(&self) -> io::Result<()> {
        let _exclusion = changes::exclude()?;
        let mut outcome = Ok(());
        maps::each_overlap(maps::EVERYTHING, |mapping| {
            if self.file.is_behind(&mapping) {
                // SAFETY: a mapping of the same part of the same file, which has all that was stored until now.
                outcome = unsafe {
                    sys::map_file(
                        mapping.range(),
                        self.file.as_fd(),
                        mapping.offset(),
                        mapping.rights(),
                        Sharing::Private,
                    )
                };
            }
            outcome.is_ok()
        })?;
        outcome
    }
}
