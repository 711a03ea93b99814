//! Requests that were seen before (IBTA volume 1, C9-105): SENDs and WRITEs are acknowledged again and not carried
//! out, READs are carried out again, atomics are answered from memory. What is answered again goes before what is owed
//! for later PSNs: the peer needs it first, and what waits for memory does not hold it up.

use terrace_wire::{Operation, Packet, Psn, Syndrome};

use super::parked::ReadAnswer;
use super::{Kept, Owed, Remembered, Responder};
use crate::common::{Common, Verdict};
use crate::host::{Host, RemoteError};

impl Responder {
    pub(super) fn handle_duplicate(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Verdict {
        let psn = packet.bth.psn;
        let operation = packet.bth.opcode.info().operation;
        match operation {
            Operation::Send | Operation::Write => self.acknowledge_again(psn),
            Operation::ReadRequest => {
                if let Err(error) = self.repeat_read(common, packet, host) {
                    let nak = refuse_repetition(common, psn, self.msn, error);
                    self.owe_again(psn, nak);
                }
            }
            _ => self.repeat_result(common, psn, operation),
        }
        Verdict::Fine
    }

    /// Owes an answer to a repeated request in its order.
    fn owe_again(&mut self, psn: Psn, answer: Owed) {
        let index = self.first_owed_after(psn).map_or(self.owed.len(), |(index, _)| index);
        self.owed.insert(index, answer);
        self.parked &= index > 0;
    }

    /// Index and PSN of the first thing that is owed for a later PSN than this.
    fn first_owed_after(&self, psn: Psn) -> Option<(usize, Psn)> {
        let owed = self.owed.iter().enumerate();
        let mut with_psn = owed.filter_map(|(index, owed)| Some((index, owed.next_psn()?)));
        with_psn.find(|(_, next)| psn.is_before(*next))
    }

    fn acknowledge_again(&mut self, psn: Psn) {
        let up_to = self.last_to_acknowledge(psn);
        match self.first_owed_after(psn) {
            None => self.owe_ack(up_to),
            // It is acknowledged by that.
            Some((index, _)) if matches!(self.owed[index], Owed::Ack { .. }) => {}
            Some((_, next)) => {
                let psn = if next.is_before(up_to.next()) { next.minus(1) } else { up_to };
                let syndrome = Syndrome::Ack { credits: 31 };
                self.owe_again(psn, Owed::Ack { psn, syndrome, msn: self.msn });
            }
        }
    }

    /// How far a peer may be acknowledged that repeats the request at `psn`: up to the next READ or atomic. Since it
    /// repeats what came before, it has not got the answer of that one, which an ACK cannot stand for; it will ask.
    fn last_to_acknowledge(&self, psn: Psn) -> Psn {
        let between = |kept: &&Remembered| psn.is_before(kept.psn) && kept.psn.is_before(self.expected);
        self.history.iter().find(between).map_or(self.expected, |kept| kept.psn).minus(1)
    }

    /// Answers an atomic, a FLUSH or an ATOMIC WRITE from memory; what is not remembered is dropped.
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

    /// Carries a READ out again, whole or from a packet in its middle. It must lie within one that is remembered;
    /// the keys are checked anew, since the region may be gone.
    fn repeat_read(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(), RemoteError> {
        let (Some(reth), psn) = (packet.ext.reth, packet.bth.psn) else { return Ok(()) };
        let mut answer = ReadAnswer::new(common, reth, psn, packet.ext.xrc_srqn);
        let known = self.history.iter().any(|kept| kept.covers_read(&answer, common));
        if !known {
            common.counters.dropped += 1;
            return Ok(());
        }
        // The newest first: what has the end of the READ has the latest PSNs.
        for owed in self.owed.iter().rev() {
            answer.end = owed.first_to_come(psn, answer.end).unwrap_or(answer.end);
        }
        if answer.end == 0 {
            return Ok(());
        }
        if self.reads_owed(true) >= usize::from(common.attr.max_dest_rd_atomic) {
            // The way out is blocked and the peer impatient: it will ask once more.
            common.counters.dropped += 1;
            return Ok(());
        }
        (answer.repeat, answer.msn) = (true, self.msn);
        if reth.length > 0 {
            match answer.prepare(common, host, || self.defers_fetching(reth.rkey)) {
                // It has been taken once; now it is answered as soon as it can be.
                Ok(()) | Err(RemoteError::Retry) => {}
                Err(error) => return Err(error),
            }
            self.hungry |= answer.is_hungry();
        }
        self.owe_again(psn, Owed::Read(answer));
        Ok(())
    }
}

/// The NAK for a READ that cannot be repeated because its memory is gone. Here the connection goes on: a peer that has
/// had the first answer may have told the program that the memory can go, before a copy of its request came late,
/// and does not heed this NAK. A peer that does need the data fails by it. It carries the PSN of the repeated
/// request: a later one would acknowledge what the peer may still miss.
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

    /// If this is a READ whose answer still has the last of `count` packets from `first` on: how many of them come before
    /// those that it has. All of them if it has not begun: behind others of the same READ it would begin a second time.
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
