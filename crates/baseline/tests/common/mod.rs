//! Helpers of the tests: temporary files, a counting waker, and waiting for transfers.
#![allow(dead_code, reason = "not every test uses everything")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrace_baseline::{BackingFile, Baseline, BaselineConfig, BaselineRegion, IoMethod, Source};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, Transfer, Waker};

/// A path that is removed at the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    /// A path in a directory, with a name that no other test uses.
    pub fn new(dir: &str, name: &str) -> Scratch {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(dir).join(format!("terrace-baseline-{}-{number}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A baseline with one region, in the order in which they must be dropped.
pub struct Served {
    pub baseline: Arc<Baseline>,
    pub region: Arc<BaselineRegion>,
    pub file: BackingFile,
    pub scratch: Scratch,
    pub waker: Waker,
    pub woken: Arc<AtomicUsize>,
}

impl Served {
    /// Serves a new sparse file.
    pub fn new(dir: &str, name: &str, bytes: u64, exclusive: bool, config: BaselineConfig) -> Served {
        let scratch = Scratch::new(dir, name);
        let path = scratch.0.clone();
        Served::at(&path, scratch, Some(bytes), exclusive, config)
    }

    /// Serves the file at a path; without a size, all of it. `scratch` is removed at the end.
    pub fn at(
        path: &Path,
        scratch: Scratch,
        bytes: Option<u64>,
        exclusive: bool,
        config: BaselineConfig,
    ) -> Served {
        log();
        let baseline = Baseline::open(config).unwrap();
        let file = BackingFile::open(path, bytes).unwrap();
        let region = baseline.add(Source { exclusive, ..file.source().unwrap() }).unwrap();
        let (waker, woken) = counting_waker();
        Served { baseline, region, file, scratch, waker, woken }
    }

    pub fn addr(&self) -> u64 {
        self.file.map().addr
    }

    pub fn range(&self, offset: u64, len: u64) -> HostRange {
        HostRange { addr: self.addr() + offset, len }
    }

    pub fn wait(&self, transfer: &Arc<dyn Transfer>) -> Result<(), AccessError> {
        wait(&self.baseline, transfer)
    }

    /// Reads and waits.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, AccessError> {
        let transfer = self.region.read(self.range(offset, len as u64), &self.waker)?;
        self.wait(&transfer)?;
        let mut out = vec![0; len];
        transfer.read(0, &mut out)?;
        Ok(out)
    }

    /// Writes and waits.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<(), AccessError> {
        self.wait(&self.region.write(self.addr() + offset, data, &self.waker)?)
    }

    /// Performs an atomic and waits.
    pub fn atomic(&self, offset: u64, op: AtomicOp) -> Result<u64, AccessError> {
        let transfer = self.region.atomic(self.addr() + offset, op, &self.waker)?;
        self.wait(&transfer)?;
        let mut before = [0; 8];
        transfer.read(0, &mut before)?;
        Ok(u64::from_ne_bytes(before))
    }

    /// Flushes and waits.
    pub fn flush(&self, offset: u64, len: u64) -> Result<(), AccessError> {
        self.wait(&self.region.flush(self.range(offset, len), &self.waker)?)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.baseline.remove(&self.region);
    }
}

/// A loop device over a new image of zeros, open so that it lasts; `None` without the right to make one.
pub fn loop_device(image: &Path, bytes: u64) -> Option<(PathBuf, File)> {
    File::create(image).and_then(|file| file.set_len(bytes)).unwrap();
    let output = Command::new("losetup").args(["--find", "--show"]).arg(image).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    let device = output.status.success().then(|| File::open(&path).ok())??;
    // The device is detached once no descriptor is open.
    Command::new("losetup").arg("--detach").arg(&path).status().ok()?;
    Some((path, device))
}

/// How many bytes of a mapped file are in the page cache.
pub fn cached_bytes(map: HostRange) -> u64 {
    let mut pages = vec![0u8; (map.len / 4096) as usize];
    // SAFETY: the kernel writes one byte for each page of the mapping.
    let result = unsafe { libc::mincore(map.addr as *mut _, map.len as usize, pages.as_mut_ptr().cast()) };
    assert_eq!(result, 0);
    pages.iter().filter(|&&page| page & 1 != 0).count() as u64 * 4096
}

/// Shows the baseline's log with the output of a failing test.
pub fn log() {
    let subscriber =
        tracing_subscriber::fmt().with_writer(tracing_subscriber::fmt::TestWriter::new()).finish();
    // Fails if another test of this process has set one before.
    drop(tracing::subscriber::set_global_default(subscriber));
}

/// A waker that counts its calls.
pub fn counting_waker() -> (Waker, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let waker = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    (waker, count)
}

/// The time after which a completion counts as lost. It is no limit on the time of an access, which depends on the load
/// of the disk and the processors.
const PATIENCE: Duration = Duration::from_secs(300);

/// Makes progress until a transfer has an outcome; sleeps while there is none to make.
pub fn wait(baseline: &Baseline, transfer: &Arc<dyn Transfer>) -> Result<(), AccessError> {
    let started = Instant::now();
    loop {
        let has_progressed = baseline.advance();
        if let Some(outcome) = transfer.outcome() {
            return outcome;
        }
        // Without a limit, a lost completion would hang the test.
        assert!(started.elapsed() < PATIENCE, "no outcome: {transfer:?}, {:#?}", baseline.stats());
        if !has_progressed {
            // Another thread may be making progress, and may have been preempted: then the descriptor is readable, but
            // there is nothing to reap until that thread runs.
            std::thread::yield_now();
        }
        sleep_until_readable(baseline, Duration::from_millis(1));
    }
}

/// Sleeps until the descriptor is readable. Not for long, because another thread may reap the completion.
pub fn sleep_until_readable(baseline: &Baseline, longest: Duration) {
    let descriptor = baseline.descriptor();
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    let longest = Timespec::try_from(longest).unwrap();
    let _ = poll(&mut polled, Some(&longest));
}

/// A configuration of the method with the most plans.
pub fn tiering(dram_bytes: u64) -> BaselineConfig {
    BaselineConfig::new(IoMethod::Tiering, dram_bytes)
}
