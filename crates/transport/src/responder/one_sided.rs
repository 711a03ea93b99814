//! Requests that are answered by more than an ACK: READ, atomics, ATOMIC WRITE and FLUSH. Each takes a responder
//! resource, of which the queue pair has `max_dest_rd_atomic`, until the peer asks for others.

use terrace_wire::{Operation, Packet};

use super::{INVALID_REQUEST, Kept, MESSAGE_LEN_MAX, Owed, Refusal, Remembered, Responder, require};
use crate::access;
use crate::common::Common;
use crate::host::{AtomicOp, Host, RemoteAccess};

/// Bits of the FETH's placement field, and the highest of its selectivity's values (IBTA annex A19).
const FLUSH_TO_GLOBAL: u8 = 1;
const FLUSH_TO_PERSISTENCE: u8 = 2;
const FLUSH_WHOLE_REGION: u8 = 1;

impl Responder {
    pub(super) fn accept_read(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        let reth = packet.ext.reth.ok_or(INVALID_REQUEST)?;
        require(common, access::REMOTE_READ)?;
        let under_way = self.reads_owed(false);
        if reth.length > MESSAGE_LEN_MAX || under_way >= usize::from(common.attr.max_dest_rd_atomic) {
            return Err(INVALID_REQUEST);
        }
        if reth.length > 0 {
            host.remote_check(reth.rkey, reth.va, reth.length.into(), RemoteAccess::Read)?;
        }
        let length = u64::from(reth.length);
        let packets = length.div_ceil(common.mtu()).max(1) as u32;
        let psn = self.expected;
        self.finish_request(common, packets, Kept::Read { va: reth.va, rkey: reth.rkey, length });
        self.owed.push_back(Owed::Read {
            psn,
            va: reth.va,
            rkey: reth.rkey,
            length,
            packets,
            sent: 0,
            msn: self.msn,
            repeat: false,
        });
        Ok(())
    }

    pub(super) fn perform_atomic(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        let atomic = packet.ext.atomic.ok_or(INVALID_REQUEST)?;
        require(common, access::REMOTE_ATOMIC)?;
        if common.attr.max_dest_rd_atomic == 0 {
            return Err(INVALID_REQUEST);
        }
        let op = if packet.bth.opcode.info().operation == Operation::CompareSwap {
            AtomicOp::CompareSwap { compare: atomic.compare, swap: atomic.swap_or_add }
        } else {
            AtomicOp::FetchAdd { add: atomic.swap_or_add }
        };
        if atomic.va % 8 != 0 {
            return Err(INVALID_REQUEST);
        }
        let value = host.remote_atomic(atomic.rkey, atomic.va, op)?;
        let (psn, msn) = (self.expected, (self.msn + 1) & 0xff_ffff);
        self.finish_request(common, 1, Kept::Atomic { value, msn });
        self.owed.push_back(Owed::AtomicResult { psn, value, msn });
        Ok(())
    }

    pub(super) fn perform_atomic_write(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        let reth = packet.ext.reth.ok_or(INVALID_REQUEST)?;
        require(common, access::REMOTE_WRITE)?;
        let bytes: [u8; 8] = packet.payload.try_into().map_err(|_| INVALID_REQUEST)?;
        if reth.length != 8 || reth.va % 8 != 0 || common.attr.max_dest_rd_atomic == 0 {
            return Err(INVALID_REQUEST);
        }
        host.remote_check(reth.rkey, reth.va, 8, RemoteAccess::Write)?;
        host.remote_atomic(reth.rkey, reth.va, AtomicOp::Write { value: u64::from_ne_bytes(bytes) })?;
        self.finish_done(common);
        Ok(())
    }

    pub(super) fn perform_flush(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Result<(), Refusal> {
        let (Some(reth), Some(feth)) = (packet.ext.reth, packet.ext.feth) else {
            return Err(INVALID_REQUEST);
        };
        // Reserved bits of the placement are ignored, but a reserved selectivity leaves open what to flush.
        let placement = feth.placement & (FLUSH_TO_GLOBAL | FLUSH_TO_PERSISTENCE);
        for (kind, flag) in
            [(FLUSH_TO_GLOBAL, access::FLUSH_GLOBAL), (FLUSH_TO_PERSISTENCE, access::FLUSH_PERSISTENT)]
        {
            if placement & kind != 0 {
                require(common, flag)?;
            }
        }
        if common.attr.max_dest_rd_atomic == 0 || feth.selectivity > FLUSH_WHOLE_REGION {
            return Err(INVALID_REQUEST);
        }
        host.remote_flush(reth.rkey, reth.va, reth.length.into(), placement, feth.selectivity)?;
        self.finish_done(common);
        Ok(())
    }

    /// How many READs wait to be answered: those asked for again, or the others.
    pub(super) fn reads_owed(&self, repeated: bool) -> usize {
        self.owed
            .iter()
            .filter(|owed| matches!(owed, Owed::Read { repeat, .. } if *repeat == repeated))
            .count()
    }

    fn finish_done(&mut self, common: &Common) {
        let (psn, msn) = (self.expected, (self.msn + 1) & 0xff_ffff);
        self.finish_request(common, 1, Kept::Done { msn });
        self.owed.push_back(Owed::Done { psn, msn });
    }

    /// Moves on past a request that is answered by more than an ACK, and remembers it for duplicates.
    fn finish_request(&mut self, common: &Common, packets: u32, what: Kept) {
        if self.history.len() >= usize::from(common.attr.max_dest_rd_atomic.max(1)) {
            self.history.pop_front();
        }
        self.history.push_back(Remembered { psn: self.expected, packets, what });
        self.expected = self.expected.plus(packets);
        self.msn = (self.msn + 1) & 0xff_ffff;
    }
}
