//! Registered memory of whole pages, and the ends of operations on them.

use std::sync::Arc;

use terrace_nic::{Buffer, Error, Pd, Sge};

use crate::page_store::{PAGE_BYTES, Page, PageError};

/// `ibv_access_flags` of buffers: nodes WRITE loaded pages.
pub(super) const BUFFER_ACCESS: u32 = 1 | 1 << 1;

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The tag that the operation was given.
    pub tag: u64,
    /// Its page.
    pub page: u64,
    /// How it ended.
    pub result: Result<(), PageError>,
}

/// Registered memory of whole pages, for operations of the client that made it.
pub struct PageBuffer {
    pub(super) buffer: Buffer,
}

impl PageBuffer {
    /// Pages of the buffer.
    pub fn page_count(&self) -> usize {
        self.buffer.len() / PAGE_BYTES
    }

    /// Copies a page out.
    ///
    /// # Errors
    /// `Buffer` if there is no such page.
    pub fn read(&self, index: usize, into: &mut Page) -> Result<(), PageError> {
        let at = index.checked_mul(PAGE_BYTES).ok_or(PageError::Buffer)?;
        self.buffer.read(at, into).map_err(|_| PageError::Buffer)
    }

    /// Copies a page in.
    ///
    /// # Errors
    /// `Buffer` if there is no such page.
    pub fn write(&self, index: usize, from: &Page) -> Result<(), PageError> {
        let at = index.checked_mul(PAGE_BYTES).ok_or(PageError::Buffer)?;
        self.buffer.write(at, from).map_err(|_| PageError::Buffer)
    }

    /// A page, for a work request.
    pub(super) fn sge(&self, index: usize) -> Option<Sge> {
        (index < self.page_count()).then(|| self.buffer.sge(index * PAGE_BYTES, PAGE_BYTES as u32))
    }
}

/// Allocates and registers a buffer.
pub(super) fn new_buffer(pd: &Arc<Pd>, page_count: usize) -> Result<PageBuffer, Error> {
    let len = page_count.checked_mul(PAGE_BYTES).ok_or(Error::Invalid("more pages than addresses"))?;
    Ok(PageBuffer { buffer: Buffer::new(pd, len, BUFFER_ACCESS)? })
}
