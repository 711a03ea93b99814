//! Names and numbers that a stranger cannot guess.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A sequence of numbers from a seed. They come from a cryptographic generator: whoever sees some of them, as every peer does, can
/// tell the others only with the seed at hand, which has 64 bits.
pub(crate) struct Numbers(StdRng);

impl Numbers {
    pub fn new(seed: u64) -> Numbers {
        Numbers(StdRng::seed_from_u64(seed))
    }

    pub fn next(&mut self) -> u32 {
        self.0.random()
    }

    /// 24 bits.
    pub fn next_psn(&mut self) -> u32 {
        self.next() & 0xff_ffff
    }
}
