//! What users of far memory see: pages by number, and why an operation on one of them failed.

/// Bytes of a page, the unit of allocation and of transfer.
pub const PAGE_BYTES: usize = 4096;

/// The bytes of a page.
pub type Page = [u8; PAGE_BYTES];

/// Why an operation on a page failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// The page number is not below the number of pages.
    #[error("page {page} is not within a space of {page_count} pages")]
    OutOfRange {
        /// The page number.
        page: u64,
        /// Pages of the space.
        page_count: u64,
    },
    /// The page was never stored, or was invalidated since.
    #[error("page {0} is not stored")]
    NotStored(u64),
    /// The memory nodes have no free page left.
    #[error("the memory node has no free page")]
    PoolEmpty,
    /// The client has as many pages as its memory nodes grant it.
    #[error("the client's budget of pages is used up")]
    BudgetExhausted,
    /// All memory nodes that had the page are lost, and the page with them. A page that is stored anew on a node that is
    /// left has its new content.
    #[error("the memory node of page {0} is lost")]
    NodeLost(u64),
    /// The maximum of operations is in flight: poll first.
    #[error("the maximum of operations is in flight: poll for completions first")]
    Full,
    /// The buffer is shorter, or is not of this client.
    #[error("the buffer does not have that page")]
    Buffer,
}

/// Pages that are kept elsewhere. A page can be loaded from the completion of its first store to its invalidation.
/// Operations on one page take effect in the order in which they are begun.
///
/// All calls are bounded in time: when no memory node answers, they fail with [`PageError::NodeLost`].
pub trait PageStore: Send + Sync {
    /// Pages of the space; their numbers are below it.
    fn page_count(&self) -> u64;

    /// Whether a page is stored.
    fn is_stored(&self, page: u64) -> bool;

    /// Copies a page here.
    ///
    /// # Errors
    /// See [`PageError`]; `into` is unspecified then.
    fn load(&self, page: u64, into: &mut Page) -> Result<(), PageError>;

    /// Stores a page, which takes memory of a memory node until it is invalidated.
    ///
    /// # Errors
    /// See [`PageError`]. A page that was not stored before is not stored then; one that was has its old or its new
    /// content.
    fn store(&self, page: u64, from: &Page) -> Result<(), PageError>;

    /// Frees the memory of a page. Nothing happens if it is not stored.
    ///
    /// # Errors
    /// See [`PageError`].
    fn invalidate(&self, page: u64) -> Result<(), PageError>;
}
