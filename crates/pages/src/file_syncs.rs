//! Syncs of a region's file, and whether one has failed.
//!
//! After a failed sync, nothing that was written since the last successful one counts as durable: the kernel marks the
//! pages that it could not write as clean, and reports the failure to one sync alone. So the pages in memory become dirty,
//! and are written again. A page that has left memory since then cannot be: no FLUSH of the region succeeds any more in
//! this process.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::io::Errno;
use terrace_sync::Mutex;

/// The syncs of a region's file. They are numbered from 1 on.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    /// Held from the beginning of a sync until its failure is recorded.
    alone: Mutex<()>,
    /// The last one that has begun.
    begun: AtomicU64,
    /// The last one that has succeeded.
    succeeded: AtomicU64,
    /// How many have failed. Counted after the pages in memory were made dirty.
    failures: AtomicU64,
    /// The first one that makes all writes so far durable.
    covers_written: AtomicU64,
    /// The first one that makes all pages durable that have left memory.
    covers_left: AtomicU64,
    /// The last one has failed.
    has_failed: AtomicBool,
    /// Pages have left memory that may not be on the device.
    is_lost: AtomicBool,
}

impl Syncs {
    /// Records that the file was written to. Called before the page can leave.
    pub(crate) fn note_written(&self) {
        self.covers_written.fetch_max(self.begun.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
    }

    /// Records that a page leaves memory. It counts as the one that was written last.
    pub(crate) fn note_left(&self) {
        self.covers_left.fetch_max(self.covers_written.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// How many syncs have failed, for [`Syncs::sync`].
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Ordering::SeqCst)
    }

    /// Whether the last sync has failed, or pages are lost.
    pub(crate) fn are_failing(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst) || self.are_pages_lost()
    }

    /// Whether pages have left memory that may not be on the device.
    pub(crate) fn are_pages_lost(&self) -> bool {
        self.is_lost.load(Ordering::SeqCst)
    }

    /// Makes what the caller has written durable with `sync`, unless a sync that began after this call has done so.
    /// `failures` is how many had failed before the caller looked for dirty pages. `make_dirty` makes all pages of the
    /// region in memory dirty.
    ///
    /// # Errors
    /// That of `sync`; `EIO` if another sync has failed meanwhile, whose failure may concern the caller's pages, or if
    /// pages are lost.
    pub(crate) fn sync(
        &self,
        failures: u64,
        sync: impl FnOnce() -> Result<(), Errno>,
        make_dirty: impl FnOnce(),
    ) -> Result<(), Errno> {
        let wanted = self.begun.load(Ordering::SeqCst) + 1;
        let _alone = self.alone.lock();
        if self.failures() != failures || self.are_pages_lost() {
            return Err(Errno::IO);
        }
        if self.succeeded.load(Ordering::SeqCst) >= wanted {
            return Ok(());
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let result = sync();
        self.has_failed.store(result.is_err(), Ordering::SeqCst);
        if result.is_ok() {
            self.succeeded.store(number, Ordering::SeqCst);
            return Ok(());
        }
        make_dirty();
        // Pages that leave from now on were written again.
        if self.covers_left.load(Ordering::SeqCst) > self.succeeded.load(Ordering::SeqCst) {
            self.is_lost.store(true, Ordering::SeqCst);
        }
        self.failures.fetch_add(1, Ordering::SeqCst);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const FAILED: Result<(), Errno> = Err(Errno::IO);

    #[test]
    fn pages_are_lost_that_were_written_and_left_since_the_last_good_sync() {
        let syncs = Syncs::default();
        syncs.note_written();
        syncs.note_left();
        assert_eq!(syncs.sync(0, || Ok(()), || ()), Ok(()));
        syncs.note_left();
        assert_eq!(syncs.sync(0, || FAILED, || ()), FAILED, "what has left is durable");
        assert!(syncs.are_failing() && !syncs.are_pages_lost());
        assert_eq!(syncs.sync(1, || Ok(()), || ()), Ok(()));
        assert!(!syncs.are_failing());
        syncs.note_written();
        syncs.note_left();
        assert_eq!(syncs.sync(1, || FAILED, || ()), FAILED);
        assert_eq!(syncs.sync(2, || Ok(()), || ()), FAILED);
        assert!(syncs.are_failing() && syncs.are_pages_lost());
    }

    #[test]
    fn a_sync_is_shared_if_it_began_late_enough() {
        let syncs = Syncs::default();
        let count = AtomicU64::new(0);
        let sync = || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        std::thread::scope(|scope| {
            let held = syncs.alone.lock();
            let threads = [0; 8].map(|_| scope.spawn(|| syncs.sync(0, sync, || ())));
            std::thread::sleep(Duration::from_millis(500));
            drop(held);
            assert_eq!(threads.map(|thread| thread.join().unwrap()), [Ok(()); 8]);
        });
        assert!(count.load(Ordering::SeqCst) < 8, "{count:?}");
    }
}
