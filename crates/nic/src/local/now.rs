//! One-sided accesses without work requests, for Rust callers: they are complete when the call returns, and
//! need no registered buffer, no work request and no completion.

use terrace_hostmem::AtomicOp;
use terrace_shm::{DirectAccess, Refusal};
use terrace_transport::{ATOMIC_LEN, MESSAGE_LEN_MAX};

use crate::error::Error;
use crate::qp::QueuePair;

/// Each of these calls takes effect as a work request that is posted now and has completed when the call returns; it is
/// counted as [`QpCounters::direct`](terrace_transport::QpCounters::direct). None of them sends a packet. The access is
/// not done, and the result says so, where the peer is not on this host, its memory is absent, a key is wrong, there
/// are no bytes or more than [`MESSAGE_LEN_MAX`], or earlier work requests are outstanding; parts may have been copied
/// by then. A work request does such an access, or ends with the status that says what is wrong.
///
/// # Errors
/// EINVAL for a queue pair that was destroyed.
impl QueuePair {
    /// READ: copies from the peer's memory at `va`. False if it was not done.
    #[inline]
    pub fn read_now(&self, rkey: u32, va: u64, into: &mut [u8]) -> Result<bool, Error> {
        let len = into.len() as u64;
        self.prefetch_hint.prefetch(rkey, va, false);
        Ok(self.access_now(rkey, len, true, |direct| direct.read_into(rkey, va, into))?.is_some())
    }

    /// WRITE: copies to the peer's memory at `va`. False if it was not done.
    #[inline]
    pub fn write_now(&self, rkey: u32, va: u64, from: &[u8]) -> Result<bool, Error> {
        let len = from.len() as u64;
        self.prefetch_hint.prefetch(rkey, va, true);
        Ok(self.access_now(rkey, len, false, |direct| direct.write_from(rkey, va, from))?.is_some())
    }

    /// A compare and swap or fetch and add of the 8 bytes of the peer's memory at `va`: returns the value before it,
    /// `None` if it was not done. ATOMIC WRITEs need a work request.
    #[inline]
    pub fn atomic_now(&self, rkey: u32, va: u64, op: AtomicOp) -> Result<Option<u64>, Error> {
        if matches!(op, AtomicOp::Write { .. }) {
            return Ok(None);
        }
        self.prefetch_hint.prefetch(rkey, va, true);
        self.access_now(rkey, ATOMIC_LEN.into(), true, |direct| direct.atomic(rkey, va, op))
    }

    /// Makes the access as [`Device::carry_out_direct`](crate::device::Device) makes that of a work request: by the same
    /// checks, and by the same route. `brings` says whether it returns data.
    #[inline]
    fn access_now<R>(
        &self,
        rkey: u32,
        len: u64,
        brings: bool,
        act: impl FnOnce(&mut DirectAccess) -> Result<R, Refusal>,
    ) -> Result<Option<R>, Error> {
        let mut core = self.lock_alive()?;
        let device = self.device();
        device.update_route(self, &mut core);
        if !device.local.is_on() || len > MESSAGE_LEN_MAX.into() || !core.qp.may_access_direct(brings) {
            return Ok(None);
        }
        let done = device.access_direct(self, &mut core, rkey, act);
        if done.is_some() {
            core.qp.count_direct(len);
        }
        Ok(done)
    }
}
