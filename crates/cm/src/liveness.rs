//! Whether a peer still has a connection.
//!
//! A DREQ for a queue pair that the connection does not have asks without harm: a CM that has the connection drops it, as it
//! drops what is left of an older connection with the same names (12.10.5; Linux's `cm_dreq_handler`); one that has not answers
//! with a DREP, and then the connection has ended here as well.

use terrace_transport::Time;
use terrace_wire::cm::{Dreq, Mad, Message};

use crate::ConnId;
use crate::connection::{PeerQp, Repeat, State};
use crate::manager::{Cm, EventKind};

/// The multicast number, which no queue pair has.
pub(crate) const NO_QPN: u32 = 0xff_ffff;

/// How often a peer is asked that is suspected to have forgotten the connection.
const SUSPECTED_PROBES: u32 = 4;

impl Cm {
    /// A peer uses a queue pair again that has a connection here. If the peer has forgotten that one, it is no more
    /// (12.9.8.3.1); but whoever knows the numbers can say so, so the peer is asked.
    pub(crate) fn suspect_stale(&mut self, now: Time, key: PeerQp) {
        let Some(&conn) = self.peer_qps.get(&key) else { return };
        match self.connections.get(&conn).map(|connection| connection.state) {
            Some(State::Established) => self.suspect(now, conn),
            Some(State::ReqReceived | State::RepSent) => self.drop_half_open(now, conn),
            // It is ending already.
            _ => drop(self.peer_qps.remove(&key)),
        }
    }

    /// Asks now, and a few times more.
    fn suspect(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        if connection.repeat.is_none() {
            let interval_ns = self.config.timing.first_interval_ns;
            connection.repeat = Some(Repeat { attempts_left: SUSPECTED_PROBES, interval_ns });
            self.probe(now, conn);
        }
    }

    /// Asks the peer of a connection that stands.
    pub(crate) fn probe(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let dreq = Dreq {
            local_comm_id: conn.0,
            remote_comm_id: connection.remote_id,
            remote_qpn: NO_QPN,
            private_data: [0; Dreq::PRIVATE_BYTES],
        };
        // It is not what is repeated on request.
        let bytes = Mad { tid: connection.tid, message: Message::Dreq(dreq) }.encode();
        let path = connection.path;
        let next_ns = match connection.repeat.as_mut() {
            Some(repeat) if repeat.attempts_left > 1 => {
                let interval_ns = repeat.interval_ns;
                (repeat.attempts_left, repeat.interval_ns) = (repeat.attempts_left - 1, interval_ns * 2);
                Some(interval_ns)
            }
            _ => {
                connection.repeat = None;
                None
            }
        };
        self.set_deadline(conn, next_ns.map(|ns| now.after_ns(ns)));
        self.transmit(path, bytes);
    }

    /// The peer does not know the connection any more.
    pub(crate) fn note_forgotten(&mut self, now: Time, conn: ConnId) {
        self.tell(conn, EventKind::Disconnected { timed_out: false });
        self.enter_time_wait(now, conn);
    }
}
