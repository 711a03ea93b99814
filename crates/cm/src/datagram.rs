//! Service ID resolution: SIDR_REQ and SIDR_REP (12.11).

use terrace_wire::Path;
use terrace_wire::Time;
use terrace_wire::cm::{IP_HEADER_BYTES, IpHeader, Mad, Message, SidrRep, SidrReq, SidrStatus};

use crate::connection::{Connection, State, padded};
use crate::ids::ConnId;
use crate::listen::Turned;
use crate::manager::{Cm, Elsewhere, Error, EventKind};
use crate::passive::{behind_header, redirect};

/// Parameters of a SIDR_REQ.
#[derive(Clone, Debug)]
pub struct Ask {
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
pub struct Answer {
    /// The queue pair.
    pub qpn: u32,
    /// Its Q_Key.
    pub qkey: u32,
    /// Private data for the peer's program.
    pub private_data: Vec<u8>,
}

const REDIRECTS_MAX: u8 = 2;

impl Cm {
    /// Sends a SIDR_REQ; `owner` gets the event `Answered` or `Unreachable`.
    ///
    /// # Errors
    /// `PrivateData` for more than 180 bytes; `TooMany`.
    pub fn ask(&mut self, now: Time, owner: u64, ask: &Ask) -> Result<ConnId, Error> {
        if ask.private_data.len() > SidrReq::PRIVATE_BYTES - IP_HEADER_BYTES {
            return Err(Error::PrivateData);
        }
        if self.connections.len() >= self.config.limits.connections_max {
            return Err(Error::TooMany);
        }
        let tid = u64::from(self.numbers.next()) << 32 | u64::from(self.numbers.next());
        let mut connection = Connection::new(State::Asked, Some(owner), ask.path, tid);
        connection.redirects_left = REDIRECTS_MAX;
        let conn = self.insert(connection);
        let mut private_data: [u8; SidrReq::PRIVATE_BYTES] = padded(&ask.header.encode());
        private_data[IP_HEADER_BYTES..][..ask.private_data.len()].copy_from_slice(&ask.private_data);
        let req = SidrReq { request_id: conn.0, pkey: 0xffff, service_id: ask.service_id, private_data };
        self.say_until_answered(now, conn, Message::SidrReq(req), self.config.timing.attempts);
        Ok(conn)
    }

    /// Answers a SIDR_REQ.
    ///
    /// # Errors
    /// `Unknown`; `State` when it was already answered; `PrivateData` for more than 136 bytes.
    pub fn answer(&mut self, now: Time, conn: ConnId, answer: &Answer) -> Result<(), Error> {
        let (qpn, qkey) = (answer.qpn, answer.qkey);
        self.send_answer(now, conn, SidrStatus::VALID, qpn, qkey, &answer.private_data)
    }

    pub(crate) fn refuse_question(
        &mut self,
        now: Time,
        conn: ConnId,
        private_data: &[u8],
    ) -> Result<(), Error> {
        self.send_answer(now, conn, SidrStatus::REJECTED, 0, 0, private_data)
    }

    fn send_answer(
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
        if connection.state != State::WasAsked {
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
        self.enter(conn, State::Answered);
        self.say(conn, Message::SidrRep(rep));
        self.linger(now, conn);
        Ok(())
    }

    pub(crate) fn handle_question(
        &mut self,
        now: Time,
        from: &Path,
        tid: u64,
        req: &SidrReq,
        elsewhere: Elsewhere<'_>,
    ) {
        if let Some(&conn) = self.requests.get(&(from.remote, req.request_id)) {
            self.counters.duplicates += 1;
            if self.connections.get(&conn).is_some_and(|one| one.state == State::Answered) {
                self.repeat_what_was_said(conn);
            }
            return;
        }
        let Ok(header) = IpHeader::decode(&req.private_data) else {
            return self.answer_question(from, tid, req, SidrStatus::UNSUPPORTED, &[]);
        };
        let listener = match self.find_room(now, from, req.service_id, header.destination, elsewhere) {
            Ok(listener) => listener,
            Err(Turned::Elsewhere(slot)) => {
                let info = redirect(slot, [0; 16]);
                return self.answer_question(from, tid, req, SidrStatus::REDIRECT, &info);
            }
            Err(Turned::Nobody) => {
                return self.answer_question(from, tid, req, SidrStatus::UNSUPPORTED, &[]);
            }
            Err(Turned::Unheard) => return,
        };
        let connection = Connection::new(State::Refused, None, *from, tid);
        let conn = self.put_to(listener, connection, req.request_id, State::WasAsked);
        let private_data = behind_header(&req.private_data);
        self.tell(conn, EventKind::Question { listener, header, private_data });
    }

    fn answer_question(&mut self, to: &Path, tid: u64, req: &SidrReq, status: SidrStatus, info: &[u8]) {
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

    pub(crate) fn handle_answer(&mut self, now: Time, from: &Path, rep: &SidrRep) {
        let Some(conn) = self.of_peer(rep.request_id, None, from) else { return };
        if self.connections.get(&conn).is_none_or(|connection| connection.state != State::Asked) {
            self.counters.duplicates += 1;
            return;
        }
        if rep.status == SidrStatus::REDIRECT && self.follow(now, conn, &rep.info) {
            return;
        }
        if let Some(connection) = self.connections.get_mut(&conn) {
            connection.agreed.remote_qpn = rep.qpn;
        }
        // No TIME_WAIT: the peer does not use the request ID again.
        self.enter(conn, State::Answered);
        self.tell(conn, EventKind::Answered(*rep));
    }
}
