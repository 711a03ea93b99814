//! Communication IDs and PSNs that others cannot guess.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A sequence of numbers from a seed. They come from a cryptographic generator: an observer of some of them, as every
/// peer is, can compute the others only with the 64-bit seed.
pub(crate) struct Numbers(StdRng);

impl Numbers {
    pub fn new(seed: u64) -> Numbers {
        Numbers(StdRng::seed_from_u64(seed))
    }

    pub fn next(&mut self) -> u32 {
        self.0.random()
    }

    /// The low 24 bits of the next number.
    pub fn next_psn(&mut self) -> u32 {
        self.next() & 0xff_ffff
    }
}
