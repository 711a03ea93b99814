//! Random numbers. They depend on the seed alone, because a seed must replay the same run.

use std::ops::RangeInclusive;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, RngCore, SeedableRng};

/// A random number generator.
pub(crate) struct SimRng(StdRng);

/// The random streams. Each part has its own, so that a change in one part does not change the numbers of another.
#[derive(Clone, Copy)]
pub(crate) enum Stream {
    Plan,
    Program,
    Network,
    Device(u8),
    Port(u8),
    Memory(u8),
    Pager(u8),
    Log(u8),
    /// How often programs append.
    Appends,
}

/// The seed of one stream of a run.
pub(crate) fn stream_seed(seed: u64, stream: Stream) -> u64 {
    let number = match stream {
        Stream::Plan => 1,
        Stream::Program => 2,
        Stream::Network => 3,
        Stream::Appends => 4,
        Stream::Device(node) => 0x100 + u64::from(node),
        Stream::Port(node) => 0x200 + u64::from(node),
        Stream::Memory(node) => 0x300 + u64::from(node),
        Stream::Pager(node) => 0x400 + u64::from(node),
        Stream::Log(node) => 0x500 + u64::from(node),
    };
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number << 48
}

impl SimRng {
    pub fn new(seed: u64, stream: Stream) -> SimRng {
        SimRng::from_seed(stream_seed(seed, stream))
    }

    pub fn from_seed(seed: u64) -> SimRng {
        SimRng(StdRng::seed_from_u64(seed))
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.0.random::<f64>() < probability
    }

    pub fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        self.0.random_range(range)
    }

    pub fn index(&mut self, count: usize) -> usize {
        self.0.random_range(0..count)
    }

    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        *choices.choose(&mut self.0).expect("the choices are not empty")
    }

    /// Returns a number whose logarithm is uniformly distributed.
    pub fn spread(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (low, high) = ((*range.start()).max(1) as f64, (*range.end()).max(1) as f64);
        let drawn = (low.ln() + self.0.random::<f64>() * (high.ln() - low.ln())).exp();
        (drawn as u64).clamp(*range.start(), *range.end())
    }

    pub fn word(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.fill_bytes(&mut bytes);
        bytes
    }
}
