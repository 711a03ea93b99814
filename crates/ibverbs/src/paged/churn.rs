//! Memory churn, for tests: with `TERRACE_CHURN`, units are migrated at random and at the maximum rate, unlike in any
//! workload.

use std::sync::Arc;

use terrace_memory::UnitPager;
use terrace_tier::{Tier, TierRegion};

/// Migrates one of the region's units, chosen by `number`: evicts it if it is present, otherwise fetches it.
pub fn step(tier: &Tier, region: &Arc<TierRegion>, number: u64) {
    let unit = (number % region.presence().unit_count() as u64) as usize;
    let moved = match region.presence().is_present(unit) {
        true => tier.demote(region, unit),
        false => tier.promote(region, unit),
    };
    // Half of the attempts fail for lack of memory; other errors were logged.
    let _ = moved;
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
