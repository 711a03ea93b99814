//! The accesses of the NIC: hits in the mapping without a lock, and accesses that may have to wait for pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use terrace_hostmem::fault::Fault;
use terrace_hostmem::{AtomicOp, HostRange, PAGE_BYTES, prefetch};
use terrace_memory::{AccessError, Pager, PeerTables, Transfer, Translation, Waker};
use terrace_shm::GracePeriod;

use super::engine::{Engine, Work};
use super::region::Region;
use super::shard::Shard;
use crate::access::{Access, Kind, Part, Piece, Task, pieces};
use crate::key::GROUP_PAGES;
use crate::paged_region::TRANSFER_BYTES_MAX;
use crate::starved::add_barriers;
use crate::stats::add;
use crate::sys;

/// The most pages that an access counts for: a peer may announce an access of gigabytes.
const COUNTED_MAX: usize = 256;

/// A shared mapping of a file, of which some pages are present.
///
/// Accesses that wait make progress in [`CachedFiles::advance`](crate::cached::CachedFiles::advance).
#[derive(Debug)]
pub struct CachedRegion {
    pub(super) engine: Arc<Engine>,
    pub(super) region: Arc<Region>,
}

impl CachedRegion {
    /// Number of pages.
    pub fn page_count(&self) -> u64 {
        self.region.table.page_count()
    }

    /// Withdraws the tables from other processes for good. Accesses that they have begun end with the returned grace
    /// period.
    pub fn withdraw(&self) -> GracePeriod {
        self.region.table.entries().withdraw();
        GracePeriod::of_pages(self.region.map)
    }

    /// Makes the region ordinary memory, whose pages all count as present. It has been removed from its budget.
    pub fn make_ordinary(&self) {
        self.region.is_ordinary.store(true, Ordering::SeqCst);
    }

    /// Waits until the accesses have ended that were begun before: a key that was closed before takes none any more, and what
    /// it has begun does not change memory afterwards. Others go on.
    pub fn wait_for_accesses(&self) {
        let nobody: Waker = Arc::new(|| {});
        let access = Access::new(Kind::Wait, 0, &self.region.counters, &nobody, None);
        self.add_barriers(&access, 0..self.page_count());
        let mut work = Work::default();
        work.ended.end_access_part(&access, Ok(()));
        self.engine.settle(work);
        self.engine.advance_while(|| access.outcome().is_none());
    }

    #[inline]
    fn is_page_present(&self, page: u64) -> bool {
        self.region.table.entry(page).is_readable() || self.region.is_ordinary.load(Ordering::Acquire)
    }

    fn pieces(&self, range: HostRange) -> impl Iterator<Item = Piece> + use<> {
        pieces(self.region.map.addr, range)
    }

    /// What a failed copy means: that of the last page, which a file that is too short lacks.
    #[cold]
    fn error_of(&self, part: HostRange, is_write: bool) -> AccessError {
        let last = (part.addr + part.len.max(1) - 1 - self.region.map.addr) / PAGE_BYTES;
        self.region.error_of(last, is_write)
    }

    /// Begins an access: its parts on pages that are present are carried out at once.
    fn begin(
        &self,
        kind: Kind,
        range: HostRange,
        waker: &Waker,
        task_of: impl Fn(&Piece) -> Task,
    ) -> Result<Arc<dyn Transfer>, AccessError> {
        if range.len > TRANSFER_BYTES_MAX || !self.region.map.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        let pieces: Vec<Piece> = self.pieces(range).collect();
        let bytes = Access::memory_bytes(range.len as usize, pieces.len());
        let charge = self.engine.quota.take(bytes, waker).ok_or(AccessError::NotReady)?;
        let access = Access::new(kind, range.len as usize, &self.region.counters, waker, Some(charge));
        let mut work = Work::default();
        let mut result = Ok(());
        for group in pieces.chunk_by(|before, next| before.page / GROUP_PAGES == next.page / GROUP_PAGES) {
            let mut shard = self.engine.lock(self.region.key(group[0].page));
            if self.region.is_closing() {
                result = Err(AccessError::Fault);
                break;
            }
            for piece in group {
                access.add_part();
                let part = Part { access: access.clone(), offset: piece.offset, task: task_of(piece) };
                self.engine.begin_part(&mut shard, &self.region, piece.page, part, &mut work);
            }
        }
        work.ended.end_access_part(&access, result);
        self.engine.settle(work);
        Ok(access)
    }

    /// Has an access wait for the parts of these pages that are under way.
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

impl Translation for CachedRegion {
    fn range(&self) -> HostRange {
        self.region.map
    }

    fn unit_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn prefetch(&self, addr: u64) {
        self.region.table.prefetch((addr - self.region.map.addr) / PAGE_BYTES);
        prefetch(addr);
    }

    fn is_present(&self, part: HostRange) -> bool {
        // The bytes are most likely needed next, and in a large region neither they nor the entry are in a cache.
        prefetch(part.addr);
        self.pieces(part).all(|piece| self.is_page_present(piece.page))
    }

    fn read(&self, part: HostRange, out: &mut [u8]) -> Option<Result<(), AccessError>> {
        self.is_present(part)
            .then(|| sys::copy_out(part.addr, out).map_err(|Fault| self.error_of(part, false)))
    }

    fn write(&self, addr: u64, data: &[u8]) -> Option<Result<(), AccessError>> {
        let part = HostRange { addr, len: data.len() as u64 };
        self.is_present(part).then(|| sys::copy_in(addr, data).map_err(|Fault| self.error_of(part, true)))
    }

    fn atomic(&self, addr: u64, op: AtomicOp) -> Option<Result<u64, AccessError>> {
        let part = HostRange { addr, len: 8 };
        self.is_present(part).then(|| sys::atomic(addr, op).map_err(|Fault| self.error_of(part, true)))
    }

    /// Each page counts for itself, whatever the whole access found; of a long access, the first [`COUNTED_MAX`].
    fn count(&self, part: HostRange, _is_hit: bool) {
        let (mut hits, mut misses) = (0, 0);
        for piece in self.pieces(part).take(COUNTED_MAX) {
            let entry = self.region.table.entry(piece.page);
            if entry.is_readable() {
                self.engine.counters.count(entry.frame() as usize);
                hits += 1;
            } else {
                misses += 1;
            }
        }
        add(&self.region.counters.hits, hits);
        add(&self.region.counters.misses, misses);
    }

    /// Empty: only regions that a server exports are read by clients.
    fn bitmap(&self) -> &[AtomicU64] {
        &[]
    }

    /// The page table itself: the version is in the upper bits of an entry.
    fn versions(&self) -> HostRange {
        let entries = &**self.region.table.entries();
        HostRange { addr: entries.as_ptr() as u64, len: size_of_val(entries) as u64 }
    }

    fn peer_tables(&self) -> Option<PeerTables<'_>> {
        Some(PeerTables::Cached {
            entries: self.region.table.entries().file()?,
            counters: self.engine.counters.file(),
            count: self.engine.counters.len() as u32,
            is_swap_file: self.region.is_swap_file,
        })
    }

    /// Nobody waits for copies.
    fn forget_copies(&self) {}
}

impl Pager for CachedRegion {
    fn translation(&self) -> &dyn Translation {
        self
    }

    fn read(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.begin(Kind::Read, range, waker, |piece| Task::Read(piece.base..piece.base + piece.len))
    }

    fn write(&self, addr: u64, data: &[u8], waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !self.region.is_writable {
            return Err(AccessError::Fault);
        }
        let range = HostRange { addr, len: data.len() as u64 };
        self.begin(Kind::Write, range, waker, |piece| {
            Task::Write(data[piece.base..piece.base + piece.len].into())
        })
    }

    fn atomic(&self, addr: u64, op: AtomicOp, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !addr.is_multiple_of(8) {
            return Err(AccessError::Misaligned);
        }
        if !self.region.is_writable {
            return Err(AccessError::Fault);
        }
        self.begin(Kind::Atomic, HostRange { addr, len: 8 }, waker, |_| Task::Atomic(op))
    }

    fn pin(&self, range: HostRange) -> bool {
        if !self.region.map.covers(range) {
            return false;
        }
        let pages = || self.pieces(range).map(|piece| self.region.key(piece.page));
        let pinned = pages().take_while(|key| self.engine.lock(*key).pin(*key)).count();
        let is_pinned = pinned == pages().count();
        if !is_pinned {
            pages().take(pinned).for_each(|key| self.engine.lock(key).unpin(key));
        }
        is_pinned
    }

    fn pin_bytes_max(&self) -> u64 {
        pin_bytes_max(self.engine.counters.len() as u64, self.engine.shards().len() as u64)
    }

    fn unpin(&self, range: HostRange) {
        // The slot of a region that was removed may be another one's.
        if !self.region.is_closing() {
            let pages = self.pieces(range).map(|piece| self.region.key(piece.page));
            pages.for_each(|key| self.engine.lock(key).unpin(key));
        }
    }

    fn flush(&self, range: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        if !self.region.map.covers(range) {
            return Err(AccessError::OutOfRange);
        }
        if self.region.is_closing() {
            return Err(AccessError::Fault);
        }
        let first = (range.addr - self.region.map.addr) / PAGE_BYTES;
        let end = (range.addr - self.region.map.addr + range.len).div_ceil(PAGE_BYTES);
        let access = Access::new(Kind::Flush { first, end }, 0, &self.region.counters, waker, None);
        self.add_barriers(&access, first..end);
        let mut work = Work::default();
        work.ended.end_access_part(&access, Ok(()));
        self.engine.settle(work);
        Ok(access)
    }
}

/// The length of a range that can be pinned wherever it begins: of each shard, no more than half of the slots are pinned.
fn pin_bytes_max(slot_count: u64, shard_count: u64) -> u64 {
    // Of successive groups a shard may have those at both ends.
    let uneven = if shard_count > 1 { 2 * GROUP_PAGES } else { 0 };
    let page_count = (slot_count / shard_count / 2).saturating_sub(uneven) * shard_count;
    // A range may begin and end within pages.
    page_count.saturating_sub(1).max(1) * PAGE_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::PageKey;
    use crate::shard::shard_count;

    #[test]
    fn what_may_be_pinned_fits_into_the_shards_wherever_it_begins() {
        for slot_count in [64, 4096, 8192, 16_384, 40_000] {
            let count = shard_count(slot_count) as usize;
            let pages = pin_bytes_max(slot_count.into(), count as u64) / PAGE_BYTES + 1;
            for first in 0..512 {
                let mut pinned = vec![0; count];
                (first..first + pages).for_each(|page| pinned[PageKey { slot: 1, page }.shard(count)] += 1);
                let room = slot_count / count as u32 / 2;
                assert!(pinned.iter().all(|pages| *pages <= room), "{slot_count} {first}: {pinned:?}");
            }
        }
    }
}
