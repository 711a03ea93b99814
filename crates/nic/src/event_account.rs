//! Counting the acknowledgements of events.

use terrace_sync::{Condvar, Mutex};

/// Events of one object that were delivered, less those that were acknowledged. Destroying waits for zero.
#[derive(Default)]
pub(crate) struct EventAccount {
    /// Signed: a program that acknowledges too much must not wait for ever, or bring the process down.
    open: Mutex<i64>,
    all_acknowledged: Condvar,
}

impl EventAccount {
    pub fn count_delivered(&self) {
        *self.open.lock() += 1;
    }

    pub fn acknowledge(&self, count: u32) {
        *self.open.lock() -= i64::from(count);
        self.all_acknowledged.notify_all();
    }

    /// Waits until every delivered event is acknowledged.
    pub fn wait_acknowledged(&self) {
        let mut open = self.open.lock();
        while *open > 0 {
            self.all_acknowledged.wait(&mut open);
        }
    }
}
