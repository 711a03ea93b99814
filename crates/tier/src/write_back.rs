//! Writing pages back, and dropping them. Pages that cannot be written back stay in memory, and are written again.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::Advice;
use terrace_faults::StorageOperation;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::make_dirty;

use crate::engine::Engine;
use crate::region::Region;
use crate::sys;

/// The interval between repair attempts, which would keep a failed disk busy.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// The largest folio in the page cache on x86-64: a huge page.
const FOLIO_BYTES_MAX: u64 = 2 << 20;

impl Engine {
    /// Writes a part of a region's file back. Not durable by itself: the device may cache it.
    ///
    /// # Errors
    /// The device's error; `EIO` until an earlier failed write-back of the region is repaired.
    pub(crate) fn write_back(&self, region: &Region, range: HostRange) -> io::Result<()> {
        let _alone = region.losses.alone();
        self.write_back_alone(region, range)
    }

    /// [`Engine::write_back`] for a caller that holds [`crate::losses::Losses::alone`].
    fn write_back_alone(&self, region: &Region, range: HostRange) -> io::Result<()> {
        let offset = region.offset_in_file(range);
        let written = self
            .suffer(StorageOperation::WriteBack)
            .and_then(|()| sys::write_back(region.ways.buffered.as_fd(), offset, range.len));
        if let Err(error) = written {
            region.note_loss(&error);
            return Err(error);
        }
        if region.losses.are_there() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    /// Writes pages back and drops unused ones from the page cache. Returns whether all were dropped.
    ///
    /// # Errors
    /// As for [`Engine::write_back`]; then no page is dropped.
    pub(crate) fn drop_pages(&self, region: &Region, range: HostRange) -> io::Result<bool> {
        // Held until the pages are dropped: another thread must not consume a failure report that concerns them.
        let _alone = region.losses.alone();
        self.write_back_alone(region, range)?;
        if region.ways.is_memory {
            return Ok(true);
        }
        // Advisory: pages in use stay. The kernel does not drop a part of a folio.
        for dropped in [range, region.folio_around(range)] {
            let offset = region.offset_in_file(dropped);
            let len = std::num::NonZero::new(dropped.len.next_multiple_of(PAGE_BYTES));
            let _ = rustix::fs::fadvise(region.ways.buffered.as_fd(), offset, len, Advice::DontNeed);
            if sys::cached_pages(range).is_none_or(|count| count == 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes pages from the process's page table and, once written back, from the page cache.
    pub(crate) fn drop_from_memory(&self, region: &Region, range: HostRange) {
        // Fails if the mapping is gone; then its pages are unmapped, too.
        let _ = sys::unmap_pages(range);
        // Pages that cannot be written back were recorded, and stay in the page cache.
        let _ = self.drop_pages(region, range);
    }

    /// After a failed write-back, writes all cached pages of the region again, because the kernel does not report which
    /// page failed. Skips regions that are being removed.
    pub(crate) fn repair(&self, region: &Arc<Region>) {
        let is_soon = |tried: Instant| tried.elapsed() < RETRY_AFTER;
        if region.losses.alone().is_some_and(is_soon) {
            return;
        }
        {
            let mut core = self.core.lock();
            if !region.losses.are_there() || !core.serves(region.id) {
                return;
            }
            // Keeps the mapping until the repair ends.
            core.regions[region.id].moves += 1;
        }
        // The first failure was logged.
        let _ = self.write_again(region);
        self.core.lock().regions[region.id].moves -= 1;
    }

    /// [`Engine::repair`] for a caller that keeps the mapping alive.
    ///
    /// # Errors
    /// When the pages cannot be written.
    pub(crate) fn write_again(&self, region: &Region) -> io::Result<()> {
        let mut tried = region.losses.alone();
        *tried = Some(Instant::now());
        let noticed = region.losses.noticed();
        // A read-only region has no data that a client was told is stored.
        if region.writable {
            make_dirty(region.presence.range())?;
        }
        self.suffer(StorageOperation::WriteBack)?;
        // Both: the kernel reports failures for each description separately.
        rustix::fs::fdatasync(&region.ways.buffered)?;
        rustix::fs::fdatasync(&region.ways.durable)?;
        region.losses.end(noticed);
        tracing::info!("what could not be written back of a region is written now");
        Ok(())
    }
}

impl Region {
    /// Records that a part of the region could not be written.
    pub(crate) fn note_loss(&self, error: &dyn std::fmt::Display) {
        if self.losses.note() {
            tracing::error!(%error, "a part of a region's file cannot be written: it stays in memory, and no FLUSH succeeds until it is written");
        }
    }

    /// The range, extended to multiples of the largest folio of the file, within the region.
    pub(crate) fn folio_around(&self, range: HostRange) -> HostRange {
        let whole = self.presence.range();
        let start = self.offset_in_file(range);
        let end = (start + range.len).next_multiple_of(FOLIO_BYTES_MAX).min(self.file_offset + whole.len);
        let start = (start / FOLIO_BYTES_MAX * FOLIO_BYTES_MAX).max(self.file_offset);
        HostRange { addr: whole.addr + (start - self.file_offset), len: end - start }
    }

    /// The file offset of a part of the region.
    pub(crate) fn offset_in_file(&self, range: HostRange) -> u64 {
        self.file_offset + (range.addr - self.presence.range().addr)
    }
}
