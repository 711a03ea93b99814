//! Units come and go. Whoever does this waits for the disk: never a thread that serves peers.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::Advice;
use terrace_memory::HostRange;

use crate::engine::Engine;
use crate::error::TierError;
use crate::region::Region;
use crate::sys;
use crate::unit::Residency;

/// How much of a file is asked for at a time: the kernel cuts longer wishes to its read-ahead limit.
const READ_AHEAD_BYTES: u64 = 128 << 10;

impl Engine {
    /// Brings a unit into memory. False if it is not absent, or if the budget has no room for it.
    ///
    /// # Errors
    /// When it cannot be read or locked; it is absent then.
    pub(crate) fn promote(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        let _moving = self.moving.lock();
        let range = region.presence.unit_range(unit);
        if !self.begin_arrival(region, unit, range.len) {
            return Ok(false);
        }
        // Those that went past the page cache before it begins to count.
        self.when(|core| core.unit(region.id, unit).direct_writes == 0, |_| ());
        if let Err(error) = read_and_lock(region, unit) {
            region.counters.moves_failed.fetch_add(1, Ordering::Relaxed);
            let _ = self.forget(region, unit, range);
            self.end_departure(region, unit, range.len, true);
            return Err(error);
        }
        self.core.lock().unit(region.id, unit).residency = Residency::Locked;
        // Found and admitted under one lock, so that no write can be asked for in between.
        self.when(
            |core| core.unit(region.id, unit).writes == 0,
            |core| {
                region.presence.admit(unit);
                core.unit(region.id, unit).residency = Residency::Resident;
            },
        );
        region.counters.promotions.fetch_add(1, Ordering::Relaxed);
        Ok(true)
    }

    fn begin_arrival(&self, region: &Region, unit: usize, len: u64) -> bool {
        let mut core = self.core.lock();
        if !core.serves(region.id) || core.locked_bytes + len > self.dram_bytes {
            return false;
        }
        let state = core.unit(region.id, unit);
        if state.residency != Residency::Absent {
            return false;
        }
        state.residency = Residency::Arriving;
        core.locked_bytes += len;
        true
    }

    /// Takes a unit out of memory, in the order that DESIGN gives. False if it is not resident, or pinned.
    ///
    /// # Errors
    /// When it cannot be written back. It is absent then, and what was stored is still in the page cache.
    pub(crate) fn demote(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        let _moving = self.moving.lock();
        let range = region.presence.unit_range(unit);
        {
            let mut core = self.core.lock();
            if !core.serves(region.id) {
                return Ok(false);
            }
            let state = core.unit(region.id, unit);
            if state.residency != Residency::Resident || state.pinned {
                return Ok(false);
            }
            state.residency = Residency::Leaving;
            state.cached = false;
        }
        region.presence.expel(unit);
        self.when(|core| core.unit(region.id, unit).copies == 0, |_| ());
        let written = self.forget(region, unit, range);
        self.end_departure(region, unit, range.len, written.is_err());
        region.counters.demotions.fetch_add(1, Ordering::Relaxed);
        if written.is_err() {
            region.counters.moves_failed.fetch_add(1, Ordering::Relaxed);
        }
        written.map(|()| true)
    }

    /// Unlocks a unit, writes it back and drops it from the page cache.
    fn forget(&self, region: &Region, unit: usize, range: HostRange) -> io::Result<()> {
        // The mapping may be gone; then there is nothing to unlock.
        let _ = sys::unlock(range);
        let _ = sys::unmap_pages(range);
        drop_pages(region, unit, range)
    }

    fn end_departure(&self, region: &Region, unit: usize, len: u64, cached: bool) {
        let mut core = self.core.lock();
        core.locked_bytes -= len;
        let state = core.unit(region.id, unit);
        state.residency = Residency::Absent;
        if cached {
            core.note_cached(region.id, unit);
        }
    }

    /// Writes back and drops what buffered access has left of an absent unit in the page cache. False if it is not
    /// absent.
    ///
    /// # Errors
    /// When it cannot be written back.
    pub(crate) fn clean(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        let _moving = self.moving.lock();
        let touched = {
            let mut core = self.core.lock();
            if !core.serves(region.id) {
                return Ok(false);
            }
            let state = core.unit(region.id, unit);
            if state.residency != Residency::Absent || !state.cached {
                return Ok(false);
            }
            // Before the pages go: what is written meanwhile sets it again.
            state.cached = false;
            let touched = std::mem::take(&mut state.touched);
            if state.writes > 0 {
                core.note_cached(region.id, unit);
            }
            touched
        };
        let range = region.presence.unit_range(unit);
        if touched {
            // The mapping may be gone; then its pages are, too.
            let _ = sys::unmap_pages(range);
        }
        let written = drop_pages(region, unit, range);
        if written.is_err() {
            self.core.lock().note_cached(region.id, unit);
        }
        written.map(|()| true)
    }

    /// Locks a whole region into memory, for good.
    ///
    /// # Errors
    /// `NoRoom`; `System` when it cannot be read or locked.
    pub(crate) fn pin(&self, region: &Arc<Region>) -> Result<(), TierError> {
        let missing = {
            let core = self.core.lock();
            let len = region.presence.range().len;
            let resident = (0..region.presence.unit_count()).filter(|&unit| region.presence.is_present(unit));
            let missing = len - resident.map(|unit| region.presence.unit_range(unit).len).sum::<u64>();
            let room = self.dram_bytes - core.locked_bytes;
            if missing > room {
                return Err(TierError::NoRoom { region: missing, room });
            }
            missing
        };
        tracing::debug!(bytes = missing, "locking a region");
        for unit in 0..region.presence.unit_count() {
            self.promote(region, unit).map_err(TierError::system("lock a region into memory"))?;
            let mut core = self.core.lock();
            let room = self.dram_bytes - core.locked_bytes;
            if !core.serves(region.id) || core.unit(region.id, unit).residency != Residency::Resident {
                // Another unit was faster.
                return Err(TierError::NoRoom { region: missing, room });
            }
            core.unit(region.id, unit).pinned = true;
        }
        Ok(())
    }

    /// Unlocks everything of a region that takes no more accesses and has none under way.
    pub(crate) fn unlock_region(&self, region: &Region) {
        let _moving = self.moving.lock();
        let mut locked_bytes = 0;
        for unit in 0..region.presence.unit_count() {
            if region.presence.is_present(unit) {
                region.presence.expel(unit);
                locked_bytes += region.presence.unit_range(unit).len;
            }
        }
        // The program may have unmapped it, which is as good.
        let _ = sys::unlock(region.presence.range());
        let _ = sys::expect_nothing(region.presence.range());
        self.core.lock().locked_bytes -= locked_bytes;
    }
}

/// Where in the file a unit begins.
fn unit_offset(region: &Region, range: HostRange) -> u64 {
    region.file_offset + (range.addr - region.presence.range().addr)
}

/// Reads a unit into the page cache, all at once, and locks it.
fn read_and_lock(region: &Region, unit: usize) -> io::Result<()> {
    let range = region.presence.unit_range(unit);
    let first = unit_offset(region, range);
    for offset in (0..range.len).step_by(READ_AHEAD_BYTES as usize) {
        let len = READ_AHEAD_BYTES.min(range.len - offset);
        let len = std::num::NonZero::new(len);
        // Only advice; locking reads what it has not brought.
        let _ = rustix::fs::fadvise(region.ways.buffered.as_fd(), first + offset, len, Advice::WillNeed);
    }
    sys::lock(range)
}

/// Writes a unit's pages back and takes those that nobody has mapped out of the page cache.
fn drop_pages(region: &Region, unit: usize, range: HostRange) -> io::Result<()> {
    let offset = unit_offset(region, range);
    let file = region.ways.buffered.as_fd();
    if let Err(error) = sys::write_back(file, offset, range.len) {
        tracing::error!(%error, unit, "a unit cannot be written back; it stays in the page cache");
        return Err(error);
    }
    let len = std::num::NonZero::new(range.len.next_multiple_of(4096));
    // Only advice: pages that somebody else uses stay.
    let _ = rustix::fs::fadvise(file, offset, len, Advice::DontNeed);
    Ok(())
}
