//! Accesses that a protocol above a queue pair makes for the peer, or for the program, with the rights of the queue pair:
//! the same checks as for packets and work requests.

use std::sync::Arc;

use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{Absence, AccessError, AccessNeed, Accessor, Pager};
use terrace_transport::{QpState, Sge};

use crate::device::Device;
use crate::error::Error;
use crate::host::remote_error;
use crate::qp::QueuePair;

/// A key of paged memory.
#[derive(Clone, Debug)]
pub struct PagedKey {
    /// The address by which the peer names the first byte.
    pub start: u64,
    /// The pager's addresses that the key covers.
    pub range: HostRange,
    /// The pager.
    pub pager: Arc<dyn Pager>,
}

impl PagedKey {
    /// The pager's range for a range of the peer's addresses, which the key covers.
    pub fn locate(&self, va: u64, len: u64) -> HostRange {
        HostRange { addr: self.range.addr.wrapping_add(va.wrapping_sub(self.start)), len }
    }
}

/// A key that no other region or window gets.
pub struct RetainedKey {
    device: Arc<Device>,
    rkey: u32,
}

impl Drop for RetainedKey {
    fn drop(&mut self) {
        self.device.memory.end_retention(self.rkey);
    }
}

/// `ibv_access_flags` that a queue pair must have for an access of its peer.
fn flag(need: AccessNeed) -> u32 {
    match need {
        AccessNeed::Write => 1 << 1,
        AccessNeed::Read => 1 << 2,
        AccessNeed::Atomic => 1 << 3,
        AccessNeed::FlushGlobal => 1 << 8,
        AccessNeed::FlushPersistent => 1 << 9,
    }
}

impl QueuePair {
    /// For memory that is held: when its region has changed meanwhile, absent memory may be in its place.
    fn peer(&self) -> Accessor {
        Accessor::remote(self.pd().handle(), self.qpn()).with_absence(Absence::Refuse)
    }

    /// The pager of the memory that the peer names by this key. `None` if all of it is in memory.
    ///
    /// # Errors
    /// If the peer may not use the key.
    pub fn paged_key(&self, rkey: u32) -> Result<Option<PagedKey>, AccessError> {
        let found = self.device().memory.paged_key(self.peer(), rkey)?;
        Ok(found.map(|(start, range, pager)| PagedKey { start, range, pager }))
    }

    /// Checks an access of the peer as the responder does.
    ///
    /// # Errors
    /// `Permission` if the queue pair does not permit it, or has no peer; those of the key.
    pub fn check_peer(&self, rkey: u32, va: u64, len: u64, need: AccessNeed) -> Result<(), AccessError> {
        self.check_right(need)?;
        self.device().memory.check(self.peer(), rkey, va, len, need)
    }

    /// Checks whether the peer may make accesses of this kind to any memory of a key.
    ///
    /// # Errors
    /// As for [`QueuePair::check_peer`].
    pub fn check_peer_right(&self, rkey: u32, need: AccessNeed) -> Result<(), AccessError> {
        self.check_right(need)?;
        self.device().memory.check_right(self.peer(), rkey, need)
    }

    fn check_right(&self, need: AccessNeed) -> Result<(), AccessError> {
        let is_permitted = self.is_connected() && self.query().access & flag(need) != 0;
        if is_permitted { Ok(()) } else { Err(AccessError::Permission) }
    }

    /// Whether the queue pair takes requests of a peer.
    pub fn is_connected(&self) -> bool {
        matches!(self.query().state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// Ends the connection because a request of the peer was refused, as the responder does: the queue pair is moved to the
    /// error state, and the program gets the event of the reason.
    pub fn refuse_peer(self: &Arc<Self>, reason: AccessError) {
        let Ok(mut core) = self.lock_alive() else { return };
        let (transport, host) = core.parts(self, None);
        transport.refuse(remote_error(reason), &host);
        self.device().after_change(self, core);
    }

    /// Retains a key: no other region or window gets it, also when its own has ended, until the result is dropped.
    pub fn retain_key(&self, rkey: u32) -> RetainedKey {
        let device = self.device().clone();
        device.memory.retain(rkey);
        RetainedKey { device, rkey }
    }

    /// Reads for the peer.
    ///
    /// # Errors
    /// Those of the key; `Fault` if the memory is gone; `NotReady` if it is absent.
    pub fn read_for_peer(&self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.device().memory.read(self.peer(), rkey, va, out)
    }

    /// Writes for the peer.
    ///
    /// # Errors
    /// As for [`QueuePair::read_for_peer`].
    pub fn write_for_peer(&self, rkey: u32, va: u64, data: &[u8]) -> Result<(), AccessError> {
        self.device().memory.write(self.peer(), rkey, va, data)
    }

    /// Performs an atomic operation for the peer.
    ///
    /// # Errors
    /// As for [`QueuePair::read_for_peer`]; `Misaligned`.
    pub fn atomic_for_peer(&self, rkey: u32, va: u64, op: AtomicOp) -> Result<u64, AccessError> {
        self.device().memory.atomic(self.peer(), rkey, va, op)
    }

    /// Has the peer READ a region of the protection domain although the queue pair itself may not permit READs, until
    /// RESET; or not any more.
    pub fn permit_reads_of(&self, rkey: u32, is_permitted: bool) {
        self.table_keys.set(rkey, is_permitted);
    }

    /// Copies to memory that local work requests may name, from `offset` on in a piece of it.
    ///
    /// # Errors
    /// EINVAL for an unknown key, a range that is not within its region, or memory that is gone.
    pub fn copy_in(&self, sge: &Sge, offset: u64, data: &[u8]) -> Result<(), Error> {
        let who = Accessor::local(self.pd().handle(), self.qpn());
        let copied = self.device().memory.write(who, sge.lkey, sge.addr.wrapping_add(offset), data);
        copied.map_err(|_| Error::Invalid("no memory that local work requests may name"))
    }
}
