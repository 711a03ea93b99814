//! Random accesses compared with a reference, while pages come into the page cache and leave it.
//!
//! Two threads are clients and act as the NIC does: they try the registry first, which copies present bytes, and ask
//! the pager for the rest, with many overlapping accesses under way. A third thread reads parts of the file, and has the
//! kernel drop others. If the region is shared with the program, a fourth stores to bytes of the same pages that no client
//! writes.

mod common;

use std::collections::VecDeque;
use std::fs::File;
use std::num::NonZero;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use common::{Served, sleep_until_readable, tiering};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use rustix::fs::Advice;
use terrace_baseline::device::{Best, DeviceFactory, Faults, Faulty, OnlyThreads};
use terrace_baseline::{BaselineConfig, IoMethod};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{Access, AccessError, Accessor, Limits, Pager, RegionSpec, Registry, Transfer};

const MIB: u64 = 1 << 20;
const REGION_BYTES: u64 = 6 * MIB;
const BUDGET_BYTES: u64 = REGION_BYTES;
const IN_FLIGHT_MAX: usize = 24;
const ACCESS_BYTES_MAX: u64 = 64 << 10;
const PD: u32 = 1;

/// The parameters of a run.
struct Plan {
    dir: &'static str,
    exclusive: bool,
    io: IoMethod,
    threads: usize,
    device: Arc<dyn DeviceFactory>,
    seed: u64,
    accesses_per_client: usize,
}

/// A read or an atomic whose result is still to be compared.
struct Expected {
    transfer: Arc<dyn Transfer>,
    offset: u64,
    /// The reference's bytes when the access began; empty for writes.
    bytes: Vec<u8>,
    /// Bytes that a copy has overwritten meanwhile: a hit may overtake a read that began before.
    overtaken: Vec<(u64, u8)>,
}

/// A client: its half of the region, and the expected content.
struct Client<'a> {
    served: &'a Served,
    registry: &'a Registry,
    key: u32,
    start: u64,
    reference: Vec<u8>,
    random: StdRng,
    pending: VecDeque<Expected>,
    /// Whether the client uses only the first half of each page.
    half_pages: bool,
    hits: usize,
    misses: usize,
}

impl Client<'_> {
    fn who(&self) -> Accessor {
        Accessor::remote(PD, 7)
    }

    /// A range of the client's half that it may write.
    fn pick(&mut self) -> (u64, usize) {
        let len = match self.random.random_range(0..10) {
            0 => ACCESS_BYTES_MAX,
            1..=3 => self.random.random_range(1..=ACCESS_BYTES_MAX),
            4..=6 => self.random.random_range(1..=300),
            _ => 4096,
        };
        let size = self.reference.len() as u64;
        // Two in three near the middle, so that accesses overlap.
        let area = if self.random.random_range(0..3) > 0 { 96 << 10 } else { size };
        let base = if area < size { (size - area) / 2 } else { 0 };
        let mut offset = base + self.random.random_range(0..area - len.min(area) + 1);
        if self.random.random() {
            offset -= offset % 4096;
        }
        let mut len = len.min(size - offset);
        if self.half_pages {
            offset -= offset % 4096 / 2048 * 2048;
            len = len.min(2048 - offset % 4096).max(1);
        }
        (offset, len as usize)
    }

    fn step(&mut self) {
        let (offset, len) = self.pick();
        match self.random.random_range(0..20) {
            0..=8 => self.read(offset, len),
            9..=16 => self.write(offset, len),
            17 | 18 => self.atomic(offset & !7),
            _ => self.flush(offset, len),
        }
        while self.pending.len() > self.random.random_range(0..IN_FLIGHT_MAX) {
            self.settle_one();
        }
    }

    fn range(&self, offset: u64, len: usize) -> HostRange {
        self.served.range(self.start + offset, len as u64)
    }

    fn read(&mut self, offset: u64, len: usize) {
        let range = self.range(offset, len);
        let wanted = self.reference[offset as usize..][..len].to_vec();
        let mut out = vec![0; len];
        match self.registry.read(self.who(), self.key, range.addr, &mut out) {
            Ok(()) => {
                self.hits += 1;
                assert!(out == wanted, "a hit at {offset} of {len} bytes");
            }
            Err(AccessError::NotReady) => {
                let served = self.served;
                let transfer = self.retry(|| served.region.read(range, &served.waker));
                self.expect(transfer, offset, wanted);
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn write(&mut self, offset: u64, len: usize) {
        let mut data = vec![0; len];
        match self.random.random_range(0..4) {
            0 => data.fill(0),
            1 => data.fill(0xfd),
            _ => self.random.fill_bytes(&mut data),
        }
        let range = self.range(offset, len);
        match self.registry.write(self.who(), self.key, range.addr, &data) {
            Ok(()) => {
                self.hits += 1;
                self.overtake(offset, &data);
            }
            Err(AccessError::NotReady) => {
                let served = self.served;
                let transfer = self.retry(|| served.region.write(range.addr, &data, &served.waker));
                self.overtake_if_late(&transfer, offset, &data);
                self.expect(transfer, offset, vec![]);
            }
            Err(error) => panic!("{error}"),
        }
        self.reference[offset as usize..][..len].copy_from_slice(&data);
    }

    fn atomic(&mut self, offset: u64) {
        let before = self.reference[offset as usize..][..8].to_vec();
        let value = u64::from_ne_bytes(before.clone().try_into().unwrap());
        let (add, swap) = (self.random.random(), self.random.random());
        let (op, after) = match self.random.random_range(0..4) {
            0 => (AtomicOp::FetchAdd { add }, value.wrapping_add(add)),
            1 => (AtomicOp::Write { value: swap }, swap),
            2 => (AtomicOp::CompareSwap { compare: value, swap }, swap),
            _ => (AtomicOp::CompareSwap { compare: !value, swap }, value),
        };
        let addr = self.range(offset, 8).addr;
        match self.registry.atomic(self.who(), self.key, addr, op) {
            Ok(found) => {
                assert_eq!(found, value, "an atomic that hit at {offset}");
                self.hits += 1;
                self.overtake(offset, &after.to_ne_bytes());
            }
            Err(AccessError::NotReady) => {
                let served = self.served;
                let transfer = self.retry(|| served.region.atomic(addr, op, &served.waker));
                self.overtake_if_late(&transfer, offset, &after.to_ne_bytes());
                self.expect(transfer, offset, before);
            }
            Err(error) => panic!("{error}"),
        }
        self.reference[offset as usize..][..8].copy_from_slice(&after.to_ne_bytes());
    }

    fn flush(&mut self, offset: u64, len: usize) {
        let (served, range) = (self.served, self.range(offset, len));
        let transfer = self.retry(|| served.region.flush(range, &served.waker));
        self.expect(transfer, offset, vec![]);
    }

    /// Retries until there are buffers.
    fn retry(
        &mut self,
        mut ask: impl FnMut() -> Result<Arc<dyn Transfer>, AccessError>,
    ) -> Arc<dyn Transfer> {
        self.misses += 1;
        loop {
            match ask() {
                Ok(transfer) => return transfer,
                Err(AccessError::NotReady) if !self.pending.is_empty() => self.settle_one(),
                // The other client holds all the buffers.
                Err(AccessError::NotReady) => _ = self.served.baseline.advance(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn expect(&mut self, transfer: Arc<dyn Transfer>, offset: u64, bytes: Vec<u8>) {
        self.pending.push_back(Expected { transfer, offset, bytes, overtaken: Vec::new() });
    }

    /// A copy has taken effect when the call returns.
    fn overtake_if_late(&mut self, transfer: &Arc<dyn Transfer>, offset: u64, data: &[u8]) {
        if transfer.outcome().is_some() {
            self.overtake(offset, data);
        }
    }

    /// Records a copy: reads under way may return the old or the new bytes.
    fn overtake(&mut self, offset: u64, data: &[u8]) {
        for read in &mut self.pending {
            for (index, &byte) in data.iter().enumerate() {
                let at = offset + index as u64;
                if (read.offset..read.offset + read.bytes.len() as u64).contains(&at) {
                    read.overtaken.push((at - read.offset, byte));
                }
            }
        }
    }

    fn settle_one(&mut self) {
        let place = self.random.random_range(0..self.pending.len());
        let Some(expected) = self.pending.remove(place) else { return };
        let outcome = self.served.wait(&expected.transfer);
        let stats = || self.served.region.stats();
        assert_eq!(outcome, Ok(()), "at {}, {:?}: {:?}", expected.offset, expected.transfer, stats());
        let mut out = vec![0; expected.bytes.len()];
        expected.transfer.read(0, &mut out).unwrap();
        for (index, (&found, &wanted)) in out.iter().zip(&expected.bytes).enumerate() {
            let may_be = |&(at, byte): &(u64, u8)| at == index as u64 && byte == found;
            assert!(
                found == wanted || expected.overtaken.iter().any(may_be),
                "byte {index} of the {} at {} is {found:#x}, not {wanted:#x}",
                expected.bytes.len(),
                expected.offset
            );
        }
    }

    fn run(mut self, accesses: usize) -> (Vec<u8>, usize, usize) {
        for _ in 0..accesses {
            self.step();
        }
        while !self.pending.is_empty() {
            self.settle_one();
        }
        (self.reference, self.hits, self.misses)
    }
}

/// Reads parts of the file into the page cache and has others leave it, at random, until stopped.
fn churn(served: &Served, seed: u64, stop: &AtomicBool) {
    let mut random = StdRng::seed_from_u64(seed);
    let (file, mut bytes) = (File::open(&served.scratch.0).unwrap(), vec![0; MIB as usize]);
    while !stop.load(Ordering::Relaxed) {
        let offset = random.random_range(0..REGION_BYTES - MIB);
        if random.random() {
            file.read_at(&mut bytes, offset).unwrap();
        } else {
            // Writes back first. Advisory.
            let _ = file.sync_data();
            let _ = rustix::fs::fadvise(&file, offset, NonZero::new(MIB), Advice::DontNeed);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Stores to the second half of pages, and checks what it stored.
fn store(served: &Served, seed: u64, stop: &AtomicBool) {
    let mut random = StdRng::seed_from_u64(seed);
    let places = 64;
    let mut stored = vec![0; places];
    let place_of =
        |index: usize| (index as u64 * 7919 % (REGION_BYTES / 4096)) * 4096 + 2048 + index as u64 * 8;
    let cell = |index: usize| {
        // SAFETY: the region is mapped while it is served, the place is aligned, and all other accesses to it are
        // atomic or copies without Rust references.
        unsafe { &*((served.addr() + place_of(index)) as *const AtomicU64) }
    };
    while !stop.load(Ordering::Relaxed) {
        let index = random.random_range(0..places);
        assert_eq!(cell(index).load(Ordering::Relaxed), stored[index], "a store to place {index} was lost");
        stored[index] = random.random();
        cell(index).store(stored[index], Ordering::Relaxed);
        if random.random_range(0..8) == 0 {
            let index = random.random_range(0..places);
            loop {
                match served.read(place_of(index), 8) {
                    Ok(read) => break assert_eq!(read, stored[index].to_ne_bytes(), "read at place {index}"),
                    Err(error) => assert_eq!(error, AccessError::NotReady),
                }
                sleep_until_readable(&served.baseline, Duration::from_millis(1));
            }
        }
    }
    for (index, value) in stored.iter().enumerate() {
        assert_eq!(cell(index).load(Ordering::Relaxed), *value, "a store to place {index} was lost");
    }
}

/// Stops the other threads, also when a client panics.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn try_out(plan: &Plan) {
    let config = BaselineConfig {
        io: plan.io,
        threads: plan.threads,
        device: plan.device.clone(),
        ..tiering(BUDGET_BYTES)
    };
    let served = Served::new(plan.dir, "model", REGION_BYTES, plan.exclusive, config);
    let registry = Registry::new(Limits::default()).unwrap();
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let map = served.file.map();
    let pager: Arc<dyn Pager> = served.region.clone();
    let spec = RegionSpec { pager: Some(pager), ..RegionSpec::new(PD, map.addr, map.len, access) };
    let key = registry.register(&spec).unwrap().key;
    let (stop, half) = (AtomicBool::new(false), REGION_BYTES / 2);
    let client = |index: u64| Client {
        served: &served,
        registry: &registry,
        key,
        start: index * half,
        reference: vec![0; half as usize],
        random: StdRng::seed_from_u64(plan.seed * 2 + index),
        pending: VecDeque::new(),
        half_pages: !plan.exclusive,
        hits: 0,
        misses: 0,
    };
    let (first, second) = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let churner = scope.spawn(|| churn(&served, plan.seed, &stop));
        let storer = (!plan.exclusive).then(|| scope.spawn(|| store(&served, plan.seed, &stop)));
        let second = scope.spawn(|| client(1).run(plan.accesses_per_client));
        let first = client(0).run(plan.accesses_per_client);
        let second = second.join();
        stop.store(true, Ordering::Relaxed);
        churner.join().unwrap();
        if let Some(storer) = storer {
            storer.join().unwrap();
        }
        (first, second.unwrap())
    });
    registry.deregister(key).unwrap();
    let file = std::fs::read(&served.scratch.0).unwrap();
    for (reference, part) in [&first.0, &second.0].into_iter().zip(file.chunks(half as usize)) {
        for (index, (wanted, found)) in reference.iter().zip(part).enumerate() {
            let ours = plan.exclusive || index % 4096 < 2048;
            assert!(!ours || wanted == found, "byte {index} of the file");
        }
    }
    let (hits, misses) = (first.1 + second.1, first.2 + second.2);
    // The NIC's own copies are those of pinned memory.
    assert_eq!(hits > 0, plan.io == IoMethod::Pinned, "{hits} hits, {misses} misses");
}

/// `TERRACE_BASELINE_SEEDS=100` tries more seeds, `TERRACE_BASELINE_SEED=17` only that one.
fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|value: String| value.parse::<u64>().ok());
    match number("TERRACE_BASELINE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("TERRACE_BASELINE_SEEDS").unwrap_or(2),
    }
}

fn try_seeds(dir: &'static str, exclusive: bool, io: IoMethod, device: Arc<dyn DeviceFactory>) {
    for seed in seeds() {
        let device = device.clone();
        eprintln!("TERRACE_BASELINE_SEED={seed}");
        try_out(&Plan { dir, exclusive, io, threads: 1, device, seed, accesses_per_client: 1000 });
    }
}

#[test]
fn every_method() {
    for dir in ["/tmp", "/dev/shm"] {
        for io in [IoMethod::Tiering, IoMethod::Direct, IoMethod::Buffered] {
            try_seeds(dir, true, io, Arc::new(Best));
        }
        for io in [IoMethod::Mapping, IoMethod::Pinned] {
            try_seeds(dir, true, io, Arc::new(Best));
            try_seeds(dir, false, io, Arc::new(Best));
        }
    }
}

#[test]
fn through_threads() {
    try_seeds("/tmp", true, IoMethod::Tiering, Arc::new(OnlyThreads));
}

#[test]
fn devices_that_report_late_and_move_less_than_asked_for() {
    let faults = Faults { seed: 1, short_permille: 200, delay_looks_max: 20, ..Faults::default() };
    for io in [IoMethod::Tiering, IoMethod::Buffered] {
        try_seeds("/tmp", true, io, Arc::new(Faulty::new(Arc::new(Best), faults)));
    }
}

#[test]
fn copies_by_several_threads() {
    for seed in seeds() {
        for (exclusive, dir) in [(true, "/tmp"), (false, "/tmp"), (true, "/dev/shm")] {
            let (io, device) = (IoMethod::Mapping, Arc::new(Best));
            try_out(&Plan { dir, exclusive, io, threads: 3, device, seed, accesses_per_client: 1000 });
        }
    }
}
