//! Promotes and demotes units. These calls wait for the disk: threads that serve peers never make them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::fs::Advice;
use terrace_faults::StorageOperation;
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_shm::GracePeriod;

use crate::core::RegionState;
use crate::engine::Engine;
use crate::error::TierError;
use crate::region::Region;
use crate::sys;
use crate::unit::Residency;

/// How long a demotion waits for readers in other processes. Most accesses take microseconds.
const READERS_PATIENCE: Duration = Duration::from_millis(1);
/// How many units are read ahead at a time.
pub(crate) const AHEAD_MAX: usize = 4;
/// How often in a row a unit's pages are dropped in vain before [`Engine::clean`] gives up.
const CLEANINGS_MAX: u8 = 3;
/// How many units are checked for readahead per period: less than a millisecond of work.
const CHECKS_MAX: usize = 64;
/// Bytes per readahead request: the kernel cuts longer ones to its readahead limit.
const READ_AHEAD_BYTES: u64 = 128 << 10;

/// A unit whose demotion waits until other processes have ended their accesses to it.
#[derive(Debug)]
pub(crate) struct Departure {
    region: Arc<Region>,
    unit: usize,
    readers: GracePeriod,
}

impl Engine {
    /// Makes a unit resident. False if it is not absent, or if the budget has no room for it.
    ///
    /// # Errors
    /// When it cannot be read or locked; it is then absent.
    pub(crate) fn promote(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        if !self.begin_promotion(region, unit) {
            return Ok(false);
        }
        self.finish_promotion(region, unit).map(|()| true)
    }

    /// Starts readahead of a unit, so that several are read at a time. False as for [`Engine::promote`]; otherwise
    /// [`Engine::finish_promotion`] must follow.
    pub(crate) fn begin_promotion(&self, region: &Arc<Region>, unit: usize) -> bool {
        let range = region.presence.unit_range(unit);
        if !self.begin_arrival(region, unit, range.len) {
            return false;
        }
        // Direct writes must end before the unit is read through the page cache.
        self.when(|core| core.unit(region.id, unit).direct_writes == 0, |_| ());
        read_ahead(region, range);
        true
    }

    /// Locks a unit, and maps it in the page table when no write is under way.
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
        // One lock for the check and the mapping: no write can start in between.
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

    /// Waits until a unit is in the page cache. `mlock` would wait, too, but with the address space locked: then each
    /// thread that allocates memory waits for the disk.
    fn await_pages(&self, region: &Region, range: HostRange) {
        let mut offset = region.offset_in_file(range);
        let end = offset + range.len;
        while offset < end {
            let wanted = (end - offset) as usize;
            // `sendfile` to `/dev/null` reads the pages without copying. Read errors show up when the unit is locked.
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

    /// Demotes a unit, in the order that [`Residency`] shows. If another process is in the middle of an access for
    /// longer than [`READERS_PATIENCE`], [`Engine::finish_departures`] completes the demotion later. False if the unit
    /// is not resident, or pinned.
    ///
    /// # Errors
    /// When it cannot be written back: it stays resident.
    pub(crate) fn demote(&self, region: &Arc<Region>, unit: usize) -> io::Result<bool> {
        if !self.begin_departure(region, unit) {
            return Ok(false);
        }
        // Before any change of state: a unit that cannot be written back stays resident.
        if let Err(error) = self.write_back(region, region.presence.unit_range(unit)) {
            self.cancel_departure(region, unit);
            return Err(error);
        }
        // Unmapped first: while the NIC accesses the unit by itself, an access through the tier must not wait.
        let mut readers = region.presence.expel(unit);
        if readers.wait(READERS_PATIENCE).is_err() {
            let core = self.core.lock();
            // A region that is being removed gets no more `finish_departures`: its units leave now.
            if core.serves(region.id) {
                self.set_aside.lock().push(Departure { region: region.clone(), unit, readers });
                return Ok(true);
            }
        }
        self.depart(region, unit)?;
        Ok(true)
    }

    /// Completes the demotions whose readers have ended their accesses.
    pub(crate) fn finish_departures(&self) {
        self.depart_all(|departure| departure.readers.is_over());
    }

    /// Completes all demotions of a region that takes no more accesses.
    pub(crate) fn abandon_departures(&self, region: &Arc<Region>) {
        self.depart_all(|departure| Arc::ptr_eq(&departure.region, region));
    }

    fn depart_all(&self, mut which: impl FnMut(&mut Departure) -> bool) {
        let departing: Vec<Departure> = {
            let mut set_aside = self.set_aside.lock();
            set_aside.extract_if(.., &mut which).collect()
        };
        for Departure { region, unit, .. } in departing {
            // Write-back errors were logged.
            let _ = self.depart(&region, unit);
        }
    }

    /// The second half of a demotion: the unit is unmapped, and only accesses through the tier reach it.
    fn depart(&self, region: &Arc<Region>, unit: usize) -> io::Result<()> {
        let range = region.presence.unit_range(unit);
        self.core.lock().unit(region.id, unit).residency = Residency::Locked;
        // A read-modify-write in the file must not interleave with an atomic operation on memory.
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
            // Stores since the first write-back could not be written. The unit is locked again before the kernel evicts
            // them.
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

    /// Unlocks a unit, writes it back and drops it from the page cache. Returns whether no page is left there.
    fn forget(&self, region: &Region, range: HostRange) -> io::Result<bool> {
        // Fails if the mapping is gone; then nothing is locked.
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

    /// Writes back and drops the page-cache pages of an absent unit. False if pages in use were kept [`CLEANINGS_MAX`]
    /// times in a row, and cleaning gives up.
    ///
    /// # Errors
    /// When the unit cannot be written back.
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
            // `cached` stays set while the pages are dropped: if write-back fails, the file has old bytes. Writes
            // meanwhile set `cached_again`.
            state.cached_again = state.writes > 0;
            let touched = std::mem::take(&mut state.touched);
            core.regions[region.id].moves += 1;
            touched
        };
        let range = region.presence.unit_range(unit);
        if touched {
            // Fails if the mapping is gone; then its pages are unmapped, too.
            let _ = sys::unmap_pages(range);
        }
        let dropped = self.drop_pages(region, range);
        let mut core = self.core.lock();
        core.regions[region.id].moves -= 1;
        let state = core.unit(region.id, unit);
        // Kept pages are in use by the program, or the kernel held them for a short time.
        let again = matches!(dropped, Ok(false)) && state.cleanings < CLEANINGS_MAX;
        state.cleanings = if again { state.cleanings + 1 } else { 0 };
        state.kept = matches!(dropped, Ok(false)) && !again;
        state.cached = again || dropped.is_err() || state.cached_again;
        if state.cached {
            core.note_cached(region.id, unit);
        }
        dropped.map(|is_dropped| is_dropped || again)
    }

    /// For a unit whose pages cannot be dropped because they share a folio with a resident unit: demotes the resident
    /// unit, and the next cleaning drops both. Readahead makes folios of up to 2 MiB.
    pub(crate) fn part_from_residents(&self, region: &Arc<Region>, unit: usize) {
        let range = region.presence.unit_range(unit);
        let is_whole = sys::cached_pages(range).is_some_and(|count| count as u64 == range.len / PAGE_BYTES);
        // The program uses pages that this process maps.
        if !is_whole || sys::is_mapped(range) {
            return;
        }
        let folio = region.folio_around(range);
        let presence = &region.presence;
        for other in presence.units_of(folio).filter(|&other| presence.is_present(other)) {
            // A unit that cannot be written back was logged, and stays resident.
            let _ = self.demote(region, other);
        }
    }

    /// Takes the list of units that may have pages in the page cache.
    pub(crate) fn take_to_clean(&self, region: &Region) -> Vec<usize> {
        let mut core = self.core.lock();
        let Some(state) = core.regions.get_mut(region.id) else { return Vec::new() };
        if !state.to_clean.is_empty() {
            state.checks.restart(state.units.len());
        }
        std::mem::take(&mut state.to_clean)
    }

    /// Finds absent units that the kernel has read ahead into, some units per period. `PG_readahead` and `PG_reclaim`
    /// are one page flag: advice to drop a page under write-back sets it, and the next read of that page starts a
    /// readahead of up to twice the device's `read_ahead_kb`, even if the file is advised as random.
    pub(crate) fn check_for_readahead(&self, region: &Region) {
        for _ in 0..CHECKS_MAX {
            let Some(unit) = self.next_check(region) else { return };
            let range = region.presence.unit_range(unit);
            // The program uses what it has mapped.
            if sys::cached_pages(range).is_none_or(|count| count == 0) || sys::is_mapped(range) {
                continue;
            }
            let mut core = self.core.lock();
            if core.serves(region.id) && core.unit(region.id, unit).may_be_read_ahead() {
                core.note_cached(region.id, unit);
            }
        }
    }

    /// The next unit whose readahead the tier would not notice.
    fn next_check(&self, region: &Region) -> Option<usize> {
        let mut core = self.core.lock();
        let state = core.regions.get_mut(region.id)?;
        let RegionState { checks, units, .. } = state;
        (0..units.len()).map_while(|_| checks.next(units.len())).find(|&unit| units[unit].may_be_read_ahead())
    }

    /// Locks a whole region into memory, permanently.
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
                // Another unit took the budget meanwhile.
                return Err(TierError::NoRoom { region: missing, room: self.dram_bytes - core.locked_bytes });
            }
            core.unit(region.id, unit).pinned = true;
        }
        Ok(())
    }

    /// Promotes as many units as fit, several at a time.
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

    /// Unlocks a region that takes no more accesses and has neither accesses nor moves under way. Other processes have
    /// lost access to it before.
    pub(crate) fn unlock_region(&self, region: &Region) {
        let mut locked_bytes = 0;
        for unit in 0..region.presence.unit_count() {
            if region.presence.is_present(unit) {
                let _ = region.presence.expel(unit);
                locked_bytes += region.presence.unit_range(unit).len;
            }
        }
        // Fails if the program has unmapped it: nothing is locked then.
        let _ = sys::unlock(region.presence.range());
        let _ = sys::expect_nothing(region.presence.range());
        self.core.lock().locked_bytes -= locked_bytes;
    }
}

/// Starts readahead of a unit into the page cache.
fn read_ahead(region: &Region, range: HostRange) {
    let first = region.offset_in_file(range);
    for offset in (0..range.len).step_by(READ_AHEAD_BYTES as usize) {
        let len = std::num::NonZero::new(READ_AHEAD_BYTES.min(range.len - offset));
        // Advisory: locking reads the rest.
        let _ = rustix::fs::fadvise(region.ways.buffered.as_fd(), first + offset, len, Advice::WillNeed);
    }
}
