//! The encoding and decoding of the messages on the control queue pair.

use smallvec::{SmallVec, smallvec};
use terrace_transport::Endpoint;

use super::VERSION;
use super::bytes::{DecodeError, EncodeError, Reader, Writer, check_range, refuse};
use super::datagram::{RegionDescription, decode_mtu};
use super::message::{
    Access, Atomic, AtomicKind, Body, Done, FETCH_BYTES_MAX, Fetch, Found, Hold, MESSAGE_BYTES_MAX, Magic,
    Message, NAME_BYTES_MAX, Open, Opened, Pages, REQUESTS_MAX, Read, Source, Status, Table, Write,
};
use crate::pages::PageBitmap;
use crate::signature::PAGE_BYTES;

const PAGE: u64 = PAGE_BYTES as u64;

const KIND_OPEN: u8 = 1;
const KIND_OPENED: u8 = 2;
const KIND_MAGIC: u8 = 3;
const KIND_READ: u8 = 4;
const KIND_WRITE: u8 = 5;
const KIND_DONE: u8 = 6;
const KIND_FIND: u8 = 7;
const KIND_FOUND: u8 = 8;
const KIND_PAIR: u8 = 9;
const KIND_PAIRED: u8 = 10;
const KIND_FETCH: u8 = 11;
const KIND_DATA: u8 = 12;
const KIND_ATOMIC: u8 = 13;
const KIND_VALUE: u8 = 14;
const KIND_HOLD: u8 = 15;
const KIND_RELEASE: u8 = 16;
const KIND_DESCRIBE: u8 = 17;
const KIND_FORGET: u8 = 18;
const KIND_PROBE: u8 = 19;

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
            Body::Find(_) => (KIND_FIND, Status::Ok),
            Body::Found(_) => (KIND_FOUND, Status::Ok),
            Body::Pair(_) => (KIND_PAIR, Status::Ok),
            Body::Paired(_) => (KIND_PAIRED, Status::Ok),
            Body::Done(done) => (KIND_DONE, done.status),
            Body::Fetch(_) => (KIND_FETCH, Status::Ok),
            Body::Data(_) => (KIND_DATA, Status::Ok),
            Body::Atomic(_) => (KIND_ATOMIC, Status::Ok),
            Body::Value(_) => (KIND_VALUE, Status::Ok),
            Body::Hold(_) => (KIND_HOLD, Status::Ok),
            Body::Release => (KIND_RELEASE, Status::Ok),
            Body::Describe(_) => (KIND_DESCRIBE, Status::Ok),
            Body::Forget(_) => (KIND_FORGET, Status::Ok),
            Body::Probe => (KIND_PROBE, Status::Ok),
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
            KIND_READ => Body::Read(decode_reads(&mut reader)?),
            KIND_WRITE => Body::Write(Write::decode(&mut reader)?),
            KIND_DONE => Body::Done(Done { status, count: decode_count(&mut reader)? }),
            KIND_FIND => Body::Find(decode_name(&mut reader)?),
            KIND_FOUND => Body::Found(Found {
                rkey: reader.u32("rkey")?,
                region: RegionDescription::decode(&mut reader)?,
            }),
            KIND_PAIR => Body::Pair(decode_endpoint(&mut reader)?),
            KIND_PAIRED => Body::Paired(decode_endpoint(&mut reader)?),
            KIND_FETCH => Body::Fetch(Fetch::decode(&mut reader)?),
            KIND_DATA => Body::Data(reader.rest()),
            KIND_ATOMIC => Body::Atomic(Atomic::decode(&mut reader)?),
            KIND_VALUE => Body::Value(reader.u64("value")?),
            KIND_HOLD => Body::Hold(Hold::decode(&mut reader)?),
            KIND_RELEASE => Body::Release,
            KIND_DESCRIBE => Body::Describe(reader.u32("rkey")?),
            KIND_FORGET => Body::Forget(reader.u32("rkey")?),
            KIND_PROBE => Body::Probe,
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
            Body::Read(reads) => reads.iter().for_each(|read| read.encode(writer)),
            Body::Write(write) => write.encode(writer),
            Body::Find(name) => _ = writer.bytes(name.as_bytes()),
            Body::Found(found) => found.region.encode(writer.u32(found.rkey)),
            Body::Pair(end) | Body::Paired(end) => encode_endpoint(end, writer),
            Body::Done(done) => _ = writer.u32(done.count),
            Body::Fetch(fetch) => _ = writer.u32(fetch.rkey).u32(fetch.length).u64(fetch.va),
            Body::Data(data) => _ = writer.bytes(data),
            Body::Atomic(atomic) => atomic.encode(writer),
            Body::Value(value) => _ = writer.u64(*value),
            Body::Hold(hold) => {
                writer.u32(hold.rkey).u32(hold.length).u64(hold.va).u8(hold.access as u8).zeros(7);
            }
            Body::Release | Body::Probe => {}
            Body::Describe(rkey) | Body::Forget(rkey) => _ = writer.u32(*rkey),
        }
    }
}

/// One request or more, to the end of the message.
fn decode_reads(reader: &mut Reader<'_>) -> Result<SmallVec<[Read; 1]>, DecodeError> {
    let mut reads = smallvec![Read::decode(reader)?];
    while !reader.is_empty() {
        reads.push(Read::decode(reader)?);
    }
    Ok(reads)
}

fn decode_count(reader: &mut Reader<'_>) -> Result<u32, DecodeError> {
    match reader.u32("requests")? {
        count if (1..=REQUESTS_MAX as u32).contains(&count) => Ok(count),
        count => refuse("requests", count.into(), "at least one, and no more than a message has"),
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

pub(super) fn encode_endpoint(end: &Endpoint, writer: &mut Writer<'_>) {
    writer.u32(end.qpn).u32(end.psn).u16(end.mtu_bytes);
}

pub(super) fn decode_endpoint(reader: &mut Reader<'_>) -> Result<Endpoint, DecodeError> {
    Ok(Endpoint { qpn: reader.u24("qpn")?, psn: reader.u24("psn")?, mtu_bytes: decode_mtu(reader)? })
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

impl Fetch {
    fn decode(reader: &mut Reader<'_>) -> Result<Fetch, DecodeError> {
        let (rkey, length, va) = decode_access(reader)?;
        if length > FETCH_BYTES_MAX {
            return refuse("access length", length.into(), "no more than the answer can carry");
        }
        Ok(Fetch { rkey, va, length })
    }
}

impl Atomic {
    fn encode(&self, writer: &mut Writer<'_>) {
        let (operation, first, second) = match self.kind {
            AtomicKind::CompareSwap { compare, swap } => (0, compare, swap),
            AtomicKind::FetchAdd { add } => (1, add, 0),
            AtomicKind::Write { value } => (2, value, 0),
        };
        writer.u32(self.rkey).u8(operation).zeros(3).u64(self.va).u64(first).u64(second);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Atomic, DecodeError> {
        let (rkey, operation) = (reader.u32("rkey")?, reader.u8("operation")?);
        reader.zeros("reserved", 3)?;
        let va = reader.u64("va")?;
        if va % 8 != 0 {
            return refuse("va", va, "a multiple of 8");
        }
        let (first, second) = (reader.u64("first operand")?, reader.u64("second operand")?);
        let kind = match operation {
            0 => AtomicKind::CompareSwap { compare: first, swap: second },
            1 | 2 if second != 0 => return refuse("second operand", second, "zero: there is none"),
            1 => AtomicKind::FetchAdd { add: first },
            2 => AtomicKind::Write { value: first },
            _ => return refuse("operation", operation.into(), "0, 1 or 2"),
        };
        Ok(Atomic { rkey, va, kind })
    }
}

impl Hold {
    fn decode(reader: &mut Reader<'_>) -> Result<Hold, DecodeError> {
        let (rkey, length, va) = decode_access(reader)?;
        let access = match reader.u8("access")? {
            0 => Access::Read,
            1 => Access::Write,
            access => return refuse("access", access.into(), "READ (0) or WRITE (1)"),
        };
        reader.zeros("reserved", 7)?;
        Ok(Hold { rkey, va, length, access })
    }
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
        let words = reader.words("bitmap", page_count.div_ceil(u64::BITS) as usize)?;
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
