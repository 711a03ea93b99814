//! The agent of a device: answers peers' questions about its regions, and connects to peers to ask about theirs.
//!
//! It has no thread. Datagrams are queued as they arrive. The thread that makes progress for the device calls
//! [`ProgressCallback::advance`], which handles datagrams, completions of control queue pairs, and transfers that have
//! ended. One thread at a time does so. A second thread that calls it meanwhile returns at once: the first checks for
//! new work before it returns.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use terrace_access::proto::{
    Accepted, Connect, Datagram, Described, Endpoint, Message, Status, id_of_immediate,
};
use terrace_memory::Waker;
use terrace_nic::{Cq, CqInit, Device, Error, Path, Pd, ProgressCallback, Time, Wc, WcOpcode, WcStatus};
use terrace_sync::{Backlog, Mutex, MutexGuard};

use crate::account::{self, Account};
use crate::control::{Control, RECEIVE_COUNT, is_nobodys};
use crate::exports::{Exported, Exports};
use crate::link::{Answer, Link};
use crate::parties::{Parties, Party, Role};
use crate::serving::{ClientStats, JobId, Serving, Surroundings};

/// Datagrams that may be queued; further ones are dropped, and the peers repeat them.
const INBOX_MAX: usize = 256;
/// Entries of the completion queue that all control queue pairs share.
const CQ_DEPTH: u32 = 1 << 18;
/// Completions that are handled before the batches that they led to are posted.
const COMPLETIONS_PER_ROUND: usize = 64;

/// How often clients that were silent meanwhile get a keepalive where there are many, if there is any work at all, in
/// nanoseconds.
const PROBE_INTERVAL_NS: u64 = 10_000_000_000;
/// The same when a client was refused, or when [`Parties::is_crowded`].
const PROBE_INTERVAL_NS_MIN: u64 = 1_000_000_000;

/// How many rounds an agent that finds more work does at once.
const ROUNDS_MAX: usize = 4;

/// The state that one thread at a time works on.
#[derive(Default)]
pub(crate) struct State {
    pub parties: Parties,
    next_job: JobId,
    completions: Vec<Wc>,
    message: Vec<u8>,
    /// When clients last got keepalives.
    probed_at: Time,
}

/// See the module.
pub struct Agent {
    device: Weak<Device>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    exports: Exports,
    inbox: Backlog<(Path, Datagram)>,
    /// Jobs whose transfers have ended, by control queue pair. Wakers add to it, from any thread.
    ready: Arc<Backlog<(u32, JobId)>>,
    state: Mutex<State>,
    /// Whether a link waits for the answer to a datagram, so that its timer has to be checked.
    connecting: AtomicBool,
    /// How many bytes may be in flight to the clients of one address.
    answer_bytes: u64,
}

impl Agent {
    /// Makes the device's agent. It lives until the device is closed. Its pagers have `buffer_bytes` of buffers, which
    /// clients share.
    ///
    /// # Errors
    /// Those of the device's objects.
    pub fn attach(device: &Arc<Device>, buffer_bytes: u64) -> Result<Arc<Agent>, Error> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(CqInit { depth: CQ_DEPTH, channel: None, cookie: 0 })?;
        let agent = Arc::new(Agent {
            device: Arc::downgrade(device),
            pd,
            cq,
            exports: Exports::default(),
            inbox: Backlog::default(),
            ready: Arc::default(),
            state: Mutex::default(),
            connecting: AtomicBool::new(false),
            answer_bytes: account::answer_bytes(buffer_bytes),
        });
        let receiver = Arc::downgrade(&agent);
        device.on_management(Arc::new(move |path: &Path, bytes: &[u8]| {
            if let Some(agent) = receiver.upgrade() {
                agent.receive(path, bytes);
            }
        }));
        device.attach(agent.clone());
        Ok(agent)
    }

    /// Lets peers ask about a region.
    ///
    /// # Errors
    /// EINVAL for a region that cannot be described, or a name that is in use; ENOMEM without memory for its tables.
    pub fn export(&self, exported: Exported) -> Result<(), Error> {
        self.exports.add(exported, &self.pd)
    }

    /// Removes a region, before it is deregistered. Jobs that have begun end by themselves.
    pub fn withdraw(&self, rkey: u32) {
        self.exports.remove(rkey);
    }

    /// Queues a datagram. Its content has no other effect here.
    fn receive(&self, path: &Path, bytes: &[u8]) {
        let datagram = match Datagram::decode(bytes) {
            Ok(datagram) => datagram,
            Err(error) => {
                tracing::debug!(%error, from = %path.remote, "management datagram dropped");
                return;
            }
        };
        self.inbox.add_below(INBOX_MAX, (*path, datagram));
    }

    /// The protection domain of control queue pairs: peers can access its regions over them.
    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The counters of each client, in the order of the clients' names.
    pub fn clients(&self) -> Vec<ClientStats> {
        let state = self.state.lock();
        let mut clients: Vec<ClientStats> =
            state.parties.clients().map(|serving| serving.stats(&self.exports)).collect();
        clients.sort_by(|one, other| one.client.cmp(&other.client));
        clients
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Begins to connect to a device's agent. The number of our end identifies the connection.
    pub(crate) fn connect_to(&self, device: &Device, remote: Path) -> Result<u32, Error> {
        let control = Control::new(&self.pd, &self.cq)?;
        let qpn = control.qpn();
        let link = Link::new(remote, device.now());
        self.state.lock().parties.insert(Party { control, role: Role::Client(link) });
        self.connecting.store(true, Ordering::Release);
        Ok(qpn)
    }

    fn has_work(&self) -> bool {
        !self.inbox.is_empty() || !self.ready.is_empty() || !self.cq.is_empty()
    }

    fn work(&self, device: &Arc<Device>, state: &mut State) {
        probe(device.now(), state, PROBE_INTERVAL_NS);
        for (path, datagram) in self.inbox.take() {
            self.handle_datagram(device, state, path, &datagram);
        }
        self.handle_completions(device, state);
        for (qpn, number) in self.ready.take() {
            if let Some(Party { control, role: Role::Server(serving) }) = state.parties.touch(qpn) {
                serving.advance(control, number, &self.pd);
            }
        }
        state.parties.post();
    }

    /// Repeats datagrams that were not answered in time.
    fn ask_again(&self, device: &Device, state: &mut State) {
        let (now, mut waiting) = (device.now(), false);
        for (control, link) in state.parties.links() {
            if let Some(datagram) = link.poll_datagram(now, control) {
                self.send_datagram(device, &link.remote, &datagram);
            }
            waiting |= link.is_connecting();
        }
        self.connecting.store(waiting, Ordering::Release);
    }

    fn send_datagram(&self, device: &Device, path: &Path, datagram: &Datagram) {
        if let Err(error) = device.send_management(path, &datagram.encode()) {
            tracing::debug!(%error, to = %path.remote, "management datagram not sent");
        }
    }

    fn handle_datagram(&self, device: &Arc<Device>, state: &mut State, path: Path, datagram: &Datagram) {
        let answer = match *datagram {
            Datagram::Describe { tid, rkey } => {
                let export = self.exports.get(rkey);
                let described = export.map_or(Described::Plain, |export| export.describe());
                Datagram::Description { tid, rkey, described }
            }
            Datagram::Connect { tid, connect } => {
                Datagram::Accepted { tid, accepted: self.accept(device.now(), state, path, connect) }
            }
            Datagram::Accepted { tid, accepted } => {
                let from = |link: &Link| link.remote.remote == path.remote;
                for (control, link) in state.parties.links().filter(|(_, link)| from(link)) {
                    link.handle_accepted(tid, accepted, control);
                }
                return;
            }
            Datagram::Description { .. } => return,
        };
        self.send_datagram(device, &path, &answer);
    }

    /// Makes our end of a control queue pair, or finds the one that was made for the same request before.
    fn accept(&self, now: Time, state: &mut State, path: Path, connect: Connect) -> Result<Accepted, Status> {
        let endpoint = match state.parties.asked(path.remote, &connect) {
            Some(endpoint) => endpoint,
            None => self
                .serve(now, state, path, connect)
                .inspect_err(|_| probe(now, state, PROBE_INTERVAL_NS_MIN))?,
        };
        if state.parties.is_crowded() {
            probe(now, state, PROBE_INTERVAL_NS_MIN);
        }
        Ok(Accepted {
            qpn: endpoint.qpn,
            psn: endpoint.psn,
            mtu_bytes: endpoint.mtu_bytes.min(connect.mtu_bytes),
            receive_count: RECEIVE_COUNT,
        })
    }

    fn serve(&self, now: Time, state: &mut State, path: Path, connect: Connect) -> Result<Endpoint, Status> {
        let address = path.remote.ip().to_canonical();
        if self.exports.is_empty() || !state.parties.admit(now, address) {
            return Err(Status::Busy);
        }
        let control = Control::new(&self.pd, &self.cq).map_err(|error| {
            tracing::warn!(%error, "no control queue pair for a client");
            Status::Busy
        })?;
        let peer = Endpoint { qpn: connect.qpn, psn: connect.psn, mtu_bytes: connect.mtu_bytes };
        if let Err(error) = control.serve(path, peer) {
            tracing::debug!(%error, client = %path.remote, "a client's control queue pair cannot be connected");
            control.close();
            return Err(Status::Invalid);
        }
        tracing::debug!(client = %path.remote, qpn = control.qpn(), "a client has connected");
        let endpoint = control.endpoint();
        let account = state.parties.account(address);
        let account = account.unwrap_or_else(|| Account::new(self.answer_bytes));
        let serving = Serving::new(path, connect, account, now);
        state.parties.insert(Party { control, role: Role::Server(serving) });
        Ok(endpoint)
    }

    fn handle_completions(&self, device: &Arc<Device>, state: &mut State) {
        loop {
            let mut completions = std::mem::take(&mut state.completions);
            // A queue that has overrun has lost completions; its queue pairs are in the error state, and report that
            // themselves.
            let _ = self.cq.take(COMPLETIONS_PER_ROUND, &mut |wc| completions.push(*wc));
            let count = completions.len();
            completions.drain(..).for_each(|wc| self.handle_completion(device, state, &wc));
            state.completions = completions;
            if count < COMPLETIONS_PER_ROUND {
                return;
            }
            state.parties.post();
        }
    }

    fn handle_completion(&self, device: &Arc<Device>, state: &mut State, wc: &Wc) {
        if wc.status != WcStatus::Success {
            state.parties.remove(wc.qpn, &format!("{:?}", wc.status));
            return;
        }
        let handled = match wc.opcode {
            WcOpcode::Recv => {
                let mut bytes = std::mem::take(&mut state.message);
                let handled = self.handle_message(device, state, wc, &mut bytes);
                state.message = bytes;
                handled
            }
            WcOpcode::RecvRdmaWithImm => handle_immediate(state, wc),
            _ => {
                self.note_sent(state, wc);
                Ok(())
            }
        };
        if let Err(why) = handled {
            // No answer is possible: the sender does not speak the protocol.
            state.parties.remove(wc.qpn, &why);
        }
    }

    /// A work request of our own has completed.
    fn note_sent(&self, state: &mut State, wc: &Wc) {
        let Some(Party { control, role }) = state.parties.touch(wc.qpn) else { return };
        match role {
            _ if is_nobodys(wc) => {}
            Role::Server(serving) => serving.note_completion(control, wc.wr_id, &self.pd),
            Role::Client(link) => link.note_read(wc.wr_id),
        }
    }

    fn handle_message(
        &self,
        device: &Arc<Device>,
        state: &mut State,
        wc: &Wc,
        bytes: &mut Vec<u8>,
    ) -> Result<(), String> {
        let State { parties, next_job, .. } = state;
        if !parties.note_heard(wc.qpn) {
            return Err("there are too many clients at its address".into());
        }
        let Some(Party { control, role }) = parties.touch(wc.qpn) else { return Ok(()) };
        control.take_message(wc, bytes).map_err(|error| error.to_string())?;
        if control.is_flooded() {
            return Err("it takes no answers".into());
        }
        let message = Message::decode(bytes).map_err(|error| error.to_string())?;
        match role {
            Role::Server(serving) => {
                let waker = |number| self.waker(wc.qpn, number);
                let (pd, cq, exports) = (&self.pd, &self.cq, &self.exports);
                let mut around = Surroundings { device, pd, cq, exports, waker: &waker, next_job };
                serving.handle(control, &message, &mut around);
            }
            Role::Client(link) => match Answer::of(&message.body) {
                Some(answer) => link.handle_answer(message.id, answer),
                None => return Err("a request, where only answers belong".into()),
            },
        }
        Ok(())
    }

    /// A waker that notes the job as ready, and wakes the device.
    fn waker(&self, qpn: u32, number: JobId) -> Waker {
        let (ready, device) = (Arc::downgrade(&self.ready), self.device.clone());
        Arc::new(move || {
            let Some(ready) = ready.upgrade() else { return };
            ready.add((qpn, number));
            if let Some(device) = device.upgrade() {
                device.request_callbacks();
            }
        })
    }
}

/// Sends keepalives to clients, if the last ones are old enough: without them, the end of a client that had nothing in
/// flight would not be noticed.
fn probe(now: Time, state: &mut State, interval_ns: u64) {
    if now >= state.probed_at.after_ns(interval_ns) {
        state.probed_at = now;
        state.parties.probe(now);
    }
}

/// The server has written the last data of a call.
fn handle_immediate(state: &mut State, wc: &Wc) -> Result<(), String> {
    let Some(Party { control, role }) = state.parties.touch(wc.qpn) else { return Ok(()) };
    control.post_receive(wc.wr_id).map_err(|error| error.to_string())?;
    match role {
        Role::Client(link) => {
            link.handle_answer(id_of_immediate(u32::from_be(wc.imm)), Answer::Done(Status::Ok));
            Ok(())
        }
        Role::Server(_) => Err("an answer, where only requests belong".into()),
    }
}

impl ProgressCallback for Agent {
    fn advance(&self) -> bool {
        let mut active = false;
        for round in 0.. {
            if !self.has_work() {
                break;
            }
            let Some(device) = self.device.upgrade() else { return active };
            let Some(mut state) = self.state.try_lock() else {
                // A thread that reads the counters, or posts calls, does not do this work when it is done.
                device.request_callbacks();
                return active;
            };
            if round == ROUNDS_MAX {
                // Packets are handled first: work here may depend on them.
                device.request_callbacks();
                break;
            }
            self.work(&device, &mut state);
            active = true;
        }
        if self.connecting.load(Ordering::Acquire)
            && let (Some(mut state), Some(device)) = (self.state.try_lock(), self.device.upgrade())
        {
            self.ask_again(&device, &mut state);
        }
        active
    }

    /// Programs that only connect to others report nothing.
    fn report(&self) -> Option<(String, serde_json::Value)> {
        let clients = self.clients();
        let value = (!clients.is_empty()).then(|| serde_json::to_value(clients));
        Some(("clients".into(), value?.ok()?))
    }
}
