//! Far memory's client as the queue of a device.

use std::sync::Arc;

use terrace_far_memory::{Client, Completion, Page, PageBuffer, PageError, PageStore, Request};

use crate::device::slot_count;
use crate::queue::{Ended, Operation, PageQueue};

/// A client and the buffer of its device.
pub struct ClientQueue {
    client: Arc<Client>,
    buffer: Arc<PageBuffer>,
    completions: Vec<Completion>,
    /// Operations that the client has refused.
    refused: Vec<Ended>,
}

impl ClientQueue {
    /// Allocates the buffer of a device of so many connections. The client's depth is [`slot_count`] of them. No other thread may
    /// poll the client: it would take the device's completions.
    ///
    /// # Errors
    /// As [`Client::buffer`].
    pub fn new(client: Arc<Client>, connections: usize) -> Result<ClientQueue, terrace_nic::Error> {
        let depth = slot_count(connections);
        let buffer = client.buffer(depth)?;
        let (completions, refused) = (Vec::with_capacity(depth), Vec::new());
        Ok(ClientQueue { client, buffer, completions, refused })
    }

    fn request(&self, operation: Operation) -> Request {
        let place = |slot| (self.buffer.clone(), slot);
        match operation {
            Operation::Load { page, slot } => Request::Load { page, into: place(slot), tag: slot as u64 },
            Operation::Store { page, slot } => Request::Store { page, from: place(slot), tag: slot as u64 },
            Operation::Invalidate { page, slot } => Request::Invalidate { page, tag: slot as u64 },
        }
    }
}

impl PageQueue for ClientQueue {
    fn page_count(&self) -> u64 {
        self.client.page_count()
    }

    fn is_stored(&self, page: u64) -> bool {
        self.client.is_stored(page)
    }

    fn read_slot(&self, slot: usize, into: &mut Page) -> Result<(), PageError> {
        self.buffer.read(slot, into)
    }

    fn write_slot(&mut self, slot: usize, from: &Page) -> Result<(), PageError> {
        self.buffer.write(slot, from)
    }

    fn submit(&mut self, operations: &[Operation]) -> usize {
        let mut begun = 0;
        while begun < operations.len() {
            let requests = operations[begun..].iter().map(|operation| self.request(*operation));
            match self.client.submit(requests) {
                Ok(count) => begun += count,
                Err((count, PageError::Full)) => return begun + count,
                Err((count, error)) => {
                    begun += count;
                    let (Operation::Load { slot, .. }
                    | Operation::Store { slot, .. }
                    | Operation::Invalidate { slot, .. }) = operations[begun];
                    self.refused.push(Ended { slot, result: Err(error) });
                    begun += 1;
                }
            }
        }
        begun
    }

    fn poll(&mut self, ended: &mut Vec<Ended>) {
        ended.append(&mut self.refused);
        self.client.poll(&mut self.completions);
        let completions = self.completions.drain(..);
        ended.extend(completions.map(|Completion { tag, result, .. }| Ended { slot: tag as usize, result }));
    }
}
