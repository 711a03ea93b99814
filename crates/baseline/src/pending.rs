//! An access under way, from the side that carries it out.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_hostmem::{AtomicOp, PAGE_BYTES};

use crate::config::IoMethod;
use crate::device::{Command, Request};
use crate::order::AccessId;
use crate::plan::{Means, Need, pages_of};
use crate::pool::Buffer;
use crate::region::Region;
use crate::transfer::Access;

/// For how long a request is submitted again before its access fails. A ring returns requests within microseconds while
/// it has no thread that could wait for the disk, so a limit on the number of attempts would be meaningless.
const RETRY_PATIENCE: Duration = Duration::from_secs(5);

/// The operation of an access.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Reads the bytes.
    Read,
    /// Overwrites them.
    Write,
    /// Reads and modifies them.
    Atomic(AtomicOp),
    /// Makes writes durable: those with numbers below `before`, and all copies.
    Flush {
        /// The first write that the flush does not wait for.
        before: u64,
        /// Length in bytes of the flushed range.
        len: u64,
    },
}

impl Task {
    /// Whether the operation needs exclusive access to its pages.
    pub(crate) fn is_write(self) -> bool {
        matches!(self, Task::Write | Task::Atomic(_))
    }
}

/// The progress of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits for pages; a flush waits for writes.
    Waiting,
    /// A job copies, or reads from the page cache without waiting.
    Working,
    /// The bytes are being read into `data`.
    Reading,
    /// Pages to be changed are being read into `scratch`.
    Fetching,
    /// `data` is being written.
    Writing,
    /// Changed pages in `scratch` are being written.
    WritingBack,
    /// The file is being made durable.
    Syncing,
}

/// The transfer to or from the file that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    /// Bypasses the page cache.
    pub(crate) direct: bool,
    /// The file offset at which it begins.
    pub(crate) at: u64,
    /// The range of the buffer that it fills or writes.
    pub(crate) part: Range<usize>,
    /// How many of these bytes must be moved: a direct read at the end of the file may return less than whole pages.
    pub(crate) needed: usize,
    /// Bytes moved so far.
    pub(crate) done: usize,
}

#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) region: Arc<Region>,
    /// The caller's side.
    pub(crate) caller: Arc<Access>,
    /// The offset in the region of the first byte.
    pub(crate) offset: u64,
    /// Length in bytes; 0 for a flush.
    pub(crate) len: usize,
    pub(crate) task: Task,
    /// Whether the page cache had all bytes when the access began: looked up for what changes them by
    /// [`IoMethod::Tiering`].
    pub(crate) is_cached: bool,
    /// How many of its pages other accesses hold.
    pub(crate) pages_missing: u32,
    pub(crate) step: Step,
    /// The bytes read or to be written, at the same offset within a page as in the region. `None` while the device or a
    /// job has the buffer.
    pub(crate) data: Option<Buffer>,
    /// Whole pages for a read-modify-write.
    pub(crate) scratch: Option<Buffer>,
    pub(crate) io: Option<Io>,
    /// When the device first returned the request unfinished.
    pub(crate) given_back_at: Option<Instant>,
    /// The number of this write in the region.
    pub(crate) write_number: u64,
}

impl Pending {
    /// Whether it waits for the earlier accesses to its pages. The NIC accesses locked memory without queues, so an access
    /// to it completes before the call returns.
    pub(crate) fn is_in_order(&self) -> bool {
        self.region.method != IoMethod::Pinned
    }

    /// The offset of the bytes in a buffer of whole pages.
    pub(crate) fn skip(&self) -> usize {
        (self.offset % PAGE_BYTES) as usize
    }

    /// The range of the bytes in such a buffer.
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.skip()..self.skip() + self.len
    }

    /// Length of the whole pages that contain the bytes.
    pub(crate) fn span(&self) -> usize {
        self.bytes().end.next_multiple_of(PAGE_BYTES as usize)
    }

    /// The region's pages that contain the bytes.
    pub(crate) fn pages(&self) -> Range<u64> {
        if self.len == 0 { 0..0 } else { pages_of(self.offset, self.len) }
    }

    /// The address of the first byte in the mapping.
    pub(crate) fn addr(&self) -> u64 {
        self.region.range().addr + self.offset
    }

    /// The file offset of the first byte.
    pub(crate) fn file_offset(&self) -> u64 {
        self.region.file_offset + self.offset
    }

    pub(crate) fn need(&self) -> Need {
        match self.task {
            Task::Read | Task::Flush { .. } => Need::Read,
            Task::Write => Need::Write { whole_pages: self.skip() == 0 && self.len == self.span() },
            Task::Atomic(_) => Need::Atomic,
        }
    }

    pub(crate) fn means(&self) -> Means {
        let pages_end = self.file_offset() - self.skip() as u64 + self.span() as u64;
        // If the file ends within its last page, that page can be read directly, but not written.
        let within = !self.task.is_write() || pages_end <= self.region.files.file_len;
        let direct = within && self.region.direct_works();
        Means { method: self.region.method, direct, is_cached: self.is_cached }
    }

    /// A transfer of exactly the bytes.
    pub(crate) fn io_of_bytes(&self, direct: bool) -> Io {
        Io { direct, at: self.file_offset(), part: self.bytes(), needed: self.len, done: 0 }
    }

    /// A transfer of the whole pages that contain the bytes; `needed` of the bytes must be moved.
    pub(crate) fn io_of_pages(&self, direct: bool, needed: usize) -> Io {
        Io { direct, at: self.file_offset() - self.skip() as u64, part: 0..self.span(), needed, done: 0 }
    }

    /// The buffer of the current step's transfer.
    pub(crate) fn io_buffer(&mut self) -> &mut Option<Buffer> {
        match self.step {
            Step::Fetching | Step::WritingBack => &mut self.scratch,
            _ => &mut self.data,
        }
    }

    /// Whether a request that the device returned unfinished is submitted again.
    pub(crate) fn may_retry(&mut self) -> bool {
        self.given_back_at.get_or_insert_with(Instant::now).elapsed() < RETRY_PATIENCE
    }

    /// Whether the file has become too short for the write that is about to begin.
    pub(crate) fn lies_beyond(&self) -> bool {
        let write = matches!(self.step, Step::Writing | Step::WritingBack);
        let end = self.io.as_ref().map(|io| io.at + io.part.len() as u64);
        write && end.is_some_and(|end| !self.region.files.reach(end))
    }

    /// The rest of the transfer under way, as a request.
    pub(crate) fn request(&mut self, id: AccessId) -> Request {
        if self.step == Step::Syncing {
            return self.sync_request(id);
        }
        let write = matches!(self.step, Step::Writing | Step::WritingBack);
        let io = self.io.clone().expect("a step with a transfer");
        let buffer = self.io_buffer().take().expect("the buffer is back between two requests");
        let files = &self.region.files;
        let direct = if io.direct { files.direct.as_ref() } else { None };
        let file = direct.unwrap_or(&files.buffered).clone();
        let part = io.part.start + io.done..io.part.end;
        let command = if write { Command::Write { buffer, part } } else { Command::Read { buffer, part } };
        Request { id, file, offset: io.at + io.done as u64, command }
    }

    fn sync_request(&self, id: AccessId) -> Request {
        let Task::Flush { len, .. } = self.task else { unreachable!("only a flush makes durable") };
        // A length that the request cannot hold: the whole file.
        let (offset, len) = u32::try_from(len).map_or((0, 0), |len| (self.file_offset(), len));
        Request { id, file: self.region.files.durable.clone(), offset, command: Command::Sync { len } }
    }
}
