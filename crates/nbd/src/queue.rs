//! What a device expects of far memory: many operations in flight, each on a page of the device and a page of a buffer.

use terrace_far_memory::{Page, PageError};

/// An operation on a page. A slot is a page of the queue's buffer, and names the operation when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Copies a page into a slot.
    Load {
        /// The page.
        page: u64,
        /// Where to.
        slot: usize,
    },
    /// Stores a slot as a page.
    Store {
        /// The page.
        page: u64,
        /// Where from.
        slot: usize,
    },
    /// Frees a page.
    Invalidate {
        /// The page.
        page: u64,
        /// Names the operation; the content of the slot is not used.
        slot: usize,
    },
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The slot of the operation.
    pub slot: usize,
    /// How it ended.
    pub result: Result<(), PageError>,
}

/// Pages that are kept elsewhere, and operations on them that do not block. Operations on one page take effect in the
/// order in which they are submitted.
pub trait PageQueue: Send + 'static {
    /// Pages of the space; their numbers are below it.
    fn page_count(&self) -> u64;

    /// Whether a page is stored.
    fn is_stored(&self, page: u64) -> bool;

    /// Copies a slot out.
    ///
    /// # Errors
    /// `Buffer` if there is no such slot.
    fn read_slot(&self, slot: usize, into: &mut Page) -> Result<(), PageError>;

    /// Copies a slot in.
    ///
    /// # Errors
    /// `Buffer` if there is no such slot.
    fn write_slot(&mut self, slot: usize, from: &Page) -> Result<(), PageError>;

    /// Begins operations in their order, and returns how many. Fewer than given have begun if the maximum is in flight.
    /// Each of them ends within a bounded time, which [`PageQueue::poll`] reports.
    fn submit(&mut self, operations: &[Operation]) -> usize;

    /// Makes progress, and appends operations that have ended.
    fn poll(&mut self, ended: &mut Vec<Ended>);
}
