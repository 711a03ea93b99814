//! What all processes of a run share: frames within the local budget, the backing store and its buffers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use terrace_hostmem::PAGE_BYTES;
use terrace_vm::{BATCH_PAGES, BackingStore, Completion, PageBytes, Transfer};

use crate::slots::{Slot, Slots};

/// Programs with less make no progress.
const LIMIT_MIN: u64 = 2 * BATCH_PAGES as u64;
/// A failed store is submitted again after this time.
const STORE_RETRY: Duration = Duration::from_millis(50);

/// What a buffer of the store is used for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BufferUse {
    /// A page is loaded for a process.
    Load { process: u64, addr: u64 },
    /// A page is stored.
    Store { slot: Slot },
}

/// Frames, slots and buffers.
pub(crate) struct Memory {
    pub(crate) store: Box<dyn BackingStore>,
    pub(crate) slots: Slots,
    /// By buffer; `None` if it is free.
    uses: Vec<Option<BufferUse>>,
    free_buffers: Vec<usize>,
    /// How many of the free buffers are kept for pages that were asked to leave a short time ago.
    pub(crate) promised: usize,
    /// Bytes whose stores have failed, and when the last one did, or was tried last. They leave the buffers to other pages: a full
    /// node may have no room for long.
    failed_stores: HashMap<Slot, Box<PageBytes>>,
    failed_at: Option<Instant>,
    /// Pages that all memory of the processes may have.
    budget: u64,
    /// Frames beyond the budget, which threads got because no page could leave.
    excess: u64,
    /// Pages that may be in memory: the budget without memory that is not paged, and the excess.
    limit: u64,
    /// Pages that are in memory or on their way there.
    used: u64,
    /// Pages that have left, modulo 2^32.
    pub(crate) evictions: u32,
    /// Pages that were loaded ahead of time, and are in buffers.
    pub(crate) markers: usize,
    /// Whether pages are loaded ahead of time.
    pub(crate) prefetches: bool,
    pub(crate) statistics: Statistics,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Faults that the kernel reported.
    pub faults: u64,
    /// Pages of zeros that were put in memory.
    pub zeros: u64,
    /// Pages that were loaded from the backing store.
    pub loads: u64,
    /// Pages that were stored there.
    pub stores: u64,
    /// Pages that left memory without a store, because the store had the same bytes or they were zeros.
    pub drops: u64,
    /// Loads that failed: their owners get SIGBUS.
    pub losses: u64,
    /// Loads of pages that no thread waited for.
    pub prefetches: u64,
    /// Those of them that were used, as far as later faults prove it.
    pub prefetches_used: u64,
    /// Those of them after which other faults than the expected ones followed.
    pub prefetches_wasted: u64,
}

impl Memory {
    pub(crate) fn new(store: Box<dyn BackingStore>, local_bytes: u64) -> Memory {
        let buffer_count = store.buffer_count();
        let slots = Slots::new(store.page_count());
        // The store's buffers and those of evictions are a part of the budget.
        let own_pages = (buffer_count + BATCH_PAGES) as u64;
        let limit = (local_bytes / PAGE_BYTES).saturating_sub(own_pages).max(LIMIT_MIN);
        Memory {
            store,
            slots,
            uses: vec![None; buffer_count],
            free_buffers: (0..buffer_count).collect(),
            promised: 0,
            failed_stores: HashMap::new(),
            failed_at: None,
            budget: limit,
            excess: 0,
            limit,
            used: 0,
            evictions: 0,
            markers: 0,
            prefetches: true,
            statistics: Statistics::default(),
        }
    }

    /// Takes a frame; returns false if the budget is used up.
    pub(crate) fn take_frame(&mut self) -> bool {
        let is_free = self.used < self.limit;
        self.used += u64::from(is_free);
        is_free
    }

    /// Takes a frame for a page that no thread waits for; returns false if faults may need it.
    pub(crate) fn take_frame_ahead(&mut self) -> bool {
        let is_free =
            self.free_frames() > self.reserve() / 2 && self.free_buffers_for_loads() > self.uses.len() / 2;
        is_free && self.take_frame()
    }

    /// Whether one page more may stay in its buffer.
    pub(crate) fn may_mark(&self) -> bool {
        self.markers < self.uses.len() / 8
    }

    /// Whether a page that was evicted at that time came back soon.
    pub(crate) fn is_hot(&self, evicted_at: u32) -> bool {
        u64::from(self.evictions.wrapping_sub(evicted_at)) < self.limit
    }

    /// Counts frames that a process has taken without asking.
    pub(crate) fn count_frames(&mut self, count: u64) {
        self.used += count;
    }

    /// Returns frames. Half of them reduce the excess: threads have the others, so that they go on meanwhile.
    pub(crate) fn release_frames(&mut self, count: u64) {
        debug_assert!(count <= self.used, "released frames were taken");
        self.used = self.used.saturating_sub(count);
        let returned = count.div_ceil(2).min(self.excess);
        self.excess -= returned;
        self.limit -= returned;
    }

    /// Frames that can be taken.
    pub(crate) fn free_frames(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }

    /// Pages that are to leave, so that the next faults find frames. A request to leave costs a wake of the process's thread, and
    /// faults wait for its end: so many pages leave at a time.
    pub(crate) fn pages_to_evict(&self) -> u64 {
        let within_budget = self.limit - self.excess;
        match self.used.saturating_sub(within_budget - self.reserve()) {
            0 => 0,
            over => over.max((within_budget / 8).min(BATCH_PAGES as u64)),
        }
    }

    /// Frames that are to be free.
    fn reserve(&self) -> u64 {
        let within_budget = self.limit - self.excess;
        (within_budget / 32).clamp(BATCH_PAGES as u64, 4096).min(within_budget / 2)
    }

    /// Leaves frames for memory that is not paged.
    pub(crate) fn set_unpaged(&mut self, pages: u64) {
        self.limit = self.budget.saturating_sub(pages).max(LIMIT_MIN) + self.excess;
    }

    /// Pages that may be in memory, and those that are.
    pub(crate) fn frames(&self) -> (u64, u64) {
        (self.limit, self.used)
    }

    /// Gives more frames than the budget has: no page can leave, and threads wait.
    pub(crate) fn exceed_limit(&mut self) {
        self.excess += BATCH_PAGES as u64;
        self.limit += BATCH_PAGES as u64;
    }

    /// A slot with room for its bytes, as far as the store knows.
    pub(crate) fn allocate_slot(&mut self) -> Option<Slot> {
        self.slots.allocate(|page| self.store.accepts(page))
    }

    /// The bytes of a slot that are not in the store yet.
    pub(crate) fn unstored_bytes(&self, slot: Slot) -> Option<&PageBytes> {
        let in_buffer = || self.slots.stored_buffer(slot).map(|buffer| self.store.buffer(buffer));
        self.failed_stores.get(&slot).map(Box::as_ref).or_else(in_buffer)
    }

    /// Whether the bytes of a slot are here, or can be loaded.
    pub(crate) fn can_load(&self, slot: Slot) -> bool {
        self.slots.is_storing(slot) || self.store.can_load(self.slots.page(slot))
    }

    /// Whether the store has room for the bytes of a slot.
    pub(crate) fn accepts(&self, slot: Slot) -> bool {
        self.store.accepts(self.slots.page(slot))
    }

    /// The number of free buffers for stores. Some are kept for loads.
    pub(crate) fn free_store_buffers(&self) -> usize {
        self.free_buffers.len().saturating_sub(self.uses.len() / 4 + self.promised)
    }

    /// Whether pages wait in memory because no node has had room for them.
    pub(crate) fn has_failed_stores(&self) -> bool {
        !self.failed_stores.is_empty()
    }

    /// How many pages may be asked to leave that have to be stored. Those whose stores have failed count: they are memory here.
    pub(crate) fn store_buffers_for_victims(&self) -> usize {
        self.free_store_buffers().saturating_sub(self.failed_stores.len())
    }

    /// The number of free buffers that are not promised to stores.
    fn free_buffers_for_loads(&self) -> usize {
        self.free_buffers.len().saturating_sub(self.promised)
    }

    /// Begins to load a page; returns the buffer, or `None` if all are in use or promised.
    pub(crate) fn begin_load(&mut self, process: u64, addr: u64, slot: Slot) -> Option<usize> {
        if self.free_buffers_for_loads() == 0 {
            return None;
        }
        let buffer = self.free_buffers.pop()?;
        self.uses[buffer] = Some(BufferUse::Load { process, addr });
        self.store.submit(Transfer::Load, self.slots.page(slot), buffer);
        self.statistics.loads += 1;
        Some(buffer)
    }

    /// Begins to store a page, in a buffer that was promised to it until now.
    pub(crate) fn begin_store(&mut self, slot: Slot, bytes: &PageBytes) {
        self.submit_store(slot, bytes);
        self.statistics.stores += 1;
    }

    fn submit_store(&mut self, slot: Slot, bytes: &PageBytes) {
        let buffer = self.free_buffers.pop().expect("the caller has looked for a free buffer");
        self.store.buffer_mut(buffer).copy_from_slice(bytes);
        self.uses[buffer] = Some(BufferUse::Store { slot });
        self.slots.begin_store(slot, buffer);
        self.store.submit(Transfer::Store, self.slots.page(slot), buffer);
    }

    /// Frees a buffer whose transfer has ended.
    pub(crate) fn release_buffer(&mut self, buffer: usize) {
        debug_assert!(!self.free_buffers.contains(&buffer), "a buffer is released once");
        self.free_buffers.push(buffer);
    }

    /// Whether transfers or invalidations are under way, and whether threads wait for one of them.
    pub(crate) fn transfers(&self) -> (bool, bool) {
        let uses = || self.uses.iter().flatten();
        let has_transfers = uses().next().is_some() || self.store.is_invalidating();
        (has_transfers, uses().any(|used| matches!(used, BufferUse::Load { .. })))
    }

    /// The transfers that have ended. Those of stores are handled.
    pub(crate) fn poll(&mut self, timeout: Duration) -> Vec<(Completion, u64, u64)> {
        let mut completions = Vec::new();
        self.store.poll(&mut completions, timeout);
        let mut loads = Vec::new();
        for completion in completions {
            match self.uses.get_mut(completion.buffer).and_then(Option::take) {
                Some(BufferUse::Load { process, addr }) => loads.push((completion, process, addr)),
                Some(BufferUse::Store { slot }) => self.end_store(slot, completion),
                None => tracing::error!(buffer = completion.buffer, "a transfer ended twice"),
            }
        }
        self.retry_stores();
        let invalid = self.slots.take_invalid();
        if !invalid.is_empty() {
            self.store.invalidate(&invalid);
        }
        loads
    }

    fn end_store(&mut self, slot: Slot, completion: Completion) {
        if completion.result.is_err() && self.failed_at.is_none() {
            tracing::warn!(error = ?completion.result, "a page cannot be stored; the pager tries again");
        }
        match completion.result {
            Ok(()) => {
                self.slots.end_store(slot);
            }
            // Its bytes are nowhere else.
            Err(_) => {
                self.slots.fail_store(slot);
                self.failed_stores.insert(slot, Box::new(*self.store.buffer(completion.buffer)));
                self.failed_at = Some(Instant::now());
            }
        }
        self.release_buffer(completion.buffer);
    }

    /// The time at which stores that failed are submitted again.
    pub(crate) fn next_store(&self) -> Option<Instant> {
        self.failed_at.map(|at| at + STORE_RETRY)
    }

    fn retry_stores(&mut self) {
        if self.next_store().is_none_or(|at| Instant::now() < at) {
            return;
        }
        for (slot, bytes) in std::mem::take(&mut self.failed_stores) {
            if !self.accepts(slot) {
                self.slots.relocate(slot, |page| self.store.accepts(page));
            }
            match self.accepts(slot) && self.free_store_buffers() > 0 {
                true => self.submit_store(slot, &bytes),
                false => drop(self.failed_stores.insert(slot, bytes)),
            }
        }
        self.failed_at = (!self.failed_stores.is_empty()).then(Instant::now);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use terrace_vm::FileStore;

    use super::*;

    #[test]
    fn promised_buffers_are_kept_for_stores() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 8).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let slot = memory.allocate_slot().unwrap();
        assert_eq!(memory.free_store_buffers(), 6);
        memory.promised = 6;
        assert_eq!(memory.free_store_buffers(), 0);
        assert!((0..2).all(|_| memory.begin_load(1, 0, slot).is_some()));
        assert!(memory.begin_load(1, 0, slot).is_none());
        memory.promised = 0;
        (0..6).for_each(|_| {
            let slot = memory.allocate_slot().unwrap();
            memory.begin_store(slot, &[1; PAGE_BYTES as usize]);
        });
        assert!(memory.begin_load(1, 0, slot).is_none());
    }

    /// Pages of which the even ones are on a node that is lost, if that is set.
    pub(crate) struct HalfLost(pub(crate) FileStore, pub(crate) Arc<AtomicBool>);

    impl HalfLost {
        /// The node is lost.
        pub(crate) fn new(store: FileStore) -> HalfLost {
            HalfLost(store, Arc::new(AtomicBool::new(true)))
        }

        fn has(&self, page: u64) -> bool {
            page % 2 == 1 || !self.1.load(Ordering::Relaxed)
        }
    }

    impl BackingStore for HalfLost {
        fn page_count(&self) -> u64 {
            self.0.page_count()
        }

        fn buffer_count(&self) -> usize {
            self.0.buffer_count()
        }

        fn buffer(&self, buffer: usize) -> &PageBytes {
            self.0.buffer(buffer)
        }

        fn buffer_mut(&mut self, buffer: usize) -> &mut PageBytes {
            self.0.buffer_mut(buffer)
        }

        fn can_load(&self, page: u64) -> bool {
            self.has(page)
        }

        fn accepts(&self, page: u64) -> bool {
            self.has(page)
        }

        fn submit(&mut self, transfer: Transfer, page: u64, buffer: usize) {
            // A page out of the file's range: its load fails.
            let (transfer, page) =
                if self.has(page) { (transfer, page) } else { (Transfer::Load, u64::MAX >> 20) };
            self.0.submit(transfer, page, buffer);
        }

        fn invalidate(&mut self, pages: &[u64]) {
            self.0.invalidate(pages);
        }

        fn poll(&mut self, completions: &mut Vec<Completion>, timeout: Duration) {
            self.0.poll(completions, timeout);
        }
    }

    /// Pages on a node whose pool is full.
    struct Full(FileStore, Arc<AtomicBool>, u64);

    impl BackingStore for Full {
        fn page_count(&self) -> u64 {
            self.0.page_count()
        }

        fn buffer_count(&self) -> usize {
            self.0.buffer_count()
        }

        fn buffer(&self, buffer: usize) -> &PageBytes {
            self.0.buffer(buffer)
        }

        fn buffer_mut(&mut self, buffer: usize) -> &mut PageBytes {
            self.0.buffer_mut(buffer)
        }

        fn accepts(&self, _page: u64) -> bool {
            !self.1.load(Ordering::Relaxed)
        }

        fn submit(&mut self, transfer: Transfer, page: u64, buffer: usize) {
            self.2 += 1;
            // A page out of the file's range: its load fails.
            match self.accepts(page) {
                true => self.0.submit(transfer, page, buffer),
                false => self.0.submit(Transfer::Load, u64::MAX >> 20, buffer),
            }
            assert!(self.2 <= 2, "nothing is stored while no node accepts it");
        }

        fn invalidate(&mut self, pages: &[u64]) {
            self.0.invalidate(pages);
        }

        fn poll(&mut self, completions: &mut Vec<Completion>, timeout: Duration) {
            self.0.poll(completions, timeout);
        }
    }

    #[test]
    fn a_store_waits_until_a_full_node_has_room() {
        let file = FileStore::new(tempfile::tempfile().unwrap(), 64, 8).unwrap();
        let is_full = Arc::new(AtomicBool::new(false));
        let mut memory = Memory::new(Box::new(Full(file, is_full.clone(), 0)), 0);
        let slot = memory.allocate_slot().unwrap();
        is_full.store(true, Ordering::Relaxed);
        memory.begin_store(slot, &[1; PAGE_BYTES as usize]);
        for _ in 0..5 {
            memory.poll(Duration::ZERO);
            std::thread::sleep(STORE_RETRY);
        }
        is_full.store(false, Ordering::Relaxed);
        (0..2).for_each(|_| drop(memory.poll(Duration::ZERO)));
        assert!(!memory.slots.is_storing(slot));
    }

    #[test]
    fn frames_beyond_the_budget_are_given_back_while_threads_go_on() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 8).unwrap();
        let mut memory = Memory::new(Box::new(store), 0);
        let budget = memory.frames().0;
        while memory.take_frame() {}
        // No page leaves.
        for _ in 0..10 {
            memory.exceed_limit();
            while memory.take_frame() {}
        }
        assert_eq!(memory.frames(), (budget + 640, budget + 640));
        assert!(memory.pages_to_evict() > 640, "all that is beyond the budget is to leave");
        memory.set_unpaged(0);
        assert_eq!(memory.frames().0, budget + 640);
        // Pages leave, and threads take what frames they find.
        for _ in 0..20 {
            memory.release_frames(64);
            assert!(memory.free_frames() > 0);
            while memory.take_frame() {}
        }
        assert_eq!(memory.frames(), (budget, budget));
    }

    #[test]
    fn a_store_that_its_node_has_lost_goes_to_another_node() {
        let store = FileStore::new(tempfile::tempfile().unwrap(), 64, 8).unwrap();
        let mut memory = Memory::new(Box::new(HalfLost::new(store)), 0);
        // It was allocated before the node was lost.
        let slot = memory.slots.allocate(|_| true).unwrap();
        memory.begin_store(slot, &[1; PAGE_BYTES as usize]);
        memory.poll(Duration::ZERO);
        assert_eq!(memory.unstored_bytes(slot), Some(&[1; PAGE_BYTES as usize]));
        std::thread::sleep(STORE_RETRY);
        (0..2).for_each(|_| drop(memory.poll(Duration::ZERO)));
        assert_eq!((memory.slots.page(slot), memory.unstored_bytes(slot)), (1, None));
    }
}
