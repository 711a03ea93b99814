//! Work requests that are carried out as they are posted.

use terrace_memory::fault::Fault;
use terrace_memory::shared::{Direction, Local, LocalPiece, Refusal};
use terrace_memory::{AccessError, AccessNeed, Accessor, AtomicOp, HostRange};
use terrace_transport::{ATOMIC_LEN, Payload, SendOp, SendWr, Sge, SgeList, ShortWr};

use super::{Command, canonical};
use crate::device::Device;
use crate::host::LastKeys;
use crate::qp::{QpCore, QueuePair};

impl Device {
    /// Carries out a work request, if direct access to the peer's memory is possible and everything posted before is
    /// complete. Packets do the rest.
    pub(crate) fn reach(&self, qp: &QueuePair, core: &mut QpCore, wr: &SendWr) -> Reached {
        if let Some(short) = ShortWr::of(wr) {
            return self.reach_short(qp, core, &short);
        }
        if !matches!(wr.op, SendOp::Read { .. } | SendOp::Write { .. }) || !self.may_reach(core) {
            return Reached::No;
        }
        let Some(lead) = core.local.lead() else { return Reached::No };
        if core.qp.check_sends(std::slice::from_ref(wr)).is_err() {
            return Reached::No;
        }
        let may_read = core.qp.attr().max_rd_atomic > 0;
        let who = Accessor::local(qp.pd().handle(), qp.qpn());
        let (rkey, copied) = match (&wr.op, &wr.payload) {
            (&SendOp::Read { va, rkey }, Payload::Sges(sges)) if may_read => {
                let read = |into: &[HostRange]| lead.read(rkey, va, into);
                (rkey, self.with_sges(who, AccessNeed::Write, sges, &qp.keys, read))
            }
            (&SendOp::Write { va, rkey }, Payload::Sges(sges)) => {
                let write = |from: &[HostRange]| lead.write(rkey, va, from);
                (rkey, self.with_sges(who, AccessNeed::Read, sges, &qp.keys, write))
            }
            (&SendOp::Write { va, rkey }, Payload::Inline(bytes)) => {
                let from = HostRange { addr: bytes.as_ptr() as u64, len: bytes.len() as u64 };
                (rkey, Ok(lead.write(rkey, va, &[from])))
            }
            _ => return Reached::No,
        };
        lead.tell(&qp.prefetch_hint);
        if self.settle(core, rkey, copied).is_none() {
            return Reached::No;
        }
        if let Some(wc) = core.qp.complete_direct(wr) {
            self.complete_send(qp, core.hook.as_ref(), wc);
        }
        Reached::Whole
    }

    /// The same for a short work request.
    #[inline(always)]
    pub(crate) fn reach_short(&self, qp: &QueuePair, core: &mut QpCore, wr: &ShortWr) -> Reached {
        if !self.local.is_on() || !core.qp.is_quiet_for(wr) {
            return Reached::No;
        }
        let (direction, rkey, va) = match wr.op {
            SendOp::Read { va, rkey } => (Direction::Read, rkey, va),
            SendOp::Write { va, rkey } => (Direction::Write, rkey, va),
            _ => return self.reach_atomic(qp, core, *wr),
        };
        let Some(lead) = core.local.lead() else { return Reached::No };
        let copied = lead.copy_piece(direction, rkey, va, &self.local_piece(qp, wr));
        lead.tell(&qp.prefetch_hint);
        match copied {
            Ok(()) => {
                self.complete_short(qp, core, wr);
                Reached::Whole
            }
            Err(refusal) => {
                self.note_refusal(core, rkey, refusal);
                Reached::No
            }
        }
    }

    #[inline(never)]
    fn reach_atomic(&self, qp: &QueuePair, core: &mut QpCore, wr: ShortWr) -> Reached {
        let (op, rkey, va) = match wr.op {
            SendOp::CompareSwap { va, rkey, compare, swap } => {
                (AtomicOp::CompareSwap { compare, swap }, rkey, va)
            }
            SendOp::FetchAdd { va, rkey, add } => (AtomicOp::FetchAdd { add }, rkey, va),
            _ => return Reached::No,
        };
        let Some(lead) = core.local.lead() else { return Reached::No };
        let Local { who, memo, piece, .. } = self.local_piece(qp, &wr);
        let result = LocalPiece { len: ATOMIC_LEN.into(), ..piece };
        let act = |into| lead.atomic_into(rkey, va, op, into);
        let done = self.memory.with_piece(who, AccessNeed::Write, memo, result, act);
        lead.tell(&qp.prefetch_hint);
        match self.settle(core, rkey, done) {
            Some(Ok(())) => {
                self.complete_short(qp, core, &wr);
                Reached::Whole
            }
            Some(Err(Fault)) => lose_result(core, &wr),
            None => Reached::No,
        }
    }

    /// The local memory that a short work request names.
    #[inline(always)]
    fn local_piece<'a>(&'a self, qp: &'a QueuePair, wr: &ShortWr) -> Local<'a> {
        let who = Accessor::local(qp.pd().handle(), qp.qpn());
        Local { registry: &self.memory, who, memo: &qp.keys.sent, piece: piece_of(&wr.local) }
    }

    #[inline(always)]
    fn complete_short(&self, qp: &QueuePair, core: &mut QpCore, wr: &ShortWr) {
        // Each arm makes its own entry, so that the queue's entry is made in place: see `Entries`.
        match &core.hook {
            None => {
                if let Some(wc) = core.qp.complete_short(wr) {
                    qp.send_cq().push(wc);
                }
            }
            Some(_) => self.complete_short_to_hook(qp, core, *wr),
        }
    }

    #[cold]
    #[inline(never)]
    fn complete_short_to_hook(&self, qp: &QueuePair, core: &mut QpCore, wr: ShortWr) {
        if let Some(wc) = core.qp.complete_short(&wr) {
            self.complete_send(qp, core.hook.as_ref(), wc);
        }
    }

    /// Whether a work request that is posted now is the only one, and direct access is on.
    #[inline]
    pub(super) fn may_reach(&self, core: &QpCore) -> bool {
        self.local.is_on() && core.qp.is_quiet()
    }

    /// The result of an access; `None` if it was not made.
    #[inline]
    fn settle<R>(
        &self,
        core: &mut QpCore,
        rkey: u32,
        accessed: Result<Result<R, Refusal>, AccessError>,
    ) -> Option<R> {
        match accessed {
            Ok(Ok(result)) => return Some(result),
            Ok(Err(refusal)) => self.note_refusal(core, rkey, refusal),
            Err(_) => {}
        }
        None
    }

    /// A refused access may be possible once the thread has asked how the region is reached.
    #[cold]
    pub(super) fn note_refusal(&self, core: &mut QpCore, rkey: u32, refusal: Refusal) {
        let Refusal::Unknown(version) = refusal else { return };
        if core.local.asked.replace((rkey, version)) != Some((rkey, version))
            && let Some(path) = core.qp.attr().path
        {
            self.local.command(Command::Ask(canonical(path.remote), rkey, version));
        }
    }

    fn with_sges<R>(
        &self,
        who: Accessor,
        need: AccessNeed,
        sges: &SgeList,
        keys: &LastKeys,
        act: impl FnOnce(&[HostRange]) -> R,
    ) -> Result<R, AccessError> {
        self.memory.with_local(who, need, &keys.sent, sges.iter().map(piece_of), act)
    }
}

#[inline(always)]
fn piece_of(sge: &Sge) -> LocalPiece {
    LocalPiece { lkey: sge.lkey, addr: sge.addr, len: sge.length.into() }
}

/// Fails a work request whose result had no memory left to go to.
#[cold]
fn lose_result(core: &mut QpCore, wr: &ShortWr) -> Reached {
    core.qp.fail_direct(&SendWr::from(wr));
    Reached::WithEvents
}

/// Whether a work request was carried out as it was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It is complete, and its completion delivered.
    Whole,
    /// It is complete, and the queue pair has events.
    WithEvents,
    /// It goes by packets.
    No,
}
