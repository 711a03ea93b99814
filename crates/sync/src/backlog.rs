//! A list of what waits for another thread. `tests/backlog_model.rs` tries it in every interleaving.

use crate::platform::{AtomicBool, Mutex, Ordering};

/// What waits for another thread, in the order in which it came. A thread that looks whether there is anything takes no
/// lock.
#[derive(Debug)]
pub struct Backlog<T> {
    waiting: Mutex<Vec<T>>,
    /// Whether there is anything. Changed under the lock.
    any: AtomicBool,
}

impl<T> Default for Backlog<T> {
    fn default() -> Backlog<T> {
        Backlog { waiting: Mutex::new(Vec::new()), any: AtomicBool::new(false) }
    }
}

impl<T> Backlog<T> {
    /// Adds one.
    pub fn add(&self, one: T) {
        self.add_below(usize::MAX, one);
    }

    /// Adds one, unless `count_max` wait already.
    pub fn add_below(&self, count_max: usize, one: T) {
        let mut waiting = self.waiting.lock();
        if waiting.len() < count_max {
            waiting.push(one);
            self.any.store(true, Ordering::Release);
        }
    }

    /// Whether nothing waits. What was added before this thread was told of it is seen.
    #[inline]
    pub fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Takes everything.
    pub fn take(&self) -> Vec<T> {
        if self.is_empty() {
            return Vec::new();
        }
        let mut waiting = self.waiting.lock();
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *waiting)
    }
}
