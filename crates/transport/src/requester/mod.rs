//! The requester: executes the entries of the [`SendQueue`]. It segments work requests into packets within the window, and
//! completes them when the peer has answered. After a loss it goes back to the oldest unacknowledged packet (go-back-N).
//!
//! Packets are counted by 64-bit sequence numbers that never wrap. The 24-bit PSN is derived from them, so comparisons
//! need no wrap-around. Three marks move over the sequence:
//!
//! ```text
//!   acknowledged            next                 highest
//!   |---- in flight --------|-- to retransmit ---|---- never sent ---->
//! ```

mod answers;
mod emit;
mod operations;
mod send_queue;
mod wqe;

use std::collections::VecDeque;

use terrace_wire::{Psn, Time, XRC_SRQN_MAX};

use crate::common::{Call, Common, Verdict};
use crate::host::{Completion, Host};
use crate::timers::{ack_timeout_ns, backoff_ns};
use crate::types::{
    ATOMIC_LEN, Payload, PostError, QpType, RETRY_CNT_INFINITE, SendFlags, SendWr, Target, Wc, WcFlags,
    WcStatus,
};
use crate::window::Window;
use operations::{Answer, Suitable};
use send_queue::SendQueue;
use wqe::Wqe;

pub(crate) use emit::Emitted;
pub(crate) use operations::Row;

/// How long the ACK timer is postponed for a network that takes no packets, since the first time.
const POSTPONED_NS_MAX: u64 = 10_000_000_000;

#[derive(Debug)]
pub(crate) struct Requester {
    queue: SendQueue,
    /// PSN of sequence number 0.
    psn_base: Psn,
    /// Sequence number of the oldest unacknowledged packet.
    acknowledged: u64,
    /// Sequence number of the packet to send next; its request is the next entry of the queue.
    next: u64,
    /// One past the highest sequence number ever sent.
    highest: u64,
    /// First sequence number of the next request to start.
    assigned: u64,
    /// Cost of the packets between `acknowledged` and `next`.
    in_flight_bytes: u64,
    window: Window,
    /// Whether no request may start while others are in flight.
    is_draining: bool,
    /// Whether the host's in-flight budget refuses the oldest packet while nothing is in flight.
    blocked_by_budget: bool,
    /// One past the last packet, since the last go-back, that requests an answer (an ACK or a response).
    last_ack_request: u64,
    /// End sequence numbers of the READs and atomics in flight.
    responses_due: VecDeque<u64>,
    /// Boundaries of READ requests since the acknowledged mark, ascending. A responder accepts a repeated READ only as
    /// a part of one in its responder resources, so data of two requests must never be requested again in one.
    read_boundaries: VecDeque<u64>,
    /// The boundaries among them that first requests, not repetitions, made.
    first_read_boundaries: VecDeque<u64>,
    retries_left: u8,
    rnr_retries_left: u8,
    /// Since when the ACK timer has been postponed without an answer of the peer.
    postponed_since: Option<Time>,
    /// When the oldest packet counts as lost.
    ack_deadline: Option<Time>,
    /// Nothing is sent until then: RNR backoff, or the rate limit of an unreliable service.
    paused_until: Option<Time>,
    /// The acknowledged mark at which a gap was repaired: a gap is repaired once, later losses wait for the ACK timer.
    gap_repaired_at: Option<u64>,
    /// The acknowledged mark of the latest timeout: a gap there is the loss that the timeout has counted already.
    timed_out_at: Option<u64>,
}

impl Requester {
    pub(crate) fn new(window_bytes: u32) -> Requester {
        Requester {
            queue: SendQueue::new(),
            psn_base: Psn::default(),
            acknowledged: 0,
            next: 0,
            highest: 0,
            assigned: 0,
            in_flight_bytes: 0,
            last_ack_request: 0,
            window: Window::new(window_bytes),
            is_draining: false,
            blocked_by_budget: false,
            responses_due: VecDeque::new(),
            read_boundaries: VecDeque::new(),
            first_read_boundaries: VecDeque::new(),
            retries_left: 0,
            rnr_retries_left: 0,
            postponed_since: None,
            ack_deadline: None,
            paused_until: None,
            gap_repaired_at: None,
            timed_out_at: None,
        }
    }

    /// Sets the first PSN, in the transition to RTS.
    pub(crate) fn start(&mut self, common: &Common) {
        self.psn_base = Psn::new(common.attr.sq_psn).minus((self.assigned & 0xff_ffff) as u32);
        self.reset_retries(common);
    }

    /// First PSN of the next request to start.
    pub(crate) fn next_psn(&self) -> Psn {
        self.psn(self.assigned)
    }

    fn psn(&self, sequence: u64) -> Psn {
        self.psn_base.plus((sequence & 0xff_ffff) as u32)
    }

    /// The sequence number of a peer's PSN, if it is in flight.
    fn in_flight(&self, psn: Psn) -> Option<u64> {
        let distance = psn.since(self.psn(self.acknowledged));
        let sequence = self.acknowledged.checked_add_signed(i64::from(distance))?;
        (sequence >= self.acknowledged && sequence < self.highest).then_some(sequence)
    }

    pub(crate) fn reset_retries(&mut self, common: &Common) {
        self.retries_left = common.attr.retry_cnt;
        self.rnr_retries_left = common.attr.rnr_retry;
        self.postponed_since = None;
    }

    /// Queued work requests, sent or not.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether a queued request has failed, which completes when all before it are done.
    pub(crate) fn is_failing(&self) -> bool {
        self.queue.is_failing()
    }

    /// In-flight bytes with packet overhead.
    pub(crate) fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    /// Whether nothing is in flight because the host's in-flight budget does not admit it.
    pub(crate) fn is_blocked_by_budget(&self) -> bool {
        self.blocked_by_budget
    }

    pub(crate) fn unacknowledged_packets(&self) -> u32 {
        (self.next - self.acknowledged).min(u64::from(u32::MAX)) as u32
    }

    /// Requests with packets still to send.
    pub(crate) fn queued_requests(&self) -> usize {
        self.queue.to_execute_len()
    }

    /// Sets whether no request may start while others are in flight.
    pub(crate) fn set_draining(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
    }

    /// Whether no request is in flight. Requests may be queued.
    pub(crate) fn is_idle(&self) -> bool {
        self.acknowledged == self.assigned && self.queue.front().is_none_or(|wqe| !wqe.started)
    }

    #[inline(always)]
    pub(crate) fn validate(common: &Common, wr: &SendWr) -> Result<(), PostError> {
        let (config, row) = (&common.config, Row::of(&wr.op));
        match &wr.payload {
            Payload::Sge(_) if config.cap.max_send_sge == 0 => return Err(PostError::TooManySges),
            Payload::Sges(sges) if sges.len() > config.cap.max_send_sge as usize + row.result_sges() => {
                return Err(PostError::TooManySges);
            }
            // The operand of an ATOMIC WRITE is inline whatever the queue pair's max_inline_data.
            Payload::Inline(bytes)
                if bytes.len() > config.cap.max_inline_data as usize && row.payload != Suitable::Operand =>
            {
                return Err(PostError::TooMuchInline);
            }
            _ => {}
        }
        if !row.is_offered_by(config.qp_type) || !row.payload.admits(&wr.payload) {
            return Err(PostError::BadOpcode);
        }
        let knows_where = match config.qp_type {
            QpType::Ud => matches!(wr.target, Some(Target::Datagram(_))),
            QpType::XrcSend => matches!(wr.target, Some(Target::SharedQueue(0..=XRC_SRQN_MAX))),
            _ => true,
        };
        if !knows_where {
            return Err(PostError::NoTarget);
        }
        if wr.payload.len() > row.payload_len_max().into() { Err(PostError::TooLong) } else { Ok(()) }
    }

    /// Whether every queued packet was sent, none is to be retransmitted, and none expects response data. Going back
    /// after a loss or an RNR NAK restarts at the queue's front.
    #[inline]
    fn is_caught_up(&self) -> bool {
        self.queue.to_execute_len() == 0 && self.responses_due.is_empty()
    }

    /// Queues a validated request.
    #[inline]
    pub(crate) fn post(&mut self, common: &Common, wr: SendWr) {
        self.queue.post(Wqe::new(wr, common.mtu()));
    }

    /// Queues a request that fails when all before it are done.
    pub(crate) fn post_failed(
        &mut self,
        call: &mut Call<'_, impl Host>,
        wr: SendWr,
        status: WcStatus,
    ) -> Verdict {
        self.queue.post(Wqe { failed: Some(status), ..Wqe::new(wr, call.mtu()) });
        self.retire(call)
    }

    /// When `handle_timeout` is due.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.paused_until.or(self.ack_deadline)
    }

    pub(crate) fn handle_timeout(&mut self, now: Time, call: &mut Call<'_, impl Host>) -> Verdict {
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
            return Verdict::Fine;
        }
        if self.paused_until.is_some() || self.ack_deadline.is_none_or(|deadline| deadline > now) {
            return Verdict::Fine;
        }
        call.counters.timeouts += 1;
        self.gap_repaired_at = None;
        self.timed_out_at = Some(self.acknowledged);
        self.window.on_congestion(call.mtu());
        self.retry(now, call)
    }

    /// See [`Qp::postpone_ack_timeout`](crate::Qp::postpone_ack_timeout).
    pub(crate) fn postpone_ack_timeout(&mut self, now: Time, common: &Common) {
        if self.ack_deadline.is_some() {
            let since = *self.postponed_since.get_or_insert(now);
            if now.0.saturating_sub(since.0) < POSTPONED_NS_MAX {
                self.restart_ack_timer(now, common);
            }
        }
    }

    /// Goes back to the oldest unacknowledged packet, or fails the request when no retries are left.
    fn retry(&mut self, now: Time, call: &mut Call<'_, impl Host>) -> Verdict {
        if self.retries_left == 0 && call.attr.retry_cnt != RETRY_CNT_INFINITE {
            return self.fail_front(call, WcStatus::RetryExceeded, 0);
        }
        self.retries_left = self.retries_left.saturating_sub(1);
        self.retransmit(now, call);
        Verdict::Fine
    }

    /// Retransmits from the oldest unacknowledged packet on.
    fn retransmit(&mut self, now: Time, common: &Common) {
        self.go_back();
        self.restart_ack_timer(now, common);
    }

    fn go_back(&mut self) {
        self.next = self.acknowledged;
        self.queue.go_back();
        self.in_flight_bytes = 0;
        self.last_ack_request = self.acknowledged;
        self.responses_due.clear();
    }

    fn restart_ack_timer(&mut self, now: Time, common: &Common) {
        let waiting = self.highest > self.acknowledged;
        let retries_used = common.attr.retry_cnt.saturating_sub(self.retries_left);
        self.ack_deadline = match ack_timeout_ns(common.attr.timeout) {
            Some(timeout_ns) if waiting => Some(now.after_ns(backoff_ns(timeout_ns, retries_used))),
            _ => None,
        };
    }

    /// Completes the done requests at the front. A request that failed before it was sent fails the
    /// queue once all requests before it are done.
    fn retire(&mut self, call: &mut Call<'_, impl Host>) -> Verdict {
        while let Some(front) = self.queue.front() {
            if front.is_done(self.acknowledged) {
                complete(call, &front.wr, WcStatus::Success, 0);
                self.queue.pop();
            } else if let Some(status) = front.failed {
                return self.fail_front(call, status, 0);
            } else {
                break;
            }
        }
        Verdict::Fine
    }

    /// Completes the oldest request in error and flushes the rest.
    fn fail_front(&mut self, call: &mut Call<'_, impl Host>, status: WcStatus, vendor_err: u32) -> Verdict {
        if let Some(wqe) = self.queue.pop() {
            complete(call, &wqe.wr, status, vendor_err);
        }
        self.flush(call);
        Verdict::RequesterFatal
    }

    /// Completes all requests as flushed and drops all in-flight state.
    pub(crate) fn flush(&mut self, call: &mut Call<'_, impl Host>) {
        while let Some(wqe) = self.queue.pop() {
            complete(call, &wqe.wr, WcStatus::Flushed, 0);
        }
        self.drop_in_flight();
    }

    /// Drops everything without completions, as RESET does.
    pub(crate) fn clear(&mut self, common: &Common) {
        *self = Requester::new(common.config.window_bytes);
    }

    fn drop_in_flight(&mut self) {
        self.acknowledged = self.assigned;
        self.highest = self.assigned;
        self.go_back();
        self.blocked_by_budget = false;
        self.postponed_since = None;
        self.read_boundaries.clear();
        self.first_read_boundaries.clear();
        self.ack_deadline = None;
        self.paused_until = None;
        self.gap_repaired_at = None;
        self.timed_out_at = None;
    }

    pub(crate) fn on_congestion(&mut self, common: &Common) {
        self.window.on_congestion(common.mtu());
    }
}

/// Completes a request: with an entry for every error, otherwise if it is signaled.
pub(crate) fn complete(call: &Call<'_, impl Host>, wr: &SendWr, status: WcStatus, vendor_err: u32) {
    if status == WcStatus::Success {
        return complete_success(call, wr, call.host);
    }
    let entry = Succeeded { common: call, wr }.entry();
    call.host.withdraw();
    call.host.complete_send(Wc { status, vendor_err, solicited: true, ..entry });
}

/// Completes a successful request.
#[inline(always)]
pub(crate) fn complete_success(common: &Common, wr: &SendWr, host: &impl Host) {
    if common.config.sq_sig_all || wr.flags.contains(SendFlags::SIGNALED) {
        host.complete_send(Succeeded { common, wr });
    }
}

/// The completion of a successful request.
struct Succeeded<'a> {
    common: &'a Common,
    wr: &'a SendWr,
}

impl Completion for Succeeded<'_> {
    #[inline(always)]
    fn entry(self) -> Wc {
        let Succeeded { common, wr } = self;
        let row = Row::of(&wr.op);
        let byte_len = match row.answer {
            Answer::Value => ATOMIC_LEN,
            _ => row.data_len(&wr.payload).min(u64::from(u32::MAX)) as u32,
        };
        Wc {
            wr_id: wr.wr_id,
            status: WcStatus::Success,
            opcode: row.completion,
            vendor_err: 0,
            byte_len,
            imm: 0,
            qpn: common.config.qpn,
            src_qp: 0,
            srqn: 0,
            flags: WcFlags::empty(),
            sl: 0,
            solicited: false,
        }
    }
}
