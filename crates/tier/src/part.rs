//! A part of an access: what of it lies in one unit.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_memory::{AtomicOp, PAGE_BYTES};

use crate::device::{Command, Request};
use crate::order::PartId;
use crate::pool::Buffer;
use crate::region::Region;
use crate::stats::Kind;
use crate::transfer::Access;
use crate::unit::{Means, Need, pages_of};

/// How long a device may go on to give a request back before its access fails. A ring does so within microseconds while it
/// cannot get a thread to wait for the disk in, so how often it has done so says nothing.
const RETRY_PATIENCE: Duration = Duration::from_secs(5);

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    /// Bring the bytes.
    Read,
    /// Overwrite them.
    Write,
    /// Change them depending on what they are.
    Atomic(AtomicOp),
    /// Make writes durable: those numbered below this, and all copies.
    Flush {
        /// The first write that need not be waited for.
        before: u64,
        /// How many bytes of the region it is about.
        len: u64,
    },
}

impl Task {
    /// Whether nobody else may touch the pages meanwhile.
    pub(crate) fn is_write(self) -> bool {
        matches!(self, Task::Write | Task::Atomic(_))
    }
}

/// How far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits for pages or (a flush) for writes.
    Waiting,
    /// A job copies, or looks into the page cache.
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

/// Which of its unit's counts a part is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// None.
    None,
    /// `direct_writes`.
    Direct,
    /// `copies`.
    Copy,
}

/// The transfer to or from the file that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Io {
    /// Past the page cache.
    pub(crate) direct: bool,
    /// Where in the file it begins.
    pub(crate) at: u64,
    /// Which part of the buffer it fills or writes.
    pub(crate) part: Range<usize>,
    /// How much of that has to be moved: a direct read at the file's end may bring less than whole pages.
    pub(crate) needed: usize,
    /// How much was moved.
    pub(crate) done: usize,
}

/// A part of an access.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) region: Arc<Region>,
    pub(crate) access: Arc<Access>,
    /// Which part of the access it is.
    pub(crate) index: usize,
    /// Which of the access's bytes it begins with.
    pub(crate) base: usize,
    /// The unit that all of it lies in; of a flush 0.
    pub(crate) unit: usize,
    /// Where in the region it begins.
    pub(crate) offset: u64,
    /// Length in bytes; of a flush 0.
    pub(crate) len: usize,
    pub(crate) task: Task,
    /// It is in the queues of its pages.
    pub(crate) in_order: bool,
    /// Pages that others use.
    pub(crate) pages_missing: u32,
    pub(crate) step: Step,
    pub(crate) lane: Lane,
    /// How it was carried out in the end.
    pub(crate) kind: Kind,
    /// What was read, or is to be written: at the same place within a page as in the region. Elsewhere while the device
    /// or a job has it.
    pub(crate) data: Option<Buffer>,
    /// Whole pages that are read, changed and written.
    pub(crate) scratch: Option<Buffer>,
    pub(crate) io: Option<Io>,
    /// When the device has given it back first.
    pub(crate) given_back_at: Option<Instant>,
    /// Names this write among the region's.
    pub(crate) write_number: u64,
}

impl Part {
    /// Where in a buffer of whole pages the bytes begin.
    pub(crate) fn skip(&self) -> usize {
        (self.offset % PAGE_BYTES) as usize
    }

    /// The bytes in such a buffer.
    pub(crate) fn bytes(&self) -> Range<usize> {
        self.skip()..self.skip() + self.len
    }

    /// Length of the whole pages that the bytes touch.
    pub(crate) fn span(&self) -> usize {
        self.bytes().end.next_multiple_of(PAGE_BYTES as usize)
    }

    /// Pages of the region.
    pub(crate) fn pages(&self) -> Range<u64> {
        if self.len == 0 { 0..0 } else { pages_of(self.offset, self.len) }
    }

    /// Where in memory it begins.
    pub(crate) fn addr(&self) -> u64 {
        self.region.presence.range().addr + self.offset
    }

    /// Where in the file it begins.
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
        // The end of a file that does not fill its last page can be read directly, but not written.
        let within = !self.task.is_write() || pages_end <= self.region.ways.file_len;
        Means {
            method: self.region.method,
            exclusive: self.region.exclusive,
            // Past the page cache is what was there before that which could not be written back.
            direct: within && self.region.direct_works() && !self.region.losses.are_there(),
        }
    }

    /// A transfer of just the bytes.
    pub(crate) fn io_of_bytes(&self, direct: bool) -> Io {
        Io { direct, at: self.file_offset(), part: self.bytes(), needed: self.len, done: 0 }
    }

    /// A transfer of the whole pages that the bytes touch, of which so many bytes are needed.
    pub(crate) fn io_of_pages(&self, direct: bool, needed: usize) -> Io {
        Io { direct, at: self.file_offset() - self.skip() as u64, part: 0..self.span(), needed, done: 0 }
    }

    /// The buffer that the present step's transfer uses.
    pub(crate) fn io_buffer(&mut self) -> &mut Option<Buffer> {
        match self.step {
            Step::Fetching | Step::WritingBack => &mut self.scratch,
            _ => &mut self.data,
        }
    }

    /// Whether a request that the device has given back is worth another one.
    pub(crate) fn may_retry(&mut self) -> bool {
        self.given_back_at.get_or_insert_with(Instant::now).elapsed() < RETRY_PATIENCE
    }

    /// Whether the file has become too short for what is about to be written.
    pub(crate) fn lies_beyond(&self) -> bool {
        let write = matches!(self.step, Step::Writing | Step::WritingBack);
        let end = self.io.as_ref().map(|io| io.at + io.part.len() as u64);
        write && end.is_some_and(|end| !self.region.ways.reach(end))
    }

    /// What remains of the transfer under way, as a request.
    pub(crate) fn request(&mut self, id: PartId) -> Request {
        if self.step == Step::Syncing {
            return self.sync_request(id);
        }
        let write = matches!(self.step, Step::Writing | Step::WritingBack);
        let io = self.io.clone().expect("a step with a transfer");
        let buffer = self.io_buffer().take().expect("the buffer is back between two requests");
        let ways = &self.region.ways;
        let direct = if io.direct { ways.direct.as_ref() } else { None };
        let file = direct.unwrap_or(&ways.buffered).clone();
        let part = io.part.start + io.done..io.part.end;
        let command = if write { Command::Write { buffer, part } } else { Command::Read { buffer, part } };
        Request { id, file, offset: io.at + io.done as u64, command }
    }

    fn sync_request(&self, id: PartId) -> Request {
        let Task::Flush { len, .. } = self.task else { unreachable!("only a flush makes durable") };
        // A range that a request cannot name becomes the whole file.
        let (offset, len) = u32::try_from(len).map_or((0, 0), |len| (self.file_offset(), len));
        Request { id, file: self.region.ways.durable.clone(), offset, command: Command::Sync { len } }
    }
}

/// The value after an atomic operation.
pub(crate) fn apply(op: AtomicOp, before: u64) -> u64 {
    match op {
        AtomicOp::CompareSwap { compare, swap } if before == compare => swap,
        AtomicOp::CompareSwap { .. } => before,
        AtomicOp::FetchAdd { add } => before.wrapping_add(add),
        AtomicOp::Write { value } => value,
    }
}
