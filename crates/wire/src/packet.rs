//! A whole packet, from the base transport header to the end of the padding.

use crate::header::{Bth, Extensions};
use crate::opcode::{Headers, Opcode};
use crate::psn::Psn;

/// Why bytes are not a packet. Such a datagram is dropped: nobody can be told, because the address of the sender is
/// in the bytes that make no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The headers that the opcode calls for do not fit.
    #[error("shorter than its headers")]
    Truncated,
    /// Nothing Terrace speaks.
    #[error("unknown opcode {0:#04x}")]
    UnknownOpcode(u8),
    /// Not the version of the transport that everybody speaks.
    #[error("transport header version {0}")]
    TransportVersion(u8),
    /// The padding is longer than what follows the headers.
    #[error("more padding than payload")]
    Padding,
    /// Data behind an opcode that carries none.
    #[error("payload where none belongs")]
    UnexpectedPayload,
    /// An acknowledgement that says something reserved.
    #[error("reserved syndrome {0:#04x}")]
    ReservedSyndrome(u8),
}

/// Why headers could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// The buffer is shorter than the headers.
    #[error("no room for the headers")]
    NoRoom,
    /// The opcode calls for a header that was not given.
    #[error("opcode calls for {0:?}")]
    MissingHeader(Headers),
}

/// A packet that was received; or a place for one, before [`Packet::read`] has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Base transport header.
    pub bth: Bth,
    /// The headers behind it: exactly those that the opcode calls for.
    pub ext: Extensions,
    /// The data, without padding.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Reads a packet: base transport header to end of padding, the ICRC already removed. Reserved bits are ignored.
    /// Whether the lengths agree with the path MTU and the message is for the transport to say.
    pub fn parse(bytes: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let mut packet = Packet::default();
        packet.read(bytes).map(|()| packet)
    }

    /// The same in place of what was there before; after an error, anything is. A packet with all that it could carry is large, and to
    /// move it when it was just written is slow.
    #[inline(always)]
    pub fn read(&mut self, bytes: &'a [u8]) -> Result<(), ParseError> {
        let mut rest = bytes;
        self.bth = Bth::parse(&mut rest)?;
        let info = self.bth.opcode.info();
        self.ext = Extensions::default();
        // Most packets have none.
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
    /// One of nothing: a place for [`Packet::read`].
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

/// Writes the base transport header and those extension headers that its opcode calls for to the front of `buf`, and
/// returns their length in bytes. Other extensions may be present and are left out, so that one set serves every
/// packet of a message.
///
/// Fails, with `buf` in any state, when `buf` is shorter than the headers or one of them is missing.
#[inline(always)] // Nobody has to put the fields where a function that is called would look for them.
pub fn emit_headers(bth: &Bth, ext: &Extensions, buf: &mut [u8]) -> Result<usize, EmitError> {
    let info = bth.opcode.info();
    let mut room = buf.get_mut(..info.header_len).ok_or(EmitError::NoRoom)?;
    bth.emit(&mut room)?;
    ext.emit(info.headers, &mut room)?;
    Ok(info.header_len)
}
