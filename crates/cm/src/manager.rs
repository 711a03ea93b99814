//! The connection manager: its state, inputs and outputs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use terrace_wire::Path;
use terrace_wire::Time;
use terrace_wire::cm::{IpHeader, MAD_BYTES, Mad, Message, RejReason, Rep, Req, SidrRep};

use crate::connection::{Agreed, Connection, PeerQp, Retransmission, State};
use crate::ids::{ConnId, ListenerId, Numbers};
use crate::listen::Listener;
use crate::route::ForwardedRequests;
use crate::timing::Timing;

/// Configuration of a manager.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The node's GUID in messages to peers.
    pub guid: u64,
    /// The process's instance index.
    pub instance: u8,
    /// Code of the port's largest path MTU.
    pub path_mtu: u8,
    /// Seed of communication IDs and PSNs: secret, so that others cannot guess them.
    pub seed: u64,
    /// Intervals and attempts.
    pub timing: Timing,
    /// Limits for peers.
    pub limits: Limits,
}

/// Limits on the state that peers can create.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections that peers have requested and that are not established.
    pub half_open_max: usize,
    /// The same, per address.
    pub half_open_per_peer_max: usize,
    /// All connections, including those that have ended recently.
    pub connections_max: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { half_open_max: 4096, half_open_per_peer_max: 1024, connections_max: 1 << 16 }
    }
}

/// The reason why a command failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such connection.
    #[error("no such connection")]
    Unknown,
    /// The connection's state does not allow the command.
    #[error("the connection's state does not allow the command")]
    State,
    /// Too much private data.
    #[error("too much private data")]
    PrivateData,
    /// Another listener overlaps.
    #[error("the service is in use")]
    InUse,
    /// No more connections.
    #[error("too many connections")]
    TooMany,
}

/// An event for the program.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The connection.
    pub conn: ConnId,
    /// The connection's owner; a new request has none.
    pub owner: Option<u64>,
    /// The kind of event.
    pub kind: EventKind,
}

/// Kind of an event.
// A request is as large as a datagram, and events are queued only briefly.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    /// A peer requests a connection (REQ).
    Request {
        /// The listener that takes the request.
        listener: ListenerId,
        /// The addresses in the private data.
        header: IpHeader,
        /// The message.
        req: Req,
    },
    /// A peer requests the queue pair of a service for datagrams (SIDR_REQ).
    SidrRequest {
        /// The listener that takes the request.
        listener: ListenerId,
        /// The addresses in the private data.
        header: IpHeader,
        /// Private data of the peer's program, behind the addresses.
        private_data: Vec<u8>,
    },
    /// The peer accepts the connection; [`Cm::establish`] is next.
    Response(Rep),
    /// The connection is established: an RTU has arrived.
    Established,
    /// The peer rejects the connection.
    Rejected {
        /// The reason.
        reason: RejReason,
        /// Private data of the peer's program.
        private_data: Vec<u8>,
    },
    /// The peer does not answer.
    Unreachable,
    /// The connection has ended.
    Disconnected {
        /// Whether the peer did not answer.
        timed_out: bool,
    },
    /// TIME_WAIT is over: no message of the connection is in the network any more.
    TimeWaitExit,
    /// The answer to a SIDR_REQ.
    SidrResponse(SidrRep),
}

/// A datagram to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// The path to the destination.
    pub path: Path,
    /// The bytes.
    pub bytes: [u8; MAD_BYTES],
    /// Whether the datagram is a keepalive probe. The user calls [`Cm::handle_port_unreachable`] if the peer's host
    /// answers it with an ICMP error.
    pub is_probe: bool,
}

/// Counters of ignored and repeated messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams that are no valid messages of the CM class.
    pub malformed: u64,
    /// Messages of unknown connections, or not from the connection's peer.
    pub unknown: u64,
    /// Duplicate messages.
    pub duplicates: u64,
    /// Requests that exceed the limits or the backlog of their listener.
    pub beyond_limits: u64,
    /// Retransmissions after a timeout.
    pub repeated: u64,
}

/// Returns the instance index of another process of this host that listens for a service at an address, if one does.
/// Called for requests without a listener in this process.
pub type FindInstance<'a> = &'a dyn Fn(u64, IpAddr) -> Option<u8>;

/// A process's connection manager. See the crate's documentation.
pub struct Cm {
    pub(crate) config: Config,
    pub(crate) numbers: Numbers,
    pub(crate) connections: HashMap<ConnId, Connection>,
    /// Peers' requests, by their address and port and their communication ID.
    pub(crate) requests: HashMap<(SocketAddr, u32), ConnId>,
    /// Peers' queue pairs that are in use.
    pub(crate) peer_qps: HashMap<PeerQp, ConnId>,
    pub(crate) half_open: HashMap<IpAddr, usize>,
    pub(crate) half_open_count: usize,
    pub(crate) listeners: Vec<Listener>,
    /// Ports of recently closed listeners, with the time of closing.
    pub(crate) closed_listeners: Vec<(u16, Time)>,
    pub(crate) forwarded_requests: ForwardedRequests,
    deadlines: BTreeSet<(Time, ConnId)>,
    pub(crate) transmits: VecDeque<Transmit>,
    events: VecDeque<Event>,
    pub(crate) counters: Counters,
}

impl Cm {
    /// A manager without connections.
    pub fn new(config: Config) -> Cm {
        Cm {
            config,
            numbers: Numbers::new(config.seed),
            connections: HashMap::new(),
            requests: HashMap::new(),
            peer_qps: HashMap::new(),
            half_open: HashMap::new(),
            half_open_count: 0,
            listeners: Vec::new(),
            closed_listeners: Vec::new(),
            forwarded_requests: ForwardedRequests::default(),
            deadlines: BTreeSet::new(),
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Handles a datagram from the peer at this path.
    pub fn handle_mad(&mut self, now: Time, from: &Path, bytes: &[u8], find_instance: FindInstance<'_>) {
        let mad = match Mad::decode(bytes) {
            Ok(mad) => mad,
            Err(_) => {
                self.counters.malformed += 1;
                return;
            }
        };
        match &mad.message {
            Message::Req(req) => self.handle_req(now, from, mad.tid, req, find_instance),
            Message::Mra(mra) => self.handle_mra(now, from, mra),
            Message::Rep(rep) => self.handle_rep(now, from, mad.tid, rep),
            Message::Rtu(rtu) => self.handle_rtu(now, from, rtu),
            Message::Rej(rej) => self.handle_rej(now, from, rej),
            Message::Dreq(dreq) => self.handle_dreq(now, from, mad.tid, dreq),
            Message::Drep(drep) => self.handle_drep(now, from, drep),
            Message::SidrReq(req) => self.handle_sidr_req(now, from, mad.tid, req, find_instance),
            Message::SidrRep(rep) => self.handle_sidr_rep(now, from, rep),
        }
    }

    /// Sets the port's values once it is open: the process's instance index, with which its communication IDs begin,
    /// and the largest path MTU that peers may request.
    pub fn set_port(&mut self, instance: u8, path_mtu_code: u8) {
        self.config.instance = instance;
        self.config.path_mtu = path_mtu_code;
    }

    /// Handles expired timers.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(&(at, conn)) = self.deadlines.first() {
            if at > now {
                return;
            }
            self.set_deadline(conn, None);
            self.handle_deadline(now, conn);
        }
    }

    /// The next datagram to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Cm::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Counters of ignored and repeated messages.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Number of connections, including those that have ended recently.
    pub fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// The agreed parameters of a connection, and the path to the peer.
    pub fn agreed(&self, conn: ConnId) -> Option<(Agreed, Path)> {
        self.connections.get(&conn).map(|connection| (connection.agreed, connection.path))
    }

    pub(crate) fn get(&mut self, conn: ConnId) -> Result<&mut Connection, Error> {
        self.connections.get_mut(&conn).ok_or(Error::Unknown)
    }

    /// The connection with this communication ID, if the datagram comes from its peer.
    pub(crate) fn find_from_peer(&mut self, id: u32, remote_id: Option<u32>, from: &Path) -> Option<ConnId> {
        let conn = ConnId(id);
        let matches = self.connections.get_mut(&conn).is_some_and(|one| {
            let ids_match = remote_id.is_none_or(|id| one.remote_id == 0 || one.remote_id == id);
            ids_match && (one.is_from(from) || one.adopt_instance(from))
        });
        if !matches {
            self.counters.unknown += 1;
        }
        matches.then_some(conn)
    }

    /// Records the queue pair of a connection's peer, if the peer has one.
    pub(crate) fn record_peer_qp(&mut self, conn: ConnId, key: PeerQp) {
        let (.., qpn) = key;
        if qpn != 0
            && let Some(connection) = self.connections.get_mut(&conn)
        {
            connection.peer_qp = Some(key);
            self.peer_qps.insert(key, conn);
        }
    }

    /// Adds a connection under an unused communication ID.
    pub(crate) fn insert(&mut self, connection: Connection) -> ConnId {
        let conn = loop {
            let conn = ConnId::new(self.config.instance, self.numbers.next());
            if conn.0 != 0 && !self.connections.contains_key(&conn) {
                break conn;
            }
        };
        self.connections.insert(conn, connection);
        conn
    }

    /// Changes a connection's state.
    pub(crate) fn enter(&mut self, conn: ConnId, state: State) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let was_half_open = connection.is_half_open();
        connection.state = state;
        connection.retransmission = None;
        let is_half_open = connection.is_half_open();
        let ip = connection.path.remote.ip().to_canonical();
        let has_ended = matches!(state, State::TimeWait | State::Rejected);
        let unused = if has_ended { connection.peer_qp.take() } else { None };
        match (was_half_open, is_half_open) {
            (true, false) => self.remove_half_open(ip),
            (false, true) => self.add_half_open(ip),
            _ => {}
        }
        if let Some(key) = unused
            && self.peer_qps.get(&key) == Some(&conn)
        {
            self.peer_qps.remove(&key);
        }
        self.set_deadline(conn, None);
    }

    pub(crate) fn add_half_open(&mut self, ip: IpAddr) {
        *self.half_open.entry(ip).or_default() += 1;
        self.half_open_count += 1;
    }

    fn remove_half_open(&mut self, ip: IpAddr) {
        self.half_open_count = self.half_open_count.saturating_sub(1);
        if let Some(count) = self.half_open.get_mut(&ip) {
            *count -= 1;
            if *count == 0 {
                self.half_open.remove(&ip);
            }
        }
    }

    /// Removes a connection.
    pub(crate) fn remove(&mut self, conn: ConnId) {
        self.enter(conn, State::Rejected);
        let Some(connection) = self.connections.remove(&conn) else { return };
        let key = (connection.path.remote, connection.remote_id);
        if self.requests.get(&key) == Some(&conn) {
            self.requests.remove(&key);
        }
        if let Some(listener) =
            self.listeners.iter_mut().find(|listener| Some(listener.id) == connection.in_backlog_of)
        {
            listener.waiting = listener.waiting.saturating_sub(1);
        }
    }

    pub(crate) fn set_deadline(&mut self, conn: ConnId, at: Option<Time>) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        if let Some(before) = connection.deadline {
            self.deadlines.remove(&(before, conn));
        }
        connection.deadline = at;
        if let Some(at) = at {
            self.deadlines.insert((at, conn));
        }
    }

    pub(crate) fn transmit(&mut self, path: Path, bytes: [u8; MAD_BYTES]) {
        self.transmits.push_back(Transmit { path, bytes, is_probe: false });
    }

    /// Sends a message of a connection and keeps it for repetition.
    pub(crate) fn send_message(&mut self, conn: ConnId, message: Message) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            let (path, bytes) = (connection.path, connection.encode_message(message));
            self.transmit(path, bytes);
        }
    }

    /// Sends a message and repeats it until an answer arrives or `attempts` are used up.
    pub(crate) fn send_with_retries(&mut self, now: Time, conn: ConnId, message: Message, attempts: u32) {
        self.send_message(conn, message);
        let interval_ns = self.config.timing.first_interval_ns;
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.retransmission =
                Some(Retransmission { attempts_left: attempts.saturating_sub(1), interval_ns });
        }
        self.set_deadline(conn, Some(now.after_ns(interval_ns)));
    }

    /// Repeats the last message.
    pub(crate) fn resend_last_message(&mut self, conn: ConnId) {
        if let Some(connection) = self.connections.get(&conn)
            && let Some(bytes) = connection.last_message
        {
            let path = connection.path;
            self.transmit(path, bytes);
        }
    }

    /// Queues an event, if the connection has an owner or is a new request.
    pub(crate) fn queue_event(&mut self, conn: ConnId, kind: EventKind) {
        let owner = self.connections.get(&conn).and_then(|connection| connection.owner);
        let is_new = matches!(kind, EventKind::Request { .. } | EventKind::SidrRequest { .. });
        if owner.is_some() || is_new {
            self.events.push_back(Event { conn, owner, kind });
        }
    }

    fn handle_deadline(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        if connection.state == State::Established {
            return self.probe(now, conn);
        }
        if let Some(retransmission) = connection.retransmission.as_mut()
            && retransmission.attempts_left > 0
        {
            retransmission.attempts_left -= 1;
            retransmission.interval_ns =
                (retransmission.interval_ns * 2).min(self.config.timing.interval_ns_max);
            let interval_ns = retransmission.interval_ns;
            // Messages that were lost together should not be repeated together.
            let next = now.after_ns(self.with_jitter(interval_ns));
            self.counters.repeated += 1;
            self.resend_last_message(conn);
            return self.set_deadline(conn, Some(next));
        }
        self.handle_exhausted_retries(now, conn);
    }

    pub(crate) fn with_jitter(&mut self, interval_ns: u64) -> u64 {
        let fraction = u64::from(self.numbers.next() >> 16);
        interval_ns - (((interval_ns / 4) * fraction) >> 16)
    }

    fn handle_exhausted_retries(&mut self, now: Time, conn: ConnId) {
        let Some(state) = self.connections.get(&conn).map(|connection| connection.state) else { return };
        match state {
            State::ReqSent | State::RepSent => {
                self.send_rej(conn, RejReason::TIMEOUT, &[]);
                self.enter_rejected(now, conn);
                self.queue_event(conn, EventKind::Unreachable);
            }
            State::SidrReqSent => {
                self.queue_event(conn, EventKind::Unreachable);
                self.enter(conn, State::Rejected);
                self.arm_time_wait(now, conn);
            }
            State::DreqSent => {
                self.queue_event(conn, EventKind::Disconnected { timed_out: true });
                self.enter_time_wait(now, conn);
            }
            State::TimeWait => {
                self.queue_event(conn, EventKind::TimeWaitExit);
                self.release_or_remove(conn);
            }
            _ => self.release_or_remove(conn),
        }
    }

    /// Arms the TIME_WAIT timer. Until it expires, the last message is repeated when the peer repeats its own.
    pub(crate) fn arm_time_wait(&mut self, now: Time, conn: ConnId) {
        self.set_deadline(conn, Some(now.after_ns(self.config.timing.time_wait_ns)));
    }

    /// Keeps an ended connection while the program owns it, otherwise removes it.
    fn release_or_remove(&mut self, conn: ConnId) {
        match self.connections.get(&conn) {
            Some(connection) if connection.owner.is_some() => self.enter(conn, State::Rejected),
            _ => self.remove(conn),
        }
    }
}
