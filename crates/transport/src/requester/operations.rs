//! What the protocol says about each send operation: one row per [`SendOp`].

use terrace_wire::{Operation, Trailer};

use crate::append::APPEND_LEN_MAX;
use crate::types::{ATOMIC_LEN, MESSAGE_LEN_MAX, Payload, QpType, SendOp, WcOpcode};

/// The row of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// The operation on the wire; `None` for one that is executed locally.
    pub(crate) wire: Option<Operation>,
    /// The extension header behind the others in the last packet.
    pub(crate) trailer: Trailer,
    /// What the peer answers with.
    pub(crate) answer: Answer,
    /// The opcode of its completion.
    pub(crate) completion: WcOpcode,
    /// What its payload has to be.
    pub(crate) payload: Suitable,
    /// The queue pairs that offer it (IBTA volume 1, 9.4).
    offered: Offered,
    /// Whether a same-host peer's memory may be accessed for it without packets.
    pub(crate) is_direct: bool,
}

/// What the peer answers a request with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// An ACK, or nothing at all.
    Ack,
    /// READ responses with the data.
    Data,
    /// The value before an atomic operation.
    Value,
    /// An empty READ response.
    Empty,
    /// The offset of an APPEND's record, in the form of a value: it goes behind the record in the payload.
    Offset,
}

/// Which payloads suit an operation. Inline data cannot receive, so what receives needs SGEs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suitable {
    Any,
    /// Memory for the data of a READ.
    Memory,
    /// Memory for the result of an atomic operation: its first 8 bytes.
    Result,
    /// The same with the masks of a masked compare and swap.
    Masked,
    /// The operand of an ATOMIC WRITE: 8 bytes.
    Operand,
    /// The record of an APPEND, and memory for its offset: an element of 8 bytes, the last one.
    Record,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Offered {
    Everywhere,
    /// All but UD.
    Connected,
    /// RC and XRC.
    Reliable,
    /// RC. Annex A14 (XRC) predates the operations of annex A19 and has no opcodes for them. APPEND has none either.
    RcOnly,
}

const SEND: Row = Row {
    wire: Some(Operation::Send),
    trailer: Trailer::None,
    answer: Answer::Ack,
    completion: WcOpcode::Send,
    payload: Suitable::Any,
    offered: Offered::Everywhere,
    is_direct: false,
};

const WRITE: Row = Row {
    wire: Some(Operation::Write),
    completion: WcOpcode::RdmaWrite,
    offered: Offered::Connected,
    is_direct: true,
    ..SEND
};

const COMPARE_SWAP: Row = Row {
    wire: Some(Operation::CompareSwap),
    answer: Answer::Value,
    completion: WcOpcode::CompSwap,
    payload: Suitable::Result,
    offered: Offered::Reliable,
    is_direct: true,
    ..SEND
};

const LOCAL_INVALIDATE: Row =
    Row { wire: None, completion: WcOpcode::LocalInv, offered: Offered::Connected, ..SEND };

impl Row {
    /// The row of this operation.
    #[inline(always)] // Callers use one field, which then is all that is made.
    pub(crate) const fn of(op: &SendOp) -> Row {
        match op {
            SendOp::Send => SEND,
            SendOp::SendImm(_) => Row { trailer: Trailer::Immediate, ..SEND },
            SendOp::SendInvalidate(_) => {
                Row { trailer: Trailer::Invalidate, offered: Offered::Reliable, ..SEND }
            }
            SendOp::Write { .. } => WRITE,
            SendOp::WriteImm { .. } => Row { trailer: Trailer::Immediate, is_direct: false, ..WRITE },
            SendOp::Read { .. } => Row {
                wire: Some(Operation::ReadRequest),
                answer: Answer::Data,
                completion: WcOpcode::RdmaRead,
                payload: Suitable::Memory,
                offered: Offered::Reliable,
                is_direct: true,
                ..SEND
            },
            SendOp::CompareSwap { .. } => COMPARE_SWAP,
            SendOp::FetchAdd { .. } => {
                Row { wire: Some(Operation::FetchAdd), completion: WcOpcode::FetchAdd, ..COMPARE_SWAP }
            }
            SendOp::MaskedCompareSwap { .. } => Row {
                wire: Some(Operation::MaskedCompareSwap),
                payload: Suitable::Masked,
                offered: Offered::RcOnly,
                ..COMPARE_SWAP
            },
            SendOp::MaskedFetchAdd { .. } => Row {
                wire: Some(Operation::MaskedFetchAdd),
                completion: WcOpcode::FetchAdd,
                offered: Offered::RcOnly,
                ..COMPARE_SWAP
            },
            SendOp::AtomicWrite { .. } => Row {
                wire: Some(Operation::AtomicWrite),
                answer: Answer::Empty,
                completion: WcOpcode::AtomicWrite,
                payload: Suitable::Operand,
                offered: Offered::RcOnly,
                ..SEND
            },
            SendOp::Flush { .. } => Row {
                wire: Some(Operation::Flush),
                answer: Answer::Empty,
                completion: WcOpcode::Flush,
                offered: Offered::RcOnly,
                ..SEND
            },
            SendOp::Append { .. } => Row {
                wire: Some(Operation::Append),
                answer: Answer::Offset,
                completion: WcOpcode::Append,
                payload: Suitable::Record,
                offered: Offered::RcOnly,
                ..SEND
            },
            SendOp::LocalInvalidate(_) => LOCAL_INVALIDATE,
            SendOp::BindWindow(_) => Row { completion: WcOpcode::BindMw, ..LOCAL_INVALIDATE },
            SendOp::Nop => {
                Row { completion: WcOpcode::Nop, offered: Offered::Everywhere, ..LOCAL_INVALIDATE }
            }
        }
    }

    /// Whether this kind of queue pair offers the operation.
    #[inline(always)]
    pub(crate) const fn is_offered_by(&self, qp_type: QpType) -> bool {
        match qp_type {
            QpType::Rc => true,
            QpType::Uc => matches!(self.offered, Offered::Everywhere | Offered::Connected),
            // A datagram is a SEND.
            QpType::Ud => matches!(self.offered, Offered::Everywhere),
            QpType::XrcSend => !matches!(self.offered, Offered::RcOnly),
            // Only its peer sends requests.
            QpType::XrcRecv => false,
        }
    }

    /// Bytes of data in this payload. Of an APPEND that is the record; the memory for its offset lies behind it.
    #[inline(always)]
    pub(crate) fn data_len(&self, payload: &Payload) -> u64 {
        let own = if matches!(self.answer, Answer::Offset) { ATOMIC_LEN.into() } else { 0 };
        payload.len() - own
    }

    /// Elements beyond those that a queue pair's `max_send_sge` limits: the memory for an APPEND's offset.
    #[inline(always)]
    pub(crate) const fn result_sges(&self) -> usize {
        matches!(self.answer, Answer::Offset) as usize
    }

    /// Longest payload in bytes.
    #[inline(always)]
    pub(crate) const fn payload_len_max(&self) -> u32 {
        match self.answer {
            Answer::Offset => APPEND_LEN_MAX + ATOMIC_LEN,
            _ => MESSAGE_LEN_MAX,
        }
    }

    /// Whether the answer brings something that the requester must not miss: a response rather than an ACK.
    #[inline(always)]
    pub(crate) const fn expects_response(&self) -> bool {
        !matches!(self.answer, Answer::Ack)
    }
}

impl Suitable {
    /// Whether this payload suits.
    #[inline(always)]
    pub(crate) fn admits(self, payload: &Payload) -> bool {
        match self {
            Suitable::Any => true,
            Suitable::Memory => payload.sges().is_some(),
            Suitable::Result => payload.sges().is_some() && payload.len() >= ATOMIC_LEN.into(),
            Suitable::Masked => matches!(payload, Payload::Masked(_)) && payload.len() >= ATOMIC_LEN.into(),
            Suitable::Operand => payload.len() == u64::from(ATOMIC_LEN),
            Suitable::Record => {
                payload.sges().and_then(<[_]>::last).is_some_and(|result| result.length == ATOMIC_LEN)
            }
        }
    }
}
