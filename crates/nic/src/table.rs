//! Queue pair numbers.

use std::sync::Arc;

use rand::Rng;
use terrace_shm::KeyedPermutation;
use terrace_sync::{RwLock, RwLockReadGuard};
use terrace_wire::QPN_INSTANCE_SHIFT;

use crate::error::Error;

/// Indexes below this one belong to the management queue pairs of InfiniBand.
const FIRST_INDEX: u32 = 2;
const INDEX_COUNT: u32 = 1 << QPN_INSTANCE_SHIFT;
/// The last index is not used: that of the last instance would be the multicast queue pair's.
const LAST_INDEX: u32 = INDEX_COUNT - 1;
const LEAF_BITS: u32 = 8;
const LEAF_SIZE: usize = 1 << LEAF_BITS;

/// Rounds of the permutation of indexes: there are few indexes, and a peer may learn many.
const ROUNDS: usize = 12;

/// The queue pairs of a device by number: the process's instance index in the upper bits, an index in the lower ones.
pub(crate) struct QpTable<Q> {
    instance: u8,
    entries: RwLock<Entries<Q>>,
}

type Leaf<Q> = Box<[Option<Arc<Q>>; LEAF_SIZE]>;

/// Two levels, so that a device with few queue pairs needs little memory.
pub(crate) struct Entries<Q> {
    leaves: Vec<Option<Leaf<Q>>>,
    /// The order in which indexes are used: a peer cannot derive other queue pairs' numbers from that of its own.
    order: KeyedPermutation<{ 1 << (QPN_INSTANCE_SHIFT / 2) }>,
    /// Where in that order the search for a free index continues. Indexes are reused as late as possible, so that
    /// packets of a destroyed queue pair reach no other.
    next: u32,
    used: u32,
}

impl<Q> QpTable<Q> {
    /// An empty table; the order of its numbers is drawn from `rng`.
    pub fn new(instance: u8, rng: &mut impl Rng) -> QpTable<Q> {
        let leaves = (0..INDEX_COUNT >> LEAF_BITS).map(|_| None).collect();
        let order = KeyedPermutation::new(ROUNDS, rng);
        QpTable { instance, entries: RwLock::new(Entries { leaves, order, next: 0, used: 0 }) }
    }

    /// Makes a queue pair under a number of its own and adds it.
    pub fn insert(&self, make: impl FnOnce(u32) -> Result<Arc<Q>, Error>) -> Result<Arc<Q>, Error> {
        let mut entries = self.entries.write();
        if entries.used >= LAST_INDEX - FIRST_INDEX {
            return Err(Error::NoMemory("queue pair numbers"));
        }
        let index = entries.next_free();
        let qp = make(u32::from(self.instance) << QPN_INSTANCE_SHIFT | index)?;
        *entries.slot_of(index) = Some(qp.clone());
        entries.used += 1;
        Ok(qp)
    }

    /// Removes a queue pair. Packets may still be handled for it, until a thread with its lock marks it as dead.
    pub fn remove(&self, qpn: u32) {
        let mut entries = self.entries.write();
        if entries.slot_of(qpn & (INDEX_COUNT - 1)).take().is_some() {
            entries.used -= 1;
        }
    }

    /// For the lookups of a burst of packets.
    pub fn read(&self) -> TableReader<'_, Q> {
        TableReader { instance: self.instance, entries: self.entries.read() }
    }

    /// Every queue pair, in the order of their numbers.
    pub fn all(&self) -> Vec<Arc<Q>> {
        self.entries.read().leaves.iter().flatten().flat_map(|leaf| leaf.iter().flatten().cloned()).collect()
    }
}

/// A table under its read lock.
pub(crate) struct TableReader<'a, Q> {
    instance: u8,
    entries: RwLockReadGuard<'a, Entries<Q>>,
}

impl<Q> TableReader<'_, Q> {
    /// The queue pair of that number.
    pub fn get(&self, qpn: u32) -> Option<&Arc<Q>> {
        if qpn >> QPN_INSTANCE_SHIFT != u32::from(self.instance) {
            return None;
        }
        self.entries.get(qpn & (INDEX_COUNT - 1))
    }
}

impl<Q> Entries<Q> {
    /// The next free index in the order. There must be one.
    fn next_free(&mut self) -> u32 {
        loop {
            let index = self.order.outward(self.next);
            self.next = (self.next + 1) % INDEX_COUNT;
            if (FIRST_INDEX..LAST_INDEX).contains(&index) && self.get(index).is_none() {
                return index;
            }
        }
    }

    fn get(&self, index: u32) -> Option<&Arc<Q>> {
        let leaf = self.leaves.get((index >> LEAF_BITS) as usize)?.as_ref()?;
        leaf[index as usize % LEAF_SIZE].as_ref()
    }

    fn slot_of(&mut self, index: u32) -> &mut Option<Arc<Q>> {
        let leaf = self.leaves[(index >> LEAF_BITS) as usize]
            .get_or_insert_with(|| Box::new([const { None }; LEAF_SIZE]));
        &mut leaf[index as usize % LEAF_SIZE]
    }
}
