//! Duplicate requests (IBTA volume 1, C9-105): SENDs and WRITEs are acknowledged again and not executed, READs are
//! executed again, atomics and APPENDs are answered from the responder resources. A repeated response goes before the pending
//! responses for later PSNs: the peer needs it first, and it does not wait behind deferred operations.

use terrace_wire::{Operation, Packet, Psn, Syndrome};

use super::Responder;
use super::read::ReadResponse;
use super::resource::{Outcome, ResponderResource};
use super::response::Response;
use crate::common::{Call, Common, Verdict};
use crate::data::Data;
use crate::host::{Host, RemoteError};

impl Responder {
    pub(super) fn handle_duplicate(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
    ) -> Verdict {
        let psn = packet.bth.psn;
        let last = psn.plus(data.packets(call.mtu()) - 1);
        let info = packet.bth.opcode.info();
        match info.operation {
            Operation::Send | Operation::Write => self.acknowledge_again(psn),
            // The last packet has the answer. A run that the peer makes of repeated and new packets is repeated from the
            // first new one on.
            Operation::Append if !info.position.is_last() || !last.is_before(self.expected) => {
                self.acknowledge_again(psn);
            }
            Operation::ReadRequest => {
                if let Err(error) = self.repeat_read(call, packet) {
                    let nak = refuse_repetition(call, psn, self.msn, error);
                    self.queue_repeated(psn, nak);
                }
            }
            operation => self.repeat_result(call, last, operation),
        }
        Verdict::Fine
    }

    /// Queues the response to a repeated request in PSN order.
    fn queue_repeated(&mut self, psn: Psn, response: Response) {
        let index = self.first_pending_after(psn).map_or(self.pending.len(), |(index, _)| index);
        self.pending.insert(index, response);
        self.blocked &= index > 0;
    }

    /// Index and PSN of the first pending response for a later PSN than this.
    fn first_pending_after(&self, psn: Psn) -> Option<(usize, Psn)> {
        let pending = self.pending.iter().enumerate();
        let mut with_psn = pending.filter_map(|(index, response)| Some((index, response.next_psn()?)));
        with_psn.find(|(_, next)| psn.is_before(*next))
    }

    fn acknowledge_again(&mut self, psn: Psn) {
        let up_to = self.last_to_acknowledge(psn);
        match self.first_pending_after(psn) {
            None => self.queue_ack(up_to),
            // That ACK covers this request.
            Some((index, _)) if matches!(self.pending[index], Response::Ack { .. }) => {}
            Some((_, next)) => {
                let psn = if next.is_before(up_to.next()) { next.minus(1) } else { up_to };
                let syndrome = Syndrome::Ack { credits: 31 };
                self.queue_repeated(psn, Response::Ack { psn, syndrome, msn: self.msn });
            }
        }
    }

    /// The last PSN that may be acknowledged to a peer that repeats the request at `psn`: the one before the next READ
    /// or atomic. A peer that repeats an earlier request has not received that response. An ACK cannot replace it; the
    /// peer will repeat that request, too.
    fn last_to_acknowledge(&self, psn: Psn) -> Psn {
        let between = |resource: &&ResponderResource| {
            psn.is_before(resource.psn) && resource.psn.is_before(self.expected)
        };
        self.resources.iter().find(between).map_or(self.expected, |resource| resource.psn).minus(1)
    }

    /// Answers an atomic, an APPEND, a FLUSH or an ATOMIC WRITE from the responder resources; without a resource it is dropped.
    fn repeat_result(&mut self, common: &mut Common, psn: Psn, operation: Operation) {
        let returns_value = matches!(
            operation,
            Operation::CompareSwap
                | Operation::FetchAdd
                | Operation::MaskedCompareSwap
                | Operation::MaskedFetchAdd
                | Operation::Append
        );
        let outcome =
            self.resources.iter().rev().find(|resource| resource.psn == psn).map(|resource| resource.outcome);
        let response = match outcome {
            Some(Outcome::Atomic { value, msn }) if returns_value => {
                Response::AtomicResult { psn, value, msn }
            }
            Some(Outcome::Done { msn }) if !returns_value => Response::Done { psn, msn },
            _ => {
                common.counters.dropped += 1;
                return;
            }
        };
        if !self.pending.iter().any(|pending| pending.is_result_at(psn)) {
            self.queue_repeated(psn, response);
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
        let mut read = ReadResponse::new(call, reth, psn, packet.ext.xrc_srqn);
        let known = self.resources.iter().any(|resource| resource.covers_read(&read, call));
        if !known {
            call.counters.dropped += 1;
            return Ok(());
        }
        // Newest first: the response with the end of the READ has the latest PSNs.
        for response in self.pending.iter().rev() {
            read.end = response.missing_packets(psn, read.end).unwrap_or(read.end);
        }
        if read.end == 0 {
            return Ok(());
        }
        if self.pending_reads(true) >= usize::from(call.attr.max_dest_rd_atomic) {
            // Sending is blocked and the peer's ACK timer is short: it will repeat the request.
            call.counters.dropped += 1;
            return Ok(());
        }
        (read.repeat, read.msn) = (true, self.msn);
        if reth.length > 0 {
            match read.prepare(call, || self.defers_fetching(reth.rkey)) {
                // The READ was accepted once, so it is not refused now; it is answered when its data are there.
                Ok(()) | Err(RemoteError::Retry) => {}
                Err(error) => return Err(error),
            }
            self.reads_waiting |= read.is_waiting();
        }
        self.queue_repeated(psn, Response::Read(read));
        Ok(())
    }
}

/// The NAK for a READ that cannot be repeated because its memory is gone. The connection stays up: after the first
/// response the peer may have told the program to free the memory before a late copy of the request arrived, and then
/// it ignores this NAK. A peer that still needs the data fails by it. The NAK carries the PSN of the repeated
/// request: a later PSN would acknowledge packets that the peer may still miss.
pub(super) fn refuse_repetition(common: &mut Common, psn: Psn, msn: u32, error: RemoteError) -> Response {
    common.counters.error_naks_sent += 1;
    Response::Ack { psn, syndrome: Syndrome::Nak(error.into()), msn }
}
