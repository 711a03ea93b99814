//! A whole packet, from the base transport header to the end of the padding.

use crate::header::{Bth, Extensions};
use crate::opcode::{Headers, Opcode};
use crate::psn::Psn;

/// The reason why bytes are not a packet. Such a datagram is dropped without a NAK, because the sender's queue pair
/// cannot be determined from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Shorter than the headers of its opcode.
    #[error("shorter than its headers")]
    Truncated,
    /// An unsupported opcode.
    #[error("unknown opcode {0:#04x}")]
    UnknownOpcode(u8),
    /// Not version 0 of the transport header.
    #[error("transport header version {0}")]
    TransportVersion(u8),
    /// The padding is longer than the bytes behind the headers.
    #[error("more padding than payload")]
    Padding,
    /// Data behind an opcode without payload.
    #[error("payload behind an opcode without payload")]
    UnexpectedPayload,
    /// An acknowledgement with a reserved syndrome.
    #[error("reserved syndrome {0:#04x}")]
    ReservedSyndrome(u8),
}

/// The reason why headers could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// The buffer is shorter than the headers.
    #[error("no space for the headers")]
    BufferTooShort,
    /// A header of the opcode is missing.
    #[error("the opcode requires {0:?}")]
    MissingHeader(Headers),
}

/// A received packet; or a buffer for one, before [`Packet::read`] has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Base transport header.
    pub bth: Bth,
    /// The headers behind it: exactly those of the opcode.
    pub ext: Extensions,
    /// The data, without padding.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Reads a packet: base transport header to end of padding, the ICRC already removed. Reserved bits are ignored.
    /// The transport checks whether the lengths agree with the path MTU and the message.
    pub fn parse(bytes: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let mut packet = Packet::default();
        packet.read(bytes).map(|()| packet)
    }

    /// As [`Packet::parse`], in place. After an error the content is unspecified. A packet with all its headers is
    /// large, and moving it just after it was written is slow.
    #[inline(always)]
    pub fn read(&mut self, bytes: &'a [u8]) -> Result<(), ParseError> {
        let mut rest = bytes;
        self.bth = Bth::parse(&mut rest)?;
        let info = self.bth.opcode.info();
        self.ext = Extensions::default();
        // Most packets have no extension headers.
        if !info.headers.is_empty() {
            self.ext.read(info.headers, &mut rest)?;
        }
        let payload_len = rest.len().checked_sub(usize::from(self.bth.pad)).ok_or(ParseError::Padding)?;
        if payload_len > 0 && !info.payload {
            return Err(ParseError::UnexpectedPayload);
        }
        self.payload = &rest[..payload_len];
        Ok(())
    }
}

impl Default for Packet<'_> {
    /// An empty packet, a buffer for [`Packet::read`].
    #[inline]
    fn default() -> Self {
        let bth = Bth {
            opcode: Opcode::RcSendOnly,
            solicited: false,
            migrated: false,
            pad: 0,
            pkey: 0,
            fecn: false,
            becn: false,
            qpn: 0,
            ack_request: false,
            psn: Psn::new(0),
        };
        Packet { bth, ext: Extensions::default(), payload: &[] }
    }
}

/// Writes the base transport header and the extension headers of its opcode to the beginning of `buf`, and returns
/// their length in bytes. Other extensions are left out, so that one set serves every packet of a message.
///
/// Fails if `buf` is shorter than the headers or one of them is missing. The content of `buf` is then unspecified.
#[inline(always)] // The fields need not be stored in memory for a call.
pub fn emit_headers(bth: &Bth, ext: &Extensions, buf: &mut [u8]) -> Result<usize, EmitError> {
    let info = bth.opcode.info();
    let mut out = buf.get_mut(..info.header_len).ok_or(EmitError::BufferTooShort)?;
    bth.emit(&mut out)?;
    ext.emit(info.headers, &mut out)?;
    Ok(info.header_len)
}
