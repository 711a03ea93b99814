//! Write-backs that have failed.
//!
//! The kernel tells of such a failure once for each open file description, of the whole file and not of a page, and takes the pages for
//! clean from then on: it would drop them, and would say the next time that all is well. So a region remembers it. As long as it does,
//! none of its pages is dropped, no unit leaves, and each FLUSH fails. What is in memory is written again ([`crate::engine::Engine::repair`])
//! until that goes well.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use terrace_sync::{Mutex, MutexGuard};

/// When it was last tried to write everything again.
pub(crate) type Tried = Option<Instant>;

/// The failures of a region's file.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// So far.
    noticed: AtomicU64,
    /// As many of them as there were when everything began to be written again, successfully.
    repaired: AtomicU64,
    /// Held from asking for failures, which are told of once, until they are noted and no page is dropped that they may be about.
    dropping: Mutex<Tried>,
}

impl Losses {
    /// Something may be in memory only, and taken for clean. Returns whether that is news.
    pub(crate) fn note(&self) -> bool {
        let before = self.noticed.fetch_add(1, Ordering::AcqRel);
        before == self.repaired.load(Ordering::Acquire)
    }

    /// Whether there are any that were not repaired.
    pub(crate) fn are_there(&self) -> bool {
        self.noticed.load(Ordering::Acquire) != self.repaired.load(Ordering::Acquire)
    }

    /// How many there were so far, for [`Losses::end`].
    pub(crate) fn noticed(&self) -> u64 {
        self.noticed.load(Ordering::Acquire)
    }

    /// Everything was written again since there were so many.
    pub(crate) fn end(&self, noticed: u64) {
        self.repaired.store(noticed, Ordering::Release);
    }

    /// For whoever asks the description that pages are written back by for failures.
    pub(crate) fn alone(&self) -> MutexGuard<'_, Tried> {
        self.dropping.lock()
    }
}
