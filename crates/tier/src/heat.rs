//! Which units are hot, from how often they are accessed. Knows nothing of regions, files or time.
//!
//! Two decaying sums of the accesses per period are kept: a fast one that notices within a few periods that interest
//! has moved, and a slow one that tells units apart whose rates differ little. Counts scatter: of many equally hot units
//! some always look hotter than others. So a unit replaces another only if it leads by more than chance would explain.

/// What is left of the fast sum a period later.
const FAST_DECAY: f32 = 0.5;
/// What is left of the slow sum a period later.
const SLOW_DECAY: f32 = 15.0 / 16.0;
/// How many standard deviations of the difference a lead must have. With thousands of units on both sides, the best of
/// the one and the worst of the other differ by more than four by chance, and the share on top takes care of that.
const LEAD_DEVIATIONS: f32 = 4.0;
/// The share of the other's sum that a lead must have besides.
const LEAD_SHARE: f32 = 0.25;
/// The accesses that a lead must have besides: moving two units has a price.
const LEAD_COUNT: f32 = 4.0;
/// Of the last eight periods, in how many a unit must have been accessed before it replaces another. A scan is with a
/// unit for two at most, unless it is so slow that its counts are small.
const PERIODS_MIN: u32 = 3;
/// How many pairs in a row may be found not worth moving before the search ends: the two sums need not agree on an order.
const MISSES_MAX: usize = 16;

/// How hot a unit is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heat {
    fast: f32,
    slow: f32,
    /// Whether it was accessed in each of the last eight periods; the last one is bit 0.
    periods: u8,
}

impl Heat {
    /// A period has ended.
    pub(crate) fn tick(&mut self, count: u32) {
        self.fast = self.fast * FAST_DECAY + count as f32;
        self.slow = self.slow * SLOW_DECAY + count as f32;
        self.periods = self.periods << 1 | u8::from(count > 0);
    }

    /// By what units are put in order: the accesses per period, as both sums see it.
    fn rate(&self) -> f32 {
        self.fast * (1.0 - FAST_DECAY) + self.slow * (1.0 - SLOW_DECAY)
    }

    /// Whether it was accessed lately.
    pub(crate) fn is_warm(&self) -> bool {
        self.periods & 0b11 != 0
    }

    /// Whether it should have the other's place.
    fn beats(&self, other: &Heat) -> bool {
        self.periods.count_ones() >= PERIODS_MIN
            && (leads(self.fast, other.fast, FAST_DECAY)
                || self.fast >= other.fast && leads(self.slow, other.slow, SLOW_DECAY))
    }
}

/// Whether one decaying sum is ahead of another by more than chance and the price of moving.
fn leads(sum: f32, other: f32, decay: f32) -> bool {
    // A sum of Poisson counts with decay d has a variance of its mean divided by 1 + d.
    let deviation = ((sum + other) / (1.0 + decay)).sqrt();
    sum - other > LEAD_SHARE * other + LEAD_DEVIATIONS * deviation + LEAD_COUNT
}

/// A unit that may be moved; `K` names it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<K> {
    pub(crate) key: K,
    pub(crate) heat: Heat,
}

/// A unit that should be brought in, and the one to be taken out for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move<K> {
    pub(crate) promote: K,
    pub(crate) demote: Option<K>,
}

/// What to move, most urgent first, at most `moves_max` units: into the room for `room` units first, then in the place of
/// colder ones.
pub(crate) fn choose<K: Copy>(
    mut absent: Vec<Candidate<K>>,
    mut resident: Vec<Candidate<K>>,
    room: usize,
    moves_max: usize,
) -> Vec<Move<K>> {
    absent.retain(|unit| unit.heat.is_warm());
    keep_first(&mut absent, moves_max, |unit| -unit.heat.rate());
    keep_first(&mut resident, moves_max, |unit| unit.heat.rate());
    let (eager, rest) = absent.split_at(room.min(absent.len()));
    let mut moves: Vec<Move<K>> = eager.iter().map(|unit| Move { promote: unit.key, demote: None }).collect();
    let mut coldest = resident.iter().peekable();
    let mut misses = 0;
    for unit in rest {
        let Some(other) = coldest.peek() else { break };
        if unit.heat.beats(&other.heat) {
            moves.push(Move { promote: unit.key, demote: Some(other.key) });
            coldest.next();
            misses = 0;
        } else {
            misses += 1;
            if misses == MISSES_MAX {
                break;
            }
        }
    }
    moves
}

/// Keeps the `count` units with the lowest rank, in order.
fn keep_first<K>(units: &mut Vec<Candidate<K>>, count: usize, rank: impl Fn(&Candidate<K>) -> f32) {
    let order = |a: &Candidate<K>, b: &Candidate<K>| rank(a).total_cmp(&rank(b));
    if units.len() > count && count > 0 {
        units.select_nth_unstable_by(count - 1, order);
    }
    units.truncate(count);
    units.sort_unstable_by(order);
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const UNITS: usize = 1000;

    /// Units, half of which fit.
    struct Model {
        heat: Vec<Heat>,
        resident: HashSet<usize>,
        demotions: usize,
    }

    impl Model {
        fn new() -> Model {
            Model { heat: vec![Heat::default(); UNITS], resident: HashSet::new(), demotions: 0 }
        }

        /// A period in which each unit is accessed so often; returns the share of hits.
        fn period(&mut self, counts: &[u32]) -> f64 {
            let hits: u32 = self.resident.iter().map(|&unit| counts[unit]).sum();
            for (heat, &count) in self.heat.iter_mut().zip(counts) {
                heat.tick(count);
            }
            let of = |is_resident: bool| {
                let units = (0..UNITS).filter(|unit| self.resident.contains(unit) == is_resident);
                units.map(|key| Candidate { key, heat: self.heat[key] }).collect()
            };
            for step in choose(of(false), of(true), UNITS / 2 - self.resident.len(), 100) {
                if let Some(unit) = step.demote {
                    assert!(self.resident.remove(&unit));
                    self.demotions += 1;
                }
                assert!(self.resident.insert(step.promote));
            }
            assert!(self.resident.len() <= UNITS / 2);
            f64::from(hits) / f64::from(counts.iter().sum::<u32>().max(1))
        }
    }

    /// So many accesses at random, each to the unit that `pick` says.
    fn counts(random: &mut StdRng, accesses: usize, pick: impl Fn(&mut StdRng) -> usize) -> Vec<u32> {
        let mut counts = vec![0; UNITS];
        for _ in 0..accesses {
            counts[pick(random)] += 1;
        }
        counts
    }

    #[test]
    fn uniform_load_does_not_thrash() {
        for per_unit in [1, 5, 50] {
            let mut model = Model::new();
            let mut random = StdRng::seed_from_u64(per_unit as u64);
            for _ in 0..200 {
                let counts = counts(&mut random, per_unit * UNITS, |random| random.random_range(0..UNITS));
                model.period(&counts);
            }
            assert_eq!(model.resident.len(), UNITS / 2);
            assert!(model.demotions < 10, "{} demotions at {per_unit}", model.demotions);
        }
    }

    #[test]
    fn a_hot_set_is_found_and_followed() {
        let mut model = Model::new();
        let mut random = StdRng::seed_from_u64(1);
        let mut hits = 0.0;
        for phase in 0..3 {
            for _ in 0..16 {
                // Nine in ten go to 300 units.
                let counts = counts(&mut random, 20 * UNITS, |random| {
                    let hot = random.random_range(0..10) > 0;
                    (phase * 300 + random.random_range(0..if hot { 300 } else { UNITS })) % UNITS
                });
                hits = model.period(&counts);
            }
            assert!(hits > 0.92, "{hits} in phase {phase}");
        }
    }

    #[test]
    fn a_scan_does_not_evict_the_hot_set() {
        for units_per_period in [1, 4, 50] {
            let mut model = Model::new();
            let mut random = StdRng::seed_from_u64(7);
            let hot = |random: &mut StdRng| counts(random, 5000, |random| random.random_range(0..UNITS / 2));
            for _ in 0..20 {
                let counts = hot(&mut random);
                model.period(&counts);
            }
            let before = model.demotions;
            for period in 0..100 {
                let mut counts = hot(&mut random);
                // 256 reads of a page each to every unit in turn; units straddle periods.
                for place in 0..units_per_period * 256 {
                    let page = period * units_per_period * 256 + place + 100;
                    counts[UNITS / 2 + page / 256 % (UNITS / 2)] += 1;
                }
                model.period(&counts);
            }
            assert!(model.demotions - before <= 2, "{} demotions", model.demotions - before);
        }
    }

    #[test]
    fn room_is_filled_with_what_is_touched_hottest_first() {
        let unit = |key, count| {
            let mut heat = Heat::default();
            heat.tick(count);
            Candidate { key, heat }
        };
        let moves = choose(vec![unit(1, 2), unit(2, 0), unit(3, 9)], vec![], 5, 8);
        assert_eq!(moves, [3, 1].map(|promote| Move { promote, demote: None }));
        assert_eq!(choose(vec![unit(1, 2), unit(3, 9)], vec![unit(4, 0)], 1, 1).len(), 1);
        assert!(choose(vec![unit(1, 2)], vec![unit(4, 0)], 0, 8).is_empty());
    }
}
