//! Handling of ACKs, NAKs, READ responses and atomic results, and loss detection from their order.

use terrace_wire::{NakCode, Operation, Packet, Psn, Syndrome, Time};

use super::operations::{Answer, Row};
use super::wqe::Wqe;
use super::{Requester, complete_success};
use crate::common::{Call, Common, Verdict};
use crate::host::Host;
use crate::timers::rnr_timer_ns;
use crate::types::{ATOMIC_LEN, QpState, WcStatus};

/// An RNR retry count of 7 means infinite (IBTA volume 1, 9.7.5).
const RNR_RETRY_INFINITE: u8 = 7;

impl Requester {
    pub(crate) fn handle_answer(
        &mut self,
        now: &impl Fn() -> Time,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Verdict {
        match packet.bth.opcode.info().operation {
            Operation::Acknowledge => match packet.ext.aeth.map(|aeth| aeth.syndrome) {
                Some(Syndrome::Ack { .. }) => self.handle_ack(now, call, packet.bth.psn),
                Some(Syndrome::RnrNak { timer }) => self.handle_rnr(now(), call, packet.bth.psn, timer),
                Some(Syndrome::Nak(code)) => self.handle_nak(now(), call, packet.bth.psn, code),
                None => self.drop_packet(call),
            },
            Operation::ReadResponse => self.handle_response(now(), call, packet, packet.payload),
            Operation::AtomicAcknowledge => {
                let value = packet.ext.atomic_ack.unwrap_or(0).to_ne_bytes();
                self.handle_response(now(), call, packet, &value)
            }
            _ => self.drop_packet(call),
        }
    }

    fn drop_packet(&self, common: &mut Common) -> Verdict {
        common.counters.dropped += 1;
        Verdict::Fine
    }

    /// The fast path of [`Requester::handle_ack`]: completes everything in the send queue, if this ACK acknowledges all
    /// of it. Otherwise it changes nothing.
    #[inline(always)]
    pub(crate) fn acknowledge_all<H: Host>(&mut self, call: &Call<'_, H>, psn: Psn) -> bool {
        let is_all = H::HAS_FAST_PATHS
            && psn.next() == self.psn(self.next)
            && self.next > self.acknowledged
            && self.is_caught_up()
            && call.attr.state == QpState::Rts;
        if is_all {
            self.window.on_acknowledged(self.in_flight_bytes, call.mtu());
            self.in_flight_bytes = 0;
            self.acknowledged = self.next;
            self.gap_repaired_at = None;
            self.ack_deadline = None;
            self.reset_retries(call);
            for wqe in self.queue.iter() {
                complete_success(call, &wqe.wr, call.host);
            }
            self.queue.retire_all();
        }
        is_all
    }

    /// The same for an ACK of the first packets, if nothing in flight expects a response: one pass over the queue.
    fn acknowledge_first<H: Host>(&mut self, now: &impl Fn() -> Time, call: &Call<'_, H>, psn: Psn) -> bool {
        let Some(last) = self.in_flight(psn) else { return false };
        let is_usual = H::HAS_FAST_PATHS && self.is_caught_up() && call.attr.state == QpState::Rts;
        if is_usual {
            let (to, mtu) = (last + 1, call.mtu());
            let (mut freed, mut done) = (0, 0);
            for wqe in self.queue.iter() {
                if !wqe.is_local() && wqe.first < to {
                    freed += wqe.cost(wqe.first.max(self.acknowledged), wqe.end().min(to), mtu);
                }
                if !wqe.is_done(to) {
                    break;
                }
                complete_success(call, &wqe.wr, call.host);
                done += 1;
            }
            self.queue.retire(done);
            self.in_flight_bytes = self.in_flight_bytes.saturating_sub(freed);
            self.window.on_acknowledged(freed, mtu);
            self.acknowledged = to;
            self.gap_repaired_at = None;
            self.reset_retries(call);
            self.restart_ack_timer(now(), call);
        }
        is_usual
    }

    /// An ACK covers all packets up to its PSN but cannot replace response data: a READ response or an
    /// atomic result before its PSN was lost (IBTA volume 1, 9.7.5).
    pub(crate) fn handle_ack(
        &mut self,
        now: &impl Fn() -> Time,
        call: &mut Call<'_, impl Host>,
        psn: Psn,
    ) -> Verdict {
        if self.acknowledge_all(call, psn) || self.acknowledge_first(now, call, psn) {
            return Verdict::Fine;
        }
        let Some(sequence) = self.in_flight(psn) else {
            call.counters.duplicates += 1;
            return Verdict::Fine;
        };
        let response_lost = self.acknowledge(now(), call, sequence + 1);
        let verdict = self.retire(call);
        if verdict == Verdict::Fine && response_lost { self.repair_gap(now(), call) } else { verdict }
    }

    /// Acknowledges the packets before `end` up to the first one that expects a response. Returns whether there is one.
    fn acknowledge(&mut self, now: Time, common: &mut Common, end: u64) -> bool {
        let unanswered = self
            .queue
            .iter()
            .take_while(|wqe| wqe.is_local() || (wqe.started && wqe.first < end))
            .find(|wqe| !wqe.is_local() && wqe.expects_response() && wqe.end() > self.acknowledged)
            .map(|wqe| wqe.first_response().max(self.acknowledged))
            .filter(|mark| *mark < end);
        self.advance(now, common, unanswered.unwrap_or(end));
        unanswered.is_some()
    }

    /// Moves the acknowledged mark forward, and updates the state that depends on it.
    fn advance(&mut self, now: Time, common: &mut Common, to: u64) {
        if to <= self.acknowledged {
            return;
        }
        let mtu = common.mtu();
        let mut freed = 0;
        for wqe in self.queue.iter().filter(|wqe| !wqe.is_local()) {
            if !wqe.started || wqe.first >= to {
                break;
            }
            let from = wqe.first.max(self.acknowledged);
            let stop = wqe.end().min(to);
            if stop > from {
                freed += wqe.cost(from, stop, mtu);
            }
        }
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(freed);
        self.window.on_acknowledged(freed, mtu);
        self.acknowledged = to;
        while self.responses_due.front().is_some_and(|due| *due <= to) {
            self.responses_due.pop_front();
        }
        for boundaries in [&mut self.read_boundaries, &mut self.first_read_boundaries] {
            while boundaries.front().is_some_and(|boundary| *boundary <= to) {
                boundaries.pop_front();
            }
        }
        if self.next < to {
            // An answer to a packet that was about to be retransmitted.
            self.next = to;
            self.in_flight_bytes = 0;
            let done = self.queue.iter().take_while(|wqe| wqe.is_done(to)).count();
            self.queue.go_behind(done);
        }
        if self.next == to {
            self.in_flight_bytes = 0;
        }
        self.gap_repaired_at = None;
        self.paused_until = None;
        self.reset_retries(common);
        self.restart_ack_timer(now, common);
    }

    /// A packet between the acknowledged mark and the PSN that the peer answered was lost: retransmits from the mark,
    /// once. This costs a retry unless a timeout has cost one for the same loss.
    fn repair_gap(&mut self, now: Time, call: &mut Call<'_, impl Host>) -> Verdict {
        if self.gap_repaired_at == Some(self.acknowledged) {
            return Verdict::Fine;
        }
        self.gap_repaired_at = Some(self.acknowledged);
        self.window.on_congestion(call.mtu());
        if self.timed_out_at == Some(self.acknowledged) {
            self.retransmit(now, call);
            return Verdict::Fine;
        }
        self.retry(now, call)
    }

    fn handle_rnr(&mut self, now: Time, call: &mut Call<'_, impl Host>, psn: Psn, timer: u8) -> Verdict {
        let Some(sequence) = self.in_flight(psn) else { return self.drop_packet(call) };
        call.counters.rnr_naks_received += 1;
        let response_lost = self.acknowledge(now, call, sequence);
        let verdict = self.retire(call);
        if verdict != Verdict::Fine {
            return verdict;
        }
        if response_lost {
            return self.repair_gap(now, call);
        }
        if self.paused_until.is_some() {
            // This attempt was refused already: the network duplicated the NAK or the packet.
            return Verdict::Fine;
        }
        if self.rnr_retries_left == 0 {
            return self.fail_front(call, WcStatus::RnrRetryExceeded, 0);
        }
        if call.attr.rnr_retry != RNR_RETRY_INFINITE {
            self.rnr_retries_left -= 1;
        }
        // The peer answers, so its RNR NAKs use the RNR retry count, not the transport retry count.
        self.retries_left = call.attr.retry_cnt;
        self.postponed_since = None;
        self.go_back();
        self.paused_until = Some(now.after_ns(rnr_timer_ns(timer)));
        self.restart_ack_timer(now.after_ns(rnr_timer_ns(timer)), call);
        Verdict::Fine
    }

    fn handle_nak(&mut self, now: Time, call: &mut Call<'_, impl Host>, psn: Psn, code: NakCode) -> Verdict {
        let Some(sequence) = self.in_flight(psn) else { return self.drop_packet(call) };
        if code == NakCode::PsnSequence {
            call.counters.sequence_naks_received += 1;
        } else {
            call.counters.error_naks_received += 1;
        }
        let response_lost = self.acknowledge(now, call, sequence);
        let verdict = self.retire(call);
        if verdict != Verdict::Fine {
            return verdict;
        }
        if code == NakCode::PsnSequence && self.paused_until.is_some() {
            // After an RNR NAK some responders refuse the packets behind it, too. All are retransmitted after the RNR
            // wait.
            return Verdict::Fine;
        }
        if response_lost || code == NakCode::PsnSequence {
            return self.repair_gap(now, call);
        }
        let status = match code {
            NakCode::RemoteAccess => WcStatus::RemoteAccess,
            NakCode::RemoteOperation => WcStatus::RemoteOperation,
            _ => WcStatus::RemoteInvalidRequest,
        };
        self.fail_front(call, status, 0x60 | code as u32)
    }

    /// READ data, the result of an atomic or an APPEND, or the empty response to a FLUSH or an ATOMIC WRITE. It
    /// acknowledges all packets before itself.
    fn handle_response(
        &mut self,
        now: Time,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: &[u8],
    ) -> Verdict {
        let Some(sequence) = self.in_flight(packet.bth.psn) else {
            call.counters.duplicates += 1;
            return Verdict::Fine;
        };
        let Some(first) = self.response_owner(sequence) else { return self.drop_packet(call) };
        let response_lost = self.acknowledge(now, call, first);
        let verdict = self.retire(call);
        if verdict != Verdict::Fine {
            return verdict;
        }
        if response_lost || sequence != self.acknowledged {
            return self.repair_gap(now, call);
        }
        if packet.ext.aeth.is_some_and(|aeth| !matches!(aeth.syndrome, Syndrome::Ack { .. })) {
            return self.fail_front(call, WcStatus::BadResponse, 0);
        }
        match self.take_response(call, sequence, packet.bth.opcode.info().operation, data, call.host) {
            Ok(()) => {
                self.advance(now, call, sequence + 1);
                self.retire(call)
            }
            Err(status) => self.fail_front(call, status, 0),
        }
    }

    /// First sequence number at which the request of a response with this sequence number is answered so.
    fn response_owner(&self, sequence: u64) -> Option<u64> {
        self.queue
            .iter()
            .find(|wqe| wqe.started && !wqe.is_local() && wqe.first <= sequence && sequence < wqe.end())
            .filter(|wqe| wqe.expects_response() && wqe.first_response() <= sequence)
            .map(Wqe::first_response)
    }

    /// Places the data of one response for the request at the front.
    fn take_response(
        &self,
        common: &Common,
        sequence: u64,
        operation: Operation,
        data: &[u8],
        host: &impl Host,
    ) -> Result<(), WcStatus> {
        // The owner is at the front: retire() removed what was done. Only local operations can wait behind it.
        let wqe = self.queue.front().ok_or(WcStatus::BadResponse)?;
        let read = (sequence - wqe.first) * common.mtu();
        let (expected, expected_len, offset) = match Row::of(&wqe.wr.op).answer {
            Answer::Data => (Operation::ReadResponse, common.mtu().min(wqe.length - read), read),
            Answer::Value => (Operation::AtomicAcknowledge, ATOMIC_LEN.into(), 0),
            Answer::Offset => (Operation::AtomicAcknowledge, ATOMIC_LEN.into(), wqe.length),
            Answer::Empty => (Operation::ReadResponse, 0, 0),
            Answer::Ack => return Err(WcStatus::BadResponse),
        };
        if operation != expected || data.len() as u64 != expected_len {
            return Err(WcStatus::BadResponse);
        }
        match wqe.wr.payload.sges() {
            Some(sges) if !data.is_empty() => {
                host.scatter(sges, offset, data).map_err(|_| WcStatus::LocalProtection)
            }
            _ => Ok(()),
        }
    }
}
