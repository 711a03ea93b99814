//! Prints the hit ratios of the replacement policy beside the best possible ones. Takes a minute or two.
//!
//! `cargo run --release -p terrace-pages --example hit_ratios`

#[path = "../tests/common/simulator.rs"]
mod simulator;

use simulator::{Simulator, optimum, uniform, zipf};

const PAGES: usize = 524_288;

fn main() {
    println!("pages {PAGES}; hit ratios in percent\n");
    println!("{:<28}{:>10}{:>10}{:>10}", "load", "in memory", "measured", "optimum");
    for share in [2, 5, 20] {
        let frame_count = PAGES / share;
        for theta in [0.5, 0.7, 0.9, 0.99, 1.1, 1.2] {
            let mut simulator = Simulator::new(PAGES, frame_count);
            let mut pages = zipf(PAGES, theta, 1);
            simulator.hit_ratio(pages.by_ref().take(10 * PAGES));
            let ratio = simulator.hit_ratio(pages.take(4 * PAGES));
            print(&format!("Zipf {theta}"), share, ratio, optimum(PAGES, frame_count, theta));
        }
        print("uniform", share, warm(frame_count, uniform(PAGES, 2)), 100.0 / share as f64);
        print_loop(share, frame_count);
        print_scan(share, frame_count);
        print_shift(share, frame_count);
    }
}

fn print(load: &str, share: usize, ratio: f64, best: f64) {
    println!("{load:<28}{:>9.0}%{ratio:>10.2}{best:>10.2}", 100.0 / share as f64);
}

fn warm(frame_count: usize, mut pages: impl Iterator<Item = usize>) -> f64 {
    let mut simulator = Simulator::new(PAGES, frame_count);
    simulator.hit_ratio(pages.by_ref().take(6 * PAGES));
    simulator.hit_ratio(pages.take(2 * PAGES))
}

/// A loop over all pages, of which the optimum keeps a fixed set.
fn print_loop(share: usize, frame_count: usize) {
    print("loop", share, warm(frame_count, (0..PAGES).cycle()), 100.0 / share as f64);
}

/// A scan of ten times the memory, one access of it after each access to the hot set.
fn print_scan(share: usize, frame_count: usize) {
    let scanned = 10 * frame_count;
    let mut simulator = Simulator::new(PAGES + scanned, frame_count);
    let mut hot = zipf(PAGES, 0.99, 2);
    simulator.hit_ratio(hot.by_ref().take(6 * PAGES));
    let before = simulator.hit_ratio(hot.by_ref().take(PAGES));
    let during = simulator.hit_ratio_during_scan(&mut hot, PAGES..PAGES + scanned);
    print("Zipf 0.99 before a scan", share, before, optimum(PAGES, frame_count, 0.99));
    print("Zipf 0.99 during the scan", share, during, optimum(PAGES, frame_count, 0.99));
}

/// The hot set moves to other pages: the accesses right after that, and later.
fn print_shift(share: usize, frame_count: usize) {
    let mut simulator = Simulator::new(PAGES, frame_count);
    let mut hot = zipf(PAGES, 0.99, 3);
    simulator.hit_ratio(hot.by_ref().take(6 * PAGES));
    let mut moved = hot.map(|page| (page + PAGES / 2) % PAGES);
    for (name, count) in
        [("shifted: first 0.5 M", PAGES), ("shifted: next 1 M", 2 * PAGES), ("shifted: later", PAGES)]
    {
        let ratio = simulator.hit_ratio(moved.by_ref().take(count));
        print(name, share, ratio, optimum(PAGES, frame_count, 0.99));
    }
}
