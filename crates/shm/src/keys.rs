//! How a key leads to the number of its slot and record.
//!
//! The upper 24 bits of a key are the number put through a permutation that each device draws for its own key table,
//! so that a peer that knows some keys cannot tell the others. Same-host peers get the permutation with the shared
//! registry, and find a key's record as the process itself finds the key's slot.

use std::sync::atomic::{AtomicU64, Ordering};

use rand::Rng;

use crate::permutation::KeyedPermutation;

/// Bits of the index within a key; the lower 8 are its tag.
pub const KEY_INDEX_BITS: u32 = 24;
const TAG_BITS: u32 = 32 - KEY_INDEX_BITS;
/// Numbers below `HALF * HALF` are those of [`KEY_INDEX_BITS`].
pub(crate) const HALF: usize = 1 << (KEY_INDEX_BITS / 2);
/// Rounds of the permutation. Every access looks up so many numbers; those of a key in use are in the nearest cache.
pub(crate) const ROUNDS: usize = 6;

/// From keys to the numbers of their slots, and back.
#[derive(Debug)]
pub struct KeyOrder(KeyedPermutation<HALF>);

impl KeyOrder {
    /// Draws one.
    pub fn new(rng: &mut impl Rng) -> KeyOrder {
        KeyOrder(KeyedPermutation::new(ROUNDS, rng))
    }

    /// The number of a key's slot, whatever the key's tag.
    #[inline]
    pub fn number_of(&self, key: u32) -> u32 {
        self.0.inward(key >> TAG_BITS)
    }

    /// The key of a slot, with the tag 0.
    pub fn key_of(&self, number: u32) -> u32 {
        self.0.outward(number) << TAG_BITS
    }

    /// The tables of the rounds, of which the same order can be made.
    pub(crate) fn rounds(&self) -> &[[u16; HALF]] {
        self.0.rounds()
    }

    /// The order that has these tables.
    pub(crate) fn from_rounds(rounds: impl Iterator<Item = [u16; HALF]>) -> KeyOrder {
        KeyOrder(KeyedPermutation::from_rounds(rounds))
    }
}

/// The slot that a key was last found to name. A look-up takes a load for each round, and each waits for the one
/// before. Threads may share a memo.
#[derive(Debug, Default)]
pub struct KeyMemo(AtomicU64);

/// Set in a memo that holds a slot.
const KNOWN: u64 = 1 << 63;

impl KeyMemo {
    /// The number of a key's slot. A memo is for one table at a time.
    #[inline(always)]
    pub fn number(&self, order: &KeyOrder, key: u32) -> u32 {
        let index = KNOWN | u64::from(key >> TAG_BITS) << 32;
        let memo = self.0.load(Ordering::Relaxed);
        if memo & !u64::from(u32::MAX) == index {
            return memo as u32;
        }
        let number = order.number_of(key);
        self.0.store(index | u64::from(number), Ordering::Relaxed);
        number
    }
}
