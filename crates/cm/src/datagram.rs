//! Service ID resolution: SIDR_REQ and SIDR_REP (12.11).

use terrace_wire::Path;
use terrace_wire::Time;
use terrace_wire::cm::{IP_HEADER_BYTES, IpHeader, Mad, Message, SidrRep, SidrReq, SidrStatus};

use crate::connection::{Connection, State, padded};
use crate::ids::ConnId;
use crate::listen::NoListener;
use crate::manager::{Cm, Error, EventKind, FindInstance};
use crate::passive::{redirect, strip_ip_header};

/// Parameters of a SIDR_REQ.
#[derive(Clone, Debug)]
pub struct SidrRequest {
    /// The service.
    pub service_id: u64,
    /// The addresses for the peer's program.
    pub header: IpHeader,
    /// The path to the queue pair 1 that gets the first request.
    pub path: Path,
    /// Private data for the peer's program.
    pub private_data: Vec<u8>,
}

/// Parameters of a SIDR_REP with a valid queue pair.
#[derive(Clone, Debug)]
pub struct SidrReply {
    /// Number of the queue pair.
    pub qpn: u32,
    /// The queue pair's Q_Key.
    pub qkey: u32,
    /// Private data for the peer's program.
    pub private_data: Vec<u8>,
}

const REDIRECTS_MAX: u8 = 2;

impl Cm {
    /// Sends a SIDR_REQ; `owner` gets the event `SidrResponse` or `Unreachable`.
    ///
    /// # Errors
    /// `PrivateData` for more than 180 bytes; `TooMany`.
    pub fn send_sidr_req(&mut self, now: Time, owner: u64, request: &SidrRequest) -> Result<ConnId, Error> {
        if request.private_data.len() > SidrReq::PRIVATE_BYTES - IP_HEADER_BYTES {
            return Err(Error::PrivateData);
        }
        if self.connections.len() >= self.config.limits.connections_max {
            return Err(Error::TooMany);
        }
        let tid = u64::from(self.numbers.next()) << 32 | u64::from(self.numbers.next());
        let mut connection = Connection::new(State::SidrReqSent, Some(owner), request.path, tid);
        connection.redirects_left = REDIRECTS_MAX;
        let conn = self.insert(connection);
        let mut private_data: [u8; SidrReq::PRIVATE_BYTES] = padded(&request.header.encode());
        private_data[IP_HEADER_BYTES..][..request.private_data.len()].copy_from_slice(&request.private_data);
        let req = SidrReq { request_id: conn.0, pkey: 0xffff, service_id: request.service_id, private_data };
        self.send_with_retries(now, conn, Message::SidrReq(req), self.config.timing.attempts);
        Ok(conn)
    }

    /// Answers a SIDR_REQ with a queue pair.
    ///
    /// # Errors
    /// `Unknown`; `State` if the SIDR_REQ was already answered; `PrivateData` for more than 136 bytes.
    pub fn send_sidr_rep(&mut self, now: Time, conn: ConnId, reply: &SidrReply) -> Result<(), Error> {
        let (qpn, qkey) = (reply.qpn, reply.qkey);
        self.send_stateful_sidr_rep(now, conn, SidrStatus::VALID, qpn, qkey, &reply.private_data)
    }

    pub(crate) fn reject_sidr_req(
        &mut self,
        now: Time,
        conn: ConnId,
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.send_stateful_sidr_rep(now, conn, SidrStatus::REJECTED, 0, 0, private_data)
    }

    fn send_stateful_sidr_rep(
        &mut self,
        now: Time,
        conn: ConnId,
        status: SidrStatus,
        qpn: u32,
        qkey: u32,
        private_data: &[u8],
    ) -> Result<(), Error> {
        if private_data.len() > SidrRep::PRIVATE_BYTES {
            return Err(Error::PrivateData);
        }
        let connection = self.get(conn)?;
        if connection.state != State::SidrReqReceived {
            return Err(Error::State);
        }
        let rep = SidrRep {
            request_id: connection.remote_id,
            status,
            info_len: 0,
            qpn,
            service_id: 0,
            qkey,
            info: [0; SidrRep::INFO_BYTES],
            private_data: padded(private_data),
        };
        self.enter(conn, State::SidrResolved);
        self.send_message(conn, Message::SidrRep(rep));
        self.arm_time_wait(now, conn);
        Ok(())
    }

    pub(crate) fn handle_sidr_req(
        &mut self,
        now: Time,
        from: &Path,
        tid: u64,
        req: &SidrReq,
        find_instance: FindInstance<'_>,
    ) {
        if let Some(&conn) = self.requests.get(&(from.remote, req.request_id)) {
            self.counters.duplicates += 1;
            if self.connections.get(&conn).is_some_and(|one| one.state == State::SidrResolved) {
                self.resend_last_message(conn);
            }
            return;
        }
        let Ok(header) = IpHeader::decode(&req.private_data) else {
            return self.send_stateless_sidr_rep(from, tid, req, SidrStatus::UNSUPPORTED, &[]);
        };
        let listener =
            match self.reserve_backlog_entry(now, from, req.service_id, header.destination, find_instance) {
                Ok(listener) => listener,
                Err(NoListener::OtherInstance(instance)) => {
                    let info = redirect(instance, [0; 16]);
                    return self.send_stateless_sidr_rep(from, tid, req, SidrStatus::REDIRECT, &info);
                }
                Err(NoListener::Nowhere) => {
                    return self.send_stateless_sidr_rep(from, tid, req, SidrStatus::UNSUPPORTED, &[]);
                }
                Err(NoListener::Drop) => return,
            };
        let connection = Connection::new(State::Rejected, None, *from, tid);
        let conn = self.add_request(listener, connection, req.request_id, State::SidrReqReceived);
        let private_data = strip_ip_header(&req.private_data);
        self.queue_event(conn, EventKind::SidrRequest { listener, header, private_data });
    }

    fn send_stateless_sidr_rep(
        &mut self,
        to: &Path,
        tid: u64,
        req: &SidrReq,
        status: SidrStatus,
        info: &[u8],
    ) {
        let rep = SidrRep {
            request_id: req.request_id,
            status,
            info_len: info.len().min(SidrRep::INFO_BYTES) as u8,
            qpn: 0,
            service_id: req.service_id,
            qkey: 0,
            info: padded(info),
            private_data: [0; SidrRep::PRIVATE_BYTES],
        };
        self.transmit(*to, Mad { tid, message: Message::SidrRep(rep) }.encode());
    }

    pub(crate) fn handle_sidr_rep(&mut self, now: Time, from: &Path, rep: &SidrRep) {
        let Some(conn) = self.find_from_peer(rep.request_id, None, from) else { return };
        if self.connections.get(&conn).is_none_or(|connection| connection.state != State::SidrReqSent) {
            self.counters.duplicates += 1;
            return;
        }
        if rep.status == SidrStatus::REDIRECT && self.follow_redirect(now, conn, &rep.info) {
            return;
        }
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.agreed.remote_qpn = rep.qpn;
        }
        // TIME_WAIT is not needed: the peer does not use the request ID again.
        self.enter(conn, State::SidrResolved);
        self.queue_event(conn, EventKind::SidrResponse(*rep));
    }
}
