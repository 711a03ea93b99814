//! The key table: from key to slot, and the free slots.
//!
//! A key is `index << 8 | tag`. Slots lie in segments that double in size and never move, so that finding one takes no
//! lock. The index in a key is the slot's number put through a permutation that is drawn for each table ([`KeyOrder`]).
//! So keys are no consecutive small integers, a random key most likely names nothing, and a peer that knows some keys
//! cannot tell the others. The tag makes a slot's keys differ from one use to the next, by a secret step; a slot
//! returns to use only after all others that were free before it.

use std::collections::{HashMap, VecDeque};
use std::sync::OnceLock;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_shm::{EpochGuard, KEY_INDEX_BITS, KeyMemo, KeyOrder, wait_for_own_readers};
use terrace_sync::Mutex;

use crate::entry::{Entry, Kind};
use crate::pin::{Closed, PinLock, Pinned};

/// Slots of the first segment, as a power of two; each further segment doubles the table.
const FIRST_BITS: u32 = 6;
/// The largest number of a slot.
const NUMBER_MAX: u32 = (1 << KEY_INDEX_BITS) - 1;
const SEGMENTS: usize = (KEY_INDEX_BITS - FIRST_BITS) as usize + 1;
/// How many slots stay unused before one is used again, so that a stale key in a peer's memory does no harm.
const RESTING_SLOTS: usize = 32;

/// One slot, on a cache line of its own as far as an access is concerned.
#[repr(align(128))]
pub(crate) struct Slot {
    entry: PinLock<Entry>,
    number: u32,
}

impl Slot {
    fn new(number: u32, entry: Entry) -> Slot {
        Slot { entry: PinLock::new(entry), number }
    }

    /// Pins the entry: it does not change until the returned value is dropped. Waits while a writer has it.
    #[inline]
    pub(crate) fn pin(&self) -> Pinned<'_, Entry> {
        self.entry.pin()
    }

    /// Pins the entry, unless a writer has it or waits for it.
    #[inline]
    pub(crate) fn try_pin(&self) -> Option<Pinned<'_, Entry>> {
        self.entry.try_pin()
    }

    /// Closes the entry for a change. Waits for all readers.
    pub(crate) fn close(&self) -> Closed<'_, Entry> {
        let entry = self.entry.close();
        wait_for_own_readers(self.number);
        entry
    }

    /// Waits while a writer has the entry; another one may have it when this returns.
    pub(crate) fn sleep_while_closed(&self) {
        self.entry.sleep_while_closed();
    }

    /// See [`PinLock::forget_pins`].
    pub(crate) fn forget_pins(&self) {
        self.entry.forget_pins();
    }
}

/// The low byte of a key.
#[inline]
pub(crate) fn tag_of(key: u32) -> u8 {
    key as u8
}

/// A slot whose keys somebody retains.
#[derive(Default)]
struct Retained {
    count: u32,
    /// Whether its region or window has ended.
    is_released: bool,
}

/// The free slots, and how many slots there are altogether.
struct Allocator {
    /// Numbers of free slots, the longest free one first.
    free: VecDeque<u32>,
    /// By the slot's number.
    retained: HashMap<u32, Retained>,
    /// Slots of the allocated segments.
    slot_count: u32,
    regions: u32,
    windows: u32,
    /// Draws the tags of new slots.
    rng: StdRng,
}

/// All slots of a device.
pub(crate) struct Table {
    segments: [OnceLock<Box<[Slot]>>; SEGMENTS],
    key_order: KeyOrder,
    regions_max: u32,
    windows_max: u32,
    allocator: Mutex<Allocator>,
}

impl Table {
    pub(crate) fn new(regions_max: u32, windows_max: u32, seed: u64) -> Table {
        let mut rng = StdRng::seed_from_u64(seed);
        Table {
            segments: [const { OnceLock::new() }; SEGMENTS],
            key_order: KeyOrder::new(&mut rng),
            regions_max,
            windows_max,
            allocator: Mutex::new(Allocator {
                free: VecDeque::new(),
                retained: HashMap::new(),
                slot_count: 0,
                regions: 0,
                windows: 0,
                rng,
            }),
        }
    }

    /// The slot that `key` would have, whatever its tag.
    #[inline]
    pub(crate) fn slot_of(&self, key: u32) -> Option<&Slot> {
        self.slot(self.key_order.number_of(key))
    }

    /// The same, for a key that most likely is the last one of this memo.
    #[inline(always)]
    pub(crate) fn slot_again(&self, key: u32, memo: &KeyMemo) -> Option<&Slot> {
        self.slot(self.number_again(key, memo))
    }

    /// The number of that slot.
    #[inline(always)]
    pub(crate) fn number_again(&self, key: u32, memo: &KeyMemo) -> u32 {
        memo.number(&self.key_order, key)
    }

    /// The entry of the slot that the reader's epoch protects, unless a writer has it or waits for it: two locked
    /// instructions less than a pin.
    #[inline(always)]
    pub(crate) fn entry_under<'a>(&'a self, guard: &'a EpochGuard<'_>) -> Option<&'a Entry> {
        let slot = self.slot(guard.slot()?)?;
        // SAFETY: only `Slot::close` closes it, which waits for epochs that protect that number.
        unsafe { slot.entry.peek() }
    }

    /// How keys become the numbers of slots.
    pub(crate) fn key_order(&self) -> &KeyOrder {
        &self.key_order
    }

    /// The slot with a number, counted through the segments.
    #[inline(always)]
    fn slot(&self, number: u32) -> Option<&Slot> {
        let biased = number + (1 << FIRST_BITS);
        let segment = (biased.ilog2() - FIRST_BITS) as usize;
        // Segment 0 holds numbers 0..64, segment 1 the next 128, and so on; the last one is cut off by the key's width.
        let first = (1u32 << (segment as u32 + FIRST_BITS)) - (1 << FIRST_BITS);
        self.segments.get(segment)?.get()?.get((number - first) as usize)
    }

    /// Takes a free slot for a region or window. Returns its key, with a tag that it did not have lately, and the slot;
    /// the entry is still that of a free slot, and no other thread changes it.
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
        let tag = slot.pin().tag;
        Some((self.key_order.key_of(number) | u32::from(tag), slot))
    }

    /// Adds a segment and queues its slots, except those whose keys programs take for "no key".
    fn grow(&self, allocator: &mut Allocator) {
        let segment = ((allocator.slot_count + (1 << FIRST_BITS)).ilog2() - FIRST_BITS) as usize;
        let Some(place) = self.segments.get(segment) else { return };
        let first = allocator.slot_count;
        let count = (1u32 << (segment as u32 + FIRST_BITS)).min(NUMBER_MAX + 1 - first);
        let rng = &mut allocator.rng;
        place.get_or_init(|| {
            let slot = |number| Slot::new(number, Entry::free(rng.random(), random_step(rng)));
            (first..first + count).map(slot).collect()
        });
        allocator.slot_count += count;
        allocator.free.extend((first..first + count).filter(|&number| {
            let key = self.key_order.key_of(number);
            key != 0 && key | u32::from(u8::MAX) != u32::MAX
        }));
    }

    /// Gives a slot back. Its entry is that of a free slot already. It is used again when nobody retains it.
    pub(crate) fn release(&self, key: u32, window: bool) {
        let mut allocator = self.allocator.lock();
        let number = self.key_order.number_of(key);
        match allocator.retained.get_mut(&number) {
            Some(retained) => retained.is_released = true,
            None => allocator.free.push_back(number),
        }
        if window {
            allocator.windows -= 1;
        } else {
            allocator.regions -= 1;
        }
    }

    /// Has a key's slot, which is in use, not used for another key once it is given back, until [`Table::end_retention`].
    pub(crate) fn retain(&self, key: u32) {
        let mut allocator = self.allocator.lock();
        allocator.retained.entry(self.key_order.number_of(key)).or_default().count += 1;
    }

    /// Whether a key's slot is retained.
    pub(crate) fn is_retained(&self, key: u32) -> bool {
        self.allocator.lock().retained.contains_key(&self.key_order.number_of(key))
    }

    /// Ends one retention of a key's slot.
    pub(crate) fn end_retention(&self, key: u32) {
        let mut allocator = self.allocator.lock();
        let number = self.key_order.number_of(key);
        let Some(retained) = allocator.retained.get_mut(&number) else { return };
        retained.count -= 1;
        if retained.count == 0 {
            let is_released = retained.is_released;
            allocator.retained.remove(&number);
            if is_released {
                allocator.free.push_back(number);
            }
        }
    }

    /// How many regions and windows exist.
    pub(crate) fn counts(&self) -> (u32, u32) {
        let allocator = self.allocator.lock();
        (allocator.regions, allocator.windows)
    }

    /// Every slot there is, with its key of the tag 0.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u32, &Slot)> {
        let slots = self.segments.iter().filter_map(|segment| segment.get()).flat_map(|slots| slots.iter());
        slots.enumerate().map(|(number, slot)| (self.key_order.key_of(number as u32), slot))
    }
}

/// How far a slot's tag moves from one use to the next. An odd step visits all 256 tags before one returns, and a step
/// other than 1 and -1 avoids the tags that `ibv_inc_rkey` makes. It differs from slot to slot: a peer that had one key
/// of a slot cannot tell the next.
fn random_step(rng: &mut StdRng) -> u8 {
    rng.random_range(1..=126) * 2 + 1
}

/// Empties a closed slot, with the tag of the next use. Returns the old entry.
pub(crate) fn vacate(entry: &mut Entry) -> Entry {
    debug_assert!(entry.kind != Kind::Free, "a free slot was freed");
    let free = Entry::free(entry.tag.wrapping_add(entry.step), entry.step);
    std::mem::replace(entry, free)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use terrace_hostmem::HostRange;
    use terrace_shm::ReaderSlots;

    use super::*;

    #[test]
    fn an_entry_does_not_change_while_a_reader_epoch_protects_it() {
        let table = Table::new(10, 10, 1);
        let (key, slot) = table.allocate(false).expect("a slot");
        let number = table.number_again(key, &KeyMemo::default());
        let (reader_slots, done) = (ReaderSlots::new().expect("made"), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let mut reader_slot = reader_slots.take(7).expect("a slot");
                let (table, done) = (&table, &done);
                scope.spawn(move || {
                    let mut looks = 0;
                    while !done.load(Ordering::Relaxed) || looks == 0 {
                        let guard = reader_slot.enter_for(Some(number), 0, HostRange { addr: 0, len: 1 });
                        let Some(entry) = table.entry_under(&guard) else { continue };
                        let first = entry.start;
                        (0..20).for_each(|_| std::hint::spin_loop());
                        assert_eq!((entry.start, entry.len), (first, first), "it has changed");
                        looks += 1;
                    }
                });
            }
            for round in 1..=20_000 {
                let mut entry = slot.close();
                entry.start = round;
                (0..20).for_each(|_| std::hint::spin_loop());
                entry.len = round;
                drop(entry);
                (0..20).for_each(|_| std::hint::spin_loop());
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
