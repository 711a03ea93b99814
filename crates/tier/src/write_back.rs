//! Writing pages back, and dropping them. What cannot be written back stays where it is, and is written again.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::Advice;
use terrace_faults::StorageOperation;
use terrace_memory::{HostRange, PAGE_BYTES, make_dirty};

use crate::engine::Engine;
use crate::region::Region;
use crate::sys;

/// How long after it could not be written again it is tried once more: a disk that has failed is not to be kept busy with that.
const RETRY_AFTER: Duration = Duration::from_millis(250);

/// The largest folio in the page cache of x86-64: a huge page.
const FOLIO_BYTES_MAX: u64 = 2 << 20;

impl Engine {
    /// Writes a part of a region's file back. Not durable by itself: the device may cache it.
    ///
    /// # Errors
    /// What the device says; the same for as long as something of the region that could not be written was not written again.
    pub(crate) fn write_back(&self, region: &Region, range: HostRange) -> io::Result<()> {
        let _alone = region.losses.alone();
        self.write_back_alone(region, range)
    }

    /// The same for whoever has asked to be alone.
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

    /// Writes pages back and takes those that nobody uses out of the page cache. Says whether that was all of them.
    ///
    /// # Errors
    /// As for [`Engine::write_back`]; all of them stay then.
    pub(crate) fn drop_pages(&self, region: &Region, range: HostRange) -> io::Result<bool> {
        // Until they are dropped: nobody else may be told meanwhile of a failure that they are about.
        let _alone = region.losses.alone();
        self.write_back_alone(region, range)?;
        if region.ways.is_memory {
            return Ok(true);
        }
        // Only advice: pages that somebody uses stay. The kernel does not drop a part of a folio.
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

    /// Takes some pages out of the page table and, once written back, out of the page cache.
    pub(crate) fn drop_from_memory(&self, region: &Region, range: HostRange) {
        // The mapping may be gone; then its pages are, too.
        let _ = sys::unmap_pages(range);
        // What cannot be written back was noted, and stays in the page cache.
        let _ = self.drop_pages(region, range);
    }

    /// Writes all that is in memory of a region again, if something of it could not be written: nobody knows which part. Nothing
    /// else happens to regions that do not serve any more.
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
            // So that the mapping stays.
            core.regions[region.id].moves += 1;
        }
        // It was said when it failed first.
        let _ = self.write_again(region);
        self.core.lock().regions[region.id].moves -= 1;
    }

    /// The same for whoever knows that the mapping stays.
    ///
    /// # Errors
    /// When it could not be written once more.
    pub(crate) fn write_again(&self, region: &Region) -> io::Result<()> {
        let mut tried = region.losses.alone();
        *tried = Some(Instant::now());
        let noticed = region.losses.noticed();
        // What may not be written holds nothing that a client was told is stored.
        if region.writable {
            make_dirty(region.presence.range())?;
        }
        self.suffer(StorageOperation::WriteBack)?;
        // Both, because each of the descriptions is told of failures by itself.
        rustix::fs::fdatasync(&region.ways.buffered)?;
        rustix::fs::fdatasync(&region.ways.durable)?;
        region.losses.end(noticed);
        tracing::info!("what could not be written back of a region is written now");
        Ok(())
    }
}

impl Region {
    /// Remembers that something could not be written.
    pub(crate) fn note_loss(&self, error: &dyn std::fmt::Display) {
        if self.losses.note() {
            tracing::error!(%error, "a part of a region's file cannot be written: it stays in memory, and no FLUSH succeeds until it is written");
        }
    }

    /// The range, extended to multiples of the largest folio of the file, as far as the region goes.
    pub(crate) fn folio_around(&self, range: HostRange) -> HostRange {
        let whole = self.presence.range();
        let start = self.offset_in_file(range);
        let end = (start + range.len).next_multiple_of(FOLIO_BYTES_MAX).min(self.file_offset + whole.len);
        let start = (start / FOLIO_BYTES_MAX * FOLIO_BYTES_MAX).max(self.file_offset);
        HostRange { addr: whole.addr + (start - self.file_offset), len: end - start }
    }

    /// Where in the file a part of the region begins.
    pub(crate) fn offset_in_file(&self, range: HostRange) -> u64 {
        self.file_offset + (range.addr - self.presence.range().addr)
    }
}
