//! Whose turn it is to call a device's callbacks.

use crate::sync::{AtomicBool, Ordering};

/// Rounds of calls at most before the network is polled again, while callbacks request more. A request stays until the
/// next pass.
const ROUNDS_MAX: usize = 4;

/// One thread at a time calls the callbacks, and no request is lost.
#[derive(Debug, Default)]
pub(crate) struct CallbackTurn {
    /// Whether a callback has been given something to do since the last call.
    is_requested: AtomicBool,
    /// Whether a thread is calling them.
    is_taken: AtomicBool,
}

impl CallbackTurn {
    /// Notes that a callback has been given something to do.
    pub fn request(&self) {
        // A swap, as in `take`: loom would not know the order of a store and a swap. It takes no longer than the store.
        self.is_requested.swap(true, Ordering::SeqCst);
    }

    /// Whether a callback has been given something to do since they were called.
    #[inline]
    pub fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::SeqCst)
    }

    /// Calls the callbacks by `call`, unless another thread does: again while one of them requests it. Returns whether
    /// there was anything to do.
    pub fn take(&self, mut call: impl FnMut() -> bool) -> bool {
        let mut active = false;
        for _ in 0..ROUNDS_MAX {
            // A thread that requests a call and finds another thread here relies on that thread to check again.
            let taken = self.is_taken.compare_exchange(false, true, Ordering::SeqCst, Ordering::SeqCst);
            if taken.is_err() {
                break;
            }
            // Not a store: what the last request is for is seen by the calls.
            self.is_requested.swap(false, Ordering::SeqCst);
            active |= call();
            self.is_taken.store(false, Ordering::SeqCst);
            if !self.is_requested() {
                break;
            }
        }
        active
    }

    /// In a forked child: the thread that had it is the parent's.
    pub fn forget(&self) {
        self.is_taken.store(false, Ordering::SeqCst);
    }
}
