//! The public interface: opening a baseline, adding and removing regions.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use rustix::fs::Advice;
use terrace_faults::StorageOperation;
use terrace_hostmem::{PAGE_BYTES, fault};
use terrace_pages::{MemoryStats, RegionStats};
use terrace_sync::Mutex;

use crate::baseline_region::BaselineRegion;
use crate::budget;
use crate::config::{BaselineConfig, IoMethod};
use crate::core::RegionState;
use crate::engine::Engine;
use crate::error::BaselineError;
use crate::file::{FileHandles, Source};
use crate::region::Region;
use crate::sys;
use crate::workers;

/// Regions that share a device and a limit on locked memory.
///
/// Accesses make progress in [`Baseline::advance`], which the threads that serve peers call; no thread does it in the
/// background.
#[derive(Debug)]
pub struct Baseline {
    engine: Arc<Engine>,
    /// In the order in which they were added.
    regions: Mutex<Vec<Arc<Region>>>,
    config: BaselineConfig,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Baseline {
    /// Checks the budget against the limits of the process, sets up the device and starts the threads.
    ///
    /// # Errors
    /// `MemlockLimit`, `Pages`; `System` when the kernel refuses a ring, memory or a thread.
    pub fn open(config: BaselineConfig) -> Result<Arc<Baseline>, BaselineError> {
        budget::check(&config)?;
        fault::install().map_err(BaselineError::system("install signal handlers"))?;
        // If a thread cannot be started, dropping this stops the others.
        let baseline = Arc::new(Baseline {
            engine: Arc::new(Engine::open(&config)?),
            regions: Mutex::default(),
            config,
            threads: Mutex::default(),
        });
        if baseline.config.threads > 1 {
            baseline.engine.workers.open();
            for _ in 0..baseline.config.threads {
                let engine = baseline.engine.clone();
                let thread = std::thread::Builder::new()
                    .name("terrace-copies".into())
                    .spawn(move || workers::run(&engine));
                baseline.threads.lock().push(thread.map_err(BaselineError::system("start a thread"))?);
            }
        }
        Ok(baseline)
    }

    /// Adds a region and begins to serve it. With [`IoMethod::Pinned`] all of it is locked into memory first.
    ///
    /// # Errors
    /// `Source` when the source breaks the rules of [`Source`]; `NoRoom` when the budget does not allow to lock it;
    /// `System` when a system call fails.
    pub fn add(&self, source: Source) -> Result<Arc<BaselineRegion>, BaselineError> {
        let map = source.map;
        if map.len == 0 || map.addr.checked_add(map.len).is_none() {
            return Err(BaselineError::Source("it has no bytes, or its end overflows"));
        }
        if !map.addr.is_multiple_of(PAGE_BYTES) || !source.file_offset.is_multiple_of(PAGE_BYTES) {
            return Err(BaselineError::Source("it does not begin at a page"));
        }
        let files = FileHandles::open(source.file, source.writable)
            .map_err(BaselineError::system("open a region's file"))?;
        if source.file_offset.checked_add(map.len).is_none_or(|end| end > files.file_len) {
            return Err(BaselineError::Source("the file ends before it"));
        }
        let io = self.config.io;
        if !source.exclusive && !matches!(io, IoMethod::Pinned | IoMethod::Mapping) {
            return Err(BaselineError::Source("others use its file, which this method does not allow for"));
        }
        if source.exclusive && source.writable {
            let locked = files.lock(source.file_offset, map.len);
            locked.map_err(BaselineError::system("lock a region's file, which another server may have"))?;
        }
        sys::expect_random(map).map_err(BaselineError::system("advise on a region's mapping"))?;
        if io == IoMethod::Pinned {
            self.engine.reserve(map.len)?;
        }
        let properties = (source.file_offset, source.writable);
        let region = self
            .engine
            .core
            .lock()
            .regions
            .add(|id| (RegionState::default(), Arc::new(Region::new(id, map, files, properties, io))));
        // With buffered access, the kernel alone manages the page cache.
        if io != IoMethod::Buffered {
            // Turns readahead off. Advisory, and only for descriptors that were opened for the region.
            let _ = rustix::fs::fadvise(&*region.files.buffered, 0, None, Advice::Random);
            // Pages that earlier users have left are in no budget. The fault pager, a model of a NIC that takes page
            // faults, begins with the cached pages.
            if source.exclusive || io != IoMethod::Mapping {
                region.drop_from_memory(map, Ok(()));
            }
        }
        if io == IoMethod::Pinned
            && let Err(error) = self.engine.suffer(StorageOperation::Read).and_then(|()| region.pin())
        {
            self.end(&region);
            return Err(BaselineError::system("lock a region into memory")(error));
        }
        self.regions.lock().push(region.clone());
        Ok(Arc::new(BaselineRegion { engine: self.engine.clone(), region }))
    }

    /// Removes a region that other processes can no longer reach: waits for its accesses, and unlocks its memory. Later
    /// accesses fail. Acknowledged writes are in the file or in the page cache.
    pub fn remove(&self, region: &Arc<BaselineRegion>) {
        let region = &region.region;
        match self.engine.core.lock().regions.get_mut(region.id) {
            Some(state) if !state.closing => state.closing = true,
            _ => return,
        }
        self.regions.lock().retain(|known| !Arc::ptr_eq(known, region));
        self.engine.when(|core| core.regions[region.id].access_count == 0);
        self.end(region);
    }

    /// Ends a region without accesses under way.
    fn end(&self, region: &Region) {
        region.unpin();
        if region.method == IoMethod::Pinned {
            self.engine.release(region.range().len);
        }
        self.engine.core.lock().regions.remove(region.id);
    }

    /// Submits queued requests with one system call, and handles completions. Returns whether any request completed.
    /// Costs one load when nothing is under way.
    pub fn advance(&self) -> bool {
        self.engine.advance()
    }

    /// Readable when [`Baseline::advance`] would handle a completion.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.engine.descriptor.as_fd()
    }

    /// Statistics so far, with the regions in the order in which they were added.
    pub fn stats(&self) -> MemoryStats {
        let regions: Vec<RegionStats> = self.regions.lock().iter().map(|region| region.stats()).collect();
        MemoryStats {
            budget_bytes: self.config.dram_bytes,
            resident_bytes: self.engine.core.lock().locked_bytes,
            dirty_bytes: 0,
            buffer_bytes: self.config.pool_bytes(),
            io_in_flight: self.engine.in_flight.load(Ordering::Relaxed) as u64,
            regions,
        }
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        self.engine.workers.close();
        for thread in self.threads.lock().drain(..) {
            // If a waker that the thread called held the last reference, the thread drops the baseline itself.
            if thread.thread().id() != std::thread::current().id()
                && let Err(panic) = thread.join()
                && !std::thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}
