//! A small generator of random numbers, so that a schedule replays from its seed on every machine.

/// Xorshift64*: good enough to shuffle packets.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end.max(1)
    }

    /// Whether something of this probability, in percent, happens.
    pub fn percent(&mut self, probability: u8) -> bool {
        self.below(100) < u64::from(probability)
    }
}
