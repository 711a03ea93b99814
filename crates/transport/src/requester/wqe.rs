//! A send work request in the send queue.

use terrace_wire::{Operation, Trailer};

use crate::types::{ATOMIC_LEN, Payload, QpType, SendOp, SendWr, WcOpcode, WcStatus};
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
        let length = wr.payload.len();
        let packets = match operation(&wr.op) {
            None => 0,
            Some(Operation::Send | Operation::Write | Operation::ReadRequest) if length > mtu => {
                length.div_ceil(mtu)
            }
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
        matches!(self.wr.op, SendOp::Read { .. })
    }

    /// Whether the peer answers with a response packet rather than an ACK. FLUSH and ATOMIC WRITE are answered by an
    /// empty READ response.
    pub(crate) fn expects_response(&self) -> bool {
        !matches!(operation(&self.wr.op), None | Some(Operation::Send | Operation::Write))
    }

    /// Window cost of the packets from `from` up to `to` (sequence numbers of this request).
    pub(crate) fn cost(&self, from: u64, to: u64, mtu: u64) -> u64 {
        let payload = match operation(&self.wr.op) {
            Some(Operation::Send | Operation::Write | Operation::ReadRequest) => {
                let start = ((from - self.first) * mtu).min(self.length);
                let stop = ((to - self.first) * mtu).min(self.length);
                stop - start
            }
            _ => 8,
        };
        payload + (to - from) * PACKET_OVERHEAD
    }
}

/// The wire operation; `None` for local operations.
pub(crate) fn operation(op: &SendOp) -> Option<Operation> {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInvalidate(_) => Some(Operation::Send),
        SendOp::Write { .. } | SendOp::WriteImm { .. } => Some(Operation::Write),
        SendOp::Read { .. } => Some(Operation::ReadRequest),
        SendOp::CompareSwap { .. } => Some(Operation::CompareSwap),
        SendOp::FetchAdd { .. } => Some(Operation::FetchAdd),
        SendOp::AtomicWrite { .. } => Some(Operation::AtomicWrite),
        SendOp::Flush { .. } => Some(Operation::Flush),
        SendOp::LocalInvalidate(_) | SendOp::BindWindow(_) => None,
    }
}

/// The extension header behind the others in the last packet.
pub(crate) fn trailer(op: &SendOp) -> Trailer {
    match op {
        SendOp::SendImm(_) | SendOp::WriteImm { .. } => Trailer::Immediate,
        SendOp::SendInvalidate(_) => Trailer::Invalidate,
        _ => Trailer::None,
    }
}

/// Whether this kind of queue pair offers the operation (IBTA volume 1, 9.4).
pub(crate) fn allowed_on(qp_type: QpType, op: &SendOp) -> bool {
    match qp_type {
        QpType::Rc => true,
        QpType::Uc => matches!(
            op,
            SendOp::Send
                | SendOp::SendImm(_)
                | SendOp::Write { .. }
                | SendOp::WriteImm { .. }
                | SendOp::LocalInvalidate(_)
                | SendOp::BindWindow(_)
        ),
        QpType::Ud => matches!(op, SendOp::Send | SendOp::SendImm(_)),
        // Annex A14 predates the operations of annex A19 and has no opcodes for them.
        QpType::XrcSend => !matches!(op, SendOp::AtomicWrite { .. } | SendOp::Flush { .. }),
        // Only its peer sends requests.
        QpType::XrcRecv => false,
    }
}

/// Whether the payload suits the operation. READs and atomics need SGEs, since inline data cannot receive. An atomic's
/// result takes 8 bytes, and so does the operand of an ATOMIC WRITE.
pub(crate) fn payload_fits(wr: &SendWr) -> bool {
    let can_receive = matches!(wr.payload, Payload::Sges(_));
    match wr.op {
        SendOp::Read { .. } => can_receive,
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => {
            can_receive && wr.payload.len() >= ATOMIC_LEN.into()
        }
        SendOp::AtomicWrite { .. } => wr.payload.len() == u64::from(ATOMIC_LEN),
        _ => true,
    }
}

#[inline]
pub(crate) fn completion_opcode(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInvalidate(_) => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
        SendOp::Read { .. } => WcOpcode::RdmaRead,
        SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
        SendOp::Flush { .. } => WcOpcode::Flush,
        SendOp::LocalInvalidate(_) => WcOpcode::LocalInv,
        SendOp::BindWindow(_) => WcOpcode::BindMw,
    }
}
