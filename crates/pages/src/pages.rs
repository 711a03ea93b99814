//! The public interface: opening a pool, adding and removing regions.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use terrace_hostmem::{PAGE_BYTES, fault};
use terrace_sync::Mutex;

use crate::adopt;
use crate::config::PagesConfig;
use crate::engine::Engine;
use crate::error::PagesError;
use crate::frames::{FileIdentity, Opened, PAGES_MAX, Pool, SLOTS, frames_within};
use crate::lock_file;
use crate::paged_region::PagedRegion;
use crate::recover;
use crate::region::Region;
use crate::stats::PagesStats;
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
}

impl Pages {
    /// Opens the pool, or makes one. The pages that an earlier process left in it are taken over when their regions are
    /// added, if the pool still has as many frames; otherwise they are written back.
    ///
    /// # Errors
    /// `Budget`, `InUse`, `Layout`, `Open`; `System` when the kernel refuses a ring, memory or a thread.
    pub fn open(config: PagesConfig) -> Result<Arc<Pages>, PagesError> {
        let frame_count = frames_within(config.budget_bytes);
        if frame_count < FRAMES_MIN {
            let least =
                (1..).map(|count| count * PAGE_BYTES).find(|bytes| frames_within(*bytes) >= FRAMES_MIN);
            return Err(PagesError::Budget { budget: config.budget_bytes, least: least.unwrap_or(u64::MAX) });
        }
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
        let pages = Arc::new(Pages { engine, config, regions: Mutex::default(), threads: Mutex::default() });
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
    /// `Elsewhere`, `Regions`, `Size`; `System` when a system call fails.
    pub fn add(&self, backing: BackingFile) -> Result<Arc<PagedRegion>, PagesError> {
        let (engine, pool) = (&self.engine, &self.engine.pool);
        let (path, len) = (backing.path().to_owned(), backing.len_bytes());
        if len / PAGE_BYTES >= PAGES_MAX {
            return Err(PagesError::Size { path, bytes: len, reason: "a page number has 36 bits".into() });
        }
        recover::check_lock_file(&path, pool.path())?;
        let mut regions = self.regions.lock();
        let identity = backing.identity().map_err(PagesError::system("identify a region's file"))?;
        let (slot, is_known) = choose_slot(pool, identity)?;
        let region = Arc::new(Region::new(slot, identity, backing)?);
        if let (Some(pool), true) = (pool.path(), region.files.is_file()) {
            lock_file::write(&path, pool)
                .map_err(PagesError::system("write a lock file beside a region's file"))?;
        }
        for shard in engine.shards() {
            shard.lock().regions.insert(slot, region.clone());
        }
        if is_known {
            adopt::adopt(engine, &region);
        } else {
            pool.slot(slot).occupy(identity, &path);
        }
        let region = Arc::new(PagedRegion { engine: engine.clone(), region });
        regions.push(region.clone());
        Ok(region)
    }

    /// Removes a region that other processes can no longer reach: waits for its accesses, writes its pages back, and
    /// frees their frames. Later accesses fail. Pages that cannot be written back stay in the pool's file, for
    /// `recover`.
    pub fn remove(&self, region: &Arc<PagedRegion>) {
        let (engine, region) = (&region.engine, &region.region);
        self.regions.lock().retain(|known| !Arc::ptr_eq(&known.region, region));
        self.end(region);
        if engine.flush(region, 0..region.table.page_count()).is_err() {
            tracing::error!(path = ?region.files.path, "a region ends, and not all of its pages could be written: they stay in the pool");
            return;
        }
        lock_file::remove(&region.files.path);
        for shard in engine.shards() {
            shard.lock().discard(region.slot);
        }
        engine.pool.slot(region.slot).vacate();
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

    /// Writes back and discards the pages in the pool whose regions have not been added.
    ///
    /// # Errors
    /// When they cannot be written back: they stay in the pool.
    pub fn discard_unclaimed(&self) -> Result<(), PagesError> {
        // Keeps regions from being added meanwhile.
        let regions = self.regions.lock();
        let claimed: Vec<u8> = regions.iter().map(|region| region.region.slot).collect();
        for slot in Pool::slots().filter(|slot| !claimed.contains(slot)) {
            if self.engine.pool.slot(slot).is_in_use() {
                recover::write_back_region(&self.engine.pool, slot)?;
                for shard in self.engine.shards() {
                    shard.lock().discard(slot);
                }
                self.engine.pool.slot(slot).vacate();
            }
        }
        Ok(())
    }

    /// Submits queued reads with one system call, and handles those that have ended. Returns whether any has. Costs one
    /// load when nothing is under way.
    pub fn advance(&self) -> bool {
        self.engine.advance()
    }

    /// Readable when [`Pages::advance`] would handle a read that has ended.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.engine.descriptor.as_fd()
    }

    /// Statistics so far.
    pub fn stats(&self) -> PagesStats {
        let engine = &self.engine;
        PagesStats {
            frame_count: u64::from(engine.pool.frame_count()),
            dirty_frames: engine.pool.dirty_count() as u64,
            reads_in_flight: engine.in_flight.load(Ordering::Relaxed) as u64,
            regions: self.regions.lock().iter().map(|region| region.stats()).collect(),
        }
    }

    /// The most memory that accesses under way take, in bytes.
    pub fn quota_bytes(&self) -> u64 {
        self.engine.quota.bytes_max() as u64
    }
}

/// The slot that a region had before, and true, or a free one.
fn choose_slot(pool: &Pool, identity: FileIdentity) -> Result<(u8, bool), PagesError> {
    if let Some(slot) = Pool::slots().find(|slot| pool.slot(*slot).identity() == Some(identity)) {
        return Ok((slot, true));
    }
    let free = Pool::slots().find(|slot| !pool.slot(*slot).is_in_use());
    free.map(|slot| (slot, false)).ok_or(PagesError::Regions(SLOTS))
}

impl Drop for Pages {
    /// Writes all pages back. The frames keep them for the next process, if the pool is kept.
    fn drop(&mut self) {
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
                tracing::error!(path = ?region.files.path, "not all pages of a region could be written: they stay in the pool");
            }
        }
        if !self.config.is_kept {
            self.engine.pool.remove_if_clean();
        }
    }
}
