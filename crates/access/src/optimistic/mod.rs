//! Optimistic access to a peer whose NIC knows nothing of absence (NP-RDMA, sections 3 and 4.3), for one queue pair.
//!
//! The peer's NIC returns the region's signature page for READs of absent pages, drops WRITEs to them, and answers at once
//! in both cases. An [`Initiator`] takes the program's work requests and finds out which of them met an absent page; it
//! repeats those parts two-sided, through the peer's [`Target`]. `docs/np-rdma.md` has the protocol as a picture, and why
//! it loses no WRITE and tears none. Both are sans-IO: the owner of the queue pairs passes in completions, messages and
//! the time.
//!
//! | module | contains |
//! |---|---|
//! | `order` | which requests may pass each other: one table |
//! | `entry` | a work request, its state, and what it conflicts with |
//! | `span` | what requests access, compactly
//! | `issue` | the beginning of requests |
//! | `checks` | the inspection of what READs returned; versions before and after WRITEs |
//! | `calls` | the two-sided repetition |
//! | `outcome` | completions, answers, failures |
//! | `versions` | the versions that are known |
//! | `target` | the other side |
//!
//! # Calls
//! No method blocks. After [`Initiator::post`], and after each `handle_*`, call [`Initiator::poll_action`] until it returns
//! `None`, and execute each action. Set a timer for [`Initiator::deadline`].
//!
//! ```text
//!   program        initiator                     queue pair            control queue pair
//!   post(wr) ----> queued, local memory held
//!                  Post(WRITE) ----------------> page, or black hole
//!                  Post(READ of versions) -----> behind the WRITE
//!                  handle_completion(wc) <------ same odd version as before: done
//!                  Send(message) ------------------------------------> the target brings the page, holds it, copies
//!                  handle_message(answer) <--------------------------
//!   CQ <---------- Complete(wc), in the order of posting
//! ```

mod calls;
mod checks;
mod entry;
mod issue;
mod order;
mod outcome;
mod span;
mod target;
mod versions;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use terrace_transport::{
    LocalError, Payload, PostError, SendFlags, SendOp, SendWr, Sge, SgeList, Time, Wc, WcStatus,
};

use crate::proto::Access;
use crate::region::{Knowledge, Region};
use crate::sge_list::{self, LocalMemory};
use calls::Calls;
use checks::{Checks, VersionRead};
use entry::{Check, Entry, Seq};
use span::Span;
use versions::{KnownVersions, VersionTable};

pub use order::{Class, Order, OrderBits, Rule};
pub use target::{Move, RegionAccess, Target, TargetAction, TargetConfig, TargetMemory};

/// Whether memory is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// All of it is in memory, and stays there until it is released.
    Now,
    /// Some of it is absent and on its way; the owner reports when all of it is held.
    Later,
}

/// The program's memory at this end. What a NIC accesses must not leave memory meanwhile: from an absent source it would
/// send the signature page, which the peer would see, and what it receives for an absent destination would vanish.
pub trait HeldMemory: LocalMemory {
    /// Holds the memory of a list for the request `token`; `writes` if the NIC writes to it. After `Later`, the owner calls
    /// [`Initiator::handle_held`].
    ///
    /// # Errors
    /// If a key or the memory does not permit the access.
    fn hold(&mut self, token: u64, sges: &[Sge], writes: bool) -> Result<Held, LocalError>;

    /// Releases what is held for a request, or is about to be.
    fn release(&mut self, token: u64);

    /// Copies `data` into an element, starting `offset` bytes into it. The element is long enough.
    ///
    /// # Errors
    /// If the key or the memory does not permit it.
    fn write(&mut self, sge: &Sge, offset: u64, data: &[u8]) -> Result<(), LocalError>;

    /// Lends the peer memory for the call `id`. The peer READs the bytes of the element from it, or WRITEs to it what
    /// [`HeldMemory::take_back`] brings to the element. At most [`Config::call_count_max`] calls have memory at a time, of
    /// [`Config::call_bytes_max`] each.
    ///
    /// # Errors
    /// If the key or the memory of the element does not permit it.
    fn lend(&mut self, id: u64, sge: &Sge, by_peer: Access) -> Result<Lent, LocalError>;

    /// Ends the use of what was lent for a call, which the peer has answered: other calls may lend it again. `into`: the element that the peer's bytes belong to, if
    /// the peer has written them all. What is lent when the peer is gone ([`Initiator::handle_peer_gone`]), the owner ends by
    /// itself.
    ///
    /// # Errors
    /// As for [`HeldMemory::write`].
    fn take_back(&mut self, id: u64, into: Option<&Sge>) -> Result<(), LocalError>;
}

/// Memory that the peer may READ or WRITE for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// Address of its first byte.
    pub va: u64,
    /// Its key.
    pub rkey: u32,
}

/// Registered memory of the owner that version numbers are READ into: `slot_count` slots of `slot_bytes`. It never leaves
/// memory.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Address of the first slot.
    pub addr: u64,
    /// Its local key.
    pub lkey: u32,
    /// Bytes of a slot: a multiple of 8, at least 8.
    pub slot_bytes: u32,
    /// How many slots there are: at least one.
    pub slot_count: u32,
}

/// The parameters of an initiator.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The queue pair number.
    pub qpn: u32,
    /// The upper half of the ids of its messages, by which the owner routes answers.
    pub tag: u32,
    /// The most work requests that are posted and not completed.
    pub request_count_max: usize,
    /// The most work requests on the queue pair.
    pub post_count_max: usize,
    /// The most messages that are sent and not answered; the peer's [`TargetConfig::call_count_max`] is no less.
    pub call_count_max: u32,
    /// The queue pair's path MTU, in bytes.
    pub mtu_bytes: u32,
    /// Whether every request is signaled.
    pub signal_all: bool,
    /// Which requests may pass each other.
    pub order: Order,
    /// Whether READs and WRITEs, too, go through the peer's [`Target`] from the beginning, as where the NIC may access no
    /// memory without the target's consent (the paper's section 6.1).
    pub is_two_sided: bool,
    /// The most bytes that are repeated inside a message (the paper: 1 KiB). Beyond, the target moves them by a reverse READ
    /// or WRITE, or the initiator repeats them when the receiver is ready.
    pub inline_bytes_max: u32,
    /// The most bytes of one call.
    pub call_bytes_max: u32,
    /// Whether the peer may move bytes itself, by READs and WRITEs of what is lent to it.
    pub is_reverse_allowed: bool,
    /// The most unsignaled WRITEs whose versions are not being checked. Beyond, they are checked.
    pub unchecked_count_max: usize,
    /// How long unsignaled WRITEs wait for a signaled request to be checked with, in nanoseconds.
    pub check_delay_ns: u64,
    /// Whether WRITEs whose versions are read behind them request no ACKs of their own. Not where that READ may come later than the queue
    /// pair's ACK timeout.
    pub omits_ack_requests: bool,
    /// How long a version counts as known, in nanoseconds; at most a second makes sense.
    pub version_age_ns: u64,
    /// Where versions are read to.
    pub scratch: Scratch,
}

/// An action for the owner to execute.
#[derive(Clone, Debug)]
pub enum Action {
    /// Post this on the queue pair. Pass its completion to [`Initiator::handle_completion`].
    Post(SendWr),
    /// Send this message over the control queue pair. The initiator returns each message once. After the loss of a control
    /// queue pair the owner sends those again over the next one that are not answered, and every `Release` that may not
    /// have arrived; or it calls [`Initiator::handle_peer_gone`].
    Send(Box<[u8]>),
    /// An entry for the program's completion queue.
    Complete(Wc),
    /// Move the queue pair to the error state: a request has failed outside the queue pair.
    Break,
}

/// What has been done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// READs and WRITEs that succeeded one-sidedly.
    pub optimistic: u64,
    /// Pages that a READ found absent, or that equal the signature page.
    pub signatures: u64,
    /// Pages that came or went during a WRITE.
    pub version_changes: u64,
    /// Pages that were known to be absent before a WRITE.
    pub absent: u64,
    /// Pages of WRITEs that are repeated because an earlier WRITE to the same bytes is.
    pub chained: u64,
    /// Messages by which pages were repeated.
    pub calls: u64,
    /// Ranges that the peer held while the request was repeated one-sidedly.
    pub holds: u64,
}

/// A work request on the queue pair, or about to be.
#[derive(Debug)]
struct Post {
    token: u64,
    what: What,
    /// Whether the queue pair need not complete it if it succeeds: the completion of a later one says so.
    is_unsignaled: bool,
}

impl Post {
    fn new(what: What) -> Post {
        Post { token: 0, what, is_unsignaled: false }
    }
}

#[derive(Debug)]
enum What {
    /// A request of the program, or a part of it.
    Data {
        seq: Seq,
        range: Range<u64>,
        /// The id of the call by which the peer holds the range.
        hold: Option<u64>,
    },
    Versions(VersionRead),
    /// This, which changes nothing ([`Initiator::request_proof`]).
    Proof(SendOp),
}

/// Where the versions of a region are.
#[derive(Debug)]
enum Tables {
    /// The peer has been asked.
    Requested,
    Known(VersionTable),
    /// The peer has no such table; WRITEs are two-sided.
    None,
}

/// The initiator's state of a queue pair; see the module's documentation.
#[derive(Debug)]
pub struct Initiator {
    config: Config,
    /// Work requests, from the oldest one that is not completed.
    entries: VecDeque<Entry>,
    /// What each of them accesses.
    spans: VecDeque<Span>,
    /// The sequence number of the oldest entry.
    first: Seq,
    /// The index of the first entry that has not begun.
    next_index: usize,
    /// Whether entries may begin that could not when it was last tried.
    may_begin: bool,
    /// Whether entries may be finished that were not when it was last tried.
    may_finish: bool,
    unposted: VecDeque<Post>,
    /// In the order of their tokens, which is that of their completions.
    posted: VecDeque<Post>,
    /// How many of the last of them are unsignaled.
    unsignaled_count: usize,
    next_token: u64,
    calls: Calls,
    checks: Checks,
    known: KnownVersions,
    /// By region id.
    tables: HashMap<u64, Tables>,
    completions: VecDeque<Wc>,
    /// The earliest work request that has failed.
    first_failed: Option<Seq>,
    in_error: bool,
    /// Whether the earliest failure is that of a peer that has disconnected, and what is posted may complete with the reason.
    awaits_cause: bool,
    break_due: bool,
    is_control_gone: bool,
    /// How the last proof has ended.
    proof: Option<WcStatus>,
    counters: Counters,
}

impl Initiator {
    /// An initiator without requests.
    ///
    /// # Panics
    /// If the scratch memory has no slot for a version.
    pub fn new(config: Config) -> Initiator {
        let Scratch { slot_bytes, slot_count, .. } = config.scratch;
        assert!(slot_bytes >= 8 && slot_count > 0, "the scratch memory has room for a version");
        Initiator {
            config,
            entries: VecDeque::new(),
            spans: VecDeque::new(),
            first: 0,
            next_index: 0,
            may_begin: false,
            may_finish: false,
            unposted: VecDeque::new(),
            posted: VecDeque::new(),
            unsignaled_count: 0,
            next_token: 0,
            calls: Calls::default(),
            checks: Checks::new(slot_count),
            known: KnownVersions::default(),
            tables: HashMap::new(),
            completions: VecDeque::new(),
            first_failed: None,
            in_error: false,
            awaits_cause: false,
            break_due: false,
            is_control_gone: false,
            proof: None,
            counters: Counters::default(),
        }
    }

    /// Takes a work request that the queue pair has accepted ([`terrace_transport::Qp::check_sends`]), and the
    /// knowledge of its rkey; [`Knowledge::Plain`] for a request without one. A request whose region is unknown waits, with all
    /// later ones, for [`Initiator::handle_described`].
    ///
    /// # Errors
    /// `QueueFull` if `request_count_max` requests are not completed.
    pub fn post(&mut self, wr: SendWr, known: &Knowledge, order: OrderBits) -> Result<(), PostError> {
        if self.entries.len() >= self.config.request_count_max {
            return Err(PostError::QueueFull);
        }
        self.may_begin = true;
        let mut entry = Entry::new(wr, known, order);
        if self.first_failed.is_some() {
            entry.flush();
        }
        self.spans.push_back(entry.span());
        self.entries.push_back(entry);
        if self.first_failed.is_some() {
            self.next_index = self.entries.len();
            self.may_finish = true;
        }
        Ok(())
    }

    /// Takes what the peer has described for a key that was unknown.
    pub fn handle_described(&mut self, rkey: u32, known: &Knowledge) {
        self.may_begin = true;
        for (entry, span) in self.entries.iter_mut().zip(&mut self.spans).skip(self.next_index) {
            if entry.describe(rkey, known) {
                *span = entry.span();
            }
        }
    }

    /// Requests a proof that the peer's device runs: one that knows nothing of the protocol acknowledges a request that changes nothing,
    /// and a peer that is stopped does not. The request is of the kind of the oldest one whose region is unknown, so that the peer permits
    /// it if it permits that one: a READ or WRITE for no bytes, or an addition of 0. It goes by packets, which a stopped peer on the same
    /// host does not answer. False if no request waits.
    pub fn request_proof(&mut self) -> bool {
        let oldest = self.entries.iter().find(|entry| entry.is_unknown && entry.failure.is_none());
        let op = oldest.and_then(Entry::proof);
        self.unposted.extend(op.map(|op| Post::new(What::Proof(op))));
        op.is_some()
    }

    /// Takes how the request of [`Initiator::request_proof`] has ended, once it has.
    pub fn take_proof(&mut self) -> Option<WcStatus> {
        self.proof.take()
    }

    /// The next action, if any.
    pub fn poll_action(&mut self, now: Time, memory: &mut impl HeldMemory) -> Option<Action> {
        loop {
            if std::mem::take(&mut self.may_begin) || self.deadline().is_some_and(|at| at <= now) {
                self.calls.end_delays(now);
                self.issue(now, memory);
                self.check_writes(now);
            }
            if std::mem::take(&mut self.may_finish) {
                self.finish_entries();
                self.retire(memory);
            }
            if std::mem::take(&mut self.break_due) {
                return Some(Action::Break);
            }
            if let Some(wc) = self.completions.pop_front() {
                return Some(Action::Complete(wc));
            }
            if self.posted.len() < self.config.post_count_max
                && let Some(wr) = self.next_post(now)
            {
                return Some(Action::Post(wr));
            }
            if let Some(message) = self.next_message(memory) {
                return Some(Action::Send(message));
            }
            // A request that finishes unsignaled is no action, and later ones may begin behind it. One whose message cannot
            // be made has failed.
            let has_next = self.may_begin && self.next_index < self.entries.len();
            if !has_next && !self.may_finish {
                return None;
            }
        }
    }

    /// The next time at which [`Initiator::poll_action`] has work without an event.
    pub fn deadline(&self) -> Option<Time> {
        [self.calls.deadline(), self.check_deadline()].into_iter().flatten().min()
    }

    /// Whether a work request that is not completed names this key of the peer.
    pub fn names(&self, rkey: u32) -> bool {
        self.entries.iter().any(|entry| entry.remote.as_ref().is_some_and(|remote| remote.rkey == rkey))
    }

    /// Forgets what is known of a region that has ended. No work request names it any more ([`Initiator::names`]).
    pub fn forget_region(&mut self, region_id: u64) {
        self.tables.remove(&region_id);
    }

    /// The number of work requests that were taken and not completed.
    pub fn len(&self) -> usize {
        self.entries.len() + self.completions.len()
    }

    /// How many work requests were posted on the queue pair whose end is not known, if a later event will tell it: 0 if all of them are
    /// unsignaled.
    pub fn awaited_count(&self) -> usize {
        if self.posted.len() > self.unsignaled_count { self.posted.len() } else { 0 }
    }

    /// Whether every work request is completed, and [`Initiator::poll_action`] has returned the completions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0 && !self.break_due
    }

    /// What has been done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Notes that something has happened to entries that have begun.
    fn note_progress(&mut self) {
        self.may_begin = true;
        self.may_finish = true;
    }

    /// The index of the entry with a sequence number.
    fn index(&self, seq: Seq) -> Option<usize> {
        let index = usize::try_from(seq.checked_sub(self.first)?).ok()?;
        (index < self.entries.len()).then_some(index)
    }

    fn seq(&self, index: usize) -> Seq {
        self.first + index as u64
    }

    /// Queues a post of a byte range of a work request.
    fn queue_data(&mut self, index: usize, range: Range<u64>, hold: Option<u64>) {
        self.entries[index].posts += 1;
        let seq = self.seq(index);
        self.unposted.push_back(Post::new(What::Data { seq, range, hold }));
    }

    /// Takes the next post, unless it needs a slot of the scratch memory and all are in use.
    fn next_post(&mut self, now: Time) -> Option<SendWr> {
        if let What::Versions(_) = self.unposted.front()?.what
            && !self.checks.has_slot()
        {
            return None;
        }
        let mut post = self.unposted.pop_front()?;
        post.token = self.next_token;
        self.next_token += 1;
        let wr = match &mut post.what {
            What::Data { seq, range, .. } => {
                let index = self.index(*seq).expect("an entry stays until its posts have completed");
                let entry = &self.entries[index];
                // The READ of the versions is posted behind it, if the queue pair has room for that.
                post.is_unsignaled =
                    entry.check != Check::None && self.unsignaled_count < self.config.post_count_max / 2;
                let notice = match post.is_unsignaled {
                    false => SendFlags::SIGNALED,
                    true if self.config.omits_ack_requests => SendFlags::ANSWERED_LATER,
                    true => SendFlags::empty(),
                };
                entry.part(post.token, range, notice)
            }
            What::Versions(read) => self.checks.post(post.token, read, &self.config.scratch, now),
            What::Proof(op) => self.config.scratch.proof(post.token, *op),
        };
        self.unsignaled_count = if post.is_unsignaled { self.unsignaled_count + 1 } else { 0 };
        self.posted.push_back(post);
        Some(wr)
    }
}

/// Whether a request may meet an absent page, and in which region.
fn paged_region(known: &Knowledge) -> Option<&Arc<Region>> {
    match known {
        Knowledge::Extended(region) => Some(region),
        Knowledge::Plain | Knowledge::Unknown => None,
    }
}

/// The payload of a byte range of a request.
fn sub_payload(payload: &Payload, range: &Range<u64>) -> Payload {
    let len = range.end - range.start;
    match payload {
        whole if len == whole.len() => whole.clone(),
        // An atomic operation has no parts.
        Payload::Masked(_) => payload.clone(),
        Payload::Sge(sge) => Payload::Sges(sge_list::sub_list(std::slice::from_ref(sge), range.start, len)),
        Payload::Sges(sges) => Payload::Sges(sge_list::sub_list(sges, range.start, len)),
        Payload::Inline(bytes) => {
            Payload::Inline(bytes[range.start as usize..range.end as usize].iter().copied().collect())
        }
        Payload::Provided(provided) => {
            let mut part = provided.clone();
            part.offset += range.start;
            part.len = len as u32;
            Payload::Provided(part)
        }
    }
}

/// The operation on a byte range of a request.
fn sub_op(op: SendOp, offset: u64) -> SendOp {
    match op {
        SendOp::Read { va, rkey } => SendOp::Read { va: va + offset, rkey },
        SendOp::Write { va, rkey } => SendOp::Write { va: va + offset, rkey },
        whole => whole,
    }
}

/// Copies data to a list, from `offset` on.
fn scatter(memory: &mut impl HeldMemory, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), LocalError> {
    let mut rest = data;
    for (_, sge) in sge_list::sub_elements(sges, offset, data.len() as u64) {
        let (piece, others) = rest.split_at(sge.length as usize);
        memory.write(&sge, 0, piece)?;
        rest = others;
    }
    Ok(())
}

impl Scratch {
    /// A request that changes nothing. What an addition returns goes to the first slot: the peer has described no region yet, so
    /// no versions are there, and those that are read behind it come later.
    fn proof(&self, token: u64, op: SendOp) -> SendWr {
        let payload = match op {
            SendOp::FetchAdd { .. } => Payload::Sge(Sge { addr: self.addr, length: 8, lkey: self.lkey }),
            _ => Payload::Sges(SgeList::new()),
        };
        SendWr { wr_id: token, op, payload, flags: SendFlags::SIGNALED | SendFlags::BY_PACKETS, target: None }
    }
}

/// A READ of the owner's, into scratch memory.
fn scratch_read(token: u64, va: u64, rkey: u32, sge: Sge) -> SendWr {
    SendWr::with_sge(token, SendOp::Read { va, rkey }, sge, SendFlags::SIGNALED)
}
