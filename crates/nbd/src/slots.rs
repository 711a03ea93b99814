//! Slots: pages on their way to and from far memory, and the order of changes of one page.
//!
//! A write of a part of a page is a load and a store. Between them no other change of the page may begin, or it would be
//! undone; so changes of a page wait for one another, in the order of their requests. Loads of READs wait for nothing: what
//! a read returns that overlaps a write in flight is not defined.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::queue::Operation;

/// What a slot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Free,
    /// Its page is loaded for a READ.
    Reading,
    /// Its content is to become the page.
    Storing,
    /// Its content is to become a part of the page, whose rest is loaded into the slot `rest`.
    Merging {
        begin: u16,
        end: u16,
        rest: usize,
    },
    /// It receives the page that is merged with the slot `change`.
    Rest {
        change: usize,
    },
    /// Its page is freed.
    Invalidating,
}

#[derive(Clone, Copy, Debug)]
pub struct Slot {
    pub step: Step,
    pub page: u64,
    /// The request, by its index.
    pub request: usize,
    /// The page is stored nowhere, so its content is zeros and not that of the slot.
    pub is_absent: bool,
    /// For a change, the next change of the page; for a page that was read, the next page of the request.
    pub next: Option<usize>,
}

const FREE: Slot = Slot { step: Step::Free, page: 0, request: 0, is_absent: false, next: None };

/// All slots of a device. Each connection has slots of its own, so that a client that takes no replies keeps none from
/// others.
pub struct Slots {
    slots: Vec<Slot>,
    /// The free slots of each connection.
    free: Vec<Vec<usize>>,
    per_connection: usize,
    /// Pages with a change in flight, and the last change of each.
    changing: HashMap<u64, usize>,
    /// Operations that are to be submitted.
    pub ready: Vec<Operation>,
}

impl Slots {
    pub fn new(connections: usize, per_connection: usize) -> Slots {
        let count = connections * per_connection;
        let of_connection = |index: usize| index * per_connection..(index + 1) * per_connection;
        Slots {
            slots: vec![FREE; count],
            free: (0..connections).map(|index| of_connection(index).collect()).collect(),
            per_connection,
            changing: HashMap::with_capacity(2 * count),
            ready: Vec::with_capacity(count),
        }
    }

    pub fn free_count(&self, connection: usize) -> usize {
        self.free[connection].len()
    }

    pub fn is_idle(&self, connection: usize) -> bool {
        self.free[connection].len() == self.per_connection
    }

    pub fn take(&mut self, connection: usize, request: usize, page: u64, step: Step) -> Option<usize> {
        let index = self.free[connection].pop()?;
        self.slots[index] = Slot { step, page, request, is_absent: false, next: None };
        Some(index)
    }

    pub fn free(&mut self, index: usize) {
        self.slots[index].step = Step::Free;
        self.free[index / self.per_connection].push(index);
    }

    pub fn get(&self, index: usize) -> &Slot {
        &self.slots[index]
    }

    pub fn get_mut(&mut self, index: usize) -> &mut Slot {
        &mut self.slots[index]
    }

    /// Makes the operation of a slot ready, if it is a change after those of the same page.
    pub fn begin(&mut self, index: usize) {
        let Slot { step, page, .. } = self.slots[index];
        if step == Step::Reading {
            return self.ready.push(Operation::Load { page, slot: index });
        }
        match self.changing.entry(page) {
            Entry::Vacant(entry) => {
                entry.insert(index);
                self.begin_change(index);
            }
            Entry::Occupied(mut entry) => {
                let last = entry.insert(index);
                self.slots[last].next = Some(index);
            }
        }
    }

    fn begin_change(&mut self, index: usize) {
        let Slot { step, page, .. } = self.slots[index];
        self.ready.push(match step {
            Step::Merging { rest, .. } => Operation::Load { page, slot: rest },
            Step::Invalidating => Operation::Invalidate { page, slot: index },
            _ => Operation::Store { page, slot: index },
        });
    }

    /// Makes the store of a merged page ready.
    pub fn begin_store(&mut self, index: usize) {
        self.slots[index].step = Step::Storing;
        self.begin_change(index);
    }

    /// Ends a change: frees its slot, and begins the next change of the page.
    pub fn end_change(&mut self, index: usize) {
        let Slot { page, next, .. } = self.slots[index];
        self.free(index);
        match next {
            Some(next) => self.begin_change(next),
            None => drop(self.changing.remove(&page)),
        }
    }

    /// Whether a change of the page is in flight.
    pub fn is_changing(&self, page: u64) -> bool {
        self.changing.contains_key(&page)
    }
}
