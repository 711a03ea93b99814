//! Several appends in flight to all members of a replicated file.
//!
//! Each member carries the appends of the writer out in their order, so they end in it, and are concluded in it. What is in flight
//! was not acknowledged, so members may differ in it while an epoch is recorded.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_nic::{SendOp, WcStatus};

use super::ReplicatedFile;
use super::error::ReplicaError;
use super::group;
use super::site::Replica;
use crate::client::RECORD_BYTES_MAX;
use crate::client::data::{self, Failure};
use crate::client::session::{DEPTH, Session};
use crate::client::slots::Slots;
use crate::error::{AccessKind, ExportError};
use crate::proto::Link;

/// The end of an append to a replicated file.
#[derive(Debug)]
pub struct ReplicaAppended {
    /// The tag that the append was given.
    pub tag: u64,
    /// The record's offset. After an error the record is not in the file, except after `NoMember`: then nobody knows.
    pub result: Result<u64, ReplicaError>,
}

/// Appends to a replicated file, of which several are in flight. They take their places in the order in which they were begun.
///
/// Dropping it waits for those in flight, for as long as [`ReplicaConfig::timeout`](super::ReplicaConfig::timeout) permits.
pub struct ReplicaAppender<'a> {
    file: &'a mut ReplicatedFile,
    depth: usize,
    record_bytes_max: usize,
    /// Memory of each member, by the id of its copy.
    memory: HashMap<u64, Slots>,
    /// How many appends were begun. They use the slots in turn.
    begun: usize,
    in_flight: VecDeque<InFlight>,
    ended: Vec<ReplicaAppended>,
}

/// An append in flight.
struct InFlight {
    tag: u64,
    slot: usize,
    len: u64,
    deadline: Instant,
    /// What became of it at each member that there was when it began, by the id of its copy.
    at_members: HashMap<u64, AtMember>,
}

/// What became of an append at a member.
enum AtMember {
    /// It is in flight, with its number and the generation of its queue pair.
    Posted(u64, u64),
    Ended(WcStatus, u64),
    Lost(ExportError),
}

impl ReplicatedFile {
    /// Up to `depth` appends in flight, of records of up to `record_bytes_max`. Other calls come after it.
    ///
    /// # Errors
    /// `Invalid` if there are to be more than 512 appends, or longer records than 1 MiB; `Export` without memory for them; `NoMember`.
    pub fn appender(
        &mut self,
        depth: usize,
        record_bytes_max: usize,
    ) -> Result<ReplicaAppender<'_>, ReplicaError> {
        if !(1..=DEPTH as usize).contains(&depth) || !(1..=RECORD_BYTES_MAX).contains(&record_bytes_max) {
            return Err(ReplicaError::Invalid("an appender has 1 to 512 appends of up to 1 MiB in flight"));
        }
        let slots = |copy: &Replica| {
            let slots = Slots::new(copy.opening.session.domain(), depth, record_bytes_max);
            let failed = ReplicaError::of(copy.site.address);
            Ok((copy.id, slots.map_err(|error| failed(error.into()))?))
        };
        let memory = self.writer.copies.iter().map(slots).collect::<Result<HashMap<_, _>, ReplicaError>>()?;
        if memory.is_empty() {
            return Err(ReplicaError::NoMember);
        }
        let (in_flight, ended) = (VecDeque::new(), Vec::new());
        Ok(ReplicaAppender { file: self, depth, record_bytes_max, memory, begun: 0, in_flight, ended })
    }
}

impl ReplicaAppender<'_> {
    /// Begins to append a record; with `commit` it and all before it are persistent on all members when it ends.
    ///
    /// # Errors
    /// `Invalid` for a longer record than the appender is for; `Full` while the maximum is in flight; `NoMember`.
    pub fn append(&mut self, record: &[u8], commit: bool, tag: u64) -> Result<(), ReplicaError> {
        if record.len() > self.record_bytes_max {
            return Err(ReplicaError::Invalid("a longer record than the appender is for"));
        }
        if self.in_flight.len() >= self.depth {
            return Err(ReplicaError::Full);
        }
        let writer = &self.file.writer;
        if writer.copies.is_empty() {
            return Err(ReplicaError::NoMember);
        }
        let (slot, deadline) = (self.begun % self.depth, writer.config.deadline());
        self.begun += 1;
        let post = |copy: &Replica| {
            let posted = self.memory.get(&copy.id).ok_or(ExportError::Lost);
            let posted = posted.and_then(|slots| post(copy, slots, slot, record, commit, deadline));
            let at_member = match posted {
                Ok((number, generation)) => AtMember::Posted(number, generation),
                Err(error) => AtMember::Lost(error),
            };
            (copy.id, at_member)
        };
        let at_members = writer.copies.iter().map(post).collect();
        self.in_flight.push_back(InFlight { tag, slot, len: record.len() as u64, deadline, at_members });
        Ok(())
    }

    /// Appends in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Appends what has ended to `ended`, and waits up to `timeout` for the first. Returns how many. An epoch that is recorded meanwhile
    /// takes longer, up to the timeout of the file for each member that fails.
    pub fn wait(&mut self, ended: &mut Vec<ReplicaAppended>, timeout: Duration) -> usize {
        let until = Instant::now() + timeout;
        loop {
            while self.has_first_ended() {
                self.conclude_first();
            }
            if !self.ended.is_empty() || self.in_flight.is_empty() || Instant::now() >= until {
                let count = self.ended.len();
                ended.append(&mut self.ended);
                return count;
            }
            self.wait_for_first(until);
        }
    }

    /// Whether the oldest append in flight has ended at all members, or their time is over.
    fn has_first_ended(&mut self) -> bool {
        let Some(first) = self.in_flight.front_mut() else { return false };
        let is_late = Instant::now() >= first.deadline;
        self.file.writer.copies.iter().all(|copy| {
            first.at_members.get_mut(&copy.id).is_none_or(|at_member| {
                at_member.update(&copy.opening.session, is_late);
                !matches!(at_member, AtMember::Posted(..))
            })
        })
    }

    /// Waits until the oldest append has ended at the first member where it is in flight, or until its time is over.
    fn wait_for_first(&self, until: Instant) {
        let Some(first) = self.in_flight.front() else { return };
        let waits = |copy: &&Replica| matches!(first.at_members.get(&copy.id), Some(AtMember::Posted(..)));
        if let Some(copy) = self.file.writer.copies.iter().find(waits)
            && let Some(AtMember::Posted(number, _)) = first.at_members.get(&copy.id)
        {
            // Its end is looked at next.
            let _ = copy.opening.session.wait_ended(*number, until.min(first.deadline));
        }
    }

    /// Concludes the oldest append, and after an error all others: what is behind a record that is not in the file is not there
    /// either.
    fn conclude_first(&mut self) {
        let Some(InFlight { tag, slot, len, mut at_members, .. }) = self.in_flight.pop_front() else {
            return;
        };
        let (writer, memory) = (&self.file.writer, &self.memory);
        let deadline = writer.config.deadline();
        let appended = writer.copies.iter().map(|copy| {
            let at_member = at_members.remove(&copy.id);
            let offset = offset_of(at_member, memory.get(&copy.id), slot);
            offset.map_err(|failure| group::fault(copy, failure, deadline))
        });
        let appended = appended.collect();
        let result = self.file.conclude_append(appended, len);
        let copies = &self.file.writer.copies;
        self.memory.retain(|id, _| copies.iter().any(|copy| copy.id == *id));
        let has_failed = result.is_err();
        self.ended.push(ReplicaAppended { tag, result });
        if has_failed {
            let is_over = copies.is_empty();
            self.ended.extend(self.in_flight.drain(..).map(|mut behind| {
                // Its queue pair was repaired, so it has ended: the session forgets it.
                for copy in copies {
                    if let Some(at_member) = behind.at_members.get_mut(&copy.id) {
                        at_member.update(&copy.opening.session, false);
                    }
                }
                let flushed = ExportError::Access(AccessKind::Append, WcStatus::Flushed);
                let flushed = ReplicaError::Refused(flushed);
                let error = if is_over { ReplicaError::NoMember } else { flushed };
                ReplicaAppended { tag: behind.tag, result: Err(error) }
            }));
        }
    }
}

impl Drop for ReplicaAppender<'_> {
    fn drop(&mut self) {
        while let Some(first) = self.in_flight.front() {
            let deadline = first.deadline;
            self.wait(&mut Vec::new(), deadline.saturating_duration_since(Instant::now()));
        }
    }
}

impl AtMember {
    /// Takes note of its end, which is the member's if that is lost or late.
    fn update(&mut self, session: &Arc<Session>, is_late: bool) {
        let AtMember::Posted(number, generation) = *self else { return };
        match session.take_status(number) {
            Some(status) => *self = AtMember::Ended(status, generation),
            None if is_late || session.is_lost() => *self = AtMember::Lost(ExportError::Lost),
            None => {}
        }
    }
}

/// Posts an append to a member. Returns its number, and the generation of its queue pair.
fn post(
    copy: &Replica,
    slots: &Slots,
    slot: usize,
    record: &[u8],
    commit: bool,
    deadline: Instant,
) -> Result<(u64, u64), ExportError> {
    slots.write(slot, record)?;
    let (session, op) = (&copy.opening.session, SendOp::Append { rkey: copy.opening.rkey, commit });
    let sges = [slots.sge(slot, record.len()), slots.offset_sge(slot)];
    data::begin(session, Link::Append, op, &sges, deadline)
}

/// The offset of a record at a member.
fn offset_of(at_member: Option<AtMember>, slots: Option<&Slots>, slot: usize) -> Result<u64, Failure> {
    match (at_member, slots) {
        (Some(AtMember::Ended(status, generation)), Some(slots)) => {
            data::ended(status, AccessKind::Append, generation)?;
            Ok(slots.offset(slot)?)
        }
        (Some(AtMember::Lost(error)), _) => Err(error.into()),
        _ => Err(ExportError::Lost.into()),
    }
}
