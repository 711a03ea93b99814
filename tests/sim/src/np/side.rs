//! The memory of both nodes, as the protocol sees it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use terrace_access::optimistic::{Held, HeldMemory, Lent, RegionAccess, TargetMemory};
use terrace_access::proto::{Access, AtomicKind, Status};
use terrace_access::session::LocalMemory;
use terrace_nic::{AtomicOp, LocalError, Sge};

use super::pages::{Holds, SPOILED, apply};
use crate::cells;
use crate::rng::SimRng;

/// The first addresses by which work requests name memory. They do not depend on this process's address space.
pub(super) const LOCAL: u64 = 0x1_0000_0000;
pub(super) const REMOTE: u64 = 0x2_0000_0000;
pub(super) const VERSIONS: u64 = 0x3_0000_0000;
pub(super) const SCRATCH: u64 = 0x4_0000_0000;
pub(super) const RECEIVED: u64 = 0x5_0000_0000;
pub(super) const LENT: u64 = 0x6_0000_0000;

/// Longest time that bringing pages takes, in nanoseconds.
const FAULT_NS_MAX: u64 = 100_000;

/// A pair's view of the initiator's memory.
pub(super) struct LocalSide<'a> {
    pub pair: usize,
    pub now: u64,
    pub rng: &'a mut SimRng,
    pub holds: &'a mut Holds,
    pub scratch: &'a Arc<[AtomicU64]>,
    pub scratch_key: u32,
    pub lent: &'a Slots,
}

/// Memory that the peer moves bytes to and from, a slot for each call of each pair. Ids of calls that are under way at a time
/// differ by less than a pair has slots.
pub(super) struct Slots {
    pub cells: Arc<[AtomicU64]>,
    pub key: u32,
    pub slot_bytes: usize,
    /// Slots of a pair.
    pub count: u64,
}

impl Slots {
    fn offset(&self, pair: usize, id: u64) -> usize {
        (pair * self.count as usize + (id % self.count) as usize) * self.slot_bytes
    }
}

fn local_range(sge: &Sge) -> Range<usize> {
    let start = (sge.addr - LOCAL) as usize;
    start..start + sge.length as usize
}

impl LocalMemory for LocalSide<'_> {
    fn read(&self, sge: &Sge, offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        if sge.lkey == self.scratch_key {
            cells::load(self.scratch, (sge.addr - SCRATCH + offset) as usize, out);
        } else {
            self.holds.pages.peek(local_range(sge).start + offset as usize, out);
        }
        Ok(())
    }
}

impl HeldMemory for LocalSide<'_> {
    fn hold(&mut self, token: u64, sges: &[Sge], _writes: bool) -> Result<Held, LocalError> {
        let due = self.now + self.rng.spread(100..=FAULT_NS_MAX);
        let is_held = self.holds.hold((self.pair, token), sges.iter().map(local_range), due);
        Ok(if is_held { Held::Now } else { Held::Later })
    }

    fn release(&mut self, token: u64) {
        self.holds.release((self.pair, token));
    }

    fn write(&mut self, sge: &Sge, offset: u64, data: &[u8]) -> Result<(), LocalError> {
        cells::store(&self.holds.pages.cells, local_range(sge).start + offset as usize, data);
        Ok(())
    }

    fn lend(&mut self, id: u64, sge: &Sge, by_peer: Access) -> Result<Lent, LocalError> {
        let offset = self.lent.offset(self.pair, id);
        if by_peer == Access::Read {
            let mut data = vec![0; sge.length as usize];
            self.read(sge, 0, &mut data)?;
            cells::store(&self.lent.cells, offset, &data);
        }
        Ok(Lent { va: LENT + offset as u64, rkey: self.lent.key })
    }

    fn take_back(&mut self, id: u64, into: Option<&Sge>) -> Result<(), LocalError> {
        let offset = self.lent.offset(self.pair, id);
        if let Some(sge) = into {
            let mut data = vec![0; sge.length as usize];
            cells::load(&self.lent.cells, offset, &mut data);
            self.write(sge, 0, &data)?;
        }
        // The next call must not find these bytes.
        cells::store(&self.lent.cells, offset, &vec![SPOILED; self.lent.slot_bytes]);
        Ok(())
    }
}

/// A pair's view of the target's memory.
pub(super) struct RemoteSide<'a> {
    pub pair: usize,
    pub now: u64,
    pub rng: &'a mut SimRng,
    pub holds: &'a mut Holds,
    /// The key of the region, and where it begins in the memory.
    pub key: u32,
    pub lead: usize,
    /// Probability that there is no room for a hold.
    pub busy: f64,
}

impl RemoteSide<'_> {
    fn range(&self, rkey: u32, va: u64, length: usize) -> Result<Range<usize>, Status> {
        if rkey != self.key {
            return Err(Status::NoSuchRegion);
        }
        let start = va.checked_sub(REMOTE).ok_or(Status::OutOfRange)? as usize + self.lead;
        let is_within = start + length <= self.holds.pages.cells.len() * 8;
        if is_within { Ok(start..start + length) } else { Err(Status::OutOfRange) }
    }
}

impl TargetMemory for RemoteSide<'_> {
    fn hold(
        &mut self,
        token: u64,
        rkey: u32,
        va: u64,
        length: u32,
        _access: RegionAccess,
    ) -> Result<Held, Status> {
        let range = self.range(rkey, va, length as usize)?;
        if self.rng.chance(self.busy) {
            return Err(Status::Busy);
        }
        let due = self.now + self.rng.spread(100..=FAULT_NS_MAX);
        let is_held = self.holds.hold((self.pair, token), std::iter::once(range), due);
        Ok(if is_held { Held::Now } else { Held::Later })
    }

    fn release(&mut self, token: u64) {
        self.holds.release((self.pair, token));
    }

    fn read(&mut self, rkey: u32, va: u64, out: &mut [u8]) -> Result<(), Status> {
        let range = self.range(rkey, va, out.len())?;
        cells::load(&self.holds.pages.cells, range.start, out);
        Ok(())
    }

    fn write(&mut self, rkey: u32, va: u64, data: &[u8]) -> Result<(), Status> {
        let range = self.range(rkey, va, data.len())?;
        cells::store(&self.holds.pages.cells, range.start, data);
        Ok(())
    }

    fn atomic(&mut self, rkey: u32, va: u64, operation: AtomicKind) -> Result<u64, Status> {
        let range = self.range(rkey, va, 8)?;
        let operation = match operation {
            AtomicKind::CompareSwap { compare, swap } => AtomicOp::CompareSwap { compare, swap },
            AtomicKind::FetchAdd { add } => AtomicOp::FetchAdd { add },
            AtomicKind::Write { value } => AtomicOp::Write { value },
        };
        Ok(apply(&self.holds.pages.cells[range.start / 8], operation))
    }
}
