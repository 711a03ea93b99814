//! The client's side of one queue pair: takes the program's work requests in order, and determines what is to be
//! posted, called and completed so that extended regions of the peer can be used as if they were all in memory.
//!
//! # Calls
//! Nothing blocks. After [`Session::post`], or after reporting an event to the session (`handle_*`,
//! [`Session::flush`]), call [`Session::poll_action`] until it returns `None`, and carry out each action. Keep a timer
//! for [`Session::deadline`]; when it fires, call [`Session::poll_action`] again.
//!
//! ```text
//!   program        session                       queue pair            control queue pair
//!   post(wr) ----> waits its turn
//!                  poll_action: Post(wr) ------> post_send
//!                  poll_action: Call(call) ------------------------->  SEND
//!                  handle_completion(wc) <------ completion hook
//!                  handle_done(id, status) <-------------------------  RDMA WRITE, then `Done`
//!   CQ <---------- poll_action: Complete(wc)
//! ```
//!
//! # Guarantees
//! - Completions come in the order of posting ([`Config::in_order`]; otherwise as soon as a request is over): of
//!   signaled requests, and of all that fail. After a failure everything later that is not completed is flushed, and
//!   the owner is told to move the queue pair to the error state ([`Action::Break`]) unless it is there already.
//! - READs and WRITEs of the same bytes have the effect of their order of posting, whether by RPC or one-sided; so have
//!   requests that use the same local memory, as far as the queue pair alone would guarantee that. A request that would
//!   overtake waits, and those behind it wait as well.
//! - FENCE holds a request back until all READs and atomics before it are done.
//! - READs are not ordered among each other, and neither is a SEND behind a READ without FENCE: absent data comes
//!   later. (The specification has the first in order; waiting for each miss would defeat this crate's purpose. A FENCE
//!   restores it.)
//! - A work request's memory is not accessed after its completion. A request that fails or is flushed is completed only
//!   when the server has answered all of its calls, or can answer none any more ([`Session::handle_peer_gone`]).
//!
//! Every posted request is signaled, because the session needs to know when it is over.

mod calls;
mod entry;
mod grants;
mod hazards;
mod outcome;
mod pieces;
mod read;
mod store;

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::{Payload, PostError, SendFlags, SendOp, SendWr, Time, Wc, WcStatus};

use crate::pattern::PAGE_BYTES;
use crate::proto::{Magic, Mode};
use crate::region::{Knowledge, Region};
use calls::{Calls, Request, Task};
use entry::{Entry, Kind, Seq, Way};
use grants::Grants;
use read::Part;

pub use calls::Call;
pub use pieces::LocalMemory;

/// The parameters of a session.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Number of the queue pair.
    pub qpn: u32,
    /// Upper half of the ids of its calls, by which the owner routes answers.
    pub tag: u32,
    /// Work requests that may be posted and not completed.
    pub request_count_max: usize,
    /// Work requests that the queue pair takes.
    pub post_count_max: usize,
    /// Calls that may be in flight.
    pub call_count_max: usize,
    /// The queue pair's path MTU, in bytes; 256 is valid for every queue pair.
    pub mtu_bytes: u32,
    /// Whether every request is signaled.
    pub signal_all: bool,
    /// Whether requests complete in the order of posting, as a queue pair's do. Otherwise a request whose data is
    /// there does not wait for earlier ones whose data is still being fetched. Their effects are in order all the
    /// same.
    pub in_order: bool,
}

/// How many requests, as a multiple of those that may be in flight, are kept behind the oldest one that is not over.
/// Further ones wait for it: memory is bounded, even if one request never ends.
const OVERTAKING_MAX: usize = 16;

/// An action for the owner to carry out.
#[derive(Clone, Debug)]
pub enum Action {
    /// Post this on the queue pair. Pass its completion to [`Session::handle_completion`]; if it cannot be posted, call
    /// [`Session::handle_refused`].
    Post(SendWr),
    /// Send this over the control queue pair. Pass the answer to [`Session::handle_done`].
    Call(Call),
    /// An entry for the program's completion queue.
    Complete(Wc),
    /// A request has failed, but not on the queue pair: move the queue pair to the error state.
    Break,
    /// The server serves this queue pair's calls for the region: it also answers questions for the region's tables
    /// ([`Open`](crate::proto::Open)).
    Granted(Arc<Region>),
    /// The knowledge of this rkey is stale: the server has no such registration. Forget it
    /// ([`Peers::forget`](crate::peers::Peers::forget)), so that the server is asked again.
    Outdated(u32),
}

/// A work request that is posted on the queue pair, or is about to be.
#[derive(Debug)]
struct Post {
    token: u64,
    seq: Seq,
    /// The part of the work request; `None` for the whole.
    part: Option<Part>,
    /// The key of a READ whose data may be the signature page, but is not inspected.
    unchecked_rkey: Option<u32>,
}

/// The state of a client's queue pair. See the module's documentation.
#[derive(Debug)]
pub struct Session {
    config: Config,
    /// `None` until the peer is known to serve extended regions.
    mode: Option<Mode>,
    peer_qpn: u32,
    /// Work requests, from the oldest one that is not completed.
    entries: VecDeque<Entry>,
    /// Those of them that have completed before it.
    overtaken_count: usize,
    /// The number of the oldest one.
    first: Seq,
    /// Index of the first one that has not begun.
    next_index: usize,
    /// Whether that one is blocked until an event.
    stalled: bool,
    /// To be posted.
    unposted: VecDeque<Post>,
    /// On the queue pair.
    posted: VecDeque<Post>,
    next_token: u64,
    calls: Calls,
    completions: VecDeque<Wc>,
    /// The first work request that has failed.
    broken: Option<Seq>,
    /// Whether the queue pair is in the error state, or is about to be moved to it.
    in_error: bool,
    break_due: bool,
    /// Actions about regions.
    news: Vec<Action>,
    /// Whether the control queue pair is gone.
    orphaned: bool,
    grants: Grants,
    /// READs among the entries that may need calls.
    checked_count: usize,
    /// Calls that entries wait for.
    task_count: usize,
    /// A buffer for inspecting data.
    page_room: Box<[u8; PAGE_BYTES]>,
}

impl Session {
    /// A session that passes all work requests on unchanged.
    pub fn new(config: Config) -> Session {
        Session {
            config,
            mode: None,
            peer_qpn: 0,
            entries: VecDeque::new(),
            overtaken_count: 0,
            first: 0,
            next_index: 0,
            stalled: false,
            unposted: VecDeque::new(),
            posted: VecDeque::new(),
            next_token: 0,
            calls: Calls::default(),
            completions: VecDeque::new(),
            broken: None,
            in_error: false,
            break_due: false,
            news: Vec::new(),
            orphaned: false,
            grants: Grants::default(),
            checked_count: 0,
            task_count: 0,
            page_room: Box::new([0; PAGE_BYTES]),
        }
    }

    /// From now on extended regions are accessed in this mode (except those that the server wants to be accessed as
    /// plain ones). Requires a control queue pair to the peer, whose end of this queue pair has the number `peer_qpn`.
    /// The first use of each region makes the session ask the server for it ([`Magic`]). Calling it again with the
    /// same arguments changes nothing, unless the peer was gone.
    pub fn start(&mut self, mode: Mode, peer_qpn: u32) {
        if (self.mode, self.peer_qpn, self.orphaned) == (Some(mode), peer_qpn, false) {
            return;
        }
        self.mode = Some(mode);
        self.peer_qpn = peer_qpn;
        self.orphaned = false;
        self.stalled = false;
        self.grants.start_anew();
    }

    /// The mode; `None` while all work requests are passed on unchanged.
    pub fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// Takes a work request that the queue pair has accepted ([`terrace_transport::Qp::check_sends`]), and the
    /// knowledge of its rkey; [`Knowledge::Plain`] if it has none.
    ///
    /// # Errors
    /// `QueueFull` at the limit.
    pub fn post(&mut self, wr: SendWr, known: &Knowledge) -> Result<(), PostError> {
        if self.entries.len() - self.overtaken_count >= self.config.request_count_max {
            return Err(PostError::QueueFull);
        }
        let mut entry = Entry::new(wr, known);
        if self.broken.is_some() {
            entry.issued = true;
            entry.fail(WcStatus::Flushed, 0);
        }
        self.entries.push_back(entry);
        if self.broken.is_some() {
            self.next_index = self.entries.len();
        }
        Ok(())
    }

    /// The next action; `None` if there is none. The memory is read for small WRITEs by RPC.
    pub fn poll_action(&mut self, now: Time, memory: &impl LocalMemory) -> Option<Action> {
        self.calls.expire(now);
        self.issue(memory);
        self.retire();
        if std::mem::take(&mut self.break_due) {
            return Some(Action::Break);
        }
        if let Some(action) = self.news.pop() {
            return Some(action);
        }
        if let Some(wc) = self.completions.pop_front() {
            return Some(Action::Complete(wc));
        }
        if self.posted.len() < self.config.post_count_max
            && let Some(post) = self.unposted.pop_front()
        {
            return Some(Action::Post(self.release(post)));
        }
        self.ask_for_grant(now);
        self.calls.launch(self.config.tag, self.config.call_count_max).map(Action::Call)
    }

    /// When [`Session::poll_action`] has work without an event.
    pub fn deadline(&self) -> Option<Time> {
        let grants = self.grants.deadline(|rkey| self.orphaned || self.is_unchecked(rkey));
        [self.calls.deadline(), grants].into_iter().flatten().min()
    }

    /// Work requests that were taken and not completed.
    pub fn len(&self) -> usize {
        self.entries.len() - self.overtaken_count + self.completions.len()
    }

    /// Whether every work request is completed, and [`Session::poll_action`] has returned the completions.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.completions.is_empty() && !self.break_due
    }

    /// Calls that the server has not answered; until it has, it may access the program's memory.
    pub fn calls_in_flight(&self) -> usize {
        self.calls.in_flight()
    }

    fn index(&self, seq: Seq) -> Option<usize> {
        let index = usize::try_from(seq.checked_sub(self.first)?).ok()?;
        (index < self.entries.len()).then_some(index)
    }

    /// Begins work requests, in order, up to the first blocked one.
    fn issue(&mut self, memory: &impl LocalMemory) {
        while !self.stalled
            && self.next_index < self.entries.len()
            && self.unposted.len() < self.config.post_count_max
        {
            self.entries[self.next_index].way = self.way(&self.entries[self.next_index]);
            if self.is_blocked(self.next_index) {
                self.stalled = true;
                return;
            }
            let index = self.next_index;
            self.next_index += 1;
            self.begin(index, memory);
        }
    }

    /// How a work request is to be carried out.
    fn way(&self, entry: &Entry) -> Way {
        let (Some(mode), Some(region)) = (self.mode, &entry.region) else { return Way::Queue };
        let is_list = entry.wr.payload.sges().is_some();
        match (mode, entry.kind) {
            (Mode::OneSided, Kind::Read) if is_list && !self.grants.is_refused(region) => Way::Checked,
            (Mode::RpcOnly, Kind::Read) if is_list && self.grants.is_granted(region) => Way::Fetch,
            (Mode::RpcOnly, Kind::Write) if self.grants.is_granted(region) => Way::Store,
            (Mode::OneSided, Kind::Write) if self.grants.is_granted(region) && store::pays(entry, region) => {
                Way::Store
            }
            _ => Way::Queue,
        }
    }

    fn begin(&mut self, index: usize, memory: &impl LocalMemory) {
        let seq = self.first + index as u64;
        let entry = &mut self.entries[index];
        entry.issued = true;
        if let (Some(region), Some(remote)) = (&entry.region, &entry.remote)
            && !matches!(entry.wr.op, SendOp::Flush { .. })
        {
            region.counts().note(region.layout().units(remote.va, remote.length));
        }
        if let (Some(region), Kind::Read | Kind::Write, true) =
            (&entry.region, entry.kind, self.mode.is_some())
        {
            self.grants.want(region);
        }
        entry.is_counted = entry.may_fetch();
        self.checked_count += usize::from(entry.is_counted);
        match entry.way {
            Way::Queue => self.enqueue(seq, None),
            Way::Checked => self.begin_checked(seq, index),
            Way::Fetch => {
                let tasks = read::fetches_of_all(seq, &self.entries[index]);
                self.call(index, tasks);
            }
            Way::Store => match store::stores(seq, &self.entries[index], memory) {
                Ok(tasks) => self.call(index, tasks),
                Err(_) => self.fail(index, WcStatus::LocalProtection, 0),
            },
        }
    }

    /// Begins a READ of which some may be absent.
    fn begin_checked(&mut self, seq: Seq, index: usize) {
        let entry = &self.entries[index];
        let (Some(region), Some(remote)) = (&entry.region, &entry.remote) else { return };
        let plan = read::plan(region, remote.va, remote.length, self.grants.is_granted(region));
        let tasks = read::fetches(seq, entry, region, &plan.absent);
        let mtu_bytes = self.config.mtu_bytes.into();
        let parts: SmallVec<[Part; 4]> =
            plan.runs.into_iter().flat_map(|run| read::align(region, remote.va, run, mtu_bytes)).collect();
        parts.into_iter().for_each(|part| self.enqueue(seq, Some(part)));
        self.call(index, tasks);
    }

    /// Queues a work request for the queue pair.
    fn enqueue(&mut self, seq: Seq, part: Option<Part>) {
        let Some(index) = self.index(seq) else { return };
        let entry = &mut self.entries[index];
        entry.posts += 1;
        let is_unchecked = entry.way == Way::Queue && entry.kind == Kind::Read && !entry.is_plain;
        let unchecked_rkey = entry.remote.filter(|_| is_unchecked).map(|remote| remote.rkey);
        self.unposted.push_back(Post { token: 0, seq, part, unchecked_rkey });
    }

    /// Queues calls that a work request waits for.
    fn call(&mut self, index: usize, tasks: Vec<Task>) {
        if self.orphaned && !tasks.is_empty() {
            return self.fail(index, WcStatus::RetryExceeded, 0);
        }
        for task in tasks {
            self.entries[index].calls += 1;
            self.task_count += 1;
            if self.is_held(&task) {
                self.calls.held.push(task);
            } else {
                self.calls.ready.push_back(task);
            }
        }
    }

    /// Turns a post into its work request.
    fn release(&mut self, mut post: Post) -> SendWr {
        post.token = self.next_token;
        self.next_token += 1;
        let index = self.index(post.seq).expect("an entry stays while a post of it is under way");
        let entry = &mut self.entries[index];
        let wr = match (&post.part, entry.wr.op) {
            (Some(part), SendOp::Read { va, rkey }) => SendWr {
                wr_id: post.token,
                op: SendOp::Read { va: va + part.start, rkey },
                payload: Payload::Sges(pieces::cut(entry.sges(), part.start, part.end - part.start)),
                flags: SendFlags::SIGNALED,
                target: None,
            },
            _ => SendWr {
                wr_id: post.token,
                op: entry.wr.op,
                payload: take_payload(&mut entry.wr.payload),
                flags: entry.wr.flags | SendFlags::SIGNALED,
                target: entry.wr.target.clone(),
            },
        };
        self.posted.push_back(post);
        wr
    }

    /// Asks the server to serve this queue pair's calls for a region. Signature pages may be enabled only while no
    /// READ with the same key is in flight whose data is not inspected.
    fn ask_for_grant(&mut self, now: Time) {
        let (Some(mode), false) = (self.mode, self.orphaned) else { return };
        let on = mode == Mode::OneSided;
        let (posted, unposted) = (&self.posted, &self.unposted);
        let Some(region) = self.grants.ask(now, on, |rkey| is_unchecked(posted, unposted, rkey)) else {
            return;
        };
        let (client_qpn, server_qpn) = (self.config.qpn, self.peer_qpn);
        let (rkey, region_id) = (region.rkey(), region.description().region_id);
        let request = Request::Magic(Magic { client_qpn, server_qpn, rkey, region_id, on });
        self.calls.ready.push_front(Task { seq: None, offset: 0, local: None, request, refusals: 0 });
    }

    fn is_unchecked(&self, rkey: u32) -> bool {
        is_unchecked(&self.posted, &self.unposted, rkey)
    }
}

/// Whether a READ with this key is in flight whose data is not inspected.
fn is_unchecked(posted: &VecDeque<Post>, unposted: &VecDeque<Post>, rkey: u32) -> bool {
    posted.iter().chain(unposted).any(|post| post.unchecked_rkey == Some(rkey))
}

/// A payload for the queue pair. Data that only the queue pair needs is moved, not copied.
fn take_payload(payload: &mut Payload) -> Payload {
    match payload {
        Payload::Sge(_) | Payload::Sges(_) => payload.clone(),
        _ => std::mem::replace(payload, Payload::Sges(terrace_transport::SgeList::new())),
    }
}
