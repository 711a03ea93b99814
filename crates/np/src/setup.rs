//! The setup of a session's control queue pair, and its end. `advance_link` sends the datagrams that are due,
//! `handle_joining` takes those of the peer, and `connect` ends the setup. `take_proof` learns whether a silent peer's device runs.

use std::sync::Arc;

use terrace_access::proto::{Body, Datagram, Endpoint, Join, Message, Status};
use terrace_access::region::Knowledge;
use terrace_nic::rc;
use terrace_nic::{Path, QpAttr, QpState, QueuePair, Time, WcStatus};

use crate::control::ControlQp;
use crate::link::{Due, LinkState};
use crate::session::{Joining, Session};
use crate::state::{State, break_queue_pair};

/// How long a peer that has not answered may send nothing before a probe is sent, in nanoseconds.
const PROBE_NS: u64 = 1_000_000_000;

impl State {
    /// Sends the datagrams that are due.
    pub fn advance_link(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        match self.link.poll(now) {
            Due::Nothing => {}
            Due::Test => {
                let outgoing = self.outgoing.as_mut();
                if !outgoing.is_some_and(|outgoing| outgoing.initiator.request_proof()) {
                    // No request waits any more. The next one that does begins anew.
                    self.link = LinkState::Idle;
                }
            }
            Due::Silent => {
                tracing::info!(qpn = qp.qpn(), "the peer has no NP-RDMA: its memory counts as present");
                self.make_plain(session);
            }
            Due::Unavailable => {
                tracing::warn!(
                    qpn = qp.qpn(),
                    "the peer's memory may be absent, and no session can be set up"
                );
                self.fail_link(session, qp, now);
            }
            Due::Send(tid) => {
                let attr = qp.query();
                let Some(end) = self.control_end(session, qp) else { return self.link.exclude_plain() };
                let Some(path) = attr.path else { return };
                let join = Join { from_qpn: qp.qpn(), to_qpn: attr.dest_qpn, end };
                session.service.send(&path, &Datagram::Join { tid, join });
            }
        }
    }

    /// Takes whether the peer's device has acknowledged what was posted to find out whether it runs. If it has not, the queue pair is in the
    /// error state, as it would be after the program's own request.
    pub fn take_proof(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        let Some(outgoing) = &mut self.outgoing else { return };
        match outgoing.initiator.take_proof() {
            None => {}
            Some(WcStatus::Success) => self.link.note_running(),
            Some(status) => {
                outgoing.initiator.fail_unfinished(status);
                if self.link.is_tested() {
                    self.fail_link(session, qp, now);
                }
            }
        }
    }

    /// Finds out whether the peer is still there, if it has not answered and has sent nothing for long. A peer that is gone
    /// does not acknowledge the probe, which ends the control queue pair.
    pub fn probe(&mut self, now: Time) {
        let has_calls =
            self.outgoing.as_ref().is_some_and(|outgoing| outgoing.initiator.calls_in_flight() > 0);
        let Some(control) = self.control.as_mut().filter(|control| control.is_connected()) else {
            return self.probe_at = None;
        };
        match self.probe_at {
            _ if !has_calls && !self.keys.is_asking() => self.probe_at = None,
            Some(at) if now < at => {}
            at => {
                if at.is_some() {
                    control.send(&Message { id: 0, body: Body::Probe }, false);
                }
                self.probe_at = Some(now.after_ns(PROBE_NS));
            }
        }
    }

    /// This end of the control queue pair, which is made if there is none.
    fn control_end(&mut self, session: &Session, qp: &Arc<QueuePair>) -> Option<Endpoint> {
        if self.control.is_none() {
            let cq = session.service.control_cqs.take(qp.pd().device());
            let is_lending = self.settings.is_reverse;
            match cq.and_then(|cq| ControlQp::new(qp.pd().device(), cq, is_lending)) {
                Ok(control) => {
                    session.service.set_control(control.qpn(), Some(session));
                    self.control = Some(control);
                }
                Err(error) => {
                    tracing::warn!(%error, qpn = qp.qpn(), "no control queue pair for a queue pair")
                }
            }
        }
        Some(self.control.as_ref()?.end())
    }

    pub fn handle_joining(&mut self, session: &Session, qp: &Arc<QueuePair>, joining: Joining) {
        let attr = qp.query();
        let is_connected = matches!(attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let is_peer = |path: &Path| {
            let ip = |path: &Path| path.remote.ip().to_canonical();
            is_connected && attr.path.is_some_and(|peer| ip(&peer) == ip(path))
        };
        match joining {
            // Without an answer the peer asks again, when this end may be connected.
            Joining::Asked { path, join, .. } if !is_peer(&path) || join.from_qpn != attr.dest_qpn => {}
            Joining::Asked { path, tid, join } => {
                let joined = match self.control_end(session, qp) {
                    Some(end) if self.connect(session, &attr, join.end) => Ok(end),
                    _ => {
                        self.link.exclude_plain();
                        Err(Status::Busy)
                    }
                };
                session.service.send(&path, &Datagram::Joined { tid, joined });
            }
            Joining::Answered { path, tid, joined } => {
                let is_awaited = matches!(self.link, LinkState::Joining { tid: own, .. } if own == tid);
                match joined {
                    _ if !is_awaited || !is_peer(&path) => {}
                    Ok(end) if self.connect(session, &attr, end) => {}
                    Err(Status::Plain) => self.make_plain(session),
                    _ => self.link.exclude_plain(),
                }
            }
        }
    }

    /// Connects the control queue pair with the peer's end, unless it is connected. True if it is connected with that end then. It is with
    /// another one if the peer's queue pair has been reset, and this end's has not yet: then the peer has to try again.
    fn connect(&mut self, session: &Session, attr: &QpAttr, peer: Endpoint) -> bool {
        let (Some(control), Some(path)) = (&mut self.control, attr.path) else { return false };
        if self.link == LinkState::Failed {
            return false;
        }
        if let Some(connected) = control.peer() {
            return connected == peer;
        }
        if let Err(error) = control.connect(path, peer, ack_timeout(attr)) {
            tracing::debug!(%error, qpn = session.qpn, "a control queue pair cannot be connected");
            return false;
        }
        self.link = LinkState::Connected;
        for rkey in self.keys.asked() {
            control.send(&Message { id: rkey.into(), body: Body::Describe(rkey) }, false);
        }
        true
    }

    /// The peer has no session.
    fn make_plain(&mut self, session: &Session) {
        self.link = LinkState::Plain;
        self.retire_control(session);
        for rkey in self.keys.take_asked() {
            if let Some(outgoing) = &mut self.outgoing {
                outgoing.initiator.handle_described(rkey, &Knowledge::Plain);
            }
        }
    }

    /// The control queue pair has failed: the peer is gone, or does not keep to the protocol.
    pub fn fail_link(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        if self.link == LinkState::Failed {
            return;
        }
        self.link = LinkState::Failed;
        self.retire_control(session);
        let is_busy = self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.initiator.is_empty());
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.initiator.fail_unfinished(WcStatus::RetryExceeded);
        }
        if is_busy || !self.target.is_empty() || !self.regions.is_empty() {
            // Without its control queue pair the queue pair would take signature pages for data. What is held for the peer is
            // released when its accesses have ended. A key that the peer knows may become another region's.
            break_queue_pair(qp);
        }
        self.fetching.clear();
        self.regions.clear(session, qp);
        for rkey in self.keys.take_asked() {
            if let Some(outgoing) = &mut self.outgoing {
                outgoing.initiator.handle_described(rkey, &Knowledge::Plain);
            }
        }
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.initiator.handle_peer_gone(now);
        }
        self.with_target(session, qp, |target, side| target.handle_peer_gone(side));
    }
}

/// The ACK timeout of a control queue pair beside the program's queue pair with these attributes.
fn ack_timeout(attr: &QpAttr) -> u8 {
    /// Of an end that answers, and has no timeout of its own: seven retries take 7.5 s.
    const TIMEOUT_OF_RESPONDER: u8 = 18;
    /// The longest: 2.4 hours.
    const TIMEOUT_MAX: u8 = 31;
    match attr.timeout {
        _ if attr.state == QpState::Rtr => TIMEOUT_OF_RESPONDER,
        // It waits for ever.
        0 => TIMEOUT_MAX,
        timeout => timeout.max(rc::TIMEOUT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_not_given_up_before_the_programs_queue_pair_gives_it_up() {
        let in_state = |state, timeout| ack_timeout(&QpAttr { state, timeout, ..QpAttr::default() });
        assert_eq!(in_state(QpState::Rts, 10), rc::TIMEOUT);
        assert_eq!(in_state(QpState::Rts, 19), 19);
        assert_eq!(in_state(QpState::Rts, 0), 31, "which waits for ever");
        assert_eq!(in_state(QpState::Rtr, 0), 18, "it is not set yet");
    }
}
