//! Pausing the engine while the process forks.

use crate::sync::{AtomicBool, AtomicU32, Ordering};

/// The engine holds no lock while a fork finds it parked.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    /// Forks during which the engine may hold no locks.
    forks: AtomicU32,
    is_parked: AtomicBool,
}

impl Pause {
    /// A fork begins. It waits until [`Pause::is_parked`].
    pub fn begin(&self) {
        self.forks.fetch_add(1, Ordering::SeqCst);
    }

    /// The fork is over.
    pub fn end(&self) {
        self.forks.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether the engine is parked, and stays so until the fork that asks ends.
    pub fn is_parked(&self) -> bool {
        self.is_parked.load(Ordering::SeqCst)
    }

    /// Whether a fork wants the engine parked.
    pub fn is_wanted(&self) -> bool {
        self.forks.load(Ordering::SeqCst) > 0
    }

    /// The engine waits, without locks, until no fork wants it parked. `nap` passes some time.
    pub fn park(&self, nap: impl Fn()) {
        // A fork that begins while this one ends may have seen the engine parked: then it has to park again.
        while self.is_wanted() {
            self.is_parked.store(true, Ordering::SeqCst);
            while self.is_wanted() {
                nap();
            }
            self.is_parked.store(false, Ordering::SeqCst);
        }
    }

    /// In the child, which has no engine.
    pub fn forget(&self) {
        self.is_parked.store(false, Ordering::SeqCst);
        self.forks.store(0, Ordering::SeqCst);
    }
}
