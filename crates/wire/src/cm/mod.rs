//! Communication management datagrams (IBTA volume 1, chapter 12), which establish and end connections.
//!
//! ```text
//!   active                       passive                  unreliable datagrams
//!     | REQ  ------------------->  |  requests               | SIDR_REQ ------------> |
//!     | <---------------- MRA      |  extends the timeout    | <---------- SIDR_REP   |
//!     | <---------------- REP      |  accepts, or REJ
//!     | RTU  ------------------->  |  ready
//!     | DREQ ------------------->  |  either side disconnects
//!     | <---------------- DREP     |
//! ```
//!
//! Every datagram has 256 bytes. Alternate paths (a REQ's second path, LAP and APR) serve failover between ports of an
//! InfiniBand fabric and are ignored.

mod connect;
mod end;
mod field;
mod ip;
mod redirect;
mod sidr;

pub use connect::{Mra, Rep, Req, ReqPath, Rtu, Transport};
pub use end::{Answered, Drep, Dreq, Rej, RejReason};
pub use ip::{IP_HEADER_BYTES, IpHeader, IpHeaderError, PortSpace, service_id, service_of};
pub use redirect::{REDIRECT_BYTES, Redirect};
pub use sidr::{SidrRep, SidrReq, SidrStatus};

use field::Buffer;

/// Length of every datagram.
pub const MAD_BYTES: usize = 256;

/// The management class of these datagrams.
pub const CM_CLASS: u8 = 0x07;

const BASE_VERSION: u8 = 1;
const CLASS_VERSION: u8 = 2;
/// The management layer itself answers no datagram of this class: all of them are sends.
const METHOD_SEND: u8 = 3;

/// A datagram with its transaction ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mad {
    /// The transaction ID: an answer carries that of its request.
    pub tid: u64,
    /// The message.
    pub message: Message,
}

/// The message of a datagram.
// The largest is a REQ with its 92 bytes of private data; the smallest has the most private data. All are of similar
// size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Requests a connection.
    Req(Req),
    /// Extends the peer's timeout.
    Mra(Mra),
    /// Rejects, or times out.
    Rej(Rej),
    /// Accepts a connection.
    Rep(Rep),
    /// Reports that the active side is ready.
    Rtu(Rtu),
    /// Ends a connection.
    Dreq(Dreq),
    /// Acknowledges the end.
    Drep(Drep),
    /// Requests the queue pair for unreliable datagrams of a service.
    SidrReq(SidrReq),
    /// Returns that queue pair.
    SidrRep(SidrRep),
}

/// The reason why bytes are not a datagram of the class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MadError {
    /// Every datagram has 256 bytes.
    #[error("{0} bytes, not 256")]
    Length(usize),
    /// The header is of another class or version.
    #[error("not of the class: {field} is {value:#x}")]
    Foreign {
        /// The header's field.
        field: &'static str,
        /// Its value.
        value: u16,
    },
    /// An unsupported attribute: LAP, APR or unknown.
    #[error("attribute {0:#06x} is not supported")]
    Attribute(u16),
    /// A field has an invalid value.
    #[error("{field} is {value}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
    },
}

impl Mad {
    /// Reads a datagram.
    ///
    /// # Errors
    /// See [`MadError`]. Reserved bits are ignored (IBTA volume 1, 13.4.1).
    pub fn decode(bytes: &[u8]) -> Result<Mad, MadError> {
        let bytes: &[u8; MAD_BYTES] = bytes.try_into().map_err(|_| MadError::Length(bytes.len()))?;
        let buffer = Buffer(*bytes);
        for (field, at, expected) in [
            ("base version", 0, BASE_VERSION),
            ("class", 1, CM_CLASS),
            ("class version", 2, CLASS_VERSION),
            ("method", 3, METHOD_SEND),
        ] {
            if bytes[at] != expected {
                return Err(MadError::Foreign { field, value: bytes[at].into() });
            }
        }
        let attribute = u16::from_be_bytes([bytes[16], bytes[17]]);
        let message = match attribute {
            Req::ATTRIBUTE => Message::Req(Req::decode(&buffer)?),
            Mra::ATTRIBUTE => Message::Mra(Mra::decode(&buffer)?),
            Rej::ATTRIBUTE => Message::Rej(Rej::decode(&buffer)?),
            Rep::ATTRIBUTE => Message::Rep(Rep::decode(&buffer)),
            Rtu::ATTRIBUTE => Message::Rtu(Rtu::decode(&buffer)),
            Dreq::ATTRIBUTE => Message::Dreq(Dreq::decode(&buffer)),
            Drep::ATTRIBUTE => Message::Drep(Drep::decode(&buffer)),
            SidrReq::ATTRIBUTE => Message::SidrReq(SidrReq::decode(&buffer)),
            SidrRep::ATTRIBUTE => Message::SidrRep(SidrRep::decode(&buffer)),
            other => return Err(MadError::Attribute(other)),
        };
        let tid = u64::from_be_bytes([
            bytes[8], bytes[9], bytes[10], bytes[11], bytes[12], bytes[13], bytes[14], bytes[15],
        ]);
        Ok(Mad { tid, message })
    }

    /// Writes a datagram. Fields wider than on the wire lose their upper bits.
    pub fn encode(&self) -> [u8; MAD_BYTES] {
        let mut buffer = Buffer([0; MAD_BYTES]);
        let attribute = match &self.message {
            Message::Req(req) => req.encode(&mut buffer),
            Message::Mra(mra) => mra.encode(&mut buffer),
            Message::Rej(rej) => rej.encode(&mut buffer),
            Message::Rep(rep) => rep.encode(&mut buffer),
            Message::Rtu(rtu) => rtu.encode(&mut buffer),
            Message::Dreq(dreq) => dreq.encode(&mut buffer),
            Message::Drep(drep) => drep.encode(&mut buffer),
            Message::SidrReq(req) => req.encode(&mut buffer),
            Message::SidrRep(rep) => rep.encode(&mut buffer),
        };
        let bytes = &mut buffer.0;
        bytes[..4].copy_from_slice(&[BASE_VERSION, CM_CLASS, CLASS_VERSION, METHOD_SEND]);
        bytes[8..16].copy_from_slice(&self.tid.to_be_bytes());
        bytes[16..18].copy_from_slice(&attribute.to_be_bytes());
        buffer.0
    }
}

impl Message {
    /// The usual name.
    pub fn name(&self) -> &'static str {
        match self {
            Message::Req(_) => "REQ",
            Message::Mra(_) => "MRA",
            Message::Rej(_) => "REJ",
            Message::Rep(_) => "REP",
            Message::Rtu(_) => "RTU",
            Message::Dreq(_) => "DREQ",
            Message::Drep(_) => "DREP",
            Message::SidrReq(_) => "SIDR_REQ",
            Message::SidrRep(_) => "SIDR_REP",
        }
    }
}
