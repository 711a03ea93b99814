//! An access from its caller's point of view.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use terrace_memory::{AccessError, Transfer, Waker};

use crate::pool::Buffer;

/// The bytes of a read.
#[derive(Debug)]
pub(crate) struct Brought {
    pub(crate) buffer: Buffer,
    /// The offset of the first byte in the buffer.
    pub(crate) skip: usize,
}

/// An access that is carried out.
pub(crate) struct Access {
    /// Length in bytes; 8 for an atomic.
    len: usize,
    is_atomic: bool,
    brought: OnceLock<Brought>,
    before: AtomicU64,
    outcome: OnceLock<Result<(), AccessError>>,
    waker: Waker,
    /// When the access began.
    pub(crate) since: Instant,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("len", &self.len).field("outcome", &self.outcome).finish()
    }
}

impl Access {
    /// An access under way.
    pub(crate) fn new(len: usize, is_atomic: bool, waker: &Waker) -> Access {
        Access {
            len,
            is_atomic,
            brought: OnceLock::new(),
            before: AtomicU64::new(0),
            outcome: OnceLock::new(),
            waker: waker.clone(),
            since: Instant::now(),
        }
    }

    /// Stores the bytes of a read.
    pub(crate) fn bring(&self, brought: Brought) {
        let kept = self.brought.set(brought);
        debug_assert!(kept.is_ok(), "bytes are read once");
    }

    /// Stores the value that an atomic operation found.
    pub(crate) fn found(&self, before: u64) {
        self.before.store(before, Ordering::Release);
    }

    /// Records the end. Returns the waker to call.
    pub(crate) fn end(&self, result: Result<(), AccessError>) -> Waker {
        let ended = self.outcome.set(result);
        debug_assert!(ended.is_ok(), "an access ends once");
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
        let end = start.checked_add(out.len()).ok_or(AccessError::OutOfRange)?;
        if end > self.len {
            return Err(AccessError::OutOfRange);
        }
        if self.is_atomic {
            out.copy_from_slice(&self.before.load(Ordering::Acquire).to_ne_bytes()[start..end]);
            return Ok(());
        }
        match self.brought.get() {
            Some(Brought { buffer, skip }) => out.copy_from_slice(&buffer[skip + start..skip + end]),
            // Writes and flushes return no bytes.
            None if out.is_empty() => {}
            None => return Err(AccessError::OutOfRange),
        }
        Ok(())
    }
}
