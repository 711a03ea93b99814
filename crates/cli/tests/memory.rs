//! The memory use of a node, `terrace serve`: the frames never exceed the budget, misses add nothing to the page cache,
//! and a region's metadata is small.
//!
//! `TERRACE_MEMORY_SECONDS=60` samples longer than the default. SPECIFICATION refers to the printed table.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_nic::WcStatus;
use terrace_node::Span;

#[path = "crash/node.rs"]
mod node;

use node::{Frames, Node, REGION};

const MIB: u64 = 1 << 20;
const REGION_BYTES: u64 = 512 * MIB;
const BUDGET_BYTES: u64 = 128 * MIB;
const PAGE: u64 = 4096;
const DEPTH: usize = 32;
/// What the pool's file has beside the frames: 8 bytes for each, and the identities of regions.
const DIRECTORY_BYTES: u64 = MIB;
/// The interval of samples.
const INTERVAL: Duration = Duration::from_millis(10);
/// How long the load has for filling the memory, in seconds.
const FILL_SECONDS_MAX: u64 = 120;

/// The value of a field in a file of `/proc`, in bytes.
fn field(text: &str, name: &str) -> u64 {
    let lines =
        text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.strip_suffix(" kB"));
    lines.map(|number| number.trim().parse::<u64>().expect("a number") * 1024).sum()
}

fn read_proc(pid: u32, name: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{name}")).expect("the node runs")
}

/// The pool of a node's frames, as its mappings name it.
fn pool_of(pid: u32) -> PathBuf {
    let maps = read_proc(pid, "maps");
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let path = paths.find(|path| path.contains("/terrace-pages-"));
    PathBuf::from(path.expect("a node has its pool mapped"))
}

/// A sample of a node's memory, as counted by the kernel, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// The pool of frames (the file system's count of its blocks).
    pool: u64,
    /// The program's own memory: RssAnon.
    own: u64,
    /// Locked (VmLck).
    locked: u64,
}

impl Sample {
    fn take(pid: u32, pool: &Path) -> Sample {
        let status = read_proc(pid, "status");
        let pool = pool.metadata().expect("the node runs").blocks() * 512;
        Sample { pool, own: field(&status, "RssAnon"), locked: field(&status, "VmLck") }
    }
}

/// The bytes of a file in the page cache; `None` without fincore.
fn cached(path: &Path) -> Option<u64> {
    let output = Command::new("fincore")
        .args(["--bytes", "--noheadings", "--output", "RES"])
        .arg(path)
        .output()
        .ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

/// A region's file, and its node's frames.
struct File {
    _dir: tempfile::TempDir,
    path: PathBuf,
    frames: Frames,
}

impl File {
    fn new(bytes: u64) -> File {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("region");
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("a file");
        File { _dir: dir, path, frames: Frames::new() }
    }

    fn serve(&self, budget: u64) -> Node {
        let region = format!("{REGION}={}", self.path.display());
        Node::start_with(&["--region", &region, "--dram", &budget.to_string()], &self.frames)
    }
}

/// Reads and writes pages while `go_on`. If `hot_bytes` is not 0, most of them are in a moving window of that size.
fn load(node: &Node, hot_bytes: u64, go_on: impl Fn() -> bool) -> u64 {
    let client = node.connect();
    let region = client.open(REGION).expect("the region");
    let buffer = client.buffer(DEPTH * PAGE as usize).expect("a buffer");
    let (mut random, started) = (StdRng::seed_from_u64(1), Instant::now());
    let (mut idle, mut done, mut count) = ((0..DEPTH).collect::<Vec<_>>(), Vec::new(), 0);
    loop {
        let wanted = if go_on() { std::mem::take(&mut idle) } else { Vec::new() };
        if wanted.is_empty() && idle.len() == DEPTH {
            return count;
        }
        for slot in wanted {
            let is_hot = hot_bytes > 0 && random.random_range(0..10) > 0;
            let offset = if is_hot {
                let start = started.elapsed().as_secs() * (hot_bytes / 3);
                (start + random.random_range(0..hot_bytes / PAGE) * PAGE) % REGION_BYTES
            } else {
                random.random_range(0..REGION_BYTES / PAGE) * PAGE
            };
            let span = Span { offset, at: slot * PAGE as usize, len: PAGE as u32, tag: slot as u64 };
            let begun = match random.random() {
                true => region.read_many(&buffer, &[span]),
                false => region.write_many(&buffer, &[span]),
            };
            begun.expect("begun");
        }
        client.poll(&mut done).expect("a healthy connection");
        for completion in done.drain(..) {
            assert_eq!(completion.status, WcStatus::Success);
            count += 1;
            idle.push(completion.tag as usize);
        }
    }
}

#[test]
fn memory_stays_within_the_budget() {
    let seconds =
        std::env::var("TERRACE_MEMORY_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let file = File::new(REGION_BYTES);
    let node = file.serve(BUDGET_BYTES);
    let pool = pool_of(node.pid());
    let stop = AtomicBool::new(false);
    let (mut samples, mut cached_max, mut is_full) = (Vec::new(), 0, false);
    let count = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load(&node, BUDGET_BYTES * 3 / 4, || !stop.load(Ordering::Relaxed)));
        let started = Instant::now();
        // A busy machine fills the memory later.
        let is_on = |is_full: bool| {
            started.elapsed() < Duration::from_secs(if is_full { seconds } else { FILL_SECONDS_MAX })
        };
        while is_on(is_full) && !loading.is_finished() {
            let sample = Sample::take(node.pid(), &pool);
            is_full |= sample.pool >= BUDGET_BYTES;
            samples.push(sample);
            if samples.len() % 8 == 0 {
                cached_max = cached_max.max(cached(&file.path).unwrap_or(0));
            }
            std::thread::sleep(INTERVAL);
        }
        stop.store(true, Ordering::Relaxed);
        loading.join().expect("the load succeeds")
    });
    let most = |of: fn(&Sample) -> u64| samples.iter().map(of).max().unwrap_or(0);
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    println!("{count} accesses, {} samples; in MiB, at most:", samples.len());
    println!("budget {:.1}, pool {:.1}", mib(BUDGET_BYTES), mib(most(|sample| sample.pool)));
    println!("own memory {:.1}", mib(most(|sample| sample.own)));
    println!("in the page cache {:.1}", mib(cached_max));
    assert!(samples.len() > 20 && count > 1000);
    let pool_max = most(|sample| sample.pool);
    assert!(pool_max <= BUDGET_BYTES + DIRECTORY_BYTES, "{pool_max} bytes in the pool");
    assert!(pool_max >= BUDGET_BYTES, "the budget was never used: {pool_max} bytes");
    assert!(most(|sample| sample.own) <= 64 * MIB, "{samples:?}");
    assert_eq!(most(|sample| sample.locked), 0, "nothing is locked");
    assert!(cached_max <= MIB, "{cached_max} bytes in the page cache");
}

#[test]
fn metadata_of_a_region_is_small() {
    let bytes_of = |bytes: u64| {
        let file = File::new(bytes);
        let node = file.serve(2 * MIB);
        // In this time a client fetches the metadata.
        let client = node.connect();
        client.open(REGION).expect("the region");
        std::thread::sleep(Duration::from_millis(200));
        let status = read_proc(node.pid(), "status");
        field(&status, "RssAnon") + field(&status, "RssShmem") + field(&status, "VmPTE")
    };
    let large = 16 << 30;
    let (small, all) = (bytes_of(MIB), bytes_of(large));
    let metadata = all.saturating_sub(small);
    println!(
        "{metadata} bytes of metadata for a region of {large}, {:.4} %",
        metadata as f64 * 100.0 / large as f64
    );
    assert!(metadata * 1000 <= large * 3, "{metadata} bytes for {large}");
}
