//! The regions that exist, by identifiers that are never reused.
//!
//! Clients' accesses and callers hold a region for longer than it is served. A mere index could then name another
//! region.

use std::ops::{Index, IndexMut};

use slab::Slab;

/// Identifies a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionId {
    index: usize,
    /// Counts the added regions.
    number: u64,
}

/// Regions, or the state of each.
#[derive(Debug)]
pub(crate) struct Regions<T> {
    slots: Slab<(u64, T)>,
    added_so_far: u64,
}

impl<T> Default for Regions<T> {
    fn default() -> Self {
        Regions { slots: Slab::new(), added_so_far: 0 }
    }
}

impl<T> Regions<T> {
    /// Adds a region. `make` returns its state and a value for the caller.
    pub(crate) fn add<R>(&mut self, make: impl FnOnce(RegionId) -> (T, R)) -> R {
        self.added_so_far += 1;
        let slot = self.slots.vacant_entry();
        let (state, made) = make(RegionId { index: slot.key(), number: self.added_so_far });
        slot.insert((self.added_so_far, state));
        made
    }

    /// `None` once the region is removed.
    pub(crate) fn get(&self, id: RegionId) -> Option<&T> {
        self.slots.get(id.index).filter(|(number, _)| *number == id.number).map(|(_, state)| state)
    }

    /// `None` once the region is removed.
    pub(crate) fn get_mut(&mut self, id: RegionId) -> Option<&mut T> {
        self.slots.get_mut(id.index).filter(|(number, _)| *number == id.number).map(|(_, state)| state)
    }

    /// Removes a region, if it exists.
    pub(crate) fn remove(&mut self, id: RegionId) {
        if self.get(id).is_some() {
            self.slots.remove(id.index);
        }
    }
}

/// For callers that know that the region exists: an access is under way.
impl<T> Index<RegionId> for Regions<T> {
    type Output = T;

    fn index(&self, id: RegionId) -> &T {
        self.get(id).expect("a region with an access under way is there")
    }
}

impl<T> IndexMut<RegionId> for Regions<T> {
    fn index_mut(&mut self, id: RegionId) -> &mut T {
        self.get_mut(id).expect("a region with an access under way is there")
    }
}
