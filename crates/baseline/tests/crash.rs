//! A process that is killed loses no acknowledged write.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::{Scratch, counting_waker, wait};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_baseline::{BackingFile, Baseline, BaselineConfig, IoMethod};
use terrace_memory::{Pager, Transfer};

const REGION_BYTES: u64 = 4 << 20;
/// Not a divisor of the page size, so that many slots straddle pages.
const SLOT_BYTES: usize = 1560;
const SLOTS: usize = 2000;
const ROUNDS: u64 = 3;
const METHODS: [IoMethod; 3] = [IoMethod::Tiering, IoMethod::Buffered, IoMethod::Mapping];
/// The environment variable that marks the process to be killed: the file, the seed, the index of the method, and the first
/// version.
const CHILD: &str = "TERRACE_BASELINE_CRASH_CHILD";

/// The content of a slot: one number, repeated.
fn content(version: u64) -> Vec<u8> {
    version.to_ne_bytes().repeat(SLOT_BYTES / 8)
}

/// Writes until the process is killed, and prints each acknowledged write as a line `slot version`.
fn write_until_killed(path: &Path, seed: u64, io: IoMethod, first_version: u64) {
    let baseline = Baseline::open(BaselineConfig::new(io, 2 << 20)).unwrap();
    let file = BackingFile::open(path, Some(REGION_BYTES)).unwrap();
    let region = baseline.add(file.source().unwrap()).unwrap();
    let (waker, _) = counting_waker();
    let mut random = StdRng::seed_from_u64(seed);
    let mut version = first_version;
    let mut under_way: Vec<(usize, u64, Arc<dyn Transfer>)> = Vec::new();
    loop {
        let slot = random.random_range(0..SLOTS);
        if under_way.iter().all(|(other, ..)| *other != slot) {
            version += 1;
            let addr = file.map().addr + (slot * SLOT_BYTES) as u64;
            under_way.push((slot, version, region.write(addr, &content(version), &waker).unwrap()));
        }
        if under_way.len() == 8 {
            let (slot, version, transfer) = under_way.swap_remove(random.random_range(0..8));
            wait(&baseline, &transfer).unwrap();
            let line = format!("{slot} {version}\n");
            std::io::stdout().write_all(line.as_bytes()).unwrap();
        }
    }
}

/// No test by itself: the process that the other tests start with [`CHILD`] set.
#[test]
fn child() {
    let Ok(child) = std::env::var(CHILD) else { return };
    let mut fields = child.split(' ');
    let path = fields.next().unwrap();
    let mut number = || fields.next().unwrap().parse::<u64>().unwrap();
    let (seed, io, first_version) = (number(), METHODS[number() as usize], number());
    write_until_killed(path.as_ref(), seed, io, first_version);
}

/// Starts a writing process, kills it after `count` acknowledged writes, and records them.
fn kill_after(count: usize, child: String, acknowledged: &mut [u64]) {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD, child)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let mut note = |line: std::io::Result<String>| -> bool {
        let line = line.unwrap();
        let Some((slot, version)) = line.split_once(' ') else { return false };
        let (Ok(slot), Ok(version)) = (slot.parse::<usize>(), version.parse()) else { return false };
        acknowledged[slot] = version;
        true
    };
    let mut noted = 0;
    while noted < count {
        noted += usize::from(note(lines.next().expect("the process goes on")));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    // Lines printed before the kill.
    lines.for_each(|line| _ = note(line));
}

fn survives(method: usize) {
    let scratch = Scratch::new("/tmp", "crash");
    let mut random = StdRng::seed_from_u64(method as u64);
    let mut acknowledged = vec![0; SLOTS];
    for round in 0..ROUNDS {
        let path = scratch.0.to_str().unwrap();
        let first_version = round << 32;
        let child = format!("{path} {round} {method} {first_version}");
        kill_after(random.random_range(1..500), child, &mut acknowledged);
        let file = std::fs::File::open(&scratch.0).unwrap();
        let mut found = vec![0; SLOT_BYTES];
        for (slot, version) in acknowledged.iter().enumerate() {
            file.read_exact_at(&mut found, (slot * SLOT_BYTES) as u64).unwrap();
            for word in found.chunks(8) {
                let word = u64::from_ne_bytes(word.try_into().unwrap());
                // Unacknowledged later writes may have reached the file.
                assert!(word >= *version, "slot {slot} in round {round}: {word} after {version}");
            }
        }
    }
}

#[test]
fn acknowledged_writes_survive_a_kill() {
    (0..METHODS.len()).for_each(survives);
}
