//! Keepalive: finds out whether the peer still has a connection, which may be idle while the peer's process is killed.
//!
//! The probe is a DREQ for a queue pair that the connection does not have. A CM that has the connection drops it, as it
//! drops messages of an older connection with the same IDs (12.10.5; Linux's `cm_dreq_handler`). A CM without the
//! connection answers with a DREP, which ends the connection here as well. So does a process that stands in for another
//! at the standard port. If the port is closed, the host reports it (ICMP port unreachable) to this crate's user.
//!
//! Silence ends nothing: a stopped process sends nothing, and a kernel's CM that has the connection does not answer.

use std::net::IpAddr;

use terrace_wire::Time;
use terrace_wire::cm::{Dreq, Mad, Message};

use crate::connection::{Connection, PeerQp, Repeat, State};
use crate::ids::ConnId;
use crate::manager::{Cm, EventKind, Transmit};

/// The multicast number, which no queue pair has.
pub(crate) const NO_QPN: u32 = 0xff_ffff;

/// Probes of a peer that is suspected to have lost the connection.
const SUSPECTED_PROBES: u32 = 4;

/// Consecutive refusals that end a connection. A single one may be forged: an off-path attacker has to guess the
/// probe's port.
const REFUSALS_MAX: u8 = 3;

impl Cm {
    /// A peer reuses a queue pair that has a connection here. If the peer has lost that connection, it is stale
    /// (12.9.8.3.1). But the numbers could be forged by another host that knows them, so the peer is probed.
    pub(crate) fn suspect_stale(&mut self, now: Time, key: PeerQp) {
        let Some(&conn) = self.peer_qps.get(&key) else { return };
        match self.connections.get(&conn).map(|connection| connection.state) {
            Some(State::Established) => self.suspect(now, conn),
            Some(State::ReqReceived | State::RepSent) => self.drop_half_open(now, conn),
            // It is ending already.
            _ => drop(self.peer_qps.remove(&key)),
        }
    }

    /// Probes all peers on that host, one of whose processes may have ended.
    pub fn suspect_host(&mut self, now: Time, host: IpAddr) {
        let host = host.to_canonical();
        let suspects = self.standing_with(|peer| peer.path.remote.ip().to_canonical() == host);
        suspects.into_iter().for_each(|conn| self.suspect(now, conn));
    }

    /// Handles the refusal of a probe: the UDP port is closed.
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

    /// Schedules the next keepalive probe of an established connection.
    pub(crate) fn keep_alive(&mut self, now: Time, conn: ConnId) {
        let next_ns = self.up_to_a_quarter_sooner(self.config.timing.keepalive_ns);
        self.set_deadline(conn, Some(now.after_ns(next_ns)));
    }

    /// Probes now, and a few more times.
    fn suspect(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        if connection.repeat.is_none() {
            let interval_ns = self.config.timing.first_interval_ns;
            connection.repeat = Some(Repeat { attempts_left: SUSPECTED_PROBES, interval_ns });
            self.probe(now, conn);
        }
    }

    /// Probes the peer of an established connection.
    pub(crate) fn probe(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        let dreq = Dreq {
            local_comm_id: conn.0,
            remote_comm_id: connection.remote_id,
            remote_qpn: NO_QPN,
            private_data: [0; Dreq::PRIVATE_BYTES],
        };
        // It must not replace the message that is repeated on request.
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

    /// Ends a connection that the peer does not have any more.
    pub(crate) fn note_forgotten(&mut self, now: Time, conn: ConnId) {
        self.tell(conn, EventKind::Disconnected { timed_out: false });
        self.enter_time_wait(now, conn);
    }
}
