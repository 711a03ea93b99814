//! Failed write-backs.
//!
//! The kernel reports a write-back failure once per open file description, for the whole file, and marks the pages
//! clean: it may drop them, and the next sync succeeds. So the region records the failure. Until it is repaired, no
//! page of the region is dropped, no unit is demoted, and each FLUSH fails. [`crate::engine::Engine::repair`] writes
//! all cached pages again until that succeeds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use terrace_sync::{Mutex, MutexGuard};

/// When all pages were last written again, successfully or not.
pub(crate) type Tried = Option<Instant>;

/// The write-back failures of a region's file.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// Failures so far.
    noticed: AtomicU64,
    /// The value of `noticed` when the last successful repair began.
    repaired: AtomicU64,
    /// Held from a call that may consume a failure report until the failure is recorded and no page that it may concern
    /// is dropped.
    dropping: Mutex<Tried>,
}

impl Losses {
    /// Records a failure: pages that the kernel holds as clean may not be in the file. Returns whether it is the first
    /// since the last repair.
    pub(crate) fn note(&self) -> bool {
        let before = self.noticed.fetch_add(1, Ordering::AcqRel);
        before == self.repaired.load(Ordering::Acquire)
    }

    /// Whether failures are not repaired yet.
    pub(crate) fn are_there(&self) -> bool {
        self.noticed.load(Ordering::Acquire) != self.repaired.load(Ordering::Acquire)
    }

    /// The number of failures so far, for [`Losses::end`].
    pub(crate) fn noticed(&self) -> u64 {
        self.noticed.load(Ordering::Acquire)
    }

    /// A repair that began at `noticed` failures has succeeded.
    pub(crate) fn end(&self, noticed: u64) {
        self.repaired.store(noticed, Ordering::Release);
    }

    /// Excludes other threads that may consume failure reports of the write-back description.
    pub(crate) fn alone(&self) -> MutexGuard<'_, Tried> {
        self.dropping.lock()
    }
}
