//! The regions that there are, by names that are never given twice.
//!
//! Whoever holds a region does so for longer than it is served: the thread that moves units, a client's access, a caller. A mere
//! index would name another region by then.

use std::ops::{Index, IndexMut};

use slab::Slab;

/// Names a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionId {
    index: usize,
    /// Counts the regions that were added.
    number: u64,
}

/// Regions, or what there is to know of each.
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
    /// Adds a region, of which `make` makes what there is to know and what the caller wants.
    pub(crate) fn add<R>(&mut self, make: impl FnOnce(RegionId) -> (T, R)) -> R {
        self.added_so_far += 1;
        let slot = self.slots.vacant_entry();
        let (state, made) = make(RegionId { index: slot.key(), number: self.added_so_far });
        slot.insert((self.added_so_far, state));
        made
    }

    /// `None` once it was removed.
    pub(crate) fn get(&self, id: RegionId) -> Option<&T> {
        self.slots.get(id.index).filter(|(number, _)| *number == id.number).map(|(_, state)| state)
    }

    /// `None` once it was removed.
    pub(crate) fn get_mut(&mut self, id: RegionId) -> Option<&mut T> {
        self.slots.get_mut(id.index).filter(|(number, _)| *number == id.number).map(|(_, state)| state)
    }

    /// Removes a region that is there.
    pub(crate) fn remove(&mut self, id: RegionId) {
        if self.get(id).is_some() {
            self.slots.remove(id.index);
        }
    }
}

/// For whoever knows that the region is there: part of an access to it is under way, or one of its units moves.
impl<T> Index<RegionId> for Regions<T> {
    type Output = T;

    fn index(&self, id: RegionId) -> &T {
        self.get(id).expect("a region with an access or a move under way is there")
    }
}

impl<T> IndexMut<RegionId> for Regions<T> {
    fn index_mut(&mut self, id: RegionId) -> &mut T {
        self.get_mut(id).expect("a region with an access or a move under way is there")
    }
}
