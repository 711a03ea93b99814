//! Fast path for the common case: a message of one packet is sent before it is posted, and one ACK acknowledges all
//! that was sent. It has the same effects as the full requester. In all other cases it changes nothing.

use terrace_wire::{Bth, Extensions, Opcode, Psn, Time};

use super::wqe::Wqe;
use super::{Requester, is_signaled, success_entry};
use crate::common::{Common, push_packet};
use crate::host::{Host, Sink};
use crate::types::{QpState, QpType, SendFlags, SendOp, SendWr, Wc};
use crate::window::PACKET_OVERHEAD;

/// A send work request that is complete and has a completion.
pub struct Sent<'a> {
    common: &'a Common,
    wr: &'a SendWr,
}

impl Sent<'_> {
    /// Its completion.
    #[inline(always)] // Built in its destination.
    pub fn completion(&self) -> Wc {
        success_entry(self.common, self.wr)
    }
}

impl Requester {
    /// Whether every queued packet was sent and none is to be retransmitted: going back after a loss or an RNR NAK
    /// restarts at the queue's front.
    #[inline]
    fn is_caught_up(&self) -> bool {
        self.index == self.queue.len() && self.responses_due.is_empty()
    }

    /// Sends a request before it is posted, if it is a SEND of one packet that can be posted and sent now.
    /// The caller then calls [`Requester::note_sent`]; no state changes before that.
    #[inline]
    pub(crate) fn send_at_once(
        &self,
        common: &Common,
        host: &impl Host,
        sink: &mut impl Sink,
        wr: &SendWr,
    ) -> bool {
        let Some(path) = &common.attr.path else { return false };
        let length = wr.payload.len();
        let cap = &common.config.cap;
        let is_usual = wr.op == SendOp::Send
            && common.is(QpType::Rc)
            && common.attr.state == QpState::Rts
            && length <= common.mtu()
            && Requester::validate(common, wr).is_ok()
            && self.is_caught_up()
            && self.queue.len() < cap.max_send_wr as usize
            && self.window.admits(self.in_flight_bytes, length + PACKET_OVERHEAD)
            && host.admits(self.in_flight_bytes);
        if !is_usual {
            return false;
        }
        let solicited = wr.flags.contains(SendFlags::SOLICITED);
        let bth = Bth { solicited, ack_request: true, ..common.bth(Opcode::RcSendOnly, self.psn(self.next)) };
        let pushed = push_packet(sink, path, bth, &Extensions::default(), length as usize, |out| {
            wr.payload.gather(host, 0, out)
        });
        // The full requester finds the error again and reports it.
        matches!(pushed, Ok(Some(_)))
    }

    /// Posts a request that was sent. Reads the clock only if needed.
    #[inline]
    pub(crate) fn note_sent(&mut self, now: impl FnOnce() -> Time, common: &mut Common, wr: SendWr) {
        let mut wqe = Wqe::new(wr, common.mtu());
        common.counters.tx_packets += 1;
        common.counters.tx_bytes +=
            Opcode::RcSendOnly.info().header_len as u64 + wqe.length.next_multiple_of(4);
        self.in_flight_bytes += wqe.length + PACKET_OVERHEAD;
        wqe.started = true;
        wqe.first = self.next;
        self.queue.push_back(wqe);
        self.next += 1;
        self.index += 1;
        self.assigned = self.next;
        self.highest = self.next;
        self.asked_until = self.next;
        if self.ack_deadline.is_none() {
            self.restart_ack_timer(now(), common);
        }
    }

    /// Whether this ACK covers all packets in flight and none of them expects response data.
    #[inline]
    pub(crate) fn is_usual_ack(&self, common: &Common, psn: Psn) -> bool {
        let end = self.next;
        psn.next() == self.psn(end)
            && end > self.acknowledged
            && common.attr.state == QpState::Rts
            && self.is_caught_up()
    }

    /// Handles an ACK for which [`Requester::is_usual_ack`] holds.
    #[inline]
    pub(crate) fn acknowledge_at_once(&mut self, common: &Common, mut tell: impl FnMut(Sent<'_>)) {
        self.window.on_acknowledged(self.in_flight_bytes, common.mtu());
        self.in_flight_bytes = 0;
        self.acknowledged = self.next;
        self.gap_repaired_at = None;
        self.ack_deadline = None;
        self.reset_retries(common);
        for wqe in &self.queue {
            if is_signaled(common, wqe.wr.flags) {
                tell(Sent { common, wr: &wqe.wr });
            }
        }
        self.queue.clear();
        self.index = 0;
    }
}
