//! Pending responses: the queue from which the responder sends, in PSN order. Deferred operations and completions keep
//! their place in it.

use std::collections::VecDeque;

use terrace_wire::{Psn, Syndrome};

use super::read::{ReadResponse, Source};
use crate::host::{Deferred, RemoteError};
use crate::types::Wc;

/// An entry of the queue of pending responses.
#[derive(Debug)]
pub(super) enum Response {
    Ack {
        psn: Psn,
        syndrome: Syndrome,
        msn: u32,
    },
    Read(ReadResponse),
    /// ACKs of pending WRITEs, whose data is not in memory yet.
    Writes(PendingWrites),
    /// The response to a deferred operation.
    Deferred(DeferredOperation),
    /// A deferred completion: it must not be visible before the pending writes ahead of it are done.
    Completion(Wc),
    AtomicResult {
        psn: Psn,
        value: u64,
        msn: u32,
    },
    /// The empty READ response that answers FLUSH and ATOMIC WRITE.
    Done {
        psn: Psn,
        msn: u32,
    },
}

/// Keys of pending changes of memory. Accesses by one key take effect in the order of their requests. Another
/// key may refer to the same bytes without its pager knowing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Keys {
    #[default]
    None,
    One(u32),
    Several,
}

impl Keys {
    pub(super) fn and(self, other: Keys) -> Keys {
        match (self, other) {
            (Keys::None, keys) | (keys, Keys::None) => keys,
            (one, other) if one == other => one,
            _ => Keys::Several,
        }
    }

    /// Whether there is a key other than `rkey`.
    pub(super) fn have_another(self, rkey: u32) -> bool {
        self != Keys::None && self != Keys::One(rkey)
    }
}

/// Consecutive pending writes, and the ACKs that wait for them.
#[derive(Debug, Default)]
pub(super) struct PendingWrites {
    writes: VecDeque<Write>,
    keys: Keys,
}

#[derive(Debug)]
struct Write {
    psn: Psn,
    transfer: Box<dyn Deferred>,
    /// PSN and MSN of the latest ACK that waits for this write and for none after it.
    ack: Option<(Psn, u32)>,
}

/// Progress of the pending writes of an entry.
pub(super) enum Progress {
    /// Some are pending; this ACK need not wait for them.
    Partial(Option<(Psn, u32)>),
    Complete(Option<(Psn, u32)>),
    Failed(Psn, RemoteError),
}

impl PendingWrites {
    /// Adds a write by this key.
    pub(super) fn push(&mut self, psn: Psn, rkey: u32, transfer: Box<dyn Deferred>) {
        self.writes.push_back(Write { psn, transfer, ack: None });
        self.keys = self.keys.and(Keys::One(rkey));
    }

    pub(super) fn len(&self) -> usize {
        self.writes.len()
    }

    /// Defers an ACK for everything up to `psn` until the latest write is done.
    pub(super) fn defer_ack(&mut self, up_to: Psn, msn: u32) {
        let Some(write) = self.writes.back_mut() else { return };
        let psn = write.ack.map_or(up_to, |(psn, _)| if psn.is_before(up_to) { up_to } else { psn });
        write.ack = Some((psn, msn));
    }

    /// Removes the completed writes, in order.
    pub(super) fn poll(&mut self) -> Progress {
        let mut ack = None;
        while let Some(write) = self.writes.front() {
            match write.transfer.outcome() {
                None => return Progress::Partial(ack),
                Some(Ok(())) => ack = write.ack.or(ack),
                Some(Err(error)) => return Progress::Failed(write.psn, error),
            }
            self.writes.pop_front();
        }
        Progress::Complete(ack)
    }
}

/// What the response to a deferred operation brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Returns {
    /// The value before an atomic.
    Value,
    /// The offset of an APPEND's record.
    Offset,
    /// Nothing: it answers a FLUSH or an ATOMIC WRITE.
    Nothing,
}

/// A deferred atomic, FLUSH or ATOMIC WRITE, or an APPEND.
#[derive(Debug)]
pub(super) struct DeferredOperation {
    pub(super) psn: Psn,
    pub(super) msn: u32,
    pub(super) rkey: u32,
    pub(super) returns: Returns,
    pub(super) transfer: Box<dyn Deferred>,
}

impl DeferredOperation {
    /// The response, once the transfer has ended.
    pub(super) fn response(&self) -> Option<Result<Response, RemoteError>> {
        let outcome = self.transfer.outcome()?;
        let (psn, msn) = (self.psn, self.msn);
        Some(outcome.and_then(|()| {
            if self.returns == Returns::Nothing {
                return Ok(Response::Done { psn, msn });
            }
            let mut value = [0; 8];
            self.transfer.read(0, &mut value)?;
            Ok(Response::AtomicResult { psn, value: u64::from_ne_bytes(value), msn })
        }))
    }
}

impl Response {
    /// The PSN at which this response waits for memory, if it does.
    pub(super) fn blocked_psn(&self, mtu: u64) -> Option<Psn> {
        match self {
            Response::Read(read) => {
                let is_fetching = matches!(read.source(u64::from(read.sent) * mtu), Ok(Source::Fetching));
                (is_fetching || read.is_blocked()).then(|| read.next_psn())
            }
            Response::Writes(_) | Response::Deferred(_) => self.next_psn(),
            _ => None,
        }
    }

    /// PSN of the oldest packet that this still has to answer, if any.
    pub(super) fn next_psn(&self) -> Option<Psn> {
        match self {
            Response::Read(read) => Some(read.next_psn()),
            Response::Writes(writes) => writes.writes.front().map(|write| write.psn),
            Response::Deferred(operation) => Some(operation.psn),
            Response::Ack { psn, .. } | Response::AtomicResult { psn, .. } | Response::Done { psn, .. } => {
                Some(*psn)
            }
            Response::Completion(_) => None,
        }
    }

    /// The keys by which this changes memory.
    pub(super) fn keys(&self) -> Keys {
        match self {
            Response::Writes(writes) => writes.keys,
            Response::Deferred(operation) => Keys::One(operation.rkey),
            _ => Keys::None,
        }
    }

    /// Whether this is a pending change of memory.
    pub(super) fn is_pending_change(&self) -> bool {
        matches!(self, Response::Writes(_) | Response::Deferred(_))
    }

    /// Whether this is the result of the atomic, FLUSH, ATOMIC WRITE or APPEND at this PSN.
    pub(super) fn is_result_at(&self, at: Psn) -> bool {
        match self {
            Response::AtomicResult { psn, .. } | Response::Done { psn, .. } => *psn == at,
            Response::Deferred(operation) => operation.psn == at,
            _ => false,
        }
    }

    /// Of the `count` packets from `first` on, how many come before the unsent ones of this READ response. `None` if it
    /// does not send the last of them, or if it lacks some of them and has not begun: behind another response to the
    /// same READ it would begin a second time.
    pub(super) fn missing_packets(&self, first: Psn, count: u32) -> Option<u32> {
        let Response::Read(read) = self else { return None };
        let (next, end) = (read.next_psn(), read.psn.plus(read.end));
        let last = first.plus(count).minus(1);
        if last.is_before(next) || !last.is_before(end) {
            return None;
        }
        match u32::try_from(next.since(first)) {
            Err(_) | Ok(0) => Some(0),
            Ok(missing) => (read.sent > 0).then_some(missing),
        }
    }
}
