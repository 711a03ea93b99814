//! Requests become operations on pages.

use terrace_far_memory::PAGE_BYTES;

use super::{Device, REQUEST_BYTES_MAX, Request};
use crate::counters::count;
use crate::negotiation::Outcome;
use crate::protocol::{Command, Errno, FLAG_FUA, FLAG_NO_HOLE, Header, ProtocolError, REQUEST_BYTES};
use crate::queue::PageQueue;
use crate::slots::Step;

const PAGE: u64 = PAGE_BYTES as u64;
/// Pages of TRIM and WRITE_ZEROES that are looked at before other connections have their turn.
const PAGES_PER_TURN: u32 = 4096;

/// How far input was handled.
enum Handled {
    /// So many bytes, and more may be possible.
    Bytes(usize),
    /// No further without more bytes, or before operations end or replies are emitted.
    Blocked,
}

impl<Q: PageQueue> Device<Q> {
    /// Handles what is possible of a client's bytes, and returns how many were. The others are to be given again, with those
    /// that follow; a message is complete within 16 KiB. No bytes may be given as well: TRIM and WRITE_ZEROES go on then.
    ///
    /// # Errors
    /// The connection is to be closed: the client does not follow the protocol.
    pub fn handle_input(&mut self, index: usize, bytes: &[u8]) -> Result<usize, ProtocolError> {
        let mut used = 0;
        let mut pages_left = PAGES_PER_TURN;
        loop {
            let rest = &bytes[used..];
            let connection = &mut self.connections[index];
            let handled = if let Some(negotiation) = &mut connection.negotiation {
                let (count, outcome) = negotiation.handle_input(rest, &mut connection.greeting)?;
                match outcome {
                    Outcome::Pending => return Ok(used + count),
                    Outcome::Transmission => connection.negotiation = None,
                    Outcome::Aborted => (connection.negotiation, connection.is_ending) = (None, true),
                }
                Handled::Bytes(count)
            } else if let Some(current) = connection.current {
                if pages_left == 0 {
                    return Ok(used);
                }
                pages_left -= 1;
                self.begin_piece(index, current, rest)
            } else if connection.is_ending {
                return Ok(bytes.len());
            } else {
                self.handle_request(index, rest)?
            };
            match handled {
                Handled::Bytes(count) => used += count,
                Handled::Blocked => return Ok(used),
            }
        }
    }

    fn handle_request(&mut self, index: usize, bytes: &[u8]) -> Result<Handled, ProtocolError> {
        let Some(header) = bytes.first_chunk::<REQUEST_BYTES>() else { return Ok(Handled::Blocked) };
        let header = Header::decode(header)?;
        if header.command == Command::Disconnect {
            self.connections[index].is_ending = true;
            return Ok(Handled::Bytes(REQUEST_BYTES));
        }
        let has_begun = self.begin_request(index, &header);
        Ok(if has_begun { Handled::Bytes(REQUEST_BYTES) } else { Handled::Blocked })
    }

    /// Begins a request. False if too many are in flight, or too many replies wait. WRITE, TRIM
    /// and WRITE_ZEROES go on by [`Device::continue_request`], before the next request.
    pub(crate) fn begin_request(&mut self, index: usize, header: &Header) -> bool {
        let error = self.check(header);
        if header.command == Command::Read && error.is_none() {
            let end = header.offset + header.length;
            let page_count = end.div_ceil(PAGE) - header.offset / PAGE;
            if (self.slots.free_count(index) as u64) < page_count {
                return false;
            }
        }
        let Some(request) = self.connections[index].free_requests.pop() else { return false };
        let (begin, end) = match error {
            // The data of a WRITE are skipped, whatever its offset.
            Some(_) => (0, header.length),
            None => (header.offset, header.offset.saturating_add(header.length)),
        };
        count(&self.counters.requests);
        self.requests[request] = Request {
            command: header.command,
            flags: header.flags,
            cookie: header.cookie,
            begin,
            end,
            pending_count: 0,
            has_begun: true,
            error,
            first_slot: None,
        };
        match (header.command, error) {
            // Its data follow also if it is refused.
            (Command::Write, _) => self.begin_pieces(index, request),
            (Command::Trim | Command::WriteZeroes, None) => self.begin_pieces(index, request),
            (Command::Read, None) => self.begin_read(index, request),
            // What was answered before a FLUSH is on the memory nodes.
            _ => self.finish_if_done(request),
        }
        true
    }

    /// Begins what is possible of the current request's operations, and returns how many bytes of its data were used. Call it
    /// again with the others, until [`Device::is_beginning`] is false.
    pub(crate) fn continue_request(&mut self, index: usize, data: &[u8]) -> usize {
        let mut used = 0;
        for _ in 0..PAGES_PER_TURN {
            let Some(current) = self.connections[index].current else { break };
            match self.begin_piece(index, current, &data[used..]) {
                Handled::Bytes(count) => used += count,
                Handled::Blocked => break,
            }
        }
        used
    }

    /// Whether a connection has a request that [`Device::continue_request`] goes on with.
    pub(crate) fn is_beginning(&self, index: usize) -> bool {
        self.connections[index].current.is_some()
    }

    /// Why a request is refused.
    fn check(&self, header: &Header) -> Option<Errno> {
        let flags = match header.command {
            Command::WriteZeroes => FLAG_FUA | FLAG_NO_HOLE,
            _ => FLAG_FUA,
        };
        let is_too_long = header.length > u64::from(REQUEST_BYTES_MAX);
        let end = header.offset.checked_add(header.length);
        let is_outside = end.is_none_or(|end| end > self.size_bytes);
        match header.command {
            _ if header.flags & !flags != 0 => Some(Errno::Invalid),
            Command::Unknown => Some(Errno::Invalid),
            Command::Read | Command::Write if is_too_long => Some(Errno::Invalid),
            Command::Write | Command::WriteZeroes if is_outside => Some(Errno::NoSpace),
            Command::Read | Command::Trim if is_outside => Some(Errno::Invalid),
            _ => None,
        }
    }

    fn begin_pieces(&mut self, index: usize, request: usize) {
        self.requests[request].has_begun = false;
        self.connections[index].current = Some(request);
    }

    /// Begins all loads of a READ, for which there are slots.
    fn begin_read(&mut self, index: usize, request: usize) {
        let Request { begin, end, .. } = self.requests[request];
        let mut last: Option<usize> = None;
        for page in begin / PAGE..end.div_ceil(PAGE) {
            // A READ of no bytes may have a page, too, which is not sent.
            let Some(slot) = self.slots.take(index, request, page, Step::Reading) else { break };
            match last {
                Some(last) => self.slots.get_mut(last).next = Some(slot),
                None => self.requests[request].first_slot = Some(slot),
            }
            last = Some(slot);
            self.requests[request].pending_count += 1;
            self.slots.begin(slot);
        }
        self.finish_if_done(request);
    }

    /// Begins the next page of the current request.
    fn begin_piece(&mut self, index: usize, request: usize, bytes: &[u8]) -> Handled {
        let Request { command, flags, begin, end, error, .. } = self.requests[request];
        if begin == end {
            self.connections[index].current = None;
            self.requests[request].has_begun = true;
            self.finish_if_done(request);
            return Handled::Bytes(0);
        }
        let (page, from) = (begin / PAGE, (begin % PAGE) as usize);
        let to = (end - begin).saturating_add(from as u64).min(PAGE) as usize;
        let is_whole = to - from == PAGE_BYTES;
        let is_absent = || !self.slots.is_changing(page) && !self.queue.is_stored(page);
        let used = match command {
            Command::Write if error.is_some() => {
                let skipped = (end - begin).min(bytes.len() as u64);
                self.requests[request].begin += skipped;
                return if skipped == 0 { Handled::Blocked } else { Handled::Bytes(skipped as usize) };
            }
            Command::Write => {
                let Some(data) = bytes.get(..to - from) else { return Handled::Blocked };
                if !self.begin_change(index, request, page, (from, to), Some(data)) {
                    return Handled::Blocked;
                }
                data.len()
            }
            // What is not a whole page keeps its content, as TRIM may.
            Command::Trim if !is_whole => 0,
            _ if flags & FLAG_NO_HOLE == 0 && is_absent() => 0,
            _ => {
                let invalidates = is_whole && flags & FLAG_NO_HOLE == 0;
                let has_begun = match invalidates {
                    true => self.begin_invalidate(index, request, page),
                    false => self.begin_change(index, request, page, (from, to), None),
                };
                if !has_begun {
                    return Handled::Blocked;
                }
                0
            }
        };
        self.requests[request].begin += (to - from) as u64;
        Handled::Bytes(used)
    }

    /// Begins to store data, or zeros, as a part of a page. Returns whether there were slots.
    fn begin_change(
        &mut self,
        index: usize,
        request: usize,
        page: u64,
        (from, to): (usize, usize),
        data: Option<&[u8]>,
    ) -> bool {
        let is_whole = to - from == PAGE_BYTES;
        if self.slots.free_count(index) < if is_whole { 1 } else { 2 } {
            return false;
        }
        let Some(slot) = self.slots.take(index, request, page, Step::Storing) else { return false };
        if !is_whole {
            let rest = self.slots.take(index, request, page, Step::Rest { change: slot });
            let Some(rest) = rest else { return false };
            self.slots.get_mut(slot).step = Step::Merging { begin: from as u16, end: to as u16, rest };
        }
        let content = &mut self.scratch[0];
        match data {
            Some(data) => content[from..to].copy_from_slice(data),
            None => content[from..to].fill(0),
        }
        self.requests[request].pending_count += 1;
        match self.queue.write_slot(slot, content) {
            Ok(()) => self.slots.begin(slot),
            Err(error) => self.drop_change(slot, error),
        }
        true
    }

    fn begin_invalidate(&mut self, index: usize, request: usize, page: u64) -> bool {
        let Some(slot) = self.slots.take(index, request, page, Step::Invalidating) else { return false };
        self.requests[request].pending_count += 1;
        self.slots.begin(slot);
        true
    }
}
