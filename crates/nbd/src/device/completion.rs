//! Operations end, and requests with them.

use terrace_far_memory::{PAGE_BYTES, PageError};

use super::{Device, NO_REQUEST, Request};
use crate::counters::count;
use crate::protocol::Errno;
use crate::queue::{Ended, PageQueue};
use crate::slots::{Slot, Step};

impl<Q: PageQueue> Device<Q> {
    /// Submits operations, and handles those that have ended. Returns how many these were.
    pub fn advance(&mut self) -> usize {
        if !self.slots.ready.is_empty() {
            let begun = self.queue.submit(&self.slots.ready);
            self.slots.ready.drain(..begun);
            self.in_flight_count += begun;
        }
        if self.in_flight_count == 0 {
            return 0;
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.queue.poll(&mut ended);
        let ended_count = ended.len();
        self.in_flight_count -= ended_count;
        ended.drain(..).for_each(|ended| self.end_operation(ended));
        self.ended = ended;
        ended_count
    }

    fn end_operation(&mut self, Ended { slot: index, result }: Ended) {
        let Slot { step, request, .. } = *self.slots.get(index);
        match step {
            Step::Reading => {
                count(&self.counters.loaded_pages);
                match result {
                    Ok(()) => {}
                    Err(PageError::NotStored(_)) => self.slots.get_mut(index).is_absent = true,
                    Err(error) => self.fail(request, error),
                }
                self.end_of_operation(request);
            }
            Step::Rest { change } => {
                self.slots.free(index);
                let merged = match result {
                    Ok(()) => self.merge(change, Some(index)),
                    Err(PageError::NotStored(_)) => self.merge(change, None),
                    Err(error) => Err(error),
                };
                match merged {
                    Ok(()) => self.slots.begin_store(change),
                    Err(error) => {
                        self.fail(request, error);
                        self.end_change(change);
                    }
                }
            }
            Step::Storing | Step::Invalidating => {
                let is_store = step == Step::Storing;
                count(if is_store { &self.counters.stored_pages } else { &self.counters.invalidated_pages });
                match result {
                    Ok(()) | Err(PageError::NotStored(_)) => {}
                    Err(error) => self.fail(request, error),
                }
                self.end_change(index);
            }
            // No operation names such slots.
            Step::Free | Step::Merging { .. } => {}
        }
    }

    /// Completes the slot of a change with the rest of its page, which was just loaded, or is zeros.
    fn merge(&mut self, change: usize, rest: Option<usize>) -> Result<(), PageError> {
        let Step::Merging { begin, end, .. } = self.slots.get(change).step else { return Ok(()) };
        let range = usize::from(begin)..usize::from(end);
        let [changed, page] = &mut *self.scratch;
        match rest {
            Some(rest) => self.queue.read_slot(rest, page)?,
            None => *page = [0; PAGE_BYTES],
        }
        self.queue.read_slot(change, changed)?;
        page[range.clone()].copy_from_slice(&changed[range]);
        self.queue.write_slot(change, page)
    }

    fn end_change(&mut self, slot: usize) {
        let request = self.slots.get(slot).request;
        self.slots.end_change(slot);
        self.end_of_operation(request);
    }

    /// Gives up a change that has not begun.
    pub(super) fn drop_change(&mut self, slot: usize, error: PageError) {
        let Slot { step, request, .. } = *self.slots.get(slot);
        if let Step::Merging { rest, .. } = step {
            self.slots.free(rest);
        }
        self.slots.free(slot);
        self.fail(request, error);
        self.end_of_operation(request);
    }

    fn end_of_operation(&mut self, request: usize) {
        self.requests[request].pending_count -= 1;
        self.finish_if_done(request);
    }

    /// Puts a request all of whose operations have ended in line for its reply.
    pub(super) fn finish_if_done(&mut self, request: usize) {
        let Request { pending_count, has_begun, .. } = self.requests[request];
        if pending_count > 0 || !has_begun {
            return;
        }
        let connection = &mut self.connections[Self::connection_of(request)];
        match connection.is_open {
            true => connection.finished.push_back(request),
            false => self.release(request),
        }
    }

    /// Frees a request and its slots.
    pub(super) fn release(&mut self, request: usize) {
        let mut next = self.requests[request].first_slot;
        while let Some(slot) = next {
            next = self.slots.get(slot).next;
            self.slots.free(slot);
        }
        self.requests[request] = NO_REQUEST;
        self.connections[Self::connection_of(request)].free_requests.push(request);
    }

    fn fail(&mut self, request: usize, error: PageError) {
        let errno = match error {
            PageError::PoolEmpty | PageError::BudgetExhausted => Errno::NoSpace,
            _ => Errno::Io,
        };
        self.requests[request].error.get_or_insert(errno);
        let has_logged = &mut self.has_logged_failure[usize::from(errno == Errno::NoSpace)];
        if !*has_logged {
            *has_logged = true;
            let name = if errno == Errno::Io { "EIO" } else { "ENOSPC" };
            tracing::error!(%error, "requests fail with {name}; this is logged once");
        }
    }
}
