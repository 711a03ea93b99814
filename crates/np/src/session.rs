//! A queue pair's session. A thread that has something for it adds that to a backlog, and then runs the session, unless another
//! thread is doing so: that thread looks at the backlogs again before it leaves.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};

use terrace_access::proto::{Endpoint, Join, Status};
use terrace_memory::Waker;
use terrace_nic::{CompletionHook, Error, Path, QpState, QueuePair, SendStage, SendWr, Time, Wc};
use terrace_sync::{Backlog, Mutex};

use crate::service::Service;
use crate::state::{State, is_breaking};

/// A datagram about the control queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Joining {
    /// The peer wants to connect, from that path.
    Asked { path: Path, tid: u64, join: Join },
    /// The peer has answered.
    Answered { path: Path, tid: u64, joined: Result<Endpoint, Status> },
}

/// What has arrived for a session.
#[derive(Default)]
pub(crate) struct Inputs {
    /// Work requests of the program.
    pub posted: Backlog<SendWr>,
    /// Completions of the session's own work requests.
    pub completions: Backlog<Wc>,
    /// Completions of the control queue pair.
    pub control: Backlog<Wc>,
    /// Ids of the peer's requests of whose memory more may be present.
    pub held: Backlog<u64>,
    pub joining: Backlog<Joining>,
    /// Keys that the peer knows, and whose regions have ended.
    pub ended_keys: Backlog<u32>,
    /// The program has moved the queue pair to the error state.
    pub is_failed: AtomicBool,
    /// A deadline has passed.
    pub is_due: AtomicBool,
}

impl Inputs {
    fn is_empty(&self) -> bool {
        self.posted.is_empty()
            && self.completions.is_empty()
            && self.control.is_empty()
            && self.held.is_empty()
            && self.joining.is_empty()
            && self.ended_keys.is_empty()
            && !self.is_failed.load(Ordering::Acquire)
            && !self.is_due.load(Ordering::Acquire)
    }

    /// Discards what has arrived. Returns how many work requests of the program were among it.
    fn clear(&self) -> usize {
        let posted = self.posted.take().len();
        self.completions.take();
        self.control.take();
        self.held.take();
        self.ended_keys.take();
        self.is_failed.store(false, Ordering::Release);
        posted
    }
}

/// The session of a queue pair.
pub(crate) struct Session {
    me: Weak<Session>,
    pub service: Arc<Service>,
    pub qp: Weak<QueuePair>,
    pub qpn: u32,
    /// The most work requests that are not completed.
    capacity: usize,
    /// Work requests that are not completed.
    reserved: AtomicUsize,
    pub inputs: Inputs,
    /// Whether it waits to be run by [`Service::advance`].
    is_listed: AtomicBool,
    /// The next time at which it has to be run; `u64::MAX` for never.
    pub deadline: AtomicU64,
    /// Whether it is in the service's list of sessions with a deadline ([`Service::timed`]).
    pub is_timed: AtomicBool,
    state: Mutex<State>,
}

impl Session {
    pub fn new(service: &Arc<Service>, qp: &Arc<QueuePair>) -> Arc<Session> {
        let settings = &service.settings;
        Arc::new_cyclic(|me| Session {
            me: me.clone(),
            service: service.clone(),
            qp: Arc::downgrade(qp),
            qpn: qp.qpn(),
            capacity: qp.cap().max_send_wr as usize,
            reserved: AtomicUsize::new(0),
            inputs: Inputs::default(),
            is_listed: AtomicBool::new(false),
            deadline: AtomicU64::new(u64::MAX),
            is_timed: AtomicBool::new(false),
            state: Mutex::new(State::new(settings)),
        })
    }

    /// For the service's tables.
    pub fn weak(&self) -> Weak<Session> {
        self.me.clone()
    }

    /// Has it run by the thread that calls the device's callbacks.
    pub fn list(&self) {
        if !self.is_listed.swap(true, Ordering::SeqCst)
            && let Some(me) = self.me.upgrade()
        {
            self.service.ready.add(me);
        }
    }

    /// Runs a session that was listed.
    pub fn run_listed(&self) {
        self.is_listed.store(false, Ordering::SeqCst);
        self.run();
    }

    /// Handles what has arrived, unless another thread does.
    pub fn run(&self) {
        loop {
            // What was added before is seen by the thread that has the lock, or by this one.
            fence(Ordering::SeqCst);
            let (Some(mut state), Some(qp)) = (self.state.try_lock(), self.qp.upgrade()) else { return };
            state.run(self, &qp);
            drop(state);
            fence(Ordering::SeqCst);
            if self.inputs.is_empty() {
                return;
            }
        }
    }

    /// Gives back the places of work requests. The caller has the lock of the state, so that RESET does not give them back,
    /// too.
    pub fn release(&self, count: usize) {
        self.reserved.fetch_sub(count, Ordering::Relaxed);
    }

    /// A waker for the memory of a peer's request.
    pub fn waker(&self, token: u64) -> Waker {
        let me = self.me.clone();
        Arc::new(move || {
            if let Some(session) = me.upgrade() {
                session.inputs.held.add(token);
                session.list();
                session.service.request();
            }
        })
    }

    /// Notes when it has to be run at the latest.
    pub fn set_deadline(&self, deadline: Option<Time>) {
        let at = deadline.map_or(u64::MAX, |at| at.0);
        // A store that others see at once takes longer than a load. Meanwhile nobody else sets another time than never.
        if deadline.is_some() || self.deadline.load(Ordering::Relaxed) != at {
            self.deadline.store(at, Ordering::SeqCst);
        }
        if deadline.is_some() {
            self.list_timed();
            self.service.note_deadline(at);
        }
    }

    /// Adds it to the sessions with a deadline, unless it is one of them. To be called behind a store of the deadline: a thread that
    /// has taken it off the list reads the deadline after that.
    pub fn list_timed(&self) {
        if !self.is_timed.load(Ordering::SeqCst) && !self.is_timed.swap(true, Ordering::SeqCst) {
            self.service.timed.add(self.me.clone());
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.service.forget(self.qpn);
    }
}

impl CompletionHook for Session {
    fn completed(&self, wc: Wc) {
        self.inputs.completions.add(wc);
        self.list();
    }
}

impl SendStage for Session {
    fn reserve(&self, count: usize) -> Result<(), Error> {
        let reserve = |reserved: usize| Some(reserved + count).filter(|sum| *sum <= self.capacity);
        match self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::NoMemory("the work queue is full")),
        }
    }

    fn post(&self, wrs: Vec<SendWr>) {
        wrs.into_iter().for_each(|wr| self.inputs.posted.add(wr));
        self.run();
    }

    fn state_changed(&self, state: QpState) {
        if state == QpState::Reset {
            // The caller relies on that nothing of the session accesses memory afterwards.
            let mut locked = self.state.lock();
            self.release(self.inputs.clear());
            // Requests whose places another thread has just reserved keep them.
            locked.reset(self);
            return;
        }
        self.inputs.is_failed.store(true, Ordering::Release);
        // The caller relies on that no request of the peer changes memory afterwards: a thread may be in the middle of one. If
        // it is the caller that handles the session, it changes nothing any more.
        if !is_breaking() {
            drop(self.state.lock());
        }
        self.run();
    }
}
