//! Memory nodes and their clients are killed at random times, again and again: afterwards no acknowledged write is
//! missing, and committed bytes are on the device. Each byte of an unacknowledged write is there or not, and no other
//! byte has changed.
//!
//! `TERRACE_CRASH_ROUNDS=200` kills more often than the default, `TERRACE_SEED=n` draws other accesses and times; `make
//! crash` does what the issue asks for. A failure names the seed, which draws the same accesses again; the machine
//! determines which accesses are outstanding when the node dies.

mod clients;
mod disk;
mod load;
mod model;
mod node;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use disk::{Disk, Place};
use load::Load;
use model::Model;
use node::{DRAM_BYTES, Node};
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

/// Totals of all rounds, so that a test that tries nothing is noticed.
#[derive(Debug, Default)]
struct Tally {
    rounds: u64,
    acknowledged: usize,
    committed: usize,
    under_way: usize,
    killed_starting: usize,
}

/// Kills a node and starts it again, `rounds` times.
fn survive(place: Place, rounds: u64) {
    let disk = Disk::new(place, REGION_BYTES as u64);
    let mut random = StdRng::seed_from_u64(seed() ^ place as u64);
    let mut model = Model::new(REGION_BYTES);
    let mut tally = Tally::default();
    let mut node = Node::start(&disk.region());
    for round in 0..rounds {
        let hold = |checked: Result<(), String>, how: &str| {
            let explain = |what| panic!("{how}, after round {round} of seed {} on {place:?}: {what}", seed());
            checked.unwrap_or_else(explain);
        };
        let clients = [node.connect(), node.connect()];
        let mut load = Load::new(&clients, random.random());
        load.commit_all(&mut model);
        let moment = Duration::from_micros(random.random_range(0..120_000));
        let killed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(moment);
                node.kill();
                killed.store(true, Ordering::Release);
            });
            load.run(&mut model, || killed.load(Ordering::Acquire));
        });
        load.abandon(&mut model);
        tally.rounds += 1;
        tally.acknowledged += model.acknowledged_count();
        tally.committed += model.commit_count();
        tally.under_way += model.under_way_count();
        if let Some(image) = disk.device_image() {
            hold(model.check_durable(&image), "on the device");
        }
        hold(model.check(&disk.direct_image()), "past the page cache");
        if random.random_range(0..8) == 0 {
            // Kills the node once more, while it starts.
            let mut starting = Node::spawn(&disk.region());
            std::thread::sleep(Duration::from_micros(random.random_range(0..20_000)));
            starting.kill();
            tally.killed_starting += 1;
        }
        node = Node::start(&disk.region());
        let image = Load::new(&[node.connect(), node.connect()], 0).read_all();
        hold(model.check(&image), "by READ");
        model.settle(image);
    }
    println!("{place:?}: {tally:?}");
    // Some rounds end before any access; the disk determines how much happens in the others.
    assert!(tally.acknowledged > rounds as usize && tally.under_way > rounds as usize, "{tally:?}");
    assert!(tally.committed > 0, "{tally:?}");
    const { assert!(DRAM_BYTES < REGION_BYTES as u64) };
}

fn rounds() -> u64 {
    from_env("TERRACE_CRASH_ROUNDS", 24)
}

#[test]
fn nothing_acknowledged_is_lost_with_a_file() {
    survive(Place::File, rounds().div_ceil(2));
}

#[test]
fn nothing_acknowledged_is_lost_and_what_is_committed_is_on_the_device() {
    survive(Place::BlockDevice, rounds() / 2);
}

#[test]
fn clients_die_in_the_middle_of_requests_and_the_node_serves_the_others() {
    clients::die(rounds().div_ceil(2));
}

/// Not a test of its own: the client process that is killed.
#[test]
fn child() {
    clients::write_until_killed();
}
