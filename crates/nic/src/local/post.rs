//! Work requests that are carried out as they are posted.

use terrace_memory::shared::{Lead, LocalPiece, Refusal};
use terrace_memory::{AccessError, AccessNeed, Accessor, AtomicOp, HostRange};
use terrace_transport::{CopyDirection, CopyWr, Payload, SendOp, SendWr, Sge, SgeList};

use super::{Command, canonical};
use crate::device::Device;
use crate::host::LastKeys;
use crate::qp::{QpCore, QueuePair};

impl Device {
    /// Carries a work request out, if the peer's memory can be reached into and everything that was posted before is over. Packets
    /// do the rest.
    pub(crate) fn reach(&self, qp: &QueuePair, core: &mut QpCore, wr: &SendWr) -> Reached {
        if !can_reach(&wr.op) {
            return Reached::No;
        }
        if !self.may_reach(core) {
            return Reached::No;
        }
        let lead = core.local.lead.take().filter(|lead| !lead.reach().is_gone());
        let Some(mut lead) = lead else { return Reached::No };
        let is_valid = core.qp.check_sends(std::slice::from_ref(wr)).is_ok();
        let outcome = if is_valid { self.carry_out(qp, core, &mut lead, wr) } else { Outcome::NotHere };
        core.local.lead = Some(lead);
        match outcome {
            Outcome::Done => {
                if let Some(wc) = core.qp.complete_direct(wr) {
                    self.complete_send(qp, core, wc);
                }
                Reached::Whole
            }
            Outcome::ResultLost => {
                core.qp.fail_direct(wr);
                Reached::WithEvents
            }
            Outcome::NotHere => Reached::No,
        }
    }

    /// Carries a short work request out in the same way. False if it is for packets.
    #[inline]
    pub(crate) fn copy_at_once(&self, qp: &QueuePair, core: &mut QpCore, wr: &CopyWr) -> bool {
        if !self.local.is_on() || !core.qp.is_quiet_for(wr) {
            return false;
        }
        let Some(lead) = core.local.lead() else { return false };
        let who = Accessor::local(qp.pd().handle(), qp.qpn());
        let piece = LocalPiece { lkey: wr.local.lkey, addr: wr.local.addr, len: wr.local.length.into() };
        let copied = match wr.direction {
            CopyDirection::Read => {
                self.memory.with_piece(who, AccessNeed::Write, &qp.keys.sent, piece, |into| {
                    lead.read_to(wr.rkey, wr.va, into)
                })
            }
            CopyDirection::Write => {
                self.memory.with_piece(who, AccessNeed::Read, &qp.keys.sent, piece, |from| {
                    lead.write_of(wr.rkey, wr.va, from)
                })
            }
        };
        let is_done = matches!(self.settle_copy(core, wr.rkey, copied), Outcome::Done);
        if is_done && let Some(wc) = core.qp.complete_copy(wr) {
            self.complete_send(qp, core, wc);
        }
        is_done
    }

    /// Whether a work request that is posted now is the only one, and there is a way to neighbours.
    #[inline]
    pub(super) fn may_reach(&self, core: &QpCore) -> bool {
        self.local.is_on() && core.qp.is_quiet()
    }

    fn carry_out(&self, qp: &QueuePair, core: &mut QpCore, lead: &mut Lead, wr: &SendWr) -> Outcome {
        let who = Accessor::local(qp.pd().handle(), qp.qpn());
        let may_read = core.qp.attr().max_rd_atomic > 0;
        match (&wr.op, &wr.payload) {
            (&SendOp::Read { va, rkey }, Payload::Sges(sges)) if may_read => {
                let keys = &qp.keys;
                let read =
                    self.with_sges(who, AccessNeed::Write, sges, keys, |into| lead.read(rkey, va, into));
                self.settle_copy(core, rkey, read)
            }
            (&SendOp::Write { va, rkey }, Payload::Sges(sges)) => {
                let keys = &qp.keys;
                let written =
                    self.with_sges(who, AccessNeed::Read, sges, keys, |from| lead.write(rkey, va, from));
                self.settle_copy(core, rkey, written)
            }
            (&SendOp::Write { va, rkey }, Payload::Inline(bytes)) => {
                let from = HostRange { addr: bytes.as_ptr() as u64, len: bytes.len() as u64 };
                self.settle_copy(core, rkey, Ok(lead.write(rkey, va, &[from])))
            }
            (&SendOp::CompareSwap { va, rkey, compare, swap }, Payload::Sges(sges)) if may_read => {
                self.reach_atomic(who, sges, lead, rkey, va, AtomicOp::CompareSwap { compare, swap })
            }
            (&SendOp::FetchAdd { va, rkey, add }, Payload::Sges(sges)) if may_read => {
                self.reach_atomic(who, sges, lead, rkey, va, AtomicOp::FetchAdd { add })
            }
            _ => Outcome::NotHere,
        }
    }

    fn settle_copy(
        &self,
        core: &mut QpCore,
        rkey: u32,
        copied: Result<Result<(), Refusal>, AccessError>,
    ) -> Outcome {
        match copied {
            Ok(Ok(())) => return Outcome::Done,
            Ok(Err(refusal)) => self.note_refusal(core, rkey, refusal),
            Err(_) => {}
        }
        Outcome::NotHere
    }

    /// What could not be copied may be possible once the thread has asked how.
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
        let piece = |sge: &Sge| LocalPiece { lkey: sge.lkey, addr: sge.addr, len: sge.length.into() };
        self.memory.with_local(who, need, &keys.sent, sges.iter().map(piece), act)
    }

    /// The value before it goes where the work request says: where that is not there, nothing happens.
    fn reach_atomic(
        &self,
        who: Accessor,
        sges: &SgeList,
        lead: &mut Lead,
        rkey: u32,
        va: u64,
        op: AtomicOp,
    ) -> Outcome {
        let [sge] = sges.as_slice() else { return Outcome::NotHere };
        let mut before = [0; 8];
        let there = self.memory.read(who, sge.lkey, sge.addr, &mut before);
        if there.and_then(|()| self.memory.write(who, sge.lkey, sge.addr, &before)).is_err() {
            return Outcome::NotHere;
        }
        let Ok(old) = lead.atomic(rkey, va, op) else { return Outcome::NotHere };
        match self.memory.write(who, sge.lkey, sge.addr, &old.to_ne_bytes()) {
            Ok(()) => Outcome::Done,
            Err(_) => Outcome::ResultLost,
        }
    }
}

/// Whether a work request was carried out as it was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It is over, its completion where it belongs.
    Whole,
    /// It is over, and the queue pair has something to tell.
    WithEvents,
    /// It is for packets.
    No,
}

/// What became of a work request.
enum Outcome {
    Done,
    /// It was carried out, but the memory for its result went away meanwhile.
    ResultLost,
    /// Nothing, or nothing that does harm when it is done again.
    NotHere,
}

fn can_reach(op: &SendOp) -> bool {
    matches!(
        op,
        SendOp::Read { .. } | SendOp::Write { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }
    )
}
