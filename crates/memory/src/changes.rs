//! Changes of absent memory that peers have requested, and that pagers carry out: those of a queue pair, and those by a memory window.

use std::sync::{Arc, Weak};

use terrace_sync::Mutex;

use crate::paging::Transfer;

/// The changes that may not have ended.
#[derive(Debug, Default)]
pub struct PendingChanges(Mutex<Vec<Weak<dyn Transfer>>>);

impl PendingChanges {
    /// Adds a change, which its pager keeps until it has ended.
    pub fn add(&self, change: &Arc<dyn Transfer>) {
        let mut changes = self.0.lock();
        if changes.len() == changes.capacity() {
            changes.retain(is_pending);
        }
        changes.push(Arc::downgrade(change));
    }

    /// Cancels all of them ([`Transfer::cancel`]), behind the end of what permitted them: the peer gets no ACK. The caller has no
    /// locks of pagers.
    pub fn cancel(&self) {
        let changes = std::mem::take(&mut *self.0.lock());
        changes.iter().filter_map(Weak::upgrade).for_each(|change| change.cancel());
    }
}

fn is_pending(change: &Weak<dyn Transfer>) -> bool {
    change.upgrade().is_some_and(|change| change.outcome().is_none())
}
