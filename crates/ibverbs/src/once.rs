//! The lock for initialization once per process: the log, the identity, the settings, hooks.

use std::sync::Mutex;

use crate::process_lock::{Locked, lock};

/// Held by a thread that initializes process-wide state. While it is held, the only other lock of the table in `fork`
/// that may be taken is a device's.
static ONCE: Mutex<()> = Mutex::new(());

/// Locks process-wide initialization. A child that is forked meanwhile finds it either done or not begun.
pub fn once() -> Locked<()> {
    lock(&ONCE)
}
