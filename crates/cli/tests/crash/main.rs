//! Memory nodes and their clients are killed repeatedly, at random times. Afterwards no acknowledged write is missing,
//! and committed bytes are on the device. Each byte of an unacknowledged write is written or not, and no other byte has
//! changed. The pages in memory are the same ones.
//!
//! `TERRACE_CRASH_ROUNDS=200` (as in `make crash`) sets the number of rounds, `TERRACE_SEED=n` draws other accesses and
//! times. A failure prints the seed, which draws the same accesses again; which accesses are in flight when the node
//! dies is not reproducible.

mod clients;
mod disk;
mod load;
mod model;
mod node;
mod warm;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use disk::{Disk, Storage};
use load::Load;
use model::Model;
use node::{DRAM_BYTES, Frames, Node};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub const MIB: usize = 1 << 20;
pub const REGION_BYTES: usize = 16 * MIB;

pub fn from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

pub fn seed() -> u64 {
    from_env("TERRACE_SEED", 1)
}

/// Totals of all rounds, which show that the test exercises the cases.
#[derive(Debug, Default)]
struct Tally {
    rounds: u64,
    acknowledged: usize,
    committed: usize,
    in_flight: usize,
    killed_starting: usize,
    recovered: usize,
}

/// Kills and restarts a node `rounds` times, and checks the region each time.
fn kill_nodes(storage: Storage, rounds: u64) {
    let disk = Disk::new(storage, REGION_BYTES as u64);
    let mut random = StdRng::seed_from_u64(seed() ^ storage as u64);
    let mut model = Model::new(REGION_BYTES);
    let mut tally = Tally::default();
    let frames = Frames::new();
    let mut node = Node::start(&disk.region(), &frames);
    for round in 0..rounds {
        let verify = |checked: Result<(), String>, how: &str| {
            let explain =
                |wrong| panic!("{how}, after round {round} of seed {} on {storage:?}: {wrong}", seed());
            checked.unwrap_or_else(explain);
        };
        let clients = [node.connect(), node.connect()];
        let mut load = Load::new(&clients, random.random());
        load.commit_all(&mut model);
        let delay = Duration::from_micros(random.random_range(0..120_000));
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(delay);
                node.kill();
                killed.store(true, Ordering::Release);
            });
            load.run(&mut model, || killed.load(Ordering::Acquire));
        });
        load.drain(&mut model);
        tally.rounds += 1;
        tally.acknowledged += model.acknowledged_count();
        tally.committed += model.commit_count();
        tally.in_flight += model.in_flight_count();
        if let Some(image) = disk.device_image() {
            verify(model.check_durable(&image), "on the device");
        }
        // What was acknowledged and not committed is in memory that has outlived the node.
        verify(model.check_durable(&disk.direct_image()), "by direct IO");
        if random.random_range(0..8) == 0 {
            // Kill the node again while it starts.
            let mut starting = Node::spawn(&disk.region(), &frames);
            std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
            starting.kill();
            tally.killed_starting += 1;
        }
        if random.random_range(0..3) == 0 {
            // As if no node should run again.
            node::recover(&disk.region(), &frames);
            verify(model.check(&disk.direct_image()), "by direct IO, recovered");
            tally.recovered += 1;
        }
        node = Node::start(&disk.region(), &frames);
        let image = Load::new(&[node.connect(), node.connect()], 0).read_all();
        verify(model.check(&image), "by READ");
        model.restart(image);
    }
    println!("{storage:?}: {tally:?}");
    // Some rounds end before the first access; the number of accesses of the others depends on the disk.
    assert!(tally.acknowledged > rounds as usize && tally.in_flight > rounds as usize, "{tally:?}");
    assert!(tally.committed > 0 && tally.recovered > 0, "{tally:?}");
    const { assert!(DRAM_BYTES < REGION_BYTES as u64) };
}

fn rounds() -> u64 {
    from_env("TERRACE_CRASH_ROUNDS", 24)
}

#[test]
fn no_acknowledged_write_is_lost_with_a_file() {
    kill_nodes(Storage::File, rounds().div_ceil(2));
}

#[test]
fn no_acknowledged_write_is_lost_and_committed_data_is_on_the_device() {
    kill_nodes(Storage::BlockDevice, rounds() / 2);
}

#[test]
fn killed_clients_do_not_affect_others() {
    clients::kill_clients(rounds().div_ceil(2));
}

#[test]
fn a_restarted_node_has_the_hit_ratio_of_the_killed_one() {
    let disk = Disk::new(Storage::File, 0);
    warm::kill_warm_nodes(&disk.region(), rounds().div_ceil(8));
}

/// Not a test: the main function of the client process to be killed.
#[test]
fn child() {
    clients::write_until_killed();
}
