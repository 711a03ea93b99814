//! Pages of the backing store: which are in use, and by how many pages of processes.
//!
//! After a fork, a parent and its child share the pages that are not in memory. A page of the store is overwritten only while
//! one page of one process uses it. A slot has a page of the store, and gets another one if that cannot be stored.

use std::collections::HashMap;

/// Pages that the store refuses, after which the search for one that it accepts goes on another time. Nodes take turns, and
/// there are fewer of them.
const REFUSALS_MAX: usize = 64;

/// A name for a page of the backing store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot(u32);

/// The pages of the backing store.
#[derive(Debug)]
pub(crate) struct Slots {
    capacity: u32,
    /// The number of users of each slot that was ever used.
    users: Vec<u32>,
    /// The page of each of them.
    pages: Vec<u32>,
    free: Vec<Slot>,
    /// Slots whose pages the store did not accept: their nodes are lost or full. They are tried again when no others are free.
    refused: Vec<Slot>,
    /// Slots whose bytes are not in the store yet, and the buffers that are being stored; none after a failure.
    storing: HashMap<Slot, Option<usize>>,
    /// Slots to invalidate.
    invalid: Vec<Slot>,
}

impl Slots {
    pub(crate) fn new(page_count: u64) -> Slots {
        let capacity = page_count.min(u32::MAX.into()) as u32;
        Slots {
            capacity,
            users: Vec::new(),
            pages: Vec::new(),
            free: Vec::new(),
            refused: Vec::new(),
            storing: HashMap::new(),
            invalid: Vec::new(),
        }
    }

    /// The slot's page in the store.
    pub(crate) fn page(&self, slot: Slot) -> u64 {
        self.pages[slot.0 as usize].into()
    }

    /// A slot with one user, of a page that the store accepts; `None` if there is none.
    pub(crate) fn allocate(&mut self, accepts: impl Fn(u64) -> bool) -> Option<Slot> {
        let slot = self.take_free(accepts)?;
        self.users[slot.0 as usize] = 1;
        Some(slot)
    }

    /// Gives a slot whose bytes are not in the store another page, if there is one that the store accepts.
    pub(crate) fn relocate(&mut self, slot: Slot, accepts: impl Fn(u64) -> bool) {
        if let Some(other) = self.take_free(accepts) {
            self.pages.swap(slot.0 as usize, other.0 as usize);
            self.refused.push(other);
        }
    }

    fn take_free(&mut self, accepts: impl Fn(u64) -> bool) -> Option<Slot> {
        if self.free.is_empty() && self.users.len() == self.capacity as usize {
            self.free.append(&mut self.refused);
        }
        for _ in 0..REFUSALS_MAX {
            let slot = match self.free.pop() {
                Some(slot) => slot,
                None if self.users.len() < self.capacity as usize => {
                    let number = self.users.len() as u32;
                    self.users.push(0);
                    self.pages.push(number);
                    Slot(number)
                }
                None => return None,
            };
            if accepts(self.page(slot)) {
                return Some(slot);
            }
            self.refused.push(slot);
        }
        None
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
        if *users == 0 && !self.is_storing(slot) {
            self.recycle(slot);
        }
    }

    fn recycle(&mut self, slot: Slot) {
        self.free.push(slot);
        self.invalid.push(slot);
    }

    /// Notes that a buffer is being stored.
    pub(crate) fn begin_store(&mut self, slot: Slot, buffer: usize) {
        self.storing.insert(slot, Some(buffer));
    }

    /// Notes that a store has failed, and is to be repeated.
    pub(crate) fn fail_store(&mut self, slot: Slot) {
        self.storing.insert(slot, None);
    }

    /// Whether the slot's bytes are not in the store yet.
    pub(crate) fn is_storing(&self, slot: Slot) -> bool {
        self.storing.contains_key(&slot)
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
        self.storing.get(&slot).copied().flatten()
    }

    /// Takes the pages that are to be invalidated, and not in use again.
    pub(crate) fn take_invalid(&mut self) -> Vec<u64> {
        let invalid = std::mem::take(&mut self.invalid).into_iter();
        invalid.filter(|slot| self.users[slot.0 as usize] == 0).map(|slot| self.page(slot)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_free_when_its_last_user_releases_it() {
        let mut slots = Slots::new(1);
        let slot = slots.allocate(|_| true).unwrap();
        assert_eq!(slots.allocate(|_| true), None);
        slots.share(slot);
        slots.release(slot);
        assert!(slots.is_exclusive(slot) && slots.take_invalid().is_empty());
        slots.release(slot);
        assert_eq!(slots.take_invalid(), [0]);
        assert_eq!(slots.allocate(|_| true), Some(slot));
    }

    #[test]
    fn a_slot_that_is_being_stored_is_freed_afterwards() {
        let mut slots = Slots::new(1);
        let slot = slots.allocate(|_| true).unwrap();
        slots.begin_store(slot, 5);
        assert_eq!(slots.stored_buffer(slot), Some(5));
        slots.release(slot);
        assert!(slots.allocate(|_| true).is_none() && !slots.end_store(slot));
        assert_eq!(slots.allocate(|_| true), Some(slot));
        // It is in use again: its page must not be invalidated.
        assert!(slots.take_invalid().is_empty());
    }

    #[test]
    fn slots_have_pages_that_the_store_accepts() {
        let mut slots = Slots::new(4);
        let [first, second] = [0; 2].map(|_| slots.allocate(|_| true).unwrap());
        // The even pages are lost.
        let accepts = |page: u64| page % 2 == 1;
        slots.relocate(first, accepts);
        assert_eq!((slots.page(first), slots.page(second)), (3, 1));
        assert_eq!(slots.allocate(accepts), None);
        slots.release(second);
        assert_eq!(slots.take_invalid(), [1]);
        assert_eq!(slots.allocate(accepts), Some(second));
        // Their node has room again.
        let more: Vec<_> = (0..3).map(|_| slots.allocate(|_| true).map(|slot| slots.page(slot))).collect();
        assert_eq!((more[0].is_some() && more[1].is_some(), more[2]), (true, None));
    }
}
