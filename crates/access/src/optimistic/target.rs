//! The other side of an [`Initiator`](super::Initiator): it brings pages, holds them, and performs what did not succeed
//! one-sidedly.
//!
//! Requests that do not overlap are performed in any order. An initiator does not send one that overlaps an unanswered one
//! of its own.

use std::collections::{BTreeMap, VecDeque};

use terrace_transport::Time;

use super::Held;
use super::calls::encoded;
use crate::proto::{Access, Atomic, AtomicKind, Body, Done, Message, Source, Status};

/// The regions at this end. Each range is checked against its region when it is held, and touched only while it is.
pub trait TargetMemory {
    /// Has the pages of a range brought into memory and kept there, for the request `token`. After `Later`, the owner calls
    /// [`Target::handle_held`]. What is held for peers has a budget of its own: requests of this process to others never
    /// use it up, so two processes that wait for each other's pages both get them.
    ///
    /// # Errors
    /// The status for the peer; `Busy` when too much is held already.
    fn hold(
        &mut self,
        token: u64,
        rkey: u32,
        va: u64,
        length: u32,
        access: RegionAccess,
    ) -> Result<Held, Status>;

    /// Releases what is held for a request, or is about to be.
    fn release(&mut self, token: u64);

    /// Copies from a range that is held.
    ///
    /// # Errors
    /// The status for the peer.
    fn read(&mut self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), Status>;

    /// Copies to a range that is held.
    ///
    /// # Errors
    /// The status for the peer.
    fn write(&mut self, rkey: u32, va: u64, data: &[u8]) -> Result<(), Status>;

    /// Performs an atomic operation on 8 bytes that are held; returns the number before it. It is atomic with regard to
    /// the NIC and to the program.
    ///
    /// # Errors
    /// The status for the peer.
    fn atomic(&mut self, rkey: u32, va: u64, operation: AtomicKind) -> Result<u64, Status>;
}

/// What a peer is about to do with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionAccess {
    /// Read it.
    Read,
    /// Write it.
    Write,
    /// Perform an atomic operation.
    Atomic,
}

/// The parameters of a target.
#[derive(Clone, Copy, Debug)]
pub struct TargetConfig {
    /// The most requests that a peer may have unanswered. A peer that sends more is disconnected.
    pub call_count_max: u32,
    /// The most bytes of one transfer. A peer that asks for more is disconnected.
    pub move_bytes_max: u32,
    /// How long a peer may have a range held while its queue pair makes no progress ([`Target::note_progress`]), or a
    /// transfer with its memory may take, in nanoseconds. A peer that does not release the range, or does not let a transfer
    /// end, is disconnected: the pages could not leave memory, and if they did, its WRITE would vanish. A peer has the
    /// range of a WRITE with immediate held while earlier messages of its queue pair, and then the immediate, wait for
    /// receives: so this limits how long receives may be missing.
    pub hold_ns_max: u64,
    /// How long a range may be held although the queue pair makes progress, in nanoseconds. What is held is missing to others, so a peer that
    /// never releases it is disconnected, too: its requests fail.
    pub busy_hold_ns_max: u64,
}

/// A transfer between this end's region and the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Passed to [`Target::handle_moved`].
    pub token: u64,
    /// Whether to WRITE to the peer; otherwise to READ from it.
    pub to_peer: bool,
    /// Key and address in this end's region.
    pub region: (u32, u64),
    /// Key and address in the peer's memory.
    pub peer: (u32, u64),
    /// Length in bytes.
    pub length: u32,
}

/// An action for the owner to execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetAction {
    /// Send this message over the control queue pair, behind all transfers whose completion was reported.
    Send(Box<[u8]>),
    /// Transfer bytes by a READ or WRITE of this end's, on a queue pair to the peer: best not on that of the program, which
    /// may be in the error state while earlier requests are repeated. Report its end ([`Target::handle_moved`]).
    Move(Move),
    /// Move the queue pairs of this peer to the error state, then call [`Target::handle_peer_gone`]: the peer does not keep to
    /// the protocol.
    Break,
}

/// A request that waits for its range, or for the end of a transfer or of a peer's access.
#[derive(Debug)]
enum Job {
    Fetch {
        rkey: u32,
        va: u64,
        length: u32,
    },
    Store {
        rkey: u32,
        va: u64,
        data: Box<[u8]>,
    },
    /// Not begun yet.
    Move(Move),
    /// A transfer, begun at the time.
    Moving(Time),
    /// A transfer to the peer, begun at the time. The answer is behind its data, and the range is not held any more.
    Answered(Time),
    Atomic(Atomic),
    /// Not ready yet.
    Hold,
    /// Held since a time; the peer's queue pair has made no progress since a later one.
    Held {
        since: Time,
        idle_since: Time,
    },
}

/// The target of one [`Initiator`](super::Initiator): another one's ids would not follow in succession with its ids. See the
/// module's documentation.
#[derive(Debug)]
pub struct Target {
    config: TargetConfig,
    /// By id.
    jobs: BTreeMap<u64, Job>,
    /// The ids and the answers of the last requests, twice as many as the peer may have unanswered: a message that comes
    /// twice, over a new control queue pair after the loss of one, is answered twice and executed once. (While an answer is
    /// lost, those before it and those behind it in the peer's window may be given.)
    answers: VecDeque<(u64, Box<[u8]>)>,
    actions: VecDeque<TargetAction>,
    is_broken: bool,
}

impl Target {
    /// A target without requests.
    pub fn new(config: TargetConfig) -> Target {
        let (jobs, answers, actions) = (BTreeMap::new(), VecDeque::new(), VecDeque::new());
        Target { config, jobs, answers, actions, is_broken: false }
    }

    /// Takes a peer's message. False for one that is not for a target. `Open` is the owner's to answer
    /// ([`Initiator::handle_message`](super::Initiator::handle_message) has the requirements).
    pub fn handle_message(
        &mut self,
        now: Time,
        message: &Message<'_>,
        memory: &mut impl TargetMemory,
    ) -> bool {
        let id = message.id;
        let (job, access) = match &message.body {
            Body::Fetch(fetch) => {
                (Job::Fetch { rkey: fetch.rkey, va: fetch.va, length: fetch.length }, RegionAccess::Read)
            }
            Body::Write(write) => match write.source {
                Source::Inline(data) => {
                    (Job::Store { rkey: write.rkey, va: write.va, data: data.into() }, RegionAccess::Write)
                }
                Source::Remote { va, rkey } => {
                    let (region, peer) = ((write.rkey, write.va), (rkey, va));
                    let transfer = Move { token: id, to_peer: false, region, peer, length: write.length };
                    (Job::Move(transfer), RegionAccess::Write)
                }
            },
            // Several reads in one message, and pages of a range, are of clients of memory nodes.
            Body::Read(reads) => match &reads[..] {
                [read] if read.pages.is_none() => {
                    let (region, peer) = ((read.rkey, read.va), (read.dest_rkey, read.dest_va));
                    let transfer = Move { token: id, to_peer: true, region, peer, length: read.length };
                    (Job::Move(transfer), RegionAccess::Read)
                }
                _ => return false,
            },
            Body::Atomic(atomic) => (Job::Atomic(*atomic), RegionAccess::Atomic),
            Body::Hold(hold) => {
                let access = match hold.access {
                    Access::Read => RegionAccess::Read,
                    Access::Write => RegionAccess::Write,
                };
                (Job::Hold, access)
            }
            Body::Release => {
                self.end_hold(id, memory);
                return true;
            }
            _ => return false,
        };
        let (rkey, va, length) = match &message.body {
            Body::Hold(hold) => (hold.rkey, hold.va, hold.length),
            _ => job.range(),
        };
        if self.is_broken || self.is_repeated(id) {
            return true;
        }
        // Those that are answered the peer does not count any more.
        let is_full = self.jobs.len() - self.answered_count() >= self.config.call_count_max as usize;
        if is_full || (matches!(job, Job::Move(_)) && length > self.config.move_bytes_max) {
            self.disconnect();
            return true;
        }
        self.jobs.insert(id, job);
        match memory.hold(id, rkey, va, length, access) {
            Ok(Held::Now) => self.perform(now, id, memory),
            Ok(Held::Later) => {}
            Err(status) => {
                self.jobs.remove(&id);
                self.answer(id, Body::Done(Done::one(status)));
            }
        }
        true
    }

    /// Whether a request was seen before. If it was answered, it is answered again.
    fn is_repeated(&mut self, id: u64) -> bool {
        if let Some((_, answer)) = self.answers.iter().find(|(other, _)| *other == id) {
            self.actions.push_back(TargetAction::Send(answer.clone()));
            return true;
        }
        self.jobs.contains_key(&id)
    }

    /// Takes that the range of a request is held by now, or why it cannot be.
    pub fn handle_held(
        &mut self,
        now: Time,
        token: u64,
        result: Result<(), Status>,
        memory: &mut impl TargetMemory,
    ) {
        match result {
            Ok(()) => self.perform(now, token, memory),
            Err(status) => self.finish(token, Body::Done(Done::one(status)), memory),
        }
    }

    /// Performs a request whose range is held.
    fn perform(&mut self, now: Time, id: u64, memory: &mut impl TargetMemory) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let done = |status| Body::Done(Done::one(status));
        match job {
            Job::Fetch { rkey, va, length } => {
                let mut data = vec![0; *length as usize];
                let read = memory.read(*rkey, *va, &mut data);
                let body = read.map_or_else(done, |()| Body::Data(&data));
                self.finish(id, body, memory);
            }
            Job::Store { rkey, va, data } => {
                let written = memory.write(*rkey, *va, data);
                self.finish(id, done(written.err().unwrap_or(Status::Ok)), memory);
            }
            Job::Atomic(atomic) => {
                let value = memory.atomic(atomic.rkey, atomic.va, atomic.kind);
                self.finish(id, value.map_or_else(done, Body::Value), memory);
            }
            Job::Move(transfer) => {
                self.actions.push_back(TargetAction::Move(*transfer));
                *job = Job::Moving(now);
            }
            Job::Hold => {
                *job = Job::Held { since: now, idle_since: now };
                self.answer(id, done(Status::Ok));
            }
            Job::Held { .. } | Job::Moving(_) | Job::Answered(_) => {}
        }
    }

    /// Takes that the bytes of a transfer to the peer have been copied from the range, and posted on the queue pair that carries
    /// the messages: the answer can follow right behind them, and the range need not be held any more. The end of the
    /// transfer is reported, too: until then, no more than [`TargetConfig::call_count_max`] transfers are answered.
    /// Not for an owner that sends requests again over another queue pair: the data may be lost with this one, and the answer
    /// repeated without it.
    pub fn handle_copied(&mut self, token: u64, memory: &mut impl TargetMemory) {
        if self.answered_count() >= self.config.call_count_max as usize {
            return;
        }
        if let Some(job @ &mut Job::Moving(since)) = self.jobs.get_mut(&token) {
            *job = Job::Answered(since);
            memory.release(token);
            self.answer(token, Body::Done(Done::one(Status::Ok)));
        }
    }

    fn answered_count(&self) -> usize {
        self.jobs.values().filter(|job| matches!(job, Job::Answered(_))).count()
    }

    /// Takes the end of a transfer ([`TargetAction::Move`]), or why it has failed.
    pub fn handle_moved(&mut self, token: u64, result: Result<(), Status>, memory: &mut impl TargetMemory) {
        let status = result.err().unwrap_or(Status::Ok);
        self.finish(token, Body::Done(Done::one(status)), memory);
    }

    /// Ends a request, with its answer unless that was sent.
    fn finish(&mut self, id: u64, body: Body<'_>, memory: &mut impl TargetMemory) {
        match self.jobs.remove(&id) {
            None | Some(Job::Answered(_)) => {}
            Some(_) => {
                memory.release(id);
                self.answer(id, body);
            }
        }
    }

    /// Restarts the limit of held ranges: the peer's queue pair has taken a request. Those for the ranges come behind earlier ones.
    pub fn note_progress(&mut self, now: Time) {
        for job in self.jobs.values_mut() {
            if let Job::Held { idle_since, .. } = job {
                *idle_since = now;
            }
        }
    }

    /// Whether a peer has a range held.
    pub fn is_holding(&self) -> bool {
        self.jobs.values().any(|job| matches!(job, Job::Held { .. }))
    }

    /// Ends what a peer had held. A peer that gives up a request before it is ready gets no answer.
    fn end_hold(&mut self, id: u64, memory: &mut impl TargetMemory) {
        if matches!(self.jobs.get(&id), Some(Job::Hold | Job::Held { .. })) {
            self.jobs.remove(&id);
            memory.release(id);
        }
    }

    fn answer(&mut self, id: u64, body: Body<'_>) {
        let answer = encoded(&Message { id, body });
        self.actions.push_back(TargetAction::Send(answer.clone()));
        if self.answers.len() >= 2 * self.config.call_count_max as usize {
            self.answers.pop_front();
        }
        self.answers.push_back((id, answer));
    }

    /// The next action, if any.
    pub fn poll_action(&mut self, now: Time) -> Option<TargetAction> {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            self.disconnect();
        }
        self.actions.pop_front()
    }

    /// The next time at which [`Target::poll_action`] has work without an event.
    pub fn deadline(&self) -> Option<Time> {
        if self.is_broken {
            return None;
        }
        let held = self.jobs.values().filter_map(|job| match job {
            Job::Held { since, idle_since } => {
                let TargetConfig { hold_ns_max, busy_hold_ns_max, .. } = self.config;
                Some(idle_since.after_ns(hold_ns_max).min(since.after_ns(busy_hold_ns_max)))
            }
            Job::Moving(since) | Job::Answered(since) => Some(since.after_ns(self.config.hold_ns_max)),
            _ => None,
        });
        held.min()
    }

    /// The number of requests that are not answered, or whose range is held.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether nothing is held and nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty() && self.actions.is_empty()
    }

    /// The queue pairs to the peer, that of the transfers included, are in the error state, and its accesses and the
    /// transfers have ended: releases all that is held for it. Before, a WRITE of the peer could vanish, or a transfer
    /// access pages that have left.
    pub fn handle_peer_gone(&mut self, memory: &mut impl TargetMemory) {
        for (id, job) in std::mem::take(&mut self.jobs) {
            if !matches!(job, Job::Answered(_)) {
                memory.release(id);
            }
        }
        self.answers.clear();
        self.actions.clear();
    }

    /// What is held stays so until the queue pairs are in the error state: a WRITE with immediate must not vanish while its
    /// immediate arrives.
    fn disconnect(&mut self) {
        self.is_broken = true;
        self.actions.push_back(TargetAction::Break);
    }
}

impl Job {
    /// Key, address and length of the range that a new request touches; nothing for one that only has one held.
    fn range(&self) -> (u32, u64, u32) {
        match self {
            Job::Fetch { rkey, va, length } => (*rkey, *va, *length),
            Job::Store { rkey, va, data } => (*rkey, *va, data.len() as u32),
            Job::Move(transfer) => (transfer.region.0, transfer.region.1, transfer.length),
            Job::Atomic(atomic) => (atomic.rkey, atomic.va, 8),
            Job::Hold | Job::Held { .. } | Job::Moving(_) | Job::Answered(_) => (0, 0, 0),
        }
    }
}
