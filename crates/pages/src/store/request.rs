//! Requests, and the traits of stores.

use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use smallvec::SmallVec;
use terrace_hostmem::PAGE_BYTES;

use crate::frames::Pool;
use crate::key::PageKey;

/// For how long a read is submitted again that the device has returned undone. A ring returns requests within
/// microseconds while it has no thread that could wait for the disk, so a limit on the number of attempts would be
/// meaningless.
const RETRY_PATIENCE: Duration = Duration::from_secs(5);
/// The most frames of a run.
pub(crate) const RUN_FRAMES_MAX: usize = 64;

/// The memory that reads fill and writes empty.
pub(crate) trait FrameMemory: Send + Sync + Debug {
    /// Where a frame is.
    fn addr(&self, frame: u32) -> u64;
}

impl FrameMemory for Pool {
    fn addr(&self, frame: u32) -> u64 {
        Pool::addr(self, frame)
    }
}

/// Frames for consecutive pages of a file.
#[derive(Clone, Debug)]
pub struct FrameRun {
    memory: Arc<dyn FrameMemory>,
    pub(crate) frames: SmallVec<[u32; 8]>,
}

impl FrameRun {
    /// The frames must be of that memory. Nothing else that anybody needs is written to them while they are read into.
    pub(crate) fn new(memory: Arc<dyn FrameMemory>, frames: impl IntoIterator<Item = u32>) -> FrameRun {
        FrameRun { memory, frames: frames.into_iter().collect() }
    }

    /// The number of bytes.
    pub fn len_bytes(&self) -> usize {
        self.frames.len() * PAGE_BYTES as usize
    }

    /// The memory, for the kernel.
    pub(super) fn iovecs(&self) -> SmallVec<[libc::iovec; 8]> {
        let iovec = |frame: &u32| libc::iovec {
            iov_base: self.memory.addr(*frame) as *mut libc::c_void,
            iov_len: PAGE_BYTES as usize,
        };
        self.frames.iter().map(iovec).collect()
    }
}

/// A read of consecutive pages into frames.
#[derive(Clone, Debug)]
pub struct ReadRequest {
    /// The first page.
    pub(crate) key: PageKey,
    /// Kept open until the read has ended.
    pub(crate) file: Arc<OwnedFd>,
    /// The offset in the file.
    pub(crate) offset: u64,
    /// The frames to fill.
    pub(crate) run: FrameRun,
    /// The file is memory: the read does not wait.
    pub(crate) is_memory: bool,
    /// When the device first returned the request undone.
    pub(crate) undone_since: Option<Instant>,
}

impl ReadRequest {
    /// Joins a read of the pages behind this one's. False if it is of others, or this one is as long as one may be.
    pub(crate) fn join(&mut self, next: &ReadRequest) -> bool {
        let frames = &mut self.run.frames;
        let follows = next.undone_since.is_none()
            && self.key.slot == next.key.slot
            && self.key.page + frames.len() as u64 == next.key.page
            && Arc::ptr_eq(&self.file, &next.file)
            && frames.len() + next.run.frames.len() <= RUN_FRAMES_MAX;
        if follows {
            frames.extend_from_slice(&next.run.frames);
        }
        follows
    }

    /// Leaves out the first pages, which have been read.
    pub(crate) fn skip(&mut self, page_count: usize) {
        self.key.page += page_count as u64;
        self.offset += page_count as u64 * PAGE_BYTES;
        self.run.frames.drain(..page_count);
        if page_count > 0 {
            self.undone_since = None;
        }
    }

    /// Whether the device has returned the request undone, or done in part, and it is submitted again. io_uring returns
    /// requests when the submitting thread exits or no io-wq worker is available: not an error of the file. A short read
    /// may be one that a signal has ended.
    pub(crate) fn is_retried(&mut self, result: Result<usize, Errno>) -> bool {
        matches!(result, Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::CANCELED))
            && self.undone_since.get_or_insert_with(Instant::now).elapsed() < RETRY_PATIENCE
    }
}

/// A read that has ended.
#[derive(Debug)]
pub struct ReadCompletion {
    /// The read.
    pub(crate) request: ReadRequest,
    /// The number of bytes read, possibly fewer than requested.
    pub(crate) result: Result<usize, Errno>,
}

/// Reads into frames, in any order.
pub trait ReadDevice: Send + Debug {
    /// Takes all requests. Those that do not fit are queued, and submitted with the next call.
    fn submit(&mut self, requests: &mut Vec<ReadRequest>);

    /// Appends new completions.
    fn reap(&mut self, done: &mut Vec<ReadCompletion>);

    /// Readable when there are completions to reap.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

/// Writes frames to files. Each call blocks until the device has the bytes.
pub trait WriteDevice: Send + Sync + Debug {
    /// Writes the frames from `offset` on. Returns the number of bytes written, possibly fewer.
    ///
    /// # Errors
    /// The error of the device or of the file system.
    fn write(&self, file: BorrowedFd<'_>, offset: u64, run: &FrameRun) -> Result<usize, Errno>;

    /// Makes what was written to the file durable.
    ///
    /// # Errors
    /// The error of the device or of the file system.
    fn sync(&self, file: BorrowedFd<'_>) -> Result<(), Errno>;
}
