//! Replies.

use terrace_far_memory::{PAGE_BYTES, PageError};

use super::{Device, Request};
use crate::counters::count;
use crate::protocol::{Command, Errno, REPLY_BYTES, put_reply};
use crate::queue::PageQueue;

const PAGE: u64 = PAGE_BYTES as u64;

impl<Q: PageQueue> Device<Q> {
    /// Appends replies to `out`, as long as its length stays within `bytes_max`.
    ///
    /// # Errors
    /// The connection is to be closed: a page that was loaded cannot be copied.
    pub fn emit(&mut self, index: usize, out: &mut Vec<u8>, bytes_max: usize) -> Result<(), PageError> {
        let connection = &mut self.connections[index];
        if !connection.greeting.is_empty() {
            if out.len() + connection.greeting.len() > bytes_max {
                return Ok(());
            }
            out.append(&mut connection.greeting);
        }
        while let Some(&request) = self.connections[index].finished.front() {
            if out.len() + REPLY_BYTES + PAGE_BYTES > bytes_max {
                return Ok(());
            }
            let Request { command, cookie, error, .. } = self.requests[request];
            if !self.connections[index].has_sent_header {
                put_reply(out, cookie, error);
                self.connections[index].has_sent_header = true;
                if error.is_some() {
                    count(&self.counters.failed_requests);
                }
            }
            if command == Command::Read && error.is_none() && self.emit_page(request, out)? {
                continue;
            }
            self.connections[index].finished.pop_front();
            self.connections[index].has_sent_header = false;
            self.release(request);
        }
        Ok(())
    }

    /// Takes the oldest request that has ended: its cookie and its error. The data of a READ are appended to `out`.
    pub(crate) fn take_finished(&mut self, index: usize, out: &mut Vec<u8>) -> Option<(u64, Option<Errno>)> {
        let request = self.connections[index].finished.pop_front()?;
        let Request { command, cookie, mut error, .. } = self.requests[request];
        while command == Command::Read && error.is_none() {
            match self.emit_page(request, out) {
                Ok(true) => {}
                Ok(false) => break,
                // A page that was loaded cannot be copied.
                Err(_) => error = Some(Errno::Io),
            }
        }
        if error.is_some() {
            count(&self.counters.failed_requests);
        }
        self.release(request);
        Some((cookie, error))
    }

    /// Appends the next page of a READ, or what is wanted of it. Returns whether there was one.
    fn emit_page(&mut self, request: usize, out: &mut Vec<u8>) -> Result<bool, PageError> {
        let Request { begin, end, first_slot, .. } = self.requests[request];
        let Some(slot) = first_slot else { return Ok(false) };
        let from = (begin % PAGE) as usize;
        let to = (end - begin + from as u64).min(PAGE) as usize;
        let page = &mut self.scratch[0];
        match self.slots.get(slot).is_absent {
            true => page.fill(0),
            false => self.queue.read_slot(slot, page)?,
        }
        out.extend_from_slice(&page[from..to]);
        self.requests[request].begin += (to - from) as u64;
        self.requests[request].first_slot = self.slots.get(slot).next;
        self.slots.free(slot);
        Ok(true)
    }
}
