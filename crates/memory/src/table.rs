//! From key to slot, and which slots are free.
//!
//! A key is `index << 8 | tag`. Slots lie in segments that double in size and never move, so that finding one takes no
//! lock. The index in a key is the slot's number put through a permutation of 24-bit numbers that differs from table
//! to table: keys are no small integers in a row, and a key made up at random most likely names nothing. The tag makes
//! a slot's keys differ from one use to the next; a slot returns to use only after all others that were free before it.

use std::collections::VecDeque;
use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::entry::{Entry, Kind};
use crate::pin::PinLock;
use crate::shared::KeyOrder;

/// Slots of the first segment, as a power of two; each further segment doubles the table.
const FIRST_BITS: u32 = 6;
/// Bits of the index within a key.
const INDEX_BITS: u32 = 24;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const SEGMENTS: usize = (INDEX_BITS - FIRST_BITS) as usize + 1;
/// How many slots wait unused before one is used again, so that a key lives on in the peer's memory harmlessly.
const RESTING_SLOTS: usize = 32;

/// One slot, on a cache line of its own as far as an access is concerned.
#[repr(align(128))]
pub(crate) struct Slot {
    pub(crate) entry: PinLock<Entry>,
}

/// The low byte of a key.
#[inline]
pub(crate) fn tag_of(key: u32) -> u8 {
    key as u8
}

/// A bijection on 24-bit numbers and its inverse.
#[derive(Clone, Copy, Debug)]
struct Permutation {
    multiplier: u32,
    inverse: u32,
    offset: u32,
}

impl Permutation {
    fn new(seed: u64) -> Permutation {
        let random = mix(seed);
        // Any odd multiplier has an inverse modulo a power of two. Bit 12 keeps it away from the trivial ones.
        let multiplier = (random as u32 & INDEX_MASK) | 0x1001;
        // Newton's iteration doubles the number of correct low bits, of which an odd number starts with three.
        let mut inverse = multiplier;
        for _ in 0..4 {
            inverse = inverse.wrapping_mul(2u32.wrapping_sub(multiplier.wrapping_mul(inverse)));
        }
        Permutation { multiplier, inverse: inverse & INDEX_MASK, offset: (random >> 32) as u32 & INDEX_MASK }
    }

    fn outward(self, number: u32) -> u32 {
        (number.wrapping_mul(self.multiplier) & INDEX_MASK) ^ self.offset
    }

    #[inline]
    fn inward(self, index: u32) -> u32 {
        (index ^ self.offset).wrapping_mul(self.inverse) & INDEX_MASK
    }

    fn key_order(self) -> KeyOrder {
        KeyOrder { multiplier: self.inverse, offset: self.offset, mask: INDEX_MASK }
    }
}

/// The finalizer of SplitMix64: spreads a seed over all bits.
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Slots that are not in use, and how many there are altogether.
struct Allocator {
    /// Numbers of free slots, the longest free one first.
    free: VecDeque<u32>,
    /// Slots of the allocated segments.
    slot_count: u32,
    regions: u32,
    windows: u32,
}

/// All slots of a device.
pub(crate) struct Table {
    segments: [OnceLock<Box<[Slot]>>; SEGMENTS],
    permutation: Permutation,
    /// Starting tags come from here.
    seed: u64,
    regions_max: u32,
    windows_max: u32,
    allocator: Mutex<Allocator>,
}

impl Table {
    pub(crate) fn new(regions_max: u32, windows_max: u32, seed: u64) -> Table {
        Table {
            segments: [const { OnceLock::new() }; SEGMENTS],
            permutation: Permutation::new(seed),
            seed,
            regions_max,
            windows_max,
            allocator: Mutex::new(Allocator { free: VecDeque::new(), slot_count: 0, regions: 0, windows: 0 }),
        }
    }

    /// The slot that `key` would have, whatever its tag.
    #[inline]
    pub(crate) fn slot_of(&self, key: u32) -> Option<&Slot> {
        self.slot(self.permutation.inward(key >> 8))
    }

    /// How keys become the numbers of slots.
    pub(crate) fn key_order(&self) -> KeyOrder {
        self.permutation.key_order()
    }

    /// The slot with a number, as segments count them.
    #[inline]
    fn slot(&self, number: u32) -> Option<&Slot> {
        let biased = number + (1 << FIRST_BITS);
        let segment = (biased.ilog2() - FIRST_BITS) as usize;
        // Segment 0 holds numbers 0..64, segment 1 the next 128, and so on; the last one is cut off by the key's width.
        let first = (1u32 << (segment as u32 + FIRST_BITS)) - (1 << FIRST_BITS);
        self.segments.get(segment)?.get()?.get((number - first) as usize)
    }

    /// Takes a free slot for a region or window. Returns its key, with a tag that it did not have lately, and the slot;
    /// the entry is still that of a free slot, and nobody else will touch it.
    pub(crate) fn allocate(&self, window: bool) -> Option<(u32, &Slot)> {
        let mut allocator = self.allocator.lock();
        let (count, limit) = if window {
            (&mut allocator.windows, self.windows_max)
        } else {
            (&mut allocator.regions, self.regions_max)
        };
        if *count >= limit {
            return None;
        }
        *count += 1;
        if allocator.free.len() <= RESTING_SLOTS {
            self.grow(&mut allocator);
        }
        let Some(number) = allocator.free.pop_front() else {
            if window {
                allocator.windows -= 1;
            } else {
                allocator.regions -= 1;
            }
            return None;
        };
        drop(allocator);
        let slot = self.slot(number)?;
        let tag = slot.entry.pin().tag;
        Some(((self.permutation.outward(number) << 8) | u32::from(tag), slot))
    }

    /// Adds a segment and queues its slots, but for those whose keys programs take for "no key".
    fn grow(&self, allocator: &mut Allocator) {
        let segment = ((allocator.slot_count + (1 << FIRST_BITS)).ilog2() - FIRST_BITS) as usize;
        let Some(place) = self.segments.get(segment) else { return };
        let first = allocator.slot_count;
        let count = (1u32 << (segment as u32 + FIRST_BITS)).min(INDEX_MASK + 1 - first);
        place.get_or_init(|| {
            (first..first + count)
                .map(|number| Slot {
                    entry: PinLock::new(Entry::free(mix(self.seed ^ (u64::from(number) << 32)) as u8)),
                })
                .collect()
        });
        allocator.slot_count += count;
        allocator.free.extend((first..first + count).filter(|&number| {
            let index = self.permutation.outward(number);
            index != 0 && index != INDEX_MASK
        }));
    }

    /// Gives a slot back. Its entry is that of a free slot already.
    pub(crate) fn release(&self, key: u32, window: bool) {
        let mut allocator = self.allocator.lock();
        allocator.free.push_back(self.permutation.inward(key >> 8));
        if window {
            allocator.windows -= 1;
        } else {
            allocator.regions -= 1;
        }
    }

    /// How many regions and windows exist.
    pub(crate) fn counts(&self) -> (u32, u32) {
        let allocator = self.allocator.lock();
        (allocator.regions, allocator.windows)
    }

    /// Every slot there is, with the upper 24 bits of its keys.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u32, &Slot)> {
        let slots = self.segments.iter().filter_map(|segment| segment.get()).flat_map(|slots| slots.iter());
        slots.enumerate().map(|(number, slot)| (self.permutation.outward(number as u32) << 8, slot))
    }
}

/// The tag that follows `tag` in a slot's next use. An odd step visits all 256 before one returns, and one other than
/// 1 keeps away from the tags that `ibv_inc_rkey` makes next.
pub(crate) fn next_tag(tag: u8) -> u8 {
    tag.wrapping_add(0x5b)
}

/// Empties a closed slot, with the tag of the next use.
pub(crate) fn vacate(entry: &mut Entry) {
    debug_assert!(entry.kind != Kind::Free, "a free slot was freed");
    *entry = Entry::free(next_tag(entry.tag));
}
