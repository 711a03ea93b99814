//! Memory nodes as a pager's backing store.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_far_memory::{Client, ClientConfig, ConnectError, PageBuffer, PageError, Request, node_status};
use terrace_nic::Device;
use terrace_vm::{BackingStore, Completion, PageBytes, Transfer, TransferError};

/// Buffers for transfers.
const BUFFERS: usize = 256;
/// Invalidations in flight at most: loads and stores come before the others. Each node has its share, which others need not wait for.
const INVALIDATIONS_MAX: usize = 32;
/// The pager polls for the end of invalidations, unless none has ended for this time: their node may be stopped.
const INVALIDATION_POLL_MAX: Duration = Duration::from_millis(10);
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
    /// By node.
    invalidations: Vec<Invalidations>,
    /// When invalidations began, or the last one ended.
    invalidated_at: Instant,
    page_count: u64,
}

/// What a node is to give up. Of a page with two copies, the node of the first one.
struct Invalidations {
    /// Pages are spread over the nodes one by one: the multiples of their number, and this node's remainder.
    remainder: u64,
    node_count: u64,
    /// By the quotients of pages.
    waiting: PageSet,
    in_flight: usize,
}

impl Invalidations {
    fn pop(&mut self) -> Option<u64> {
        self.waiting.pop().map(|quotient| quotient * self.node_count + self.remainder)
    }
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
        let node_count = config.nodes.len() as u64;
        let registered = client.buffer(BUFFERS)?;
        Ok(FarStore {
            client,
            registered,
            buffers: vec![Box::new([0; size_of::<PageBytes>()]); BUFFERS],
            transfers: vec![None; BUFFERS],
            waiting: VecDeque::new(),
            invalidations: (0..node_count)
                .map(|remainder| Invalidations {
                    remainder,
                    node_count,
                    waiting: PageSet::new(config.page_count.div_ceil(node_count)),
                    in_flight: 0,
                })
                .collect(),
            invalidated_at: Instant::now(),
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
        let share = (INVALIDATIONS_MAX / self.invalidations.len()).max(1);
        for node in &mut self.invalidations {
            let count = share - node.in_flight;
            let pages: Vec<_> = std::iter::from_fn(|| node.pop()).take(count).collect();
            if pages.is_empty() {
                continue;
            }
            let requests = pages.iter().map(|&page| Request::Invalidate { page, tag: INVALIDATION });
            let begun = match self.client.submit(requests) {
                Ok(count) => count,
                Err((count, PageError::Full)) => {
                    pages[count..].iter().for_each(|&page| node.waiting.insert(page / node.node_count));
                    count
                }
                // Pages are within their range.
                Err((count, error)) => {
                    tracing::error!(%error, "the client refuses an invalidation");
                    count
                }
            };
            node.in_flight += begun;
        }
    }

    fn node_of(&mut self, page: u64) -> &mut Invalidations {
        let node_count = self.invalidations.len() as u64;
        &mut self.invalidations[(page % node_count) as usize]
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
                let node = self.node_of(page);
                node.waiting.remove(page / node.node_count);
                self.waiting.push_back(Request::Store { page, from: place, tag });
            }
        }
    }

    fn invalidate(&mut self, pages: &[u64]) {
        self.invalidated_at = Instant::now();
        for &page in pages {
            let node = self.node_of(page);
            node.waiting.insert(page / node.node_count);
        }
    }

    fn is_invalidating(&self) -> bool {
        let mut nodes = self.invalidations.iter();
        let is_left = nodes.any(|node| node.waiting.count > 0 || node.in_flight > 0);
        is_left && self.invalidated_at.elapsed() < INVALIDATION_POLL_MAX
    }

    fn poll(&mut self, completions: &mut Vec<Completion>, timeout: Duration) {
        let begin = Instant::now();
        let mut done = Vec::new();
        loop {
            self.client.poll(&mut done);
            self.submit_waiting();
            for ended in std::mem::take(&mut done) {
                match ended.tag {
                    INVALIDATION => {
                        self.node_of(ended.page).in_flight -= 1;
                        self.invalidated_at = begin;
                    }
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

    fn node() -> MemoryNode {
        let mut config = NodeConfig::new(PAGES * PAGE_BYTES, "127.0.0.1:0".parse().unwrap());
        config.port.path = PathChoice::Local;
        MemoryNode::open(&config).unwrap()
    }

    /// A store whose first pages have been stored on nodes.
    fn stored_on(nodes: &[&MemoryNode]) -> FarStore {
        let mut config = ClientConfig::new(nodes.iter().map(|node| node.listens_at()).collect(), 1);
        config.port.path = PathChoice::Local;
        let store = FarStore::connect(config).unwrap();
        (0..PAGES).for_each(|page| store.client.store(page, &[1; 4096]).unwrap());
        store
    }

    fn stored() -> (FarStore, MemoryNode) {
        let node = node();
        (stored_on(&[&node]), node)
    }

    fn invalidations_left(store: &FarStore) -> u64 {
        store.invalidations.iter().map(|node| node.waiting.count + node.in_flight as u64).sum()
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
        assert!(invalidations_left(&store) > 0);
    }

    #[test]
    fn a_node_that_does_not_answer_delays_no_invalidations_of_others() {
        let nodes = [node(), node()];
        let mut store = stored_on(&nodes.each_ref());
        // No reply of the first node is taken.
        store.invalidate(&(0..PAGES).step_by(2).collect::<Vec<_>>());
        store.submit_invalidations();
        store.invalidate(&(1..PAGES).step_by(2).collect::<Vec<_>>());
        store.submit_invalidations();
        assert_eq!([0, 1].map(|node| store.invalidations[node].in_flight), [INVALIDATIONS_MAX / 2; 2]);
        assert!(store.is_invalidating());
        std::thread::sleep(INVALIDATION_POLL_MAX);
        assert!(!store.is_invalidating(), "the pager does not poll for what does not come");
        while invalidations_left(&store) > 0 {
            store.poll(&mut Vec::new(), Duration::ZERO);
        }
        assert_eq!(nodes.map(|node| node.status().free_pages), [PAGES; 2]);
    }

    #[test]
    fn pages_are_invalidated_unless_they_are_stored_again_before() {
        let (mut store, node) = stored();
        store.invalidate(&(0..PAGES).collect::<Vec<_>>());
        store.buffer_mut(3).fill(2);
        store.submit(Transfer::Store, PAGES - 1, 3);
        wait_for(&mut store, 3);
        while invalidations_left(&store) > 0 {
            store.poll(&mut Vec::new(), Duration::ZERO);
        }
        assert_eq!(node.status().free_pages, PAGES - 1);
        store.submit(Transfer::Load, PAGES - 1, 4);
        wait_for(&mut store, 4);
        assert!(store.buffer(4).iter().all(|&byte| byte == 2));
    }
}
