//! Where the bytes of a paged region are: in pages of the program's own memory that are present or absent, or in frames
//! elsewhere.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_hostmem::{AtomicOp, HostRange};
use terrace_shm::FileLengths;

use crate::access::AccessError;

/// What same-host peers need to access a paged region by themselves.
#[derive(Clone, Copy, Debug)]
pub enum PeerTables<'a> {
    /// The bytes are those of the file behind the region, as far as the page table shows pages mapped
    /// ([`Cached::new`](terrace_shm::Cached::new)).
    Cached {
        /// The page table, which they read.
        entries: BorrowedFd<'a>,
        /// The counters of accesses, which they add to.
        counters: BorrowedFd<'a>,
        /// The number of counters.
        count: u32,
        /// The file is a swap file, which nobody makes shorter.
        is_swap_file: bool,
    },
    /// The bytes are in frames, as the page table says ([`Framed::new`](terrace_shm::Framed::new)).
    Frames {
        /// The page table, which they read.
        entries: BorrowedFd<'a>,
        /// The counters of accesses, which they add to.
        counters: BorrowedFd<'a>,
        /// The counters of the region's hits, which they add to.
        hits: BorrowedFd<'a>,
        /// The file with the frames.
        pool: BorrowedFd<'a>,
        /// The same, open for reading only.
        pool_to_read: BorrowedFd<'a>,
        /// Where in the file the first frame is.
        offset: u64,
        /// The number of frames.
        count: u32,
    },
}

/// Copies from and to a region whose addresses are offsets in a file, for work requests of this process.
///
/// Ranges lie within the region. The caller waits, as it would for a page fault of ordinary memory.
pub trait LocalCopies {
    /// Copies a range to `out`.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end of the file; `Device` when the file cannot be read.
    fn read_now(&self, part: HostRange, out: &mut [u8]) -> Result<(), AccessError>;

    /// Copies `data` to a range.
    ///
    /// # Errors
    /// `OutOfRange` beyond the end of the file; `NoSpace`; `Device` when the file cannot be written.
    fn write_now(&self, addr: u64, data: &[u8]) -> Result<(), AccessError>;
}

/// What same-host peers need to map a region that is a file ([`MappedFile::new`](terrace_shm::MappedFile::new)).
#[derive(Debug)]
pub struct SharedFile {
    /// The file, open for what peers may do.
    pub file: OwnedFd,
    /// The offsets that they map.
    pub range: HostRange,
    /// The published lengths of the process's files.
    pub lengths: Arc<FileLengths>,
    /// The number of the file's length among them.
    pub number: u32,
}

/// Translates a paged region's addresses, and copies what is present.
///
/// What is present can become absent at any time. A copy by one of these methods is whole, or reported as not made; a
/// pager that takes memory away waits for copies under way, or has them find that they were too late.
pub trait Translation: Send + Sync + Debug {
    /// The addresses that are translated.
    fn range(&self) -> HostRange;

    /// Bytes of a unit, which is present or absent as a whole: a power of two, and at least a page. Unit 0 begins at the
    /// range's first byte.
    fn unit_bytes(&self) -> u64;

    /// Has the processor load what [`Translation::is_present`] will ask about an address within the range. A hint.
    fn prefetch(&self, _addr: u64) {}

    /// Whether all of a range within [`Translation::range`] is present now.
    fn is_present(&self, part: HostRange) -> bool;

    /// Copies a range to `out` if all of it is present. After `None`, `out` holds arbitrary bytes.
    ///
    /// # Errors
    /// `Fault` when the memory is not accessible.
    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>>;

    /// Copies `data` to a range if all of it is present.
    ///
    /// # Errors
    /// As for [`Translation::read`].
    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>>;

    /// Performs an atomic operation on 8 aligned bytes if they are present, and returns the value before it.
    ///
    /// # Errors
    /// As for [`Translation::read`].
    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>>;

    /// Counts an access for each unit that the range touches.
    fn count(&self, part: HostRange, is_hit: bool);

    /// For clients to read over RDMA: one bit per unit, 1 if present. Unit `n` is bit `n % 64` of word `n / 64`.
    fn bitmap(&self) -> &[AtomicU64];

    /// For clients to read over RDMA: the address and length of the versions of pages, which are odd only while the page
    /// is present.
    fn versions(&self) -> HostRange;

    /// What same-host peers need to access the region by themselves. `None` if they cannot.
    fn peer_tables(&self) -> Option<PeerTables<'_>>;

    /// What same-host peers need to map the region, if it is a file; `None` if they cannot. With `is_writable` they may
    /// write.
    fn shared_file(&self, _is_writable: bool) -> Option<SharedFile> {
        None
    }

    /// Whether same-host peers may access the region without this process. A change of a region that they may not access so
    /// waits for none of their accesses.
    fn is_open_to_peers(&self) -> bool {
        true
    }

    /// The copies of local work requests, where addresses are offsets in a file. `None` where they are addresses of this
    /// process: local work requests access those themselves.
    fn local_copies(&self) -> Option<&dyn LocalCopies> {
        None
    }

    /// Checks that the bytes of a range within [`Translation::range`] exist: a file may end before its region does.
    ///
    /// # Errors
    /// `OutOfRange` when part of the range does not exist.
    fn check(&self, _part: HostRange) -> Result<(), AccessError> {
        Ok(())
    }

    /// In the child after `fork`: forgets the copies of threads that exist only in the parent.
    fn forget_copies(&self);

    /// Whether a range lies within [`Translation::range`].
    #[inline]
    fn covers(&self, part: HostRange) -> bool {
        self.range().covers(part)
    }

    /// The part of a range that lies in the first of its units.
    fn first_part(&self, part: HostRange) -> HostRange {
        let unit_bytes = self.unit_bytes();
        let to_next_unit = unit_bytes - (part.addr - self.range().addr) % unit_bytes;
        HostRange { addr: part.addr, len: part.len.min(to_next_unit) }
    }

    /// The part of a range, which is not empty, that lies in the last of its units.
    fn last_part(&self, part: HostRange) -> HostRange {
        let end = part.addr + part.len;
        let from_its_start = (end - 1 - self.range().addr) % self.unit_bytes() + 1;
        let len = part.len.min(from_its_start);
        HostRange { addr: end - len, len }
    }
}
