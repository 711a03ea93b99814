//! The client's side of one queue pair: takes the program's work requests in order, and says what is to be posted, called and
//! completed so that extended regions of the peer can be used as if they were all in memory.
//!
//! # Calls
//! Nothing blocks. After [`Session::post`], or after telling the session what has happened (`handle_*`, [`Session::flush`]), ask
//! [`Session::poll_action`] until it has nothing more, and do what it says. Keep a timer for [`Session::deadline`], which only asks
//! for another round of [`Session::poll_action`].
//!
//! ```text
//!   program        session                       queue pair            control queue pair
//!   post(wr) ----> waits its turn
//!                  poll_action: Post(wr) ------> post_send
//!                  poll_action: Call(call) ------------------------->  SEND
//!                  handle_completion(wc) <------ tap
//!                  handle_done(id, status) <-------------------------  RDMA WRITE, then `Done`
//!   CQ <---------- poll_action: Complete(wc)
//! ```
//!
//! # What it promises
//! - Completions come in the order of posting: of signaled requests, and of all that fail. After a failure everything later is
//!   flushed, and the owner is told to move the queue pair to the error state ([`Action::Break`]) unless it is there already.
//! - READs and WRITEs of the same bytes have the effect of their order of posting, whatever way they take; so have requests that
//!   use the same local memory, as far as the queue pair alone would see to that. A request that would overtake waits, and
//!   those behind it wait as well.
//! - FENCE holds a request back until all READs and atomics before it are done.
//! - READs are not ordered among each other, and neither is a SEND behind a READ without FENCE: what is absent comes later. (The
//!   specification has the first in order; waiting for each miss would cost what this crate is for. A FENCE gives it back.)
//! - A work request's memory is left alone once it has completed: also one that fails or is flushed is completed only when the server
//!   has answered all of its calls, or can answer none any more ([`Session::handle_peer_gone`]).
//!
//! Every request that is posted is signaled, for the session needs to know when it is over.

mod calls;
mod entry;
mod hazards;
mod outcome;
mod pieces;
mod read;
mod store;

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_transport::{Payload, PostError, SendFlags, SendOp, SendWr, Time, Wc, WcStatus};

use crate::proto::{Magic, Mode};
use crate::region::{Knowledge, Region};
use calls::{Calls, Request, Task};
use entry::{Entry, Kind, Seq, Way};
use read::Part;

pub use calls::Call;
pub use pieces::LocalMemory;

/// What a session is created with.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Number of the queue pair.
    pub qpn: u32,
    /// Upper half of the ids of its calls, by which the owner tells whose answer has come.
    pub tag: u32,
    /// Work requests that the program may have posted and not seen completed.
    pub request_count_max: usize,
    /// Work requests that the queue pair takes.
    pub post_count_max: usize,
    /// Calls that may be under way.
    pub call_count_max: usize,
    /// The queue pair's path MTU, in bytes; 256 is right for every one.
    pub mtu_bytes: u32,
    /// Whether every request is signaled.
    pub signal_all: bool,
}

/// What the session wants done.
#[derive(Clone, Debug)]
pub enum Action {
    /// Post this on the queue pair. Its completion is for [`Session::handle_completion`].
    Post(SendWr),
    /// Send this over the control queue pair. The answer is for [`Session::handle_done`].
    Call(Call),
    /// An entry for the program's completion queue.
    Complete(Wc),
    /// A request has failed that the queue pair knows nothing of: move the queue pair to the error state.
    Break,
}

/// A work request that is posted on the queue pair, or is about to be.
#[derive(Debug)]
struct Post {
    token: u64,
    seq: Seq,
    /// The part of the work request; `None` for it as it is.
    part: Option<Part>,
    /// Whether it is a READ whose data could be a pattern that nobody looks for.
    is_unchecked: bool,
}

/// A registration for which the server's NIC is to answer with the pattern.
#[derive(Debug, PartialEq, Eq)]
struct MagicRegion {
    rkey: u32,
    region_id: u64,
    is_asked: bool,
}

/// The state of a client's queue pair. See the module's documentation.
#[derive(Debug)]
pub struct Session {
    config: Config,
    /// `None` until the peer is known to serve extended regions.
    mode: Option<Mode>,
    peer_qpn: u32,
    /// Work requests that have not been completed, oldest first.
    entries: VecDeque<Entry>,
    /// The number of the oldest one.
    first: Seq,
    /// Index of the first one that has not begun.
    next_index: usize,
    /// Whether that one has to wait until something happens.
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
    /// Whether the queue pair is in the error state, or is about to be told.
    in_error: bool,
    break_due: bool,
    /// Whether there is nobody to call.
    orphaned: bool,
    magic: Vec<MagicRegion>,
    /// READs among the posts whose data nobody will look at although their region may be extended.
    unchecked_count: usize,
    /// READs among the entries that may need calls.
    checked_count: usize,
    /// Calls that entries wait for.
    task_count: usize,
}

impl Session {
    /// A session that passes everything on as it is.
    pub fn new(config: Config) -> Session {
        Session {
            config,
            mode: None,
            peer_qpn: 0,
            entries: VecDeque::new(),
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
            orphaned: false,
            magic: Vec::new(),
            unchecked_count: 0,
            checked_count: 0,
            task_count: 0,
        }
    }

    /// From now on extended regions are accessed in this mode: there is a control queue pair to the peer, whose end of this
    /// queue pair has the number `peer_qpn`. The server is asked to answer with the pattern once no READ is under way that nobody
    /// would look at.
    pub fn start(&mut self, mode: Mode, peer_qpn: u32) {
        self.mode = Some(mode);
        self.peer_qpn = peer_qpn;
        self.orphaned = false;
        self.stalled = false;
    }

    /// The mode; `None` while everything is passed on as it is.
    pub fn mode(&self) -> Option<Mode> {
        self.mode
    }

    /// Takes a work request, of which the queue pair has said that it can be posted ([`terrace_transport::Qp::check_sends`]), and
    /// what is known about its rkey; [`Knowledge::Plain`] if it has none.
    ///
    /// # Errors
    /// `QueueFull` if there are too many already.
    pub fn post(&mut self, wr: SendWr, known: &Knowledge) -> Result<(), PostError> {
        if self.entries.len() >= self.config.request_count_max {
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

    /// What is to be done next; `None` if nothing is. The memory is looked at for small WRITEs by RPC.
    pub fn poll_action(&mut self, now: Time, memory: &impl LocalMemory) -> Option<Action> {
        self.calls.expire(now);
        self.issue(memory);
        self.retire();
        if std::mem::take(&mut self.break_due) {
            return Some(Action::Break);
        }
        if let Some(wc) = self.completions.pop_front() {
            return Some(Action::Complete(wc));
        }
        if self.posted.len() < self.config.post_count_max
            && let Some(post) = self.unposted.pop_front()
        {
            return Some(Action::Post(self.release(post)));
        }
        self.ask_for_magic();
        self.calls.launch(self.config.tag, self.config.call_count_max).map(Action::Call)
    }

    /// When [`Session::poll_action`] has something to do although nothing has happened.
    pub fn deadline(&self) -> Option<Time> {
        self.calls.deadline()
    }

    /// Work requests that were taken and not completed.
    pub fn len(&self) -> usize {
        self.entries.len() + self.completions.len()
    }

    /// Whether everything that was taken is completed, and [`Session::poll_action`] has said so.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.completions.is_empty() && !self.break_due
    }

    /// Calls that the server has not answered; until it has, it may use memory of the program's.
    pub fn calls_in_flight(&self) -> usize {
        self.calls.in_flight()
    }

    fn index(&self, seq: Seq) -> Option<usize> {
        let index = usize::try_from(seq.checked_sub(self.first)?).ok()?;
        (index < self.entries.len()).then_some(index)
    }

    /// Begins with work requests, in order, as far as none has to wait.
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
        let is_list = matches!(entry.wr.payload, Payload::Sges(_));
        let is_extended = entry.region.is_some();
        match (self.mode, entry.kind) {
            (Some(Mode::OneSided), Kind::Read) if is_extended && is_list => Way::Checked,
            // The server may answer with a pattern that this end does not know.
            (Some(Mode::OneSided), Kind::Read) if entry.is_unknown && is_list && !self.magic.is_empty() => {
                if entry.length > 0 {
                    Way::Fetch
                } else {
                    Way::Queue
                }
            }
            (Some(Mode::RpcOnly), Kind::Read) if is_extended && is_list => Way::Fetch,
            (Some(Mode::RpcOnly), Kind::Write) if is_extended => Way::Store,
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
        entry.is_counted = entry.may_fetch();
        self.checked_count += usize::from(entry.is_counted);
        match entry.way {
            Way::Queue => {
                let is_unchecked = entry.kind == Kind::Read && (entry.is_unknown || entry.region.is_some());
                self.enqueue(seq, None, is_unchecked);
            }
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

    /// Begins with a READ of which some may be absent.
    fn begin_checked(&mut self, seq: Seq, index: usize) {
        let entry = &self.entries[index];
        let (Some(region), Some(remote)) = (entry.region.clone(), entry.remote) else { return };
        self.want_magic(&region);
        let plan = read::plan(&region, remote.va, remote.length);
        for run in plan.runs {
            for part in read::align(&region, remote.va, run, self.config.mtu_bytes.into()) {
                self.enqueue(seq, Some(part), false);
            }
        }
        let tasks = read::fetches(seq, &self.entries[index], &region, &plan.absent);
        self.call(index, tasks);
    }

    /// Lines up a work request for the queue pair.
    fn enqueue(&mut self, seq: Seq, part: Option<Part>, is_unchecked: bool) {
        if let Some(index) = self.index(seq) {
            self.entries[index].posts += 1;
            self.unchecked_count += usize::from(is_unchecked);
            self.unposted.push_back(Post { token: 0, seq, part, is_unchecked });
        }
    }

    /// Lines up calls that a work request waits for.
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

    /// Turns a post into the work request that it is.
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
                datagram: None,
            },
            _ => SendWr {
                wr_id: post.token,
                op: entry.wr.op,
                payload: take_payload(&mut entry.wr.payload),
                flags: entry.wr.flags | SendFlags::SIGNALED,
                datagram: entry.wr.datagram,
            },
        };
        self.posted.push_back(post);
        wr
    }

    /// Notes that a region's READs should be answered with the pattern.
    fn want_magic(&mut self, region: &Arc<Region>) {
        let (rkey, region_id) = (region.rkey(), region.description().region_id);
        if !self.magic.iter().any(|magic| (magic.rkey, magic.region_id) == (rkey, region_id)) {
            self.magic.push(MagicRegion { rkey, region_id, is_asked: false });
        }
    }

    /// Asks the server to answer with the pattern, as soon as every READ that could get it is looked at.
    fn ask_for_magic(&mut self) {
        if self.unchecked_count > 0 || self.orphaned {
            return;
        }
        let (client_qpn, server_qpn) = (self.config.qpn, self.peer_qpn);
        for region in self.magic.iter_mut().filter(|region| !region.is_asked) {
            region.is_asked = true;
            let MagicRegion { rkey, region_id, .. } = *region;
            let request = Request::Magic(Magic { client_qpn, server_qpn, rkey, region_id, on: true });
            self.calls.ready.push_front(Task { seq: None, offset: 0, local: None, request, refusals: 0 });
        }
    }
}

/// A payload for the queue pair. Of data that only the queue pair needs, nothing stays behind.
fn take_payload(payload: &mut Payload) -> Payload {
    match payload {
        Payload::Sges(_) => payload.clone(),
        _ => std::mem::replace(payload, Payload::Sges(terrace_transport::SgeList::new())),
    }
}
