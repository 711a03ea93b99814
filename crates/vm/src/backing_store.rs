//! Where pages are that are not in memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use terrace_hostmem::PAGE_BYTES;

/// The bytes of a page.
pub type PageBytes = [u8; PAGE_BYTES as usize];

/// What is done with a page of a [`BackingStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// The store's page comes into the buffer.
    Load,
    /// The buffer becomes the store's page.
    Store,
}

/// Why a transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The page cannot be loaded any more.
    #[error("the page is lost")]
    Lost,
    /// The store has no room for one page more.
    #[error("the store has no room for one page more")]
    NoRoom,
}

/// The end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The buffer of the transfer.
    pub buffer: usize,
    /// Its result. After an error, a loaded page is unspecified.
    pub result: Result<(), TransferError>,
}

/// Pages by number, which are loaded and stored through the store's own buffers. Transfers run while the caller does other
/// things; each buffer has at most one. Transfers of one page take effect in the order in which they were submitted.
///
/// No call waits without bound: transfers that nobody answers complete with `Lost`.
pub trait BackingStore: Send {
    /// The number of pages. Page numbers are below it.
    fn page_count(&self) -> u64;

    /// The number of buffers.
    fn buffer_count(&self) -> usize;

    /// A buffer. While a transfer uses it, only a store's buffer may be read.
    fn buffer(&self, buffer: usize) -> &PageBytes;

    /// A buffer that no transfer uses.
    fn buffer_mut(&mut self, buffer: usize) -> &mut PageBytes;

    /// Whether a page that was stored can still be loaded, as far as the store knows.
    fn can_load(&self, _page: u64) -> bool {
        true
    }

    /// Whether the store has room for a page, as far as it knows.
    fn accepts(&self, _page: u64) -> bool {
        true
    }

    /// Begins a transfer. Its completion follows, also when it fails at once.
    fn submit(&mut self, transfer: Transfer, page: u64, buffer: usize);

    /// Gives up pages, which will not be loaded before they are stored again. No store of them is under way. Transfers come before
    /// what that needs.
    fn invalidate(&mut self, pages: &[u64]);

    /// Whether pages that were given up need more polls, and these are likely to find something.
    fn is_invalidating(&self) -> bool {
        false
    }

    /// Adds the transfers that have ended. Waits for the first one at most this time.
    fn poll(&mut self, completions: &mut Vec<Completion>, timeout: Duration);
}

/// A local file. For tests and comparisons: each transfer ends before `submit` returns.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    page_count: u64,
    buffers: Vec<PageBytes>,
    completions: Vec<Completion>,
}

impl FileStore {
    /// Pages in a file that is empty.
    ///
    /// # Errors
    /// The system's.
    pub fn new(file: File, page_count: u64, buffer_count: usize) -> io::Result<FileStore> {
        file.set_len(page_count * PAGE_BYTES)?;
        let buffers = vec![[0; PAGE_BYTES as usize]; buffer_count];
        Ok(FileStore { file, page_count, buffers, completions: Vec::new() })
    }
}

impl BackingStore for FileStore {
    fn page_count(&self) -> u64 {
        self.page_count
    }

    fn buffer_count(&self) -> usize {
        self.buffers.len()
    }

    fn buffer(&self, buffer: usize) -> &PageBytes {
        &self.buffers[buffer]
    }

    fn buffer_mut(&mut self, buffer: usize) -> &mut PageBytes {
        &mut self.buffers[buffer]
    }

    fn submit(&mut self, transfer: Transfer, page: u64, buffer: usize) {
        let (bytes, offset) = (&mut self.buffers[buffer], page * PAGE_BYTES);
        let result = match transfer {
            Transfer::Load => self.file.read_exact_at(bytes, offset).map_err(|_| TransferError::Lost),
            Transfer::Store => self.file.write_all_at(bytes, offset).map_err(|_| TransferError::NoRoom),
        };
        self.completions.push(Completion { buffer, result });
    }

    fn invalidate(&mut self, _pages: &[u64]) {}

    fn poll(&mut self, completions: &mut Vec<Completion>, _timeout: Duration) {
        completions.append(&mut self.completions);
    }
}
