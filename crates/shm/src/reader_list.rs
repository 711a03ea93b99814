//! The readers that grace periods wait for. `tests/reader_model.rs` tries the list in every interleaving.

use std::io;

use crate::handshake;
use crate::sync::{AtomicBool, AtomicUsize, Ordering, RwLock};

/// Processes that may be copying. One list for this process, not one for each device: pagers know nothing of devices.
pub(crate) struct ReaderList<T> {
    all: RwLock<Vec<T>>,
    /// Length of the list, readable without the lock.
    count: AtomicUsize,
    /// In a child of `fork`: the lock will never be released.
    is_lost: AtomicBool,
}

impl<T: Clone> ReaderList<T> {
    /// A list of these parts: empty, 0 and false. They are arguments because a model's are not made by constant
    /// functions.
    pub(crate) const fn of(all: RwLock<Vec<T>>, count: AtomicUsize, is_lost: AtomicBool) -> ReaderList<T> {
        ReaderList { all, count, is_lost }
    }

    /// Adds a reader. It may read records only after this.
    pub(crate) fn add(&self, one: T) -> io::Result<()> {
        if self.is_lost.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.change(|all| all.push(one));
        Ok(())
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Vec<T>)) {
        if self.is_lost.load(Ordering::Relaxed) {
            return;
        }
        let mut all = self.all.write();
        change(&mut all);
        // A grace period that has to see an added reader sees this: it comes before the full fence of the reader's
        // first access.
        self.count.store(all.len(), Ordering::Relaxed);
    }

    /// All readers that may have seen what was withdrawn before this call.
    #[inline]
    pub(crate) fn all_now(&self) -> Vec<T> {
        handshake::fence_after_withdrawal();
        match self.count.load(Ordering::Relaxed) {
            0 => Vec::new(),
            // Cloned: a process that goes away during the wait takes the lock to leave the list.
            _ => self.all.read().clone(),
        }
    }

    /// In the child after `fork`. If another thread had the lock in the parent, the list counts as empty from then on.
    pub(crate) fn forget(&self) {
        match self.all.try_write() {
            Some(mut all) => all.clear(),
            None => self.is_lost.store(true, Ordering::Relaxed),
        }
        self.count.store(0, Ordering::Relaxed);
    }
}
