//! The two-sided repetition of what met an absent page (NP-RDMA, section 3.2), and what is never one-sided.
//!
//! | bytes | reverse access | messages |
//! |---|---|---|
//! | up to `inline_bytes_max` | | `Fetch` and `Data`, or `Write` with the data and `Done` |
//! | more | permitted | `Read` or `Write`; the target moves the bytes by a WRITE or READ of its own, then `Done` |
//! | more | not permitted | `Hold` and `Done` (the receiver is ready); the request is repeated one-sided; `Release` |
//!
//! Ids follow in succession. An id is not sent while one is unanswered that is `call_count_max` behind it, so a target
//! that keeps the answers to the last `call_count_max` ids recognises every message that it has seen before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use smallvec::smallvec;
use terrace_transport::{LocalError, Payload, SendOp, Time, WcStatus};

use super::entry::Seq;
use super::order::Class;
use super::{HeldMemory, Initiator, Lent};
use crate::proto::{
    Access, Atomic, AtomicKind, Body, FETCH_BYTES_MAX, Fetch, Hold, INLINE_BYTES_MAX, MESSAGE_BYTES_MAX,
    Message, Open, Read, Source, Write,
};
use crate::region::Region;
use crate::retries::{Backoff, Retries};
use crate::sge_list::{LocalMemory, gather, sub_elements};

/// The delays of retries.
const BACKOFF: Backoff = Backoff { first_ns: 20_000, doublings_max: 9 };

/// What is requested of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The addresses of a region's tables.
    Open { rkey: u32, region_id: u64 },
    /// Bytes in a message, in either direction.
    Inline,
    /// Bytes, moved by the peer.
    Reverse,
    /// That the peer holds the range, for a repetition.
    Hold,
    /// An atomic operation.
    Atomic,
}

/// A call that a work request waits for.
#[derive(Clone, Debug)]
pub(super) struct Task {
    /// The work request, if any.
    pub(super) seq: Option<Seq>,
    /// The bytes of the work request.
    pub(super) range: Range<u64>,
    pub(super) kind: Kind,
    /// The number of `Busy` answers.
    refusals: u32,
}

impl Task {
    fn new(seq: Seq, range: Range<u64>, kind: Kind) -> Task {
        Task { seq: Some(seq), range, kind, refusals: 0 }
    }

    pub(super) fn atomic(seq: Seq) -> Task {
        Task::new(seq, 0..8, Kind::Atomic)
    }

    pub(super) fn hold(seq: Seq, range: Range<u64>) -> Task {
        Task::new(seq, range, Kind::Hold)
    }

    pub(super) fn open(region: &Region) -> Task {
        let kind = Kind::Open { rkey: region.rkey(), region_id: region.description().region_id };
        Task { seq: None, range: 0..0, kind, refusals: 0 }
    }
}

/// The calls of an initiator.
#[derive(Debug, Default)]
pub(super) struct Calls {
    ready: VecDeque<Task>,
    /// Calls that are retried later, after `Busy`.
    delayed: Retries<Task>,
    /// Calls that the peer has not answered, by the lower half of their ids.
    in_flight: BTreeMap<u32, Task>,
    next_id: u32,
    /// The ids of the ranges that the peer holds, which count as unanswered.
    held: BTreeSet<u32>,
    /// Ids of ranges that the peer need not hold any more.
    releases: VecDeque<u64>,
}

impl Calls {
    /// Adds a call.
    pub(super) fn request(&mut self, task: Task) {
        self.ready.push_back(task);
    }

    /// Takes that the peer holds a range.
    pub(super) fn note_held(&mut self, id: u64) {
        self.held.insert(id as u32);
    }

    /// Has the peer told that it need not hold a range any more.
    pub(super) fn release(&mut self, id: u64) {
        self.held.remove(&(id as u32));
        self.releases.push_back(id);
    }

    /// Takes the next call, with the lower half of its id.
    fn start(&mut self, in_flight_max: u32) -> Option<(u32, Task)> {
        // Ids wrap, and are compared by their distance.
        let oldest = self.oldest_in_flight();
        let is_open = oldest.is_none_or(|oldest| self.next_id.wrapping_sub(oldest) < in_flight_max);
        if !is_open {
            return None;
        }
        let task = self.ready.pop_front()?;
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.in_flight.insert(id, task.clone());
        Some((id, task))
    }

    fn oldest_in_flight(&self) -> Option<u32> {
        let ids = self.in_flight.keys().chain(&self.held).copied();
        ids.max_by_key(|id| self.next_id.wrapping_sub(*id))
    }

    /// Takes out the task of an answered call.
    pub(super) fn take_answered(&mut self, id: u32) -> Option<Task> {
        self.in_flight.remove(&id)
    }

    /// The task of a call that the peer has not answered.
    pub(super) fn task(&self, id: u32) -> Option<&Task> {
        self.in_flight.get(&id)
    }

    /// Delays a task that the peer answered with `Busy`.
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

    /// The oldest work request with an unsent task.
    pub(super) fn first_unsent(&self) -> Option<Seq> {
        self.ready.iter().chain(self.delayed.iter()).filter_map(|task| task.seq).min()
    }

    /// Takes out every unsent task of the work requests from `seq` on.
    pub(super) fn drop_unsent(&mut self, seq: Seq) -> Vec<Task> {
        let is_dropped = |task: &Task| task.seq.is_some_and(|of| of >= seq);
        let mut dropped: Vec<Task> = self.delayed.take_if(is_dropped).collect();
        let (out, ready): (Vec<Task>, _) = std::mem::take(&mut self.ready).into_iter().partition(is_dropped);
        self.ready = ready.into();
        dropped.extend(out);
        dropped
    }

    /// Takes out all tasks, because the control queue pair is gone.
    pub(super) fn drop_all(&mut self) -> Vec<Task> {
        let mut dropped: Vec<Task> = std::mem::take(&mut self.ready).into();
        dropped.extend(self.delayed.take_all());
        dropped.extend(std::mem::take(&mut self.in_flight).into_values());
        self.held.clear();
        self.releases.clear();
        dropped
    }

    /// Takes the calls that the peer has not answered off their work requests, and returns them as they were.
    pub(super) fn detach_in_flight(&mut self) -> Vec<Task> {
        let attached = self.in_flight.values_mut().filter(|task| task.seq.is_some());
        attached.map(|task| Task { seq: task.seq.take(), ..task.clone() }).collect()
    }

    /// The number of calls that the peer has not answered.
    pub(super) fn in_flight_count(&self) -> usize {
        self.in_flight.len()
    }
}

impl Initiator {
    /// The number of messages that the peer has not answered. Until it has, it may access what it was lent for them.
    pub fn calls_in_flight(&self) -> usize {
        self.calls.in_flight_count()
    }

    /// Queues calls that a work request waits for.
    pub(super) fn queue_tasks(&mut self, index: usize, tasks: impl IntoIterator<Item = Task>) {
        if self.in_error {
            return self.fail(index, WcStatus::Flushed, 0);
        }
        if self.is_control_gone {
            return self.fail(index, WcStatus::RetryExceeded, 0);
        }
        for task in tasks {
            self.entries[index].calls += 1;
            self.calls.request(task);
        }
    }

    /// Queues the repetition of the marked pages of a READ or WRITE.
    pub(super) fn repeat_marked(&mut self, index: usize) {
        let (seq, entry) = (self.seq(index), &mut self.entries[index]);
        let redo = std::mem::take(&mut entry.redo);
        let mut tasks = Vec::new();
        for run in redo.runs() {
            let whole = entry.range_of(run);
            let mut start = whole.start;
            while start < whole.end {
                let end = whole.end.min(start + u64::from(self.config.call_bytes_max));
                self.config.add_tasks(seq, entry.class, &entry.wr.payload, start..end, &mut tasks);
                start = end;
            }
        }
        self.queue_tasks(index, tasks);
    }

    /// The next message for the peer.
    pub(super) fn next_message(&mut self, memory: &mut impl HeldMemory) -> Option<Box<[u8]>> {
        let tag = u64::from(self.config.tag) << 32;
        if let Some(id) = self.calls.releases.pop_front() {
            return Some(encoded(&Message { id, body: Body::Release }));
        }
        loop {
            let (id, task) = self.calls.start(self.config.call_count_max)?;
            match self.message_of(tag | u64::from(id), &task, memory) {
                Ok(message) => {
                    self.counters.calls += u64::from(task.seq.is_some());
                    return Some(message);
                }
                // The memory was there when it was held: the program has unmapped it.
                Err(_) => {
                    self.calls.take_answered(id);
                    self.end_task(&task);
                    task.seq
                        .and_then(|seq| self.index(seq))
                        .into_iter()
                        .for_each(|index| self.fail(index, WcStatus::LocalProtection, 0));
                }
            }
        }
    }

    /// The message of a call.
    fn message_of(
        &self,
        id: u64,
        task: &Task,
        memory: &mut impl HeldMemory,
    ) -> Result<Box<[u8]>, LocalError> {
        let entry = task.seq.and_then(|seq| self.index(seq)).map(|index| &self.entries[index]);
        let (rkey, va) =
            entry.and_then(|entry| entry.remote.as_ref()).map_or((0, 0), |remote| (remote.rkey, remote.va));
        let (va, length) = (va + task.range.start, (task.range.end - task.range.start) as u32);
        let mut data = Vec::new();
        let body = match (task.kind, entry) {
            (Kind::Open { rkey, region_id }, _) => Body::Open(Open { rkey, region_id }),
            (_, None) => return Err(LocalError::Protection),
            (Kind::Atomic, Some(entry)) => {
                let kind = match entry.wr.op {
                    SendOp::CompareSwap { compare, swap, .. } => AtomicKind::CompareSwap { compare, swap },
                    SendOp::FetchAdd { add, .. } => AtomicKind::FetchAdd { add },
                    // There is no message for these: docs/np-rdma.md, limits.
                    SendOp::MaskedCompareSwap { .. } | SendOp::MaskedFetchAdd { .. } => {
                        return Err(LocalError::Protection);
                    }
                    _ => {
                        let mut value = [0; 8];
                        copy_out(&entry.wr.payload, 0, &mut value, memory)?;
                        AtomicKind::Write { value: u64::from_ne_bytes(value) }
                    }
                };
                Body::Atomic(Atomic { rkey, va, kind })
            }
            (Kind::Hold, Some(entry)) => {
                let access = if entry.class == Class::Read { Access::Read } else { Access::Write };
                Body::Hold(Hold { rkey, va, length, access })
            }
            (Kind::Inline, Some(entry)) if entry.class == Class::Read => {
                Body::Fetch(Fetch { rkey, va, length })
            }
            (Kind::Inline, Some(entry)) => {
                data = vec![0; length as usize];
                copy_out(&entry.wr.payload, task.range.start, &mut data, memory)?;
                Body::Write(Write { rkey, va, length, source: Source::Inline(&data) })
            }
            (Kind::Reverse, Some(entry)) => {
                let sge = entry.element(&task.range).ok_or(LocalError::Protection)?;
                if entry.class == Class::Read {
                    let Lent { va: dest_va, rkey: dest_rkey } = memory.lend(id, &sge, Access::Write)?;
                    Body::Read(smallvec![Read { rkey, va, length, pages: None, dest_va, dest_rkey }])
                } else {
                    let lent = memory.lend(id, &sge, Access::Read)?;
                    let source = Source::Remote { va: lent.va, rkey: lent.rkey };
                    Body::Write(Write { rkey, va, length, source })
                }
            }
        };
        let message = encoded(&Message { id, body });
        drop(data);
        Ok(message)
    }

    /// Takes a call off its work request.
    pub(super) fn end_task(&mut self, task: &Task) {
        if let Some(index) = task.seq.and_then(|seq| self.index(seq)) {
            self.entries[index].calls -= 1;
        }
    }
}

impl super::Config {
    /// Adds the calls for a byte range of a request.
    fn add_tasks(&self, seq: Seq, class: Class, payload: &Payload, range: Range<u64>, tasks: &mut Vec<Task>) {
        let message_bytes_max = FETCH_BYTES_MAX.min(INLINE_BYTES_MAX as u32).into();
        let inline_bytes_max = u64::from(self.inline_bytes_max).min(message_bytes_max);
        let length = range.end - range.start;
        let sges = payload.sges();
        if length > inline_bytes_max && sges.is_some() && !self.is_reverse_allowed {
            return tasks.push(Task::hold(seq, range));
        }
        let Some(sges) = sges.filter(|_| class == Class::Read || length > inline_bytes_max) else {
            // Data that is not in registered memory the peer cannot READ.
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min(start + message_bytes_max);
                tasks.push(Task::new(seq, start..end, Kind::Inline));
                start = end;
            }
            return;
        };
        for (at, sge) in sub_elements(sges, range.start, length) {
            let part = at..at + u64::from(sge.length);
            let is_inline = u64::from(sge.length) <= inline_bytes_max;
            let kind = if is_inline { Kind::Inline } else { Kind::Reverse };
            tasks.push(Task::new(seq, part, kind));
        }
    }
}

/// Copies the data of a request, from `offset` on.
fn copy_out(
    payload: &Payload,
    offset: u64,
    out: &mut [u8],
    memory: &impl LocalMemory,
) -> Result<(), LocalError> {
    match payload {
        Payload::Sge(sge) => memory.read(sge, offset, out),
        Payload::Masked(masked) => memory.read(&masked.result, offset, out),
        Payload::Sges(sges) => gather(memory, sges, offset, out),
        Payload::Inline(bytes) => {
            let part =
                bytes.get(offset as usize..offset as usize + out.len()).ok_or(LocalError::Protection)?;
            out.copy_from_slice(part);
            Ok(())
        }
        Payload::Provided(provided) => {
            let is_copied = provided.source.copy(provided.offset + offset, out);
            if is_copied { Ok(()) } else { Err(LocalError::Protection) }
        }
    }
}

/// The bytes of a message.
///
/// # Panics
/// If the message is longer than one may be.
pub(super) fn encoded(message: &Message<'_>) -> Box<[u8]> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let length = message.encode(&mut bytes).expect("the caller has kept to the limits of messages");
    bytes.truncate(length);
    bytes.into()
}
