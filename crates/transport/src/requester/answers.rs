//! Handling of ACKs, NAKs, READ responses and atomic results, and loss detection from their order.

use terrace_wire::{NakCode, Operation, Packet, Psn, Syndrome, Time};

use super::Requester;
use super::operations::{Answer, Row};
use crate::common::{Common, Verdict};
use crate::host::Host;
use crate::timers::rnr_timer_ns;
use crate::types::{ATOMIC_LEN, WcStatus};

/// An RNR retry count of 7 means infinite (IBTA volume 1, 9.7.5).
const RNR_RETRY_FOR_EVER: u8 = 7;

impl Requester {
    pub(crate) fn handle_answer(
        &mut self,
        now: Time,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Verdict {
        match packet.bth.opcode.info().operation {
            Operation::Acknowledge => match packet.ext.aeth.map(|aeth| aeth.syndrome) {
                Some(Syndrome::Ack { .. }) => self.handle_ack(now, common, packet.bth.psn),
                Some(Syndrome::RnrNak { timer }) => self.handle_rnr(now, common, packet.bth.psn, timer),
                Some(Syndrome::Nak(code)) => self.handle_nak(now, common, packet.bth.psn, code),
                None => self.drop_packet(common),
            },
            Operation::ReadResponse => self.handle_response(now, common, packet, packet.payload, host),
            Operation::AtomicAcknowledge => {
                let value = packet.ext.atomic_ack.unwrap_or(0).to_ne_bytes();
                self.handle_response(now, common, packet, &value, host)
            }
            _ => self.drop_packet(common),
        }
    }

    fn drop_packet(&self, common: &mut Common) -> Verdict {
        common.counters.dropped += 1;
        Verdict::Fine
    }

    /// An ACK covers all packets up to its PSN but cannot replace response data: a READ response or an
    /// atomic result before its PSN was lost (IBTA volume 1, 9.7.5).
    pub(crate) fn handle_ack(&mut self, now: Time, common: &mut Common, psn: Psn) -> Verdict {
        let Some(sequence) = self.in_flight(psn) else {
            common.counters.duplicates += 1;
            return Verdict::Fine;
        };
        let response_lost = self.acknowledge(now, common, sequence + 1);
        let verdict = self.retire(common);
        if verdict == Verdict::Fine && response_lost { self.repair_gap(now, common) } else { verdict }
    }

    /// Acknowledges the packets before `end` up to the first one that expects a response. Returns whether there is one.
    fn acknowledge(&mut self, now: Time, common: &mut Common, end: u64) -> bool {
        let unanswered = self
            .queue
            .iter()
            .take_while(|wqe| wqe.is_local() || (wqe.started && wqe.first < end))
            .find(|wqe| !wqe.is_local() && wqe.expects_response() && wqe.end() > self.acknowledged)
            .map(|wqe| wqe.first.max(self.acknowledged))
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
        for cuts in [&mut self.cuts, &mut self.first_cuts] {
            while cuts.front().is_some_and(|cut| *cut <= to) {
                cuts.pop_front();
            }
        }
        if self.next < to {
            // An answer to a packet that was about to be retransmitted.
            self.next = to;
            self.in_flight_bytes = 0;
            self.index = self.queue.iter().take_while(|wqe| wqe.is_done(to)).count();
        }
        if self.next == to {
            self.in_flight_bytes = 0;
        }
        self.gap_repaired_at = None;
        self.quiet_until = None;
        self.reset_retries(common);
        self.restart_ack_timer(now, common);
    }

    /// A packet between the acknowledged mark and the PSN that the peer answered was lost: retransmits from the mark,
    /// once. This costs a retry unless a timeout has cost one for the same loss.
    fn repair_gap(&mut self, now: Time, common: &mut Common) -> Verdict {
        if self.gap_repaired_at == Some(self.acknowledged) {
            return Verdict::Fine;
        }
        self.gap_repaired_at = Some(self.acknowledged);
        self.window.on_congestion(common.mtu());
        if self.timed_out_at == Some(self.acknowledged) {
            self.send_again(now, common);
            return Verdict::Fine;
        }
        self.retry(now, common)
    }

    fn handle_rnr(&mut self, now: Time, common: &mut Common, psn: Psn, timer: u8) -> Verdict {
        let Some(sequence) = self.in_flight(psn) else { return self.drop_packet(common) };
        common.counters.rnr_naks_received += 1;
        let response_lost = self.acknowledge(now, common, sequence);
        let verdict = self.retire(common);
        if verdict != Verdict::Fine {
            return verdict;
        }
        if response_lost {
            return self.repair_gap(now, common);
        }
        if self.quiet_until.is_some() {
            // This attempt was refused already: the network duplicated the NAK or the packet.
            return Verdict::Fine;
        }
        if self.rnr_retries_left == 0 {
            return self.fail_front(common, WcStatus::RnrRetryExceeded, 0);
        }
        if common.attr.rnr_retry != RNR_RETRY_FOR_EVER {
            self.rnr_retries_left -= 1;
        }
        // The peer answers, so its RNR NAKs use the RNR retry count, not the transport retry count.
        self.retries_left = common.attr.retry_cnt;
        self.go_back();
        self.quiet_until = Some(now.after_ns(rnr_timer_ns(timer)));
        self.restart_ack_timer(now.after_ns(rnr_timer_ns(timer)), common);
        Verdict::Fine
    }

    fn handle_nak(&mut self, now: Time, common: &mut Common, psn: Psn, code: NakCode) -> Verdict {
        let Some(sequence) = self.in_flight(psn) else { return self.drop_packet(common) };
        if code == NakCode::PsnSequence {
            common.counters.sequence_naks_received += 1;
        } else {
            common.counters.error_naks_received += 1;
        }
        let response_lost = self.acknowledge(now, common, sequence);
        let verdict = self.retire(common);
        if verdict != Verdict::Fine {
            return verdict;
        }
        if code == NakCode::PsnSequence && self.quiet_until.is_some() {
            // After an RNR NAK some responders refuse the packets behind it, too. All are retransmitted after the RNR
            // wait.
            return Verdict::Fine;
        }
        if response_lost || code == NakCode::PsnSequence {
            return self.repair_gap(now, common);
        }
        let status = match code {
            NakCode::RemoteAccess => WcStatus::RemoteAccess,
            NakCode::RemoteOperation => WcStatus::RemoteOperation,
            _ => WcStatus::RemoteInvalidRequest,
        };
        self.fail_front(common, status, 0x60 | code as u32)
    }

    /// READ data, the result of an atomic, or the empty response to a FLUSH or an ATOMIC WRITE. It
    /// acknowledges all packets before itself.
    fn handle_response(
        &mut self,
        now: Time,
        common: &mut Common,
        packet: &Packet<'_>,
        data: &[u8],
        host: &impl Host,
    ) -> Verdict {
        let Some(sequence) = self.in_flight(packet.bth.psn) else {
            common.counters.duplicates += 1;
            return Verdict::Fine;
        };
        let Some(first) = self.response_owner(sequence) else { return self.drop_packet(common) };
        let response_lost = self.acknowledge(now, common, first);
        let verdict = self.retire(common);
        if verdict != Verdict::Fine {
            return verdict;
        }
        if response_lost || sequence != self.acknowledged {
            return self.repair_gap(now, common);
        }
        if packet.ext.aeth.is_some_and(|aeth| !matches!(aeth.syndrome, Syndrome::Ack { .. })) {
            return self.fail_front(common, WcStatus::BadResponse, 0);
        }
        match self.take_response(common, sequence, packet.bth.opcode.info().operation, data, host) {
            Ok(()) => {
                self.advance(now, common, sequence + 1);
                self.retire(common)
            }
            Err(status) => self.fail_front(common, status, 0),
        }
    }

    /// First sequence number of the request to which a response with this sequence number belongs.
    fn response_owner(&self, sequence: u64) -> Option<u64> {
        self.queue
            .iter()
            .find(|wqe| wqe.started && !wqe.is_local() && wqe.first <= sequence && sequence < wqe.end())
            .filter(|wqe| wqe.expects_response())
            .map(|wqe| wqe.first)
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
        let offset = (sequence - wqe.first) * common.mtu();
        let (expected, expected_len) = match Row::of(&wqe.wr.op).answer {
            Answer::Data => (Operation::ReadResponse, common.mtu().min(wqe.length - offset)),
            Answer::Value => (Operation::AtomicAcknowledge, ATOMIC_LEN.into()),
            Answer::Empty => (Operation::ReadResponse, 0),
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
