//! The client's side of one queue pair. It takes the program's work requests in order, and returns posts, RPCs and
//! completions, so that a program can use the peer's extended regions as if they were all in memory.
//!
//! # Calls
//! No method blocks. After [`Session::post`], or after reporting an event to the session (`handle_*`,
//! [`Session::flush`]), call [`Session::poll_action`] until it returns `None`, and execute each action. Set a timer for
//! [`Session::deadline`]; when it fires, call [`Session::poll_action`] again.
//!
//! ```text
//!   program        session                       queue pair            control queue pair
//!   post(wr) ----> queued
//!                  poll_action: Post(wr) ------> post_send
//!                  poll_action: Call(call) ------------------------->  SEND, or READs that wait for absent pages
//!                  handle_completion(wc) <------ completion hook
//!                  handle_done(id, status) <-------------------------  RDMA WRITE, then `Done`; or completions
//!   CQ <---------- poll_action: Complete(wc)
//! ```
//!
//! # Guarantees
//! - Signaled requests and failed requests have completions. Completions are in the order of posting with
//!   [`Config::in_order`], and without it in the order in which requests finish. After a failure all later requests
//!   without a completion are flushed. [`Action::Break`] tells the owner to move the queue pair to the error state,
//!   unless it is in that state already.
//! - READs and WRITEs of the same bytes take effect in the order of posting, by RPC or one-sided. So do requests that
//!   use the same local memory, as far as the queue pair alone guarantees that. A request that would violate this order
//!   waits, and so do all later ones.
//! - A request with FENCE waits until all earlier READs and atomics are done.
//! - READs are not ordered among each other. A SEND after a READ without FENCE is not ordered either: absent data
//!   arrives later. (The specification orders READs. Waiting for each miss would defeat this crate's purpose. A FENCE
//!   restores the order.)
//! - A work request's memory is not accessed after its completion. A request that fails or is flushed completes when
//!   the server has answered all of its calls, or cannot answer any more ([`Session::handle_peer_gone`]).
//!
//! Every post is signaled, because the session tracks its completion.

mod calls;
mod entry;
mod grants;
mod hazards;
mod outcome;
mod read;
mod store;

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_transport::{Payload, PostError, SendFlags, SendOp, SendWr, Time, Wc, WcStatus};

use crate::proto::{Magic, Mode};
use crate::region::{Knowledge, Region};
use crate::sge_list;
use calls::{Calls, Request, Task};
use entry::{Entry, Kind, Route, Seq};
use grants::Grants;
use hazards::WithCalls;
use read::ByteRange;

pub use crate::sge_list::LocalMemory;
pub use calls::Call;

/// The parameters of a session.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The queue pair number.
    pub qpn: u32,
    /// The upper half of the ids of its calls, by which the owner routes answers.
    pub tag: u32,
    /// The most work requests that are posted and not completed.
    pub request_count_max: usize,
    /// The most work requests on the queue pair.
    pub post_count_max: usize,
    /// The most calls in flight: requests, not messages.
    pub call_count_max: usize,
    /// The queue pair's path MTU, in bytes; 256 is valid for every queue pair.
    pub mtu_bytes: u32,
    /// Whether every request is signaled.
    pub signal_all: bool,
    /// Whether requests complete in the order of posting, as on a queue pair. Otherwise a request whose data has
    /// arrived does not wait for earlier ones whose data is being fetched. Effects are in order in both cases.
    pub in_order: bool,
}

/// The most requests that complete before the oldest one, as a multiple of `request_count_max`. Further ones wait for
/// the oldest, so that memory is bounded even if one request never ends.
const EARLY_COMPLETIONS_MAX: usize = 16;

/// An action for the owner to execute.
#[derive(Clone, Debug)]
pub enum Action {
    /// Post this on the queue pair. Pass its completion to [`Session::handle_completion`]. If posting fails, call
    /// [`Session::handle_refused`].
    Post(SendWr),
    /// Send this over the control queue pair, or READ what it requests ([`Call::reads`]). Pass the answer to each of its requests
    /// to [`Session::handle_done`].
    Call(Call),
    /// An entry for the program's completion queue.
    Complete(Wc),
    /// Move the queue pair to the error state: a request has failed outside the queue pair.
    Break,
    /// The server accepts this queue pair's calls for the region, and requests for the region's tables
    /// ([`Open`](crate::proto::Open)).
    Granted(Arc<Region>),
    /// The knowledge of this rkey is stale: the server has no such registration. Remove it
    /// ([`Peers::remove`](crate::peers::Peers::remove)), so that the server is queried again.
    Outdated(u32),
}

/// A work request that is posted on the queue pair, or is about to be.
#[derive(Debug)]
struct Post {
    token: u64,
    seq: Seq,
    /// The byte range of the work request; `None` for the whole.
    range: Option<ByteRange>,
    /// The key of a READ that may return the signature page, but whose data is not inspected.
    unchecked_rkey: Option<u32>,
}

/// The state of a client's queue pair; see the module's documentation.
#[derive(Debug)]
pub struct Session {
    config: Config,
    /// `None` until the peer is known to serve extended regions.
    mode: Option<Mode>,
    peer_qpn: u32,
    /// Work requests, from the oldest one that is not completed.
    entries: VecDeque<Entry>,
    /// The number of entries that have completed before the oldest one.
    early_count: usize,
    /// The sequence number of the oldest entry.
    first: Seq,
    /// The index of the first entry that has not begun.
    next_index: usize,
    /// Whether that entry is blocked until an event.
    stalled: bool,
    /// Posts that are not on the queue pair yet.
    unposted: VecDeque<Post>,
    /// Posts on the queue pair.
    posted: VecDeque<Post>,
    next_token: u64,
    calls: Calls,
    completions: VecDeque<Wc>,
    /// The earliest work request that has failed.
    first_failed: Option<Seq>,
    /// Whether the queue pair is in the error state, or is about to be moved to it.
    in_error: bool,
    break_due: bool,
    /// The actions `Granted` and `Outdated` that are due.
    region_actions: Vec<Action>,
    /// Whether the control queue pair is gone.
    is_control_gone: bool,
    grants: Grants,
    /// The number of READs among the entries that may need calls.
    checked_count: usize,
    /// The number of calls that entries wait for.
    task_count: usize,
    /// The entries that wait for calls.
    with_calls: Vec<WithCalls>,
}

impl Session {
    /// A session that posts all work requests unchanged.
    pub fn new(config: Config) -> Session {
        Session {
            config,
            mode: None,
            peer_qpn: 0,
            entries: VecDeque::new(),
            early_count: 0,
            first: 0,
            next_index: 0,
            stalled: false,
            unposted: VecDeque::new(),
            posted: VecDeque::new(),
            next_token: 0,
            calls: Calls::default(),
            completions: VecDeque::new(),
            first_failed: None,
            in_error: false,
            break_due: false,
            region_actions: Vec::new(),
            is_control_gone: false,
            grants: Grants::default(),
            checked_count: 0,
            task_count: 0,
            with_calls: Vec::new(),
        }
    }

    /// Starts to access extended regions in this mode, except those that the server describes as plain. Requires a
    /// control queue pair to the peer, whose end of this queue pair has the number `peer_qpn`. At the first use of each
    /// region the session requests a grant ([`Magic`]). A repeated call with the same arguments changes nothing, unless
    /// the peer was gone.
    pub fn start(&mut self, mode: Mode, peer_qpn: u32) {
        if (self.mode, self.peer_qpn, self.is_control_gone) == (Some(mode), peer_qpn, false) {
            return;
        }
        self.mode = Some(mode);
        self.peer_qpn = peer_qpn;
        self.is_control_gone = false;
        self.stalled = false;
        self.grants.request_again();
    }

    /// The mode; `None` while all work requests are posted unchanged.
    pub fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// Takes a work request that the queue pair has accepted ([`terrace_transport::Qp::check_sends`]), and the
    /// knowledge of its rkey; [`Knowledge::Plain`] for a request without an rkey.
    ///
    /// # Errors
    /// `QueueFull` if `request_count_max` requests are not completed.
    pub fn post(&mut self, wr: SendWr, known: &Knowledge) -> Result<(), PostError> {
        if self.entries.len() - self.early_count >= self.config.request_count_max {
            return Err(PostError::QueueFull);
        }
        let mut entry = Entry::new(wr, known);
        if self.first_failed.is_some() {
            entry.issued = true;
            entry.fail(WcStatus::Flushed, 0);
        }
        self.entries.push_back(entry);
        if self.first_failed.is_some() {
            self.next_index = self.entries.len();
        }
        Ok(())
    }

    /// The next action, if any. Small WRITEs by RPC read the memory.
    pub fn poll_action(&mut self, now: Time, memory: &impl LocalMemory) -> Option<Action> {
        self.calls.end_delays(now);
        self.issue(memory);
        self.retire();
        if std::mem::take(&mut self.break_due) {
            return Some(Action::Break);
        }
        if let Some(action) = self.region_actions.pop() {
            return Some(action);
        }
        if let Some(wc) = self.completions.pop_front() {
            return Some(Action::Complete(wc));
        }
        if self.posted.len() < self.config.post_count_max
            && let Some(post) = self.unposted.pop_front()
        {
            return Some(Action::Post(self.build_post(post)));
        }
        self.request_grant(now);
        self.calls.send_next(self.config.tag, self.config.call_count_max).map(Action::Call)
    }

    /// The next time at which [`Session::poll_action`] has work without an event.
    pub fn deadline(&self) -> Option<Time> {
        let grants = self.grants.deadline(|rkey| self.is_control_gone || self.is_unchecked(rkey));
        [self.calls.deadline(), grants].into_iter().flatten().min()
    }

    /// The number of work requests that were taken and not completed.
    pub fn len(&self) -> usize {
        self.entries.len() - self.early_count + self.completions.len()
    }

    /// Whether every work request is completed, and [`Session::poll_action`] has returned the completions.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.completions.is_empty() && !self.break_due
    }

    /// The number of calls that the server has not answered. Until it has, it may access the program's memory.
    pub fn calls_in_flight(&self) -> usize {
        self.calls.in_flight_count()
    }

    /// The index of the entry with a sequence number.
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
            self.entries[self.next_index].route = self.choose_route(&self.entries[self.next_index]);
            if self.is_blocked(self.next_index) {
                self.stalled = true;
                return;
            }
            let index = self.next_index;
            self.next_index += 1;
            self.begin_request(index, memory);
        }
    }

    /// The route of a work request.
    fn choose_route(&self, entry: &Entry) -> Route {
        let (Some(mode), Some(region)) = (self.mode, &entry.region) else { return Route::QueuePair };
        let is_list = entry.wr.payload.sges().is_some();
        match (mode, entry.kind) {
            (Mode::OneSided, Kind::Read) if is_list && !self.grants.is_refused(region) => Route::Checked,
            (Mode::RpcOnly, Kind::Read) if is_list && self.grants.is_granted(region) => Route::Fetch,
            (Mode::RpcOnly, Kind::Write) if self.grants.is_granted(region) => Route::Store,
            (Mode::OneSided, Kind::Write)
                if self.grants.is_granted(region) && store::is_cheaper_by_rpc(entry, region) =>
            {
                Route::Store
            }
            _ => Route::QueuePair,
        }
    }

    /// Queues the posts or calls of a work request.
    fn begin_request(&mut self, index: usize, memory: &impl LocalMemory) {
        let seq = self.first + index as u64;
        let entry = &mut self.entries[index];
        entry.issued = true;
        if let (Some(region), Some(remote)) = (&entry.region, &entry.remote) {
            region.residency().mark_used(region.layout().units(remote.va, remote.length));
        }
        if let (Some(region), Kind::Read | Kind::Write, true) =
            (&entry.region, entry.kind, self.mode.is_some())
        {
            self.grants.queue_request(region);
        }
        entry.is_counted = entry.may_fetch();
        self.checked_count += usize::from(entry.is_counted);
        match entry.route {
            Route::QueuePair => self.queue_post(seq, None),
            Route::Checked => self.begin_checked_read(seq, index),
            Route::Fetch => {
                let tasks = read::whole_read_calls(seq, &self.entries[index]);
                self.queue_calls(index, tasks);
            }
            Route::Store => match store::write_calls(seq, &self.entries[index], memory) {
                Ok(tasks) => self.queue_calls(index, tasks),
                Err(_) => self.fail(index, WcStatus::LocalProtection, 0),
            },
        }
    }

    /// Queues the posts and calls of a READ that may find pages absent.
    fn begin_checked_read(&mut self, seq: Seq, index: usize) {
        let entry = &self.entries[index];
        let (Some(region), Some(remote)) = (&entry.region, &entry.remote) else { return };
        let plan = read::plan(region, remote.va, remote.length, self.grants.is_granted(region));
        let tasks = read::read_calls(seq, entry, region, &plan.absent);
        let mtu_bytes = self.config.mtu_bytes.into();
        let ranges: SmallVec<[ByteRange; 4]> =
            plan.runs.into_iter().flat_map(|run| read::align(region, remote.va, run, mtu_bytes)).collect();
        ranges.into_iter().for_each(|range| self.queue_post(seq, Some(range)));
        self.queue_calls(index, tasks);
    }

    /// Queues a post of a work request, or of a byte range of it.
    fn queue_post(&mut self, seq: Seq, range: Option<ByteRange>) {
        let Some(index) = self.index(seq) else { return };
        let entry = &mut self.entries[index];
        entry.posts += 1;
        let is_unchecked = entry.route == Route::QueuePair && entry.kind == Kind::Read && !entry.is_plain;
        let unchecked_rkey = entry.remote.filter(|_| is_unchecked).map(|remote| remote.rkey);
        self.unposted.push_back(Post { token: 0, seq, range, unchecked_rkey });
    }

    /// Queues calls that a work request waits for.
    fn queue_calls(&mut self, index: usize, tasks: Vec<Task>) {
        if self.is_control_gone && !tasks.is_empty() {
            return self.fail(index, WcStatus::RetryExceeded, 0);
        }
        for task in tasks {
            self.count_call(index);
            if self.is_deferred(&task) {
                self.calls.deferred.push(task);
            } else {
                self.calls.ready.push_back(task);
            }
        }
    }

    /// Builds the work request of a post, and moves the post to the queue pair.
    fn build_post(&mut self, mut post: Post) -> SendWr {
        post.token = self.next_token;
        self.next_token += 1;
        let index = self.index(post.seq).expect("an entry stays until its posts have completed");
        let entry = &mut self.entries[index];
        let wr = match (&post.range, entry.wr.op) {
            (Some(range), SendOp::Read { va, rkey }) => SendWr {
                wr_id: post.token,
                op: SendOp::Read { va: va + range.start, rkey },
                payload: Payload::Sges(sge_list::sub_list(
                    entry.sges(),
                    range.start,
                    range.end - range.start,
                )),
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

    /// Requests the grant for a region. The signature page may be enabled only while no READ with the same key is in
    /// flight whose data is not inspected.
    fn request_grant(&mut self, now: Time) {
        let (Some(mode), false) = (self.mode, self.is_control_gone) else { return };
        let on = mode == Mode::OneSided;
        let (posted, unposted) = (&self.posted, &self.unposted);
        let Some(region) = self.grants.next_request(now, on, |rkey| is_unchecked(posted, unposted, rkey))
        else {
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

/// Whether a READ with this key is queued or in flight whose data is not inspected.
fn is_unchecked(posted: &VecDeque<Post>, unposted: &VecDeque<Post>, rkey: u32) -> bool {
    posted.iter().chain(unposted).any(|post| post.unchecked_rkey == Some(rkey))
}

/// A payload for the queue pair. What names registered memory is copied, because the session needs it; data is moved.
fn take_payload(payload: &mut Payload) -> Payload {
    match payload {
        Payload::Sge(_) | Payload::Sges(_) | Payload::Masked(_) => payload.clone(),
        _ => std::mem::replace(payload, Payload::Sges(terrace_transport::SgeList::new())),
    }
}
