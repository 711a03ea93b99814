//! Hotness estimates from access counts, and the choice of units to move. Independent of regions, files and time.
//!
//! Each unit has two decaying sums of accesses per period: a fast one that follows a shift of the working set within a
//! few periods, and a slow one that separates units with similar rates. Counts are noisy: among many equally hot units
//! some always seem hotter than others. So a unit replaces another only if it leads by more than chance explains.

/// The part of the fast sum that is left after a period.
const FAST_DECAY: f32 = 0.5;
/// The part of the slow sum that is left after a period.
const SLOW_DECAY: f32 = 15.0 / 16.0;
/// The least lead, in standard deviations of the difference. With thousands of units on both sides, the best of one and
/// the worst of the other differ by more than four by chance; [`LEAD_SHARE`] covers that.
const LEAD_DEVIATIONS: f32 = 4.0;
/// The least lead as a share of the other sum, in addition.
const LEAD_SHARE: f32 = 0.25;
/// The least lead in accesses, in addition: moving two units has a cost.
const LEAD_COUNT: f32 = 4.0;
/// In how many of the last eight periods a unit must have been accessed before it replaces another. A scan accesses a
/// unit in at most two, unless it is so slow that its counts are small.
const PERIODS_MIN: u32 = 3;
/// How many pairs in a row may fail the test before the search ends: the two sums may order units differently.
const MISSES_MAX: usize = 16;

/// The hotness estimate of a unit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heat {
    fast: f32,
    slow: f32,
    /// Whether the unit was accessed in each of the last eight periods; bit 0 is the latest.
    periods: u8,
}

impl Heat {
    /// Adds the count of the period that has ended.
    pub(crate) fn tick(&mut self, count: u32) {
        self.fast = self.fast * FAST_DECAY + count as f32;
        self.slow = self.slow * SLOW_DECAY + count as f32;
        self.periods = self.periods << 1 | u8::from(count > 0);
    }

    /// The sort key: accesses per period, by both sums.
    fn rate(&self) -> f32 {
        self.fast * (1.0 - FAST_DECAY) + self.slow * (1.0 - SLOW_DECAY)
    }

    /// Whether the unit was accessed in the last two periods.
    pub(crate) fn is_warm(&self) -> bool {
        self.periods & 0b11 != 0
    }

    /// Whether this unit should replace the other.
    fn beats(&self, other: &Heat) -> bool {
        self.periods.count_ones() >= PERIODS_MIN
            && (leads(self.fast, other.fast, FAST_DECAY)
                || self.fast >= other.fast && leads(self.slow, other.slow, SLOW_DECAY))
    }
}

/// Whether one decaying sum leads another by more than chance and the cost of moving.
fn leads(sum: f32, other: f32, decay: f32) -> bool {
    // A sum of Poisson counts with decay d has the variance of its mean divided by 1 + d.
    let deviation = ((sum + other) / (1.0 + decay)).sqrt();
    sum - other > LEAD_SHARE * other + LEAD_DEVIATIONS * deviation + LEAD_COUNT
}

/// A unit that may be moved, with its key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate<K> {
    pub(crate) key: K,
    pub(crate) heat: Heat,
}

/// A unit to promote, and the one to demote for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move<K> {
    pub(crate) promote: K,
    pub(crate) demote: Option<K>,
}

/// Chooses at most `moves_max` moves, most urgent first: into free space for `room` units first, then in place of
/// colder units.
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

/// Keeps the `count` units with the lowest rank, sorted.
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

    /// A model in which half of the units fit.
    struct Model {
        heat: Vec<Heat>,
        resident: HashSet<usize>,
        demotions: usize,
    }

    impl Model {
        fn new() -> Model {
            Model { heat: vec![Heat::default(); UNITS], resident: HashSet::new(), demotions: 0 }
        }

        /// Simulates a period with the given accesses per unit; returns the hit rate.
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

    /// Draws random accesses, each to the unit that `pick` returns.
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
                // Nine in ten accesses go to 300 units.
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
                // 256 reads of a page each for every unit in order; units straddle periods.
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
