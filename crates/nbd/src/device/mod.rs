//! A block device over a queue of page operations: connections' bytes in, operations on pages, connections' bytes out.
//!
//! Call [`Device::connect`] for a new client. Then, in any order and again and again, [`Device::handle_input`] with its bytes,
//! [`Device::advance`], and [`Device::emit`]; [`Device::disconnect`] when its socket is closed. All memory is allocated when
//! the device is created.
//!
//! A file has no bytes of NBD. It takes a connection by `attach`; then `begin_request`, `continue_request`, `advance` and
//! `take_finished`.
//!
//! | module | contains |
//! |---|---|
//! | `input` | requests become operations |
//! | `completion` | operations end, and requests with them |
//! | `output` | replies |

mod completion;
mod input;
mod output;

use std::collections::VecDeque;
use std::sync::Arc;

use terrace_far_memory::{PAGE_BYTES, Page};

use crate::counters::Counters;
use crate::negotiation::{Export, Negotiation};
use crate::protocol::{Command, Errno};
use crate::queue::{Ended, PageQueue};
use crate::slots::Slots;

/// Connections of a device at a time.
pub const CONNECTIONS_MAX: usize = 8;
/// Bytes of a READ or WRITE at most: what Linux sends at most unless it is configured otherwise.
pub const REQUEST_BYTES_MAX: u32 = 4 << 20;
/// Requests of a connection in flight. Further ones wait in its socket, or in the kernel.
pub(crate) const REQUESTS: usize = 256;
/// Pages of a connection in flight: at least those of a READ of the maximum that begins within a page.
const SLOTS: usize = (REQUEST_BYTES_MAX as usize / PAGE_BYTES) + 64;

/// Pages of the buffer that a queue needs for a device of so many connections.
pub const fn slot_count(connections: usize) -> usize {
    connections * SLOTS
}

/// A request.
#[derive(Clone, Copy, Debug)]
struct Request {
    command: Command,
    flags: u16,
    cookie: u64,
    /// The range of bytes. For requests that become operations piece by piece, what is left of it.
    begin: u64,
    end: u64,
    /// Operations in flight.
    pending_count: u32,
    /// No further operations begin.
    has_begun: bool,
    error: Option<Errno>,
    /// The slots of a READ that are still to be sent.
    first_slot: Option<usize>,
}

const NO_REQUEST: Request = Request {
    command: Command::Unknown,
    flags: 0,
    cookie: 0,
    begin: 0,
    end: 0,
    pending_count: 0,
    has_begun: false,
    error: None,
    first_slot: None,
};

/// A connection, open or not.
struct Connection {
    is_open: bool,
    /// Present until the transmission phase.
    negotiation: Option<Negotiation>,
    /// Replies of the negotiation.
    greeting: Vec<u8>,
    /// No further requests are taken.
    is_ending: bool,
    free_requests: Vec<usize>,
    /// The request whose operations begin piece by piece. Later requests wait for it.
    current: Option<usize>,
    /// Requests that have ended, in this order.
    finished: VecDeque<usize>,
    /// The reply's header of the first of them is sent.
    has_sent_header: bool,
}

/// A block device.
pub struct Device<Q> {
    queue: Q,
    size_bytes: u64,
    slots: Slots,
    requests: Vec<Request>,
    connections: Vec<Connection>,
    in_flight_count: usize,
    ended: Vec<Ended>,
    /// A page that is copied, and the one that it is merged with.
    scratch: Box<[Page; 2]>,
    counters: Arc<Counters>,
    has_logged_failure: [bool; 2],
}

impl<Q: PageQueue> Device<Q> {
    /// A device of all pages of `queue`, whose buffer has [`slot_count`] pages.
    pub fn new(queue: Q, connections: usize) -> Device<Q> {
        let connection = |index: usize| Connection {
            is_open: false,
            negotiation: None,
            greeting: Vec::with_capacity(PAGE_BYTES),
            is_ending: false,
            free_requests: (index * REQUESTS..(index + 1) * REQUESTS).collect(),
            current: None,
            finished: VecDeque::with_capacity(REQUESTS),
            has_sent_header: false,
        };
        Device {
            size_bytes: queue.page_count().saturating_mul(PAGE_BYTES as u64),
            queue,
            slots: Slots::new(connections, SLOTS),
            requests: vec![NO_REQUEST; connections * REQUESTS],
            connections: (0..connections).map(connection).collect(),
            in_flight_count: 0,
            ended: Vec::with_capacity(slot_count(connections)),
            scratch: Box::new([[0; PAGE_BYTES]; 2]),
            counters: Arc::default(),
            has_logged_failure: [false; 2],
        }
    }

    /// The device's counters.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Opens a connection, and greets its client. `None` if the maximum is open, or has operations in flight after its end.
    pub fn connect(&mut self) -> Option<usize> {
        let index = self.attach()?;
        let export = Export {
            size_bytes: self.size_bytes,
            preferred_block_bytes: PAGE_BYTES as u32,
            request_bytes_max: REQUEST_BYTES_MAX,
        };
        let connection = &mut self.connections[index];
        connection.negotiation = Some(Negotiation::begin(export, &mut connection.greeting));
        Some(index)
    }

    /// Opens a connection without negotiation. `None` as for [`Device::connect`].
    pub(crate) fn attach(&mut self) -> Option<usize> {
        let is_unused = |index: &usize| {
            let connection = &self.connections[*index];
            let is_idle = connection.free_requests.len() == REQUESTS && self.slots.is_idle(*index);
            !connection.is_open && is_idle
        };
        let index = (0..self.connections.len()).find(is_unused)?;
        let connection = &mut self.connections[index];
        connection.greeting.clear();
        (connection.is_open, connection.is_ending, connection.has_sent_header) = (true, false, false);
        Some(index)
    }

    /// Closes a connection. Its operations go on to their ends.
    pub fn disconnect(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        (connection.is_open, connection.negotiation) = (false, None);
        if let Some(current) = connection.current.take() {
            self.requests[current].has_begun = true;
            self.finish_if_done(current);
        }
        while let Some(request) = self.connections[index].finished.pop_front() {
            self.release(request);
        }
    }

    /// Takes no further requests of a connection. Those that were taken are carried out and answered.
    pub fn end(&mut self, index: usize) {
        self.connections[index].is_ending = true;
    }

    /// Whether a connection is before its transmission phase.
    pub fn is_negotiating(&self, index: usize) -> bool {
        self.connections[index].negotiation.is_some()
    }

    /// Whether a connection has ended, and has no replies left to be emitted.
    pub fn has_ended(&self, index: usize) -> bool {
        let connection = &self.connections[index];
        let is_answered = connection.free_requests.len() == REQUESTS && connection.greeting.is_empty();
        connection.is_ending && is_answered
    }

    /// Whether [`Device::advance`] or [`Device::handle_input`] has something to do although no client sends anything.
    pub fn is_busy(&self) -> bool {
        self.in_flight_count > 0 || !self.slots.ready.is_empty() || self.goes_on()
    }

    /// Whether a request of many pages goes on at once, without bytes of its client and without the end of an operation.
    pub(crate) fn goes_on(&self) -> bool {
        self.connections.iter().enumerate().any(|(index, connection)| {
            let command = connection.current.map(|current| self.requests[current].command);
            let needs_no_bytes = matches!(command, Some(Command::Trim | Command::WriteZeroes));
            // With two free slots, a piece of any kind can begin.
            needs_no_bytes && self.slots.free_count(index) >= 2
        })
    }

    fn connection_of(request: usize) -> usize {
        request / REQUESTS
    }
}
