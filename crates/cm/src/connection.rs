//! What is known of one connection.

use std::net::SocketAddr;

use terrace_wire::Time;
use terrace_wire::cm::{MAD_BYTES, Mad, Message};
use terrace_wire::{Path, ROCE_PORT};

use crate::listen::ListenerId;

/// Where a connection stands; see the crate's picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    ReqSent,
    ReqReceived,
    RepReceived,
    RepSent,
    Established,
    DreqSent,
    DreqReceived,
    /// It has ended. What is repeated is answered with what was said last.
    TimeWait,
    /// It was refused, by either side. The same.
    Refused,
    /// A question about datagrams was asked.
    Asked,
    /// One has arrived.
    WasAsked,
    /// It was answered.
    Answered,
}

/// What the two ends have agreed on: what a queue pair needs to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Our queue pair.
    pub local_qpn: u32,
    /// The peer's.
    pub remote_qpn: u32,
    /// The first PSN that we expect.
    pub rq_psn: u32,
    /// The first PSN that the peer expects.
    pub sq_psn: u32,
    /// Code of the path MTU.
    pub path_mtu: u8,
    /// READs and atomics of the peer that we answer at a time.
    pub responder_resources: u8,
    /// READs and atomics of ours under way at a time.
    pub initiator_depth: u8,
    /// Retries of our queue pair.
    pub retry_count: u8,
    /// RNR retries of our queue pair.
    pub rnr_retry_count: u8,
    /// Code of our queue pair's time for an acknowledgement.
    pub ack_timeout: u8,
    /// Of the way to the peer.
    pub traffic_class: u8,
    /// The same.
    pub flow_label: u32,
}

/// A peer's queue pair: the address of its slot, the GUID of its node, its number. By GUID and number Linux's `cm` tells stale
/// connections; here another address is another peer, whatever GUID it claims.
pub(crate) type PeerQp = (SocketAddr, u64, u32);

/// A datagram that waits for an answer.
#[derive(Clone, Copy)]
pub(crate) struct Repeat {
    pub attempts_left: u32,
    pub interval_ns: u64,
}

pub(crate) struct Connection {
    pub state: State,
    /// Whose it is to the user of this crate; without one nobody hears of it any more.
    pub owner: Option<u64>,
    /// The peer's name for it, once known.
    pub remote_id: u32,
    /// The way to the peer's queue pair 1.
    pub path: Path,
    pub tid: u64,
    pub agreed: Agreed,
    /// What the peer's queue pair is known by, once it is.
    pub peer_qp: Option<PeerQp>,
    /// How often the peer's host has refused datagrams since the last time that the peer was asked without suspicion.
    pub refusals: u8,
    /// What was said last, to be repeated by us or on request.
    pub said: Option<[u8; MAD_BYTES]>,
    pub repeat: Option<Repeat>,
    /// The entry in the manager's list of deadlines.
    pub deadline: Option<Time>,
    /// Where it came in, as long as the program has not heard of it.
    pub waits_at: Option<ListenerId>,
    /// The service that the peer was asked for, by its port, and when.
    pub asked_for: Option<(u16, Time)>,
    /// Whether the peer was asked to be patient.
    pub is_told_to_wait: bool,
    /// Whether it is active; then it may be told once to go elsewhere.
    pub redirects_left: u8,
}

impl Connection {
    pub fn new(state: State, owner: Option<u64>, path: Path, tid: u64) -> Connection {
        Connection {
            state,
            owner,
            remote_id: 0,
            path,
            tid,
            agreed: Agreed::default(),
            peer_qp: None,
            refusals: 0,
            said: None,
            repeat: None,
            deadline: None,
            waits_at: None,
            asked_for: None,
            is_told_to_wait: false,
            redirects_left: 0,
        }
    }

    /// Writes a datagram of this connection and keeps it.
    pub fn say(&mut self, message: Message) -> [u8; MAD_BYTES] {
        let bytes = Mad { tid: self.tid, message }.encode();
        self.said = Some(bytes);
        bytes
    }

    /// Whether a datagram from there may be about this connection: another host cannot end it by guessing its name.
    pub fn is_from(&self, path: &Path) -> bool {
        self.path.remote.ip().to_canonical() == path.remote.ip().to_canonical()
            && self.path.remote.port() == path.remote.port()
    }

    /// Takes an answer from another process of the host that was asked: the one with slot 0 has passed the question on. From
    /// then on that process is the peer.
    pub fn adopt(&mut self, path: &Path) -> bool {
        let same_host = self.path.remote.ip().to_canonical() == path.remote.ip().to_canonical();
        let asks = matches!(self.state, State::ReqSent | State::Asked);
        let adopted = asks && same_host && self.path.remote.port() == ROCE_PORT;
        if adopted {
            self.path.remote.set_port(path.remote.port());
        }
        adopted
    }

    /// Whether it counts against the limits on connections that strangers have begun.
    pub fn is_half_open(&self) -> bool {
        matches!(self.state, State::ReqReceived | State::RepSent | State::WasAsked)
    }
}

/// Copies what fits. Lengths of private data are checked where they come from.
pub(crate) fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut padded = [0; N];
    let len = bytes.len().min(N);
    padded[..len].copy_from_slice(&bytes[..len]);
    padded
}
