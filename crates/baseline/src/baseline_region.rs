//! The pager that the NIC calls: checks an access, and takes its buffers.

use std::sync::Arc;

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker};
use terrace_pages::RegionStats;

use crate::config::IoMethod;
use crate::core::Work;
use crate::engine::Engine;
use crate::job::are_cached;
use crate::pending::{Pending, Step, Task};
use crate::pool::{Buffer, TRANSFER_BYTES_MAX};
use crate::region::Region;
use crate::transfer::Access;

/// A region of a baseline. Carries out accesses to it.
///
/// Transfers make progress in [`crate::Baseline::advance`].
#[derive(Debug)]
pub struct BaselineRegion {
    pub(crate) engine: Arc<Engine>,
    pub(crate) region: Arc<Region>,
}

impl BaselineRegion {
    /// Statistics so far.
    pub fn stats(&self) -> RegionStats {
        self.region.stats()
    }

    fn check(&self, range: HostRange, write: bool) -> Result<(), AccessError> {
        if range.len > TRANSFER_BYTES_MAX || !self.region.translation.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        if write && !self.region.writable {
            return Err(AccessError::Permission);
        }
        Ok(())
    }

    fn access(&self, range: HostRange, task: Task, waker: &Waker) -> Pending {
        let (len, is_atomic) = match task {
            Task::Flush { .. } => (0, false),
            _ => (range.len as usize, matches!(task, Task::Atomic(_))),
        };
        let is_looked_up = task.is_write() && self.region.method == IoMethod::Tiering;
        Pending {
            region: self.region.clone(),
            caller: Arc::new(Access::new(len, is_atomic, waker)),
            offset: range.addr - self.region.range().addr,
            len,
            task,
            is_cached: is_looked_up && are_cached(range.addr, range.len),
            pages_missing: 0,
            step: Step::Waiting,
            data: None,
            scratch: None,
            io: None,
            given_back_at: None,
            write_number: 0,
        }
    }

    /// Begins an access whose buffers have all been taken.
    fn begin(&self, access: Pending) -> Result<Arc<dyn Transfer>, AccessError> {
        let (caller, mut work) = (access.caller.clone(), Work::default());
        {
            let mut core = self.engine.core.lock();
            if !core.serves(self.region.id) {
                return Err(AccessError::Fault);
            }
            core.add(access, &mut work);
        }
        self.engine.settle(work);
        Ok(caller)
    }

    fn transfer(
        &self,
        range: HostRange,
        task: Task,
        data: &[u8],
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        self.check(range, task.is_write())?;
        let mut access = self.access(range, task, waker);
        if range.len == 0 {
            // An access of zero bytes completes at once.
            let caller = access.caller;
            caller.end(Ok(()))();
            return Ok(caller);
        }
        match self.equip(&mut access, data, waker) {
            Ok(()) => self.begin(access),
            Err(error) => {
                // Without calling wakers: other waiting requesters were refused while these buffers were free, and this
                // access's requester would retry at once.
                access.data.into_iter().chain(access.scratch).for_each(Buffer::give_back_quietly);
                Err(error)
            }
        }
    }

    /// Takes all buffers that the access may need, however it is carried out.
    fn equip(&self, access: &mut Pending, data: &[u8], waker: &Waker) -> Result<(), AccessError> {
        let span = access.span();
        let take = || self.engine.pool.take(span, waker).ok_or(AccessError::NotReady);
        match access.task {
            Task::Read => {
                let buffer = self.engine.pool.take_in_turn(span, waker);
                access.data = Some(buffer.ok_or(AccessError::NotReady)?);
            }
            Task::Flush { .. } => access.data = Some(take()?),
            Task::Atomic(_) => access.scratch = Some(take()?),
            Task::Write => {
                let bytes = access.bytes();
                access.data.insert(take()?)[bytes].copy_from_slice(data);
                if span != access.len {
                    access.scratch = Some(take()?);
                }
            }
        }
        Ok(())
    }
}

impl Pager for BaselineRegion {
    fn translation(&self) -> &dyn Translation {
        &self.region.translation
    }

    /// `OutOfRange` for more than 64 KiB.
    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.transfer(range, Task::Read, &[], waker)
    }

    /// `OutOfRange` for more than 64 KiB.
    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.transfer(HostRange { addr, len: data.len() as u64 }, Task::Write, data, waker)
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !addr.is_multiple_of(8) {
            return Err(AccessError::Misaligned);
        }
        self.transfer(HostRange { addr, len: 8 }, Task::Atomic(op), &[], waker)
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !self.region.translation.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        let mut access = self.access(range, Task::Flush { before: 0, len: range.len }, waker);
        // Not for data: the buffer bounds the number of flushes under way.
        access.data = Some(self.engine.pool.take(PAGE_BYTES as usize, waker).ok_or(AccessError::NotReady)?);
        self.begin(access)
    }
}
