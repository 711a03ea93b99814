//! A send work request in the send queue.

use terrace_wire::Operation;

use super::operations::{Answer, Row};
use crate::types::{ATOMIC_LEN, SendWr, WcStatus};
use crate::window::PACKET_OVERHEAD;

#[derive(Debug)]
pub(crate) struct Wqe {
    pub(crate) wr: SendWr,
    /// Payload bytes, or bytes to read.
    pub(crate) length: u64,
    /// Sequence numbers that it takes; 0 for local operations.
    pub(crate) packets: u64,
    /// First sequence number, once it has started.
    pub(crate) first: u64,
    pub(crate) started: bool,
    /// Whether this local operation was executed.
    pub(crate) executed: bool,
    /// Why it cannot be sent; reported when all earlier requests are done.
    pub(crate) failed: Option<WcStatus>,
}

impl Wqe {
    #[inline]
    pub(crate) fn new(wr: SendWr, mtu: u64) -> Wqe {
        let row = Row::of(&wr.op);
        let length = row.data_len(&wr.payload);
        let packets = match row.wire {
            None => 0,
            Some(operation) if is_segmented(operation) && length > mtu => length.div_ceil(mtu),
            Some(_) => 1,
        };
        Wqe { wr, length, packets, first: 0, started: false, executed: false, failed: None }
    }

    /// One past its last sequence number.
    pub(crate) fn end(&self) -> u64 {
        self.first + self.packets
    }

    pub(crate) fn is_local(&self) -> bool {
        self.packets == 0
    }

    pub(crate) fn is_done(&self, acknowledged: u64) -> bool {
        if self.is_local() { self.executed } else { self.started && self.end() <= acknowledged }
    }

    pub(crate) fn is_read(&self) -> bool {
        Row::of(&self.wr.op).answer == Answer::Data
    }

    /// Whether the peer answers with a response packet rather than an ACK.
    pub(crate) fn expects_response(&self) -> bool {
        Row::of(&self.wr.op).expects_response()
    }

    /// Sequence number of the first packet that the peer answers with a response, for a request that expects one. All
    /// packets of a READ are responses; an APPEND is answered with its last packet's number, and ACKs may acknowledge
    /// the ones before.
    pub(crate) fn first_response(&self) -> u64 {
        if self.is_read() { self.first } else { self.end() - 1 }
    }

    /// Window cost of the packets from `from` up to `to` (sequence numbers of this request).
    pub(crate) fn cost(&self, from: u64, to: u64, mtu: u64) -> u64 {
        let payload = match Row::of(&self.wr.op).wire {
            Some(operation) if is_segmented(operation) => {
                let start = ((from - self.first) * mtu).min(self.length);
                let stop = ((to - self.first) * mtu).min(self.length);
                stop - start
            }
            _ => ATOMIC_LEN.into(),
        };
        payload + (to - from) * PACKET_OVERHEAD
    }
}

/// Whether data that do not fit into a packet take several.
fn is_segmented(operation: Operation) -> bool {
    matches!(operation, Operation::Send | Operation::Write | Operation::ReadRequest | Operation::Append)
}
