//! Work requests that are queued.

use terrace_wire::Time;

use super::Qp;
use crate::common::Call;
use crate::host::{Host, Sink};
use crate::requester::{self, Requester};
use crate::types::{PostError, QpState, RecvWr, SendWr, WcStatus};

impl Qp {
    /// Queues a send work request. [`Qp::poll_transmit`] sends it, but for an ordinary message that can leave now: with a
    /// pending ACK, if that can be piggybacked, it goes to `sink` at once. In an error state the request completes as
    /// flushed at once. Takes the request ([`SendWr::take`]) unless it fails. By value it would be copied before the
    /// message has left, and the copy would wait for the stores that made the request.
    ///
    /// # Errors
    /// If the queue is full, or the request does not fit the queue pair.
    #[inline]
    pub fn post_send<H: Host>(
        &mut self,
        now: impl Fn() -> Time,
        wr: &mut SendWr,
        host: &H,
        sink: &mut impl Sink,
    ) -> Result<(), PostError> {
        Requester::validate(&self.common, wr)?;
        let call = &mut Call { common: &mut self.common, host };
        if H::HAS_FAST_PATHS && self.requester.send_message(call, wr, sink) {
            self.responder.piggyback_ack(|psn| sink.carry_ack(psn));
            sink.flush();
            self.requester.queue_sent(now, call, wr.take());
            return Ok(());
        }
        self.queue_send(wr, host)
    }

    #[inline(never)]
    fn queue_send(&mut self, wr: &mut SendWr, host: &impl Host) -> Result<(), PostError> {
        if self.check_state()? {
            let call = &mut Call { common: &mut self.common, host };
            requester::complete(call, wr, WcStatus::Flushed, 0);
        } else if self.requester.len() >= self.common.config.cap.max_send_wr as usize {
            return Err(PostError::QueueFull);
        } else {
            self.requester.post(&self.common, wr.take());
        }
        Ok(())
    }

    /// Checks whether these work requests can all be queued.
    ///
    /// # Errors
    /// As for [`Qp::post_send`].
    pub fn check_sends(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        self.validate_sends(wrs)?;
        let flushes = self.check_state()?;
        let room = self.common.config.cap.max_send_wr as usize;
        if !flushes && wrs.len() > room.saturating_sub(self.requester.len()) {
            return Err(PostError::QueueFull);
        }
        Ok(())
    }

    /// Checks that each of these send work requests could be posted in this state, in an empty send queue.
    ///
    /// # Errors
    /// As for [`Qp::post_send`], without `QueueFull`.
    pub fn validate_sends(&self, wrs: &[SendWr]) -> Result<(), PostError> {
        self.check_state()?;
        wrs.iter().try_for_each(|wr| Requester::validate(&self.common, wr))
    }

    /// Whether send work requests are flushed when they are posted in this state.
    #[inline]
    fn check_state(&self) -> Result<bool, PostError> {
        match self.common.attr.state {
            QpState::Reset | QpState::Init | QpState::Rtr => Err(PostError::BadState),
            QpState::Rts | QpState::Sqd => Ok(false),
            QpState::Err | QpState::Sqe => Ok(true),
        }
    }

    /// Queues a NOP, for which the caller has found room; completes it here and now if nothing is queued. In an error
    /// state it completes as flushed.
    pub fn post_nop(&mut self, wr: &mut SendWr, host: &impl Host) {
        let call = &mut Call { common: &mut self.common, host };
        match call.attr.state {
            QpState::Rts | QpState::Sqd if self.requester.len() == 0 => {
                requester::complete(call, wr, WcStatus::Success, 0);
            }
            QpState::Rts | QpState::Sqd => self.requester.post(call, wr.take()),
            _ => requester::complete(call, wr, WcStatus::Flushed, 0),
        }
    }

    /// Queues a request that fails with this status, when all before it are complete.
    pub fn post_failed(&mut self, wr: &mut SendWr, status: WcStatus, host: &impl Host) {
        let call = &mut Call { common: &mut self.common, host };
        let verdict = self.requester.post_failed(call, wr.take(), status);
        self.apply(verdict, host);
    }

    /// Completes as flushed a receive work request that the host keeps, and does not give out any more.
    pub fn flush_receive(&mut self, wr_id: u64, host: &impl Host) {
        Call { common: &mut self.common, host }.fail_receive(wr_id, 0, WcStatus::Flushed);
    }

    /// Queues a receive work request. In the error state it completes as flushed at once.
    ///
    /// # Errors
    /// If the queue is full, the queue pair has no receive queue of its own, or it is in RESET.
    #[inline]
    pub fn post_recv(&mut self, wr: RecvWr, host: &impl Host) -> Result<(), PostError> {
        let has_queue = self.common.config.qp_type.has_receives() && !self.common.config.has_srq;
        if !has_queue || self.common.attr.state == QpState::Reset {
            return Err(PostError::BadState);
        }
        if wr.sges.len() > self.common.config.cap.max_recv_sge as usize {
            return Err(PostError::TooManySges);
        }
        if self.common.attr.state == QpState::Err {
            Call { common: &mut self.common, host }.fail_receive(wr.wr_id, 0, WcStatus::Flushed);
            return Ok(());
        }
        if self.responder.receives_len() >= self.common.config.cap.max_recv_wr as usize {
            return Err(PostError::QueueFull);
        }
        self.responder.post(wr);
        Ok(())
    }
}
