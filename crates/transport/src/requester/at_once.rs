//! The shortest way for what connections mostly do: a message that fits into one packet leaves before it is posted, and all that has
//! left is acknowledged at once. What is done here is what is done elsewhere in the requester; where anything is out of the ordinary,
//! nothing is done here.

use terrace_wire::{Bth, Extensions, Opcode, Psn, Time};

use super::wqe::Wqe;
use super::{Requester, is_signaled, success_entry};
use crate::common::{Common, push_packet};
use crate::host::{Host, SendRequest, Sink};
use crate::types::{QpState, QpType, SendFlags, SendOp, SendWr, Wc};
use crate::window::PACKET_OVERHEAD;

/// A send work request that is complete, and says so.
pub struct Sent<'a> {
    common: &'a Common,
    wr: &'a SendWr,
}

impl Sent<'_> {
    /// What it says.
    #[inline(always)] // Made where it goes.
    pub fn completion(&self) -> Wc {
        success_entry(self.common, self.wr)
    }
}

impl Requester {
    /// Whether everything in the queue has left, and nothing of it is to leave again: whoever goes back for a loss, or waits for a
    /// receive, begins at the queue's front.
    #[inline]
    fn is_caught_up(&self) -> bool {
        self.index == self.queue.len() && self.responses_due.is_empty()
    }

    /// Sends a request that was not posted yet, if it is a SEND of one packet that nothing keeps from being posted and from leaving:
    /// then comes [`Requester::note_sent`]. Nothing has changed until then.
    #[inline]
    pub(crate) fn send_at_once(
        &self,
        common: &Common,
        host: &impl Host,
        sink: &mut impl Sink,
        wr: &impl SendRequest,
    ) -> bool {
        let Some(path) = &common.attr.path else { return false };
        let length = wr.length();
        let cap = &common.config.cap;
        let is_usual = *wr.op() == SendOp::Send
            && common.is(QpType::Rc)
            && common.attr.state == QpState::Rts
            && length <= common.mtu()
            && wr.fits(cap)
            && self.is_caught_up()
            && self.queue.len() < cap.max_send_wr as usize
            && self.window.admits(self.in_flight_bytes, length + PACKET_OVERHEAD)
            && host.admits(self.in_flight_bytes);
        if !is_usual {
            return false;
        }
        let solicited = wr.flags().contains(SendFlags::SOLICITED);
        let bth = Bth { solicited, ack_request: true, ..common.bth(Opcode::RcSendOnly, self.psn(self.next)) };
        let pushed =
            push_packet(sink, path, bth, &Extensions::default(), length as usize, |out| wr.gather(host, out));
        // What is wrong will be found again, and told.
        matches!(pushed, Ok(Some(_)))
    }

    /// Posts a request that has left. The time is asked for if it is needed.
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

    /// Whether this acknowledges everything that has left, and none of it is to be answered with data.
    #[inline]
    pub(crate) fn is_usual_ack(&self, common: &Common, psn: Psn) -> bool {
        let end = self.next;
        psn.next() == self.psn(end)
            && end > self.acknowledged
            && common.attr.state == QpState::Rts
            && self.is_caught_up()
    }

    /// Takes such an acknowledgement.
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
