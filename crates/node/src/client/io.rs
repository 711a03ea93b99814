//! A client's accesses: the session of its queue pair, and the execution of the session's actions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use terrace_access::proto::{Mode, Table};
use terrace_access::region::{Knowledge, Region};
use terrace_access::residency::{PULL_BYTES_MAX, PullRanges};
use terrace_access::session::{Action, Call, Config, LocalMemory, Session};
use terrace_nic::{
    Buffer, Cq, Device, Error, LocalError, Pd, PostError, QpAttr, QpAttrMask, QpState, QueuePair, SendWr,
    Sge, Time, Wc,
};

use super::fetch::{Fetched, Fetches};
use super::{ClientCounters, Completion};
use crate::agent::Agent;
use crate::connections::{Connection, Role};
use crate::control::Control;
use crate::link::Link;
use crate::mailbox::Mailbox;

/// The session's tag. The link's own requests have tag 0.
const TAG: u32 = 1;
/// The most completions that one call handles.
const COMPLETIONS_MAX: usize = 64;
/// `ibv_access_flags` of the buffer for a pulled bitmap.
const LOCAL_WRITE: u32 = 1;

/// The pulls of a region's residency bitmap.
struct Pull {
    region: Arc<Region>,
    /// The bitmap in the server's memory.
    table: Table,
    /// The pulled ranges, one behind the other.
    buffer: Buffer,
    /// The ranges of the pull in flight; empty without one.
    in_flight: PullRanges,
    /// Set when the READs of the pull have completed.
    arrived: Arc<AtomicBool>,
}

impl Pull {
    /// READs the ranges of the pull in flight.
    fn read(&self, link: &mut Link, control: &mut Control) {
        let mut at = 0;
        let reads = self.in_flight.iter().map(|range| {
            let into = self.buffer.sge(at, range.len() as u32);
            at += range.len();
            (self.table.va + range.start as u64, into)
        });
        link.read(control, self.table.rkey, reads, &self.arrived);
    }

    /// Stores the ranges that have arrived. Returns their length in bytes.
    fn store(&mut self, now: Time) -> usize {
        let (residency, mut at) = (self.region.residency(), 0);
        for range in std::mem::take(&mut self.in_flight) {
            let mut bytes = vec![0; range.len()];
            match self.buffer.read(at, &mut bytes) {
                Ok(()) => residency.store(range.start, &bytes),
                Err(error) => tracing::debug!(%error, "a pulled bitmap cannot be read"),
            }
            at += range.len();
        }
        residency.end_pull(now);
        at
    }
}

/// The session and queue pair of a client.
pub(super) struct Io {
    session: Session,
    qp: Arc<QueuePair>,
    cq: Arc<Cq>,
    link: u32,
    mailbox: Arc<Mailbox>,
    /// Without queue pairs, fetches are requested by messages.
    fetches: Fetches,
    pulls: Vec<Pull>,
    /// Work requests to post on the queue pair.
    posts: Vec<SendWr>,
    calls: Vec<Call>,
    /// Completions of the queue pair that the session has not handled.
    arrived: Vec<Wc>,
    /// Completions that the program has not taken yet.
    completed: VecDeque<Completion>,
    /// Whether the session knows that the control queue pair is gone.
    is_control_gone: bool,
    pub counters: ClientCounters,
}

impl Io {
    /// A session on a connected queue pair, with up to `depth` accesses and `calls_max` calls in flight.
    pub fn new(qp: Arc<QueuePair>, cq: Arc<Cq>, link: u32, depth: u32, calls_max: u16) -> Io {
        let attr = qp.query();
        let session = Session::new(Config {
            qpn: qp.qpn(),
            tag: TAG,
            request_count_max: depth as usize,
            post_count_max: qp.cap().max_send_wr as usize,
            call_count_max: usize::from(calls_max),
            mtu_bytes: attr.path_mtu,
            signal_all: false,
            // Accesses are identified by their tags.
            in_order: false,
        });
        Io {
            session,
            qp,
            cq,
            link,
            mailbox: Arc::default(),
            fetches: Fetches::default(),
            pulls: Vec::new(),
            posts: Vec::new(),
            calls: Vec::new(),
            arrived: Vec::new(),
            completed: VecDeque::new(),
            is_control_gone: false,
            counters: ClientCounters::default(),
        }
    }

    /// Routes the answers to calls to the session, and sets the mode for the server's regions.
    pub fn start(&mut self, agent: &Agent, mode: Mode, peer_qpn: u32) {
        if let Some(Connection { role: Role::Client(link), .. }) =
            agent.lock().connections.get_to_post(self.link)
        {
            link.register(TAG, self.mailbox.clone());
        }
        self.session.start(mode, peer_qpn);
    }

    /// Starts to pull the residency bitmap of a region periodically.
    ///
    /// # Errors
    /// ENOMEM without memory for the bitmap.
    pub fn start_pulls(&mut self, pd: &Arc<Pd>, region: Arc<Region>, table: Table) -> Result<(), Error> {
        let len = region.residency().length_bytes();
        if table.length_bytes < len as u64 {
            return Err(Error::Invalid("the server's bitmap is shorter than its region"));
        }
        let buffer = Buffer::new(pd, len.min(PULL_BYTES_MAX), LOCAL_WRITE)?;
        let arrived = Arc::new(AtomicBool::new(false));
        self.pulls.push(Pull { region, table, buffer, in_flight: PullRanges::new(), arrived });
        Ok(())
    }

    /// Has connected queue pairs fetch absent pages.
    pub fn start_fetches(&mut self, qps: Vec<Arc<QueuePair>>) {
        self.fetches = Fetches::new(qps);
    }

    /// Begins an access; [`Io::advance`] drives it.
    ///
    /// # Errors
    /// `QueueFull` if `depth` accesses are in flight.
    pub fn begin(&mut self, wr: SendWr, known: &Knowledge) -> Result<(), PostError> {
        self.qp.prefetch(&wr.op);
        self.session.post(wr, known)
    }

    /// Handles events, and executes the session's actions.
    ///
    /// # Errors
    /// If completions were lost.
    pub fn advance(&mut self, device: &Device, agent: &Agent) -> Result<(), Error> {
        let (now, memory) = (device.now(), Memory(self.qp.pd().clone()));
        let arrived = &mut self.arrived;
        let taken = self.cq.take(COMPLETIONS_MAX, &mut |wc| arrived.push(*wc));
        let is_server_lost = self.handle_arrived(now, &memory);
        taken?;
        if is_server_lost {
            agent.lock().connections.remove(self.link, "a fetch was not answered");
        }
        let (answers, is_closed) = self.mailbox.take();
        self.counters.answers += answers.len() as u64;
        for (ids, status) in answers {
            ids.for_each(|id| _ = self.session.handle_done(now, id, status));
        }
        if is_closed && !std::mem::replace(&mut self.is_control_gone, true) {
            self.fetches.close();
            self.session.handle_peer_gone();
        }
        self.store_pulled(now);
        self.execute_actions(now, &memory);
        if let Err(error) = self.begin_fetches() {
            agent.lock().connections.remove(self.link, &error.to_string());
        }
        self.send_calls_and_pulls(agent, now);
        Ok(())
    }

    /// Handles the completions of both kinds of queue pairs. Returns whether a fetch has found that the server does not answer.
    fn handle_arrived(&mut self, now: Time, memory: &Memory) -> bool {
        let mut is_server_lost = false;
        for wc in self.arrived.drain(..) {
            if wc.qpn == self.qp.qpn() {
                self.session.handle_completion(&wc, memory);
                continue;
            }
            match self.fetches.handle_completion(&wc) {
                Some(Fetched::Done(id, status)) => _ = self.session.handle_done(now, id, status),
                Some(Fetched::Lost) => is_server_lost = true,
                None => {}
            }
        }
        is_server_lost
    }

    /// Takes the completions of accesses.
    pub fn take_completed(&mut self) -> impl Iterator<Item = Completion> + '_ {
        self.completed.drain(..)
    }

    fn execute_actions(&mut self, now: Time, memory: &Memory) {
        while let Some(action) = self.session.poll_action(now, memory) {
            match action {
                Action::Post(wr) => self.posts.push(wr),
                Action::Call(call) => self.calls.push(call),
                Action::Complete(wc) => {
                    self.completed.push_back(Completion { tag: wc.wr_id, status: wc.status })
                }
                Action::Break => {
                    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
                    // The error state can be reached from every state.
                    let _ = self.qp.modify(&error, QpAttrMask::STATE);
                }
                // The client has requested the tables when it opened the region, whose keys do not change.
                Action::Granted(_) | Action::Outdated(_) => {}
            }
        }
        if self.posts.is_empty() {
            return;
        }
        // The session stays within the queue's depth. A work request that fails for another reason is flushed.
        if let Err(error) = self.qp.post_send_batch(&mut self.posts) {
            tracing::debug!(%error, "the queue pair refuses work requests");
            for wr in self.posts.drain(..) {
                self.session.handle_refused(wr.wr_id);
            }
        }
    }

    /// Executes the calls for reads by READs, if there are queue pairs for them.
    ///
    /// # Errors
    /// If a queue pair refuses work requests.
    fn begin_fetches(&mut self) -> Result<(), Error> {
        if !self.fetches.has_pairs() {
            return Ok(());
        }
        for call in self.calls.extract_if(.., |call| call.reads().is_some()) {
            let reads = call.reads().unwrap_or_default();
            (call.id..).zip(reads).for_each(|(id, read)| self.fetches.begin(id, read));
            self.counters.requests += reads.len() as u64;
        }
        self.fetches.post()
    }

    /// Sends the calls, and pulls what is due of the bitmaps.
    fn send_calls_and_pulls(&mut self, agent: &Agent, now: Time) {
        let mut begun: SmallVec<[usize; 4]> = SmallVec::new();
        for (index, pull) in self.pulls.iter_mut().enumerate() {
            if !pull.in_flight.is_empty() || !pull.region.residency().is_pull_due(now) {
                continue;
            }
            pull.in_flight = pull.region.residency().begin_pull(now);
            if !pull.in_flight.is_empty() {
                begun.push(index);
            }
        }
        if self.calls.is_empty() && begun.is_empty() {
            return;
        }
        let mut state = agent.lock();
        let Some(Connection { control, role: Role::Client(link) }) = state.connections.get_to_post(self.link)
        else {
            return;
        };
        for call in self.calls.drain(..) {
            control.send(&call.message());
            self.counters.messages += 1;
            self.counters.requests += call.request_count() as u64;
        }
        begun.iter().for_each(|&index| self.pulls[index].read(link, control));
        state.connections.post();
    }

    fn store_pulled(&mut self, now: Time) {
        for pull in &mut self.pulls {
            if pull.arrived.swap(false, Ordering::AcqRel) {
                self.counters.pulled_bytes += pull.store(now) as u64;
            }
        }
    }
}

/// The program's memory, through the protection domain of the queue pair.
struct Memory(Arc<Pd>);

impl LocalMemory for Memory {
    fn read(&self, sge: &Sge, offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        self.0.copy_out(sge, offset, out).map_err(|_| LocalError::Protection)
    }
}
