//! The pager that the NIC calls: hits without a lock, and accesses that may have to wait for pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;
use terrace_hostmem::fault::Fault;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES, prefetch};
use terrace_memory::{AccessError, Pager, PeerTables, Transfer, Translation, Waker};
use terrace_shm::PageEntry;

use crate::access::{Access, Kind, Part, Piece, Task, pieces};
use crate::engine::{Engine, Work};
use crate::key::GROUP_PAGES;
use crate::mapping::{self, Pin};
use crate::region::Region;
use crate::shard::Shard;
use crate::starved::add_barriers;
use crate::stats::{RegionStats, add};
use crate::sys;

/// The longest access, in bytes.
pub const TRANSFER_BYTES_MAX: u64 = 64 << 10;

/// The most pages that an access counts for: a peer may announce an access of gigabytes.
const COUNTED_MAX: usize = 256;

/// A region whose pages are in the frames of a pool, or only in its file.
///
/// Accesses that wait make progress in [`crate::Pages::advance`].
#[derive(Debug)]
pub struct PagedRegion {
    pub(crate) engine: Arc<Engine>,
    pub(crate) region: Arc<Region>,
}

impl PagedRegion {
    /// Statistics so far.
    pub fn stats(&self) -> RegionStats {
        let region = &self.region;
        let HostRange { addr, len: len_bytes } = region.range();
        let stats = region.counters.read();
        let hits = stats.hits.saturating_add(region.count_of_peer_hits());
        RegionStats { addr, len_bytes, hits, is_failing: region.is_failing(), ..stats }
    }

    /// Pins the frame of a page for a write, and returns it. `None` if the page is not in memory.
    fn pin(&self, page: u64) -> Option<(u32, Pin<'_>)> {
        let word = &self.region.table.entries()[page as usize];
        let pin = || mapping::pin_writable(word, |frame| self.engine.pool.pins(frame));
        if let Some(pin) = pin() {
            return Some(pin);
        }
        if !PageEntry::from_word(word.load(Ordering::Acquire)).is_readable() {
            return None;
        }
        let mut shard = self.engine.lock(self.region.key(page));
        // Then the pager refuses the write.
        if self.region.write_refusal().is_some() {
            return None;
        }
        shard.make_dirty(&self.region, page);
        drop(shard);
        let pinned = pin();
        if self.engine.has_many_dirty() {
            self.engine.to_write.request_search();
        }
        pinned
    }

    fn pieces(&self, range: HostRange) -> impl Iterator<Item = Piece> + use<> {
        pieces(self.region.range().addr, range)
    }

    /// Begins an access: its parts on pages in memory are carried out at once.
    fn begin(
        &self,
        kind: Kind,
        range: HostRange,
        waker: &Waker,
        task_of: impl Fn(&Piece) -> Task,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        if range.len > TRANSFER_BYTES_MAX || !self.region.range().covers(range) {
            return Err(AccessError::OutOfRange);
        }
        let pieces: Vec<Piece> = self.pieces(range).collect();
        let bytes = Access::memory_bytes(range.len as usize, pieces.len());
        let charge = self.engine.quota.take(bytes, waker).ok_or(AccessError::NotReady)?;
        let access = Access::new(kind, range.len as usize, &self.region.counters, waker, Some(charge));
        let mut work = Work::default();
        for group in pieces.chunk_by(|before, next| before.page / GROUP_PAGES == next.page / GROUP_PAGES) {
            let mut shard = self.engine.lock(self.region.key(group[0].page));
            if self.region.is_closing.load(Ordering::Acquire) {
                work.ended.end_access_part(&access, Err(AccessError::Fault));
                drop(shard);
                self.engine.settle(work);
                return Ok(access);
            }
            for piece in group {
                access.add_part();
                let part = Part { access: access.clone(), offset: piece.offset, task: task_of(piece) };
                self.engine.begin_part(&mut shard, &self.region, piece.page, part, &mut work);
            }
        }
        work.ended.end_access_part(&access, Ok(()));
        self.engine.settle(work);
        Ok(access)
    }

    /// Has a flush wait for the parts of its pages that are under way.
    fn add_barriers(&self, access: &Arc<Access>, pages: std::ops::Range<u64>) {
        for shard in self.engine.shards() {
            let mut shard = shard.lock();
            let Shard { fills, starved, .. } = &mut *shard;
            let fills = fills.iter_mut().map(|(key, fill)| (key, &mut fill.waiting));
            add_barriers(access, fills, starved, |key| {
                key.slot == self.region.slot && pages.contains(&key.page)
            });
        }
    }
}

/// What a failed copy means: the pool's file has been truncated.
fn to_access_error(_: Fault) -> AccessError {
    AccessError::Fault
}

impl Translation for PagedRegion {
    fn range(&self) -> HostRange {
        self.region.range()
    }

    fn unit_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn prefetch(&self, addr: u64) {
        self.region.table.prefetch((addr - self.region.range().addr) / PAGE_BYTES);
    }

    fn is_present(&self, part: HostRange) -> bool {
        self.pieces(part).all(|piece| self.region.table.entry(piece.page).is_readable())
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        let mut result = Ok(());
        for piece in self.pieces(part) {
            let out = &mut out[piece.base..piece.base + piece.len];
            let copy = |frame| sys::copy_out(self.engine.pool.addr(frame) + piece.offset as u64, out);
            result = result.and(mapping::read(&self.region.table.entries()[piece.page as usize], copy)?);
        }
        Some(result.map_err(to_access_error))
    }

    /// Of more than one page, all are pinned before the first byte is written.
    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        let part = HostRange { addr, len: data.len() as u64 };
        let pins: Option<SmallVec<[_; 2]>> = self.pieces(part).map(|piece| self.pin(piece.page)).collect();
        let mut result = Ok(());
        for (piece, (frame, _)) in self.pieces(part).zip(&pins?) {
            let target = self.engine.pool.addr(*frame) + piece.offset as u64;
            result = result.and(sys::copy_in(target, &data[piece.base..piece.base + piece.len]));
        }
        Some(result.map_err(to_access_error))
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let piece = self.pieces(HostRange { addr, len: 8 }).next()?;
        let (frame, _pin) = self.pin(piece.page)?;
        let target = self.engine.pool.addr(frame) + piece.offset as u64;
        Some(sys::atomic(target, op).map_err(to_access_error))
    }

    /// Each page counts for itself, whatever the whole access found; of a long access, the first [`COUNTED_MAX`]. The
    /// processor begins to load what the access, which follows, will touch first.
    fn count(&self, part: HostRange, _is_hit: bool) {
        let (mut hits, mut misses) = (0, 0);
        for piece in self.pieces(part).take(COUNTED_MAX) {
            let entry = self.region.table.entry(piece.page);
            if entry.is_readable() {
                if hits == 0 {
                    prefetch(self.engine.pool.addr(entry.frame()) + piece.offset as u64);
                }
                self.engine.pool.counters().count(entry.frame() as usize);
                hits += 1;
            } else {
                misses += 1;
            }
        }
        add(&self.region.counters.hits, hits);
        add(&self.region.counters.misses, misses);
    }

    fn bitmap(&self) -> &[AtomicU64] {
        self.region.bitmap()
    }

    /// The page table itself: the version is in the upper bits of an entry.
    fn versions(&self) -> HostRange {
        let entries = &**self.region.table.entries();
        HostRange { addr: entries.as_ptr() as u64, len: size_of_val(entries) as u64 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        let pool = &self.engine.pool;
        let [to_write, to_read] = pool.shared();
        Some(PeerTables::Frames {
            entries: self.region.table.entries().file()?,
            counters: pool.counters().file(),
            hits: self.region.peer_hits.file(),
            pool: to_write,
            pool_to_read: to_read,
            offset: pool.frames_offset(),
            count: pool.frame_count(),
        })
    }

    /// Frames stay pinned in the parent alone, whose counters are not the child's.
    fn forget_copies(&self) {}
}

impl Pager for PagedRegion {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.begin(Kind::Read, range, waker, |piece| Task::Read(piece.base..piece.base + piece.len))
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        let range = HostRange { addr, len: data.len() as u64 };
        self.begin(Kind::Write, range, waker, |piece| {
            Task::Write(data[piece.base..piece.base + piece.len].into())
        })
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !addr.is_multiple_of(8) {
            return Err(AccessError::Misaligned);
        }
        self.begin(Kind::Atomic, HostRange { addr, len: 8 }, waker, |_| Task::Atomic(op))
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !self.region.range().covers(range) {
            return Err(AccessError::OutOfRange);
        }
        if self.region.is_closing.load(Ordering::Acquire) {
            return Err(AccessError::Fault);
        }
        let first = (range.addr - self.region.range().addr) / PAGE_BYTES;
        let end = (range.addr - self.region.range().addr + range.len).div_ceil(PAGE_BYTES);
        let access = Access::new(Kind::Flush { first, end }, 0, &self.region.counters, waker, None);
        self.add_barriers(&access, first..end);
        let mut work = Work::default();
        work.ended.end_access_part(&access, Ok(()));
        self.engine.settle(work);
        Ok(access)
    }
}
