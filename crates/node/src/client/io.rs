//! A client's accesses: the session of its queue pair, and the execution of the session's actions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrace_access::proto::{Mode, Table};
use terrace_access::region::{Knowledge, Region};
use terrace_access::session::{Action, Call, Config, LocalMemory, Session};
use terrace_nic::{
    Buffer, Cq, Device, Error, LocalError, Pd, PostError, QpAttr, QpAttrMask, QpState, QueuePair, SendWr,
    Sge, Time, Wc,
};

use super::Completion;
use crate::agent::Agent;
use crate::connections::{Connection, Role};
use crate::mailbox::Mailbox;

/// The session's tag. The link's own requests have tag 0.
const TAG: u32 = 1;
/// The most completions that one call handles.
const COMPLETIONS_MAX: usize = 64;
/// `ibv_access_flags` of the buffer for a pulled bitmap.
const LOCAL_WRITE: u32 = 1;

/// The residency bitmap of a region in use, and the READ that pulls it.
struct Pull {
    region: Arc<Region>,
    table: Table,
    buffer: Buffer,
    in_flight: bool,
    /// Set when the READ has completed.
    arrived: Arc<AtomicBool>,
}

/// The session and queue pair of a client.
pub(super) struct Io {
    session: Session,
    qp: Arc<QueuePair>,
    cq: Arc<Cq>,
    link: u32,
    mailbox: Arc<Mailbox>,
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
            pulls: Vec::new(),
            posts: Vec::new(),
            calls: Vec::new(),
            arrived: Vec::new(),
            completed: VecDeque::new(),
            is_control_gone: false,
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
        let len = region.bitmap().length_bytes();
        if table.length_bytes < len as u64 {
            return Err(Error::Invalid("the server's bitmap is shorter than its region"));
        }
        let buffer = Buffer::new(pd, len, LOCAL_WRITE)?;
        let arrived = Arc::new(AtomicBool::new(false));
        self.pulls.push(Pull { region, table, buffer, in_flight: false, arrived });
        Ok(())
    }

    /// Begins an access; [`Io::advance`] drives it.
    ///
    /// # Errors
    /// `QueueFull` if `depth` accesses are in flight.
    pub fn begin(&mut self, wr: SendWr, known: &Knowledge) -> Result<(), PostError> {
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
        for wc in self.arrived.drain(..) {
            self.session.handle_completion(&wc, &memory);
        }
        taken?;
        let (answers, is_closed) = self.mailbox.take();
        for (id, status) in answers {
            self.session.handle_done(now, id, status);
        }
        if is_closed && !std::mem::replace(&mut self.is_control_gone, true) {
            self.session.handle_peer_gone();
        }
        self.store_pulled(now);
        self.execute_actions(now, &memory);
        self.send_calls_and_pulls(agent, now);
        Ok(())
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

    /// Sends the calls, and pulls the bitmaps that are due.
    fn send_calls_and_pulls(&mut self, agent: &Agent, now: Time) {
        let due = self.pulls.iter().any(|pull| !pull.in_flight && pull.region.bitmap().begin_pull(now));
        if self.calls.is_empty() && !due {
            return;
        }
        let mut state = agent.lock();
        let Some(Connection { control, role: Role::Client(link) }) = state.connections.get_to_post(self.link)
        else {
            return;
        };
        self.calls.drain(..).for_each(|call| control.send(&call.message()));
        if due {
            for pull in self.pulls.iter_mut().filter(|pull| !pull.in_flight) {
                let len = pull.buffer.len() as u32;
                link.read(control, pull.table.va, pull.table.rkey, pull.buffer.sge(0, len), &pull.arrived);
                pull.in_flight = true;
            }
        }
        state.connections.post();
    }

    fn store_pulled(&mut self, now: Time) {
        for pull in self.pulls.iter_mut().filter(|pull| pull.in_flight) {
            if !pull.arrived.swap(false, Ordering::AcqRel) {
                continue;
            }
            pull.in_flight = false;
            let mut bytes = vec![0; pull.buffer.len()];
            match pull.buffer.read(0, &mut bytes) {
                Ok(()) => pull.region.bitmap().store(now, &bytes),
                Err(_) => pull.region.bitmap().fail_pull(now),
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
