//! The connection manager: its state, inputs and outputs.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use terrace_wire::Path;
use terrace_wire::Time;
use terrace_wire::cm::{IpHeader, MAD_BYTES, Mad, Message, RejReason, Rep, Req, SidrRep};

use crate::connection::{Agreed, Connection, PeerQp, Repeat, State};
use crate::ids::{ConnId, ListenerId, Numbers};
use crate::listen::Listener;
use crate::timing::Timing;

/// Configuration of a manager.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The node's GUID in messages to peers.
    pub guid: u64,
    /// The process's instance index.
    pub slot: u8,
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

/// Why a command was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such connection.
    #[error("no such connection")]
    Unknown,
    /// The connection's state does not allow the command.
    #[error("the connection's state does not allow that")]
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
    /// Its owner; a new request has none.
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
        /// The listener that it is for.
        listener: ListenerId,
        /// Its addresses.
        header: IpHeader,
        /// The message.
        req: Req,
    },
    /// A peer requests the queue pair of a service for datagrams (SIDR_REQ).
    Question {
        /// The listener that it is for.
        listener: ListenerId,
        /// Its addresses.
        header: IpHeader,
        /// Private data of its program, behind the addresses.
        private_data: Vec<u8>,
    },
    /// The peer accepts; [`Cm::establish`] is next.
    Response(Rep),
    /// The connection is established: an RTU has arrived.
    Established,
    /// The peer rejects.
    Rejected {
        /// The reason.
        reason: RejReason,
        /// Private data of its program.
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
    Answered(SidrRep),
}

/// A datagram to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Its destination.
    pub path: Path,
    /// The bytes.
    pub bytes: [u8; MAD_BYTES],
    /// Whether it is a keepalive probe: then [`Cm::note_refused`] must be called if the peer's host refuses it.
    pub is_probe: bool,
}

/// Counters of ignored and repeated messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Not datagrams of the class.
    pub malformed: u64,
    /// Of unknown connections, or not from the connection's peer.
    pub unknown: u64,
    /// Duplicates.
    pub duplicates: u64,
    /// Requests beyond the limits, or the backlog of their listener.
    pub beyond_limits: u64,
    /// Repetitions after a timeout.
    pub repeated: u64,
}

/// Returns the instance index of another process of this host that listens for a service at an address, if there is
/// one. Called for requests without a listener here.
pub type Elsewhere<'a> = &'a dyn Fn(u64, IpAddr) -> Option<u8>;

/// A process's connection manager. See the crate.
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
    /// Ports whose listener was closed recently.
    pub(crate) left: Vec<(u16, Time)>,
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
            left: Vec::new(),
            deadlines: BTreeSet::new(),
            transmits: VecDeque::new(),
            events: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Handles a datagram from the peer at this path.
    pub fn handle_mad(&mut self, now: Time, from: &Path, bytes: &[u8], elsewhere: Elsewhere<'_>) {
        let mad = match Mad::decode(bytes) {
            Ok(mad) => mad,
            Err(_) => {
                self.counters.malformed += 1;
                return;
            }
        };
        match &mad.message {
            Message::Req(req) => self.handle_req(now, from, mad.tid, req, elsewhere),
            Message::Mra(mra) => self.handle_mra(now, from, mra),
            Message::Rep(rep) => self.handle_rep(now, from, mad.tid, rep),
            Message::Rtu(rtu) => self.handle_rtu(now, from, rtu),
            Message::Rej(rej) => self.handle_rej(now, from, rej),
            Message::Dreq(dreq) => self.handle_dreq(now, from, mad.tid, dreq),
            Message::Drep(drep) => self.handle_drep(now, from, drep),
            Message::SidrReq(req) => self.handle_question(now, from, mad.tid, req, elsewhere),
            Message::SidrRep(rep) => self.handle_answer(now, from, rep),
        }
    }

    /// Sets the port's values once it is open: the process's instance index, with which its communication IDs begin,
    /// and the largest path MTU that peers may request.
    pub fn set_port(&mut self, slot: u8, path_mtu_code: u8) {
        self.config.slot = slot;
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
    pub(crate) fn of_peer(&mut self, id: u32, remote_id: Option<u32>, from: &Path) -> Option<ConnId> {
        let conn = ConnId(id);
        let fits = self.connections.get_mut(&conn).is_some_and(|one| {
            let names_fit = remote_id.is_none_or(|named| one.remote_id == 0 || one.remote_id == named);
            names_fit && (one.is_from(from) || one.adopt(from))
        });
        if !fits {
            self.counters.unknown += 1;
        }
        fits.then_some(conn)
    }

    /// Records the queue pair of a connection's peer, if it has one.
    pub(crate) fn note_peer_qp(&mut self, conn: ConnId, key: PeerQp) {
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
            let conn = ConnId::new(self.config.slot, self.numbers.next());
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
        connection.repeat = None;
        let is_half_open = connection.is_half_open();
        let ip = connection.path.remote.ip().to_canonical();
        let has_ended = matches!(state, State::TimeWait | State::Refused);
        let unused = if has_ended { connection.peer_qp.take() } else { None };
        match (was_half_open, is_half_open) {
            (true, false) => self.count_half_open_less(ip),
            (false, true) => self.count_half_open_more(ip),
            _ => {}
        }
        if let Some(key) = unused
            && self.peer_qps.get(&key) == Some(&conn)
        {
            self.peer_qps.remove(&key);
        }
        self.set_deadline(conn, None);
    }

    pub(crate) fn count_half_open_more(&mut self, ip: IpAddr) {
        *self.half_open.entry(ip).or_default() += 1;
        self.half_open_count += 1;
    }

    fn count_half_open_less(&mut self, ip: IpAddr) {
        self.half_open_count = self.half_open_count.saturating_sub(1);
        if let Some(count) = self.half_open.get_mut(&ip) {
            *count -= 1;
            if *count == 0 {
                self.half_open.remove(&ip);
            }
        }
    }

    /// Removes a connection.
    pub(crate) fn forget(&mut self, conn: ConnId) {
        self.enter(conn, State::Refused);
        let Some(connection) = self.connections.remove(&conn) else { return };
        let key = (connection.path.remote, connection.remote_id);
        if self.requests.get(&key) == Some(&conn) {
            self.requests.remove(&key);
        }
        if let Some(listener) =
            self.listeners.iter_mut().find(|listener| Some(listener.id) == connection.waits_at)
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

    /// Sends a message of a connection.
    pub(crate) fn say(&mut self, conn: ConnId, message: Message) {
        if let Some(connection) = self.connections.get_mut(&conn) {
            let (path, bytes) = (connection.path, connection.say(message));
            self.transmit(path, bytes);
        }
    }

    /// Sends a message, and repeats it until it is answered.
    pub(crate) fn say_until_answered(&mut self, now: Time, conn: ConnId, message: Message, attempts: u32) {
        self.say(conn, message);
        let interval_ns = self.config.timing.first_interval_ns;
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.repeat = Some(Repeat { attempts_left: attempts.saturating_sub(1), interval_ns });
        }
        self.set_deadline(conn, Some(now.after_ns(interval_ns)));
    }

    /// Repeats the last message.
    pub(crate) fn repeat_what_was_said(&mut self, conn: ConnId) {
        if let Some(connection) = self.connections.get(&conn)
            && let Some(bytes) = connection.said
        {
            let path = connection.path;
            self.transmit(path, bytes);
        }
    }

    /// Queues an event, if the connection has an owner or is a new request.
    pub(crate) fn tell(&mut self, conn: ConnId, kind: EventKind) {
        let owner = self.connections.get(&conn).and_then(|connection| connection.owner);
        let is_new = matches!(kind, EventKind::Request { .. } | EventKind::Question { .. });
        if owner.is_some() || is_new {
            self.events.push_back(Event { conn, owner, kind });
        }
    }

    fn handle_deadline(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        if connection.state == State::Established {
            return self.probe(now, conn);
        }
        if let Some(repeat) = connection.repeat.as_mut()
            && repeat.attempts_left > 0
        {
            repeat.attempts_left -= 1;
            repeat.interval_ns = (repeat.interval_ns * 2).min(self.config.timing.interval_ns_max);
            let interval_ns = repeat.interval_ns;
            // Messages that were lost together should not be repeated together.
            let next = now.after_ns(self.up_to_a_quarter_sooner(interval_ns));
            self.counters.repeated += 1;
            self.repeat_what_was_said(conn);
            return self.set_deadline(conn, Some(next));
        }
        self.give_up(now, conn);
    }

    pub(crate) fn up_to_a_quarter_sooner(&mut self, interval_ns: u64) -> u64 {
        let fraction = u64::from(self.numbers.next() >> 16);
        interval_ns - (((interval_ns / 4) * fraction) >> 16)
    }

    fn give_up(&mut self, now: Time, conn: ConnId) {
        let Some(state) = self.connections.get(&conn).map(|connection| connection.state) else { return };
        match state {
            State::ReqSent | State::RepSent => {
                self.send_rej(conn, RejReason::TIMEOUT, &[]);
                self.refuse(now, conn);
                self.tell(conn, EventKind::Unreachable);
            }
            State::Asked => {
                self.tell(conn, EventKind::Unreachable);
                self.enter(conn, State::Refused);
                self.linger(now, conn);
            }
            State::DreqSent => {
                self.tell(conn, EventKind::Disconnected { timed_out: true });
                self.enter_time_wait(now, conn);
            }
            State::TimeWait => {
                self.tell(conn, EventKind::TimeWaitExit);
                self.let_go(conn);
            }
            _ => self.let_go(conn),
        }
    }

    /// Keeps the last message for a while, to repeat it when the peer repeats its own.
    pub(crate) fn linger(&mut self, now: Time, conn: ConnId) {
        self.set_deadline(conn, Some(now.after_ns(self.config.timing.time_wait_ns)));
    }

    /// Keeps an ended connection while the program owns it, otherwise removes it.
    fn let_go(&mut self, conn: ConnId) {
        match self.connections.get(&conn) {
            Some(connection) if connection.owner.is_some() => self.enter(conn, State::Refused),
            _ => self.forget(conn),
        }
    }
}
