//! The tier's public interface.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use rustix::fs::Advice;
use terrace_hostmem::{PAGE_BYTES, fault};
use terrace_sync::Mutex;

use crate::budget;
use crate::cleaner::{self, Shared};
use crate::config::{IoMethod, TierConfig};
use crate::core::RegionState;
use crate::engine::Engine;
use crate::error::TierError;
use crate::file::{Source, Ways};
use crate::region::Region;
use crate::stats::TierStats;
use crate::sys;
use crate::tier_region::TierRegion;
use crate::workers;

/// Regions that share a memory budget, a device, and a thread that moves units.
///
/// Accesses make progress in [`Tier::advance`], which the threads that serve peers call; no thread does it in the
/// background.
#[derive(Debug)]
pub struct Tier {
    shared: Arc<Shared>,
    config: TierConfig,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Tier {
    /// Checks the budget against the limits of the process, sets up the device and starts the threads.
    ///
    /// # Errors
    /// `MemlockLimit`, `Memory`; `System` when the kernel refuses a ring, memory or a thread.
    pub fn open(config: TierConfig) -> Result<Arc<Tier>, TierError> {
        budget::check(&config)?;
        fault::install().map_err(TierError::system("install signal handlers"))?;
        let shared = Arc::new(Shared::new(Arc::new(Engine::open(&config)?)));
        // If a thread cannot be started, dropping this stops the others.
        let tier =
            Arc::new(Tier { shared: shared.clone(), config: config.clone(), threads: Mutex::default() });
        let cleaner = shared.clone();
        tier.spawn("terrace-tier", move || cleaner::run(&cleaner, &config))?;
        if tier.config.threads > 1 {
            shared.engine.workers.open();
            for _ in 0..tier.config.threads {
                let engine = shared.engine.clone();
                tier.spawn("terrace-copies", move || workers::run(&engine))?;
            }
        }
        Ok(tier)
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), TierError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        self.threads.lock().push(thread.map_err(TierError::system("start a thread"))?);
        Ok(())
    }

    /// Adds a region and begins to serve it. No unit is resident.
    ///
    /// # Errors
    /// `Source` when the source breaks the rules of [`Source`]; `System` when a system call fails.
    pub fn add(&self, source: Source) -> Result<Arc<TierRegion>, TierError> {
        let map = source.map;
        if map.len == 0 || map.addr.checked_add(map.len).is_none() {
            return Err(TierError::Source("it has no bytes, or its end overflows"));
        }
        if !map.addr.is_multiple_of(PAGE_BYTES) || !source.file_offset.is_multiple_of(PAGE_BYTES) {
            return Err(TierError::Source("it does not begin at a page"));
        }
        let ways =
            Ways::open(source.file, source.writable).map_err(TierError::system("open a region's file"))?;
        if source.file_offset.checked_add(map.len).is_none_or(|end| end > ways.file_len) {
            return Err(TierError::Source("the file ends before it"));
        }
        if source.exclusive && source.writable {
            let locked = ways.lock(source.file_offset, map.len);
            locked.map_err(TierError::system("lock a region's file, which another server may have"))?;
        }
        sys::expect_random(map).map_err(TierError::system("advise on a region's mapping"))?;
        let engine = &self.shared.engine;
        let properties = (source.file_offset, source.exclusive, source.writable);
        let region = engine.core.lock().regions.add(|id| {
            let region = Arc::new(Region::new(id, map, ways, properties, self.config.io));
            (RegionState::new(region.presence.unit_count()), region)
        });
        // Buffered access is a baseline: the kernel alone manages the page cache.
        if self.config.io != IoMethod::Buffered {
            keep_to_what_is_asked(&region.ways);
            // Drops pages that the program and earlier users have left, which no budget counts. The kernel may hold
            // them in folios larger than a unit, and keeps a whole folio while a part is locked. Pages that cannot be
            // dropped are found and used later. (The fault pager, a model of a NIC that takes page faults, begins with
            // the cached pages.)
            if source.exclusive || self.config.io != IoMethod::Mapping {
                engine.drop_from_memory(&region, map);
            }
        }
        self.shared.regions.lock().push(region.clone());
        Ok(Arc::new(TierRegion { engine: engine.clone(), region }))
    }

    /// Removes a region that other processes can no longer reach: waits for its accesses, and unlocks its memory. Later
    /// accesses fail. Acknowledged writes are in the file or in the page cache; writes that could not be written back
    /// until now are logged as lost.
    pub fn remove(&self, region: &Arc<TierRegion>) {
        let (engine, region) = (&self.shared.engine, &region.region);
        {
            let mut core = engine.core.lock();
            match core.regions.get_mut(region.id) {
                Some(state) if !state.closing => state.closing = true,
                _ => return,
            }
        }
        self.shared.regions.lock().retain(|known| !Arc::ptr_eq(known, region));
        engine.abandon_departures(region);
        let is_quiet = |state: &RegionState| state.part_count == 0 && state.moves == 0;
        engine.when(|core| is_quiet(&core.regions[region.id]), |_| ());
        if region.losses.are_there()
            && let Err(error) = engine.write_again(region)
        {
            tracing::error!(%error, "a region ends, and what could not be written back of it is lost");
        }
        engine.unlock_region(region);
        engine.core.lock().regions.remove(region.id);
    }

    /// Submits queued requests with one system call, and handles completions. Returns whether any request completed.
    /// Costs one load when nothing is under way.
    pub fn advance(&self) -> bool {
        self.shared.engine.advance()
    }

    /// Readable when [`Tier::advance`] would handle a completion.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.engine.descriptor.as_fd()
    }

    /// Statistics so far.
    pub fn stats(&self) -> TierStats {
        let engine = &self.shared.engine;
        let regions = self.shared.regions.lock().clone();
        TierStats {
            dram_bytes: self.config.dram_bytes,
            locked_bytes: engine.core.lock().locked_bytes,
            buffer_bytes: self.config.pool_bytes(),
            io_in_flight: engine.in_flight.load(Ordering::Relaxed) as u64,
            regions: regions
                .into_iter()
                .map(|region| TierRegion { engine: engine.clone(), region }.stats())
                .collect(),
        }
    }

    /// Makes a unit resident, and waits for that. False if it is not absent, or if there is no room.
    ///
    /// # Errors
    /// When it cannot be read or locked.
    pub fn promote(&self, region: &TierRegion, unit: usize) -> std::io::Result<bool> {
        self.shared.engine.promote(&region.region, unit)
    }

    /// Demotes a unit, and waits for that; if another process of the host is in the middle of an access to the unit,
    /// the demotion completes later. False if the unit is not resident, or pinned.
    ///
    /// # Errors
    /// When it cannot be written back: it stays resident.
    pub fn demote(&self, region: &TierRegion, unit: usize) -> std::io::Result<bool> {
        self.shared.engine.demote(&region.region, unit)
    }

    /// Locks a whole region into memory, permanently.
    ///
    /// # Errors
    /// `NoRoom` when the budget does not allow it; `System` when it cannot be read or locked.
    pub fn pin(&self, region: &TierRegion) -> Result<(), TierError> {
        self.shared.engine.pin(&region.region)
    }
}

/// Turns readahead off: it would read absent units, which should leave nothing in the page cache.
fn keep_to_what_is_asked(ways: &Ways) {
    // Advisory, and only for descriptors that were opened for the region.
    let _ = rustix::fs::fadvise(&*ways.buffered, 0, None, Advice::Random);
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.shared.stop();
        self.shared.engine.workers.close();
        for thread in self.threads.lock().drain(..) {
            // If a waker that the thread called held the last reference, the thread drops the tier itself.
            if thread.thread().id() != std::thread::current().id()
                && let Err(panic) = thread.join()
                && !std::thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}
