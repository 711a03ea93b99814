//! Messages between the clients of a baseline and the processor of its memory node. A message is a header, and with a store
//! the page behind it. So is a reply, with the page behind it that was loaded. Replies come in the order of the messages.
//!
//! ```text
//!   message   operation (4)  number (4)  index (8)                    page or slab
//!   reply     number (4)     result (4)  address (8)  rkey (4)  0 (4)
//! ```
//!
//! All are big-endian.

use serde::{Deserialize, Serialize};

/// Bytes of a message's header.
pub(crate) const MESSAGE_BYTES: usize = 16;
/// Bytes of a reply's header.
pub(crate) const REPLY_BYTES: usize = 24;

/// What the node is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Send a page.
    Load = 1,
    /// Store into a page, which is allocated if the client does not have it.
    Store = 2,
    /// Free a page.
    Invalidate = 3,
    /// Allocate a slab, and permit READs and WRITEs of it.
    Reserve = 4,
    /// Free a slab.
    Release = 5,
}

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub operation: Operation,
    /// Counts the client's messages.
    pub number: u32,
    /// A page, or a slab.
    pub index: u64,
}

impl Message {
    pub fn emit(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..4].copy_from_slice(&(self.operation as u32).to_be_bytes());
        bytes[4..8].copy_from_slice(&self.number.to_be_bytes());
        bytes[8..].copy_from_slice(&self.index.to_be_bytes());
        bytes
    }

    /// `None` for an operation that there is not.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Option<Message> {
        let operation = match word(bytes, 0) {
            1 => Operation::Load,
            2 => Operation::Store,
            3 => Operation::Invalidate,
            4 => Operation::Reserve,
            5 => Operation::Release,
            _ => return None,
        };
        Some(Message { operation, number: word(bytes, 4), index: double_word(bytes, 8) })
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done = 0,
    PoolEmpty = 1,
    BudgetExhausted = 2,
}

/// Memory of the node that the client may READ and WRITE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SlabKey {
    pub addr: u64,
    pub rkey: u32,
}

/// A reply's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// That of the message.
    pub number: u32,
    pub outcome: Outcome,
    /// Of a slab that was reserved.
    pub key: SlabKey,
}

impl Reply {
    pub fn emit(&self) -> [u8; REPLY_BYTES] {
        let mut bytes = [0; REPLY_BYTES];
        bytes[..4].copy_from_slice(&self.number.to_be_bytes());
        bytes[4..8].copy_from_slice(&(self.outcome as u32).to_be_bytes());
        bytes[8..16].copy_from_slice(&self.key.addr.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.key.rkey.to_be_bytes());
        bytes
    }

    /// `None` for an outcome that there is not.
    pub fn parse(bytes: &[u8; REPLY_BYTES]) -> Option<Reply> {
        let outcome = match word(bytes, 4) {
            0 => Outcome::Done,
            1 => Outcome::PoolEmpty,
            2 => Outcome::BudgetExhausted,
            _ => return None,
        };
        let key = SlabKey { addr: double_word(bytes, 8), rkey: word(bytes, 16) };
        Some(Reply { number: word(bytes, 0), outcome, key })
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn double_word(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) << 32 | u64::from(word(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_parsed_as_they_were_emitted() {
        for operation in
            [Operation::Load, Operation::Store, Operation::Invalidate, Operation::Reserve, Operation::Release]
        {
            let message = Message { operation, number: 0x0102_0304, index: 0x0506_0708_090a_0b0c };
            assert_eq!(Message::parse(&message.emit()), Some(message));
        }
        for outcome in [Outcome::Done, Outcome::PoolEmpty, Outcome::BudgetExhausted] {
            let key = SlabKey { addr: u64::MAX - 1, rkey: 7 };
            let reply = Reply { number: 9, outcome, key };
            assert_eq!(Reply::parse(&reply.emit()), Some(reply));
        }
    }

    #[test]
    fn operations_and_outcomes_that_there_are_not_are_refused() {
        let message = Message { operation: Operation::Release, number: 0, index: 0 };
        for operation in [0, 6] {
            let mut bytes = message.emit();
            bytes[3] = operation;
            assert_eq!(Message::parse(&bytes), None);
        }
        let reply = Reply { number: 0, outcome: Outcome::Done, key: SlabKey::default() };
        let mut bytes = reply.emit();
        bytes[7] = 3;
        assert_eq!(Reply::parse(&bytes), None);
    }
}
