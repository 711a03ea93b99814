//! The datagrams between QP1s.

use terrace_transport::Endpoint;

use super::bytes::{DecodeError, EncodeError, Reader, Writer, refuse};
use super::codec::{decode_endpoint, encode_endpoint};
use super::{Status, VERSION};
use crate::layout::Layout;
use crate::signature::KEY_BYTES;

/// Length of every datagram: that of a management datagram.
pub const DATAGRAM_BYTES: usize = 256;

const BASE_VERSION: u8 = 1;
/// A vendor-specific class (IBTA volume 1, 16.5). Its datagrams state the vendor's organisation identifier.
const MANAGEMENT_CLASS: u8 = 0x3d;
const ORGANISATION: [u8; 3] = [0x02, 0x54, 0x52];
const METHOD_GET: u8 = 0x01;
const METHOD_RESPONSE: u8 = 0x81;
const ATTRIBUTE_REGION: u16 = 1;
const ATTRIBUTE_CONNECTION: u16 = 2;
const ATTRIBUTE_CONTROL: u16 = 3;
const MODIFIER_AND_RMPP_BYTES: usize = 18;

/// A datagram with its transaction id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Datagram {
    /// Requests the description of an rkey.
    Describe { tid: u64, rkey: u32 },
    /// Answers [`Datagram::Describe`].
    Description { tid: u64, rkey: u32, described: Described },
    /// Requests a control queue pair; states the client's end.
    Connect { tid: u64, connect: Connect },
    /// Answers [`Datagram::Connect`] with the server's end, or the reason for a refusal.
    Accepted { tid: u64, accepted: Result<Accepted, Status> },
    /// Requests the peer's end of the control queue pair of a program's queue pair; states this end.
    Join { tid: u64, join: Join },
    /// Answers [`Datagram::Join`] with the peer's end, or the reason for a refusal.
    Joined { tid: u64, joined: Result<Endpoint, Status> },
}

/// One end of the queue pair that accompanies a queue pair between two programs: its control queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Join {
    /// The sender's queue pair.
    pub from_qpn: u32,
    /// The receiver's queue pair, which is connected to it.
    pub to_qpn: u32,
    /// The sender's end of the control queue pair.
    pub end: Endpoint,
}

/// The description of an rkey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Described {
    /// The peer may not use the rkey; never [`Status::Ok`].
    Refused(Status),
    /// A region, or window, that is all in memory.
    Plain,
    /// A region that need not be in memory, or a window on one.
    Extended(RegionDescription),
}

/// An extended region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDescription {
    /// Its addresses and grid.
    pub layout: Layout,
    /// The key that its signature page is derived from.
    pub signature_key: [u8; KEY_BYTES],
    /// Identifies the registered memory and this registration: equal for a region and windows on it, so that a
    /// client detects overlapping ranges; never reused, so that stale knowledge does not apply to a later registration.
    pub region_id: u64,
    /// The access mode that the server requests.
    pub mode: Mode,
}

/// The access mode that a server requests for its regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// One-sided operations; RPC for absent pages.
    #[default]
    OneSided = 0,
    /// RPC for reads and writes: the baseline of benchmarks.
    RpcOnly = 1,
    /// One-sided operations on a region that is all in memory.
    Plain = 2,
}

/// The client's end of a control queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Queue pair number.
    pub qpn: u32,
    /// PSN of its first request.
    pub psn: u32,
    /// Path MTU in bytes.
    pub mtu_bytes: u16,
    /// Posted receives.
    pub receive_count: u16,
}

/// The server's end of a control queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Queue pair number.
    pub qpn: u32,
    /// PSN of its first request.
    pub psn: u32,
    /// Path MTU in bytes, at most the client's.
    pub mtu_bytes: u16,
    /// Requests that the client may have in flight at a time.
    pub receive_count: u16,
}

impl Datagram {
    /// The transaction.
    pub fn tid(&self) -> u64 {
        match *self {
            Datagram::Describe { tid, .. }
            | Datagram::Description { tid, .. }
            | Datagram::Connect { tid, .. }
            | Datagram::Accepted { tid, .. }
            | Datagram::Join { tid, .. }
            | Datagram::Joined { tid, .. } => tid,
        }
    }

    /// The bytes.
    pub fn encode(&self) -> [u8; DATAGRAM_BYTES] {
        let mut out = [0; DATAGRAM_BYTES];
        let (attribute, method) = match self {
            Datagram::Describe { .. } => (ATTRIBUTE_REGION, METHOD_GET),
            Datagram::Description { .. } => (ATTRIBUTE_REGION, METHOD_RESPONSE),
            Datagram::Connect { .. } => (ATTRIBUTE_CONNECTION, METHOD_GET),
            Datagram::Accepted { .. } => (ATTRIBUTE_CONNECTION, METHOD_RESPONSE),
            Datagram::Join { .. } => (ATTRIBUTE_CONTROL, METHOD_GET),
            Datagram::Joined { .. } => (ATTRIBUTE_CONTROL, METHOD_RESPONSE),
        };
        let mut writer = Writer::new(&mut out);
        writer.u8(BASE_VERSION).u8(MANAGEMENT_CLASS).u8(VERSION).u8(method).zeros(4);
        writer.bytes(&self.tid().to_be_bytes()).bytes(&attribute.to_be_bytes());
        writer.zeros(MODIFIER_AND_RMPP_BYTES + 1).bytes(&ORGANISATION);
        match self {
            Datagram::Describe { rkey, .. } => _ = writer.u32(*rkey),
            Datagram::Description { rkey, described, .. } => {
                encode_description(&mut writer, *rkey, described)
            }
            Datagram::Connect { connect, .. } => {
                writer.u32(connect.qpn).u32(connect.psn).u16(connect.mtu_bytes).u16(connect.receive_count);
            }
            Datagram::Accepted { accepted: Ok(accepted), .. } => {
                writer
                    .u32(accepted.qpn)
                    .u32(accepted.psn)
                    .u16(accepted.mtu_bytes)
                    .u16(accepted.receive_count);
            }
            Datagram::Accepted { accepted: Err(status), .. } => _ = writer.zeros(12).u16(*status as u16),
            Datagram::Join { join, .. } => {
                writer.u32(join.from_qpn).u32(join.to_qpn);
                encode_endpoint(&join.end, &mut writer);
            }
            Datagram::Joined { joined: Ok(end), .. } => encode_endpoint(end, &mut writer),
            Datagram::Joined { joined: Err(status), .. } => _ = writer.zeros(10).u16(*status as u16),
        }
        debug_assert!(writer.finish().is_ok(), "every datagram fits");
        out
    }

    /// Writes the bytes to the front of a buffer.
    ///
    /// # Errors
    /// If it is smaller than [`DATAGRAM_BYTES`].
    pub fn encode_into(&self, out: &mut [u8]) -> Result<usize, EncodeError> {
        let mut writer = Writer::new(out);
        writer.bytes(&self.encode());
        writer.finish()
    }

    /// Decodes a datagram.
    ///
    /// # Errors
    /// `Foreign` for a well-formed datagram of another protocol, which is not an error of its sender; other variants
    /// for malformed datagrams.
    pub fn decode(bytes: &[u8]) -> Result<Datagram, DecodeError> {
        let mut reader = Reader::new(bytes);
        for (field, expected) in [("base version", BASE_VERSION), ("management class", MANAGEMENT_CLASS)] {
            let value = reader.u8(field)?;
            if value != expected {
                return Err(DecodeError::Foreign { field, value: value.into() });
            }
        }
        let (version, method) = (reader.u8("class version")?, reader.u8("method")?);
        reader.zeros("status", 4)?;
        let tid = u64::from_be_bytes(reader.array("transaction id")?);
        let attribute = u16::from_be_bytes(reader.array("attribute")?);
        reader.zeros("attribute modifier and RMPP header", MODIFIER_AND_RMPP_BYTES + 1)?;
        let [a, b, c] = reader.array("organisation")?;
        if [a, b, c] != ORGANISATION {
            let value = u32::from_be_bytes([0, a, b, c]);
            return Err(DecodeError::Foreign { field: "organisation", value });
        }
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let datagram = match (attribute, method) {
            (ATTRIBUTE_REGION, METHOD_GET) => Datagram::Describe { tid, rkey: reader.u32("rkey")? },
            (ATTRIBUTE_REGION, METHOD_RESPONSE) => decode_description(&mut reader, tid)?,
            (ATTRIBUTE_CONNECTION, METHOD_GET) => {
                Datagram::Connect { tid, connect: decode_connect(&mut reader)? }
            }
            (ATTRIBUTE_CONNECTION, METHOD_RESPONSE) => {
                Datagram::Accepted { tid, accepted: decode_accepted(&mut reader)? }
            }
            (ATTRIBUTE_CONTROL, METHOD_GET) => Datagram::Join { tid, join: decode_join(&mut reader)? },
            (ATTRIBUTE_CONTROL, METHOD_RESPONSE) => {
                Datagram::Joined { tid, joined: decode_joined(&mut reader)? }
            }
            (ATTRIBUTE_REGION | ATTRIBUTE_CONNECTION | ATTRIBUTE_CONTROL, _) => {
                return refuse("method", method.into(), "a request or an answer");
            }
            _ => return Err(DecodeError::Kind(attribute)),
        };
        end_of_datagram(reader, bytes.len())?;
        Ok(datagram)
    }
}

/// Checks that the rest is zero, up to the length of every datagram.
fn end_of_datagram(mut reader: Reader<'_>, len: usize) -> Result<(), DecodeError> {
    if len < DATAGRAM_BYTES {
        return Err(DecodeError::TooShort { field: "body", needed: DATAGRAM_BYTES, got: len });
    }
    if len > DATAGRAM_BYTES {
        return Err(DecodeError::TooLong { excess: len - DATAGRAM_BYTES });
    }
    let rest = reader.rest();
    Reader::new(rest).zeros("rest of the body", rest.len())
}

fn encode_description(writer: &mut Writer<'_>, rkey: u32, described: &Described) {
    writer.u32(rkey);
    match described {
        Described::Refused(status) => _ = writer.u16(*status as u16),
        Described::Plain => _ = writer.u16(Status::Ok as u16),
        Described::Extended(region) => {
            writer.u16(Status::Ok as u16).u8(1);
            region.encode(writer);
        }
    }
}

fn decode_description(reader: &mut Reader<'_>, tid: u64) -> Result<Datagram, DecodeError> {
    let rkey = reader.u32("rkey")?;
    let status = Status::decode(reader.u16("status")?)?;
    let described = match (status, reader.u8("kind")?) {
        (Status::Ok, 0) => Described::Plain,
        (Status::Ok, 1) => Described::Extended(RegionDescription::decode(reader)?),
        (Status::Ok, kind) => return refuse("kind", kind.into(), "plain (0) or extended (1)"),
        (status, 0) => Described::Refused(status),
        (_, kind) => return refuse("kind", kind.into(), "0 if refused"),
    };
    Ok(Datagram::Description { tid, rkey, described })
}

impl RegionDescription {
    pub(super) fn encode(&self, writer: &mut Writer<'_>) {
        writer.u8(self.mode as u8).u32(self.layout.unit_bytes()).zeros(4);
        writer.u64(self.layout.base_va()).u64(self.layout.length());
        writer.u64(self.layout.lead_bytes()).u64(self.region_id).bytes(&self.signature_key);
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<RegionDescription, DecodeError> {
        let mode = match reader.u8("mode")? {
            0 => Mode::OneSided,
            1 => Mode::RpcOnly,
            2 => Mode::Plain,
            mode => return refuse("mode", mode.into(), "one-sided (0), by RPC (1) or plain (2)"),
        };
        let unit_bytes = reader.u32("unit bytes")?;
        reader.zeros("reserved", 4)?;
        let (base_va, length) = (reader.u64("base va")?, reader.u64("length")?);
        let lead_bytes = reader.u64("lead bytes")?;
        let Some(layout) = Layout::new(base_va, length, lead_bytes, unit_bytes) else {
            return refuse("length", length, "not a valid range and grid");
        };
        let region_id = reader.u64("region id")?;
        Ok(RegionDescription { layout, signature_key: reader.array("signature key")?, region_id, mode })
    }
}

/// A valid path MTU.
pub(super) fn decode_mtu(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    match reader.u16("path mtu")? {
        mtu @ (256 | 512 | 1024 | 2048 | 4096) => Ok(mtu),
        mtu => refuse("path mtu", mtu.into(), "256, 512, 1024, 2048 or 4096 bytes"),
    }
}

fn decode_receive_count(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    match reader.u16("receives posted")? {
        0 => refuse("receives posted", 0, "at least one"),
        count => Ok(count),
    }
}

fn decode_connect(reader: &mut Reader<'_>) -> Result<Connect, DecodeError> {
    Ok(Connect {
        qpn: reader.u24("qpn")?,
        psn: reader.u24("psn")?,
        mtu_bytes: decode_mtu(reader)?,
        receive_count: decode_receive_count(reader)?,
    })
}

fn decode_accepted(reader: &mut Reader<'_>) -> Result<Result<Accepted, Status>, DecodeError> {
    let body: [u8; 12] = reader.array("accepted")?;
    match Status::decode(reader.u16("status")?)? {
        Status::Ok => {
            let Connect { qpn, psn, mtu_bytes, receive_count } = decode_connect(&mut Reader::new(&body))?;
            Ok(Ok(Accepted { qpn, psn, mtu_bytes, receive_count }))
        }
        status => Reader::new(&body).zeros("accepted", body.len()).map(|()| Err(status)),
    }
}

fn decode_join(reader: &mut Reader<'_>) -> Result<Join, DecodeError> {
    let (from_qpn, to_qpn) = (reader.u24("sender's qpn")?, reader.u24("receiver's qpn")?);
    Ok(Join { from_qpn, to_qpn, end: decode_endpoint(reader)? })
}

fn decode_joined(reader: &mut Reader<'_>) -> Result<Result<Endpoint, Status>, DecodeError> {
    let body: [u8; 10] = reader.array("joined")?;
    match Status::decode(reader.u16("status")?)? {
        Status::Ok => decode_endpoint(&mut Reader::new(&body)).map(Ok),
        status => Reader::new(&body).zeros("joined", body.len()).map(|()| Err(status)),
    }
}
