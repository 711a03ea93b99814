//! A seeded pseudorandom permutation of `0..size`, from ranks to keys.
//!
//! Adjacent ranks must not be adjacent in the region. With a hash of the rank modulo the size, several ranks would share a
//! key, and about a third of the keys would be unused. A Feistel network is a bijection by construction. Cycle walking
//! (applying it until the result is below `size`) makes it a bijection for any size.

/// The rounds of the network. With four rounds the images of adjacent numbers are uncorrelated.
const ROUNDS: usize = 4;

/// A bijection of `0..size` onto itself.
#[derive(Clone, Debug)]
pub struct Permutation {
    size: u64,
    /// The bits of each half of the network's domain, which is the smallest power of four that is at least `size`.
    half_bits: u32,
    round_keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..size` for `seed`. `size` is at least 1 and at most 2^62.
    pub fn new(size: u64, seed: u64) -> Permutation {
        assert!((1..=1 << 62).contains(&size), "a permutation of {size} numbers");
        let bits = u64::BITS - (size - 1).leading_zeros();
        let round_keys = std::array::from_fn(|round| mix(seed.wrapping_add(round as u64 + 1)));
        Permutation { size, half_bits: bits.div_ceil(2).max(1), round_keys }
    }

    /// The image of `index`, which is below the size.
    pub fn apply(&self, index: u64) -> u64 {
        assert!(index < self.size, "{index} of a permutation of {} numbers", self.size);
        let mut value = index;
        // The domain is at most four times the size, so the loop has at most four iterations on average. It ends, because a
        // cycle that begins below `size` returns there.
        loop {
            value = self.network(value);
            if value < self.size {
                return value;
            }
        }
    }

    /// The Feistel network.
    fn network(&self, value: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.round_keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finalizer of SplitMix64: each bit of the result depends on each bit of `value`.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_the_image_of_one_index() {
        for size in [1, 2, 3, 4, 5, 7, 16, 17, 100, 255, 256, 257, 1000, 4096, 65_537, 524_288, 1_000_003] {
            for seed in [0, 1, 0xdead_beef] {
                let permutation = Permutation::new(size, seed);
                let mut is_image = vec![false; size as usize];
                for index in 0..size {
                    let key = permutation.apply(index) as usize;
                    assert!(!is_image[key], "size {size}, seed {seed}: {key} twice");
                    is_image[key] = true;
                }
            }
        }
    }

    #[test]
    fn sizes_near_the_limit_work() {
        let permutation = Permutation::new(1 << 62, 7);
        assert!(permutation.apply((1 << 62) - 1) < 1 << 62);
    }

    #[test]
    fn images_of_adjacent_numbers_are_not_adjacent() {
        let size = 1 << 19;
        let permutation = Permutation::new(size, 3);
        let near = (1..size)
            .filter(|&index| permutation.apply(index).abs_diff(permutation.apply(index - 1)) < 256)
            .count();
        // By chance the share is 2 * 256 / size, which is about 512 images.
        assert!((300..800).contains(&near), "{near} images within 1 MiB");
    }

    #[test]
    fn seeds_give_different_permutations() {
        let (one, other) = (Permutation::new(1000, 1), Permutation::new(1000, 2));
        assert!((0..1000).filter(|&index| one.apply(index) == other.apply(index)).count() < 20);
    }
}
