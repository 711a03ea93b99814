//! What wakes the thread that frees slots.

use std::time::Duration;

use terrace_sync::{Condvar, Mutex};

/// What the thread that frees slots is told.
#[derive(Debug, Default)]
pub(super) struct ReclaimSignal {
    state: Mutex<ReclaimState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ReclaimState {
    is_short: bool,
    is_closed: bool,
}

impl ReclaimSignal {
    /// Slots are missing, or soon will be.
    pub(super) fn ask(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.is_short, true) {
            self.changed.notify_one();
        }
    }

    /// Stops the thread.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Waits until slots are missing, or for this long. False if the thread must stop.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        if !state.is_short && !state.is_closed {
            self.changed.wait_for(&mut state, limit);
        }
        state.is_short = false;
        !state.is_closed
    }
}
