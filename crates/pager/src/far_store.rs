//! Memory nodes as a pager's backing store.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_far_memory::{Client, ClientConfig, ConnectError, PageBuffer, PageError, Request, node_status};
use terrace_nic::Device;
use terrace_vm::{BackingStore, Completion, PageBytes, Transfer, TransferError};

/// Buffers for transfers.
const BUFFERS: usize = 256;
/// Invalidations in flight at most: loads and stores come before the others.
const INVALIDATIONS_MAX: usize = 32;
/// The tag of invalidations, which have no buffer.
const INVALIDATION: u64 = u64::MAX;

/// Pages on memory nodes.
pub struct FarStore {
    client: Client,
    /// The registered memory of transfers, by buffer.
    registered: Arc<PageBuffer>,
    /// What the pager sees of it.
    buffers: Vec<Box<PageBytes>>,
    transfers: Vec<Option<Transfer>>,
    /// Loads and stores that the client has no room for yet, in order.
    waiting: VecDeque<Request>,
    invalid: PageSet,
    /// Invalidations in flight.
    invalidations: usize,
    page_count: u64,
}

/// Pages that are to be invalidated, one bit each: a process that ends may have given up millions.
#[derive(Default)]
struct PageSet {
    words: Vec<u64>,
    count: u64,
    /// Where the next page is looked for.
    next_word: usize,
}

impl PageSet {
    fn new(page_count: u64) -> PageSet {
        PageSet { words: vec![0; page_count.div_ceil(64) as usize], ..PageSet::default() }
    }

    fn insert(&mut self, page: u64) {
        let word = &mut self.words[(page / 64) as usize];
        self.count += u64::from(*word & 1 << (page % 64) == 0);
        *word |= 1 << (page % 64);
    }

    fn remove(&mut self, page: u64) {
        let word = &mut self.words[(page / 64) as usize];
        self.count -= u64::from(*word & 1 << (page % 64) != 0);
        *word &= !(1 << (page % 64));
    }

    fn pop(&mut self) -> Option<u64> {
        if self.count == 0 {
            return None;
        }
        while self.words[self.next_word] == 0 {
            self.next_word = (self.next_word + 1) % self.words.len();
        }
        let page = self.next_word as u64 * 64 + u64::from(self.words[self.next_word].trailing_zeros());
        self.remove(page);
        Some(page)
    }
}

impl FarStore {
    /// Connects to the nodes of a configuration, whose number of pages is what all nodes have.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(mut config: ClientConfig) -> Result<FarStore, ConnectError> {
        let mut pages = 0u64;
        for node in &config.nodes {
            pages = pages.saturating_add(node_status(*node)?.page_count);
        }
        config.page_count = (pages / config.copies.max(1) as u64).max(1);
        // A load, for which a thread waits, does not wait until stores of an eviction have ended.
        config.depth = BUFFERS as u32;
        let client = Client::connect(&config)?;
        let registered = client.buffer(BUFFERS)?;
        Ok(FarStore {
            client,
            registered,
            buffers: vec![Box::new([0; size_of::<PageBytes>()]); BUFFERS],
            transfers: vec![None; BUFFERS],
            waiting: VecDeque::new(),
            invalid: PageSet::new(config.page_count),
            invalidations: 0,
            page_count: config.page_count,
        })
    }

    /// The device through which pages go.
    pub fn device(&self) -> &Arc<Device> {
        self.client.device()
    }

    fn submit_waiting(&mut self) {
        if self.waiting.is_empty() {
            return self.submit_invalidations();
        }
        let begun = match self.client.submit(self.waiting.iter().cloned()) {
            Ok(count) | Err((count, PageError::Full)) => count,
            // Pages and buffers are within their ranges.
            Err((count, error)) => {
                tracing::error!(%error, "the client refuses an operation");
                count
            }
        };
        self.waiting.drain(..begun);
    }

    fn submit_invalidations(&mut self) {
        let count = INVALIDATIONS_MAX - self.invalidations;
        let pages: Vec<_> = std::iter::from_fn(|| self.invalid.pop()).take(count).collect();
        if pages.is_empty() {
            return;
        }
        let requests = pages.iter().map(|&page| Request::Invalidate { page, tag: INVALIDATION });
        let begun = self.client.submit(requests).unwrap_or_else(|(count, _)| count);
        self.invalidations += begun;
        pages[begun..].iter().for_each(|&page| self.invalid.insert(page));
    }

    fn end(&mut self, buffer: usize, result: Result<(), PageError>) -> Option<Completion> {
        let transfer = self.transfers.get_mut(buffer)?.take()?;
        let result = match (transfer, result) {
            (Transfer::Load, Ok(())) => {
                let read = self.registered.read(buffer, &mut self.buffers[buffer]);
                read.map_err(|_| TransferError::Lost)
            }
            (Transfer::Store, Ok(())) => Ok(()),
            (Transfer::Load, Err(_)) | (_, Err(PageError::NodeLost(_))) => Err(TransferError::Lost),
            (Transfer::Store, Err(_)) => Err(TransferError::NoRoom),
        };
        Some(Completion { buffer, result })
    }
}

impl BackingStore for FarStore {
    fn page_count(&self) -> u64 {
        self.page_count
    }

    fn buffer_count(&self) -> usize {
        self.buffers.len()
    }

    fn buffer(&self, buffer: usize) -> &PageBytes {
        &self.buffers[buffer]
    }

    fn buffer_mut(&mut self, buffer: usize) -> &mut PageBytes {
        &mut self.buffers[buffer]
    }

    fn can_load(&self, page: u64) -> bool {
        self.client.can_load(page)
    }

    fn accepts(&self, page: u64) -> bool {
        self.client.accepts(page)
    }

    fn submit(&mut self, transfer: Transfer, page: u64, buffer: usize) {
        self.transfers[buffer] = Some(transfer);
        let (place, tag) = ((self.registered.clone(), buffer), buffer as u64);
        match transfer {
            Transfer::Load => {
                self.waiting.push_back(Request::Load { page, into: place, tag });
                self.submit_waiting();
            }
            // Stores of an eviction leave together, with the next poll or load: their packets share system calls.
            Transfer::Store => {
                let written = self.registered.write(buffer, &self.buffers[buffer]);
                debug_assert!(written.is_ok(), "there are as many registered pages");
                // Its new bytes would go, too.
                self.invalid.remove(page);
                self.waiting.push_back(Request::Store { page, from: place, tag });
            }
        }
    }

    fn invalidate(&mut self, pages: &[u64]) {
        pages.iter().for_each(|&page| self.invalid.insert(page));
    }

    fn is_invalidating(&self) -> bool {
        self.invalid.count > 0 || self.invalidations > 0
    }

    fn poll(&mut self, completions: &mut Vec<Completion>, timeout: Duration) {
        let begin = Instant::now();
        let mut done = Vec::new();
        loop {
            self.client.poll(&mut done);
            self.submit_waiting();
            for ended in std::mem::take(&mut done) {
                match ended.tag {
                    INVALIDATION => self.invalidations -= 1,
                    buffer => completions.extend(self.end(buffer as usize, ended.result)),
                }
            }
            if !completions.is_empty() || begin.elapsed() >= timeout {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use terrace_far_memory::{MemoryNode, NodeConfig, PageStore};
    use terrace_hostmem::PAGE_BYTES;
    use terrace_nic::PathChoice;

    use super::*;

    const PAGES: u64 = 4096;

    /// A store whose pages have been stored, and its node.
    fn stored() -> (FarStore, MemoryNode) {
        let mut config = NodeConfig::new(PAGES * PAGE_BYTES, "127.0.0.1:0".parse().unwrap());
        config.port.path = PathChoice::Local;
        let node = MemoryNode::open(&config).unwrap();
        let mut config = ClientConfig::new(vec![node.listens_at()], 1);
        config.port.path = PathChoice::Local;
        let store = FarStore::connect(config).unwrap();
        (0..PAGES).for_each(|page| store.client.store(page, &[1; 4096]).unwrap());
        (store, node)
    }

    fn wait_for(store: &mut FarStore, buffer: usize) {
        let mut completions = Vec::new();
        while completions.is_empty() {
            store.poll(&mut completions, Duration::from_secs(1));
        }
        assert_eq!(completions, [Completion { buffer, result: Ok(()) }]);
    }

    #[test]
    fn a_load_waits_for_few_of_the_invalidations_before_it() {
        let (mut store, node) = stored();
        store.invalidate(&(1..PAGES).collect::<Vec<_>>());
        store.submit(Transfer::Load, 0, 3);
        wait_for(&mut store, 3);
        let invalidated = node.status().clients[0].invalidations;
        assert!(invalidated < PAGES / 10, "{invalidated}");
        assert!(store.is_invalidating());
    }

    #[test]
    fn pages_are_invalidated_unless_they_are_stored_again_before() {
        let (mut store, node) = stored();
        store.invalidate(&(0..PAGES).collect::<Vec<_>>());
        store.buffer_mut(3).fill(2);
        store.submit(Transfer::Store, PAGES - 1, 3);
        wait_for(&mut store, 3);
        while store.is_invalidating() {
            store.poll(&mut Vec::new(), Duration::ZERO);
        }
        assert_eq!(node.status().free_pages, PAGES - 1);
        store.submit(Transfer::Load, PAGES - 1, 4);
        wait_for(&mut store, 4);
        assert!(store.buffer(4).iter().all(|&byte| byte == 2));
    }
}
