//! The datagrams that reject or end a connection.

use super::MadError;
use super::field::Buffer;

/// The message that an MRA or a REJ answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answered {
    /// A REQ.
    Req = 0,
    /// A REP.
    Rep = 1,
    /// Another message: a LAP for an MRA; none in particular for a REJ.
    Other = 2,
}

impl Answered {
    pub(super) fn from_bits(bits: u8) -> Result<Answered, MadError> {
        match bits {
            0 => Ok(Answered::Req),
            1 => Ok(Answered::Rep),
            2 => Ok(Answered::Other),
            other => Err(MadError::Field { field: "message answered", value: other.into() }),
        }
    }
}

/// The reason of a REJ (table 109). Every value is legal: programs see it as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejReason(pub u16);

impl RejReason {
    /// The sender of the rejected or awaited message has timed out.
    pub const TIMEOUT: RejReason = RejReason(4);
    /// There is no such connection.
    pub const INVALID_COMM_ID: RejReason = RejReason(6);
    /// No listener.
    pub const INVALID_SERVICE_ID: RejReason = RejReason(8);
    /// The transport service is not supported.
    pub const INVALID_TRANSPORT: RejReason = RejReason(9);
    /// The sender of the REJ has an older connection with the queue pair.
    pub const STALE_CONNECTION: RejReason = RejReason(10);
    /// The connection must be requested at another queue pair 1, named in the additional information.
    pub const PORT_AND_CM_REDIRECT: RejReason = RejReason(24);
    /// The program rejected the request.
    pub const CONSUMER_DEFINED: RejReason = RejReason(28);
}

/// REJ: rejects or times out (12.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rej {
    /// The sender's communication ID; 0 if it has none.
    pub local_comm_id: u32,
    /// The receiver's communication ID.
    pub remote_comm_id: u32,
    /// The rejected message.
    pub answered: Answered,
    /// The reason.
    pub reason: RejReason,
    /// Valid bytes of [`Rej::info`], at most 72.
    pub info_len: u8,
    /// Additional information for the reason.
    pub info: [u8; Rej::INFO_BYTES],
    /// Private data of the program.
    pub private_data: [u8; Rej::PRIVATE_BYTES],
}

impl Rej {
    /// Bytes of additional information.
    pub const INFO_BYTES: usize = 72;
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 148;
    pub(super) const ATTRIBUTE: u16 = 0x0012;

    pub(super) fn decode(from: &Buffer) -> Result<Rej, MadError> {
        let info_len = from.bits(9, 0, 7);
        if usize::from(info_len) > Rej::INFO_BYTES {
            return Err(MadError::Field {
                field: "length of additional information",
                value: info_len.into(),
            });
        }
        Ok(Rej {
            local_comm_id: from.u32(0),
            remote_comm_id: from.u32(4),
            answered: Answered::from_bits(from.bits(8, 0, 2))?,
            reason: RejReason(from.u16(10)),
            info_len,
            info: from.array(12),
            private_data: from.array(84),
        })
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.local_comm_id.to_be_bytes());
        to.put(4, &self.remote_comm_id.to_be_bytes());
        to.put_bits(8, 0, 2, self.answered as u8);
        to.put_bits(9, 0, 7, self.info_len);
        to.put(10, &self.reason.0.to_be_bytes());
        to.put(12, &self.info);
        to.put(84, &self.private_data);
        Rej::ATTRIBUTE
    }
}

/// DREQ: ends a connection (12.6.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dreq {
    /// The sender's communication ID.
    pub local_comm_id: u32,
    /// The receiver's communication ID.
    pub remote_comm_id: u32,
    /// The receiver's queue pair, 24 bits.
    pub remote_qpn: u32,
    /// Private data of the program.
    pub private_data: [u8; Dreq::PRIVATE_BYTES],
}

impl Dreq {
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 220;
    pub(super) const ATTRIBUTE: u16 = 0x0015;

    pub(super) fn decode(from: &Buffer) -> Dreq {
        Dreq {
            local_comm_id: from.u32(0),
            remote_comm_id: from.u32(4),
            remote_qpn: from.u24(8),
            private_data: from.array(12),
        }
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.local_comm_id.to_be_bytes());
        to.put(4, &self.remote_comm_id.to_be_bytes());
        to.put_u24(8, self.remote_qpn);
        to.put(12, &self.private_data);
        Dreq::ATTRIBUTE
    }
}

/// DREP: acknowledges a DREQ (12.6.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drep {
    /// The sender's communication ID.
    pub local_comm_id: u32,
    /// The receiver's communication ID.
    pub remote_comm_id: u32,
    /// Private data of the program.
    pub private_data: [u8; Drep::PRIVATE_BYTES],
}

impl Drep {
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 224;
    pub(super) const ATTRIBUTE: u16 = 0x0016;

    pub(super) fn decode(from: &Buffer) -> Drep {
        Drep { local_comm_id: from.u32(0), remote_comm_id: from.u32(4), private_data: from.array(8) }
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.local_comm_id.to_be_bytes());
        to.put(4, &self.remote_comm_id.to_be_bytes());
        to.put(8, &self.private_data);
        Drep::ATTRIBUTE
    }
}
