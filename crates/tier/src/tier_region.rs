//! The pager that the NIC calls: checks an access, takes its buffers and splits it at unit boundaries.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES, UNIT_BYTES};
use terrace_memory::{AccessError, Pager, Presence, Transfer, Translation, UnitPager, Waker};

use crate::core::Work;
use crate::engine::Engine;
use crate::part::{Lane, Part, Step, Task};
use crate::pool::{Buffer, TRANSFER_BYTES_MAX};
use crate::region::Region;
use crate::stats::{Kind, RegionStats};
use crate::transfer::Access;

/// A region of a tier. Carries out accesses to it.
///
/// Transfers make progress in [`crate::Tier::advance`].
#[derive(Debug)]
pub struct TierRegion {
    pub(crate) engine: Arc<Engine>,
    pub(crate) region: Arc<Region>,
}

/// The bytes of an access that lie in one unit.
struct Slice {
    offset: u64,
    base: usize,
    len: usize,
}

impl TierRegion {
    /// Statistics so far.
    pub fn stats(&self) -> RegionStats {
        let range = self.region.presence.range();
        let words = self.region.presence.bitmap().iter();
        let units_resident = words.map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum();
        RegionStats { addr: range.addr, len: range.len, units_resident, ..self.region.counters.read() }
    }

    /// Whether the tier is the only user of the file.
    pub fn is_exclusive(&self) -> bool {
        self.region.exclusive
    }

    /// Splits a range at unit boundaries, into at most two slices.
    fn slices(&self, range: HostRange) -> impl Iterator<Item = Slice> + use<> {
        let start = range.addr - self.region.presence.range().addr;
        let end = start + range.len;
        let border = (start / UNIT_BYTES + 1) * UNIT_BYTES;
        [(start, end.min(border)), (border, end)].into_iter().filter(|(from, to)| from < to).map(
            move |(from, to)| Slice {
                offset: from,
                base: (from - start) as usize,
                len: (to - from) as usize,
            },
        )
    }

    fn check(&self, range: HostRange, write: bool) -> Result<(), AccessError> {
        if range.len > TRANSFER_BYTES_MAX || !self.region.presence.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        if write && !self.region.writable {
            return Err(AccessError::Permission);
        }
        Ok(())
    }

    fn part(&self, access: &Arc<Access>, index: usize, slice: &Slice, task: Task) -> Part {
        Part {
            region: self.region.clone(),
            access: access.clone(),
            index,
            base: slice.base,
            unit: (slice.offset / UNIT_BYTES) as usize,
            offset: slice.offset,
            len: slice.len,
            task,
            in_order: false,
            pages_missing: 0,
            step: Step::Waiting,
            lane: Lane::None,
            kind: Kind::Late,
            data: None,
            scratch: None,
            io: None,
            given_back_at: None,
            write_number: 0,
        }
    }

    /// Begins an access whose buffers have all been taken.
    fn begin(&self, access: Arc<Access>, parts: Vec<Part>) -> Result<Arc<dyn Transfer>, AccessError> {
        let mut work = Work::default();
        {
            let mut core = self.engine.core.lock();
            if !core.serves(self.region.id) {
                return Err(AccessError::Fault);
            }
            for part in parts {
                core.add(part, &mut work);
            }
        }
        self.engine.settle(work);
        Ok(access)
    }

    fn transfer(
        &self,
        range: HostRange,
        task: Task,
        data: &[u8],
        waker: &Waker,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        self.check(range, task.is_write())?;
        let is_atomic = matches!(task, Task::Atomic(_));
        let part_count = self.slices(range).count();
        let access = Arc::new(Access::new(range.len as usize, is_atomic, part_count.max(1), waker));
        if part_count == 0 {
            // An access of zero bytes completes at once.
            self.engine
                .settle(Work { wakers: access.part_done(Ok(())).into_iter().collect(), ..Work::default() });
            return Ok(access);
        }
        let mut parts = Vec::with_capacity(part_count);
        for (index, slice) in self.slices(range).enumerate() {
            parts.push(self.part(&access, index, &slice, task));
            let equipped = parts.last_mut().map_or(Ok(()), |part| self.equip(part, data, waker));
            if let Err(error) = equipped {
                give_back(parts);
                return Err(error);
            }
        }
        self.begin(access, parts)
    }

    /// Takes all buffers that the part may need in any state of its unit.
    fn equip(&self, part: &mut Part, data: &[u8], waker: &Waker) -> Result<(), AccessError> {
        let span = part.span();
        let take = || self.engine.pool.take(span, waker).ok_or(AccessError::NotReady);
        match part.task {
            // Only for the first part: its own buffer must not make the second part wait.
            Task::Read if part.index == 0 => {
                let buffer = self.engine.pool.take_in_turn(span, waker);
                part.data = Some(buffer.ok_or(AccessError::NotReady)?);
            }
            Task::Read | Task::Flush { .. } => part.data = Some(take()?),
            Task::Atomic(_) => part.scratch = Some(take()?),
            Task::Write => {
                let bytes = part.bytes();
                let buffer = part.data.insert(take()?);
                buffer[bytes].copy_from_slice(&data[part.base..part.base + part.len]);
                if self.region.exclusive && span != part.len {
                    part.scratch = Some(take()?);
                }
            }
        }
        Ok(())
    }
}

/// Frees the buffers of an access that did not get all of them, without calling wakers. Other waiting requesters were
/// refused while these buffers were free, and this access's requester would retry at once.
fn give_back(parts: Vec<Part>) {
    for part in parts {
        part.data.into_iter().chain(part.scratch).for_each(Buffer::give_back_quietly);
    }
}

impl UnitPager for TierRegion {
    fn presence(&self) -> &Presence {
        &self.region.presence
    }
}

impl Pager for TierRegion {
    fn translation(&self) -> &dyn Translation {
        &self.region.presence
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
        if !self.region.presence.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        let access = Arc::new(Access::new(0, false, 1, waker));
        let offset = range.addr - self.region.presence.range().addr;
        let slice = Slice { offset, base: 0, len: 0 };
        let mut part = self.part(&access, 0, &slice, Task::Flush { before: 0, len: range.len });
        part.unit = 0;
        // Not for data: the buffer bounds the number of flushes under way.
        part.data = Some(self.engine.pool.take(PAGE_BYTES as usize, waker).ok_or(AccessError::NotReady)?);
        self.begin(access, vec![part])
    }
}
