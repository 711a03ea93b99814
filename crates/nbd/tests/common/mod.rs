//! Pages in this process's memory as a queue, whose operations end out of order and fail on demand.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use terrace_far_memory::{PAGE_BYTES, Page, PageError};
use terrace_nbd::{CONNECTIONS_MAX, Ended, Operation, PageQueue, slot_count};

/// What the memory does, from any thread.
#[derive(Debug, Default)]
pub struct Control {
    /// All operations fail as if the node were lost.
    pub is_lost: AtomicBool,
    /// Pages that can be stored at a time; 0 for any number.
    pub capacity: AtomicU64,
    /// No operation ends.
    pub is_stopped: AtomicBool,
    pub stored_pages: AtomicU64,
    /// The most operations that were in flight.
    pub in_flight_max: AtomicU64,
}

/// Pages in memory.
pub struct MemoryQueue {
    page_count: u64,
    pages: HashMap<u64, Box<Page>>,
    slots: Vec<Page>,
    in_flight: Vec<Operation>,
    depth: usize,
    rng: SmallRng,
    control: Arc<Control>,
}

impl MemoryQueue {
    /// A queue that takes up to `depth` operations at a time.
    pub fn new(page_count: u64, depth: usize, seed: u64) -> (MemoryQueue, Arc<Control>) {
        let control = Arc::new(Control::default());
        let queue = MemoryQueue {
            page_count,
            pages: HashMap::new(),
            slots: vec![[0; PAGE_BYTES]; slot_count(CONNECTIONS_MAX)],
            in_flight: Vec::new(),
            depth,
            rng: SmallRng::seed_from_u64(seed),
            control: control.clone(),
        };
        (queue, control)
    }

    fn carry_out(&mut self, operation: Operation) -> Result<(), PageError> {
        let (Operation::Load { page, .. }
        | Operation::Store { page, .. }
        | Operation::Invalidate { page, .. }) = operation;
        assert!(page < self.page_count);
        if self.control.is_lost.load(Ordering::Relaxed) {
            return Err(PageError::NodeLost(page));
        }
        match operation {
            Operation::Load { page, slot } => {
                // Nobody may use what is in the buffer after a failure.
                self.slots[slot] = [0xa5; PAGE_BYTES];
                self.slots[slot] = **self.pages.get(&page).ok_or(PageError::NotStored(page))?;
            }
            Operation::Store { page, slot } => {
                let capacity = self.control.capacity.load(Ordering::Relaxed);
                let is_new = !self.pages.contains_key(&page);
                if is_new && capacity > 0 && self.pages.len() as u64 >= capacity {
                    return Err(PageError::PoolEmpty);
                }
                self.pages.insert(page, Box::new(self.slots[slot]));
            }
            Operation::Invalidate { page, .. } => drop(self.pages.remove(&page)),
        }
        self.control.stored_pages.store(self.pages.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

fn page_of(operation: &Operation) -> u64 {
    let (Operation::Load { page, .. } | Operation::Store { page, .. } | Operation::Invalidate { page, .. }) =
        operation;
    *page
}

impl PageQueue for MemoryQueue {
    fn page_count(&self) -> u64 {
        self.page_count
    }

    fn is_stored(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    fn read_slot(&self, slot: usize, into: &mut Page) -> Result<(), PageError> {
        *into = *self.slots.get(slot).ok_or(PageError::Buffer)?;
        Ok(())
    }

    fn write_slot(&mut self, slot: usize, from: &Page) -> Result<(), PageError> {
        *self.slots.get_mut(slot).ok_or(PageError::Buffer)? = *from;
        Ok(())
    }

    fn submit(&mut self, operations: &[Operation]) -> usize {
        let count = operations.len().min(self.depth - self.in_flight.len());
        self.in_flight.extend_from_slice(&operations[..count]);
        self.control.in_flight_max.fetch_max(self.in_flight.len() as u64, Ordering::Relaxed);
        count
    }

    /// Ends some operations in any order, except that those of one page end in theirs.
    fn poll(&mut self, ended: &mut Vec<Ended>) {
        if self.control.is_stopped.load(Ordering::Relaxed) {
            return;
        }
        for _ in 0..self.in_flight.len().min(8) {
            let chosen = self.rng.random_range(0..self.in_flight.len());
            let page = page_of(&self.in_flight[chosen]);
            let is_same = |operation: &Operation| page_of(operation) == page;
            let first = self.in_flight.iter().position(is_same).expect("at least the chosen one");
            let operation = self.in_flight.remove(first);
            let (Operation::Load { slot, .. }
            | Operation::Store { slot, .. }
            | Operation::Invalidate { slot, .. }) = operation;
            let result = self.carry_out(operation);
            ended.push(Ended { slot, result });
        }
    }
}
