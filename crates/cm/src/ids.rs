//! IDs of connections and listeners, and unpredictable numbers for communication IDs and PSNs.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A connection or a SIDR request: its communication ID on the wire, unique within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u32);

/// Position of the process's instance index in a communication ID.
const INSTANCE_SHIFT: u32 = 24;

impl ConnId {
    /// The ID from the process's instance index and a number.
    pub(crate) fn new(instance: u8, number: u32) -> ConnId {
        ConnId(u32::from(instance) << INSTANCE_SHIFT | number & ((1 << INSTANCE_SHIFT) - 1))
    }

    /// The instance index of the process that chose the ID.
    pub(crate) fn instance(self) -> u8 {
        (self.0 >> INSTANCE_SHIFT) as u8
    }
}

/// ID of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(pub u64);

/// A sequence of numbers from a seed. The generator is cryptographic: a peer, which observes some of the numbers, can
/// compute the others only with the 64-bit seed.
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
