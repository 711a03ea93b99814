//! The messages on the control queue pair.

use smallvec::SmallVec;
use terrace_transport::Endpoint;

use super::bytes::{DecodeError, refuse};
use super::datagram::RegionDescription;
use crate::pages::PageBitmap;

/// Longest message in bytes.
pub const MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// Bytes before the body.
pub const HEADER_BYTES: usize = 16;
/// The most pages that one [`Read`] can request.
pub const READ_PAGES_MAX: usize = (MESSAGE_BYTES_MAX - HEADER_BYTES - READ_BYTES) * 8;
/// The most data that one `Write` can carry, in bytes.
pub const INLINE_BYTES_MAX: usize = MESSAGE_BYTES_MAX - HEADER_BYTES - WRITE_BYTES;

/// The most requests in one message.
pub const REQUESTS_MAX: usize = (MESSAGE_BYTES_MAX - HEADER_BYTES) / READ_BYTES;

/// The most bytes that a [`Fetch`] can request.
pub const FETCH_BYTES_MAX: u32 = (MESSAGE_BYTES_MAX - HEADER_BYTES) as u32;

/// Bytes of the fields of `Read` and of `Write` that have a fixed length.
const READ_BYTES: usize = 40;
const WRITE_BYTES: usize = 32;

/// Longest name of a region in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Status {
    /// The request succeeded.
    Ok = 0,
    /// There is no region with this rkey, or with this region id.
    NoSuchRegion = 1,
    /// The peer lacks the right to this access of the region.
    AccessDenied = 2,
    /// The range is not within the region.
    OutOfRange = 3,
    /// The request is malformed.
    Invalid = 4,
    /// The device behind the region failed.
    DeviceError = 5,
    /// The file system has no space for a unit that was never written.
    NoSpace = 6,
    /// The server lacks resources for the request at the moment. It did nothing; the client may retry.
    Busy = 7,
    /// The region is all in memory and should be accessed one-sidedly. The server did nothing.
    Plain = 8,
    /// The client's memory, the data's destination or source, did not permit the server's access.
    ClientMemory = 9,
    /// The server does not support the request.
    Unsupported = 10,
    /// The server's queue pair is in the error state, or has no peer: it answers no requests.
    Disconnected = 11,
}

impl Status {
    /// All statuses, in the order of their numbers.
    pub const ALL: [Status; 12] = [
        Status::Ok,
        Status::NoSuchRegion,
        Status::AccessDenied,
        Status::OutOfRange,
        Status::Invalid,
        Status::DeviceError,
        Status::NoSpace,
        Status::Busy,
        Status::Plain,
        Status::ClientMemory,
        Status::Unsupported,
        Status::Disconnected,
    ];

    pub(super) fn decode(value: u16) -> Result<Status, DecodeError> {
        match Status::ALL.get(usize::from(value)) {
            Some(status) => Ok(*status),
            None => refuse("status", value.into(), "no such status"),
        }
    }
}

/// A message on the control queue pair. Its data is borrowed from the receive buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Chosen by the client; an answer has its request's. Of several requests in one message, and of several that one
    /// message answers, the id of the first; the others' ids follow in succession.
    pub id: u64,
    /// The content.
    pub body: Body<'a>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// Requests the addresses of a region's tables.
    Open(Open),
    /// Answers [`Body::Open`].
    Opened(Opened),
    /// Enables or disables the signature page as the answer to READs of absent pages on this queue pair.
    Magic(Magic),
    /// Requests pages, which the server writes into the client's memory: one request or more.
    Read(SmallVec<[Read; 1]>),
    /// Requests that data be written into the region.
    Write(Write<'a>),
    /// Requests the region with this name.
    Find(&'a str),
    /// Answers [`Body::Find`] and [`Body::Describe`].
    Found(Found),
    /// Requests a queue pair for access to named regions; states the client's end.
    Pair(Endpoint),
    /// Answers [`Body::Pair`] with the server's end.
    Paired(Endpoint),
    /// The outcome of requests.
    Done(Done),
    /// Requests a few bytes in the answer.
    Fetch(Fetch),
    /// Answers [`Body::Fetch`].
    Data(&'a [u8]),
    /// Requests an atomic operation.
    Atomic(Atomic),
    /// Answers [`Body::Atomic`]: the bytes before the operation, as a number.
    Value(u64),
    /// Requests that a range be brought into memory and stay there.
    Hold(Hold),
    /// Ends [`Body::Hold`] with the same id.
    Release,
    /// Requests the description of this rkey, as the queue pair may use it.
    Describe(u32),
    /// Requests that the description of this rkey be forgotten, whose region has ended. The rkey names nothing until the
    /// answer.
    Forget(u32),
    /// Finds out whether the peer's device still answers.
    Probe,
}

/// Requests a few bytes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The region's key.
    pub rkey: u32,
    /// First address.
    pub va: u64,
    /// Length in bytes: 1 to [`FETCH_BYTES_MAX`].
    pub length: u32,
}

/// Requests an atomic operation on 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// The region's key.
    pub rkey: u32,
    /// Address of the bytes, a multiple of 8.
    pub va: u64,
    /// The operation.
    pub kind: AtomicKind,
}

/// An atomic operation on a number of 64 bits, in the byte order of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicKind {
    /// Compare and swap.
    CompareSwap { compare: u64, swap: u64 },
    /// Fetch and add.
    FetchAdd { add: u64 },
    /// ATOMIC WRITE.
    Write { value: u64 },
}

/// Requests that a range stay in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The region's key.
    pub rkey: u32,
    /// First address.
    pub va: u64,
    /// Length in bytes; never 0.
    pub length: u32,
    /// What the client is about to do.
    pub access: Access,
}

/// An access to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Access {
    /// READ.
    Read = 0,
    /// WRITE.
    Write = 1,
}

/// The outcome of one request, or of several with successive ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Their status.
    pub status: Status,
    /// Their number: 1 to [`REQUESTS_MAX`].
    pub count: u32,
}

impl Done {
    /// The outcome of one request.
    pub fn one(status: Status) -> Done {
        Done { status, count: 1 }
    }
}

/// A named region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its rkey.
    pub rkey: u32,
    /// Its description.
    pub region: RegionDescription,
}

/// Requests the tables of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open {
    /// Its key.
    pub rkey: u32,
    /// The registration that the client means.
    pub region_id: u64,
}

/// Memory of the server that the client may READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// First address.
    pub va: u64,
    /// Length in bytes.
    pub length_bytes: u64,
    /// Key for READs.
    pub rkey: u32,
}

/// The tables of a region, of which a client READs the parts that it needs. The bitmap has one bit per unit: unit `n` is
/// bit `n % 64` of the little-endian word `n / 64`. The version table has an entry per page, odd versions if present: of
/// 4 bytes, or of 8 with the version in the upper 29 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The residency bitmap.
    pub bitmap: Table,
    /// The version table.
    pub versions: Table,
}

/// Enables or disables the signature page for one region and one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Magic {
    /// The client's queue pair.
    pub client_qpn: u32,
    /// The server's queue pair at its other end.
    pub server_qpn: u32,
    /// The region's key.
    pub rkey: u32,
    /// The registration whose signature page the client knows.
    pub region_id: u64,
    /// Whether READs of absent pages get the signature page.
    pub on: bool,
}

/// Requests pages of a range, which the server writes into the client's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The region's key.
    pub rkey: u32,
    /// First address of the range.
    pub va: u64,
    /// Length of the range in bytes; never 0.
    pub length: u32,
    /// The wanted pages; `None` for the whole range, from a client that does not know the region's grid.
    pub pages: Option<Pages>,
    /// The destination of the range's first byte.
    pub dest_va: u64,
    /// Key of the client's memory there.
    pub dest_rkey: u32,
}

impl Read {
    /// Bytes of the request in a message.
    pub fn encoded_bytes(&self) -> usize {
        READ_BYTES + self.pages.as_ref().map_or(0, |pages| pages.wanted.words().len() * 8)
    }
}

/// Some of the pages of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pages {
    /// The offset of the range's first byte in its page, by the client's knowledge of the region's grid. The server
    /// verifies it.
    pub offset: u16,
    /// The wanted pages: at least one.
    pub wanted: PageBitmap,
}

/// Requests that data be written into a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write<'a> {
    /// The region's key.
    pub rkey: u32,
    /// First address of the range.
    pub va: u64,
    /// Length in bytes; never 0.
    pub length: u32,
    /// Its data.
    pub source: Source<'a>,
}

/// The location of the data of a [`Write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'a> {
    /// In the message, with the length of the write.
    Inline(&'a [u8]),
    /// In the client's memory; the server READs it.
    Remote {
        /// Address of its first byte.
        va: u64,
        /// Key of that memory.
        rkey: u32,
    },
}
