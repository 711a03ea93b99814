//! The program's memory, as the initiator of a queue pair and its target see it.

use std::collections::HashMap;
use std::sync::Arc;

use terrace_access::optimistic::{Held, HeldMemory, Lent, RegionAccess, TargetMemory};
use terrace_access::proto::{Access, AtomicKind, Status};
use terrace_access::session::LocalMemory;
use terrace_hostmem::HostRange;
use terrace_memory::{Pager, Transfer, Waker};
use terrace_nic::{AccessError, AccessNeed, AtomicOp, Error, LocalError, Mr, MrRequest, QueuePair, Sge};

use crate::control::ControlQp;
use crate::settings::Settings;

/// The most bytes that a pager is asked for at a time.
const TRANSFER_BYTES: u64 = 64 << 10;
/// `ibv_access_flags`.
const LOCAL_WRITE: u32 = 1;

/// The program's memory at the initiator's end. The device's own accesses to it find every page, because the kernel brings
/// it: nothing has to be held.
pub(crate) struct LocalSide<'a> {
    qp: &'a Arc<QueuePair>,
    /// What the peer moves bytes by.
    control: Option<&'a ControlQp>,
    /// Whether a registration is made for each request, as where nothing can be pinned without one.
    is_registered_late: bool,
}

impl<'a> LocalSide<'a> {
    pub fn new(qp: &'a Arc<QueuePair>, control: Option<&'a ControlQp>, settings: &Settings) -> LocalSide<'a> {
        LocalSide { qp, control, is_registered_late: settings.is_two_sided }
    }
}

impl LocalMemory for LocalSide<'_> {
    fn read(&self, sge: &Sge, offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        self.qp.pd().copy_out(sge, offset, out).map_err(|_| LocalError::Protection)
    }
}

impl HeldMemory for LocalSide<'_> {
    fn hold(&mut self, _token: u64, sges: &[Sge], _writes: bool) -> Result<Held, LocalError> {
        if self.is_registered_late {
            for sge in sges {
                // The request's own key has the permissions, and is checked by the NIC.
                LateRegistration::new(self.qp, HostRange { addr: sge.addr, len: sge.length.into() })
                    .map_err(|_| LocalError::Protection)?;
            }
        }
        Ok(Held::Now)
    }

    fn release(&mut self, _token: u64) {}

    fn write(&mut self, sge: &Sge, offset: u64, data: &[u8]) -> Result<(), LocalError> {
        self.qp.copy_in(sge, offset, data).map_err(|_| LocalError::Protection)
    }

    fn lend(&mut self, id: u64, sge: &Sge, by_peer: Access) -> Result<Lent, LocalError> {
        let mut data = Vec::new();
        if by_peer == Access::Read {
            data.resize(sge.length as usize, 0);
            self.read(sge, 0, &mut data)?;
        }
        let lent = self.control.map(|control| control.lend(id, &data));
        lent.and_then(Result::ok).ok_or(LocalError::Protection)
    }

    fn take_back(&mut self, id: u64, into: Option<&Sge>) -> Result<(), LocalError> {
        let Some(sge) = into else { return Ok(()) };
        let mut data = vec![0; sge.length as usize];
        let taken = self.control.map(|control| control.take_lent(id, &mut data));
        taken.and_then(Result::ok).ok_or(LocalError::Protection)?;
        self.write(sge, 0, &data)
    }
}

/// A registration of a range for one request: what it costs where memory is pinned by nothing else. The request uses the keys of the
/// program.
struct LateRegistration(Arc<Mr>);

impl LateRegistration {
    fn new(qp: &QueuePair, range: HostRange) -> Result<LateRegistration, Error> {
        let HostRange { addr, len: length } = range;
        let request = MrRequest { addr, length, iova: addr, access: LOCAL_WRITE, paging: None };
        qp.pd().reg_mr(request).map(LateRegistration)
    }
}

impl Drop for LateRegistration {
    fn drop(&mut self) {
        if let Err(error) = self.0.dereg() {
            tracing::error!(%error, "a registration for one request cannot be ended");
        }
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
    registration: Option<LateRegistration>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.registration = None;
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
    pub fn advance(&mut self, qp: &Arc<QueuePair>, token: u64) -> Option<Result<(), Status>> {
        match self.0.get_mut(&token)?.advance() {
            Ok(Held::Now) => Some(Ok(())),
            Ok(Held::Later) => None,
            Err(error) => Some(Err(refuse(qp, error))),
        }
    }
}

/// The regions at the target's end.
pub(crate) struct TargetSide<'a> {
    pub qp: &'a Arc<QueuePair>,
    pub holds: &'a mut Holds,
    /// Whether a registration is made for each request.
    pub is_registered_late: bool,
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

/// Refuses a request of the peer as the responder does, unless the peer may retry it. Returns the status for the peer.
fn refuse(qp: &Arc<QueuePair>, error: AccessError) -> Status {
    let status = status(error);
    if status != Status::Busy {
        qp.refuse_peer(error);
    }
    status
}

impl TargetSide<'_> {
    /// # Errors
    /// `Disconnected` if the queue pair takes no requests of a peer: not any more, or not yet.
    fn require_connection(&self) -> Result<(), Status> {
        if self.qp.is_connected() { Ok(()) } else { Err(Status::Disconnected) }
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
        self.require_connection()?;
        let refused = |error| refuse(self.qp, error);
        self.qp.check_peer(rkey, va, length.into(), need).map_err(refused)?;
        let Some(key) = self.qp.paged_key(rkey).map_err(refused)? else { return Ok(Held::Now) };
        let range = key.locate(va, length.into());
        if range.len > key.pager.pin_bytes_max() {
            return Err(refused(AccessError::NoSpace));
        }
        if !key.pager.pin(range) {
            return Err(Status::Busy);
        }
        let translation = key.pager.translation();
        translation.count(range, translation.is_present(range));
        let waker = (self.waker)(token);
        let (pager, registration) = (key.pager.clone(), None);
        let mut hold = Hold { pager, range, present: 0, transfer: None, waker, registration };
        if self.is_registered_late {
            hold.registration = Some(LateRegistration::new(self.qp, range).map_err(|_| Status::Busy)?);
        }
        let held = hold.advance().map_err(refused)?;
        self.holds.0.insert(token, hold);
        Ok(held)
    }

    fn release(&mut self, token: u64) {
        self.holds.0.remove(&token);
    }

    fn read(&mut self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), Status> {
        self.require_connection()?;
        self.qp.read_for_peer(rkey, va, out).map_err(|error| refuse(self.qp, error))
    }

    fn write(&mut self, rkey: u32, va: u64, data: &[u8]) -> Result<(), Status> {
        self.require_connection()?;
        self.qp.write_for_peer(rkey, va, data).map_err(|error| refuse(self.qp, error))
    }

    fn atomic(&mut self, rkey: u32, va: u64, operation: AtomicKind) -> Result<u64, Status> {
        self.require_connection()?;
        let operation = match operation {
            AtomicKind::CompareSwap { compare, swap } => AtomicOp::CompareSwap { compare, swap },
            AtomicKind::FetchAdd { add } => AtomicOp::FetchAdd { add },
            AtomicKind::Write { value } => AtomicOp::Write { value },
        };
        self.qp.atomic_for_peer(rkey, va, operation).map_err(|error| refuse(self.qp, error))
    }
}
