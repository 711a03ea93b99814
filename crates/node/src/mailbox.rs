//! Answers on their way to the thread that drives a session. `tests/mailbox_model.rs` tries this in every interleaving.

use terrace_access::proto::Status;

use crate::sync::{AtomicBool, Backlog, Ordering};

/// Queues the answers to a session's calls until its owner takes them.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    answers: Backlog<(u64, Status)>,
    /// Whether no more answers will come.
    is_lost: AtomicBool,
}

impl Mailbox {
    /// Takes the queued answers, and returns whether no more will come.
    pub fn take(&self) -> (Vec<(u64, Status)>, bool) {
        // First: an answer that came before the connection's end must not be missed.
        let is_lost = self.is_lost.load(Ordering::Acquire);
        (self.answers.take(), is_lost)
    }

    /// Adds an answer to a call.
    pub fn put(&self, id: u64, status: Status) {
        self.answers.add((id, status));
    }

    /// No more answers will come.
    pub fn close(&self) {
        self.is_lost.store(true, Ordering::Release);
    }
}
