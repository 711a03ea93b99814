//! Hit ratios of the replacement policy. `examples/hit_ratios.rs` prints more of them.

#[path = "common/simulator.rs"]
mod simulator;

use simulator::{Simulator, optimum, uniform, zipf};

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
