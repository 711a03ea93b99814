//! Remote procedure calls of a session: queued, delayed and in flight.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use terrace_transport::{Time, WcStatus};

use super::entry::{Local, Seq};
use crate::proto::{Body, EncodeError, IMMEDIATE_IDS, Magic, Message, Pages, Read, Source, Status, Write};

/// A call to send to the server over the control queue pair.
#[derive(Clone, Debug)]
pub struct Call {
    /// Returned with the answer. The upper half is the session's tag.
    pub id: u64,
    pub(super) request: Request,
}

impl Call {
    /// The message.
    pub fn message(&self) -> Message<'_> {
        let body = match &self.request {
            Request::Magic(magic) => Body::Magic(*magic),
            Request::Read(read) => Body::Read(read.clone()),
            Request::Write { rkey, va, length, source } => {
                let source = match source {
                    Data::Inline(data) => Source::Inline(data),
                    Data::Remote { va, rkey } => Source::Remote { va: *va, rkey: *rkey },
                };
                Body::Write(Write { rkey: *rkey, va: *va, length: *length, source })
            }
        };
        Message { id: self.id, body }
    }

    /// Writes the message into a buffer; returns its length.
    ///
    /// # Errors
    /// If the buffer is too small; [`MESSAGE_BYTES_MAX`](crate::proto::MESSAGE_BYTES_MAX) bytes are always enough.
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
    /// The work request; `None` if none waits for the call.
    pub(super) seq: Option<Seq>,
    /// The offset of its range in the work request.
    pub(super) offset: u64,
    /// The program's memory that the server reads or writes.
    pub(super) local: Option<Local>,
    pub(super) request: Request,
    /// How often the server has answered `Busy`.
    pub(super) refusals: u32,
}

/// A server that answered `Busy` is asked again after this long, in nanoseconds, and twice as long each further time.
const BUSY_DELAY_NS: u64 = 100_000;
/// Longest such delay, as a power of two of the first.
const BUSY_DOUBLINGS_MAX: u32 = 7;

/// The calls of a session.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Held until earlier work requests are done.
    pub(super) held: Vec<Task>,
    /// To be sent as soon as the server takes one more.
    pub(super) ready: VecDeque<Task>,
    /// Delayed after `Busy`.
    delayed: Vec<(Time, Task)>,
    flights: BTreeMap<u64, Task>,
    next_id: u32,
}

impl Calls {
    /// The next call, if the server takes one more.
    pub(super) fn launch(&mut self, tag: u32, in_flight_max: usize) -> Option<Call> {
        if self.flights.len() >= in_flight_max {
            return None;
        }
        let task = self.ready.pop_front()?;
        let id = u64::from(tag) << 32 | u64::from(self.next_id);
        // Small enough to be answered by an immediate.
        self.next_id = (self.next_id + 1) % IMMEDIATE_IDS;
        let call = Call { id, request: task.request.clone() };
        self.flights.insert(id, task);
        Some(call)
    }

    /// The task of an answered call.
    pub(super) fn land(&mut self, id: u64) -> Option<Task> {
        self.flights.remove(&id)
    }

    /// Delays a task that the server answered with `Busy`.
    pub(super) fn delay(&mut self, now: Time, mut task: Task) {
        let delay_ns = BUSY_DELAY_NS << task.refusals.min(BUSY_DOUBLINGS_MAX);
        task.refusals += 1;
        self.delayed.push((now.after_ns(delay_ns), task));
    }

    /// Makes tasks ready whose delay is over.
    pub(super) fn expire(&mut self, now: Time) {
        let ready = &mut self.ready;
        self.delayed.extract_if(.., |(until, _)| *until <= now).for_each(|(_, task)| ready.push_back(task));
    }

    /// When [`Calls::expire`] has work.
    pub(super) fn deadline(&self) -> Option<Time> {
        self.delayed.iter().map(|(until, _)| *until).min()
    }

    /// Takes out every task that has not been sent and is of a work request that `is_of` names.
    pub(super) fn drop_unsent(&mut self, mut is_of: impl FnMut(Seq) -> bool) -> Vec<Task> {
        let mut wanted = |task: &mut Task| task.seq.is_some_and(&mut is_of);
        let mut dropped: Vec<Task> = self.held.extract_if(.., &mut wanted).collect();
        dropped.extend(self.delayed.extract_if(.., |(_, task)| wanted(task)).map(|(_, task)| task));
        for mut task in std::mem::take(&mut self.ready) {
            if wanted(&mut task) {
                dropped.push(task);
            } else {
                self.ready.push_back(task);
            }
        }
        dropped
    }

    /// Drops the unsent tasks.
    pub(super) fn forget_unsent(&mut self) {
        self.held.clear();
        self.ready.clear();
        self.delayed.clear();
    }

    /// Takes out all tasks: no answer will come any more.
    pub(super) fn drop_all(&mut self) -> Vec<Task> {
        let mut dropped: Vec<Task> = std::mem::take(&mut self.held);
        dropped.extend(std::mem::take(&mut self.ready));
        dropped.extend(std::mem::take(&mut self.delayed).into_iter().map(|(_, task)| task));
        dropped.extend(std::mem::take(&mut self.flights).into_values());
        dropped
    }

    /// Calls that the server has not answered.
    pub(super) fn in_flight(&self) -> usize {
        self.flights.len()
    }
}

/// The completion status for a server's refusal; `None` for a status that is no failure of the work request.
pub(super) fn completion_status(status: Status) -> Option<WcStatus> {
    match status {
        Status::Ok | Status::Busy | Status::Plain => None,
        Status::NoSuchRegion | Status::AccessDenied | Status::OutOfRange => Some(WcStatus::RemoteAccess),
        Status::Invalid | Status::Unsupported => Some(WcStatus::RemoteInvalidRequest),
        Status::DeviceError | Status::NoSpace => Some(WcStatus::RemoteOperation),
        Status::ClientMemory => Some(WcStatus::LocalProtection),
    }
}

/// A call for some pages of a part of a READ.
pub(super) fn read(rkey: u32, va: u64, length: u32, pages: Option<Pages>, dest: (u64, u32)) -> Request {
    Request::Read(Read { rkey, va, length, pages, dest_va: dest.0, dest_rkey: dest.1 })
}
