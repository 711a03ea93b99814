//! Requests that were seen before (IBTA volume 1, C9-105): SENDs and WRITEs are acknowledged again and not carried
//! out, READs are carried out again, atomics are answered from memory.

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
            Operation::Send | Operation::Write => self.owe_ack(self.last_to_acknowledge(psn)),
            Operation::ReadRequest => {
                if let Err(error) = self.repeat_read(common, packet, host) {
                    let nak = refuse_repetition(common, psn, self.msn, error);
                    self.owed.push_back(nak);
                }
            }
            _ => self.repeat_result(common, psn, operation),
        }
        Verdict::Fine
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
            self.owed.push_back(answer);
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
        let packets = answer.packets;
        let known = self.history.iter().any(|kept| kept.covers_read(&answer, common));
        if !known {
            common.counters.dropped += 1;
            return Ok(());
        }
        if self.owed.iter().any(|owed| owed.will_read(psn, packets)) {
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
        self.owed.push_back(Owed::Read(answer));
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

    /// Whether this is a READ whose answer still has all these packets to come.
    fn will_read(&self, first: Psn, count: u32) -> bool {
        let Owed::Read(read) = self else { return false };
        let Ok(skipped) = u32::try_from(first.since(read.psn)) else { return false };
        skipped >= read.sent && skipped.checked_add(count).is_some_and(|end| end <= read.packets)
    }
}
