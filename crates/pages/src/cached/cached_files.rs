//! The public interface: opening a budget, adding and removing regions.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use terrace_hostmem::{PAGE_BYTES, fault};
use terrace_memory::AccessError;
use terrace_sync::Mutex;

use super::cached_region::CachedRegion;
use super::config::CachedConfig;
use super::engine::Engine;
use super::region::{CachedSource, Region, file_len};
use super::{flush, kernel, reclaim};
use crate::error::PagesError;
use crate::key::GROUP_PAGES;
use crate::stats::{MemoryStats, RegionStats};

/// Regions over shared file mappings that share a budget of pages in memory.
///
/// Accesses make progress in [`CachedFiles::advance`], which the threads that serve peers call; no thread does it in the
/// background. Threads of its own have pages leave, and carry flushes out.
#[derive(Debug)]
pub struct CachedFiles {
    engine: Arc<Engine>,
    config: CachedConfig,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl CachedFiles {
    /// Opens a budget without regions.
    ///
    /// # Errors
    /// `System` when the kernel refuses a ring, memory or a thread.
    pub fn open(config: CachedConfig) -> Result<Arc<CachedFiles>, PagesError> {
        fault::install().map_err(PagesError::system("install signal handlers"))?;
        let engine = Arc::new(Engine::open(&config)?);
        // If a thread cannot be started, dropping this stops the other.
        let files = Arc::new(CachedFiles { engine: engine.clone(), config, threads: Mutex::default() });
        let reclaiming = engine.clone();
        files.spawn("terrace-pages", move || reclaim::run(&reclaiming))?;
        files.spawn("terrace-flush", move || flush::run(&engine))?;
        Ok(files)
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), PagesError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        self.threads.lock().push(thread.map_err(PagesError::system("start a thread"))?);
        Ok(())
    }

    /// Adds a region. Its pages in the page cache are found by the next scan, and leave as far as they exceed the budget.
    ///
    /// # Errors
    /// `Regions`; `Source` when the source breaks the rules of [`CachedSource`]; `System` when a system call fails.
    pub fn add(&self, source: CachedSource) -> Result<Arc<CachedRegion>, PagesError> {
        let map = source.map;
        let is_aligned = map.addr.is_multiple_of(PAGE_BYTES) && source.file_offset.is_multiple_of(PAGE_BYTES);
        if map.len == 0 || map.addr.checked_add(map.len).is_none() || !is_aligned {
            return Err(PagesError::Source("it has no bytes, no end, or does not begin at a page"));
        }
        let file_len = file_len(&source.file).map_err(PagesError::system("measure a mapping's file"))?;
        if source.file_offset.checked_add(map.len).is_none_or(|end| end > file_len) {
            return Err(PagesError::Source("the file ends before it"));
        }
        let region = self.engine.add_region(|slot| Region::new(slot, source))?;
        Ok(Arc::new(CachedRegion { engine: self.engine.clone(), region }))
    }

    /// Removes a region that other processes can no longer reach: waits for its accesses. Later accesses fail. Its pages
    /// stay in the page cache, which is the kernel's again. Writes that could not be written back until now are logged
    /// as lost.
    pub fn remove(&self, region: &Arc<CachedRegion>) {
        let (engine, region) = (&region.engine, &region.region);
        if !region.close() {
            return;
        }
        region.table.entries().withdraw();
        // They might wait for ever while nothing can be written.
        for shard in engine.shards() {
            engine.fail_starved(shard, |slot| slot == region.slot, AccessError::Fault);
        }
        engine.advance_while(|| {
            region.is_used() || engine.shards().iter().any(|shard| shard.lock().is_in_use(region.slot))
        });
        if region.losses.are_there()
            && let Err(error) = engine.write_again(region)
        {
            tracing::error!(%error, "a region ends, and what could not be written back of it is lost");
        }
        for shard in engine.shards() {
            shard.lock().discard(region);
        }
        engine.remove_region(region);
        kernel::expect_nothing(region.map);
    }

    /// Has the present pages of a group of adjacent ones leave at once, whatever the policy says. Waits for the disk.
    pub fn evict_group(&self, region: &CachedRegion, page: u64) {
        let (engine, region) = (&region.engine, &region.region);
        let Some(_used) = region.begin_use() else { return };
        let first = page / GROUP_PAGES * GROUP_PAGES;
        let end = (first + GROUP_PAGES).min(region.table.page_count());
        if first < end && !region.losses.are_there() {
            let leavers = engine.lock(region.key(first)).choose_pages(region, first..end);
            engine.let_go(region, &leavers);
        }
    }

    /// Submits queued reads with one system call, and handles those that have ended. Returns whether any has. Costs one
    /// load when nothing is under way.
    pub fn advance(&self) -> bool {
        self.engine.advance()
    }

    /// Readable when [`CachedFiles::advance`] would handle a read that has ended.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.engine.device_descriptor()
    }

    /// Statistics so far. `pages_adopted` are those that the program or another process has brought into memory.
    pub fn stats(&self) -> MemoryStats {
        let of_region = |region: &Arc<Region>| RegionStats {
            addr: region.map.addr,
            len_bytes: region.map.len,
            resident_bytes: (region.page_count() * PAGE_BYTES).min(region.map.len),
            is_failing: region.losses.are_there(),
            ..region.counters.read()
        };
        let regions: Vec<RegionStats> = self.engine.regions().iter().map(of_region).collect();
        MemoryStats {
            budget_bytes: self.config.budget_bytes,
            resident_bytes: regions.iter().map(|region| region.resident_bytes).sum(),
            dirty_bytes: 0,
            buffer_bytes: self.config.quota_bytes() as u64,
            io_in_flight: self.engine.reads.in_flight(),
            regions,
        }
    }
}

impl Drop for CachedFiles {
    fn drop(&mut self) {
        self.engine.reclaim.close();
        self.engine.flushes.close();
        for thread in self.threads.lock().drain(..) {
            // If a waker that the thread called held the last reference, the thread drops this itself.
            if thread.thread().id() != std::thread::current().id()
                && let Err(panic) = thread.join()
                && !std::thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}
