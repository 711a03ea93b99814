//! Hit ratios of the replacement policy by itself, and in a pool. `examples/hit_ratios.rs` prints more of them.

mod common;
#[path = "common/simulator.rs"]
mod simulator;

use std::collections::HashSet;

use common::{PAGE, Scratch, Served};
use simulator::{Simulator, optimum, uniform, zipf};
use terrace_memory::Translation;

/// 2 GiB.
const PAGES: usize = 524_288;

fn zipf_hit_ratio(frame_count: usize, theta: f64) -> f64 {
    let mut simulator = Simulator::new(PAGES, frame_count);
    let mut pages = zipf(PAGES, theta, 1);
    simulator.hit_ratio(pages.by_ref().take(8 * PAGES));
    simulator.hit_ratio(pages.take(4 * PAGES))
}

#[test]
fn zipf_hits_are_within_two_points_of_the_optimum() {
    for (share, best) in [(2, 94.6), (5, 87.6)] {
        let frame_count = PAGES / share;
        let ratio = zipf_hit_ratio(frame_count, 0.99);
        assert!((optimum(PAGES, frame_count, 0.99) - best).abs() < 0.1);
        assert!(ratio > best - 2.0, "1/{share} in memory: {ratio:.2} % of {best} %");
    }
}

#[test]
fn a_scan_of_ten_times_the_memory_leaves_the_hot_set_in_place() {
    for share in [2, 5] {
        let frame_count = PAGES / share;
        let scanned = 10 * frame_count;
        let mut simulator = Simulator::new(PAGES + scanned, frame_count);
        let mut hot = zipf(PAGES, 0.99, 2);
        simulator.hit_ratio(hot.by_ref().take(6 * PAGES));
        let before = simulator.hit_ratio(hot.by_ref().take(PAGES));
        let during = simulator.hit_ratio_during_scan(&mut hot, PAGES..PAGES + scanned);
        let after = simulator.hit_ratio(hot.take(PAGES));
        assert!(before - during < 5.0 && before - after < 5.0, "{before:.1} %, {during:.1} %, {after:.1} %");
    }
}

#[test]
fn a_uniform_load_hits_what_is_in_memory() {
    let mut simulator = Simulator::new(PAGES, PAGES / 2);
    let mut pages = uniform(PAGES, 3);
    simulator.hit_ratio(pages.by_ref().take(4 * PAGES));
    let ratio = simulator.hit_ratio(pages.take(PAGES));
    assert!(ratio > 49.0, "{ratio:.1} % of 50 %");
}

/// Pages of the hot set in a pool, and all pages of its region.
const HOT: usize = 4096;
const ALL: usize = HOT + 10 * HOT / 2;

impl Served {
    /// Reads from a page as the NIC does. Returns whether it was in memory.
    fn access(&self, page: usize) -> bool {
        let offset = page as u64 * PAGE;
        self.region.count(self.range(offset, 8), true);
        let is_hit = self.try_read(offset, &mut [0; 8]);
        if !is_hit {
            self.read(offset, 8).unwrap();
        }
        is_hit
    }

    /// The share of hits of a load, in percent. Each of its accesses follows one to the next page of `others`.
    fn hit_ratio(&self, load: impl Iterator<Item = usize>, others: impl Iterator<Item = usize>) -> f64 {
        let (mut hits, mut count) = (0, 0);
        let mut others = others.fuse();
        for page in load {
            others.next().map(|page| self.access(page));
            hits += u64::from(self.access(page));
            count += 1;
        }
        hits as f64 / count as f64 * 100.0
    }
}

#[test]
fn neither_a_scan_nor_a_uniform_load_evicts_the_hot_set_of_a_pool() {
    for share in [2, 5] {
        let frame_count = HOT / share;
        let other_count = 10 * frame_count;
        for name in ["scan", "uniform"] {
            let scratch = Scratch::new(name);
            let served = Served::new(&scratch, scratch.config(frame_count as u64), Some(ALL as u64 * PAGE));
            let mut hot = zipf(HOT, 0.99, 4);
            served.hit_ratio(hot.by_ref().take(8 * HOT), std::iter::empty());
            let before = served.hit_ratio(hot.by_ref().take(4 * HOT), std::iter::empty());
            let during = match name {
                "scan" => served.hit_ratio(hot.by_ref().take(other_count), HOT..HOT + other_count),
                _ => served.hit_ratio(
                    hot.by_ref().take(other_count),
                    uniform(other_count, 5).map(|page| HOT + page).take(other_count),
                ),
            };
            let after = served.hit_ratio(hot.take(HOT), std::iter::empty());
            let ratios =
                format!("1/{share}, {name}: {before:.1} %, {during:.1} % during it, {after:.1} % after it");
            println!("{ratios}");
            assert!(before - during < 5.0 && before - after < 5.0, "{ratios}");
        }
    }
}

#[test]
fn many_accesses_to_absent_pages_read_each_of_them_once() {
    let scratch = Scratch::new("once");
    let served = Served::new(&scratch, scratch.config(HOT as u64 / 2), Some(HOT as u64 * PAGE));
    let mut pages = zipf(HOT, 0.99, 6);
    let (mut read, mut missed_count) = (0, 0);
    for _ in 0..500 {
        let batch: Vec<u64> = pages.by_ref().take(64).map(|page| page as u64).collect();
        let missed: HashSet<u64> =
            batch.iter().copied().filter(|page| !served.try_read(page * PAGE, &mut [0; 8])).collect();
        let transfers: Vec<_> = batch.iter().map(|page| served.begin_read(page * PAGE, 8)).collect();
        transfers.iter().for_each(|transfer| served.wait(transfer).unwrap());
        let now = served.region.stats().pages_read;
        let distinct: HashSet<&u64> = batch.iter().collect();
        assert!(now - read <= distinct.len() as u64, "{} reads of {} pages", now - read, distinct.len());
        (read, missed_count) = (now, missed_count + missed.len() as u64);
    }
    // Few pages are evicted for others of their batch, after the check and before their own access.
    let counts = format!("{read} reads of {missed_count} missed pages");
    assert!(missed_count > 1000 && read <= missed_count + missed_count / 50, "{counts}");
}
