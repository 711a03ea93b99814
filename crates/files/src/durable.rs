//! `fdatasync`, shared by those who wait for it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use terrace_memory::AccessError;
use terrace_sync::Mutex;

use crate::sys::Handle;

/// What is durable of a file.
#[derive(Debug, Default)]
pub struct Durability {
    /// Requests so far.
    requests: AtomicU64,
    /// Requests that a finished `fdatasync` covers: it began after them.
    covered: Mutex<u64>,
    /// A write-back has failed. The kernel reports that once, and takes the pages for clean.
    has_failed: AtomicBool,
}

impl Durability {
    /// Returns when all that was written before is durable. One `fdatasync` serves all that wait for the one before it.
    ///
    /// # Errors
    /// `Flush` once a write-back of the file has failed.
    pub fn sync(&self, handle: &Handle) -> Result<(), AccessError> {
        let request = self.requests.fetch_add(1, Ordering::SeqCst) + 1;
        let mut covered = self.covered.lock();
        if *covered < request && !self.has_failed.load(Ordering::Relaxed) {
            let begun = self.requests.load(Ordering::SeqCst);
            match handle.sync_data() {
                Ok(()) => *covered = begun,
                Err(error) => {
                    tracing::error!(%error, "a file cannot be written: no FLUSH or commit of it succeeds any more");
                    self.has_failed.store(true, Ordering::Relaxed);
                }
            }
        }
        if self.has_failed.load(Ordering::Relaxed) { Err(AccessError::Flush) } else { Ok(()) }
    }
}
