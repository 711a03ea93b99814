//! Random reads and writes of any size and alignment by two clients, while pages of the region are evicted as fast as
//! possible: every byte is compared with a plain copy of the region.
//!
//! `TERRACE_STRESS_SECONDS=600` runs longer than the default, `TERRACE_SEED=n` draws other accesses. A failure prints
//! the seed, which draws the same accesses again; the timing of evictions is not reproducible.

mod common;
#[path = "../../memory/tests/common/finally.rs"]
mod finally;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::*;
use finally::Finally;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_nic::{Buffer, PathChoice, WcStatus};
use terrace_node::*;

const REGION_BYTES: usize = 12 << 20;
const DRAM_BYTES: u64 = 4 << 20;
const LEN_MAX: usize = 4 << 20;
const SLOTS: usize = 8;

/// An access in flight.
struct Access {
    range: Range<usize>,
    /// The data that a read must return; `None` for a write.
    expected: Option<Vec<u8>>,
    client: usize,
}

struct World<'a> {
    random: StdRng,
    regions: [Region<'a>; 2],
    clients: [&'a Client; 2],
    server: &'a Server,
    buffers: Vec<Buffer>,
    /// The region's content once all writes in flight have ended.
    model: Vec<u8>,
    slots: Vec<Option<Access>>,
    seed: u64,
}

impl World<'_> {
    /// Most accesses are small, some are long, and many begin or end at a page.
    fn range(&mut self) -> Range<usize> {
        let len_max = [64, 4096, 20_000, 200_000, LEN_MAX][self.random.random_range(0..5)];
        let mut len = self.random.random_range(1..=len_max);
        let mut start = self.random.random_range(0..REGION_BYTES - len);
        if self.random.random_bool(0.3) {
            start &= !4095;
            len = len.next_multiple_of(4096).min(REGION_BYTES - start);
        }
        start..start + len
    }

    /// Random bytes, or data that resembles an absent page: constant bytes, or the signature page in whole or in part.
    fn data(&mut self, range: &Range<usize>) -> Vec<u8> {
        let len = range.len();
        let signature = self.regions[0].signature_page();
        match (self.random.random_range(0..6), signature) {
            (0, _) => vec![0; len],
            (1, _) => vec![0xfd; len],
            (2, Some(signature)) => range.clone().map(|at| signature[at % 4096]).collect(),
            (3, Some(signature)) => {
                let mut data = vec![0; len];
                self.random.fill(&mut data[..]);
                let from = self.random.random_range(0..len);
                data[from..]
                    .iter_mut()
                    .zip(range.start + from..)
                    .for_each(|(byte, at)| *byte = signature[at % 4096]);
                data
            }
            _ => {
                let mut data = vec![0; len];
                self.random.fill(&mut data[..]);
                data
            }
        }
    }

    fn begin(&mut self, slot: usize) {
        let range = self.range();
        let is_write = self.random.random_bool(0.5);
        let conflicts = |other: &Access| {
            let overlap = range.start < other.range.end && other.range.start < range.end;
            overlap && (is_write || other.expected.is_none())
        };
        if self.slots.iter().flatten().any(conflicts) {
            return;
        }
        let client = self.random.random_range(0..2);
        let (offset, len) = (range.start as u64, range.len() as u32);
        let buffer = slot * 2 + client;
        let expected = if is_write {
            let data = self.data(&range);
            self.buffers[buffer].write(0, &data).expect("within");
            self.model[range.clone()].copy_from_slice(&data);
            self.regions[client].write(offset, &self.buffers[buffer], 0, len, slot as u64).expect("begun");
            None
        } else {
            self.regions[client].read(offset, &self.buffers[buffer], 0, len, slot as u64).expect("begun");
            Some(self.model[range.clone()].to_vec())
        };
        self.slots[slot] = Some(Access { range, expected, client });
    }

    fn poll(&mut self) {
        for client in 0..2 {
            let mut done = Vec::new();
            self.clients[client].poll(&mut done).expect("a healthy connection");
            for completion in done {
                if completion.status != WcStatus::Success {
                    let in_flight: Vec<_> = self
                        .slots
                        .iter()
                        .flatten()
                        .map(|a| (a.client, &a.range, a.expected.is_some()))
                        .collect();
                    panic!(
                        "{completion:?}, seed {}, client {client}; in flight {in_flight:?}; {:?}",
                        self.seed,
                        self.server.stats()
                    );
                }
                let slot = completion.tag as usize;
                let access = self.slots[slot].take().expect("an access is in flight");
                assert_eq!(access.client, client);
                if let Some(expected) = access.expected {
                    self.compare(slot * 2 + client, &access.range, &expected);
                }
            }
        }
    }

    fn compare(&self, buffer: usize, range: &Range<usize>, expected: &[u8]) {
        let mut read = vec![0; range.len()];
        self.buffers[buffer].read(0, &mut read).expect("within");
        if read != expected {
            let wrong: Vec<usize> = (0..read.len()).filter(|&index| read[index] != expected[index]).collect();
            let (first, last) = (range.start + wrong[0], range.start + wrong[wrong.len() - 1]);
            panic!(
                "{} wrong bytes in {first:#x}..={last:#x} of a read of {range:#x?}, seed {}",
                wrong.len(),
                self.seed
            );
        }
    }
}

fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Serializes the tests, which would only slow each other down.
static SERIAL: Mutex<()> = Mutex::new(());

fn stress(mode: ServeMode, transport: PathChoice) {
    let _guard = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    let seconds = from_env("TERRACE_STRESS_SECONDS", 3);
    let seed = from_env("TERRACE_SEED", 1);
    let node = Node::over(transport, &format!("stress-{mode}"), mode, REGION_BYTES as u64, DRAM_BYTES);
    let clients = [node.client(), node.client()];
    let regions = [0, 1].map(|index: usize| clients[index].open("data").expect("the region"));
    let buffers = (0..SLOTS * 2).map(|index| clients[index % 2].buffer(LEN_MAX + 4096).expect("a buffer"));
    let mut world = World {
        random: StdRng::seed_from_u64(seed),
        regions,
        clients: [&clients[0], &clients[1]],
        server: &node.server,
        buffers: buffers.collect(),
        model: vec![0; REGION_BYTES],
        slots: (0..SLOTS).map(|_| None).collect(),
        seed,
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| evict_pages(&node.server, &stop));
        let ends = Finally(&stop);
        let started = Instant::now();
        let mut count = 0_u64;
        while started.elapsed() < Duration::from_secs(seconds) {
            let free: Vec<usize> = (0..SLOTS).filter(|&slot| world.slots[slot].is_none()).collect();
            count += free.len() as u64;
            free.into_iter().for_each(|slot| world.begin(slot));
            world.poll();
        }
        let draining = Instant::now();
        while world.slots.iter().any(Option::is_some) {
            world.poll();
            assert!(
                draining.elapsed() < Duration::from_secs(120),
                "an access does not end, seed {seed}: {:?}",
                node.server.stats()
            );
        }
        drop(ends);
        assert!(count > 20, "{count} accesses");
    });
    let stats = node.server.stats();
    assert!(stats.regions[0].evictions > 100 && stats.resident_bytes <= DRAM_BYTES, "{stats:?}");
}

/// Evicts pages as fast as possible, until memory is almost empty; then lets some come back.
fn evict_pages(server: &Server, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        if server.evict(16) == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

#[test]
fn clients_detect_absent_pages() {
    stress(ServeMode::Term, PathChoice::Udp);
}

#[test]
fn clients_detect_absent_pages_over_shared_memory() {
    stress(ServeMode::Term, PathChoice::Local);
}

#[test]
fn the_nic_fetches_absent_pages() {
    stress(ServeMode::Wait, PathChoice::Udp);
}

#[test]
fn the_nic_fetches_absent_pages_over_shared_memory() {
    stress(ServeMode::Wait, PathChoice::Local);
}

#[test]
fn clients_access_pages_by_rpc() {
    stress(ServeMode::RpcTieringPromote, PathChoice::Udp);
}
