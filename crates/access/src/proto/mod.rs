//! The control protocol between clients and servers of extended regions.
//!
//! There are two kinds of messages. Both are little-endian, except for the header of datagrams. Reserved bytes are zero;
//! a decoder refuses other values there, and every invalid value elsewhere. A decoder accepts any bytes and returns a
//! message or a [`DecodeError`]; a decoded message encodes to the same bytes again.
//!
//! # Datagrams
//! Datagrams are sent by UD SEND between QP1s ([`Datagram`]). They request the description of an rkey, and set up a
//! control queue pair. They may be lost or duplicated, so requests are idempotent: a request that is repeated with its
//! transaction id (`tid`) gets the same answer each time. A datagram is exactly [`DATAGRAM_BYTES`] long and has the
//! form of a management datagram (IBTA volume 1, 13.4.2) of a vendor-specific class. A peer that does not implement
//! Terrace drops such datagrams. The form is:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | base version: 1 |
//! | 1 | 1 | management class: 0x3d |
//! | 2 | 1 | class version: [`VERSION`] |
//! | 3 | 1 | method: 0x01 for requests, 0x81 for answers |
//! | 4 | 4 | status and class-specific: 0 |
//! | 8 | 8 | transaction id, big-endian |
//! | 16 | 2 | attribute, big-endian: the kind, see below |
//! | 18 | 18 | attribute modifier, RMPP header: 0 |
//! | 36 | 4 | reserved 0; organisation 02:54:52 (locally administered) |
//! | 40 | 216 | body, the rest zero |
//!
//! | attribute, method | datagram | body |
//! |---|---|---|
//! | 1, 0x01 | `Describe` | rkey u32 |
//! | 1, 0x81 | `Description` | rkey u32, status u16, kind u8 (0 plain, 1 extended), mode u8 (0 one-sided, 1 by RPC, 2 plain); extended only: unit bytes u32, 4 zero, base va u64, length u64, lead bytes u64, region id u64, signature key 32 bytes |
//! | 2, 0x01 | `Connect` | qpn u32, first psn u32, path mtu u16 (bytes), receives posted u16 |
//! | 2, 0x81 | `Accepted` | qpn u32, first psn u32, path mtu u16 (bytes), receives posted u16, status u16; if refused all but the status is 0 |
//! | 3, 0x01 | `Join` | sender's qpn u32, receiver's qpn u32; of the sender's end of their control queue pair: qpn u32, first psn u32, path mtu u16 (bytes) |
//! | 3, 0x81 | `Joined` | the receiver's end, as above, status u16; if refused all but the status is 0 |
//!
//! # Messages
//! Messages are sent by SEND over the control queue pair ([`Message`]) and are at most [`MESSAGE_BYTES_MAX`] long. Each
//! begins with
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 1 | version: [`VERSION`] |
//! | 1 | 1 | kind |
//! | 2 | 2 | status; 0 but in `Done` |
//! | 4 | 4 | length of the message in bytes, this header included |
//! | 8 | 8 | id: chosen by the client, repeated in the answer; the first of several |
//!
//! | kind | message | from | body | answer |
//! |---|---|---|---|---|
//! | 1 | `Open` | client | rkey u32, 4 zero, region id u64 | `Opened`, or `Done` with an error status |
//! | 2 | `Opened` | server | of the bitmap, then of the version table: va u64, bytes u64, rkey u32, 4 zero | |
//! | 3 | `Magic` | client | client's qpn u32, server's qpn u32, rkey u32, on u8, 3 zero, region id u64 | `Done` |
//! | 4 | `Read` | client | one or more, to the end of the message: rkey u32, length u32, va u64, destination rkey u32, pages u32, destination va u64, page offset u16, 6 zero, bitmap: a u64 for each 64 pages | for each: data by RDMA WRITE, then `Done`, or an immediate in its place |
//! | 5 | `Write` | client | rkey u32, length u32, va u64, source rkey u32, source u8 (0 inline, 1 by READ), 3 zero, source va u64; if inline, the data | `Done` |
//! | 6 | `Done` | server | requests u32 | |
//! | 7 | `Find` | client | name, UTF-8, to the end of the message | `Found` |
//! | 8 | `Found` | server | rkey u32, then as in `Description` from the mode on | |
//! | 9 | `Pair` | client | qpn u32, first psn u32, path mtu u16 (bytes) | `Paired` |
//! | 10 | `Paired` | server | the same | |
//! | 11 | `Fetch` | client | rkey u32, length u32, va u64 | `Data`, or `Done` with an error status |
//! | 12 | `Data` | server | the bytes, to the end of the message | |
//! | 13 | `Atomic` | client | rkey u32, operation u8 (0 compare and swap, 1 fetch and add, 2 write), 3 zero, va u64, a multiple of 8, two operands u64: to compare and to swap, or the second 0 | `Value`, or `Done` with an error status |
//! | 14 | `Value` | server | the 8 bytes before the operation, u64 | |
//! | 15 | `Hold` | client | rkey u32, length u32, va u64, access u8 (0 READ, 1 WRITE), 7 zero | `Done`: the receiver is ready |
//! | 16 | `Release` | client | | none |
//! | 17 | `Describe` | client | rkey u32 | `Found`, or `Done`: `Plain` for a region that is all in memory, or an error status |
//! | 18 | `Forget` | server | rkey u32 | `Done`, when no request of the client names the rkey any more |
//! | 19 | `Probe` | client | | none: the acknowledgement of the SEND is what the client wants |
//!
//! `Read`: the message has one request or more, each with its own outcome. The id of the first is that of the message;
//! the ids of the others follow in succession. A request that the server refuses does not affect the others. Page 0 of
//! the bitmap is the page of the region's grid ([`Layout`](crate::layout::Layout)) that contains `va`. The server writes
//! the bytes of the wanted pages within `va..va + length`, each at its offset from `va` in the destination, and sends
//! `Done` after the data on the same queue pair. The page offset is that of `va` in its page; a request of a client whose
//! grid is stale is refused with `Invalid`. A page count of 0 means the whole range; a client that does not know the
//! region's grid sends 0.
//!
//! `Done` is the outcome of as many requests as it says, whose ids begin with that of the message, follow in succession
//! and have one upper half. If they succeeded, and data is sent with the outcome, and the ids permit it
//! ([`immediate_of`]), the immediate of the last WRITE replaces `Done`.
//!
//! `Hold`: the range stays in memory until `Release` with the same id, so that the client can access it one-sidedly. A
//! server disconnects a client that keeps a range for too long.
//!
//! `Forget`: the region of an rkey that the server has described has ended. Its rkey is no other region's until the client
//! has answered.
//!
//! `Magic` contains the region id of the registration whose signature page the client knows, so that a server can
//! refuse stale knowledge.

mod bytes;
mod codec;
mod datagram;
mod message;

use std::ops::Range;

pub use bytes::{DecodeError, EncodeError};
pub use datagram::{Accepted, Connect, DATAGRAM_BYTES, Datagram, Described, Join, Mode, RegionDescription};
pub use terrace_transport::Endpoint;

pub use message::{
    Access, Atomic, AtomicKind, Body, Done, FETCH_BYTES_MAX, Fetch, Found, HEADER_BYTES, Hold,
    INLINE_BYTES_MAX, MESSAGE_BYTES_MAX, Magic, Message, NAME_BYTES_MAX, Open, Opened, Pages, READ_PAGES_MAX,
    REQUESTS_MAX, Read, Source, Status, Table, Write,
};

/// The version of the protocol, stated in every message.
pub const VERSION: u8 = 5;

/// Ids fit into an immediate if their lower halves are below this and their upper halves below 256.
pub const IMMEDIATE_IDS: u32 = 1 << ID_BITS;
/// The most requests whose success one immediate reports.
pub const IMMEDIATE_REQUESTS_MAX: u32 = 1 << COUNT_BITS;

const ID_BITS: u32 = 18;
const COUNT_BITS: u32 = 6;

/// The immediate by which the last WRITE of a `Read` reports that the requests with these ids succeeded: the first id's
/// upper half, 6 bits of the number of requests less one, and 18 bits of the first id's lower half. `None` for ids that
/// are too large, or too many, which need a `Done`.
pub fn immediate_of(ids: Range<u64>) -> Option<u32> {
    let (upper, lower) = ((ids.start >> 32) as u32, ids.start as u32);
    let count = u32::try_from(ids.end.checked_sub(ids.start)?).ok()?;
    let fits = upper < 256
        && (1..=IMMEDIATE_REQUESTS_MAX).contains(&count)
        && lower.checked_add(count).is_some_and(|end| end <= IMMEDIATE_IDS);
    fits.then(|| upper << (ID_BITS + COUNT_BITS) | (count - 1) << ID_BITS | lower)
}

/// The ids of the requests whose success an immediate reports.
pub fn ids_of_immediate(immediate: u32) -> Range<u64> {
    let upper = u64::from(immediate >> (ID_BITS + COUNT_BITS));
    let first = upper << 32 | u64::from(immediate % IMMEDIATE_IDS);
    first..first + u64::from(immediate >> ID_BITS & (IMMEDIATE_REQUESTS_MAX - 1)) + 1
}
