//! Memory churn, for tests: with `TERRACE_CHURN`, units are moved at random and as fast as possible, as no workload
//! does.

use std::sync::Arc;

use terrace_memory::Pager;
use terrace_tier::{Tier, TierRegion};

/// Moves one of the region's units, chosen by `number`: out of memory if it is present, else in.
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
