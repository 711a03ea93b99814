//! Queue pairs that the executor has to visit.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::schedule::Schedule;
use crate::sync::{AtomicBool, Mutex, Ordering};

/// The queue pairs with work queues in memory that may have entries to execute, in the order of their turns.
pub(crate) struct Runnable<Q> {
    list: Mutex<VecDeque<Arc<Q>>>,
    any: AtomicBool,
}

impl<Q> Default for Runnable<Q> {
    fn default() -> Runnable<Q> {
        Runnable { list: Mutex::default(), any: AtomicBool::new(false) }
    }
}

impl<Q: AsRef<Schedule>> Runnable<Q> {
    /// Adds a queue pair at the end, unless it is on the list.
    pub fn add(&self, qp: &Arc<Q>) {
        if !(**qp).as_ref().is_runnable.swap(true, Ordering::SeqCst) {
            let mut list = self.list.lock();
            list.push_back(qp.clone());
            self.any.store(true, Ordering::SeqCst);
        }
    }

    /// Takes the first. What makes it runnable from now on adds it again.
    pub fn take(&self) -> Option<Arc<Q>> {
        if self.is_empty() {
            return None;
        }
        let mut list = self.list.lock();
        let first = list.pop_front();
        self.any.store(!list.is_empty(), Ordering::SeqCst);
        drop(list);
        if let Some(qp) = &first {
            (**qp).as_ref().is_runnable.store(false, Ordering::SeqCst);
        }
        first
    }

    /// Does not take the lock.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any.load(Ordering::SeqCst)
    }

    /// Drops everything: when the device closes, and in a forked child.
    pub fn clear(&self) {
        while self.take().is_some() {}
    }
}
