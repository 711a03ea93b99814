//! Callbacks that make progress together with the device: IO behind paged regions, protocols above queue pairs.

use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use terrace_sync::{ArcRwLockWriteGuard, RwLock};

use crate::callback_turn::CallbackTurn;

/// Called by the thread that makes progress on a device: the thread that polls a completion queue, or the engine.
pub trait ProgressCallback: Send + Sync {
    /// Submits requested work, takes finished work, and notifies its waiters. Returns whether there was anything to do.
    /// Never blocks. Called by one thread at a time and without locks of the device held, so it may call verbs; these
    /// do not call it again while it runs.
    fn advance(&self) -> bool;

    /// Readable while [`ProgressCallback::advance`] would find something finished: the engine sleeps on it.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Its statistics in `terrace stat`, under a name.
    fn report(&self) -> Option<(String, serde_json::Value)> {
        None
    }
}

thread_local! {
    /// Whether callbacks wait until this thread has ended [`postpone`].
    static ARE_POSTPONED: Cell<bool> = const { Cell::new(false) };
}

/// Carries out `act`, in which this thread calls no callbacks, of any device.
pub(crate) fn postpone<R>(act: impl FnOnce() -> R) -> R {
    let before = ARE_POSTPONED.replace(true);
    let result = act();
    ARE_POSTPONED.set(before);
    result
}

type List = SmallVec<[Arc<dyn ProgressCallback>; 2]>;

/// The locked list.
pub(crate) type ForkLock = ArcRwLockWriteGuard<List>;

/// The callbacks of a device.
#[derive(Default)]
pub(crate) struct ProgressCallbacks {
    list: Arc<RwLock<List>>,
    /// Whether there are any, for a check without the lock.
    any: AtomicBool,
    turn: CallbackTurn,
}

impl ProgressCallbacks {
    pub fn attach(&self, callback: Arc<dyn ProgressCallback>) {
        self.list.write().push(callback);
        self.any.store(true, Ordering::SeqCst);
    }

    /// Drops them, when the device closes.
    pub fn clear(&self) {
        self.any.store(false, Ordering::SeqCst);
        let list = std::mem::take(&mut *self.list.write());
        drop(list);
    }

    /// Locks the list while the process forks.
    pub fn lock_for_fork(&self) -> ForkLock {
        self.list.write_arc()
    }

    /// In a forked child: they are the parent's, and dropping them might wait for threads that the child does not have.
    pub fn forget(&self, lock: &mut ForkLock) {
        self.any.store(false, Ordering::SeqCst);
        self.turn.forget();
        std::mem::forget(std::mem::take(&mut **lock));
    }

    /// All of them, for a thread that is about to sleep.
    pub fn all(&self) -> List {
        if self.any.load(Ordering::SeqCst) { self.list.read().clone() } else { List::new() }
    }

    /// Notes that a callback has been given something to do.
    pub fn request(&self) {
        self.turn.request();
    }

    /// Whether one of them has been given something to do since they were called.
    pub fn are_requested(&self) -> bool {
        self.any.load(Ordering::SeqCst) && self.turn.is_requested()
    }

    /// Calls them if one of them has been given something to do, and they are not postponed.
    #[inline]
    pub fn call_if_requested(&self) {
        if self.turn.is_requested() && !ARE_POSTPONED.get() {
            self.advance();
        }
    }

    /// Calls each of them, unless another thread does. Returns whether there was anything to do.
    #[inline]
    pub fn advance(&self) -> bool {
        self.any.load(Ordering::Relaxed) && self.call()
    }

    fn call(&self) -> bool {
        self.turn.take(|| {
            let mut active = false;
            for callback in self.all() {
                active |= callback.advance();
            }
            active
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    struct Counting {
        callbacks: Arc<ProgressCallbacks>,
        calls: AtomicU32,
    }

    impl ProgressCallback for Counting {
        fn advance(&self) -> bool {
            // The first call asks for another one, as a verb that it calls would.
            if self.calls.fetch_add(1, Ordering::Relaxed) == 0 {
                self.callbacks.request();
                self.callbacks.call_if_requested();
            }
            false
        }
    }

    #[test]
    fn a_request_made_while_callbacks_run_is_served_afterwards() {
        let callbacks = Arc::new(ProgressCallbacks::default());
        let counting = Arc::new(Counting { callbacks: callbacks.clone(), calls: AtomicU32::new(0) });
        callbacks.attach(counting.clone());
        callbacks.call_if_requested();
        assert_eq!(counting.calls.load(Ordering::Relaxed), 0, "no call was requested");
        callbacks.advance();
        assert_eq!(counting.calls.load(Ordering::Relaxed), 2);
        callbacks.request();
        postpone(|| callbacks.call_if_requested());
        assert_eq!(counting.calls.load(Ordering::Relaxed), 2, "they are postponed");
        callbacks.call_if_requested();
        assert_eq!(counting.calls.load(Ordering::Relaxed), 3);
        callbacks.clear();
        assert!(!callbacks.advance());
        assert_eq!(counting.calls.load(Ordering::Relaxed), 3);
    }
}
