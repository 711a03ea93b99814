//! State of one connection.

use std::net::SocketAddr;

use terrace_wire::Time;
use terrace_wire::cm::{MAD_BYTES, Mad, Message};
use terrace_wire::{Path, ROCE_PORT};

use crate::ids::ListenerId;

/// State of a connection; see the diagram in the crate's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    ReqSent,
    ReqReceived,
    RepReceived,
    RepSent,
    Established,
    DreqSent,
    DreqReceived,
    /// The connection has ended. A repeated message is answered with our last message.
    TimeWait,
    /// Either side rejected the connection. A repeated message is answered as in TIME_WAIT.
    Rejected,
    /// A SIDR_REQ was sent.
    SidrReqSent,
    /// A SIDR_REQ was received.
    SidrReqReceived,
    /// A SIDR_REP was sent or received.
    SidrResolved,
}

/// The agreed parameters of both queue pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Our queue pair.
    pub local_qpn: u32,
    /// The peer's queue pair.
    pub remote_qpn: u32,
    /// The first PSN that we expect.
    pub rq_psn: u32,
    /// The first PSN that the peer expects.
    pub sq_psn: u32,
    /// Code of the path MTU.
    pub path_mtu: u8,
    /// READs and atomics of the peer that the queue pair can have outstanding.
    pub responder_resources: u8,
    /// Our outstanding READs and atomics.
    pub initiator_depth: u8,
    /// Retries of our queue pair.
    pub retry_count: u8,
    /// RNR retries of our queue pair.
    pub rnr_retry_count: u8,
    /// Code of our queue pair's local ACK timeout.
    pub ack_timeout: u8,
    /// Traffic class of the path to the peer.
    pub traffic_class: u8,
    /// Flow label of the path to the peer.
    pub flow_label: u32,
}

/// A peer's queue pair: the address and port of its process, the GUID of its node, its number. Linux's `cm` identifies
/// stale connections by GUID and number. Here a different address means a different peer, even with the same GUID.
pub(crate) type PeerQp = (SocketAddr, u64, u32);

/// Retransmission of an unanswered message.
#[derive(Clone, Copy)]
pub(crate) struct Retransmission {
    pub attempts_left: u32,
    pub interval_ns: u64,
}

pub(crate) struct Connection {
    pub state: State,
    /// Whether an XRC initiator connects to a target.
    pub is_xrc: bool,
    /// The owner in this crate's user. A connection without an owner raises no events.
    pub owner: Option<u64>,
    /// The peer's communication ID, once known.
    pub remote_id: u32,
    /// The path to the peer's queue pair 1.
    pub path: Path,
    pub tid: u64,
    pub agreed: Agreed,
    /// The peer's queue pair, once known.
    pub peer_qp: Option<PeerQp>,
    /// ICMP port unreachable errors from the peer's host since the last regular keepalive probe.
    pub port_unreachables: u8,
    /// The last message, which the timer or a duplicate from the peer repeats.
    pub last_message: Option<[u8; MAD_BYTES]>,
    pub retransmission: Option<Retransmission>,
    /// The connection's entry in the manager's list of deadlines.
    pub deadline: Option<Time>,
    /// The listener in whose backlog the request waits, until [`Cm::assign_request`](crate::Cm::assign_request).
    pub in_backlog_of: Option<ListenerId>,
    /// The port of the requested service, and the time of the request.
    pub requested_service: Option<(u16, Time)>,
    /// Whether an MRA was sent to the peer.
    pub was_mra_sent: bool,
    /// Redirects that the connection may still follow; 0 on the passive side.
    pub redirects_left: u8,
}

impl Connection {
    pub fn new(state: State, owner: Option<u64>, path: Path, tid: u64) -> Connection {
        Connection {
            state,
            is_xrc: false,
            owner,
            remote_id: 0,
            path,
            tid,
            agreed: Agreed::default(),
            peer_qp: None,
            port_unreachables: 0,
            last_message: None,
            retransmission: None,
            deadline: None,
            in_backlog_of: None,
            requested_service: None,
            was_mra_sent: false,
            redirects_left: 0,
        }
    }

    /// Encodes a message of this connection and keeps it for repetition.
    pub fn encode_message(&mut self, message: Message) -> [u8; MAD_BYTES] {
        let bytes = Mad { tid: self.tid, message }.encode();
        self.last_message = Some(bytes);
        bytes
    }

    /// Whether a datagram comes from the peer. Another host cannot end the connection by guessing its communication ID.
    pub fn is_from(&self, path: &Path) -> bool {
        self.path.remote.ip().to_canonical() == path.remote.ip().to_canonical()
            && self.path.remote.port() == path.remote.port()
    }

    /// Accepts an answer from another process of the requested host: the process with instance index 0 has forwarded
    /// the request. From then on that process is the peer.
    pub fn adopt_instance(&mut self, path: &Path) -> bool {
        let same_host = self.path.remote.ip().to_canonical() == path.remote.ip().to_canonical();
        let is_requesting = matches!(self.state, State::ReqSent | State::SidrReqSent);
        let adopted = is_requesting && same_host && self.path.remote.port() == ROCE_PORT;
        if adopted {
            self.path.remote.set_port(path.remote.port());
        }
        adopted
    }

    /// Whether the connection counts against the limits on connections that peers have requested.
    pub fn is_half_open(&self) -> bool {
        matches!(self.state, State::ReqReceived | State::RepSent | State::SidrReqReceived)
    }
}

/// Copies the bytes that fit. The callers check lengths of private data.
pub(crate) fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut padded = [0; N];
    let len = bytes.len().min(N);
    padded[..len].copy_from_slice(&bytes[..len]);
    padded
}
