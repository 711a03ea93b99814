//! A keyed permutation of numbers.

use rand::Rng;

/// A bijection on the numbers below `HALF * HALF`, drawn at random: a balanced Feistel network whose rounds are tables
/// of random numbers. If the random source is good, a peer that knows the images of some numbers can tell nothing of
/// the others: six rounds of random functions are proof against peers that know fewer than `HALF` pairs, however much
/// they compute; more rounds against peers that know more (Patarin, "Security of random Feistel schemes with 5 or more
/// rounds").
///
/// `HALF` is a power of two, at most 65,536.
#[derive(Clone, Debug)]
pub struct KeyedPermutation<const HALF: usize> {
    rounds: Box<[[u16; HALF]]>,
}

impl<const HALF: usize> KeyedPermutation<HALF> {
    const MASK: u32 = {
        assert!(HALF.is_power_of_two() && HALF <= 1 << 16);
        HALF as u32 - 1
    };
    const BITS: u32 = HALF.trailing_zeros();

    /// Draws one.
    pub fn new(rounds: usize, rng: &mut impl Rng) -> KeyedPermutation<HALF> {
        let mut round = || {
            let mut table = [0; HALF];
            rng.fill(&mut table[..]);
            table.iter_mut().for_each(|entry| *entry &= Self::MASK as u16);
            table
        };
        KeyedPermutation { rounds: (0..rounds).map(|_| round()).collect() }
    }

    /// The tables of the rounds, of which the same permutation can be made.
    pub(crate) fn rounds(&self) -> &[[u16; HALF]] {
        &self.rounds
    }

    /// The permutation that has these tables.
    pub(crate) fn from_rounds(rounds: impl Iterator<Item = [u16; HALF]>) -> KeyedPermutation<HALF> {
        let masked = |table: [u16; HALF]| table.map(|entry| entry & Self::MASK as u16);
        KeyedPermutation { rounds: rounds.map(masked).collect() }
    }

    /// The image of a number.
    pub fn outward(&self, number: u32) -> u32 {
        let (mut left, mut right) = (number >> Self::BITS & Self::MASK, number & Self::MASK);
        for table in &self.rounds {
            (left, right) = (right, left ^ u32::from(table[right as usize]));
        }
        left << Self::BITS | right
    }

    /// The number that has this image.
    #[inline]
    pub fn inward(&self, index: u32) -> u32 {
        let (mut left, mut right) = (index >> Self::BITS & Self::MASK, index & Self::MASK);
        for table in self.rounds.iter().rev() {
            (left, right) = (right ^ u32::from(table[left as usize]), left);
        }
        left << Self::BITS | right
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn every_number_has_one_place_and_comes_back() {
        let permutation = KeyedPermutation::<256>::new(6, &mut StdRng::seed_from_u64(1));
        let mut seen = vec![false; 1 << 16];
        for number in 0..1 << 16 {
            let index = permutation.outward(number);
            assert_eq!(permutation.inward(index), number);
            assert!(!std::mem::replace(&mut seen[index as usize], true), "{index} twice");
        }
    }

    /// What an affine map gives away: repeated differences of consecutive numbers, or a bit that follows from others.
    #[test]
    fn neighbours_tell_nothing_of_each_other() {
        let permutation = KeyedPermutation::<4096>::new(6, &mut StdRng::seed_from_u64(2));
        let other = KeyedPermutation::<4096>::new(6, &mut StdRng::seed_from_u64(3));
        let (mut sums, mut differences) = (Vec::new(), Vec::new());
        for number in 0..1000 {
            let (one, next) = (permutation.outward(number), permutation.outward(number + 1));
            assert_ne!(one, other.outward(number), "two tables agree about {number}");
            differences.push(next.wrapping_sub(one) & 0xff_ffff);
            sums.push(next ^ one);
        }
        for values in [&mut sums, &mut differences] {
            values.sort_unstable();
            values.dedup();
            assert!(values.len() > 990, "{} different ones of 1000", values.len());
        }
    }
}
