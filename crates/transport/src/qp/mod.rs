//! A queue pair: requester, responder, their state machine, and the calls by which the
//! NIC drives them.
//!
//! | file | calls |
//! |---|---|
//! | this one | creating, modifying, errors, timers, what a caller may ask |
//! | `posting` | work requests that are queued |
//! | `direct` | work requests that the caller executes without packets |
//! | `arrival` | packets and runs of packets |
//! | `transmit` | what can be sent |

mod arrival;
mod direct;
mod posting;
mod transmit;

use terrace_wire::Time;

pub use self::arrival::{RUN_DATA_MAX, may_come_from};
pub use self::transmit::{AckPolicy, Transmit};
use crate::common::{Call, Common, Verdict};
use crate::host::{Host, RemoteError};
use crate::requester::Requester;
use crate::responder::{Responder, event_of};
use crate::state;
use crate::types::{ModifyError, QpAttr, QpAttrMask, QpConfig, QpCounters, QpEvent, QpState};

/// A queue pair. Call it under one lock, in any order; completions and events go to the [`Host`] of the call. After each
/// call that may have changed something, call [`Qp::poll_transmit`], and keep a timer for [`Qp::deadline`].
#[derive(Debug)]
pub struct Qp {
    common: Common,
    requester: Requester,
    responder: Responder,
    established: bool,
    cnp_due: bool,
    /// Time of the last congestion that led to a CNP.
    congestion_noted_at: Option<Time>,
}

impl Qp {
    /// A queue pair in RESET.
    pub fn new(config: QpConfig) -> Qp {
        let requester = Requester::new(config.window_bytes);
        let common = Common { config, attr: QpAttr::default(), counters: QpCounters::default() };
        Qp {
            common,
            requester,
            responder: Responder::default(),
            established: false,
            cnp_due: false,
            congestion_noted_at: None,
        }
    }

    /// The current state.
    pub fn state(&self) -> QpState {
        self.common.attr.state
    }

    /// Its counters.
    pub fn counters(&self) -> &QpCounters {
        &self.common.counters
    }

    /// Its creation parameters.
    pub fn config(&self) -> &QpConfig {
        &self.common.config
    }

    /// The attributes as set, except for the current state.
    pub fn attr(&self) -> &QpAttr {
        &self.common.attr
    }

    /// The current attributes; the PSNs are the next ones.
    pub fn query(&self) -> QpAttr {
        let mut attr = self.common.attr;
        attr.cur_state = attr.state;
        attr.rq_psn = self.responder.expected_psn().get();
        attr.sq_psn = self.requester.next_psn().get();
        attr.sq_draining = attr.state == QpState::Sqd && !self.requester.is_idle();
        attr
    }

    /// Changes attributes and state; on error it changes nothing.
    ///
    /// # Errors
    /// If the transition table has no such change, or a value is out of range.
    pub fn modify(&mut self, attr: &QpAttr, mask: QpAttrMask, host: &impl Host) -> Result<(), ModifyError> {
        let from = self.common.attr.state;
        let to = state::check(&self.common.config, from, attr, mask)?;
        state::apply(&mut self.common.attr, attr, mask);
        self.common.attr.state = to;
        match (from, to) {
            (_, QpState::Reset) => self.reset(),
            (QpState::Err, QpState::Err) => {}
            (_, QpState::Err) => {
                self.responder.stop_reading(&mut Call { common: &mut self.common, host });
                self.enter_error(host);
            }
            (QpState::Init, QpState::Rtr) => self.responder.start(&self.common),
            (QpState::Rtr, QpState::Rts) => self.requester.start(&self.common),
            (QpState::Sqd, QpState::Sqd) => self.requester.reset_retries(&self.common),
            (QpState::Rts, QpState::Sqd) => {
                self.common.attr.sq_draining = true;
                self.common.attr.en_sqd_async_notify &= mask.contains(QpAttrMask::EN_SQD_ASYNC_NOTIFY);
                self.note_drained(host);
            }
            _ => {}
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.requester.clear(&self.common);
        self.responder.clear();
        self.common.attr = QpAttr::default();
        self.established = false;
        self.cnp_due = false;
        self.congestion_noted_at = None;
    }

    /// Ends the connection as the responder does when it refuses a request for this reason: a protocol above the queue pair
    /// has refused one.
    pub fn refuse(&mut self, reason: RemoteError, host: &impl Host) {
        if !matches!(self.common.attr.state, QpState::Reset | QpState::Init) {
            self.apply(Verdict::ResponderFatal(event_of(reason.into())), host);
        }
    }

    fn enter_error(&mut self, host: &impl Host) {
        self.common.attr.state = QpState::Err;
        host.withdraw();
        let call = &mut Call { common: &mut self.common, host };
        self.requester.flush(call);
        self.responder.flush(call);
        self.cnp_due = false;
        if self.common.config.has_srq {
            host.raise(QpEvent::LastWqeReached);
        }
    }

    /// Changes the state as a call into the requester or responder requires.
    fn apply(&mut self, verdict: Verdict, host: &impl Host) {
        match verdict {
            Verdict::Fine => self.note_drained(host),
            Verdict::RequesterFatal if self.common.is_reliable() => {
                self.responder.stop_reading(&mut Call { common: &mut self.common, host });
                self.enter_error(host);
            }
            Verdict::RequesterFatal => self.common.attr.state = QpState::Sqe,
            // Responses that were pending when the queue pair failed may fail, too: no second event.
            Verdict::ResponderFatal(_) if self.common.attr.state == QpState::Err => {}
            Verdict::ResponderFatal(event) => {
                host.withdraw();
                host.raise(event);
                self.enter_error(host);
            }
        }
    }

    /// Ends the draining of the send queue once all started requests are acknowledged.
    fn note_drained(&mut self, host: &impl Host) {
        let attr = &mut self.common.attr;
        if attr.state == QpState::Sqd && attr.sq_draining && self.requester.is_idle() {
            attr.sq_draining = false;
            if attr.en_sqd_async_notify {
                host.raise(QpEvent::SqDrained);
            }
        }
    }

    /// Whether no request is in flight in RTS: those that are queued may go another way than those before.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.common.attr.state == QpState::Rts && self.requester.is_idle()
    }

    /// Sets whether no request may start while others are in flight. Once none is, the queue pair wants to transmit.
    pub fn set_draining(&mut self, is_draining: bool) {
        self.requester.set_draining(is_draining);
    }

    /// When [`Qp::handle_timeout`] is due next.
    pub fn deadline(&self) -> Option<Time> {
        self.requester.deadline()
    }

    /// Handles the timers that have expired by `now`; harmless when none has.
    pub fn handle_timeout(&mut self, now: Time, host: &impl Host) {
        let verdict = self.requester.handle_timeout(now, &mut Call { common: &mut self.common, host });
        self.apply(verdict, host);
    }

    /// Restarts the ACK timer, and takes nothing for lost. Called when the timer's packets have left later than they were
    /// made, and instead of a timeout while they wait to be sent: an unsent packet cannot be lost. Ten seconds after the
    /// first such call since the peer's last answer, the timer expires nevertheless: a network that takes no packets may
    /// be broken.
    pub fn postpone_ack_timeout(&mut self, now: Time) {
        self.requester.postpone_ack_timeout(now, &self.common);
    }

    /// A deferred access may have ended, or a buffer may be free for one: the next [`Qp::poll_transmit`]
    /// checks the deferred operations again.
    pub fn wake(&mut self) {
        self.responder.wake();
    }

    /// Whether [`Qp::poll_transmit`] has something to do: packets to send, or deferred operations to check.
    #[inline]
    pub fn wants_transmit(&self) -> bool {
        self.cnp_due || self.responder.wants_to_emit() || self.requester.wants_to_emit(&self.common)
    }

    /// Whether the only packet to send now is an ACK.
    #[inline]
    pub fn wants_only_to_acknowledge(&self) -> bool {
        self.holds_ack() && !self.cnp_due && !self.requester.wants_to_emit(&self.common)
    }

    /// Whether an ACK is the only pending response.
    #[inline]
    pub fn holds_ack(&self) -> bool {
        self.responder.wants_to_emit() && !self.responder.wants_to_emit_more_than_ack()
    }

    /// Request packets (for READs, response packets) that the peer has not answered.
    pub fn unacknowledged_packets(&self) -> u32 {
        self.requester.unacknowledged_packets()
    }

    /// Cost of the request packets in flight, including their overhead in a receive buffer.
    pub fn in_flight_bytes(&self) -> u64 {
        self.requester.in_flight_bytes()
    }

    /// Whether [`Host::budget`] blocks requests while nothing is in flight.
    pub fn is_blocked_by_budget(&self) -> bool {
        self.requester.is_blocked_by_budget()
    }

    /// Send work requests with packets still to send.
    pub fn queued_requests(&self) -> usize {
        self.requester.queued_requests()
    }

    /// Work requests in the send queue, and in the queue pair's own receive queue.
    pub fn queue_lengths(&self) -> (usize, usize) {
        (self.requester.len(), self.responder.receives_len())
    }

    /// Whether a request in the send queue has failed and waits for those before it. The queue pair enters an error state
    /// then, and flushes what is posted behind it.
    pub fn is_failing(&self) -> bool {
        self.requester.is_failing()
    }
}
