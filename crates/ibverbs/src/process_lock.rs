//! Locks of the process, which any thread of the program may take.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use terrace_sync::Uncancelled;

/// A lock of the process that this thread holds. The thread is not cancelled meanwhile: files are opened and sockets closed under
/// such locks, and these functions of the C library are cancellation points.
pub struct Locked<T: 'static> {
    data: MutexGuard<'static, T>,
    /// Dropped last.
    _uncancelled: Uncancelled,
}

/// Locks a mutex of the process.
pub fn lock<T>(mutex: &'static Mutex<T>) -> Locked<T> {
    let uncancelled = Uncancelled::new();
    // No code panics while it holds such a lock; the data would be valid even after a panic.
    let data = mutex.lock().unwrap_or_else(PoisonError::into_inner);
    Locked { data, _uncancelled: uncancelled }
}

impl<T> Deref for Locked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.data
    }
}

impl<T> DerefMut for Locked<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.data
    }
}
