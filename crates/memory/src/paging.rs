//! Regions whose bytes need not all be in memory.
//!
//! A [`Pager`] knows where the bytes are instead, and translates addresses ([`Translation`]). The data path copies what
//! is present at once, and leaves the rest to the pager, which performs the access asynchronously ([`Transfer`]).

use std::fmt::Debug;
use std::sync::Arc;

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};

use crate::access::AccessError;
use crate::translation::Translation;

/// The signature page, which a peer reads in place of absent pages. Byte `n` of it stands for every byte that lies `n`
/// bytes into a page, counted from the first byte of [`Translation::range`].
pub type Pattern = Arc<[u8; PAGE_BYTES as usize]>;

/// A region's fault policy: what an access to absent memory does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RegionPolicy {
    /// The pager performs the access, and the peer waits. (A peer that asked for the signature page gets that instead.)
    #[default]
    Wait,
    /// The peer is told to retry, while the pager brings the memory: as hardware does with on-demand paging.
    Fault,
    /// The NIC does not know of absence, as hardware behind an IOMMU does not (NP-RDMA, section 3.1): absent pages are
    /// mapped to the signature page for reading, and to a black-hole page for writing. Nothing waits, nothing is refused.
    Commodity,
}

/// Called when a transfer has an outcome, or when a pager that was full has space: from any thread, and without locks
/// of the pager held.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// An access that the pager performs asynchronously, whether or not somebody has this: see [`Transfer::cancel`].
pub trait Transfer: Send + Sync + Debug {
    /// How the access ended; `None` while it is under way.
    fn outcome(&self) -> Option<Result<(), AccessError>>;

    /// Copies what a finished read brought, from `offset` within the requested range; of an atomic, the 8 bytes before
    /// it; of an append, the 8 bytes of the offset.
    ///
    /// # Errors
    /// The outcome's; `OutOfRange` beyond the requested range.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError>;

    /// Cancels a change of the program's memory, or of a file: when this returns, what has not been carried out of it never is.
    /// What has been stays. A change of a file that has begun goes on, as changes of other memory and appended records do.
    fn cancel(&self) {}
}

/// Pages a region: knows where the absent bytes are, and performs accesses to them.
///
/// Every method returns at once. Accesses that overlap take effect in the order of these calls, whether or not the
/// pages become present meanwhile: a read sees the writes that were requested before. A full pager answers `NotReady`,
/// without any effect, and calls the waker when it has space.
///
/// The data path copies to present pages without asking the pager, so two things must never happen: a page becomes
/// present while a write or an atomic on it is under way; and a write or an atomic is requested while its page is present,
/// and takes effect later. The page may have become present between the check that found it absent and the call, so the
/// pager has to check again, and to carry out what falls into present pages before it returns.
///
/// Ranges lie within [`Translation::range`]; a pager may rely on that.
pub trait Pager: Send + Sync + Debug {
    /// Where the bytes are.
    fn translation(&self) -> &dyn Translation;

    /// Reads a range, present or not.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Writes; the data is copied before this returns. The outcome comes when every later read, local or remote, sees
    /// the data and the data survives the process.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Performs an atomic operation on 8 aligned bytes.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Makes all that was written to a range durable, however it was written.
    ///
    /// # Errors
    /// `NotReady` when the pager is full.
    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError>;

    /// Keeps the pages of a range from leaving, from the time on when each is present, until [`Pager::unpin`] is called with
    /// the same range as often as this. Absent pages are not brought; a later [`Pager::read`] brings them, and they are present when
    /// that has an outcome. False if too many are pinned, or the pager pins none.
    fn pin(&self, _range: HostRange) -> bool {
        false
    }

    /// The most bytes that can ever be pinned at a time.
    fn pin_bytes_max(&self) -> u64 {
        0
    }

    /// Ends a [`Pager::pin`] that has returned true.
    fn unpin(&self, _range: HostRange) {}

    /// Adds `data` as one record at the end of the file behind the region; it is copied before this returns. Records
    /// neither overlap nor leave holes between them. With `commit` the record is durable before the outcome comes. The
    /// transfer's 8 bytes are the offset of the record in the file, as the host stores integers.
    ///
    /// # Errors
    /// `Permission` when nothing can be appended to the region; `NoSpace`; `NotReady` when the pager is full. No part of
    /// the record is in the file then. An outcome of `Flush`: the record is in the file, and not durable.
    fn append(&self, _data: &[u8], _commit: bool, _waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Permission)
    }
}
