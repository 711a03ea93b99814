//! The memory use of a node, `terrace serve`: locked memory never exceeds the budget, misses add nothing to the page
//! cache, and a region's metadata is small.
//!
//! `TERRACE_MEMORY_SECONDS=60` samples longer than the default. SPECIFICATION refers to the printed table.

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

use node::{Node, REGION};

const MIB: u64 = 1 << 20;
const REGION_BYTES: u64 = 512 * MIB;
const BUDGET_BYTES: u64 = 128 * MIB;
const PAGE: u64 = 4096;
const DEPTH: usize = 32;
/// The bytes of units in migration, which count against the budget, but are not always locked.
const MIGRATING_BYTES: u64 = 5 * MIB;
/// The interval of samples.
const INTERVAL: Duration = Duration::from_millis(10);

/// The value of a field in a file of `/proc`, in bytes.
fn field(text: &str, name: &str) -> u64 {
    let lines =
        text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':')?.strip_suffix(" kB"));
    lines.map(|number| number.trim().parse::<u64>().expect("a number") * 1024).sum()
}

fn read_proc(pid: u32, name: &str) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/{name}")).expect("the node runs")
}

/// A sample of a node's memory, as counted by the kernel.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// Locked bytes (VmLck).
    locked: u64,
    /// Resident bytes of file mappings (RssFile): the region and the program itself.
    mapped: u64,
}

impl Sample {
    fn take(pid: u32) -> Sample {
        let status = read_proc(pid, "status");
        Sample { locked: field(&status, "VmLck"), mapped: field(&status, "RssFile") }
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

/// A region's file.
struct File {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl File {
    fn new(bytes: u64) -> File {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("region");
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("a file");
        File { _dir: dir, path }
    }

    fn serve(&self, budget: u64, period_ms: u64) -> Node {
        let region = format!("{REGION}={}", self.path.display());
        Node::start_with(&[
            "--region",
            &region,
            "--dram",
            &budget.to_string(),
            "--period",
            &period_ms.to_string(),
        ])
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
fn resident_memory_stays_within_the_budget() {
    let seconds =
        std::env::var("TERRACE_MEMORY_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let file = File::new(REGION_BYTES);
    let node = file.serve(BUDGET_BYTES, 20);
    let stop = AtomicBool::new(false);
    let program = Sample::take(node.pid()).mapped;
    let (mut samples, mut cached_max) = (Vec::new(), 0);
    let count = std::thread::scope(|scope| {
        let loading = scope.spawn(|| load(&node, BUDGET_BYTES * 3 / 4, || !stop.load(Ordering::Relaxed)));
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(seconds) && !loading.is_finished() {
            samples.push(Sample::take(node.pid()));
            if samples.len() % 8 == 0 {
                cached_max = cached_max.max(cached(&file.path).unwrap_or(0));
            }
            std::thread::sleep(INTERVAL);
        }
        stop.store(true, Ordering::Relaxed);
        loading.join().expect("the load succeeds")
    });
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let locked_max = samples.iter().map(|sample| sample.locked).max().unwrap_or(0);
    let mapped_max = samples.iter().map(|sample| sample.mapped).max().unwrap_or(0);
    let resident_max = mapped_max.saturating_sub(program);
    let is_full = |sample: &Sample| sample.locked + MIB > BUDGET_BYTES;
    let full = samples.iter().position(is_full).unwrap_or(samples.len());
    let locked_min = samples[full..].iter().map(|sample| sample.locked).min().unwrap_or(0);
    println!("{count} accesses, {} samples, full after {full}; in MiB:", samples.len());
    println!("budget {:.1}", mib(BUDGET_BYTES));
    println!("locked, at most {:.1}, once it was full at least {:.1}", mib(locked_max), mib(locked_min));
    println!(
        "in the page table, with the program's own pages since the start, at most {:.1}",
        mib(resident_max)
    );
    println!("in the page cache, at most {:.1}", mib(cached_max));
    assert!(samples.len() > 20 && count > 1000);
    assert!(locked_max <= BUDGET_BYTES, "{locked_max} bytes locked");
    assert!(resident_max <= BUDGET_BYTES + BUDGET_BYTES / 50, "{resident_max} bytes resident");
    assert!(full < samples.len(), "the budget was never used: {locked_max} bytes");
    assert!(locked_min + MIGRATING_BYTES >= BUDGET_BYTES, "{locked_min} bytes locked");
    // Demoted units are written back before they are dropped.
    assert!(cached_max <= BUDGET_BYTES + MIGRATING_BYTES, "{cached_max} bytes in the page cache");
}

#[test]
fn misses_add_nothing_to_the_page_cache_and_the_page_table() {
    let file = File::new(REGION_BYTES);
    // No unit is promoted within the first minute.
    let node = file.serve(BUDGET_BYTES, 60_000);
    let Some(before) = cached(&file.path) else { return eprintln!("skipped: no fincore") };
    let resident_before = Sample::take(node.pid());
    let started = Instant::now();
    let count = load(&node, 0, || started.elapsed() < Duration::from_secs(1));
    let (after, resident) = (cached(&file.path).unwrap_or(u64::MAX), Sample::take(node.pid()));
    println!("{count} misses: {before} bytes in the page cache before, {after} after");
    assert!(count > 100);
    assert!(after <= before, "{after} bytes in the page cache");
    assert_eq!(resident.locked, 0);
    // The program's own pages are faulted in as it runs.
    assert!(resident.mapped <= resident_before.mapped + 4 * MIB, "{resident_before:?}, then {resident:?}");
}

#[test]
fn metadata_of_a_region_is_small() {
    let unlocked_bytes = |bytes: u64| {
        let file = File::new(bytes);
        let node = file.serve(2 * MIB, 20);
        // In this time a client fetches the metadata, and the migrator examines all units.
        let client = node.connect();
        client.open(REGION).expect("the region");
        std::thread::sleep(Duration::from_millis(200));
        let status = read_proc(node.pid(), "status");
        field(&status, "RssAnon") + field(&status, "RssShmem") + field(&status, "VmPTE")
    };
    let large = 16 << 30;
    let (small, all) = (unlocked_bytes(MIB), unlocked_bytes(large));
    let metadata = all.saturating_sub(small);
    println!(
        "{metadata} bytes of metadata for a region of {large}, {:.4} %",
        metadata as f64 * 100.0 / large as f64
    );
    assert!(metadata * 1000 <= large * 3, "{metadata} bytes for {large}");
}
