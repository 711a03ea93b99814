//! Rejecting and ending connections.

use terrace_wire::Path;
use terrace_wire::Time;
use terrace_wire::cm::{Answered, Drep, Dreq, Mad, Message, Rej, RejReason};

use crate::connection::{Connection, State, padded};
use crate::ids::ConnId;
use crate::liveness::NO_QPN;
use crate::manager::{Cm, Error, EventKind};

impl Cm {
    /// Rejects a request, also after accepting it, or a response.
    ///
    /// # Errors
    /// `Unknown`; `State` once the connection is established; `PrivateData` for more than 148 bytes.
    pub fn reject(
        &mut self,
        now: Time,
        conn: ConnId,
        reason: RejReason,
        private_data: &[u8],
    ) -> Result<(), Error> {
        if private_data.len() > Rej::PRIVATE_BYTES {
            return Err(Error::PrivateData);
        }
        match self.get(conn)?.state {
            State::ReqReceived | State::RepReceived | State::RepSent => {
                self.send_rej(conn, reason, private_data);
                self.enter_rejected(now, conn);
                Ok(())
            }
            State::SidrReqReceived => self.reject_sidr_req(now, conn, private_data),
            _ => Err(Error::State),
        }
    }

    pub(crate) fn send_rej(&mut self, conn: ConnId, reason: RejReason, private_data: &[u8]) {
        let Some(connection) = self.connections.get(&conn) else { return };
        let (local_comm_id, answered) = match connection.state {
            // The peer does not know our communication ID.
            State::ReqReceived => (0, Answered::Req),
            State::RepReceived => (conn.0, Answered::Rep),
            _ => (conn.0, Answered::Other),
        };
        let rej = Rej {
            local_comm_id,
            remote_comm_id: connection.remote_id,
            answered,
            reason,
            info_len: 0,
            info: [0; Rej::INFO_BYTES],
            private_data: padded(private_data),
        };
        self.send_message(conn, Message::Rej(rej));
    }

    /// Enters the state `Rejected`, in which repeated messages of the peer are rejected again for a while.
    pub(crate) fn enter_rejected(&mut self, now: Time, conn: ConnId) {
        self.enter(conn, State::Rejected);
        self.arm_time_wait(now, conn);
    }

    pub(crate) fn handle_rej(&mut self, now: Time, from: &Path, rej: &Rej) {
        // A peer whose REQ has timed out may not know our communication ID: then its own ID identifies the connection.
        let conn = match rej.remote_comm_id {
            0 => self.requests.get(&(from.remote, rej.local_comm_id)).copied(),
            id => self.find_from_peer(id, (rej.local_comm_id != 0).then_some(rej.local_comm_id), from),
        };
        let Some(conn) = conn else { return };
        let Some(connection) = self.connections.get(&conn) else { return };
        let state = connection.state;
        // Once each end knows the other's communication ID, a REJ must carry both.
        let may_lack_an_id = match rej.remote_comm_id {
            // The peer has had no REP.
            0 => matches!(state, State::ReqReceived | State::RepSent),
            _ => !matches!(state, State::RepReceived | State::RepSent | State::Established),
        };
        let has_both_ids = rej.remote_comm_id != 0 && rej.local_comm_id == connection.remote_id;
        if !may_lack_an_id && !has_both_ids {
            self.counters.unknown += 1;
            return;
        }
        let info = &rej.info[..usize::from(rej.info_len).min(Rej::INFO_BYTES)];
        let redirected = state == State::ReqSent && rej.reason == RejReason::PORT_AND_CM_REDIRECT;
        if redirected && self.follow_redirect(now, conn, info) {
            return;
        }
        let may_be_premature = rej.reason == RejReason::INVALID_SERVICE_ID && state == State::ReqSent;
        if may_be_premature && self.is_rejection_premature(conn, now) {
            // The timer repeats the REQ.
            return;
        }
        match state {
            State::ReqSent
            | State::RepReceived
            | State::ReqReceived
            | State::RepSent
            // The passive side timed out waiting for the RTU of a connection that is established here.
            | State::Established => {
                self.enter(conn, State::Rejected);
                self.arm_time_wait(now, conn);
                let private_data = rej.private_data.to_vec();
                self.queue_event(conn, EventKind::Rejected { reason: rej.reason, private_data });
            }
            State::DreqSent => {
                self.queue_event(conn, EventKind::Disconnected { timed_out: false });
                self.enter_time_wait(now, conn);
            }
            _ => {}
        }
    }

    /// Ends a connection, or acknowledges its end.
    ///
    /// # Errors
    /// `Unknown`; `State` when there is no connection to end.
    pub fn disconnect(&mut self, now: Time, conn: ConnId) -> Result<(), Error> {
        match self.get(conn)?.state {
            // As in the kernel: a passive side whose RTU was lost may end the connection, too.
            State::Established | State::RepSent => {
                self.send_dreq(now, conn);
                Ok(())
            }
            State::DreqReceived => {
                self.send_drep(now, conn);
                Ok(())
            }
            // The connection is ending already.
            State::DreqSent | State::TimeWait => Ok(()),
            _ => Err(Error::State),
        }
    }

    /// Releases a connection of the program, which gets no more events of it. The peer is notified if it still has the
    /// connection.
    pub fn destroy(&mut self, conn: ConnId, now: Time) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        connection.owner = None;
        match connection.state {
            State::ReqSent => {
                self.send_rej(conn, RejReason::TIMEOUT, &[]);
                self.enter_rejected(now, conn);
            }
            State::ReqReceived | State::RepReceived | State::RepSent => {
                self.send_rej(conn, RejReason::CONSUMER_DEFINED, &[]);
                self.enter_rejected(now, conn);
            }
            State::Established => self.send_dreq(now, conn),
            State::DreqReceived => self.send_drep(now, conn),
            State::SidrReqReceived => {
                let _ = self.reject_sidr_req(now, conn, &[]);
            }
            State::SidrReqSent => self.remove(conn),
            // The DREQ times out on its own.
            State::DreqSent => {}
            State::TimeWait | State::Rejected | State::SidrResolved => {
                if self.connections.get(&conn).is_some_and(|connection| connection.deadline.is_none()) {
                    self.remove(conn);
                }
            }
        }
    }

    /// Releases every connection when the process ends. Only [`Cm::resend_dreqs`] repeats a message afterwards.
    pub fn destroy_all(&mut self, now: Time) {
        let all: Vec<ConnId> = self.connections.keys().copied().collect();
        all.into_iter().for_each(|conn| self.destroy(conn, now));
    }

    /// Whether a DREQ is unanswered.
    pub fn has_unanswered_dreqs(&self) -> bool {
        self.connections.values().any(|connection| connection.state == State::DreqSent)
    }

    /// Repeats the unanswered DREQs before their timers expire, for a process that is about to end.
    pub fn resend_dreqs(&mut self) {
        let unanswered = |(conn, connection): (&ConnId, &Connection)| {
            (connection.state == State::DreqSent).then_some(*conn)
        };
        let unanswered: Vec<ConnId> = self.connections.iter().filter_map(unanswered).collect();
        unanswered.into_iter().for_each(|conn| self.resend_last_message(conn));
    }

    fn send_dreq(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get(&conn) else { return };
        let dreq = Dreq {
            local_comm_id: conn.0,
            remote_comm_id: connection.remote_id,
            remote_qpn: connection.agreed.remote_qpn,
            private_data: [0; Dreq::PRIVATE_BYTES],
        };
        self.enter(conn, State::DreqSent);
        self.send_with_retries(now, conn, Message::Dreq(dreq), self.config.timing.dreq_attempts);
    }

    fn send_drep(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get(&conn) else { return };
        let drep = Drep {
            local_comm_id: conn.0,
            remote_comm_id: connection.remote_id,
            private_data: [0; Drep::PRIVATE_BYTES],
        };
        self.send_message(conn, Message::Drep(drep));
        self.enter_time_wait(now, conn);
    }

    pub(crate) fn enter_time_wait(&mut self, now: Time, conn: ConnId) {
        self.enter(conn, State::TimeWait);
        self.arm_time_wait(now, conn);
    }

    pub(crate) fn handle_dreq(&mut self, now: Time, from: &Path, tid: u64, dreq: &Dreq) {
        let Some(conn) = self.find_from_peer(dreq.remote_comm_id, Some(dreq.local_comm_id), from) else {
            return self.answer_unknown_dreq(from, tid, dreq);
        };
        let Ok(connection) = self.get(conn) else { return };
        if dreq.remote_qpn == NO_QPN && matches!(connection.state, State::TimeWait | State::Rejected) {
            return self.send_stateless_drep(from, tid, dreq);
        }
        // The DREQ belongs to an older connection with the same communication IDs, or is a keepalive probe.
        if dreq.remote_qpn != connection.agreed.local_qpn {
            self.counters.unknown += 1;
            return;
        }
        match connection.state {
            State::Established | State::RepSent => {
                connection.tid = tid;
                self.enter(conn, State::DreqReceived);
                self.queue_event(conn, EventKind::Disconnected { timed_out: false });
            }
            // Both ends have sent a DREQ: neither needs an event from the other.
            State::DreqSent => {
                self.send_stateless_drep(from, tid, dreq);
                self.queue_event(conn, EventKind::Disconnected { timed_out: false });
                self.enter_time_wait(now, conn);
            }
            // A program may keep its ID of an ended connection beyond TIME_WAIT.
            State::TimeWait | State::Rejected => {
                self.counters.duplicates += 1;
                self.send_stateless_drep(from, tid, dreq);
            }
            // The program has not acknowledged the end yet.
            State::DreqReceived => self.counters.duplicates += 1,
            _ => {}
        }
    }

    fn send_stateless_drep(&mut self, to: &Path, tid: u64, dreq: &Dreq) {
        let drep = Drep {
            local_comm_id: dreq.remote_comm_id,
            remote_comm_id: dreq.local_comm_id,
            private_data: [0; Drep::PRIVATE_BYTES],
        };
        self.transmit(*to, Mad { tid, message: Message::Drep(drep) }.encode());
    }

    /// Answers a DREQ of an unknown connection, so that the peer does not wait for its timeout.
    fn answer_unknown_dreq(&mut self, to: &Path, tid: u64, dreq: &Dreq) {
        self.send_stateless_drep(to, tid, dreq);
    }

    pub(crate) fn handle_drep(&mut self, now: Time, from: &Path, drep: &Drep) {
        let Some(conn) = self.find_from_peer(drep.remote_comm_id, Some(drep.local_comm_id), from) else {
            return;
        };
        match self.connections.get(&conn).map(|connection| connection.state) {
            Some(State::DreqSent) => {
                self.queue_event(conn, EventKind::Disconnected { timed_out: false });
                self.enter_time_wait(now, conn);
            }
            Some(State::Established) => self.end_lost_connection(now, conn),
            _ => self.counters.duplicates += 1,
        }
    }

    /// Drops a half-open connection whose peer starts another one.
    pub(crate) fn drop_half_open(&mut self, now: Time, conn: ConnId) {
        self.enter_rejected(now, conn);
        let (reason, private_data) = (RejReason::STALE_CONNECTION, Vec::new());
        self.queue_event(conn, EventKind::Rejected { reason, private_data });
    }
}
