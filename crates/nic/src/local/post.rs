//! Work requests that are carried out as they are posted.

use terrace_hostmem::fault::Fault;
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessNeed, Accessor, Local, LocalPiece};
use terrace_shm::{DirectAccess, Direction, Refusal};
use terrace_transport::{ATOMIC_LEN, Masked, Payload, SendOp, SendWr, Sge};

use super::route::canonical;
use super::{Command, QpLocal};
use crate::device::Device;
use crate::qp::{QpCore, QueuePair};

impl Device {
    /// Carries out and completes a work request, if direct access to the peer's memory is possible and everything posted
    /// before is complete. Otherwise false: packets carry it.
    #[inline(always)]
    pub(crate) fn carry_out_direct(&self, qp: &QueuePair, core: &mut QpCore, wr: &SendWr) -> bool {
        if !self.local.is_on() || !core.qp.may_go_direct(wr) {
            return false;
        }
        let Some((direction, rkey, va)) = copy_of(&wr.op) else {
            return self.carry_out_atomic(qp, core, wr);
        };
        let copied = self.access_direct(qp, core, rkey, |direct| match wr.payload.sges() {
            Some([sge]) => direct.copy_piece(direction, rkey, va, self.local_piece(qp, sge)),
            _ => self.copy_pieces(qp, direct, (direction, rkey, va), &wr.payload),
        });
        if copied.is_some() {
            let (transport, host) = core.parts(qp, None);
            transport.complete_direct(wr, &host);
        }
        copied.is_some()
    }

    /// Has `act` access the peer's memory, if the route permits that. `None` if it was not done.
    #[inline(always)]
    pub(super) fn access_direct<R>(
        &self,
        qp: &QueuePair,
        core: &mut QpCore,
        rkey: u32,
        act: impl FnOnce(&mut DirectAccess) -> Result<R, Refusal>,
    ) -> Option<R> {
        let direct = self.direct(qp, core)?;
        let acted = act(direct);
        direct.update_prefetch_hint(&qp.prefetch_hint);
        match acted {
            Ok(result) => Some(result),
            Err(refusal) => {
                self.note_refusal(core, rkey, refusal);
                None
            }
        }
    }

    /// Carries out and completes READs or WRITEs by one key, from the first on, as many as one system call can copy.
    /// Returns how many: none if there is but one, or if their memory is not copied by the kernel.
    pub(crate) fn carry_out_list(&self, qp: &QueuePair, core: &mut QpCore, wrs: &[SendWr]) -> usize {
        let Some((direction, rkey, _)) = wrs.first().and_then(|wr| copy_of(&wr.op)) else { return 0 };
        if !self.local.is_on() || !core.nic.local.copies_by_kernel(rkey) {
            return 0;
        }
        let is_alike = |wr: &&SendWr| {
            copy_of(&wr.op).is_some_and(|(other, key, _)| (other, key) == (direction, rkey))
                && core.qp.may_go_direct(wr)
        };
        let count = wrs.iter().take(DirectAccess::LIST_MAX).take_while(is_alike).count();
        if count == 0 {
            return 0;
        }
        let Some(direct) = self.direct(qp, core) else { return 0 };
        let pieces = wrs[..count].iter().map_while(|wr| match (copy_of(&wr.op), wr.payload.sges()) {
            (Some((.., va)), Some([sge])) => Some((va, self.local_piece(qp, sge))),
            _ => None,
        });
        let copied = direct.copy_list(direction, rkey, pieces);
        let (transport, host) = core.parts(qp, None);
        wrs[..copied].iter().for_each(|wr| transport.complete_direct(wr, &host));
        copied
    }

    /// Copies a payload that is not one piece.
    #[inline(never)]
    fn copy_pieces(
        &self,
        qp: &QueuePair,
        direct: &mut DirectAccess,
        (direction, rkey, va): (Direction, u32, u64),
        payload: &Payload,
    ) -> Result<(), Refusal> {
        match payload {
            Payload::Sge(_) | Payload::Sges(_) => {
                let who = Accessor::local(qp.pd().handle(), qp.qpn());
                let pieces = payload.sges().unwrap_or_default().iter().map(piece_of);
                let copy = |locals: &[HostRange]| direct.copy(direction, rkey, va, locals);
                let copied = self.memory.with_local(
                    who,
                    AccessNeed::of_local_end(direction),
                    &qp.keys.sent,
                    pieces,
                    copy,
                );
                copied.unwrap_or(Err(Refusal::NotHere))
            }
            // Inline data is only written: a READ with inline data is no valid work request.
            Payload::Inline(bytes) => direct.write_from(rkey, va, bytes),
            Payload::Provided(_) | Payload::Masked(_) => Err(Refusal::NotHere),
        }
    }

    #[inline(never)]
    fn carry_out_atomic(&self, qp: &QueuePair, core: &mut QpCore, wr: &SendWr) -> bool {
        let (op, rkey, va) = match wr.op {
            SendOp::CompareSwap { va, rkey, compare, swap } => {
                (AtomicOp::CompareSwap { compare, swap }, rkey, va)
            }
            SendOp::FetchAdd { va, rkey, add } => (AtomicOp::FetchAdd { add }, rkey, va),
            SendOp::MaskedFetchAdd { va, rkey, add, boundary } => {
                (AtomicOp::MaskedFetchAdd { add, boundary }, rkey, va)
            }
            SendOp::MaskedCompareSwap { va, rkey, compare, swap } => {
                let Payload::Masked(masked) = &wr.payload else { return false };
                let Masked { compare_mask, swap_mask, .. } = **masked;
                (AtomicOp::MaskedCompareSwap { compare, swap, compare_mask, swap_mask }, rkey, va)
            }
            _ => return false,
        };
        let Some([sge]) = wr.payload.sges() else { return false };
        let Local { who, memo, piece, .. } = self.local_piece(qp, sge);
        let result = LocalPiece { len: ATOMIC_LEN.into(), ..piece };
        let done = self.access_direct(qp, core, rkey, |direct| {
            let act = |into| direct.atomic_into(rkey, va, op, into);
            let done = self.memory.with_piece(who, AccessNeed::Write, memo, result, act);
            done.unwrap_or(Err(Refusal::NotHere))
        });
        let Some(stored) = done else { return false };
        let (transport, host) = core.parts(qp, None);
        match stored {
            Ok(()) => transport.complete_direct(wr, &host),
            Err(Fault) => {
                // The operation was performed, and its result had no memory left to go to.
                transport.fail_direct(wr, &host);
                self.publish_state(qp, core);
            }
        }
        true
    }

    /// The local memory that an element names.
    #[inline(always)]
    fn local_piece<'a>(&'a self, qp: &'a QueuePair, sge: &Sge) -> Local<'a> {
        let who = Accessor::local(qp.pd().handle(), qp.qpn());
        Local { registry: &self.memory, who, memo: &qp.keys.sent, piece: piece_of(sge) }
    }

    /// A refused access may be possible once the thread has asked how the region is reached.
    #[cold]
    fn note_refusal(&self, core: &mut QpCore, rkey: u32, refusal: Refusal) {
        let Refusal::Unknown(version) = refusal else { return };
        if core.nic.local.last_asked.replace((rkey, version)) != Some((rkey, version))
            && let Some(path) = core.qp.attr().path
        {
            self.local.command(Command::Ask(canonical(path.remote), rkey, version));
        }
    }
}

impl QpLocal {
    /// Has the processor prefetch what a work request is going to access in a region in frames.
    #[inline]
    pub fn prefetch_framed(&self, op: &SendOp) {
        if let (Some(direct), Some((_, key, va))) = (self.route.direct.as_ref(), copy_of(op)) {
            direct.prefetch_framed(key, va);
        }
    }
}

/// The copy that a READ or WRITE makes: its direction, the key and the address.
#[inline(always)]
fn copy_of(op: &SendOp) -> Option<(Direction, u32, u64)> {
    match *op {
        SendOp::Read { va, rkey } => Some((Direction::Read, rkey, va)),
        SendOp::Write { va, rkey } => Some((Direction::Write, rkey, va)),
        _ => None,
    }
}

#[inline(always)]
fn piece_of(sge: &Sge) -> LocalPiece {
    LocalPiece { lkey: sge.lkey, addr: sge.addr, len: sge.length.into() }
}
