//! The content of the region, in which every byte can be verified.
//!
//! The region consists of granules of 64 bytes. The first 8 bytes of a granule are a stamp: the writer and the version.
//! The other 56 are a function of the stamp and the granule's offset. So the check of a granule detects flipped bits,
//! bytes of another offset and mixtures of two writes, without knowledge of the last writer. The
//! [ledger](crate::ledger) checks the version.

use crate::permutation::mix;

/// The bytes of a granule, which are the alignment of accesses.
pub const GRANULE_BYTES: usize = 64;
const WORDS: usize = GRANULE_BYTES / 8;

/// The writer and the version of a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The number of the measurement in this run; 0 for the initial content.
    pub epoch: u16,
    /// The client thread.
    pub writer: u16,
    /// The number of the write to its key within the epoch, from 1.
    pub version: u32,
}

impl Stamp {
    /// The stamp of the initial content.
    pub const INITIAL: Stamp = Stamp { epoch: 0, writer: 0, version: 0 };

    fn to_word(self) -> u64 {
        u64::from(self.epoch) << 48 | u64::from(self.writer) << 32 | u64::from(self.version)
    }

    fn from_word(word: u64) -> Stamp {
        Stamp { epoch: (word >> 48) as u16, writer: (word >> 32) as u16, version: word as u32 }
    }
}

/// The words of the granule at `offset` with a stamp. One strong mix per granule and a constant per word are cheap; the
/// measured machine computes them.
fn words(offset: u64, stamp: u64) -> [u64; WORDS] {
    let base = mix(offset ^ mix(stamp));
    let mut words = [0; WORDS];
    for (index, word) in words.iter_mut().enumerate() {
        *word = base ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    words[0] = stamp;
    words
}

/// Fills `bytes`, at `offset` of the region, with the content of `stamp`. Both are multiples of a granule.
pub fn fill(bytes: &mut [u8], offset: u64, stamp: Stamp) {
    let stamp = stamp.to_word();
    for (index, granule) in bytes.chunks_exact_mut(GRANULE_BYTES).enumerate() {
        let words = words(offset + (index * GRANULE_BYTES) as u64, stamp);
        for (bytes, word) in granule.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn word(granule: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(granule[index * 8..index * 8 + 8].try_into().expect("eight bytes"))
}

/// The stamp of a granule at `offset` of the region, if all its bytes agree with it.
pub fn stamp_of(granule: &[u8], offset: u64) -> Option<Stamp> {
    let stamp = word(granule, 0);
    let expected = words(offset, stamp);
    // Without an early exit the compiler vectorizes the comparison.
    let differing =
        (0..WORDS).fold(0, |differing, index| differing | (word(granule, index) ^ expected[index]));
    (differing == 0).then(|| Stamp::from_word(stamp))
}

/// Whether each word of a granule is of one of `stamps`. A READ concurrent with a WRITE may return such a mixture,
/// because the two are not ordered within a packet.
pub fn is_mixture(granule: &[u8], offset: u64, stamps: impl Iterator<Item = Stamp>) -> bool {
    let mut known = [false; WORDS];
    for stamp in stamps {
        let expected = words(offset, stamp.to_word());
        for index in 0..WORDS {
            known[index] |= word(granule, index) == expected[index];
        }
    }
    known == [true; WORDS]
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { epoch: 3, writer: 1, version: 77 };

    #[test]
    fn filled_granules_have_their_stamp() {
        let mut bytes = vec![0; 4096];
        fill(&mut bytes, 8192, STAMP);
        for (index, granule) in bytes.chunks_exact(GRANULE_BYTES).enumerate() {
            assert_eq!(stamp_of(granule, 8192 + (index * GRANULE_BYTES) as u64), Some(STAMP));
        }
    }

    #[test]
    fn every_flipped_bit_is_detected() {
        let mut bytes = vec![0; GRANULE_BYTES];
        fill(&mut bytes, 640, STAMP);
        for bit in 0..GRANULE_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(stamp_of(&bytes, 640), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn other_offsets_and_constant_bytes_are_detected() {
        let mut bytes = vec![0; GRANULE_BYTES];
        assert_eq!(stamp_of(&bytes, 0), None);
        assert_eq!(stamp_of(&[0xfd; GRANULE_BYTES], 64), None);
        fill(&mut bytes, 0, STAMP);
        assert_eq!(stamp_of(&bytes, 64), None);
    }

    #[test]
    fn a_mixture_is_legal_only_for_its_versions() {
        let of = |version| Stamp { version, ..STAMP };
        let (mut old, mut new) = ([0; GRANULE_BYTES], [0; GRANULE_BYTES]);
        fill(&mut old, 0, of(1));
        fill(&mut new, 0, of(2));
        let mixture: Vec<u8> = [&new[..32], &old[32..]].concat();
        assert_eq!(stamp_of(&mixture, 0), None);
        assert!(is_mixture(&mixture, 0, [of(1), of(2)].into_iter()));
        assert!(!is_mixture(&mixture, 0, [of(2), of(3)].into_iter()));
    }
}
