//! The translation of [`TestPager`](super::pager::TestPager): units of memory that the test brings and takes away.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES};
use terrace_memory::{AccessError, PeerTables, Translation, WholeRange};
use terrace_sync::{RwLock, RwLockReadGuard};

/// Bytes of a unit, which is many pages.
pub const UNIT_BYTES: u64 = 1 << 20;
const UNIT_PAGES: usize = (UNIT_BYTES / PAGE_BYTES) as usize;

/// Which units of a range are present. Unit 0 begins at the range's first byte; the last unit may be shorter.
#[derive(Debug)]
pub struct Units {
    range: HostRange,
    /// Copies from and to the memory of all units.
    memory: WholeRange,
    bitmap: Box<[AtomicU64]>,
    versions: Box<[AtomicU32]>,
    hits: Box<[AtomicU32]>,
    misses: Box<[AtomicU32]>,
    /// Locked for reading by a copy, for writing while a unit leaves.
    copies: RwLock<()>,
}

fn zeros<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}

impl Units {
    /// Nothing is present.
    pub fn new(range: HostRange) -> Units {
        let count = range.len.div_ceil(UNIT_BYTES) as usize;
        let memory = WholeRange::absent(range);
        memory.make_present();
        Units {
            range,
            memory,
            bitmap: zeros(count.div_ceil(64)),
            versions: zeros(range.len.div_ceil(PAGE_BYTES) as usize),
            hits: zeros(count),
            misses: zeros(count),
            copies: RwLock::new(()),
        }
    }

    pub fn unit_count(&self) -> usize {
        self.hits.len()
    }

    pub fn unit_range(&self, unit: usize) -> HostRange {
        let offset = unit as u64 * UNIT_BYTES;
        HostRange { addr: self.range.addr + offset, len: UNIT_BYTES.min(self.range.len - offset) }
    }

    pub fn units_of(&self, part: HostRange) -> std::ops::Range<usize> {
        if part.len == 0 {
            return 0..0;
        }
        let first = part.addr - self.range.addr;
        (first / UNIT_BYTES) as usize..((first + part.len - 1) / UNIT_BYTES) as usize + 1
    }

    pub fn is_unit_present(&self, unit: usize) -> bool {
        self.bitmap[unit / 64].load(Ordering::SeqCst) & (1 << (unit % 64)) != 0
    }

    /// Marks a unit present. Its pages' versions become odd then.
    pub fn admit(&self, unit: usize) {
        self.bitmap[unit / 64].fetch_or(1 << (unit % 64), Ordering::SeqCst);
        self.step(unit);
    }

    /// Marks a unit absent. Its pages' versions become even before; no copy of it is under way after.
    pub fn expel(&self, unit: usize) {
        self.step(unit);
        self.bitmap[unit / 64].fetch_and(!(1 << (unit % 64)), Ordering::SeqCst);
        drop(self.copies.write());
    }

    fn step(&self, unit: usize) {
        let first = unit * UNIT_PAGES;
        let versions = self.versions.iter().skip(first).take(UNIT_PAGES);
        versions.for_each(|version| _ = version.fetch_add(1, Ordering::SeqCst));
    }

    /// The accesses of a unit that found all that they touch present, and the others.
    pub fn counts(&self, unit: usize) -> (u32, u32) {
        (self.hits[unit].load(Ordering::SeqCst), self.misses[unit].load(Ordering::SeqCst))
    }

    /// What is present then stays so while the guard lives.
    fn hold(&self, part: HostRange) -> Option<RwLockReadGuard<'_, ()>> {
        let held = self.copies.read();
        self.units_of(part).all(|unit| self.is_unit_present(unit)).then_some(held)
    }
}

impl Translation for Units {
    fn range(&self) -> HostRange {
        self.range
    }

    fn unit_bytes(&self) -> u64 {
        UNIT_BYTES
    }

    fn is_present(&self, part: HostRange) -> bool {
        self.hold(part).is_some()
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        let _held = self.hold(part)?;
        self.memory.read(part, out)
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        let _held = self.hold(HostRange { addr, len: data.len() as u64 })?;
        self.memory.write(addr, data)
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let _held = self.hold(HostRange { addr, len: 8 })?;
        self.memory.atomic(addr, op)
    }

    fn count(&self, part: HostRange, is_hit: bool) {
        let counts = if is_hit { &self.hits } else { &self.misses };
        self.units_of(part).for_each(|unit| _ = counts[unit].fetch_add(1, Ordering::SeqCst));
    }

    fn bitmap(&self) -> &[AtomicU64] {
        &self.bitmap
    }

    fn versions(&self) -> HostRange {
        HostRange { addr: self.versions.as_ptr() as u64, len: size_of_val(&*self.versions) as u64 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        None
    }

    fn forget_copies(&self) {}
}
