//! The program's memory, as the initiator of a queue pair and its target see it.

use std::collections::HashMap;
use std::sync::Arc;

use terrace_access::optimistic::{Held, HeldMemory, RegionAccess, TargetMemory};
use terrace_access::proto::{AtomicKind, Status};
use terrace_access::session::LocalMemory;
use terrace_hostmem::HostRange;
use terrace_memory::{Pager, Transfer, Waker};
use terrace_nic::{AccessError, AccessNeed, AtomicOp, LocalError, QueuePair, Sge};

/// The most bytes that a pager is asked for at a time.
const TRANSFER_BYTES: u64 = 64 << 10;

/// The program's memory at the initiator's end. The device's own accesses to it find every page, because the kernel brings
/// it: nothing has to be held.
pub(crate) struct LocalSide<'a>(pub &'a Arc<QueuePair>);

impl LocalMemory for LocalSide<'_> {
    fn read(&self, sge: &Sge, offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        self.0.pd().copy_out(sge, offset, out).map_err(|_| LocalError::Protection)
    }
}

impl HeldMemory for LocalSide<'_> {
    fn hold(&mut self, _token: u64, _sges: &[Sge], _writes: bool) -> Result<Held, LocalError> {
        Ok(Held::Now)
    }

    fn release(&mut self, _token: u64) {}

    fn write(&mut self, sge: &Sge, offset: u64, data: &[u8]) -> Result<(), LocalError> {
        self.0.copy_in(sge, offset, data).map_err(|_| LocalError::Protection)
    }
}

/// A range of a region that is held for the peer.
struct Hold {
    pager: Arc<dyn Pager>,
    range: HostRange,
    /// Bytes whose pages are present, and stay so because they are pinned.
    present: u64,
    /// Brings the next ones.
    transfer: Option<Arc<dyn Transfer>>,
    waker: Waker,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.pager.unpin(self.range);
    }
}

impl Hold {
    /// Has absent pages brought, in order. `Later` while a transfer is under way, whose end the waker reports.
    fn advance(&mut self) -> Result<Held, AccessError> {
        loop {
            if let Some(transfer) = &self.transfer {
                match transfer.outcome() {
                    None => return Ok(Held::Later),
                    Some(outcome) => outcome?,
                }
                self.transfer = None;
                self.present += self.next().len;
            }
            let next = self.next();
            if next.len == 0 {
                return Ok(Held::Now);
            }
            if self.pager.translation().is_present(next) {
                self.present += next.len;
                continue;
            }
            match self.pager.read(next, &self.waker) {
                Ok(transfer) => self.transfer = Some(transfer),
                Err(AccessError::NotReady) => return Ok(Held::Later),
                Err(error) => return Err(error),
            }
        }
    }

    fn next(&self) -> HostRange {
        let len = (self.range.len - self.present).min(TRANSFER_BYTES);
        HostRange { addr: self.range.addr + self.present, len }
    }
}

/// What is held for the peer of a queue pair, by the ids of its requests.
#[derive(Default)]
pub(crate) struct Holds(HashMap<u64, Hold>);

impl Holds {
    /// Has more of a held range brought. `None` while it is on its way, or if nothing is held by this id.
    pub fn advance(&mut self, token: u64) -> Option<Result<(), Status>> {
        match self.0.get_mut(&token)?.advance() {
            Ok(Held::Now) => Some(Ok(())),
            Ok(Held::Later) => None,
            Err(error) => Some(Err(status(error))),
        }
    }
}

/// The regions at the target's end.
pub(crate) struct TargetSide<'a> {
    pub qp: &'a Arc<QueuePair>,
    pub holds: &'a mut Holds,
    /// Makes the waker of a hold.
    pub waker: &'a dyn Fn(u64) -> Waker,
}

/// The status for a peer.
pub(crate) fn status(error: AccessError) -> Status {
    match error {
        AccessError::UnknownKey | AccessError::WrongPd | AccessError::WrongQp => Status::NoSuchRegion,
        AccessError::Permission | AccessError::Fault => Status::AccessDenied,
        AccessError::OutOfRange => Status::OutOfRange,
        AccessError::Misaligned => Status::Invalid,
        AccessError::NotReady | AccessError::Retry => Status::Busy,
        AccessError::NoSpace => Status::NoSpace,
        AccessError::Device | AccessError::Flush => Status::DeviceError,
    }
}

impl TargetMemory for TargetSide<'_> {
    fn hold(
        &mut self,
        token: u64,
        rkey: u32,
        va: u64,
        length: u32,
        access: RegionAccess,
    ) -> Result<Held, Status> {
        let need = match access {
            RegionAccess::Read => AccessNeed::Read,
            RegionAccess::Write => AccessNeed::Write,
            RegionAccess::Atomic => AccessNeed::Atomic,
        };
        self.qp.check_peer(rkey, va, length.into(), need).map_err(status)?;
        let Some(key) = self.qp.paged_key(rkey).map_err(status)? else { return Ok(Held::Now) };
        let range = key.locate(va, length.into());
        if !key.pager.pin(range) {
            return Err(Status::Busy);
        }
        let translation = key.pager.translation();
        translation.count(range, translation.is_present(range));
        let waker = (self.waker)(token);
        let mut hold = Hold { pager: key.pager.clone(), range, present: 0, transfer: None, waker };
        let held = hold.advance().map_err(status)?;
        self.holds.0.insert(token, hold);
        Ok(held)
    }

    fn release(&mut self, token: u64) {
        self.holds.0.remove(&token);
    }

    fn read(&mut self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), Status> {
        self.qp.read_for_peer(rkey, va, out).map_err(status)
    }

    fn write(&mut self, rkey: u32, va: u64, data: &[u8]) -> Result<(), Status> {
        self.qp.write_for_peer(rkey, va, data).map_err(status)
    }

    fn atomic(&mut self, rkey: u32, va: u64, operation: AtomicKind) -> Result<u64, Status> {
        let operation = match operation {
            AtomicKind::CompareSwap { compare, swap } => AtomicOp::CompareSwap { compare, swap },
            AtomicKind::FetchAdd { add } => AtomicOp::FetchAdd { add },
            AtomicKind::Write { value } => AtomicOp::Write { value },
        };
        self.qp.atomic_for_peer(rkey, va, operation).map_err(status)
    }
}
