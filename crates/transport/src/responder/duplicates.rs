//! Duplicate requests (IBTA volume 1, C9-105): SENDs and WRITEs are acknowledged again and not executed, READs are
//! executed again, atomics are answered from the responder resources. A repeated answer goes before the pending
//! responses for later PSNs: the peer needs it first, and it does not wait behind deferred operations.

use terrace_wire::{Operation, Packet, Psn, Syndrome};

use super::parked::ReadAnswer;
use super::{Kept, Owed, Remembered, Responder};
use crate::common::{Call, Common, Verdict};
use crate::host::{Host, RemoteError};

impl Responder {
    pub(super) fn handle_duplicate(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Verdict {
        let psn = packet.bth.psn;
        let operation = packet.bth.opcode.info().operation;
        match operation {
            Operation::Send | Operation::Write => self.acknowledge_again(psn),
            Operation::ReadRequest => {
                if let Err(error) = self.repeat_read(call, packet) {
                    let nak = refuse_repetition(call, psn, self.msn, error);
                    self.owe_again(psn, nak);
                }
            }
            _ => self.repeat_result(call, psn, operation),
        }
        Verdict::Fine
    }

    /// Queues the answer to a repeated request in PSN order.
    fn owe_again(&mut self, psn: Psn, answer: Owed) {
        let index = self.first_owed_after(psn).map_or(self.owed.len(), |(index, _)| index);
        self.owed.insert(index, answer);
        self.parked &= index > 0;
    }

    /// Index and PSN of the first pending response for a later PSN than this.
    fn first_owed_after(&self, psn: Psn) -> Option<(usize, Psn)> {
        let owed = self.owed.iter().enumerate();
        let mut with_psn = owed.filter_map(|(index, owed)| Some((index, owed.next_psn()?)));
        with_psn.find(|(_, next)| psn.is_before(*next))
    }

    fn acknowledge_again(&mut self, psn: Psn) {
        let up_to = self.last_to_acknowledge(psn);
        match self.first_owed_after(psn) {
            None => self.owe_ack(up_to),
            // That ACK covers this request.
            Some((index, _)) if matches!(self.owed[index], Owed::Ack { .. }) => {}
            Some((_, next)) => {
                let psn = if next.is_before(up_to.next()) { next.minus(1) } else { up_to };
                let syndrome = Syndrome::Ack { credits: 31 };
                self.owe_again(psn, Owed::Ack { psn, syndrome, msn: self.msn });
            }
        }
    }

    /// The last PSN that may be acknowledged to a peer that repeats the request at `psn`: the one before the next READ
    /// or atomic. A peer that repeats an earlier request has not received that response. An ACK cannot replace it; the
    /// peer will repeat that request, too.
    fn last_to_acknowledge(&self, psn: Psn) -> Psn {
        let between = |kept: &&Remembered| psn.is_before(kept.psn) && kept.psn.is_before(self.expected);
        self.history.iter().find(between).map_or(self.expected, |kept| kept.psn).minus(1)
    }

    /// Answers an atomic, a FLUSH or an ATOMIC WRITE from the responder resources; without a resource it is dropped.
    fn repeat_result(&mut self, common: &mut Common, psn: Psn, operation: Operation) {
        let is_atomic = matches!(operation, Operation::CompareSwap | Operation::FetchAdd);
        let kept = self.history.iter().rev().find(|kept| kept.psn == psn).map(|kept| kept.what);
        let answer = match kept {
            Some(Kept::Atomic { value, msn }) if is_atomic => Owed::AtomicResult { psn, value, msn },
            Some(Kept::Done { msn }) if !is_atomic => Owed::Done { psn, msn },
            _ => {
                common.counters.dropped += 1;
                return;
            }
        };
        if !self.owed.iter().any(|owed| owed.is_result_at(psn)) {
            self.owe_again(psn, answer);
        }
    }

    /// Executes a READ again, whole or from a packet in its middle. It must lie within a READ in the responder
    /// resources; the keys are checked again, since the region may be gone.
    fn repeat_read(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Result<(), RemoteError> {
        let (Some(reth), psn) = (packet.ext.reth, packet.bth.psn) else { return Ok(()) };
        let mut answer = ReadAnswer::new(call, reth, psn, packet.ext.xrc_srqn);
        let known = self.history.iter().any(|kept| kept.covers_read(&answer, call));
        if !known {
            call.counters.dropped += 1;
            return Ok(());
        }
        // Newest first: the response with the end of the READ has the latest PSNs.
        for owed in self.owed.iter().rev() {
            answer.end = owed.first_to_come(psn, answer.end).unwrap_or(answer.end);
        }
        if answer.end == 0 {
            return Ok(());
        }
        if self.reads_owed(true) >= usize::from(call.attr.max_dest_rd_atomic) {
            // Sending is blocked and the peer's ACK timer is short: it will repeat the request.
            call.counters.dropped += 1;
            return Ok(());
        }
        (answer.repeat, answer.msn) = (true, self.msn);
        if reth.length > 0 {
            match answer.prepare(call, || self.defers_fetching(reth.rkey)) {
                // The READ was accepted once, so it is not refused now; it is answered when its data are there.
                Ok(()) | Err(RemoteError::Retry) => {}
                Err(error) => return Err(error),
            }
            self.hungry |= answer.is_hungry();
        }
        self.owe_again(psn, Owed::Read(answer));
        Ok(())
    }
}

/// The NAK for a READ that cannot be repeated because its memory is gone. The connection stays up: after the first
/// response the peer may have told the program to free the memory before a late copy of the request arrived, and then
/// it ignores this NAK. A peer that still needs the data fails by it. The NAK carries the PSN of the repeated
/// request: a later PSN would acknowledge packets that the peer may still miss.
pub(super) fn refuse_repetition(common: &mut Common, psn: Psn, msn: u32, error: RemoteError) -> Owed {
    common.counters.error_naks_sent += 1;
    Owed::Ack { psn, syndrome: Syndrome::Nak(error.into()), msn }
}

impl Remembered {
    fn covers_read(&self, read: &ReadAnswer, common: &Common) -> bool {
        let Kept::Read { va, rkey, length } = self.what else { return false };
        let Ok(skipped) = u32::try_from(read.psn.since(self.psn)) else { return false };
        let offset = u64::from(skipped) * common.mtu();
        skipped.checked_add(read.packets).is_some_and(|end| end <= self.packets)
            && read.rkey == rkey
            && read.va == va.wrapping_add(offset)
            && offset + read.length <= length
    }
}

impl Owed {
    /// Whether this is the result of the atomic, FLUSH or ATOMIC WRITE at this PSN.
    fn is_result_at(&self, at: Psn) -> bool {
        match self {
            Owed::AtomicResult { psn, .. } | Owed::Done { psn, .. } => *psn == at,
            Owed::Parked(parked) => parked.psn == at,
            _ => false,
        }
    }

    /// If this is a READ response that still has to send the last of `count` packets from `first` on: how many of them
    /// come before its remaining ones. `None` also if it lacks some of them and has not begun: behind another response
    /// to the same READ it would begin a second time.
    fn first_to_come(&self, first: Psn, count: u32) -> Option<u32> {
        let Owed::Read(read) = self else { return None };
        let (next, end) = (read.next_psn(), read.psn.plus(read.end));
        let last = first.plus(count).minus(1);
        if last.is_before(next) || !last.is_before(end) {
            return None;
        }
        match u32::try_from(next.since(first)) {
            Err(_) | Ok(0) => Some(0),
            Ok(missing) => (read.sent > 0).then_some(missing),
        }
    }
}
