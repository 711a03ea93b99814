//! Whether a peer still has a connection, which may be idle, while its process is killed.
//!
//! A DREQ for a queue pair that the connection does not have asks without harm: a CM that has the connection drops it, as it
//! drops what is left of an older connection with the same names (12.10.5; Linux's `cm_dreq_handler`); one that has not answers
//! with a DREP, and then the connection has ended here as well. So does the process that stands in for another at the standard
//! port. If nobody has the port, the host says so (ICMP port unreachable), which this crate's user hears of.
//!
//! Silence ends nothing: a process that is stopped says nothing, and a kernel's CM that has the connection does not answer.

use std::net::IpAddr;

use terrace_wire::Time;
use terrace_wire::cm::{Dreq, Mad, Message};

use crate::ConnId;
use crate::connection::{Connection, PeerQp, Repeat, State};
use crate::manager::{Cm, EventKind, Transmit};

/// The multicast number, which no queue pair has.
pub(crate) const NO_QPN: u32 = 0xff_ffff;

/// How often a peer is asked that is suspected to have forgotten the connection.
const SUSPECTED_PROBES: u32 = 4;

/// How many refusals in a row end a connection. One may be forged: who does not see the probe has to guess its port.
const REFUSALS_MAX: u8 = 3;

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

    /// A process of that host may have ended: those that have connections with this one are asked now.
    pub fn suspect_host(&mut self, now: Time, host: IpAddr) {
        let host = host.to_canonical();
        let suspects = self.standing_with(|peer| peer.path.remote.ip().to_canonical() == host);
        suspects.into_iter().for_each(|conn| self.suspect(now, conn));
    }

    /// A host has said that nobody has the UDP port that a probe was sent to.
    pub fn note_refused(&mut self, now: Time, host: IpAddr, port: u16) {
        let host = host.to_canonical();
        let is_it =
            |one: &Connection| one.path.remote.ip().to_canonical() == host && one.path.remote.port() == port;
        for conn in self.standing_with(is_it) {
            let Some(connection) = self.connections.get_mut(&conn) else { continue };
            connection.refusals += 1;
            if connection.refusals >= REFUSALS_MAX {
                self.note_forgotten(now, conn);
            } else {
                self.suspect(now, conn);
            }
        }
    }

    fn standing_with(&self, peer: impl Fn(&Connection) -> bool) -> Vec<ConnId> {
        let stands = |one: &Connection| one.state == State::Established && peer(one);
        self.connections.iter().filter(|(_, one)| stands(one)).map(|(conn, _)| *conn).collect()
    }

    /// The peer of a connection that stands is asked from time to time.
    pub(crate) fn keep_alive(&mut self, now: Time, conn: ConnId) {
        let next_ns = self.up_to_a_quarter_sooner(self.config.timing.keepalive_ns);
        self.set_deadline(conn, Some(now.after_ns(next_ns)));
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
        match connection.repeat.as_mut() {
            None => {
                connection.refusals = 0;
                self.keep_alive(now, conn);
            }
            Some(repeat) if repeat.attempts_left > 1 => {
                let interval_ns = repeat.interval_ns;
                (repeat.attempts_left, repeat.interval_ns) = (repeat.attempts_left - 1, interval_ns * 2);
                self.set_deadline(conn, Some(now.after_ns(interval_ns)));
            }
            Some(_) => {
                connection.repeat = None;
                self.keep_alive(now, conn);
            }
        }
        self.transmits.push_back(Transmit { path, bytes, is_probe: true });
    }

    /// The peer does not know the connection any more.
    pub(crate) fn note_forgotten(&mut self, now: Time, conn: ConnId) {
        self.tell(conn, EventKind::Disconnected { timed_out: false });
        self.enter_time_wait(now, conn);
    }
}
