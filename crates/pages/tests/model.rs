//! Accesses of several clients with evictions in between, compared with a plain array: accesses that overlap take effect
//! in the order of the requests.

mod common;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{PAGE, Scratch, Served};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use terrace_hostmem::AtomicOp;
use terrace_memory::{Pager, Transfer, Translation};
use terrace_pages::store::{Best, Faults, Faulty, OnlyThreads, StoreFactory};
use terrace_pages::{PagesConfig, TRANSFER_BYTES_MAX};

const REGION_PAGES: u64 = 600;
const FRAMES: u64 = 128;
const IN_FLIGHT_MAX: usize = 24;
const STEPS: usize = 4000;

/// A read or an atomic whose result is still to be compared; of a write, nothing is.
struct Expected {
    transfer: Arc<dyn Transfer>,
    bytes: Vec<u8>,
}

/// A client: its part of the region, and the expected content.
struct Client<'a> {
    served: &'a Served,
    start: u64,
    reference: Vec<u8>,
    random: StdRng,
    pending: VecDeque<Expected>,
}

impl Client<'_> {
    /// A range of the client's part.
    fn pick(&mut self) -> (u64, usize) {
        let len = match self.random.random_range(0..10) {
            0 => TRANSFER_BYTES_MAX,
            1..=2 => self.random.random_range(1..=TRANSFER_BYTES_MAX),
            3..=6 => self.random.random_range(1..=300),
            _ => PAGE,
        };
        let size = self.reference.len() as u64;
        // Two in three near the start, so that accesses overlap.
        let area = if self.random.random_range(0..3) > 0 { 96 << 10 } else { size };
        let mut offset = self.random.random_range(0..area - len.min(area) + 1);
        if self.random.random() {
            offset -= offset % PAGE;
        }
        (offset, len.min(size - offset) as usize)
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
            self.end_one();
        }
    }

    fn read(&mut self, offset: u64, len: usize) {
        let bytes = self.reference[offset as usize..][..len].to_vec();
        let range = self.served.range(self.start + offset, len as u64);
        self.served.region.count(range, true);
        let mut out = vec![0; len];
        if self.served.try_read(self.start + offset, &mut out) {
            // A hit sees the writes that were requested before, because their pages are mapped when they have ended.
            assert!(out == bytes, "a hit at {offset} of {len} bytes");
            return;
        }
        let transfer = self.served.begin_read(self.start + offset, len as u64);
        self.pending.push_back(Expected { transfer, bytes });
    }

    fn write(&mut self, offset: u64, len: usize) {
        let mut data = vec![0; len];
        self.random.fill_bytes(&mut data);
        self.reference[offset as usize..][..len].copy_from_slice(&data);
        if !self.served.try_write(self.start + offset, &data) {
            let transfer = self.served.begin_write(self.start + offset, &data);
            self.pending.push_back(Expected { transfer, bytes: Vec::new() });
        }
    }

    fn atomic(&mut self, offset: u64) {
        let add = self.random.random();
        let target = &mut self.reference[offset as usize..][..8];
        let before = u64::from_ne_bytes((&*target).try_into().unwrap());
        target.copy_from_slice(&before.wrapping_add(add).to_ne_bytes());
        let op = AtomicOp::FetchAdd { add };
        if let Some(found) = self.served.try_atomic(self.start + offset, op) {
            return assert_eq!(found, before);
        }
        let transfer = self.served.begin_atomic(self.start + offset, op);
        self.pending.push_back(Expected { transfer, bytes: before.to_ne_bytes().into() });
    }

    fn flush(&mut self, offset: u64, len: usize) {
        let range = self.served.range(self.start + offset, len as u64);
        let transfer = self.served.region.flush(range, &self.served.waker).unwrap();
        self.pending.push_back(Expected { transfer, bytes: Vec::new() });
    }

    fn end_one(&mut self) {
        let index = self.random.random_range(0..self.pending.len());
        let Expected { transfer, bytes } = self.pending.remove(index).unwrap();
        self.served.wait(&transfer).unwrap();
        let mut found = vec![0; bytes.len()];
        transfer.read(0, &mut found).unwrap();
        assert!(found == bytes, "{transfer:?} of {} bytes", bytes.len());
    }

    fn end(mut self) -> Vec<u8> {
        while !self.pending.is_empty() {
            self.end_one();
        }
        self.reference
    }
}

fn run(name: &str, store: Arc<dyn StoreFactory>, client_count: u64) {
    let seed: u64 = std::env::var("TERRACE_SEED")
        .map_or_else(|_| u64::from(rand::random::<u32>()), |seed| seed.parse().unwrap());
    println!("TERRACE_SEED={seed}");
    let scratch = Scratch::new(name);
    let config = PagesConfig { store, ..scratch.config(FRAMES) };
    let served = Served::new(&scratch, config, Some(REGION_PAGES * PAGE));
    let part = REGION_PAGES / client_count * PAGE;
    let stop = AtomicBool::new(false);
    let contents: Vec<Vec<u8>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                served.pages.advance();
                std::thread::yield_now();
            }
        });
        let clients: Vec<_> = (0..client_count)
            .map(|index| {
                let mut client = Client {
                    served: &served,
                    start: index * part,
                    reference: vec![0; part as usize],
                    random: StdRng::seed_from_u64(seed + index),
                    pending: VecDeque::new(),
                };
                scope.spawn(move || {
                    (0..STEPS / client_count as usize).for_each(|_| client.step());
                    client.end()
                })
            })
            .collect();
        let contents = clients.into_iter().map(|client| client.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        contents
    });
    assert!(served.region.stats().evictions > 100, "{:?}", served.region.stats());
    drop(served);
    let file = std::fs::read(scratch.file()).unwrap();
    assert!(
        file[..contents.len() * part as usize] == contents.concat(),
        "the file has everything after the end"
    );
}

#[test]
fn accesses_take_effect_in_order() {
    run("model", Arc::new(Best), 1);
}

#[test]
fn several_clients_do_not_disturb_each_other() {
    run("clients", Arc::new(Best), 3);
}

#[test]
fn threads_read_as_well() {
    run("threads", Arc::new(OnlyThreads), 2);
}

#[test]
fn undone_and_short_reads_are_not_noticed() {
    let faults = Faults {
        seed: 5,
        canceled_permille: 100,
        short_permille: 200,
        delay_reaps_max: 3,
        ..Faults::default()
    };
    run("undone", Arc::new(Faulty::new(Arc::new(Best), faults)), 2);
}
