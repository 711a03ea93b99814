//! Failed write-backs.
//!
//! The kernel reports a write-back failure once per open file description, for the whole file, and marks the pages
//! clean: it may drop them, and the next sync succeeds. So the region records the failure. Until it is repaired, no page
//! of the region leaves, and each FLUSH fails. A repair writes all cached pages again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use terrace_sync::{Mutex, MutexGuard};

/// The write-back failures of a region's file.
#[derive(Debug, Default)]
pub(super) struct Losses {
    /// Failures so far.
    noticed: AtomicU64,
    /// The value of `noticed` when the last successful repair began.
    repaired: AtomicU64,
    /// When the first failure since then was recorded.
    begun: Mutex<Option<Instant>>,
    /// When a repair was last tried. Held from a call that may consume a failure report of the region's description until
    /// the failure is recorded and no page that it may concern is dropped.
    tried: Mutex<Option<Instant>>,
}

impl Losses {
    /// Records a failure. Returns whether it is the first since the last repair.
    pub(super) fn note(&self) -> bool {
        let before = self.noticed.fetch_add(1, Ordering::AcqRel);
        let is_first = before == self.repaired.load(Ordering::Acquire);
        if is_first {
            *self.begun.lock() = Some(Instant::now());
        }
        is_first
    }

    /// Whether failures are not repaired for so long.
    pub(super) fn have_lasted(&self, time: Duration) -> bool {
        self.are_there() && self.begun.lock().is_some_and(|begun| begun.elapsed() >= time)
    }

    /// Whether failures are not repaired yet.
    pub(super) fn are_there(&self) -> bool {
        self.noticed() != self.repaired.load(Ordering::Acquire)
    }

    /// The number of failures so far, for [`Losses::end`].
    pub(super) fn noticed(&self) -> u64 {
        self.noticed.load(Ordering::Acquire)
    }

    /// A repair that began at `noticed` failures has succeeded.
    pub(super) fn end(&self, noticed: u64) {
        self.repaired.store(noticed, Ordering::Release);
    }

    /// Excludes other threads that may consume failure reports.
    pub(super) fn alone(&self) -> MutexGuard<'_, Option<Instant>> {
        self.tried.lock()
    }
}
