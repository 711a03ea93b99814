//! Remote procedure calls of a session: queued, delayed and in flight.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use smallvec::{SmallVec, smallvec};
use terrace_transport::Time;

use super::entry::Seq;
use crate::proto::{
    Body, EncodeError, HEADER_BYTES, IMMEDIATE_IDS, MESSAGE_BYTES_MAX, Magic, Message, Pages, Read, Source,
    Write,
};
use crate::request::Local;
use crate::retries::{Backoff, Retries};

/// Calls to send to the server in one message over the control queue pair.
#[derive(Clone, Debug)]
pub struct Call {
    /// The id of the first call; those of the others follow in succession. The answers have the same ids. The upper half is
    /// the session's tag.
    pub id: u64,
    content: Content,
}

/// The content of a message.
#[derive(Clone, Debug)]
enum Content {
    Magic(Magic),
    Reads(SmallVec<[Read; 1]>),
    Write { rkey: u32, va: u64, length: u32, source: Data },
}

impl Call {
    /// The message.
    pub fn message(&self) -> Message<'_> {
        let body = match &self.content {
            Content::Magic(magic) => Body::Magic(*magic),
            Content::Reads(reads) => Body::Read(reads.clone()),
            Content::Write { rkey, va, length, source } => {
                let source = match source {
                    Data::Inline(data) => Source::Inline(data),
                    Data::Remote { va, rkey } => Source::Remote { va: *va, rkey: *rkey },
                };
                Body::Write(Write { rkey: *rkey, va: *va, length: *length, source })
            }
        };
        Message { id: self.id, body }
    }

    /// The reads that it requests, if it is a call for reads. Their ids follow in succession. In place of the message, the owner
    /// may READ their pages on queue pairs for which the peer's NIC has no signature page: READs of absent pages wait there.
    pub fn reads(&self) -> Option<&[Read]> {
        match &self.content {
            Content::Reads(reads) => Some(reads),
            _ => None,
        }
    }

    /// The number of accesses that it requests.
    pub fn request_count(&self) -> usize {
        match &self.content {
            Content::Magic(_) => 0,
            Content::Reads(reads) => reads.len(),
            Content::Write { .. } => 1,
        }
    }

    /// Writes the message into a buffer; returns its length.
    ///
    /// # Errors
    /// If the buffer is too small; [`MESSAGE_BYTES_MAX`] bytes suffice.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, EncodeError> {
        self.message().encode(out)
    }
}

/// The request of a call.
#[derive(Clone, Debug)]
pub(super) enum Request {
    Magic(Magic),
    Read(Read),
    Write { rkey: u32, va: u64, length: u32, source: Data },
}

/// Data of a WRITE by RPC.
#[derive(Clone, Debug)]
pub(super) enum Data {
    Inline(Arc<[u8]>),
    Remote { va: u64, rkey: u32 },
}

/// A call that a work request waits for.
#[derive(Clone, Debug)]
pub(super) struct Task {
    /// The work request that waits for the call, if any.
    pub(super) seq: Option<Seq>,
    /// The offset of its range in the work request.
    pub(super) offset: u64,
    /// The program's memory that the server reads or writes.
    pub(super) local: Option<Local>,
    pub(super) request: Request,
    /// The number of `Busy` answers.
    pub(super) refusals: u32,
}

/// The delays of retries.
const BACKOFF: Backoff = Backoff { first_ns: 100_000, doublings_max: 7 };

/// The calls of a session.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Calls that wait until earlier work requests are done.
    pub(super) deferred: Vec<Task>,
    /// Calls to send as soon as fewer than `in_flight_max` are in flight.
    pub(super) ready: VecDeque<Task>,
    /// Calls that are retried later, after `Busy`.
    delayed: Retries<Task>,
    /// Calls that the server has not answered, by id.
    in_flight: BTreeMap<u64, Task>,
    next_id: u32,
}

impl Calls {
    /// Takes the next call to send, if fewer than `in_flight_max` are in flight. All reads that are ready share one message,
    /// as far as they fit.
    pub(super) fn send_next(&mut self, tag: u32, in_flight_max: usize) -> Option<Call> {
        if self.in_flight.len() >= in_flight_max {
            return None;
        }
        let task = self.ready.pop_front()?;
        // A call may be in flight while the ids of others have wrapped.
        while self.in_flight.contains_key(&self.id(tag)) {
            self.advance_id();
        }
        let id = self.id(tag);
        let content = match &task.request {
            Request::Magic(magic) => Content::Magic(*magic),
            Request::Read(read) => Content::Reads(smallvec![read.clone()]),
            Request::Write { rkey, va, length, source } => {
                Content::Write { rkey: *rkey, va: *va, length: *length, source: source.clone() }
            }
        };
        self.start(tag, task);
        let mut call = Call { id, content };
        if let Content::Reads(reads) = &mut call.content {
            self.add_reads(id, reads, tag, in_flight_max);
        }
        Some(call)
    }

    /// Adds the other ready reads to a message, while their ids follow in succession.
    fn add_reads(&mut self, first_id: u64, reads: &mut SmallVec<[Read; 1]>, tag: u32, in_flight_max: usize) {
        let mut length = HEADER_BYTES + reads[0].encoded_bytes();
        let mut index = 0;
        while self.in_flight.len() < in_flight_max
            && self.id(tag) == first_id + reads.len() as u64
            && !self.in_flight.contains_key(&self.id(tag))
            && let Some(task) = self.ready.get(index)
        {
            let Request::Read(read) = &task.request else {
                index += 1;
                continue;
            };
            length += read.encoded_bytes();
            if length > MESSAGE_BYTES_MAX {
                return;
            }
            reads.push(read.clone());
            let task = self.ready.remove(index).expect("it was found there");
            self.start(tag, task);
        }
    }

    /// Marks a task in flight, with the next id.
    fn start(&mut self, tag: u32, task: Task) {
        self.in_flight.insert(self.id(tag), task);
        self.advance_id();
    }

    /// The next id.
    fn id(&self, tag: u32) -> u64 {
        u64::from(tag) << 32 | u64::from(self.next_id)
    }

    /// The lower half stays small enough for an immediate.
    fn advance_id(&mut self) {
        self.next_id = (self.next_id + 1) % IMMEDIATE_IDS;
    }

    /// Takes out the task of an answered call.
    pub(super) fn take_answered(&mut self, id: u64) -> Option<Task> {
        self.in_flight.remove(&id)
    }

    /// Delays a task that the server answered with `Busy`.
    pub(super) fn delay(&mut self, now: Time, task: Task) {
        self.delayed.delay(now, BACKOFF, task, |task| &mut task.refusals);
    }

    /// Makes the tasks ready whose delay is over.
    pub(super) fn end_delays(&mut self, now: Time) {
        self.ready.extend(self.delayed.take_due(now));
    }

    /// The end of the earliest delay, for [`Calls::end_delays`].
    pub(super) fn deadline(&self) -> Option<Time> {
        self.delayed.deadline()
    }

    /// Takes out every unsent task of the work requests that `is_of` selects.
    pub(super) fn drop_unsent(&mut self, mut is_of: impl FnMut(Seq) -> bool) -> Vec<Task> {
        let mut wanted = |task: &Task| task.seq.is_some_and(&mut is_of);
        let mut dropped: Vec<Task> = self.deferred.extract_if(.., |task| wanted(task)).collect();
        dropped.extend(self.delayed.take_if(&mut wanted));
        for task in std::mem::take(&mut self.ready) {
            if wanted(&task) {
                dropped.push(task);
            } else {
                self.ready.push_back(task);
            }
        }
        dropped
    }

    /// Drops the unsent tasks.
    pub(super) fn clear_unsent(&mut self) {
        self.deferred.clear();
        self.ready.clear();
        self.delayed = Retries::default();
    }

    /// Takes out all tasks, because the control queue pair is gone.
    pub(super) fn drop_all(&mut self) -> Vec<Task> {
        let mut dropped: Vec<Task> = std::mem::take(&mut self.deferred);
        dropped.extend(std::mem::take(&mut self.ready));
        dropped.extend(self.delayed.take_all());
        dropped.extend(std::mem::take(&mut self.in_flight).into_values());
        dropped
    }

    /// The number of calls that the server has not answered.
    pub(super) fn in_flight_count(&self) -> usize {
        self.in_flight.len()
    }
}

/// A call for some pages of a range of a READ.
pub(super) fn read_request(
    rkey: u32,
    va: u64,
    length: u32,
    pages: Option<Pages>,
    dest: (u64, u32),
) -> Request {
    Request::Read(Read { rkey, va, length, pages, dest_va: dest.0, dest_rkey: dest.1 })
}
