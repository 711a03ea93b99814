//! Units come and go. Whoever does this waits for the disk: never a thread that serves peers.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::Advice;
use terrace_faults::StorageOperation;
use terrace_memory::shared::GracePeriod;
use terrace_memory::{HostRange, PAGE_BYTES};

use crate::core::RegionState;
use crate::engine::Engine;
use crate::error::TierError;
use crate::region::Region;
use crate::sys;
use crate::unit::Residency;

/// How long whoever takes units out waits for other processes that are in the middle of accesses. Most take microseconds.
const READERS_PATIENCE: Duration = Duration::from_millis(1);
/// How many units are read at a time.
pub(crate) const AHEAD_MAX: usize = 4;
/// How often in a row it is tried to drop pages that somebody uses.
const CLEANINGS_MAX: u8 = 3;
/// How many units are checked for readahead in a period; that takes less than a millisecond.
const CHECKS_MAX: usize = 64;
/// How much of a file is asked for at a time: the kernel cuts longer wishes to its read-ahead limit.
const READ_AHEAD_BYTES: u64 = 128 << 10;

/// A unit that is about to leave, and to which other processes have yet to end accesses.
#[derive(Debug)]
pub(crate) struct Departure {
    region: Arc<Region>,
    unit: usize,
    readers: GracePeriod,
}

impl Engine {
    /// Brings a unit into memory. False if it is not absent, or if the budget has no room for it.
    ///
    /// # Errors
    /// When it cannot be read or locked; it is absent then.
    pub(crate) fn promote(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        if !self.begin_promotion(region, unit) {
            return Ok(false);
        }
        self.finish_promotion(region, unit).map(|()| true)
    }

    /// Asks the kernel to read a unit, so that several can be on their way. False as for [`Engine::promote`]; otherwise
    /// [`Engine::finish_promotion`] must follow.
    pub(crate) fn begin_promotion(&self, region: &Arc<Region>, unit: usize) -> bool {
        let range = region.presence.unit_range(unit);
        if !self.begin_arrival(region, unit, range.len) {
            return false;
        }
        // Those that went past the page cache before it begins to count.
        self.when(|core| core.unit(region.id, unit).direct_writes == 0, |_| ());
        read_ahead(region, range);
        true
    }

    /// Locks a unit, and tells the presence of it when no write is under way.
    ///
    /// # Errors
    /// As for [`Engine::promote`].
    pub(crate) fn finish_promotion(&self, region: &Arc<Region>, unit: usize) -> io::Result<()> {
        let range = region.presence.unit_range(unit);
        self.await_pages(region, range);
        if let Err(error) = self.suffer(StorageOperation::Read).and_then(|()| sys::lock(range)) {
            region.counters.moves_failed.fetch_add(1, Ordering::Relaxed);
            let _ = self.forget(region, range);
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
                let state = &mut core.regions[region.id];
                state.moves -= 1;
                state.checks.restart(state.units.len());
            },
        );
        region.counters.promotions.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Waits for a unit to be in the page cache. Locking would do so, too, but with the address space locked meanwhile: then
    /// whichever thread allocates memory waits for the disk.
    fn await_pages(&self, region: &Region, range: HostRange) {
        let mut offset = region.offset_in_file(range);
        let end = offset + range.len;
        while offset < end {
            let wanted = (end - offset) as usize;
            // Nothing is copied: the pages are only looked at. What cannot be read, locking finds out.
            let moved = rustix::fs::sendfile(&self.null, &region.ways.buffered, Some(&mut offset), wanted);
            if !matches!(moved, Ok(1..)) {
                return;
            }
        }
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
        core.regions[region.id].moves += 1;
        core.locked_bytes += len;
        true
    }

    /// Takes a unit out of memory, in the order that DESIGN gives; or sets it aside, if another process is in the middle of an access to
    /// it and does not come to its end: then [`Engine::finish_departures`] takes it out. False if it is not resident, or pinned.
    ///
    /// # Errors
    /// When it cannot be written back: it stays.
    pub(crate) fn demote(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        if !self.begin_departure(region, unit) {
            return Ok(false);
        }
        // As long as nothing has changed: what cannot be written back must not leave.
        if let Err(error) = self.write_back(region, region.presence.unit_range(unit)) {
            self.cancel_departure(region, unit);
            return Err(error);
        }
        // First: as long as the NIC copies without asking, an access that comes here must not wait for anything.
        let mut readers = region.presence.expel(unit);
        if readers.wait(READERS_PATIENCE).is_err() {
            let core = self.core.lock();
            // Otherwise somebody takes the region away: nobody comes to look after units that are set aside.
            if core.serves(region.id) {
                self.set_aside.lock().push(Departure { region: region.clone(), unit, readers });
                return Ok(true);
            }
        }
        self.depart(region, unit)?;
        Ok(true)
    }

    /// Takes out of memory what was set aside, and is not accessed any more.
    pub(crate) fn finish_departures(&self) {
        self.depart_all(|departure| departure.readers.is_over());
    }

    /// The same for all of a region that takes no more accesses.
    pub(crate) fn abandon_departures(&self, region: &Arc<Region>) {
        self.depart_all(|departure| Arc::ptr_eq(&departure.region, region));
    }

    fn depart_all(&self, mut which: impl FnMut(&mut Departure) -> bool) {
        let departing: Vec<Departure> = {
            let mut set_aside = self.set_aside.lock();
            set_aside.extract_if(.., &mut which).collect()
        };
        for Departure { region, unit, .. } in departing {
            // What cannot be written back was logged.
            let _ = self.depart(&region, unit);
        }
    }

    /// The second half of taking a unit out: only accesses that come here reach it.
    fn depart(&self, region: &Arc<Region>, unit: usize) -> io::Result<()> {
        let range = region.presence.unit_range(unit);
        self.core.lock().unit(region.id, unit).residency = Residency::Locked;
        // Reading, changing and writing in the file must not fall into an atomic operation on memory.
        self.when(
            |core| core.unit(region.id, unit).copies == 0,
            |core| {
                let state = core.unit(region.id, unit);
                state.residency = Residency::Leaving;
                state.cached = false;
            },
        );
        let dropped = self.forget(region, range);
        if let Err(error) = dropped {
            region.counters.moves_failed.fetch_add(1, Ordering::Relaxed);
            // What was stored since it was written back first. It is locked again before the kernel takes it.
            {
                let mut core = self.core.lock();
                let state = core.unit(region.id, unit);
                (state.residency, state.leaving) = (Residency::Arriving, false);
            }
            return self.finish_promotion(region, unit).and(Err(error));
        }
        self.end_departure(region, unit, range.len, !matches!(dropped, Ok(true)));
        region.counters.demotions.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Unlocks a unit, writes it back and drops it from the page cache. Says whether all of it is gone.
    fn forget(&self, region: &Region, range: HostRange) -> io::Result<bool> {
        // The mapping may be gone; then there is nothing to unlock.
        let _ = sys::unlock(range);
        let _ = sys::unmap_pages(range);
        self.drop_pages(region, range)
    }

    fn cancel_departure(&self, region: &Region, unit: usize) {
        region.counters.moves_failed.fetch_add(1, Ordering::Relaxed);
        let mut core = self.core.lock();
        core.unit(region.id, unit).leaving = false;
        core.regions[region.id].moves -= 1;
    }

    fn begin_departure(&self, region: &Region, unit: usize) -> bool {
        let mut core = self.core.lock();
        if !core.serves(region.id) {
            return false;
        }
        let state = core.unit(region.id, unit);
        if !state.stays() || state.pinned {
            return false;
        }
        state.leaving = true;
        core.regions[region.id].moves += 1;
        true
    }

    fn end_departure(&self, region: &Region, unit: usize, len: u64, cached: bool) {
        let mut core = self.core.lock();
        core.locked_bytes -= len;
        core.regions[region.id].moves -= 1;
        let state = core.unit(region.id, unit);
        (state.residency, state.leaving) = (Residency::Absent, false);
        if cached {
            core.note_cached(region.id, unit);
        }
    }

    /// Writes back and drops what buffered access has left of an absent unit in the page cache. False if that was tried in vain for the
    /// last time: somebody uses its pages.
    ///
    /// # Errors
    /// When it cannot be written back.
    pub(crate) fn clean(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        let touched = {
            let mut core = self.core.lock();
            if !core.serves(region.id) {
                return Ok(true);
            }
            let state = core.unit(region.id, unit);
            if state.residency != Residency::Absent || !state.cached {
                return Ok(true);
            }
            // Still cached while the pages go: past the page cache is what was there before, if they cannot be written. What is
            // written meanwhile says so.
            state.cached_again = state.writes > 0;
            let touched = std::mem::take(&mut state.touched);
            core.regions[region.id].moves += 1;
            touched
        };
        let range = region.presence.unit_range(unit);
        if touched {
            // The mapping may be gone; then its pages are, too.
            let _ = sys::unmap_pages(range);
        }
        let dropped = self.drop_pages(region, range);
        let mut core = self.core.lock();
        core.regions[region.id].moves -= 1;
        let state = core.unit(region.id, unit);
        // Somebody uses what was not dropped, the program perhaps, or the kernel was busy with it for a moment.
        let again = matches!(dropped, Ok(false)) && state.cleanings < CLEANINGS_MAX;
        state.cleanings = if again { state.cleanings + 1 } else { 0 };
        state.cached = again || dropped.is_err() || state.cached_again;
        if state.cached {
            core.note_cached(region.id, unit);
        }
        dropped.map(|is_dropped| is_dropped || again)
    }

    /// Frees a unit whose pages cannot be dropped because a folio has pages of a resident unit, too: the resident one leaves memory, and
    /// the next attempt drops both. Readahead makes folios of up to 2 MiB.
    pub(crate) fn part_from_residents(&self, region: &Arc<Region>, unit: usize) {
        let range = region.presence.unit_range(unit);
        let is_whole = sys::cached_pages(range).is_some_and(|count| count as u64 == range.len / PAGE_BYTES);
        // What this process has mapped is in use by the program.
        if !is_whole || sys::is_mapped(range) {
            return;
        }
        let folio = region.folio_around(range);
        let presence = &region.presence;
        for other in presence.units_of(folio).filter(|&other| presence.is_present(other)) {
            // What cannot be written back was logged, and stays.
            let _ = self.demote(region, other);
        }
    }

    /// The units that have something in the page cache.
    pub(crate) fn take_to_clean(&self, region: &Region) -> Vec<usize> {
        let mut core = self.core.lock();
        let Some(state) = core.regions.get_mut(region.id) else { return Vec::new() };
        if !state.to_clean.is_empty() {
            state.checks.restart(state.units.len());
        }
        std::mem::take(&mut state.to_clean)
    }

    /// Finds absent units that the kernel has read ahead into, some of a region in each period. `PG_readahead` and `PG_reclaim` are one
    /// bit of a page: advice to drop a page that is being written sets it, and the next read of that page starts a readahead of up
    /// to twice the device's `read_ahead_kb`, even of a file that is read at random.
    pub(crate) fn check_for_readahead(&self, region: &Region) {
        for _ in 0..CHECKS_MAX {
            let Some(unit) = self.next_check(region) else { return };
            if sys::cached_pages(region.presence.unit_range(unit)).is_none_or(|count| count == 0) {
                continue;
            }
            let mut core = self.core.lock();
            if core.serves(region.id) && core.unit(region.id, unit).may_be_read_ahead() {
                core.note_cached(region.id, unit);
            }
        }
    }

    /// The next unit that may be absent and cached without the tier's knowledge.
    fn next_check(&self, region: &Region) -> Option<usize> {
        let mut core = self.core.lock();
        let state = core.regions.get_mut(region.id)?;
        let RegionState { checks, units, .. } = state;
        (0..units.len()).map_while(|_| checks.next(units.len())).find(|&unit| units[unit].may_be_read_ahead())
    }

    /// Locks a whole region into memory, for good.
    ///
    /// # Errors
    /// `NoRoom`; `System` when it cannot be read or locked.
    pub(crate) fn pin(&self, region: &Arc<Region>) -> Result<(), TierError> {
        let presence = &region.presence;
        let absent = (0..presence.unit_count()).filter(|&unit| !presence.is_present(unit));
        let missing = absent.map(|unit| presence.unit_range(unit).len).sum::<u64>();
        let room = self.dram_bytes - self.core.lock().locked_bytes;
        if missing > room {
            return Err(TierError::NoRoom { region: missing, room });
        }
        self.promote_all(region).map_err(TierError::system("lock a region into memory"))?;
        let mut core = self.core.lock();
        for unit in 0..presence.unit_count() {
            let is_there = core.serves(region.id) && core.unit(region.id, unit).stays();
            if !is_there {
                // Another unit was faster.
                return Err(TierError::NoRoom { region: missing, room: self.dram_bytes - core.locked_bytes });
            }
            core.unit(region.id, unit).pinned = true;
        }
        Ok(())
    }

    /// Promotes what there is room for, several units at a time.
    fn promote_all(&self, region: &Arc<Region>) -> io::Result<()> {
        let (mut on_their_way, mut result) = (VecDeque::new(), Ok(()));
        for unit in 0..region.presence.unit_count() {
            if result.is_ok() && self.begin_promotion(region, unit) {
                on_their_way.push_back(unit);
            }
            if on_their_way.len() == AHEAD_MAX {
                let first = on_their_way.pop_front();
                result = result.and(first.map_or(Ok(()), |unit| self.finish_promotion(region, unit)));
            }
        }
        for unit in on_their_way {
            result = result.and(self.finish_promotion(region, unit));
        }
        result
    }

    /// Unlocks everything of a region that takes no more accesses, has none under way, and whose units do not move. Other processes have
    /// been kept from it before.
    pub(crate) fn unlock_region(&self, region: &Region) {
        let mut locked_bytes = 0;
        for unit in 0..region.presence.unit_count() {
            if region.presence.is_present(unit) {
                let _ = region.presence.expel(unit);
                locked_bytes += region.presence.unit_range(unit).len;
            }
        }
        // The program may have unmapped it, which is as good.
        let _ = sys::unlock(region.presence.range());
        let _ = sys::expect_nothing(region.presence.range());
        self.core.lock().locked_bytes -= locked_bytes;
    }
}

/// Has a unit read into the page cache.
fn read_ahead(region: &Region, range: HostRange) {
    let first = region.offset_in_file(range);
    for offset in (0..range.len).step_by(READ_AHEAD_BYTES as usize) {
        let len = std::num::NonZero::new(READ_AHEAD_BYTES.min(range.len - offset));
        // Only advice; locking reads what it has not brought.
        let _ = rustix::fs::fadvise(region.ways.buffered.as_fd(), first + offset, len, Advice::WillNeed);
    }
}
