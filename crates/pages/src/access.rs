//! An access from its caller's point of view, and its parts: the bytes that lie in one page.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use terrace_hostmem::fault::Fault;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Transfer, Waker};
use terrace_sync::Mutex;

use crate::quota::Charge;
use crate::stats::RegionCounters;
use crate::sys;

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Atomic,
    /// Makes a range of pages durable.
    Flush {
        first: u64,
        end: u64,
    },
    /// Accesses no memory: ends when others have.
    Wait,
}

/// An access that may have to wait for pages.
pub(crate) struct Access {
    pub(crate) kind: Kind,
    /// Length in bytes; 8 for an atomic.
    len: usize,
    /// What a read brings.
    data: Mutex<Box<[u8]>>,
    /// What an atomic operation has found.
    before: AtomicU64,
    /// Those of its region, which they identify: another region may get its slot. The access does not keep the region's
    /// file open.
    pub(crate) counters: Arc<RegionCounters>,
    begun: Instant,
    outcome: OnceLock<Result<(), AccessError>>,
    waker: Waker,
    progress: Mutex<Progress>,
    /// Locked while a part of it is carried out in memory of the program.
    is_cancelled: Mutex<bool>,
    /// The memory that it takes.
    _charge: Option<Charge>,
}

#[derive(Debug)]
struct Progress {
    parts_left: usize,
    result: Result<(), AccessError>,
}

/// What follows from the end of a part.
pub(crate) enum PartEnd {
    /// Others are under way.
    More,
    /// The access has ended.
    Wake(Waker),
    /// All writes before a flush have ended: it can begin.
    Flush,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("kind", &self.kind).field("outcome", &self.outcome).finish()
    }
}

impl Access {
    /// An access with one part, which is that of the function that begins it, and ends when it has added the others.
    pub(crate) fn new(
        kind: Kind,
        len: usize,
        counters: &Arc<RegionCounters>,
        waker: &Waker,
        charge: Option<Charge>,
    ) -> Arc<Access> {
        let data = if kind == Kind::Read { vec![0; len].into() } else { Box::default() };
        Arc::new(Access {
            kind,
            len,
            data: Mutex::new(data),
            before: AtomicU64::new(0),
            counters: counters.clone(),
            begun: Instant::now(),
            outcome: OnceLock::new(),
            waker: waker.clone(),
            progress: Mutex::new(Progress { parts_left: 1, result: Ok(()) }),
            is_cancelled: Mutex::new(false),
            _charge: charge,
        })
    }

    /// The memory in bytes that an access of `len` bytes with so many parts takes while it waits.
    pub(crate) fn memory_bytes(len: usize, part_count: usize) -> usize {
        len + size_of::<Access>() + part_count * size_of::<Part>()
    }

    /// Whether it is an access to the region with these counters.
    pub(crate) fn is_to(&self, counters: &Arc<RegionCounters>) -> bool {
        Arc::ptr_eq(&self.counters, counters)
    }

    /// Adds a part.
    pub(crate) fn add_part(&self) {
        self.progress.lock().parts_left += 1;
    }

    /// Whether it has begun longer ago than this.
    pub(crate) fn has_lasted(&self, time: Duration) -> bool {
        self.begun.elapsed() > time
    }

    /// Has `fill` store what a part has read.
    fn store_read<R>(&self, bytes: Range<usize>, fill: impl FnOnce(&mut [u8]) -> R) -> R {
        fill(&mut self.data.lock()[bytes])
    }

    /// Stores what an atomic operation has found.
    fn store_before(&self, before: u64) {
        self.before.store(before, Ordering::Release);
    }

    /// Records the end of a part.
    pub(crate) fn end_part(&self, result: Result<(), AccessError>) -> PartEnd {
        let mut progress = self.progress.lock();
        progress.parts_left -= 1;
        progress.result = progress.result.and(result);
        match (progress.parts_left, self.kind) {
            (1.., _) => PartEnd::More,
            (0, Kind::Flush { .. }) => PartEnd::Flush,
            (0, _) => PartEnd::Wake(self.end(progress.result)),
        }
    }

    /// Records the outcome. Returns the waker to be called.
    pub(crate) fn end(&self, result: Result<(), AccessError>) -> Waker {
        let is_first = self.outcome.set(result).is_ok();
        debug_assert!(is_first, "an access ends once");
        if !matches!(self.kind, Kind::Flush { .. } | Kind::Wait) {
            self.counters.latency.add(self.begun.elapsed());
        }
        self.waker.clone()
    }
}

impl Transfer for Access {
    fn outcome(&self) -> Option<Result<(), AccessError>> {
        self.outcome.get().copied()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.outcome().unwrap_or(Err(AccessError::NotReady))?;
        let start = usize::try_from(offset).map_err(|_| AccessError::OutOfRange)?;
        let end =
            start.checked_add(out.len()).filter(|end| *end <= self.len).ok_or(AccessError::OutOfRange)?;
        if self.kind == Kind::Atomic {
            out.copy_from_slice(&self.before.load(Ordering::Acquire).to_ne_bytes()[start..end]);
            return Ok(());
        }
        // Writes and flushes return no bytes.
        let data = self.data.lock();
        out.copy_from_slice(data.get(start..end).ok_or(AccessError::OutOfRange)?);
        Ok(())
    }

    fn cancel(&self) {
        *self.is_cancelled.lock() = true;
    }
}

/// The bytes of a range that lie in one page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) page: u64,
    /// The offset in the page.
    pub(crate) offset: usize,
    /// The offset in the range.
    pub(crate) base: usize,
    pub(crate) len: usize,
}

/// Splits a range, which lies within a region that begins at `base`, at page boundaries.
pub(crate) fn pieces(base: u64, range: HostRange) -> impl Iterator<Item = Piece> + use<> {
    let start = range.addr - base;
    let end = start + range.len;
    let pages = if range.len == 0 { 0..0 } else { start / PAGE_BYTES..end.div_ceil(PAGE_BYTES) };
    pages.map(move |page| {
        let (from, to) = ((page * PAGE_BYTES).max(start), ((page + 1) * PAGE_BYTES).min(end));
        Piece {
            page,
            offset: (from % PAGE_BYTES) as usize,
            base: (from - start) as usize,
            len: (to - from) as usize,
        }
    })
}

/// What a part does with its page.
#[derive(Debug)]
pub(crate) enum Task {
    /// Reads into this range of the access.
    Read(Range<usize>),
    Write(Box<[u8]>),
    Atomic(AtomicOp),
    /// Ends when the parts before it have.
    Barrier,
}

/// A part of an access that waits for its page.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) access: Arc<Access>,
    /// The offset in the page.
    pub(crate) offset: usize,
    pub(crate) task: Task,
}

impl Part {
    /// Whether the part needs no bytes of the page.
    pub(crate) fn is_whole_write(&self) -> bool {
        matches!(&self.task, Task::Write(data) if data.len() as u64 == PAGE_BYTES)
    }

    /// Carries the part out in a page's memory, which is at this address.
    ///
    /// # Errors
    /// `Fault` if nothing is there, such as beyond the end of a file that was truncated.
    pub(crate) fn carry_out(&self, page_addr: u64) -> Result<(), Fault> {
        let addr = page_addr + self.offset as u64;
        match &self.task {
            Task::Read(bytes) => self.access.store_read(bytes.clone(), |out| sys::copy_out(addr, out)),
            Task::Write(data) => sys::copy_in(addr, data),
            Task::Atomic(op) => sys::atomic(addr, *op).map(|before| self.access.store_before(before)),
            Task::Barrier => Ok(()),
        }
    }

    /// As [`Part::carry_out`], in memory of the program: a frame that a cancelled write was to fill would have the bytes of another page.
    ///
    /// # Errors
    /// As for [`Part::carry_out`]; `Fault`, too, if the access is cancelled.
    pub(crate) fn carry_out_in_program(&self, page_addr: u64) -> Result<(), Fault> {
        let is_cancelled = self.access.is_cancelled.lock();
        if *is_cancelled { Err(Fault) } else { self.carry_out(page_addr) }
    }

    /// Whether the part changes its page.
    pub(crate) fn is_write(&self) -> bool {
        matches!(self.task, Task::Write(_) | Task::Atomic(_))
    }
}
