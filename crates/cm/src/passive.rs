//! The passive side of a connection.

use std::net::SocketAddr;

use terrace_wire::Time;
use terrace_wire::cm::{
    Answered, IP_HEADER_BYTES, IpHeader, Mad, Message, Redirect, Rej, RejReason, Rep, Req, Rtu, Transport,
};
use terrace_wire::{Path, QPN_INSTANCE_SHIFT};

use crate::connection::{Agreed, Connection, State, padded};
use crate::ids::ConnId;
use crate::listen::NoListener;
use crate::manager::{Cm, Error, EventKind, FindInstance};

/// Parameters of a REP.
#[derive(Clone, Debug)]
pub struct Accept {
    /// Our queue pair.
    pub qpn: u32,
    /// READs and atomics of the peer that the queue pair can have outstanding.
    pub responder_resources: u8,
    /// Our outstanding READs and atomics.
    pub initiator_depth: u8,
    /// End-to-end credits, which do not exist on RoCE.
    pub flow_control: bool,
    /// RNR retries of the peer's queue pair, at most 7.
    pub rnr_retry_count: u8,
    /// Whether our queue pair has a shared receive queue.
    pub srq: bool,
    /// Private data for the peer's program.
    pub private_data: Vec<u8>,
}

/// The Q_Key of datagrams between queue pairs 1.
const MANAGEMENT_QKEY: u32 = 0x8001_0000;

impl Cm {
    /// Accepts a request; `owner` gets the event `Established`.
    ///
    /// # Errors
    /// `Unknown`; `State` if there is no pending request; `PrivateData` for more than 196 bytes.
    pub fn accept(&mut self, now: Time, conn: ConnId, accept: &Accept) -> Result<(), Error> {
        if accept.private_data.len() > Rep::PRIVATE_BYTES {
            return Err(Error::PrivateData);
        }
        let local_ca_guid = self.config.guid;
        let connection = self.get(conn)?;
        if connection.state != State::ReqReceived {
            return Err(Error::State);
        }
        connection.agreed.local_qpn = accept.qpn;
        connection.agreed.responder_resources = accept.responder_resources;
        connection.agreed.initiator_depth = accept.initiator_depth;
        let is_xrc = connection.is_xrc;
        let rep = Rep {
            local_comm_id: conn.0,
            remote_comm_id: connection.remote_id,
            local_qkey: 0,
            local_qpn: if is_xrc { 0 } else { accept.qpn },
            local_eecn: if is_xrc { accept.qpn } else { 0 },
            starting_psn: connection.agreed.rq_psn,
            responder_resources: accept.responder_resources,
            initiator_depth: accept.initiator_depth,
            target_ack_delay: 0,
            flow_control: accept.flow_control,
            rnr_retry_count: accept.rnr_retry_count.min(7),
            // A target has the shared receive queues of its domain.
            srq: accept.srq || is_xrc,
            local_ca_guid,
            private_data: padded(&accept.private_data),
        };
        self.enter(conn, State::RepSent);
        self.send_with_retries(now, conn, Message::Rep(rep), self.config.timing.attempts);
        Ok(())
    }

    /// Establishes a connection whose RTU was lost, when a packet arrives at its queue pair (12.9.7.2).
    ///
    /// # Errors
    /// `Unknown`; `State` unless the request was accepted.
    pub fn notify_comm_est(&mut self, now: Time, conn: ConnId) -> Result<(), Error> {
        match self.get(conn)?.state {
            State::RepSent => {
                self.become_established(now, conn);
                Ok(())
            }
            State::Established => Ok(()),
            _ => Err(Error::State),
        }
    }

    fn become_established(&mut self, now: Time, conn: ConnId) {
        self.enter(conn, State::Established);
        self.keep_alive(now, conn);
        self.queue_event(conn, EventKind::Established);
    }

    pub(crate) fn handle_rtu(&mut self, now: Time, from: &Path, rtu: &Rtu) {
        let Some(conn) = self.find_from_peer(rtu.remote_comm_id, Some(rtu.local_comm_id), from) else {
            return;
        };
        match self.connections.get(&conn).map(|connection| connection.state) {
            Some(State::RepSent) => self.become_established(now, conn),
            _ => self.counters.duplicates += 1,
        }
    }

    pub(crate) fn handle_req(
        &mut self,
        now: Time,
        from: &Path,
        tid: u64,
        req: &Req,
        find_instance: FindInstance<'_>,
    ) {
        if let Some(&conn) = self.requests.get(&(from.remote, req.local_comm_id)) {
            return self.handle_repeated_req(conn);
        }
        let key = (from.remote, req.local_ca_guid, req.local_qpn);
        if self.peer_qps.contains_key(&key) {
            self.send_stateless_rej(from, tid, req, RejReason::STALE_CONNECTION, &[]);
            return self.suspect_stale(now, key);
        }
        if !matches!(req.transport, Transport::Rc | Transport::Uc | Transport::Xrc) {
            return self.send_stateless_rej(from, tid, req, RejReason::INVALID_TRANSPORT, &[]);
        }
        if req.path_mtu > self.config.path_mtu {
            const INVALID_MTU: RejReason = RejReason(26);
            return self.send_stateless_rej(from, tid, req, INVALID_MTU, &[self.config.path_mtu]);
        }
        let Ok(header) = IpHeader::decode(&req.private_data) else {
            return self.send_stateless_rej(from, tid, req, RejReason::INVALID_SERVICE_ID, &[]);
        };
        self.queue_request(now, from, tid, req, header, find_instance);
    }

    /// Handles a duplicate REQ: our answer was late or lost.
    fn handle_repeated_req(&mut self, conn: ConnId) {
        self.counters.duplicates += 1;
        match self.connections.get(&conn).map(|connection| connection.state) {
            // The program has not answered yet.
            Some(State::ReqReceived) => self.send_mra(conn, Answered::Req),
            Some(State::RepSent | State::Rejected) => self.resend_last_message(conn),
            // The REQ was late: the peer has received our REP since.
            _ => {}
        }
    }

    fn queue_request(
        &mut self,
        now: Time,
        from: &Path,
        tid: u64,
        req: &Req,
        header: IpHeader,
        find_instance: FindInstance<'_>,
    ) {
        let listener =
            match self.reserve_backlog_entry(now, from, req.service_id, header.destination, find_instance) {
                Ok(listener) => listener,
                Err(NoListener::OtherInstance(instance)) => {
                    let info = redirect(instance, req.primary.remote_gid);
                    return self.send_stateless_rej(from, tid, req, RejReason::PORT_AND_CM_REDIRECT, &info);
                }
                Err(NoListener::Nowhere) => {
                    return self.send_stateless_rej(from, tid, req, RejReason::INVALID_SERVICE_ID, &[]);
                }
                Err(NoListener::Drop) => return,
            };
        let mut connection = Connection::new(State::Rejected, None, *from, tid);
        connection.agreed = self.agreed_from_req(req);
        connection.path.traffic_class = req.primary.traffic_class;
        connection.is_xrc = req.transport == Transport::Xrc;
        let conn = self.add_request(listener, connection, req.local_comm_id, State::ReqReceived);
        self.record_peer_qp(conn, (from.remote, req.local_ca_guid, req.local_qpn));
        self.queue_event(conn, EventKind::Request { listener, header, req: *req });
    }

    fn agreed_from_req(&mut self, req: &Req) -> Agreed {
        Agreed {
            local_qpn: 0,
            remote_qpn: req.local_qpn,
            rq_psn: self.numbers.next_psn(),
            sq_psn: req.starting_psn,
            path_mtu: req.path_mtu,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            ack_timeout: req.primary.local_ack_timeout,
            traffic_class: req.primary.traffic_class,
            flow_label: req.primary.flow_label,
        }
    }

    /// Whether that peer may request another connection.
    pub(crate) fn is_within_limits(&self, peer: &SocketAddr) -> bool {
        let limits = &self.config.limits;
        let find_from_peer = self.half_open.get(&peer.ip().to_canonical()).copied().unwrap_or(0);
        find_from_peer < limits.half_open_per_peer_max
            && self.half_open_count < limits.half_open_max
            && self.connections.len() < limits.connections_max
    }

    /// Sends a REJ for a request without keeping state.
    fn send_stateless_rej(&mut self, to: &Path, tid: u64, req: &Req, reason: RejReason, info: &[u8]) {
        let rej = Rej {
            local_comm_id: 0,
            remote_comm_id: req.local_comm_id,
            answered: Answered::Req,
            reason,
            info_len: info.len().min(Rej::INFO_BYTES) as u8,
            info: padded(info),
            private_data: [0; Rej::PRIVATE_BYTES],
        };
        self.transmit(*to, Mad { tid, message: Message::Rej(rej) }.encode());
    }

    /// Rejects a REP for an unknown connection, so that the peer does not wait for the RTU.
    pub(crate) fn reject_unknown_rep(&mut self, to: &Path, tid: u64, rep: &Rep) {
        let rej = Rej {
            local_comm_id: rep.remote_comm_id,
            remote_comm_id: rep.local_comm_id,
            answered: Answered::Rep,
            reason: RejReason::INVALID_COMM_ID,
            info_len: 0,
            info: [0; Rej::INFO_BYTES],
            private_data: [0; Rej::PRIVATE_BYTES],
        };
        self.transmit(*to, Mad { tid, message: Message::Rej(rej) }.encode());
    }
}

/// The private data without the IP header at its beginning, which the program does not see.
pub(crate) fn strip_ip_header(private_data: &[u8]) -> Vec<u8> {
    private_data.get(IP_HEADER_BYTES..).unwrap_or_default().to_vec()
}

/// The redirect to the process of this host with that instance index.
pub(crate) fn redirect(instance: u8, gid: [u8; 16]) -> [u8; 72] {
    let qpn = u32::from(instance) << QPN_INSTANCE_SHIFT | 1;
    Redirect { gid, pkey: 0xffff, qpn, qkey: MANAGEMENT_QKEY }.encode()
}
