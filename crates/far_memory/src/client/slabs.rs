//! The memory that the node of a one-sided baseline has given a client. Slab `n` has the pages from `n` times its length. It
//! is reserved with the first store into it, and released with its last page.

use std::collections::HashMap;

use super::transport::Call;
use crate::messages::SlabKey;
use crate::page_store::PAGE_BYTES;

enum Slab {
    /// The stores that wait for it.
    Reserving(Vec<Call>),
    Held {
        key: SlabKey,
        page_count: u64,
    },
}

/// What a store of a new page has to do first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// Nothing.
    Held,
    /// The slab is to be reserved; the store waits for that.
    Reserve { slab: u64 },
    /// It waits for the slab with others.
    Waits,
}

/// A client's slabs.
pub(super) struct Slabs {
    /// Pages of a slab; `None` if the whole space is one, which is never released.
    slab_pages: Option<u64>,
    slabs: HashMap<u64, Slab>,
}

impl Slabs {
    pub fn new(slab_pages: Option<u64>) -> Slabs {
        Slabs { slab_pages, slabs: HashMap::new() }
    }

    fn slab_of(&self, index: u64) -> u64 {
        self.slab_pages.map_or(0, |pages| index / pages)
    }

    /// Notes that the node has given a slab that no store waits for.
    pub fn add_slab(&mut self, slab: u64, key: SlabKey) {
        self.slabs.insert(slab, Slab::Held { key, page_count: 0 });
    }

    /// Takes a page for a store.
    pub fn take_page(&mut self, call: Call) -> Taken {
        let slab = self.slab_of(call.index);
        match self.slabs.get_mut(&slab) {
            Some(Slab::Held { page_count, .. }) => {
                *page_count += 1;
                Taken::Held
            }
            Some(Slab::Reserving(waiting)) => {
                waiting.push(call);
                Taken::Waits
            }
            None => {
                self.slabs.insert(slab, Slab::Reserving(vec![call]));
                Taken::Reserve { slab }
            }
        }
    }

    /// Notes what the node says of a slab that was to be reserved, and returns the stores that have waited for it.
    pub fn reserved(&mut self, slab: u64, key: Option<SlabKey>) -> Vec<Call> {
        let Some(Slab::Reserving(waiting)) = self.slabs.remove(&slab) else { return Vec::new() };
        if let Some(key) = key {
            self.slabs.insert(slab, Slab::Held { key, page_count: waiting.len() as u64 });
        }
        waiting
    }

    /// Gives a page back. Returns the slab if that was its last page, and the slab is to be released.
    pub fn return_page(&mut self, index: u64) -> Option<u64> {
        let slab = self.slab_of(index);
        let Some(Slab::Held { page_count, .. }) = self.slabs.get_mut(&slab) else { return None };
        *page_count -= 1;
        if *page_count > 0 || self.slab_pages.is_none() {
            return None;
        }
        self.slabs.remove(&slab);
        Some(slab)
    }

    /// Where a page is, for READs and WRITEs.
    pub fn locate(&self, index: u64) -> Option<SlabKey> {
        let offset = self.slab_pages.map_or(index, |pages| index % pages) * PAGE_BYTES as u64;
        match self.slabs.get(&self.slab_of(index))? {
            Slab::Held { key, .. } => Some(SlabKey { addr: key.addr.wrapping_add(offset), rkey: key.rkey }),
            Slab::Reserving(_) => None,
        }
    }

    /// Takes the stores back that wait.
    pub fn abandon(&mut self) -> impl Iterator<Item = Call> {
        self.slabs.drain().flat_map(|(_, slab)| match slab {
            Slab::Reserving(waiting) => waiting,
            Slab::Held { .. } => Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: SlabKey = SlabKey { addr: 1 << 20, rkey: 7 };

    fn store(index: u64) -> Call {
        Call { operation: index as usize, index, page: None }
    }

    #[test]
    fn a_slab_is_reserved_once_and_released_with_its_last_page() {
        let mut slabs = Slabs::new(Some(4));
        assert_eq!(slabs.take_page(store(5)), Taken::Reserve { slab: 1 });
        assert_eq!(slabs.take_page(store(7)), Taken::Waits);
        assert_eq!(slabs.locate(5), None);
        let waiting: Vec<u64> = slabs.reserved(1, Some(KEY)).iter().map(|call| call.index).collect();
        assert_eq!(waiting, [5, 7]);
        assert_eq!(slabs.take_page(store(4)), Taken::Held);
        assert_eq!(slabs.locate(7), Some(SlabKey { addr: KEY.addr + 3 * 4096, rkey: 7 }));
        assert_eq!([5, 4, 7].map(|index| slabs.return_page(index)), [None, None, Some(1)]);
        assert_eq!(slabs.take_page(store(5)), Taken::Reserve { slab: 1 });
    }

    #[test]
    fn stores_that_wait_for_a_slab_are_returned_when_it_is_refused_or_its_node_is_lost() {
        let mut slabs = Slabs::new(Some(1));
        slabs.take_page(store(0));
        assert_eq!(slabs.reserved(0, None).len(), 1);
        assert_eq!(slabs.take_page(store(0)), Taken::Reserve { slab: 0 });
        slabs.add_slab(3, KEY);
        assert_eq!(slabs.abandon().count(), 1);
    }

    #[test]
    fn a_whole_space_is_never_released() {
        let mut slabs = Slabs::new(None);
        slabs.add_slab(0, KEY);
        assert_eq!(slabs.take_page(store(9)), Taken::Held);
        assert_eq!(slabs.locate(9), Some(SlabKey { addr: KEY.addr + 9 * 4096, rkey: 7 }));
        assert_eq!(slabs.return_page(9), None);
        assert_eq!(slabs.take_page(store(9)), Taken::Held);
    }
}
