//! The end of a file, where records are added.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_memory::{AccessError, Waker};

use crate::sys::Handle;

/// Blocks are allocated this far ahead of the end, so that few appends allocate. They stay with the file.
const AHEAD_BYTES: u64 = 1 << 20;

/// How often a length is read again because a record was added meanwhile.
const READS_MAX: usize = 16;

/// Whether a record is being added: the file's length is within it then.
#[derive(Debug, Default)]
pub struct Progress {
    /// Odd while a record is being added, and incremented at its beginning and end.
    count: AtomicU64,
    /// Where the record begins.
    start: AtomicU64,
}

impl Progress {
    fn begin(&self, start: u64) {
        self.start.store(start, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// The length of the file's whole records, by `read`, which reads the file's length. `None` if records are added faster
    /// than that can be read.
    pub fn whole(&self, read: impl Fn() -> u64) -> Option<u64> {
        for _ in 0..READS_MAX {
            let before = self.count.load(Ordering::SeqCst);
            let start = self.start.load(Ordering::SeqCst);
            let len = read();
            if self.count.load(Ordering::SeqCst) == before {
                return Some(if before % 2 == 1 { len.min(start) } else { len });
            }
        }
        None
    }
}

/// The end of a file, locked while a record is added.
#[derive(Default)]
pub struct End {
    /// Blocks are allocated up to here, as far as we know.
    allocated: u64,
    /// The layout changes, which may take as long as the disk does.
    is_closed: bool,
    /// Wakers of the appends that were refused meanwhile.
    refused: Vec<Waker>,
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("End").field("allocated", &self.allocated).finish_non_exhaustive()
    }
}

impl End {
    /// Refuses appends until [`End::reopen`]: the layout changes.
    pub fn close(&mut self) {
        self.is_closed = true;
    }

    /// Permits appends again. Returns the wakers of those that were refused.
    pub fn reopen(&mut self) -> Vec<Waker> {
        self.forget();
        self.is_closed = false;
        std::mem::take(&mut self.refused)
    }

    /// # Errors
    /// `NotReady` while the layout changes. The waker is called afterwards.
    pub fn admit(&mut self, waker: &Waker) -> Result<(), AccessError> {
        if !self.is_closed {
            return Ok(());
        }
        if !self.refused.iter().any(|refused| Arc::ptr_eq(refused, waker)) {
            self.refused.push(waker.clone());
        }
        Err(AccessError::NotReady)
    }

    /// Writes a record at the end of the file and returns its offset. Meanwhile `progress` says so. A record that is not
    /// written as a whole is taken back.
    ///
    /// # Errors
    /// The system's; `FileTooLarge` for a record that would end beyond any file, or beyond the process's limit.
    pub fn append(&mut self, handle: &Handle, data: &[u8], progress: &Progress) -> io::Result<u64> {
        // Not a length that is known: another program may have appended.
        let start = handle.len()?;
        progress.begin(start);
        let appended = self.append_at(handle, data, start);
        progress.end();
        appended.map(|()| start)
    }

    fn append_at(&mut self, handle: &Handle, data: &[u8], start: u64) -> io::Result<()> {
        let end = start.checked_add(data.len() as u64).filter(|&end| i64::try_from(end).is_ok());
        let end = end.ok_or(io::ErrorKind::FileTooLarge)?;
        self.allocate(handle, start, end);
        handle.write_all(start, data).map_err(|(written, error)| {
            self.forget();
            if written > 0 {
                take_back(handle, start, written as u64);
            }
            error
        })
    }

    /// Allocates blocks for a record from `start` to `end`, and for some after it. Without them the record is written all
    /// the same, or fails then.
    fn allocate(&mut self, handle: &Handle, start: u64, end: u64) {
        if end > self.allocated {
            let bytes = (end - start).max(AHEAD_BYTES);
            let is_done = handle.allocate(start, bytes).is_ok();
            // Where it is not possible, it is not tried for each record.
            self.allocated =
                if is_done { start.saturating_add(bytes) } else { end.saturating_add(AHEAD_BYTES) };
        }
    }

    /// Forgets what is allocated.
    fn forget(&mut self) {
        self.allocated = 0;
    }
}

/// Takes back a part of a record, unless another program has added something behind it.
fn take_back(handle: &Handle, start: u64, written: u64) {
    let taken = match handle.len() {
        Ok(len) if len == start + written => handle.set_len(start),
        Ok(_) => Err(io::Error::other("another program has made the file longer or shorter")),
        Err(error) => Err(error),
    };
    if let Err(error) = taken {
        tracing::error!(%error, start, written, "a part of a record stays in a file");
    }
}
