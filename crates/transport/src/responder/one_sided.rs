//! Requests that are answered by more than an ACK: READ, atomics, ATOMIC WRITE and FLUSH (APPEND is in `append.rs`). Each takes one of the
//! `max_dest_rd_atomic` responder resources until newer requests displace it.

use terrace_wire::{AtomicEth, Operation, Packet};

use super::read::ReadResponse;
use super::refusal::{CHANGE_PENDING, INVALID_REQUEST, Refusal};
use super::resource::{Outcome, ResponderResource};
use super::response::{DeferredOperation, Response, Returns};
use super::{Responder, require};
use crate::access;
use crate::common::{Call, Common};
use crate::host::{AtomicOp, Deferred, Host, RemoteError};
use crate::types::MESSAGE_LEN_MAX;

/// Bits of the FETH's placement field, and the highest value of its selectivity (IBTA annex A19).
const FLUSH_TO_GLOBAL: u8 = 1;
const FLUSH_TO_PERSISTENCE: u8 = 2;
const FLUSH_WHOLE_REGION: u8 = 1;

impl Responder {
    pub(super) fn accept_read(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let reth = packet.ext.reth.ok_or(INVALID_REQUEST)?;
        if !call.host.permits_reads_of(reth.rkey) {
            require(call, access::REMOTE_READ)?;
        }
        let pending = self.pending_reads(false);
        if reth.length > MESSAGE_LEN_MAX || pending >= usize::from(call.attr.max_dest_rd_atomic) {
            return Err(INVALID_REQUEST);
        }
        let mut read = ReadResponse::new(call, reth, self.expected, packet.ext.xrc_srqn);
        if reth.length > 0 {
            read.prepare(call, || self.defers_fetching(reth.rkey))?;
            self.reads_waiting |= read.is_waiting();
        }
        let ReadResponse { va, rkey, length, packets, .. } = read;
        self.finish_request(call, packets, Outcome::Read { va, rkey, length });
        read.msn = self.msn;
        self.pending.push_back(Response::Read(read));
        Ok(())
    }

    pub(super) fn perform_atomic(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let atomic = packet.ext.atomic.ok_or(INVALID_REQUEST)?;
        require(call, access::REMOTE_ATOMIC)?;
        if call.attr.max_dest_rd_atomic == 0 {
            return Err(INVALID_REQUEST);
        }
        let op = atomic_op(packet, &atomic).ok_or(INVALID_REQUEST)?;
        if atomic.va % 8 != 0 {
            return Err(INVALID_REQUEST);
        }
        self.require_no_pending_changes()?;
        let (psn, msn) = (self.expected, (self.msn + 1) & 0xff_ffff);
        let (outcome, response) = match call.host.remote_atomic(atomic.rkey, atomic.va, op) {
            Ok(value) => (Outcome::Atomic { value, msn }, Response::AtomicResult { psn, value, msn }),
            Err(RemoteError::NotReady) => {
                let transfer = call.host.put_atomic(atomic.rkey, atomic.va, op)?;
                call.counters.puts += 1;
                (
                    Outcome::Pending,
                    Response::Deferred(DeferredOperation {
                        psn,
                        msn,
                        rkey: atomic.rkey,
                        returns: Returns::Value,
                        transfer,
                    }),
                )
            }
            Err(error) => return Err(error.into()),
        };
        self.finish_request(call, 1, outcome);
        self.pending.push_back(response);
        Ok(())
    }

    pub(super) fn perform_atomic_write(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let reth = packet.ext.reth.ok_or(INVALID_REQUEST)?;
        require(call, access::REMOTE_WRITE)?;
        let bytes: [u8; 8] = packet.payload.try_into().map_err(|_| INVALID_REQUEST)?;
        if reth.length != 8 || reth.va % 8 != 0 || call.attr.max_dest_rd_atomic == 0 {
            return Err(INVALID_REQUEST);
        }
        self.require_no_pending_changes()?;
        let op = AtomicOp::Write { value: u64::from_ne_bytes(bytes) };
        match call.host.remote_atomic(reth.rkey, reth.va, op) {
            Ok(_) => self.finish_done(call, reth.rkey, None),
            Err(RemoteError::NotReady) => {
                let transfer = call.host.put_atomic(reth.rkey, reth.va, op)?;
                self.finish_done(call, reth.rkey, Some(transfer));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    pub(super) fn perform_flush(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
    ) -> Result<(), Refusal> {
        let (Some(reth), Some(feth)) = (packet.ext.reth, packet.ext.feth) else {
            return Err(INVALID_REQUEST);
        };
        // Reserved placement bits are ignored, but a reserved selectivity does not say what to flush.
        let placement = feth.placement & (FLUSH_TO_GLOBAL | FLUSH_TO_PERSISTENCE);
        for (kind, flag) in
            [(FLUSH_TO_GLOBAL, access::FLUSH_GLOBAL), (FLUSH_TO_PERSISTENCE, access::FLUSH_PERSISTENT)]
        {
            if placement & kind != 0 {
                require(call, flag)?;
            }
        }
        if call.attr.max_dest_rd_atomic == 0 || feth.selectivity > FLUSH_WHOLE_REGION {
            return Err(INVALID_REQUEST);
        }
        self.require_no_pending_changes()?;
        let (rkey, va, length, selectivity) = (reth.rkey, reth.va, reth.length.into(), feth.selectivity);
        match call.host.remote_flush(rkey, va, length, placement, selectivity) {
            Ok(()) => self.finish_done(call, reth.rkey, None),
            Err(RemoteError::NotReady) => {
                let transfer = call.host.flush(rkey, va, length, placement, selectivity)?;
                self.finish_done(call, reth.rkey, Some(transfer));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Number of pending READ responses: repetitions, or the others.
    pub(super) fn pending_reads(&self, repeated: bool) -> usize {
        self.pending
            .iter()
            .filter(|response| matches!(response, Response::Read(read) if read.repeat == repeated))
            .count()
    }

    /// Queues the empty response, at once or deferred until the transfer has ended.
    fn finish_done(&mut self, common: &mut Common, rkey: u32, transfer: Option<Box<dyn Deferred>>) {
        let (psn, msn) = (self.expected, (self.msn + 1) & 0xff_ffff);
        self.finish_request(common, 1, Outcome::Done { msn });
        self.pending.push_back(match transfer {
            None => Response::Done { psn, msn },
            Some(transfer) => {
                common.counters.puts += 1;
                Response::Deferred(DeferredOperation { psn, msn, rkey, returns: Returns::Nothing, transfer })
            }
        });
    }

    /// Atomics and FLUSHes make earlier requests visible to others, so pending writes must be done first.
    fn require_no_pending_changes(&self) -> Result<(), Refusal> {
        if self.has_pending_changes() { Err(CHANGE_PENDING) } else { Ok(()) }
    }

    /// Advances past a request that is answered by more than an ACK, and keeps a responder resource for duplicates.
    pub(super) fn finish_request(&mut self, common: &mut Common, packets: u32, outcome: Outcome) {
        if self.resources.len() >= usize::from(common.attr.max_dest_rd_atomic.max(1)) {
            self.resources.pop_front();
        }
        self.resources.push_back(ResponderResource { psn: self.expected, packets, outcome });
        self.expected = self.expected.plus(packets);
        self.msn = (self.msn + 1) & 0xff_ffff;
        common.counters.requests += 1;
    }
}

/// The operation that an atomic's packet requests; `None` if its masks are missing.
fn atomic_op(packet: &Packet<'_>, atomic: &AtomicEth) -> Option<AtomicOp> {
    let AtomicEth { swap_or_add, compare, .. } = *atomic;
    Some(match packet.bth.opcode.info().operation {
        Operation::CompareSwap => AtomicOp::CompareSwap { compare, swap: swap_or_add },
        Operation::MaskedFetchAdd => AtomicOp::MaskedFetchAdd { add: swap_or_add, boundary: compare },
        Operation::MaskedCompareSwap => {
            let masks = u128::from_be_bytes(packet.payload.try_into().ok()?);
            let (compare_mask, swap_mask) = ((masks >> 64) as u64, masks as u64);
            AtomicOp::MaskedCompareSwap { compare, swap: swap_or_add, compare_mask, swap_mask }
        }
        _ => AtomicOp::FetchAdd { add: swap_or_add },
    })
}
