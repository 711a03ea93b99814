//! Pages of the backing store: which are in use, and by how many pages of processes.
//!
//! After a fork, a parent and its child share the pages that are not in memory. A page of the store is overwritten only while
//! one page of one process uses it.

use std::collections::HashMap;

/// A page of the backing store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot(u32);

impl Slot {
    /// Its number in the store.
    pub(crate) fn page(self) -> u64 {
        self.0.into()
    }
}

/// The pages of the backing store.
#[derive(Debug)]
pub(crate) struct Slots {
    capacity: u32,
    /// The number of users of each slot that was ever used.
    users: Vec<u32>,
    free: Vec<Slot>,
    /// The buffers that are being stored.
    storing: HashMap<Slot, usize>,
    /// Slots to invalidate.
    invalid: Vec<u64>,
}

impl Slots {
    pub(crate) fn new(page_count: u64) -> Slots {
        let capacity = page_count.min(u32::MAX.into()) as u32;
        Slots { capacity, users: Vec::new(), free: Vec::new(), storing: HashMap::new(), invalid: Vec::new() }
    }

    /// A slot with one user; `None` if all are in use.
    pub(crate) fn allocate(&mut self) -> Option<Slot> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.users.len() < self.capacity as usize => {
                self.users.push(0);
                Slot(self.users.len() as u32 - 1)
            }
            None => return None,
        };
        self.users[slot.0 as usize] = 1;
        Some(slot)
    }

    /// Adds a user.
    pub(crate) fn share(&mut self, slot: Slot) {
        self.users[slot.0 as usize] += 1;
    }

    /// Whether the slot has one user.
    pub(crate) fn is_exclusive(&self, slot: Slot) -> bool {
        self.users[slot.0 as usize] == 1
    }

    /// Removes a user. Without users the slot is free.
    pub(crate) fn release(&mut self, slot: Slot) {
        let users = &mut self.users[slot.0 as usize];
        *users -= 1;
        // A slot that is being stored is freed at the end of that.
        if *users == 0 && !self.storing.contains_key(&slot) {
            self.recycle(slot);
        }
    }

    fn recycle(&mut self, slot: Slot) {
        self.free.push(slot);
        self.invalid.push(slot.page());
    }

    /// Notes that a buffer is being stored.
    pub(crate) fn begin_store(&mut self, slot: Slot, buffer: usize) {
        self.storing.insert(slot, buffer);
    }

    /// Notes the end of a store. Returns whether the slot still has users.
    pub(crate) fn end_store(&mut self, slot: Slot) -> bool {
        self.storing.remove(&slot);
        let is_used = self.users[slot.0 as usize] > 0;
        if !is_used {
            self.recycle(slot);
        }
        is_used
    }

    /// The buffer that is being stored to a slot.
    pub(crate) fn stored_buffer(&self, slot: Slot) -> Option<usize> {
        self.storing.get(&slot).copied()
    }

    /// Takes the pages that are to be invalidated, and not in use again.
    pub(crate) fn take_invalid(&mut self) -> Vec<u64> {
        let mut invalid = std::mem::take(&mut self.invalid);
        invalid.retain(|&page| self.users[page as usize] == 0);
        invalid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_free_when_its_last_user_releases_it() {
        let mut slots = Slots::new(1);
        let slot = slots.allocate().unwrap();
        assert_eq!(slots.allocate(), None);
        slots.share(slot);
        slots.release(slot);
        assert!(slots.is_exclusive(slot) && slots.take_invalid().is_empty());
        slots.release(slot);
        assert_eq!(slots.take_invalid(), [0]);
        assert_eq!(slots.allocate(), Some(slot));
    }

    #[test]
    fn a_slot_that_is_being_stored_is_freed_afterwards() {
        let mut slots = Slots::new(1);
        let slot = slots.allocate().unwrap();
        slots.begin_store(slot, 5);
        assert_eq!(slots.stored_buffer(slot), Some(5));
        slots.release(slot);
        assert!(slots.allocate().is_none() && !slots.end_store(slot));
        assert_eq!(slots.allocate(), Some(slot));
        // It is in use again: its page must not be invalidated.
        assert!(slots.take_invalid().is_empty());
    }
}
