//! The messages on the control queue pair.

use super::VERSION;
use super::bytes::{DecodeError, EncodeError, Reader, Writer, check_range, refuse};
use super::datagram::{RegionDescription, decode_mtu};
use crate::layout::UNITS_MAX;
use crate::pages::PageBitmap;
use crate::signature::PAGE_BYTES;

/// Longest message in bytes.
pub const MESSAGE_BYTES_MAX: usize = 16 * 1024;
/// Bytes before the body.
pub const HEADER_BYTES: usize = 16;
/// The most pages that one `Read` can request.
pub const READ_PAGES_MAX: usize = (MESSAGE_BYTES_MAX - HEADER_BYTES - READ_BYTES) * 8;
/// The most data that one `Write` can carry, in bytes.
pub const INLINE_BYTES_MAX: usize = MESSAGE_BYTES_MAX - HEADER_BYTES - WRITE_BYTES;

/// Bytes of the fields of `Read` and of `Write` that have a fixed length.
const READ_BYTES: usize = 40;
const WRITE_BYTES: usize = 32;
const PAGE: u64 = PAGE_BYTES as u64;

const KIND_OPEN: u8 = 1;
const KIND_OPENED: u8 = 2;
const KIND_MAGIC: u8 = 3;
const KIND_READ: u8 = 4;
const KIND_WRITE: u8 = 5;
const KIND_COUNTS: u8 = 6;
const KIND_DONE: u8 = 7;
const KIND_FIND: u8 = 8;
const KIND_FOUND: u8 = 9;
const KIND_PAIR: u8 = 10;
const KIND_PAIRED: u8 = 11;

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
}

impl Status {
    /// All statuses, in the order of their numbers.
    pub const ALL: [Status; 11] = [
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
    /// Chosen by the client; an answer has its request's.
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
    /// Requests pages, which the server writes into the client's memory.
    Read(Read),
    /// Requests that data be written into the region.
    Write(Write<'a>),
    /// States the address of the client's access counters.
    Counts(Counts),
    /// Requests the region with this name.
    Find(&'a str),
    /// Answers [`Body::Find`].
    Found(Found),
    /// Requests a queue pair for access to named regions; states the client's end.
    Pair(Endpoint),
    /// Answers [`Body::Pair`] with the server's end.
    Paired(Endpoint),
    /// The outcome of the request with this id.
    Done(Status),
}

/// A named region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its rkey.
    pub rkey: u32,
    /// Its description.
    pub region: RegionDescription,
}

/// One end of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Queue pair number.
    pub qpn: u32,
    /// PSN of its first request.
    pub psn: u32,
    /// Path MTU in bytes.
    pub mtu_bytes: u16,
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

/// The tables of a region. The bitmap has one bit per unit: unit `n` is bit `n % 64` of the little-endian word `n / 64`.
/// The version table has one 32-bit version per page, odd if present.
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

/// The table of the client's access counters: 32-bit little-endian numbers, for `unit_count` units from `first_unit`
/// on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// The region's key.
    pub rkey: u32,
    /// The registration whose accesses are counted.
    pub region_id: u64,
    /// Unit of the first counter.
    pub first_unit: u32,
    /// The number of counters; 0 withdraws the table.
    pub unit_count: u32,
    /// Address of the first counter.
    pub table_va: u64,
    /// Key for READs of the table.
    pub table_rkey: u32,
}

impl<'a> Message<'a> {
    /// Writes the message to the front of a buffer; returns its length.
    ///
    /// # Errors
    /// If the message does not fit into the buffer, or is longer than [`MESSAGE_BYTES_MAX`].
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, EncodeError> {
        let (kind, status) = match &self.body {
            Body::Open(_) => (KIND_OPEN, Status::Ok),
            Body::Opened(_) => (KIND_OPENED, Status::Ok),
            Body::Magic(_) => (KIND_MAGIC, Status::Ok),
            Body::Read(_) => (KIND_READ, Status::Ok),
            Body::Write(_) => (KIND_WRITE, Status::Ok),
            Body::Counts(_) => (KIND_COUNTS, Status::Ok),
            Body::Find(_) => (KIND_FIND, Status::Ok),
            Body::Found(_) => (KIND_FOUND, Status::Ok),
            Body::Pair(_) => (KIND_PAIR, Status::Ok),
            Body::Paired(_) => (KIND_PAIRED, Status::Ok),
            Body::Done(status) => (KIND_DONE, *status),
        };
        let mut writer = Writer::new(out);
        writer.u8(VERSION).u8(kind).u16(status as u16).u32(0).u64(self.id);
        self.body.encode(&mut writer);
        let length = writer.finish()?;
        if length > MESSAGE_BYTES_MAX {
            return Err(EncodeError::TooLong(length));
        }
        out[4..8].copy_from_slice(&(length as u32).to_le_bytes());
        Ok(length)
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// If the bytes are not a valid message.
    pub fn decode(bytes: &'a [u8]) -> Result<Message<'a>, DecodeError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(DecodeError::TooLong { excess: bytes.len() - MESSAGE_BYTES_MAX });
        }
        let mut reader = Reader::new(bytes);
        let version = reader.u8("version")?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let kind = reader.u8("kind")?;
        let status = Status::decode(reader.u16("status")?)?;
        let length = reader.u32("length")?;
        if length as usize != bytes.len() {
            return refuse("length", length.into(), "not the length of the message");
        }
        let id = reader.u64("id")?;
        if status != Status::Ok && kind != KIND_DONE {
            return refuse("status", status as u64, "only in answers");
        }
        let body = match kind {
            KIND_OPEN => Body::Open(Open::decode(&mut reader)?),
            KIND_OPENED => Body::Opened(Opened::decode(&mut reader)?),
            KIND_MAGIC => Body::Magic(Magic::decode(&mut reader)?),
            KIND_READ => Body::Read(Read::decode(&mut reader)?),
            KIND_WRITE => Body::Write(Write::decode(&mut reader)?),
            KIND_COUNTS => Body::Counts(Counts::decode(&mut reader)?),
            KIND_DONE => Body::Done(status),
            KIND_FIND => Body::Find(decode_name(&mut reader)?),
            KIND_FOUND => Body::Found(Found {
                rkey: reader.u32("rkey")?,
                region: RegionDescription::decode(&mut reader)?,
            }),
            KIND_PAIR => Body::Pair(Endpoint::decode(&mut reader)?),
            KIND_PAIRED => Body::Paired(Endpoint::decode(&mut reader)?),
            _ => return Err(DecodeError::Kind(kind.into())),
        };
        reader.end()?;
        Ok(Message { id, body })
    }
}

impl Body<'_> {
    fn encode(&self, writer: &mut Writer<'_>) {
        match self {
            Body::Open(open) => _ = writer.u32(open.rkey).zeros(4).u64(open.region_id),
            Body::Opened(Opened { bitmap, versions }) => {
                for table in [bitmap, versions] {
                    writer.u64(table.va).u64(table.length_bytes).u32(table.rkey).zeros(4);
                }
            }
            Body::Magic(magic) => {
                writer.u32(magic.client_qpn).u32(magic.server_qpn).u32(magic.rkey);
                writer.u8(magic.on.into()).zeros(3).u64(magic.region_id);
            }
            Body::Read(read) => read.encode(writer),
            Body::Write(write) => write.encode(writer),
            Body::Counts(counts) => {
                writer.u32(counts.table_rkey).u32(counts.unit_count).u64(counts.table_va);
                writer.u64(counts.region_id).u32(counts.rkey).u32(counts.first_unit);
            }
            Body::Find(name) => _ = writer.bytes(name.as_bytes()),
            Body::Found(found) => found.region.encode(writer.u32(found.rkey)),
            Body::Pair(end) | Body::Paired(end) => _ = writer.u32(end.qpn).u32(end.psn).u16(end.mtu_bytes),
            Body::Done(_) => {}
        }
    }
}

/// A name: the rest of the message.
fn decode_name<'a>(reader: &mut Reader<'a>) -> Result<&'a str, DecodeError> {
    let bytes = reader.rest();
    match std::str::from_utf8(bytes) {
        Ok(name) if (1..=NAME_BYTES_MAX).contains(&name.len()) => Ok(name),
        _ => refuse("name", bytes.len() as u64, "1 to 255 bytes of UTF-8"),
    }
}

impl Endpoint {
    fn decode(reader: &mut Reader<'_>) -> Result<Endpoint, DecodeError> {
        Ok(Endpoint { qpn: reader.u24("qpn")?, psn: reader.u24("psn")?, mtu_bytes: decode_mtu(reader)? })
    }
}

impl Open {
    fn decode(reader: &mut Reader<'_>) -> Result<Open, DecodeError> {
        let rkey = reader.u32("rkey")?;
        reader.zeros("reserved", 4)?;
        Ok(Open { rkey, region_id: reader.u64("region id")? })
    }
}

impl Opened {
    fn decode(reader: &mut Reader<'_>) -> Result<Opened, DecodeError> {
        Ok(Opened { bitmap: Table::decode(reader)?, versions: Table::decode(reader)? })
    }
}

impl Table {
    fn decode(reader: &mut Reader<'_>) -> Result<Table, DecodeError> {
        let (va, length_bytes) = (reader.u64("table va")?, reader.u64("table bytes")?);
        check_range("table va", va, length_bytes)?;
        let rkey = reader.u32("table rkey")?;
        reader.zeros("reserved", 4)?;
        Ok(Table { va, length_bytes, rkey })
    }
}

impl Magic {
    fn decode(reader: &mut Reader<'_>) -> Result<Magic, DecodeError> {
        let (client_qpn, server_qpn) = (reader.u24("client's qpn")?, reader.u24("server's qpn")?);
        let rkey = reader.u32("rkey")?;
        let on = match reader.u8("on")? {
            0 => false,
            1 => true,
            on => return refuse("on", on.into(), "0 or 1"),
        };
        reader.zeros("reserved", 3)?;
        Ok(Magic { client_qpn, server_qpn, rkey, region_id: reader.u64("region id")?, on })
    }
}

/// The first fields of `Read` and `Write`: key, length and address.
fn decode_access(reader: &mut Reader<'_>) -> Result<(u32, u32, u64), DecodeError> {
    let (rkey, length, va) = (reader.u32("rkey")?, reader.u32("access length")?, reader.u64("va")?);
    if length == 0 {
        return refuse("access length", 0, "at least one byte");
    }
    check_range("va", va, length.into())?;
    Ok((rkey, length, va))
}

impl Read {
    fn encode(&self, writer: &mut Writer<'_>) {
        let (offset, page_count, words) = match &self.pages {
            Some(pages) => (pages.offset, pages.wanted.page_count(), pages.wanted.words()),
            None => (0, 0, &[][..]),
        };
        writer.u32(self.rkey).u32(self.length).u64(self.va);
        writer.u32(self.dest_rkey).u32(page_count as u32).u64(self.dest_va);
        writer.u16(offset).zeros(6);
        for word in words {
            writer.u64(*word);
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Read, DecodeError> {
        let (rkey, length, va) = decode_access(reader)?;
        let (dest_rkey, page_count) = (reader.u32("destination rkey")?, reader.u32("pages")?);
        let dest_va = reader.u64("destination va")?;
        check_range("destination va", dest_va, length.into())?;
        let offset = reader.u16("page offset")?;
        reader.zeros("reserved", 6)?;
        let pages = match page_count {
            0 if offset != 0 => return refuse("page offset", offset.into(), "zero without pages"),
            0 => None,
            _ => Some(Pages::decode(reader, length, page_count, offset)?),
        };
        Ok(Read { rkey, va, length, pages, dest_va, dest_rkey })
    }
}

impl Pages {
    /// The bitmap, which has a bit for each page of the range and at least one wanted page.
    fn decode(
        reader: &mut Reader<'_>,
        length: u32,
        page_count: u32,
        offset: u16,
    ) -> Result<Pages, DecodeError> {
        if u64::from(offset) >= PAGE {
            return refuse("page offset", offset.into(), "less than a page");
        }
        if u64::from(page_count) != (u64::from(offset) + u64::from(length)).div_ceil(PAGE) {
            return refuse("pages", page_count.into(), "not the number of pages of the range");
        }
        let (words, odd_bytes) = reader.rest().as_chunks::<8>();
        if !odd_bytes.is_empty() {
            return Err(DecodeError::TooLong { excess: odd_bytes.len() });
        }
        let words = words.iter().map(|word| u64::from_le_bytes(*word));
        match PageBitmap::from_words(page_count as usize, words) {
            Some(wanted) if !wanted.is_empty() => Ok(Pages { offset, wanted }),
            Some(_) => refuse("bitmap", 0, "at least one page"),
            None => refuse("bitmap", page_count.into(), "a bit for each page and none beyond"),
        }
    }
}

impl<'a> Write<'a> {
    fn encode(&self, writer: &mut Writer<'_>) {
        writer.u32(self.rkey).u32(self.length).u64(self.va);
        match self.source {
            Source::Inline(data) => writer.u32(0).u8(0).zeros(3).u64(0).bytes(data),
            Source::Remote { va, rkey } => writer.u32(rkey).u8(1).zeros(3).u64(va),
        };
    }

    fn decode(reader: &mut Reader<'a>) -> Result<Write<'a>, DecodeError> {
        let (rkey, length, va) = decode_access(reader)?;
        let (source_rkey, source) = (reader.u32("source rkey")?, reader.u8("source")?);
        reader.zeros("reserved", 3)?;
        let source_va = reader.u64("source va")?;
        let source = match source {
            0 if source_rkey != 0 || source_va != 0 => {
                return refuse("source va", source_va, "zero for data in the message");
            }
            0 => Source::Inline(reader.rest()),
            1 => Source::Remote { va: source_va, rkey: source_rkey },
            _ => return refuse("source", source.into(), "inline (0) or by READ (1)"),
        };
        match source {
            Source::Inline(data) if data.len() != length as usize => {
                refuse("access length", length.into(), "not the length of the data in the message")
            }
            Source::Remote { va, .. } => check_range("source va", va, length.into()),
            Source::Inline(_) => Ok(()),
        }?;
        Ok(Write { rkey, va, length, source })
    }
}

impl Counts {
    fn decode(reader: &mut Reader<'_>) -> Result<Counts, DecodeError> {
        let (table_rkey, unit_count) = (reader.u32("table rkey")?, reader.u32("units")?);
        let (table_va, region_id) = (reader.u64("table va")?, reader.u64("region id")?);
        let (rkey, first_unit) = (reader.u32("rkey")?, reader.u32("first unit")?);
        if u64::from(first_unit) + u64::from(unit_count) > UNITS_MAX {
            return refuse("units", unit_count.into(), "more units than a region can have");
        }
        check_range("table va", table_va, u64::from(unit_count) * 4)?;
        Ok(Counts { rkey, region_id, first_unit, unit_count, table_va, table_rkey })
    }
}
