//! The active side of a connection.

use terrace_wire::Path;
use terrace_wire::Time;
use terrace_wire::cm::{
    Answered, IP_HEADER_BYTES, IpHeader, Message, Mra, Redirect, Rep, Req, ReqPath, Rtu, Transport,
};
use terrace_wire::port_of;

use crate::connection::{Connection, State, padded};
use crate::ids::ConnId;
use crate::listen;
use crate::manager::{Cm, Error, EventKind};
use crate::timing::{MRA_TIMEOUT_CODE, RESPONSE_CODE, RETRIES_CODE, code_to_ns};

/// Parameters of a REQ.
#[derive(Clone, Debug)]
pub struct Connect {
    /// The service.
    pub service_id: u64,
    /// The addresses for the peer's program.
    pub header: IpHeader,
    /// The path to the queue pair 1 that gets the first request.
    pub path: Path,
    /// GIDs of both ends: ours, the peer's.
    pub gids: [[u8; 16]; 2],
    /// Reliable or unreliable.
    pub transport: Transport,
    /// Our queue pair.
    pub qpn: u32,
    /// READs and atomics of the peer that the queue pair can have outstanding.
    pub responder_resources: u8,
    /// Our outstanding READs and atomics.
    pub initiator_depth: u8,
    /// End-to-end credits, which do not exist on RoCE.
    pub flow_control: bool,
    /// Retries of either queue pair, at most 7.
    pub retry_count: u8,
    /// RNR retries of the peer's queue pair, at most 7.
    pub rnr_retry_count: u8,
    /// Whether our queue pair has a shared receive queue.
    pub srq: bool,
    /// Code of the path MTU.
    pub path_mtu: u8,
    /// Code of the local ACK timeout.
    pub ack_timeout: u8,
    /// Private data for the peer's program.
    pub private_data: Vec<u8>,
}

/// A rejected request is repeated for this long while the service may be between two listeners. Programs that accept
/// one connection and then listen again, as perftest does, lose a race against peers that resolve the route quickly.
/// Linux rejects such a request.
const BETWEEN_LISTENERS_NS: u64 = 3_000_000_000;

/// Most redirects of a connection to another queue pair 1.
const REDIRECTS_MAX: u8 = 2;

impl Cm {
    /// Requests a connection; `owner` gets the event `Response`, `Rejected` or `Unreachable`.
    ///
    /// # Errors
    /// `PrivateData` for more than 56 bytes; `TooMany`.
    pub fn connect(&mut self, now: Time, owner: u64, connect: &Connect) -> Result<ConnId, Error> {
        if connect.private_data.len() > Req::PRIVATE_BYTES - IP_HEADER_BYTES {
            return Err(Error::PrivateData);
        }
        if self.connections.len() >= self.config.limits.connections_max {
            return Err(Error::TooMany);
        }
        let tid = u64::from(self.numbers.next()) << 32 | u64::from(self.numbers.next());
        let mut connection = Connection::new(State::ReqSent, Some(owner), connect.path, tid);
        connection.redirects_left = REDIRECTS_MAX;
        connection.is_xrc = connect.transport == Transport::Xrc;
        connection.requested_service = Some((listen::port_of(connect.service_id), now));
        let agreed = &mut connection.agreed;
        agreed.local_qpn = connect.qpn;
        agreed.rq_psn = self.numbers.next_psn();
        agreed.path_mtu = connect.path_mtu.min(self.config.path_mtu);
        agreed.responder_resources = connect.responder_resources;
        agreed.initiator_depth = connect.initiator_depth;
        agreed.retry_count = connect.retry_count.min(7);
        agreed.ack_timeout = connect.ack_timeout;
        (agreed.traffic_class, agreed.flow_label) = (connect.path.traffic_class, connect.path.flow_label);
        let agreed = *agreed;
        let conn = self.insert(connection);
        let req = self.req(conn, connect, agreed.rq_psn, agreed.path_mtu);
        self.send_with_retries(now, conn, Message::Req(req), self.config.timing.attempts);
        Ok(conn)
    }

    fn req(&self, conn: ConnId, connect: &Connect, starting_psn: u32, path_mtu: u8) -> Req {
        let mut private_data: [u8; Req::PRIVATE_BYTES] = padded(&connect.header.encode());
        private_data[IP_HEADER_BYTES..][..connect.private_data.len()].copy_from_slice(&connect.private_data);
        // An initiator only requests: it neither serves the target nor has receives (annex A14).
        let serves = connect.transport != Transport::Xrc;
        Req {
            local_comm_id: conn.0,
            service_id: connect.service_id,
            local_ca_guid: self.config.guid,
            local_qkey: 0,
            local_qpn: connect.qpn,
            responder_resources: if serves { connect.responder_resources } else { 0 },
            initiator_depth: connect.initiator_depth,
            remote_cm_response_timeout: RESPONSE_CODE,
            transport: connect.transport,
            flow_control: connect.flow_control,
            starting_psn,
            local_cm_response_timeout: RESPONSE_CODE,
            retry_count: connect.retry_count.min(7),
            pkey: 0xffff,
            path_mtu,
            rnr_retry_count: connect.rnr_retry_count.min(7),
            max_cm_retries: RETRIES_CODE,
            srq: serves && connect.srq,
            primary: req_path(connect),
            private_data,
        }
    }

    /// Sends the RTU: the queue pair is ready, and the connection is established.
    ///
    /// # Errors
    /// `Unknown`; `State` unless the peer has just accepted.
    pub fn establish(&mut self, now: Time, conn: ConnId) -> Result<(), Error> {
        let connection = self.get(conn)?;
        if connection.state != State::RepReceived {
            return Err(Error::State);
        }
        let remote_comm_id = connection.remote_id;
        let rtu = Rtu { local_comm_id: conn.0, remote_comm_id, private_data: [0; Rtu::PRIVATE_BYTES] };
        self.enter(conn, State::Established);
        self.send_message(conn, Message::Rtu(rtu));
        self.keep_alive(now, conn);
        Ok(())
    }

    pub(crate) fn handle_rep(&mut self, now: Time, from: &Path, tid: u64, rep: &Rep) {
        let Some(conn) = self.find_from_peer(rep.remote_comm_id, Some(rep.local_comm_id), from) else {
            return self.reject_unknown_rep(from, tid, rep);
        };
        let Ok(connection) = self.get(conn) else { return };
        match connection.state {
            State::ReqSent => {}
            State::RepReceived => {
                self.counters.duplicates += 1;
                return self.send_mra(conn, Answered::Rep);
            }
            // The RTU or the REJ was lost.
            State::Established | State::Rejected => {
                self.counters.duplicates += 1;
                return self.resend_last_message(conn);
            }
            _ => return,
        }
        connection.remote_id = rep.local_comm_id;
        let rep = &Rep { local_qpn: if connection.is_xrc { rep.local_eecn } else { rep.local_qpn }, ..*rep };
        let agreed = &mut connection.agreed;
        agreed.remote_qpn = rep.local_qpn;
        agreed.sq_psn = rep.starting_psn;
        agreed.responder_resources = rep.initiator_depth;
        agreed.initiator_depth = rep.responder_resources;
        agreed.rnr_retry_count = rep.rnr_retry_count;
        let key = (connection.path.remote, rep.local_ca_guid, rep.local_qpn);
        self.suspect_stale(now, key);
        self.record_peer_qp(conn, key);
        self.enter(conn, State::RepReceived);
        self.queue_event(conn, EventKind::Response(*rep));
    }

    pub(crate) fn send_mra(&mut self, conn: ConnId, answered: Answered) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.was_mra_sent = true;
        let mra = Mra {
            local_comm_id: conn.0,
            remote_comm_id: connection.remote_id,
            answered,
            service_timeout: MRA_TIMEOUT_CODE,
            private_data: [0; Mra::PRIVATE_BYTES],
        };
        // The MRA must not replace `last_message`, which is repeated later.
        let (path, tid) = (connection.path, connection.tid);
        let mad = terrace_wire::cm::Mad { tid, message: Message::Mra(mra) };
        self.transmit(path, mad.encode());
    }

    /// The peer has received our message and needs more time: the message is not repeated meanwhile.
    pub(crate) fn handle_mra(&mut self, now: Time, from: &Path, mra: &Mra) {
        let Some(conn) = self.find_from_peer(mra.remote_comm_id, Some(mra.local_comm_id), from) else {
            return;
        };
        let Some(connection) = self.connections.get(&conn) else { return };
        let expected = match connection.state {
            State::ReqSent => Answered::Req,
            State::RepSent => Answered::Rep,
            _ => return,
        };
        if mra.answered == expected {
            let extension_ns = code_to_ns(mra.service_timeout).min(self.config.timing.mra_timeout_ns_max);
            self.set_deadline(conn, Some(now.after_ns(extension_ns)));
        }
    }

    /// Whether a rejection for lack of a listener may be premature: a connection to that service of the peer is
    /// established, or has ended recently, and its program may be about to listen for the next one.
    pub(crate) fn is_rejection_premature(&self, conn: ConnId, now: Time) -> bool {
        let Some(connection) = self.connections.get(&conn) else { return false };
        let Some((port, requested_at)) = connection.requested_service else { return false };
        let has_same_service = |other: &Connection| {
            other.requested_service.is_some_and(|(requested, _)| requested == port)
                && other.path.remote.ip() == connection.path.remote.ip()
                && !matches!(other.state, State::ReqSent | State::RepReceived | State::Rejected)
        };
        requested_at.after_ns(BETWEEN_LISTENERS_NS) > now && self.connections.values().any(has_same_service)
    }

    /// Follows a redirect to another queue pair 1 of the same host. Returns false if the redirect is not acceptable.
    pub(crate) fn follow_redirect(&mut self, now: Time, conn: ConnId, info: &[u8]) -> bool {
        let Some(redirect) = Redirect::decode(info) else { return false };
        let Some(connection) = self.connections.get_mut(&conn) else { return false };
        let mut path = connection.path;
        path.remote.set_port(port_of(redirect.qpn));
        // A peer cannot redirect us to another host: only the port is taken from its answer.
        if connection.redirects_left == 0 || path == connection.path {
            return false;
        }
        connection.redirects_left -= 1;
        connection.path = path;
        connection.remote_id = 0;
        let interval_ns = self.config.timing.first_interval_ns;
        self.resend_last_message(conn);
        self.set_deadline(conn, Some(now.after_ns(interval_ns)));
        true
    }
}

fn req_path(connect: &Connect) -> ReqPath {
    ReqPath {
        // LIDs have no meaning in RoCE; peers only check for the permissive LID of a routed path.
        local_lid: 0xffff,
        remote_lid: 0xffff,
        local_gid: connect.gids[0],
        remote_gid: connect.gids[1],
        flow_label: connect.path.flow_label,
        packet_rate: RATE_100_GBPS,
        traffic_class: connect.path.traffic_class,
        hop_limit: if connect.path.hop_limit == 0 { HOP_LIMIT } else { connect.path.hop_limit },
        service_level: 0,
        subnet_local: false,
        local_ack_timeout: connect.ack_timeout,
    }
}

/// Code of the port's nominal rate.
const RATE_100_GBPS: u8 = 16;
const HOP_LIMIT: u8 = 64;
