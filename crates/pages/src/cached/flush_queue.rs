//! Flushes that have not begun.

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_sync::{Condvar, Mutex};

use crate::access::Access;

/// Flushes that wait for the thread.
#[derive(Debug, Default)]
pub(super) struct FlushQueue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    flushes: VecDeque<Arc<Access>>,
    is_closed: bool,
}

impl FlushQueue {
    pub(super) fn add(&self, flushes: Vec<Arc<Access>>) {
        if !flushes.is_empty() {
            self.state.lock().flushes.extend(flushes);
            self.changed.notify_one();
        }
    }

    /// Stops the thread once the flushes have ended.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_one();
    }

    /// Waits for a flush. `None` if the thread must stop.
    pub(super) fn next(&self) -> Option<Arc<Access>> {
        let mut state = self.state.lock();
        loop {
            if let Some(flush) = state.flushes.pop_front() {
                return Some(flush);
            }
            if state.is_closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}
