//! An access from its caller's point of view.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use terrace_memory::{AccessError, Transfer, Waker};
use terrace_sync::Mutex;

use crate::pool::Buffer;

/// The most units that an access can span, because it is shorter than a unit.
pub(crate) const PARTS_MAX: usize = 2;

/// The bytes that one part of a read returned.
#[derive(Debug)]
pub(crate) struct Brought {
    pub(crate) buffer: Buffer,
    /// The offset of the first byte in the buffer.
    pub(crate) skip: usize,
    /// The range of these bytes in the access.
    pub(crate) bytes: std::ops::Range<usize>,
}

/// An access that the tier carries out.
pub(crate) struct Access {
    /// Length in bytes; 8 for an atomic.
    len: usize,
    is_atomic: bool,
    parts: [OnceLock<Brought>; PARTS_MAX],
    before: AtomicU64,
    outcome: OnceLock<Result<(), AccessError>>,
    waker: Waker,
    progress: Mutex<Progress>,
    /// When the access began.
    pub(crate) since: Instant,
}

/// The rest of an access.
#[derive(Debug)]
struct Progress {
    parts_left: usize,
    result: Result<(), AccessError>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("len", &self.len).field("outcome", &self.outcome).finish()
    }
}

impl Access {
    /// An access under way, in `part_count` parts.
    pub(crate) fn new(len: usize, is_atomic: bool, part_count: usize, waker: &Waker) -> Access {
        Access {
            len,
            is_atomic,
            parts: Default::default(),
            before: AtomicU64::new(0),
            outcome: OnceLock::new(),
            waker: waker.clone(),
            progress: Mutex::new(Progress { parts_left: part_count, result: Ok(()) }),
            since: Instant::now(),
        }
    }

    /// Stores the bytes that a part of a read returned.
    pub(crate) fn bring(&self, part: usize, brought: Brought) {
        let kept = self.parts[part].set(brought);
        debug_assert!(kept.is_ok(), "a part is read once");
    }

    /// Stores the value that an atomic operation found.
    pub(crate) fn found(&self, before: u64) {
        self.before.store(before, Ordering::Release);
    }

    /// Records the end of a part. Returns the waker after the last one.
    pub(crate) fn part_done(&self, result: Result<(), AccessError>) -> Option<Waker> {
        let mut progress = self.progress.lock();
        progress.parts_left -= 1;
        progress.result = progress.result.and(result);
        if progress.parts_left > 0 {
            return None;
        }
        let ended = self.outcome.set(progress.result);
        debug_assert!(ended.is_ok(), "an access ends once");
        Some(self.waker.clone())
    }
}

impl Transfer for Access {
    fn outcome(&self) -> Option<Result<(), AccessError>> {
        self.outcome.get().copied()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.outcome().unwrap_or(Err(AccessError::NotReady))?;
        let start = usize::try_from(offset).map_err(|_| AccessError::OutOfRange)?;
        let end = start.checked_add(out.len()).ok_or(AccessError::OutOfRange)?;
        if end > self.len {
            return Err(AccessError::OutOfRange);
        }
        if self.is_atomic {
            out.copy_from_slice(&self.before.load(Ordering::Acquire).to_ne_bytes()[start..end]);
            return Ok(());
        }
        let mut copied = 0;
        for brought in self.parts.iter().filter_map(OnceLock::get) {
            let (from, to) = (start.max(brought.bytes.start), end.min(brought.bytes.end));
            if from < to {
                let source = brought.skip + (from - brought.bytes.start);
                out[from - start..to - start].copy_from_slice(&brought.buffer[source..][..to - from]);
                copied += to - from;
            }
        }
        // Writes and flushes return no bytes.
        if copied == out.len() { Ok(()) } else { Err(AccessError::OutOfRange) }
    }
}
