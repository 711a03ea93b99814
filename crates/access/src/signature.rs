//! The signature page: the bytes that READs of an absent page return, and the comparison with data.
//!
//! Both ends derive the same 4096 bytes from a 32-byte key that the server draws at random for each registration:
//!
//! 1. The key is four 64-bit words `k[0..4]`, little-endian. Word `i` of the generator's state is
//!    `mix(k[i] + (i + 1) * 0x9e3779b97f4a7c15)`, where `mix` is the finaliser of SplitMix64; should all four be zero,
//!    the first becomes 1.
//! 2. The generator is xoshiro256++ (Blackman and Vigna). Its first 64 outputs are discarded.
//! 3. The next 512 outputs, little-endian, are the signature page.
//!
//! The signature page is not a secret: a client that may read the region can read it, too. It only has to differ from
//! the data that applications are likely to store.
//!
//! A byte of the region is compared with the signature page's byte at the same offset within the page. A NIC looks up
//! residency once per packet, and a page can become present or absent between two packets of one READ. So the
//! comparison is not of a whole page but of chunks of [`CHUNK_BYTES`], the smallest path MTU: one chunk that equals the
//! signature page makes the page suspect. The comparison finds every absent packet if packets begin at chunk
//! boundaries; the requester that posts the READ has to ensure this. A requester that knows the path MTU compares one
//! chunk of each packet and page. Where less than a chunk was read, the bytes that were read are compared. Data that
//! equals the signature page by coincidence, or on purpose, is fetched again: this costs a round trip and is never an
//! error.

use std::sync::Arc;

/// Bytes of a page, and of the signature page.
pub const PAGE_BYTES: usize = 4096;
/// The granularity of comparison in bytes: the smallest path MTU.
pub const CHUNK_BYTES: usize = 256;
/// Bytes of the key that a signature page is derived from.
pub const KEY_BYTES: usize = 32;

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
/// Outputs of the generator that are discarded, so that keys that differ in one bit have unrelated signature pages.
const WARM_UP_OUTPUTS: usize = 64;
const WORD_BYTES: usize = 8;

/// The signature page of a region: the 4096 bytes that READs of an absent page return.
#[derive(Clone, PartialEq, Eq)]
pub struct SignaturePage {
    bytes: Arc<[u8; PAGE_BYTES]>,
}

impl std::fmt::Debug for SignaturePage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SignaturePage({:02x?}...)", &self.bytes[..WORD_BYTES])
    }
}

impl SignaturePage {
    /// Derives the signature page of a key. The module's documentation has the algorithm.
    pub fn derive(key: &[u8; KEY_BYTES]) -> SignaturePage {
        let mut generator = Xoshiro256PlusPlus::from_key(key);
        for _ in 0..WARM_UP_OUTPUTS {
            generator.next();
        }
        let mut bytes = [0; PAGE_BYTES];
        for word in bytes.chunks_exact_mut(WORD_BYTES) {
            word.copy_from_slice(&generator.next().to_le_bytes());
        }
        SignaturePage { bytes: Arc::new(bytes) }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; PAGE_BYTES] {
        &self.bytes
    }

    /// Another reference to the bytes.
    pub fn shared(&self) -> Arc<[u8; PAGE_BYTES]> {
        Arc::clone(&self.bytes)
    }

    /// Whether a slice of a page, which begins `offset` bytes into the page, may have been absent: whether a chunk of
    /// the slice, or the incomplete chunk at either end, equals the signature page. An empty slice is never suspect.
    ///
    /// # Panics
    /// If the slice ends beyond the page.
    #[inline]
    pub fn matches(&self, offset: usize, slice: &[u8]) -> bool {
        let expected = &self.bytes[offset..offset + slice.len()];
        let head_bytes = (offset.next_multiple_of(CHUNK_BYTES) - offset).min(slice.len());
        let (head, body) = slice.split_at(head_bytes);
        let (expected_head, expected_body) = expected.split_at(head_bytes);
        let (chunks, tail) = body.as_chunks::<CHUNK_BYTES>();
        let (expected_chunks, expected_tail) = expected_body.as_chunks::<CHUNK_BYTES>();
        // The first word nearly always differs; comparing it first saves a call of memcmp.
        let is_equal = |(chunk, expected): (&[u8; CHUNK_BYTES], &[u8; CHUNK_BYTES])| {
            first_word(chunk) == first_word(expected) && chunk == expected
        };
        chunks.iter().zip(expected_chunks).any(is_equal)
            || (!head.is_empty() && head == expected_head)
            || (!tail.is_empty() && tail == expected_tail)
    }
}

#[inline]
fn first_word(chunk: &[u8; CHUNK_BYTES]) -> u64 {
    chunk.first_chunk().map_or(0, |word| u64::from_ne_bytes(*word))
}

/// The generator, as published by its authors.
struct Xoshiro256PlusPlus {
    state: [u64; 4],
}

impl Xoshiro256PlusPlus {
    fn from_key(key: &[u8; KEY_BYTES]) -> Xoshiro256PlusPlus {
        let mut state = [0; 4];
        let mut gamma = 0_u64;
        for (word, bytes) in state.iter_mut().zip(key.as_chunks::<WORD_BYTES>().0) {
            gamma = gamma.wrapping_add(GOLDEN_GAMMA);
            *word = mix(u64::from_le_bytes(*bytes).wrapping_add(gamma));
        }
        if state == [0; 4] {
            state[0] = 1;
        }
        Xoshiro256PlusPlus { state }
    }

    fn next(&mut self) -> u64 {
        let [s0, s1, s2, s3] = &mut self.state;
        let output = s0.wrapping_add(*s3).rotate_left(23).wrapping_add(*s0);
        let shifted = *s1 << 17;
        *s2 ^= *s0;
        *s3 ^= *s1;
        *s1 ^= *s2;
        *s0 ^= *s3;
        *s2 ^= shifted;
        *s3 = s3.rotate_left(45);
        output
    }
}

/// The finaliser of SplitMix64: a bijection in which every bit of the input affects every bit of the output.
fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From an implementation in another language, written after the module's documentation.
    const VECTORS: [([u8; KEY_BYTES], &str, &str, u32); 2] = [
        ([0; KEY_BYTES], "fc435ac7fceb45ec266abcbbd6ecbac5", "bf0211a10fd0bf038a74fa8d02b31304", 521_730),
        (COUNTING, "0d45a55bb1c828b09725588bfb89000c", "44f00c5b9f6c3a6c1d81b6fd3b992c0e", 521_697),
    ];

    const COUNTING: [u8; KEY_BYTES] = {
        let mut key = [0; KEY_BYTES];
        let mut index = 0;
        while index < KEY_BYTES {
            key[index] = index as u8;
            index += 1;
        }
        key
    };

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_algorithm_is_the_documented_one() {
        for (key, first, last, sum) in VECTORS {
            let signature = SignaturePage::derive(&key);
            assert_eq!(hex(&signature.bytes()[..16]), first);
            assert_eq!(hex(&signature.bytes()[PAGE_BYTES - 16..]), last);
            assert_eq!(signature.bytes().iter().map(|&byte| u32::from(byte)).sum::<u32>(), sum);
        }
    }

    #[test]
    fn a_key_with_an_all_zero_state_gives_a_signature_page() {
        let mut key = [0; KEY_BYTES];
        for (index, word) in key.chunks_exact_mut(WORD_BYTES).enumerate() {
            word.copy_from_slice(&GOLDEN_GAMMA.wrapping_mul(index as u64 + 1).wrapping_neg().to_le_bytes());
        }
        let signature = SignaturePage::derive(&key);
        assert_eq!(hex(&signature.bytes()[..16]), "7916a8306a48d123691aaa758a8d9e38");
    }

    #[test]
    fn keys_that_differ_in_one_bit_give_unrelated_pages() {
        let base = SignaturePage::derive(&COUNTING);
        for bit in 0..KEY_BYTES * 8 {
            let mut key = COUNTING;
            key[bit / 8] ^= 1 << (bit % 8);
            let other = SignaturePage::derive(&key);
            let equal = base.bytes().iter().zip(other.bytes()).filter(|(a, b)| a == b).count();
            assert!(equal < 64, "{equal} bytes are the same after flipping bit {bit}");
        }
    }

    #[test]
    fn any_absent_chunk_makes_a_page_suspect() {
        let signature = SignaturePage::derive(&COUNTING);
        for chunk in 0..PAGE_BYTES / CHUNK_BYTES {
            let mut page = [0xfd; PAGE_BYTES];
            let range = chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES;
            page[range.clone()].copy_from_slice(&signature.bytes()[range.clone()]);
            assert!(signature.matches(0, &page));
            for changed in range {
                page[changed] ^= 1;
                assert!(!signature.matches(0, &page), "byte {changed} was data");
                page[changed] ^= 1;
            }
        }
    }

    #[test]
    fn incomplete_chunks_at_both_ends_are_compared_at_their_offset() {
        let signature = SignaturePage::derive(&COUNTING);
        for offset in [0, 1, 7, 255, 256, 300, 4000, 4095] {
            for len in [1, 2, 7, 8, 9, 200, 256, 257, 511, 600, 4096] {
                let len = len.min(PAGE_BYTES - offset);
                let mut slice: Vec<u8> = signature.bytes()[offset..offset + len].to_vec();
                assert!(signature.matches(offset, &slice), "all of {len} B at {offset}");
                let boundary = (offset + 1).next_multiple_of(CHUNK_BYTES) - offset;
                slice.iter_mut().step_by(CHUNK_BYTES).for_each(|byte| *byte ^= 0x10);
                slice.iter_mut().skip(boundary).step_by(CHUNK_BYTES).for_each(|byte| *byte ^= 0x20);
                assert!(!signature.matches(offset, &slice), "none of {len} B at {offset}");
            }
        }
        assert!(!signature.matches(4096, &[]));
        assert!(!signature.matches(1, &[]));
    }

    #[test]
    fn an_incomplete_chunk_at_either_end_makes_a_page_suspect() {
        let signature = SignaturePage::derive(&COUNTING);
        let mut slice = [0; 600];
        slice[..6].copy_from_slice(&signature.bytes()[250..256]);
        assert!(signature.matches(250, &slice));
        slice[0] ^= 1;
        assert!(!signature.matches(250, &slice));
        slice[6 + 512..].copy_from_slice(&signature.bytes()[768..768 + 82]);
        assert!(signature.matches(250, &slice));
    }

    #[test]
    fn pages_of_one_byte_value_are_not_suspect() {
        let signature = SignaturePage::derive(&COUNTING);
        for fill in 0..=255 {
            assert!(!signature.matches(0, &[fill; PAGE_BYTES]));
        }
    }
}
