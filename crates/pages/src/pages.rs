//! The public interface: opening a pool, adding and removing regions.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use terrace_hostmem::{PAGE_BYTES, fault};
use terrace_sync::Mutex;

use crate::adopt;
use crate::budget;
use crate::config::PagesConfig;
use crate::engine::{Engine, Work};
use crate::error::PagesError;
use crate::frames::{FileIdentity, Opened, PAGES_MAX, Pool, SLOTS, frames_within, overhead_bytes};
use crate::lock_file;
use crate::paged_region::PagedRegion;
use crate::recover;
use crate::region::Region;
use crate::stats::MemoryStats;
use crate::store::BackingFile;
use crate::write_back;

/// A pool has at least so many frames: a few accesses at a time must not evict each other's pages.
const FRAMES_MIN: u32 = 64;

/// Regions that share a pool of frames.
///
/// Accesses make progress in [`Pages::advance`], which the threads that serve peers call; no thread does it in the
/// background. Threads of its own write dirty pages back.
#[derive(Debug)]
pub struct Pages {
    engine: Arc<Engine>,
    config: PagesConfig,
    regions: Mutex<Vec<Arc<PagedRegion>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    is_closed: AtomicBool,
}

impl Pages {
    /// Opens the pool, or makes one. The pages that an earlier process left in it are taken over when their regions are
    /// added, if the pool still has as many frames; otherwise they are written back.
    ///
    /// # Errors
    /// `Budget`, `CgroupLimit`, `InUse`, `Layout`, `MachineMemory`, `Open`; `System` when the kernel refuses a ring, memory or a thread.
    pub fn open(config: PagesConfig) -> Result<Arc<Pages>, PagesError> {
        let frame_count = frames_within(config.budget_bytes);
        if frame_count < FRAMES_MIN {
            let least = u64::from(FRAMES_MIN) * PAGE_BYTES;
            return Err(PagesError::Budget { budget: config.budget_bytes, least });
        }
        let overhead_bytes = config.quota_bytes() as u64 + overhead_bytes(config.budget_bytes);
        budget::check_memory(config.budget_bytes, overhead_bytes)?;
        fault::install().map_err(PagesError::system("install signal handlers"))?;
        let pool = match Pool::open(config.directory.as_deref(), &config.name, frame_count)? {
            Opened::Ready(pool) => pool,
            Opened::Other(pool) => {
                tracing::info!(
                    before = pool.frame_count(),
                    now = frame_count,
                    "the budget has changed: the pages in the pool are written back and discarded"
                );
                recover::write_back_all(&pool)?;
                pool.reformat(frame_count)?
            }
            Opened::Mapped(pool) => {
                tracing::warn!(
                    "a process of this host, which may be stopped, still has the pages of this pool's last server mapped: \
                     they are written back and discarded"
                );
                recover::write_back_all(&pool)?;
                pool.replace(frame_count)?
            }
        };
        let engine = Arc::new(Engine::open(pool, &*config.store(), config.quota_bytes())?);
        // If a thread cannot be started, dropping this stops the others.
        let pages = Arc::new(Pages {
            engine,
            config,
            regions: Mutex::default(),
            threads: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        for _ in 0..pages.config.writers.max(1) {
            let engine = pages.engine.clone();
            let builder = std::thread::Builder::new().name("terrace-pages".into());
            let thread = builder.spawn(move || write_back::run(&engine));
            pages.threads.lock().push(thread.map_err(PagesError::system("start a thread"))?);
        }
        Ok(pages)
    }

    /// Adds a region. Pages that an earlier process has left in the pool are in memory at once.
    ///
    /// # Errors
    /// `Elsewhere`, `Remounted`, `Regions`, `Size`; `System` when a system call fails.
    pub fn add(&self, backing: BackingFile) -> Result<Arc<PagedRegion>, PagesError> {
        let (engine, pool) = (&self.engine, &self.engine.pool);
        let (path, len) = (backing.path().to_owned(), backing.len_bytes());
        if len / PAGE_BYTES >= PAGES_MAX {
            return Err(PagesError::Size { path, bytes: len, reason: "a page number has 36 bits".into() });
        }
        let mut regions = self.regions.lock();
        let identity = backing.identity().map_err(PagesError::system("identify a region's file"))?;
        let (slot, is_known) = choose_slot(pool, identity)?;
        let has_slot = has_slot(pool, identity);
        let may_have_newest = |slot: u8| {
            pool.slot(slot).may_be_of_file_at(&path, identity) && !recover::dirty_pages(pool, slot).is_empty()
        };
        if !has_slot && Pool::slots().any(may_have_newest) {
            // Whether it is the file of the mount before is for the user to say.
            return Err(PagesError::Remounted { path, pool: pool.path().map(Path::to_owned) });
        }
        lock_file::check(&path, pool.path(), has_slot)?;
        let region = Arc::new(Region::new(slot, identity, backing)?);
        if !is_known {
            // Before the lock file: a lock file that names a pool without the file says that the pool was lost.
            pool.slot(slot).occupy(identity, &path);
        }
        if let Err(error) = self.discard_other_parts(&region).and_then(|()| write_lock_file(pool, &region)) {
            if !is_known {
                pool.slot(slot).vacate();
            }
            return Err(error);
        }
        for shard in engine.shards() {
            shard.lock().regions.insert(slot, region.clone());
        }
        if is_known {
            adopt::adopt(engine, &region);
        }
        let region = Arc::new(PagedRegion { engine: engine.clone(), region });
        regions.push(region.clone());
        Ok(region)
    }

    /// Writes back and discards the pages of a region of the same file that was longer, or shorter.
    fn discard_other_parts(&self, region: &Region) -> Result<(), PagesError> {
        let pool = &self.engine.pool;
        let is_other = |slot: &u8| {
            let found = pool.slot(*slot).identity();
            found.is_some_and(|found| found.is_same_file(region.identity) && found != region.identity)
        };
        for slot in Pool::slots().filter(is_other) {
            recover::write_back_part(pool, slot, &region.files)?;
            self.discard(slot);
        }
        Ok(())
    }

    /// Discards the pages of a region, which the file has, too.
    fn discard(&self, slot: u8) {
        for shard in self.engine.shards() {
            shard.lock().discard(slot);
        }
        self.engine.pool.slot(slot).vacate();
    }

    /// Removes a region that other processes can no longer reach: waits for its accesses, writes its pages back, and
    /// frees their frames. Later accesses fail. Pages that cannot be written back stay in the pool's file, for
    /// `recover`.
    pub fn remove(&self, region: &Arc<PagedRegion>) {
        let (engine, region) = (&region.engine, &region.region);
        self.regions.lock().retain(|known| !Arc::ptr_eq(&known.region, region));
        self.end(region);
        if engine.flush(region, 0..region.table.page_count()).is_err() {
            tracing::error!(path = ?region.files.path, "a region ends, and not all of its pages could be made durable: those in memory stay in the pool");
            return;
        }
        lock_file::remove(&region.files.path);
        self.discard(region.slot);
    }

    /// Keeps a region from new accesses, and waits for those under way.
    fn end(&self, region: &Region) {
        region.is_closing.store(true, Ordering::Release);
        region.table.entries().withdraw();
        // They might wait for ever while nothing can be written.
        self.engine.fail_starved(region);
        while self.engine.shards().iter().any(|shard| shard.lock().is_in_use(region.slot)) {
            if !self.engine.advance() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Writes back and discards the pages in the pool whose regions have not been added. Those that cannot be written
    /// back stay in the pool, and are logged.
    pub fn discard_unclaimed(&self) {
        // Keeps regions from being added meanwhile.
        let regions = self.regions.lock();
        let claimed: Vec<u8> = regions.iter().map(|region| region.region.slot).collect();
        for slot in Pool::slots().filter(|slot| !claimed.contains(slot)) {
            if self.engine.pool.slot(slot).is_in_use() {
                match recover::write_back_region(&self.engine.pool, slot) {
                    Ok(_) => self.discard(slot),
                    Err(error) => {
                        tracing::warn!(
                            %error, path = ?self.engine.pool.slot(slot).path(),
                            "pages of a region that is not served any more stay in memory: if its file has another path \
                             now, write them back with `terrace recover`"
                        );
                        for shard in self.engine.shards() {
                            shard.lock().note_unclaimed_written();
                        }
                    }
                }
            }
        }
    }

    /// Has up to so many pages leave memory, as the policy chooses. Returns how many have left; dirty ones leave when they
    /// have been written back.
    pub fn evict(&self, pages_max: usize) -> usize {
        let mut left = 0;
        let mut work = Work::default();
        for shard in self.engine.shards() {
            left += shard.lock().evict_some(pages_max - left);
        }
        work.is_starved = true;
        self.engine.settle(work);
        left
    }

    /// Submits queued reads with one system call, and handles those that have ended. Returns whether any has. Costs one
    /// load when nothing is under way.
    pub fn advance(&self) -> bool {
        self.engine.advance()
    }

    /// Readable when [`Pages::advance`] would handle a read that has ended.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.engine.reads.descriptor()
    }

    /// Statistics so far.
    pub fn stats(&self) -> MemoryStats {
        let engine = &self.engine;
        let regions: Vec<_> = self.regions.lock().iter().map(|region| region.stats()).collect();
        MemoryStats {
            budget_bytes: self.config.budget_bytes,
            resident_bytes: regions.iter().map(|region| region.resident_bytes).sum(),
            dirty_bytes: engine.pool.dirty_count() as u64 * PAGE_BYTES,
            buffer_bytes: engine.quota.bytes_max() as u64,
            io_in_flight: engine.reads.in_flight(),
            regions,
        }
    }

    /// The number of frames.
    pub fn frame_count(&self) -> u64 {
        self.engine.pool.frame_count().into()
    }
}

/// Whether a pool has a slot of a file, or of a part of it.
fn has_slot(pool: &Pool, identity: FileIdentity) -> bool {
    Pool::slots().any(|slot| pool.slot(slot).identity().is_some_and(|found| found.is_same_file(identity)))
}

/// Notes beside the file of a region that its newest bytes may be in the pool.
fn write_lock_file(pool: &Pool, region: &Region) -> Result<(), PagesError> {
    let Some(pool_path) = pool.path().filter(|_| region.files.is_file()) else { return Ok(()) };
    lock_file::write(&region.files.path, pool_path)
        .map_err(PagesError::system("write a lock file beside a region's file"))
}

/// The slot that a region had before, and true, or a free one.
fn choose_slot(pool: &Pool, identity: FileIdentity) -> Result<(u8, bool), PagesError> {
    if let Some(slot) = Pool::slots().find(|slot| pool.slot(*slot).identity() == Some(identity)) {
        return Ok((slot, true));
    }
    let free = Pool::slots().find(|slot| !pool.slot(*slot).is_in_use());
    free.map(|slot| (slot, false)).ok_or(PagesError::Regions(SLOTS))
}

impl Pages {
    /// Writes all pages back, and ends. The frames keep them for the next process, if the pool is kept. Later accesses
    /// fail. Returns the files that lack pages, because they could not be written or made durable: the pool keeps those.
    /// Closing again does nothing, and returns none.
    pub fn close(&self) -> Vec<PathBuf> {
        let mut lacking = Vec::new();
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return lacking;
        }
        let regions = std::mem::take(&mut *self.regions.lock());
        for region in &regions {
            self.end(&region.region);
        }
        self.engine.to_write.close();
        for thread in self.threads.lock().drain(..) {
            // If a waker that the thread called held the last reference, the thread drops this itself.
            if thread.thread().id() != std::thread::current().id()
                && let Err(panic) = thread.join()
                && !std::thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
        for region in &regions {
            let region = &region.region;
            if self.engine.flush(region, 0..region.table.page_count()).is_ok() {
                lock_file::remove(&region.files.path);
            } else {
                tracing::error!(path = ?region.files.path, "not all pages of a region could be made durable: those in memory stay in the pool");
                lacking.push(region.files.path.clone());
            }
        }
        if !self.config.is_kept {
            self.engine.pool.remove_if_clean();
        }
        lacking
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.close();
    }
}
