//! Memory churn, for tests: with `TERRACE_CHURN`, pages are evicted at random and at the maximum rate, unlike in any
//! workload.

use terrace_pages::cached::{CachedFiles, CachedRegion};

/// Evicts pages of the region, chosen by `number`. Accesses fetch them again.
pub fn step(files: &CachedFiles, region: &CachedRegion, number: u64) {
    files.evict_group(region, number % region.page_count());
}

/// An endless pseudorandom sequence (splitmix64).
pub fn numbers() -> impl Iterator<Item = u64> {
    let mut state = 0_u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 31
    })
}
