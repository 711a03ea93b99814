//! The lock of work that is done once per process: the log, the identity, the settings, hooks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Held by a thread that does once-per-process work. While it is held, no other lock of the table in `fork` is taken
/// but a device's.
static ONCE: Mutex<()> = Mutex::new(());

/// To be held during once-per-process work: a child that is forked meanwhile finds it done, or not begun.
pub fn once() -> MutexGuard<'static, ()> {
    ONCE.lock().unwrap_or_else(PoisonError::into_inner)
}
