//! The shortest way for what connections mostly do: a message that fits into one packet leaves as it is posted, and all that has left is
//! acknowledged at once. What is done here is what is done elsewhere in the requester; where anything is out of the ordinary,
//! nothing is done here.

use terrace_wire::{Bth, Extensions, Opcode, Psn};

use super::emit::gather;
use super::{Requester, complete};
use crate::common::{Common, push_packet};
use crate::host::{Host, Sink};
use crate::types::{QpState, QpType, SendFlags, SendOp, Time, WcStatus};
use crate::window::PACKET_OVERHEAD;

impl Requester {
    /// Whether everything in the queue has left but for the last `waiting`, and nothing of it is to leave again: whoever goes back for a
    /// loss, or waits for a receive, begins at the queue's front.
    #[inline]
    fn is_caught_up(&self, waiting: usize) -> bool {
        self.index + waiting == self.queue.len()
    }

    /// Sends the request that was posted just now, if it is a SEND of one packet that nothing keeps from leaving. Nothing has changed
    /// otherwise.
    #[inline]
    pub(crate) fn send_at_once(
        &mut self,
        now: impl FnOnce() -> Time,
        common: &mut Common,
        host: &impl Host,
        sink: &mut impl Sink,
    ) -> bool {
        let is_caught_up = self.is_caught_up(1) && self.responses_due.is_empty();
        let psn = self.psn(self.next);
        let Some(wqe) = self.queue.back_mut().filter(|_| is_caught_up) else { return false };
        let Some(path) = &common.attr.path else { return false };
        let cost = wqe.length + PACKET_OVERHEAD;
        let is_usual = wqe.wr.op == SendOp::Send
            && common.is(QpType::Rc)
            && common.attr.state == QpState::Rts
            && wqe.packets == 1
            && wqe.failed.is_none()
            && self.window.admits(self.in_flight_bytes, cost)
            && host.admits(self.in_flight_bytes);
        if !is_usual {
            return false;
        }
        let solicited = wqe.wr.flags.contains(SendFlags::SOLICITED);
        let bth = Bth { solicited, ack_request: true, ..common.bth(Opcode::RcSendOnly, psn) };
        let pushed = push_packet(sink, path, bth, &Extensions::default(), wqe.length as usize, |out| {
            gather(host, &wqe.wr.payload, 0, out)
        });
        // What is wrong will be found again, and told.
        let Ok(Some(len)) = pushed else { return false };
        common.counters.tx_packets += 1;
        common.counters.tx_bytes += len as u64;
        wqe.started = true;
        wqe.first = self.next;
        self.in_flight_bytes += cost;
        self.next += 1;
        self.index += 1;
        self.assigned = self.next;
        self.highest = self.next;
        self.asked_until = self.next;
        if self.ack_deadline.is_none() {
            self.restart_ack_timer(now(), common);
        }
        true
    }

    /// Takes the acknowledgement of everything that has left, if none of it is to be answered with data.
    #[inline]
    pub(crate) fn acknowledge_at_once(&mut self, common: &mut Common, psn: Psn) -> bool {
        let end = self.next;
        let is_usual = psn.next() == self.psn(end)
            && end > self.acknowledged
            && common.attr.state == QpState::Rts
            && self.is_caught_up(0)
            && self.responses_due.is_empty();
        if !is_usual {
            return false;
        }
        self.window.on_acknowledged(self.in_flight_bytes, common.mtu());
        self.in_flight_bytes = 0;
        self.acknowledged = end;
        self.gap_repaired_at = None;
        self.ack_deadline = None;
        self.reset_retries(common);
        for wqe in &self.queue {
            complete(common, &wqe.wr, WcStatus::Success, 0);
        }
        self.queue.clear();
        self.index = 0;
        true
    }
}
