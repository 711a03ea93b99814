//! Keepalive: detects that the peer no longer has a connection, even if the connection was idle when the peer's process
//! was killed.
//!
//! The probe is a DREQ for a queue pair that the connection does not have. A CM that has the connection drops the
//! probe, as it drops messages of an older connection with the same IDs (12.10.5; Linux's `cm_dreq_handler`). A CM
//! without the connection answers with a DREP, which ends the connection on this side as well. A process that replaces
//! the peer at the standard port also answers with a DREP. If the port is closed, the peer's host sends an ICMP port
//! unreachable error, which this crate's user reports.
//!
//! A missing answer never ends a connection: a stopped process sends nothing, and a kernel's CM that has the connection
//! does not answer.

use std::net::IpAddr;

use terrace_wire::Time;
use terrace_wire::cm::{Dreq, Mad, Message};

use crate::connection::{Connection, PeerQp, Retransmission, State};
use crate::ids::ConnId;
use crate::manager::{Cm, EventKind, Transmit};

/// The multicast number, which no queue pair has.
pub(crate) const NO_QPN: u32 = 0xff_ffff;

/// Probes of a peer that is suspected to have lost the connection.
const SUSPECTED_PROBES: u32 = 4;

/// Consecutive ICMP errors that end a connection. A single one may be forged: an off-path attacker has to guess the
/// probe's port.
const PORT_UNREACHABLES_MAX: u8 = 3;

impl Cm {
    /// Handles the reuse of a peer's queue pair that has a connection here. The connection is stale if the peer has
    /// lost it (12.9.8.3.1). Another host could have forged the message, so the peer is probed.
    pub(crate) fn suspect_stale(&mut self, now: Time, key: PeerQp) {
        let Some(&conn) = self.peer_qps.get(&key) else { return };
        match self.connections.get(&conn).map(|connection| connection.state) {
            Some(State::Established) => self.suspect(now, conn),
            Some(State::ReqReceived | State::RepSent) => self.drop_half_open(now, conn),
            // The connection is ending already.
            _ => drop(self.peer_qps.remove(&key)),
        }
    }

    /// Probes all peers on a host. Called when one of the host's processes may have ended.
    pub fn suspect_host(&mut self, now: Time, host: IpAddr) {
        let host = host.to_canonical();
        let suspects = self.established_with(|peer| peer.path.remote.ip().to_canonical() == host);
        suspects.into_iter().for_each(|conn| self.suspect(now, conn));
    }

    /// Handles an ICMP port unreachable error for a probe: the UDP port is closed. The next probe follows soon: the host answers, and may have
    /// closed the port later than the first probe arrived.
    pub fn handle_port_unreachable(&mut self, now: Time, host: IpAddr, port: u16) {
        let host = host.to_canonical();
        let is_at_port =
            |one: &Connection| one.path.remote.ip().to_canonical() == host && one.path.remote.port() == port;
        for conn in self.established_with(is_at_port) {
            let Some(connection) = self.connections.get_mut(&conn) else { continue };
            connection.port_unreachables += 1;
            if connection.port_unreachables >= PORT_UNREACHABLES_MAX {
                self.end_lost_connection(now, conn);
            } else if let Some(retransmission) = connection.retransmission.as_mut() {
                let interval_ns = self.config.timing.first_interval_ns;
                retransmission.interval_ns = interval_ns;
                self.set_deadline(conn, Some(now.after_ns(interval_ns)));
            } else {
                self.suspect(now, conn);
            }
        }
    }

    fn established_with(&self, peer: impl Fn(&Connection) -> bool) -> Vec<ConnId> {
        let is_match = |one: &Connection| one.state == State::Established && peer(one);
        self.connections.iter().filter(|(_, one)| is_match(one)).map(|(conn, _)| *conn).collect()
    }

    /// Schedules the next keepalive probe of an established connection.
    pub(crate) fn keep_alive(&mut self, now: Time, conn: ConnId) {
        let next_ns = self.with_jitter(self.config.timing.keepalive_ns);
        self.set_deadline(conn, Some(now.after_ns(next_ns)));
    }

    /// Probes the peer immediately and a few more times.
    fn suspect(&mut self, now: Time, conn: ConnId) {
        let Some(connection) = self.connections.get_mut(&conn) else { return };
        if connection.retransmission.is_none() {
            let interval_ns = self.config.timing.first_interval_ns;
            connection.retransmission = Some(Retransmission { attempts_left: SUSPECTED_PROBES, interval_ns });
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
        // The probe must not replace `last_message`, which duplicates from the peer repeat.
        let bytes = Mad { tid: connection.tid, message: Message::Dreq(dreq) }.encode();
        let path = connection.path;
        match connection.retransmission.as_mut() {
            None => {
                connection.port_unreachables = 0;
                self.keep_alive(now, conn);
            }
            Some(retransmission) if retransmission.attempts_left > 1 => {
                let interval_ns = retransmission.interval_ns;
                (retransmission.attempts_left, retransmission.interval_ns) =
                    (retransmission.attempts_left - 1, interval_ns * 2);
                self.set_deadline(conn, Some(now.after_ns(interval_ns)));
            }
            Some(_) => {
                connection.retransmission = None;
                self.keep_alive(now, conn);
            }
        }
        self.transmits.push_back(Transmit { path, bytes, is_probe: true });
    }

    /// Ends a connection that the peer no longer has.
    pub(crate) fn end_lost_connection(&mut self, now: Time, conn: ConnId) {
        self.queue_event(conn, EventKind::Disconnected { timed_out: false });
        self.enter_time_wait(now, conn);
    }
}
