//! The agent of a device. It answers peers' requests for its regions, and connects to peers for access to theirs.
//!
//! The agent has no thread. Datagrams are queued as they arrive. The thread that makes progress for the device calls
//! [`ProgressCallback::advance`], which handles datagrams, completions of control queue pairs, and finished transfers.
//! One thread at a time does so. A second thread that calls it meanwhile returns at once: the first checks for new work
//! before it returns.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use terrace_access::proto::{
    Accepted, Connect, Datagram, Described, Endpoint, Message, Status, ids_of_immediate,
};
use terrace_memory::Waker;
use terrace_nic::{Cq, CqInit, Device, Error, Path, Pd, ProgressCallback, Time, Wc, WcOpcode, WcStatus};
use terrace_sync::{Backlog, Mutex, MutexGuard};

use crate::connections::{Connection, Connections, Role};
use crate::control::{Control, RECEIVE_COUNT, is_untracked};
use crate::exports::{Exported, Exports};
use crate::link::Link;
use crate::quota::{Quotas, read_bytes_max};
use crate::serving::{ClientStats, JobId, RequestContext, Serving};

/// The most queued datagrams. Further ones are dropped; the peers retransmit them.
const DATAGRAMS_MAX: usize = 256;
/// Entries of the completion queue, which all control queue pairs share.
const CQ_DEPTH: u32 = 1 << 18;
/// The most completions that are handled before the resulting batches are posted.
const COMPLETIONS_PER_PASS: usize = 64;

/// The interval of keepalives to idle clients, in nanoseconds. Keepalives are sent only where there are many clients,
/// and only in a pass with other work.
const PROBE_INTERVAL_NS: u64 = 10_000_000_000;
/// The interval after a refused client, and while [`Connections::is_crowded`].
const PROBE_INTERVAL_NS_MIN: u64 = 1_000_000_000;

/// The most passes over new work in one call.
const PASSES_MAX: usize = 4;

/// The state of the thread in [`ProgressCallback::advance`].
#[derive(Default)]
pub(crate) struct State {
    pub connections: Connections,
    next_job: JobId,
    completions: Vec<Wc>,
    message: Vec<u8>,
    /// The time of the last keepalives.
    probed_at: Time,
}

/// The agent of a device; see the module's documentation.
pub struct Agent {
    device: Weak<Device>,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    exports: Exports,
    datagrams: Backlog<(Path, Datagram)>,
    /// Jobs with finished transfers, by control queue pair. Wakers add jobs, from any thread.
    ready: Arc<Backlog<(u32, JobId)>>,
    state: Mutex<State>,
    /// Whether a link waits for the response to a datagram, so that its timer has to be checked.
    connecting: AtomicBool,
    /// The most bytes in flight to the readers of one address.
    read_bytes_max: u64,
}

impl Agent {
    /// Creates the device's agent, which lives until the device is closed. Its pagers have `buffer_bytes` of bounce
    /// buffers, which clients share.
    ///
    /// # Errors
    /// The errors of creating the device's objects.
    pub fn attach(device: &Arc<Device>, buffer_bytes: u64) -> Result<Arc<Agent>, Error> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(CqInit { depth: CQ_DEPTH, channel: None, cookie: 0 })?;
        let agent = Arc::new(Agent {
            device: Arc::downgrade(device),
            pd,
            cq,
            exports: Exports::default(),
            datagrams: Backlog::default(),
            ready: Arc::default(),
            state: Mutex::default(),
            connecting: AtomicBool::new(false),
            read_bytes_max: read_bytes_max(buffer_bytes),
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

    /// Exports a region to peers.
    ///
    /// # Errors
    /// EINVAL for a region that cannot be described, or a name that is in use; ENOMEM without memory for its tables.
    pub fn export(&self, exported: Exported) -> Result<(), Error> {
        self.exports.add(exported, &self.pd)
    }

    /// Withdraws a region before it is deregistered. Jobs in execution finish.
    pub fn withdraw(&self, rkey: u32) {
        self.exports.remove(rkey);
    }

    /// Decodes and queues a datagram.
    fn receive(&self, path: &Path, bytes: &[u8]) {
        let datagram = match Datagram::decode(bytes) {
            Ok(datagram) => datagram,
            Err(error) => {
                tracing::debug!(%error, from = %path.remote, "management datagram dropped");
                return;
            }
        };
        self.datagrams.add_below(DATAGRAMS_MAX, (*path, datagram));
    }

    /// The protection domain of control queue pairs. Peers can access its regions over them.
    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The counters of each client, in the order of the clients' names.
    pub fn clients(&self) -> Vec<ClientStats> {
        let state = self.state.lock();
        let mut clients: Vec<ClientStats> =
            state.connections.clients().map(|serving| serving.stats(&self.exports)).collect();
        clients.sort_by(|one, other| one.client.cmp(&other.client));
        clients
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Begins to connect to a device's agent. Returns the QPN of our end, which identifies the connection.
    pub(crate) fn connect_to(&self, device: &Device, remote: Path) -> Result<u32, Error> {
        let control = Control::new(&self.pd, &self.cq)?;
        let qpn = control.qpn();
        let link = Link::new(remote, device.now());
        self.state.lock().connections.insert(Connection { control, role: Role::Client(link) });
        self.connecting.store(true, Ordering::Release);
        Ok(qpn)
    }

    fn has_work(&self) -> bool {
        !self.datagrams.is_empty() || !self.ready.is_empty() || !self.cq.is_empty()
    }

    /// One pass over datagrams, completions and finished transfers.
    fn handle_events(&self, device: &Arc<Device>, state: &mut State) {
        probe(device.now(), state, PROBE_INTERVAL_NS);
        for (path, datagram) in self.datagrams.take() {
            self.handle_datagram(device, state, path, &datagram);
        }
        self.handle_completions(device, state);
        for (qpn, number) in self.ready.take() {
            if let Some(Connection { control, role: Role::Server(serving) }) =
                state.connections.get_to_post(qpn)
            {
                serving.advance(control, number, &self.pd);
            }
        }
        state.connections.post();
    }

    /// Retransmits datagrams whose response timed out.
    fn retransmit_datagrams(&self, device: &Device, state: &mut State) {
        let (now, mut waiting) = (device.now(), false);
        for (control, link) in state.connections.links() {
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
                for (control, link) in state.connections.links().filter(|(_, link)| from(link)) {
                    link.handle_accepted(tid, accepted, control);
                }
                return;
            }
            // A memory node has no queue pairs of programs.
            Datagram::Join { tid, .. } => Datagram::Joined { tid, joined: Err(Status::Unsupported) },
            Datagram::Description { .. } | Datagram::Joined { .. } => return,
        };
        self.send_datagram(device, &path, &answer);
    }

    /// Creates our end of a control queue pair, or finds the existing one if the request is a retransmission.
    fn accept(&self, now: Time, state: &mut State, path: Path, connect: Connect) -> Result<Accepted, Status> {
        let endpoint = match state.connections.find_requested(path.remote, &connect) {
            Some(endpoint) => endpoint,
            None => self
                .open_connection(now, state, path, connect)
                .inspect_err(|_| probe(now, state, PROBE_INTERVAL_NS_MIN))?,
        };
        if state.connections.is_crowded() {
            probe(now, state, PROBE_INTERVAL_NS_MIN);
        }
        Ok(Accepted {
            qpn: endpoint.qpn,
            psn: endpoint.psn,
            mtu_bytes: endpoint.mtu_bytes.min(connect.mtu_bytes),
            receive_count: RECEIVE_COUNT,
        })
    }

    fn open_connection(
        &self,
        now: Time,
        state: &mut State,
        path: Path,
        connect: Connect,
    ) -> Result<Endpoint, Status> {
        let address = path.remote.ip().to_canonical();
        if self.exports.is_empty() || !state.connections.admit(now, address) {
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
        let quotas = state.connections.quotas(address);
        let quotas = quotas.unwrap_or_else(|| Quotas::new(self.read_bytes_max));
        let serving = Serving::new(path, connect, quotas, now);
        state.connections.insert(Connection { control, role: Role::Server(serving) });
        Ok(endpoint)
    }

    fn handle_completions(&self, device: &Arc<Device>, state: &mut State) {
        loop {
            let mut completions = std::mem::take(&mut state.completions);
            // A completion queue that has overrun has lost completions. Its queue pairs are in the error state and report
            // that by their own completions.
            let _ = self.cq.take(COMPLETIONS_PER_PASS, &mut |wc| completions.push(*wc));
            let count = completions.len();
            completions.drain(..).for_each(|wc| self.handle_completion(device, state, &wc));
            state.completions = completions;
            if count < COMPLETIONS_PER_PASS {
                return;
            }
            state.connections.post();
        }
    }

    fn handle_completion(&self, device: &Arc<Device>, state: &mut State, wc: &Wc) {
        if wc.status != WcStatus::Success {
            state.connections.remove(wc.qpn, &format!("{:?}", wc.status));
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
                self.handle_send_completion(state, wc);
                Ok(())
            }
        };
        if let Err(why) = handled {
            // No answer is possible, because the sender violates the protocol.
            state.connections.remove(wc.qpn, &why);
        }
    }

    fn handle_send_completion(&self, state: &mut State, wc: &Wc) {
        let Some(Connection { control, role }) = state.connections.get_to_post(wc.qpn) else { return };
        match role {
            _ if is_untracked(wc) => {}
            Role::Server(serving) => serving.handle_completion(control, wc.wr_id, &self.pd),
            Role::Client(link) => link.complete_read(wc.wr_id),
        }
    }

    fn handle_message(
        &self,
        device: &Arc<Device>,
        state: &mut State,
        wc: &Wc,
        bytes: &mut Vec<u8>,
    ) -> Result<(), String> {
        let State { connections, next_job, .. } = state;
        if !connections.mark_active(wc.qpn) {
            return Err("too many clients at its address".into());
        }
        let Some(Connection { control, role }) = connections.get_to_post(wc.qpn) else { return Ok(()) };
        control.take_message(wc, bytes).map_err(|error| error.to_string())?;
        if control.is_backlog_full() {
            return Err("it does not drain its responses".into());
        }
        let message = Message::decode(bytes).map_err(|error| error.to_string())?;
        match role {
            Role::Server(serving) => {
                let waker = |number| self.waker(wc.qpn, number);
                let (pd, cq, exports) = (&self.pd, &self.cq, &self.exports);
                let mut context = RequestContext { device, pd, cq, exports, waker: &waker, next_job };
                serving.handle(control, &message, &mut context);
            }
            Role::Client(link) => {
                if !link.handle_message(&message) {
                    return Err("a request on a connection to a server".into());
                }
            }
        }
        Ok(())
    }

    /// A waker that marks the job as ready, and wakes the device.
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

/// Sends keepalives to clients if the last ones are `interval_ns` ago. Without keepalives, the end of a client with no
/// request in flight would not be detected.
fn probe(now: Time, state: &mut State, interval_ns: u64) {
    if now >= state.probed_at.after_ns(interval_ns) {
        state.probed_at = now;
        state.connections.probe(now);
    }
}

/// Handles the immediate of a WRITE: the server has written the last data of one or more calls.
fn handle_immediate(state: &mut State, wc: &Wc) -> Result<(), String> {
    let Some(Connection { control, role }) = state.connections.get_to_post(wc.qpn) else { return Ok(()) };
    control.post_receive(wc.wr_id).map_err(|error| error.to_string())?;
    match role {
        Role::Client(link) => {
            link.handle_done(ids_of_immediate(u32::from_be(wc.imm)), Status::Ok);
            Ok(())
        }
        Role::Server(_) => Err("an answer on a connection of a client".into()),
    }
}

impl ProgressCallback for Agent {
    fn advance(&self) -> bool {
        let mut active = false;
        for pass in 0.. {
            if !self.has_work() {
                break;
            }
            let Some(device) = self.device.upgrade() else { return active };
            let Some(mut state) = self.state.try_lock() else {
                // The thread that holds the lock may only read the counters or post calls, and then leaves this work.
                device.request_callbacks();
                return active;
            };
            if pass == PASSES_MAX {
                // Packets come first: new work here may depend on them.
                device.request_callbacks();
                break;
            }
            self.handle_events(&device, &mut state);
            active = true;
        }
        if self.connecting.load(Ordering::Acquire)
            && let (Some(mut state), Some(device)) = (self.state.try_lock(), self.device.upgrade())
        {
            self.retransmit_datagrams(&device, &mut state);
        }
        active
    }

    /// The clients' counters; none in a program that is only a client itself.
    fn report(&self) -> Option<(String, serde_json::Value)> {
        let clients = self.clients();
        let value = (!clients.is_empty()).then(|| serde_json::to_value(clients));
        Some(("clients".into(), value?.ok()?))
    }
}
