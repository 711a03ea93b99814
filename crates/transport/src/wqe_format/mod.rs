//! Work queue entries in memory, in the format of mlx5 (rdma-core, `providers/mlx5/mlx5dv.h`; WAIT and ENABLE as in OFED
//! 4.9): segments of 16 bytes in blocks of 64, all numbers big-endian.
//!
//! ```text
//!   control   | modifier, index, opcode | queue pair, segments | signature, flags | immediate |
//!   then, by opcode:
//!   SEND                      data...
//!   WRITE, READ               remote address, data...
//!   CAS, FAA                  remote address, atomic, data
//!   masked CAS                remote address, atomic (swap, compare), masks (swap, compare), data
//!   masked FAA                remote address, atomic (add, boundary), data
//!   WAIT, SEND_EN, RECV_EN    wait or enable
//!   NOP                       anything
//! ```
//!
//! A data segment is an SGE, or, if the top bit of its length is set, so many bytes themselves. The bytes of an entry come
//! from anybody who may write to the queue, so decoding checks everything and allocates only what 63 segments can hold.

mod decode;
mod encode;

use smallvec::SmallVec;

use crate::types::{Payload, SendFlags, SendOp};

pub use decode::{decode_receive, decode_send};
pub use encode::{encode_receive, encode_send, set_place};

/// Bytes of a segment.
pub const SEGMENT_BYTES: usize = 16;
/// Bytes of a block, the unit in which a send queue counts.
pub const BLOCK_BYTES: usize = 64;
/// Segments of an entry at most: the field has 6 bits.
pub const SEGMENTS_MAX: usize = 63;
/// Blocks of an entry at most.
pub const BLOCKS_MAX: usize = (SEGMENTS_MAX * SEGMENT_BYTES).div_ceil(BLOCK_BYTES);
/// The key in the data segment that ends the list of a receive.
pub const INVALID_LKEY: u32 = 0x100;

/// The opcodes of entries.
pub mod opcode {
    /// Does nothing.
    pub const NOP: u8 = 0x00;
    /// SEND that invalidates a key.
    pub const SEND_INVALIDATE: u8 = 0x01;
    /// WRITE.
    pub const WRITE: u8 = 0x08;
    /// WRITE with immediate data.
    pub const WRITE_IMM: u8 = 0x09;
    /// SEND.
    pub const SEND: u8 = 0x0a;
    /// SEND with immediate data.
    pub const SEND_IMM: u8 = 0x0b;
    /// Waits until a completion queue has got so many completions.
    pub const WAIT: u8 = 0x0f;
    /// READ.
    pub const READ: u8 = 0x10;
    /// Compare and swap.
    pub const COMPARE_SWAP: u8 = 0x11;
    /// Fetch and add.
    pub const FETCH_ADD: u8 = 0x12;
    /// Masked compare and swap.
    pub const MASKED_COMPARE_SWAP: u8 = 0x14;
    /// Masked fetch and add.
    pub const MASKED_FETCH_ADD: u8 = 0x15;
    /// Enables entries of a receive queue.
    pub const RECV_ENABLE: u8 = 0x16;
    /// Enables entries of a send queue.
    pub const SEND_ENABLE: u8 = 0x17;
}

/// The modifier of a masked operation on 8 bytes.
pub(crate) const MODIFIER_8_BYTES: u8 = 0x09;
/// The flag of a data segment that holds its bytes itself.
pub(crate) const INLINE: u32 = 1 << 31;

/// The flags of a control segment (`fm_ce_se`).
pub(crate) mod flag {
    pub const SOLICITED: u8 = 1 << 1;
    pub const SIGNALED: u8 = 1 << 3;
    pub const FENCES: u8 = 7 << 5;
    pub const FENCE: u8 = 4 << 5;
}

/// A control segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// What the entry does, one of [`opcode`].
    pub opcode: u8,
    /// More about what it does: the operand size of masked operations.
    pub modifier: u8,
    /// The index of its first block. Executing an entry ignores it.
    pub index: u16,
    /// The number of its queue pair. Executing an entry ignores it.
    pub qpn: u32,
    /// Segments of the entry, this one included: 1 to 63, or 0 if the entry is malformed.
    pub segments: u8,
    /// FENCE, SIGNALED and SOLICITED.
    pub flags: SendFlags,
    /// Immediate data, in network byte order as programs give it, or a key to invalidate.
    pub imm: u32,
}

impl Control {
    /// Reads a control segment. Every pattern of bits is one.
    pub fn parse(bytes: &[u8; SEGMENT_BYTES]) -> Control {
        let [modifier, index_high, index_low, opcode, q2, q1, q0, segments, _, _, _, marks, i0, i1, i2, i3] =
            *bytes;
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::FENCE, marks & flag::FENCES != 0);
        flags.set(SendFlags::SIGNALED, marks & flag::SIGNALED != 0);
        flags.set(SendFlags::SOLICITED, marks & flag::SOLICITED != 0);
        Control {
            opcode,
            modifier,
            index: u16::from_be_bytes([index_high, index_low]),
            qpn: u32::from_be_bytes([0, q2, q1, q0]),
            segments: segments & SEGMENTS_MAX as u8,
            flags,
            imm: u32::from_ne_bytes([i0, i1, i2, i3]),
        }
    }

    /// Writes the segment.
    pub fn emit(&self) -> [u8; SEGMENT_BYTES] {
        let [_, q2, q1, q0] = self.qpn.to_be_bytes();
        let [index_high, index_low] = self.index.to_be_bytes();
        let [i0, i1, i2, i3] = self.imm.to_ne_bytes();
        let marks = [
            (SendFlags::FENCE, flag::FENCE),
            (SendFlags::SIGNALED, flag::SIGNALED),
            (SendFlags::SOLICITED, flag::SOLICITED),
        ];
        let set = marks.iter().filter(|(named, _)| self.flags.contains(*named));
        let marks = set.fold(0, |sum, (_, bit)| sum | bit);
        let (modifier, opcode, segments) = (self.modifier, self.opcode, self.segments);
        [modifier, index_high, index_low, opcode, q2, q1, q0, segments, 0, 0, 0, marks, i0, i1, i2, i3]
    }

    /// Blocks of the entry: at least 1.
    pub fn blocks(&self) -> u32 {
        (usize::from(self.segments) * SEGMENT_BYTES).div_ceil(BLOCK_BYTES).max(1) as u32
    }
}

/// What an entry of a send queue does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendEntry {
    /// A request for the transport.
    Request {
        /// Its operation.
        op: SendOp,
        /// Its data.
        payload: Payload,
    },
    /// Waits until completion queue `cqn` has got the completion that `index` counts from the queue's creation on.
    Wait {
        /// The completion queue's number.
        cqn: u32,
        /// How many completions it must have got, modulo 2^32.
        index: u32,
    },
    /// Enables the entries before `index` of a queue pair's send queue.
    EnableSend {
        /// The queue pair's number.
        qpn: u32,
        /// One past the last block to enable; the lower 16 bits count.
        index: u32,
    },
    /// Enables the entries before `index` of a queue pair's receive queue.
    EnableRecv {
        /// The queue pair's number.
        qpn: u32,
        /// One past the last entry to enable; the lower 16 bits count.
        index: u32,
    },
}

/// The bytes of an entry, a multiple of 16.
pub type EntryBytes = SmallVec<[u8; BLOCK_BYTES]>;

/// Why an entry cannot be executed, or made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// The opcode is none of [`opcode`], or its modifier is not supported.
    #[error("no such operation")]
    Opcode,
    /// A segment is missing, one too many is there, or inline data does not end within the entry.
    #[error("segments do not fit the operation")]
    Segments,
    /// The work request has no form in memory: its data are neither SGEs nor inline, it is too long for an entry, or it is
    /// an operation that entries do not have.
    #[error("the work request has no form in memory")]
    NoForm,
}
