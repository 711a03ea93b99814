//! RoCEv2 on the wire: headers, opcodes and the invariant CRC. Parses bytes into typed headers, and emits them.
//!
//! The crate does not depend on sockets, clocks, queue pairs or memory. Every function accepts any input: bytes come
//! from untrusted peers, so a parser returns a value or a [`ParseError`] and never panics.
//!
//! | module | contents |
//! |---|---|
//! | [`opcode`] | the table of opcodes and their headers |
//! | [`header`] | one type per header, and its bytes |
//! | [`packet`] | a whole packet: parsing and emitting |
//! | [`icrc`] | the checksum behind every packet |
//! | [`psn`] | 24-bit sequence numbers |
//! | [`time`] | points in time, as numbers |
//! | [`path`] | addresses: destinations and sources of packets |
//! | [`cm`] | datagrams of communication management, which establish connections |
//! | [`grh`] | the 40 bytes that precede a received datagram in memory |

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod cm;
pub mod grh;
pub mod header;
pub mod icrc;
pub mod opcode;
pub mod packet;
pub mod path;
pub mod psn;
pub mod time;

pub use grh::{GRH_LEN, grh_v4, grh_v6};
pub use header::{
    Aeth, AppendEth, AppendFlags, AtomicEth, Bth, Deth, Extensions, Feth, NakCode, Reth, Syndrome,
    XRC_SRQN_MAX,
};
pub use icrc::ICRC_LEN;
pub use opcode::{Headers, MAX_HEADER_LEN, Opcode, OpcodeInfo, Operation, Position, Service, Trailer};
pub use packet::{EmitError, Packet, ParseError, emit_headers};
pub use path::{MULTICAST_QPN, Path, QPN_INSTANCE_SHIFT, ROCE_PORT, RxMeta, port_of};
pub use psn::Psn;
pub use time::Time;
