//! The sequence of keys: the access-sized blocks of the region that a thread accesses.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution as _, Zipf};
use serde::{Deserialize, Serialize};

use crate::permutation::Permutation;

/// The popularity of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Distribution {
    /// All keys with equal probability.
    Uniform,
    /// The key of rank `r` with a probability proportional to `1 / r^theta`; ranks are scattered over the region.
    #[default]
    Zipf,
    /// In order. Each thread begins at another offset.
    Sequential,
}

/// The seed of the scattering, equal for all threads and points of a run, so that hot keys stay hot.
const SCATTER_SEED: u64 = 0x7e44_ace0;

/// The keys by rank, from the most popular one on.
pub(crate) fn scatter(count: u64) -> Permutation {
    Permutation::new(count, SCATTER_SEED)
}

/// The unlimited sequence of keys in `0..count` of one thread.
#[derive(Debug)]
pub struct Keys {
    count: u64,
    source: Source,
    rng: SmallRng,
}

#[derive(Debug)]
enum Source {
    Uniform,
    Zipf { ranks: Zipf<f64>, scatter: Permutation },
    Sequential { next: u64 },
}

impl Keys {
    /// The sequence of thread `thread` of `threads`. `count` is at least 1. Only [`Distribution::Zipf`] uses `theta`,
    /// which is finite and not negative (0 is uniform).
    pub fn new(distribution: Distribution, theta: f64, count: u64, thread: u64, threads: u64) -> Keys {
        assert!(count > 0 && threads > thread, "no keys, or thread {thread} of {threads}");
        let source = match distribution {
            Distribution::Uniform => Source::Uniform,
            Distribution::Zipf => Source::Zipf {
                ranks: Zipf::new(count as f64, theta).expect("the plan's check admits only valid exponents"),
                scatter: scatter(count),
            },
            Distribution::Sequential => Source::Sequential { next: count / threads * thread },
        };
        Keys { count, source, rng: SmallRng::seed_from_u64(0x5eed + thread) }
    }

    /// The next key. After a switch of the hotspot the order of ranks is reversed, so that the hottest key becomes the
    /// coldest (as in TeRM's figure 11).
    pub fn next(&mut self, is_switched: bool) -> u64 {
        match &mut self.source {
            Source::Uniform => self.rng.random_range(0..self.count),
            Source::Zipf { ranks, scatter } => {
                let rank = (ranks.sample(&mut self.rng) as u64 - 1).min(self.count - 1);
                scatter.apply(if is_switched { self.count - 1 - rank } else { rank })
            }
            Source::Sequential { next } => {
                let key = *next;
                *next = (key + 1) % self.count;
                key
            }
        }
    }

    /// True with a probability of `percent`.
    pub fn chance(&mut self, percent: u32) -> bool {
        // 0 and 100 draw no number, so that read-only workloads have no extra cost.
        percent >= 100 || percent > 0 && self.rng.random_range(0..100) < percent
    }
}

/// The key that thread `thread` writes instead of `key`: its own key in the group of `threads` adjacent keys around
/// `key`. So each key has one writer, and its versions are ordered.
pub fn owned(key: u64, thread: u64, threads: u64, count: u64) -> u64 {
    let group = key - key % threads;
    match group + thread {
        own if own < count => own,
        // The last group may be incomplete. The plan's check refuses regions with fewer keys than threads.
        _ => group - threads + thread,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(keys: &mut Keys, count: u64, draws: u64, is_switched: bool) -> Vec<u64> {
        let mut counts = vec![0; count as usize];
        for _ in 0..draws {
            counts[keys.next(is_switched) as usize] += 1;
        }
        counts
    }

    /// Pearson's statistic over bins with at least 50 expected draws, and the number of bins.
    fn chi_square(counts: &[u64], expected: &[f64]) -> (f64, usize) {
        let (mut statistic, mut bins, mut seen, mut due) = (0.0, 0, 0, 0.0);
        for (&count, &expected) in counts.iter().zip(expected) {
            (seen, due) = (seen + count, due + expected);
            if due >= 50.0 {
                statistic += (seen as f64 - due).powi(2) / due;
                (bins, seen, due) = (bins + 1, 0, 0.0);
            }
        }
        (statistic, bins)
    }

    fn zipf_expected(count: u64, theta: f64, draws: u64) -> Vec<f64> {
        let weights: Vec<f64> = (1..=count).map(|rank| (rank as f64).powf(-theta)).collect();
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum * draws as f64).collect()
    }

    #[test]
    fn zipf_frequencies_match_the_distribution() {
        let (count, draws) = (10_000, 1_000_000);
        for theta in [0.0, 0.4, 0.8, 0.99, 1.2] {
            for is_switched in [false, true] {
                let mut keys = Keys::new(Distribution::Zipf, theta, count, 0, 1);
                let counts = frequencies(&mut keys, count, draws, is_switched);
                let scatter = scatter(count);
                let by_rank: Vec<u64> = (0..count)
                    .map(|rank| if is_switched { count - 1 - rank } else { rank })
                    .map(|rank| counts[scatter.apply(rank) as usize])
                    .collect();
                let (statistic, bins) = chi_square(&by_rank, &zipf_expected(count, theta, draws));
                // Mean `bins`, standard deviation sqrt(2 bins): a correct generator does not deviate by six.
                let limit = bins as f64 + 6.0 * (2.0 * bins as f64).sqrt();
                assert!(statistic < limit, "theta {theta}: {statistic:.0} over {bins} bins");
                // The test detects a generator with a slightly different exponent.
                let wrong = zipf_expected(count, theta + 0.05, draws);
                assert!(
                    chi_square(&by_rank, &wrong).0 > limit,
                    "theta {theta}: the test does not detect a wrong exponent"
                );
            }
        }
    }

    #[test]
    fn every_page_of_the_region_has_a_rank() {
        // Every key is the image of a rank, so that accesses of 4 KiB can hit all 524,288 pages of 2 GiB.
        let count = 524_288;
        let scatter = scatter(count);
        let keys: std::collections::HashSet<u64> = (0..count).map(|rank| scatter.apply(rank)).collect();
        assert_eq!(keys.len() as u64, count);
    }

    #[test]
    fn uniform_frequencies_are_equal() {
        let counts = frequencies(&mut Keys::new(Distribution::Uniform, 0.0, 500, 1, 2), 500, 500_000, false);
        let (statistic, bins) = chi_square(&counts, &[1000.0; 500]);
        assert!(statistic < bins as f64 + 6.0 * (2.0 * bins as f64).sqrt(), "{statistic}");
    }

    #[test]
    fn sequential_keys_wrap() {
        let mut keys = Keys::new(Distribution::Sequential, 0.0, 4, 1, 2);
        assert_eq!((0..6).map(|_| keys.next(false)).collect::<Vec<_>>(), [2, 3, 0, 1, 2, 3]);
    }

    #[test]
    fn each_key_has_at_most_one_writer() {
        for (count, threads) in [(16, 4), (17, 4), (19, 4), (5, 5), (7, 3)] {
            for thread in 0..threads {
                for key in 0..count {
                    let own = owned(key, thread, threads, count);
                    assert!(
                        own < count && own % threads == thread,
                        "{key} of {count}, {thread} of {threads}"
                    );
                }
            }
        }
    }

    #[test]
    fn chance_has_the_given_probability() {
        let mut keys = Keys::new(Distribution::Uniform, 0.0, 10, 0, 1);
        let mut share = |percent| (0..100_000).filter(|_| keys.chance(percent)).count();
        assert_eq!((share(0), share(100)), (0, 100_000));
        assert!((24_000..26_000).contains(&share(25)));
    }
}
