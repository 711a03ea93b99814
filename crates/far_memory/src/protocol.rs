//! What clients and memory nodes exchange: one request and one answer over TCP, then messages that start chains.
//!
//! A chain serves its messages in rounds, in the order in which they are sent. Round `n` uses slot `n mod slots` of the
//! chain's queues. The client has at most half of the slots in flight, so the other half can be made ready: message
//! `n` has the index of the WAIT of round `n + slots / 2`, whose slot is not in use. With it come the indexes of round
//! `n`'s own ENABLEs and the number for the doorbell record (client-assisted recycling, section 4.4 of the ODRP paper).

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use terrace_access::proto::Endpoint;

use crate::messages::SlabKey;
use crate::scheme::Scheme;
use crate::status::NodeStatus;

/// Version of the protocol: both ends must have the same.
pub(crate) const VERSION: u32 = 4;
/// Bytes of a request line at most.
pub(crate) const REQUEST_BYTES_MAX: usize = 4096;
/// Bytes of an answer line at most.
pub(crate) const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Messages in flight to a chain at most.
pub(crate) const DEPTH_MAX: u32 = 128;
/// Bytes of a translation table's entry: the address of a page, big-endian.
pub(crate) const ENTRY_BYTES: u64 = 8;

/// The functions of a memory node. Each has a chain of its own for every client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    /// Sends a stored page.
    Load,
    /// Stores into a page that the client has.
    MappedStore,
    /// Takes a page of the pool, stores into it and maps it.
    UnmappedStore,
    /// Unmaps a page and gives it back to the pool.
    Invalidate,
}

impl Function {
    /// All of them, in the order of [`Connect::ends`].
    pub const ALL: [Function; 4] =
        [Function::Load, Function::MappedStore, Function::UnmappedStore, Function::Invalidate];

    /// Its place in [`Function::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// Blocks of the control queue that a round takes: a power of two.
    pub fn blocks(self) -> u32 {
        match self {
            Function::Load | Function::MappedStore => 8,
            Function::UnmappedStore | Function::Invalidate => 16,
        }
    }

    /// Whether a page comes with its messages: behind the arguments, or by a WRITE before the message.
    pub fn takes_page(self) -> bool {
        matches!(self, Function::MappedStore | Function::UnmappedStore)
    }

    /// Whether a round has a second ENABLE of its own queue.
    pub fn enables_twice(self) -> bool {
        matches!(self, Function::UnmappedStore | Function::Invalidate)
    }

    /// Bytes of a message's arguments.
    pub fn args_bytes(self) -> usize {
        if self.enables_twice() { ARGS_BYTES_MAX } else { ARGS_BYTES_MAX - 4 }
    }
}

/// Bytes of arguments of any function at most.
pub(crate) const ARGS_BYTES_MAX: usize = 44;

/// The indexes of a chain's rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rounds {
    pub function: Function,
    /// Messages in flight at most, half of the slots: a power of two.
    pub depth: u32,
}

impl Rounds {
    /// Slots of its queues.
    pub fn slots(self) -> u32 {
        self.depth * 2
    }

    /// The slot of a round.
    pub fn slot(self, round: u32) -> u32 {
        round % self.slots()
    }

    /// Pages for those that rounds load or store. A client has so many rounds in flight at most, and all of these pages should be
    /// in the processor's cache.
    pub fn pages(self) -> u32 {
        self.depth
    }

    /// The page that a round uses.
    pub fn page(self, round: u32) -> u32 {
        round % self.pages()
    }

    /// The index of a round's WAIT: the message's completion.
    pub fn wait(self, round: u32) -> u32 {
        round.wrapping_add(1)
    }

    /// The index that round `round` enables its own queue to: the round that its message has made ready.
    pub fn enable(self, round: u32) -> u32 {
        round.wrapping_add(self.depth + 1).wrapping_mul(self.function.blocks())
    }

    /// The index that it enables the reply to.
    pub fn reply(self, round: u32) -> u32 {
        round.wrapping_add(1)
    }

    /// The doorbell record's number.
    pub fn doorbell(self, round: u32) -> u32 {
        round.wrapping_add(self.slots())
    }
}

/// The arguments of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Args {
    /// Address of the table's entry.
    pub entry: u64,
    /// Immediate data of the reply, as the client reads them.
    pub cookie: u32,
    /// Where the reply's data go.
    pub reply_addr: u64,
    pub reply_rkey: u32,
    /// Index of the WAIT of round `n + depth`.
    pub wait: u32,
    pub enable: u32,
    pub reply: u32,
    pub doorbell: u32,
}

impl Args {
    /// The bytes of a message's arguments, of which the function takes the first [`Function::args_bytes`].
    pub fn emit(&self) -> [u8; ARGS_BYTES_MAX] {
        let mut bytes = [0; ARGS_BYTES_MAX];
        bytes[..8].copy_from_slice(&self.entry.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.cookie.to_ne_bytes());
        bytes[12..20].copy_from_slice(&self.reply_addr.to_be_bytes());
        let words = [self.reply_rkey, self.wait, self.enable, self.reply, self.doorbell, self.enable];
        for (place, word) in bytes[20..].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }
}

/// The number and first PSN of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChainEnd {
    pub qpn: u32,
    pub psn: u32,
}

impl ChainEnd {
    pub fn of(endpoint: Endpoint) -> ChainEnd {
        ChainEnd { qpn: endpoint.qpn, psn: endpoint.psn }
    }

    pub fn endpoint(self, mtu_bytes: u16) -> Endpoint {
        Endpoint { qpn: self.qpn, psn: self.psn, mtu_bytes }
    }
}

/// A client's request for a space of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connect {
    pub version: u32,
    /// The client's name, for people.
    pub name: String,
    /// Pages of the space.
    pub page_count: u64,
    /// Messages in flight to each chain at most: a power of two.
    pub depth: u32,
    /// The address of the client's device, which must be that of the TCP connection.
    pub address: IpAddr,
    pub mtu_bytes: u16,
    /// The node's scheme, as the client has asked for it.
    pub scheme: Scheme,
    /// The client's ends: of chains in the order of [`Function::ALL`], else one.
    pub ends: Vec<ChainEnd>,
}

/// The first line of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Request {
    Connect(Box<Connect>),
    /// What a client has to know before it connects.
    Scheme,
    Status,
}

/// The node's answer to [`Connect`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Connected {
    pub address: IpAddr,
    pub mtu_bytes: u16,
    pub ends: Vec<ChainEnd>,
    /// Pages that the client may have.
    pub budget_pages: u64,
    pub grant: Grant,
}

/// How a client reaches its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Grant {
    Chains {
        /// Address of the table's first entry.
        table: u64,
        /// What an unmapped store returns as the page's address if the pool is empty.
        empty: u64,
        /// Where the pages of stores may be WRITten before their messages: for mapped stores, and for unmapped ones.
        pages: [SlabKey; 2],
    },
    /// The whole space is reserved.
    Reserved(SlabKey),
    /// It asks for slabs, or for pages.
    Messages,
}

/// The node's answers. After `Connected`, a second line may come: `Ended`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    Connected(Box<Connected>),
    Scheme(Scheme),
    Status(NodeStatus),
    /// The node refuses, and why.
    Refused(String),
    /// The node has ended the connection, and why. The client's pages are gone.
    Ended(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_big_endian_in_the_order_in_which_receives_scatter_them() {
        let args = Args {
            entry: 0x0102_0304_0506_0708,
            cookie: 9u32.to_be(),
            reply_addr: 10,
            reply_rkey: 11,
            wait: 12,
            enable: 13,
            reply: 14,
            doorbell: 15,
        };
        let bytes = args.emit();
        assert_eq!(bytes[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
        let words: Vec<u8> = bytes[8..].iter().copied().filter(|byte| *byte != 0).collect();
        assert_eq!(words, [9, 10, 11, 12, 13, 14, 15, 13]);
    }

    #[test]
    fn indexes_are_those_of_the_rounds_and_wrap() {
        let rounds = Rounds { function: Function::Load, depth: 16 };
        assert_eq!((rounds.slots(), rounds.slot(33)), (32, 1));
        assert_eq!(
            (rounds.wait(0), rounds.enable(0), rounds.reply(0), rounds.doorbell(0)),
            (1, 17 * 8, 1, 32)
        );
        assert_eq!(rounds.wait(u32::MAX), 0);
    }
}
