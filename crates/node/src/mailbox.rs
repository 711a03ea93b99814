//! The queue of answers to a session's calls. `tests/mailbox_model.rs` tries it in every interleaving.

use std::ops::Range;

use terrace_access::proto::Status;

use crate::sync::{AtomicBool, Backlog, Ordering};

/// Queues the answers to a session's calls until the session's thread takes them.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    answers: Backlog<(Range<u64>, Status)>,
    /// Whether the connection has ended, so that no more answers will come.
    is_closed: AtomicBool,
}

impl Mailbox {
    /// Takes the queued answers, and returns whether no more will come.
    pub fn take(&self) -> (Vec<(Range<u64>, Status)>, bool) {
        // First: an answer that came before the connection's end must not be missed.
        let is_closed = self.is_closed.load(Ordering::Acquire);
        (self.answers.take(), is_closed)
    }

    /// Adds an answer to the calls with these ids.
    pub fn put(&self, ids: Range<u64>, status: Status) {
        self.answers.add((ids, status));
    }

    /// Marks the connection as ended: no more answers will come.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }
}
