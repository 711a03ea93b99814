//! Memory nodes as a pager's backing store.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_far_memory::{Client, ClientConfig, ConnectError, PageBuffer, PageError, Request, node_status};
use terrace_nic::Device;
use terrace_vm::{BackingStore, Completion, PageBytes, Transfer, TransferError};

/// Buffers for transfers.
const BUFFERS: usize = 256;
/// The tag of operations that have no buffer.
const NO_BUFFER: u64 = u64::MAX;

/// Pages on memory nodes.
pub struct FarStore {
    client: Client,
    /// The registered memory of transfers, by buffer.
    registered: Arc<PageBuffer>,
    /// What the pager sees of it.
    buffers: Vec<Box<PageBytes>>,
    transfers: Vec<Option<Transfer>>,
    /// What the client has no room for yet, in order.
    waiting: VecDeque<Request>,
    page_count: u64,
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
            page_count: config.page_count,
        })
    }

    /// The device through which pages go.
    pub fn device(&self) -> &Arc<Device> {
        self.client.device()
    }

    fn submit_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
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
                self.waiting.push_back(Request::Store { page, from: place, tag });
            }
        }
    }

    fn invalidate(&mut self, pages: &[u64]) {
        self.waiting.extend(pages.iter().map(|&page| Request::Invalidate { page, tag: NO_BUFFER }));
    }

    fn poll(&mut self, completions: &mut Vec<Completion>, timeout: Duration) {
        let begin = Instant::now();
        let mut done = Vec::new();
        loop {
            self.client.poll(&mut done);
            self.submit_waiting();
            for ended in std::mem::take(&mut done) {
                completions.extend(self.end(ended.tag as usize, ended.result));
            }
            if !completions.is_empty() || begin.elapsed() >= timeout {
                return;
            }
        }
    }
}
