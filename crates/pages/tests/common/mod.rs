//! Helpers of the tests: temporary files, a pool with one region, and waiting for transfers.
#![allow(dead_code, reason = "not every test uses everything")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker};
use terrace_pages::{BackingFile, PagedRegion, Pages, PagesConfig};

pub const PAGE: u64 = 4096;

/// The time after which a completion counts as lost.
const PATIENCE: Duration = Duration::from_secs(300);

/// A directory for a region's file and a pool, which is removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("terrace-pages-{}-{number}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Scratch(path)
    }

    pub fn file(&self) -> PathBuf {
        self.0.join("region")
    }

    /// A file in which each page has its own number.
    pub fn with_numbered_pages(self, page_count: u64) -> Scratch {
        let file = File::create(self.file()).unwrap();
        for page in 0..page_count {
            file.write_all_at(&numbered(page), page * PAGE).unwrap();
        }
        file.sync_all().unwrap();
        self
    }

    /// A configuration with a pool of this scratch.
    pub fn config(&self, frames: u64) -> PagesConfig {
        log();
        let name = self.0.file_name().unwrap().to_str().unwrap();
        PagesConfig { directory: Some(pools()), ..PagesConfig::new(name, budget(frames)) }
    }

    fn pool(&self) -> PathBuf {
        pools().join(format!("terrace-pages-{}", self.0.file_name().unwrap().to_str().unwrap()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
        let _ = std::fs::remove_file(self.pool());
    }
}

/// The directory of the tests' pools: `TERRACE_POOLS`, such as a mount of hugetlbfs, else tmpfs.
pub fn pools() -> PathBuf {
    std::env::var_os("TERRACE_POOLS").map_or(PathBuf::from("/dev/shm"), PathBuf::from)
}

/// A budget for so many frames.
pub fn budget(frames: u64) -> u64 {
    frames * PAGE
}

/// The content of a page of [`Scratch::with_numbered_pages`].
pub fn numbered(page: u64) -> Vec<u8> {
    (page + 1).to_ne_bytes().repeat(512)
}

/// Shows the log with the output of a failing test.
pub fn log() {
    let subscriber =
        tracing_subscriber::fmt().with_writer(tracing_subscriber::fmt::TestWriter::new()).finish();
    // Fails if another test of this process has set one before.
    drop(tracing::subscriber::set_global_default(subscriber));
}

/// A pool with one region.
pub struct Served {
    pub region: Arc<PagedRegion>,
    pub pages: Arc<Pages>,
    pub waker: Waker,
    pub woken: Arc<AtomicUsize>,
}

impl Served {
    pub fn new(scratch: &Scratch, config: PagesConfig, size: Option<u64>) -> Served {
        Served::of(Pages::open(config).unwrap(), BackingFile::open(&scratch.file(), size).unwrap())
    }

    /// Another region of a pool.
    pub fn of(pages: Arc<Pages>, file: BackingFile) -> Served {
        let region = pages.add(file).unwrap();
        let woken = Arc::new(AtomicUsize::new(0));
        let counted = woken.clone();
        Served { region, pages, waker: Arc::new(move || _ = counted.fetch_add(1, Ordering::Relaxed)), woken }
    }

    pub fn addr(&self) -> u64 {
        self.region.range().addr
    }

    pub fn range(&self, offset: u64, len: u64) -> HostRange {
        HostRange { addr: self.addr() + offset, len }
    }

    /// Reads if all of a range is in memory.
    pub fn try_read(&self, offset: u64, out: &mut [u8]) -> bool {
        Translation::read(&*self.region, self.range(offset, out.len() as u64), out).is_some()
    }

    /// Writes if all of a range is in memory.
    pub fn try_write(&self, offset: u64, data: &[u8]) -> bool {
        Translation::write(&*self.region, self.addr() + offset, data).is_some()
    }

    /// Performs an atomic operation if its page is in memory.
    pub fn try_atomic(&self, offset: u64, op: AtomicOp) -> Option<u64> {
        Some(Translation::atomic(&*self.region, self.addr() + offset, op)?.unwrap())
    }

    pub fn begin_read(&self, offset: u64, len: u64) -> Arc<dyn Transfer> {
        self.retried(|| Pager::read(&*self.region, self.range(offset, len), &self.waker))
    }

    pub fn begin_write(&self, offset: u64, data: &[u8]) -> Arc<dyn Transfer> {
        self.retried(|| Pager::write(&*self.region, self.addr() + offset, data, &self.waker))
    }

    pub fn begin_atomic(&self, offset: u64, op: AtomicOp) -> Arc<dyn Transfer> {
        self.retried(|| Pager::atomic(&*self.region, self.addr() + offset, op, &self.waker))
    }

    fn retried(&self, begin: impl Fn() -> Result<Arc<dyn Transfer>, AccessError>) -> Arc<dyn Transfer> {
        let started = Instant::now();
        loop {
            match begin() {
                Err(AccessError::NotReady) => _ = self.pages.advance(),
                other => return other.unwrap(),
            }
            assert!(started.elapsed() < PATIENCE, "it stays full");
        }
    }

    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, AccessError> {
        let transfer = self.begin_read(offset, len as u64);
        self.wait(&transfer)?;
        let mut out = vec![0; len];
        transfer.read(0, &mut out)?;
        Ok(out)
    }

    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.wait(&self.begin_write(offset, data))
    }

    pub fn atomic(&self, offset: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let transfer = self.begin_atomic(offset, op);
        self.wait(&transfer)?;
        let mut before = [0; 8];
        transfer.read(0, &mut before)?;
        Ok(u64::from_ne_bytes(before))
    }

    pub fn flush(&self, offset: u64, len: u64) -> Result<(), AccessError> {
        self.wait(&self.region.flush(self.range(offset, len), &self.waker)?)
    }

    /// Makes progress until a transfer has an outcome; sleeps while there is none to make.
    pub fn wait(&self, transfer: &Arc<dyn Transfer>) -> Result<(), AccessError> {
        let started = Instant::now();
        loop {
            self.pages.advance();
            if let Some(outcome) = transfer.outcome() {
                return outcome;
            }
            // Without a limit, a lost completion would hang the test.
            assert!(started.elapsed() < PATIENCE, "no outcome: {transfer:?}, {:#?}", self.pages.stats());
            let descriptor = self.pages.descriptor();
            let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
            let _ = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 }));
        }
    }
}
