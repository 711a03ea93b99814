//! Names and numbers that a stranger cannot guess.

/// A sequence of numbers from a seed (SplitMix64): whoever sees some of them can tell the others only with the seed at hand,
/// which has 64 bits.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed)
    }

    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) as u32
    }

    /// 24 bits.
    pub fn next_psn(&mut self) -> u32 {
        self.next() & 0xff_ffff
    }
}
