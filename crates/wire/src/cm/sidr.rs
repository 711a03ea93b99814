//! Service ID resolution: finds the queue pair for the unreliable datagrams of a service (12.11).

use super::field::Buffer;

/// SIDR_REQ: requests the queue pair of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// The requester's ID of this request.
    pub request_id: u32,
    /// Partition.
    pub pkey: u16,
    /// The service.
    pub service_id: u64,
    /// Private data of the program.
    pub private_data: [u8; SidrReq::PRIVATE_BYTES],
}

impl SidrReq {
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 216;
    pub(super) const ATTRIBUTE: u16 = 0x0017;

    pub(super) fn decode(from: &Buffer) -> SidrReq {
        SidrReq {
            request_id: from.u32(0),
            pkey: from.u16(4),
            service_id: from.u64(8),
            private_data: from.array(16),
        }
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.request_id.to_be_bytes());
        to.put(4, &self.pkey.to_be_bytes());
        to.put(8, &self.service_id.to_be_bytes());
        to.put(16, &self.private_data);
        SidrReq::ATTRIBUTE
    }
}

/// Status of a SIDR_REP (table 121). Every value is legal: programs see it as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// The queue pair is valid.
    pub const VALID: SidrStatus = SidrStatus(0);
    /// No listener.
    pub const UNSUPPORTED: SidrStatus = SidrStatus(1);
    /// The program rejected the request.
    pub const REJECTED: SidrStatus = SidrStatus(2);
    /// The request must go to another queue pair 1, named in the additional information.
    pub const REDIRECT: SidrStatus = SidrStatus(4);
}

/// SIDR_REP: answers a SIDR_REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// The requester's ID of the request.
    pub request_id: u32,
    /// Whether the other fields are valid.
    pub status: SidrStatus,
    /// Valid bytes of [`SidrRep::info`].
    pub info_len: u8,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// The service.
    pub service_id: u64,
    /// The Q_Key for datagrams to the queue pair.
    pub qkey: u32,
    /// Additional information for the status.
    pub info: [u8; SidrRep::INFO_BYTES],
    /// Private data of the program.
    pub private_data: [u8; SidrRep::PRIVATE_BYTES],
}

impl SidrRep {
    /// Bytes of additional information.
    pub const INFO_BYTES: usize = 72;
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 136;
    pub(super) const ATTRIBUTE: u16 = 0x0018;

    pub(super) fn decode(from: &Buffer) -> SidrRep {
        SidrRep {
            request_id: from.u32(0),
            status: SidrStatus(from.u8(4)),
            info_len: from.u8(5),
            qpn: from.u24(8),
            service_id: from.u64(12),
            qkey: from.u32(20),
            info: from.array(24),
            private_data: from.array(96),
        }
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.request_id.to_be_bytes());
        to.put(4, &[self.status.0, self.info_len]);
        to.put_u24(8, self.qpn);
        to.put(12, &self.service_id.to_be_bytes());
        to.put(20, &self.qkey.to_be_bytes());
        to.put(24, &self.info);
        to.put(96, &self.private_data);
        SidrRep::ATTRIBUTE
    }
}
