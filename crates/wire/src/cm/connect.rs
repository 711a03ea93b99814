//! The datagrams that establish a connection.

use super::field::Buffer;
use super::{Answered, MadError};

/// The requested transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Reliable datagrams (not supported).
    Rd,
    /// Extended reliable connection (annex A14).
    Xrc,
    /// Another extended kind. 3 bits; 1 is [`Transport::Xrc`].
    Extended(u8),
}

impl Transport {
    const EXTENDED: u8 = 3;
    const EXTENDED_XRC: u8 = 1;

    fn from_bits(kind: u8, extended: u8) -> Transport {
        match (kind, extended) {
            (0, _) => Transport::Rc,
            (1, _) => Transport::Uc,
            (2, _) => Transport::Rd,
            (_, Transport::EXTENDED_XRC) => Transport::Xrc,
            (_, other) => Transport::Extended(other),
        }
    }

    /// The kind, and the extended kind.
    fn bits(self) -> (u8, u8) {
        match self {
            Transport::Rc => (0, 0),
            Transport::Uc => (1, 0),
            Transport::Rd => (2, 0),
            Transport::Xrc => (Transport::EXTENDED, Transport::EXTENDED_XRC),
            Transport::Extended(other) => (Transport::EXTENDED, other),
        }
    }
}

/// A path between the two ends, from the active side's perspective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReqPath {
    /// LID of the active side; not used in RoCE.
    pub local_lid: u16,
    /// LID of the passive side.
    pub remote_lid: u16,
    /// GID of the active side.
    pub local_gid: [u8; 16],
    /// GID of the passive side.
    pub remote_gid: [u8; 16],
    /// 20 bits.
    pub flow_label: u32,
    /// Code of the rate, 6 bits.
    pub packet_rate: u8,
    /// IPv4 type of service or IPv6 traffic class.
    pub traffic_class: u8,
    /// Time to live.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether there is no router on the path.
    pub subnet_local: bool,
    /// The active side's local ACK timeout: 4.096 µs · 2^n, 5 bits.
    pub local_ack_timeout: u8,
}

/// REQ: requests a connection (12.6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req {
    /// The active side's communication ID.
    pub local_comm_id: u32,
    /// The requested service.
    pub service_id: u64,
    /// The active side's node GUID.
    pub local_ca_guid: u64,
    /// Not used by connected services.
    pub local_qkey: u32,
    /// The active side's queue pair, 24 bits.
    pub local_qpn: u32,
    /// Outstanding READs and atomics that the active side can serve as responder.
    pub responder_resources: u8,
    /// Outstanding READs and atomics that the active side requests as initiator.
    pub initiator_depth: u8,
    /// CM response timeout of the passive side: 4.096 µs · 2^n, 5 bits.
    pub remote_cm_response_timeout: u8,
    /// The service.
    pub transport: Transport,
    /// Whether end-to-end credits are requested.
    pub flow_control: bool,
    /// The first PSN that the active side expects, 24 bits.
    pub starting_psn: u32,
    /// CM response timeout of the active side, 5 bits.
    pub local_cm_response_timeout: u8,
    /// Retries of the passive side's queue pair, 3 bits.
    pub retry_count: u8,
    /// Partition.
    pub pkey: u16,
    /// Code of the path MTU: 1 (256 bytes) to 5 (4096 bytes).
    pub path_mtu: u8,
    /// RNR retries of the passive side's queue pair, 3 bits; 7 is infinite.
    pub rnr_retry_count: u8,
    /// The active side's retries of an unanswered CM message, 4 bits.
    pub max_cm_retries: u8,
    /// Whether the active side has a shared receive queue.
    pub srq: bool,
    /// The primary path.
    pub primary: ReqPath,
    /// Private data of the program.
    pub private_data: [u8; Req::PRIVATE_BYTES],
}

impl Req {
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 92;
    pub(super) const ATTRIBUTE: u16 = 0x0010;

    pub(super) fn decode(from: &Buffer) -> Result<Req, MadError> {
        let path_mtu = from.bits(50, 0, 4);
        if !(1..=5).contains(&path_mtu) {
            return Err(MadError::Field { field: "path MTU", value: path_mtu.into() });
        }
        Ok(Req {
            local_comm_id: from.u32(0),
            service_id: from.u64(8),
            local_ca_guid: from.u64(16),
            local_qkey: from.u32(28),
            local_qpn: from.u24(32),
            responder_resources: from.u8(35),
            initiator_depth: from.u8(39),
            remote_cm_response_timeout: from.bits(43, 0, 5),
            transport: Transport::from_bits(from.bits(43, 5, 2), from.bits(51, 5, 3)),
            flow_control: from.bits(43, 7, 1) != 0,
            starting_psn: from.u24(44),
            local_cm_response_timeout: from.bits(47, 0, 5),
            retry_count: from.bits(47, 5, 3),
            pkey: from.u16(48),
            path_mtu,
            rnr_retry_count: from.bits(50, 5, 3),
            max_cm_retries: from.bits(51, 0, 4),
            srq: from.bits(51, 4, 1) != 0,
            primary: ReqPath::decode(from),
            private_data: from.array(140),
        })
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.local_comm_id.to_be_bytes());
        to.put(8, &self.service_id.to_be_bytes());
        to.put(16, &self.local_ca_guid.to_be_bytes());
        to.put(28, &self.local_qkey.to_be_bytes());
        to.put_u24(32, self.local_qpn);
        to.put(35, &[self.responder_resources]);
        to.put(39, &[self.initiator_depth]);
        to.put_bits(43, 0, 5, self.remote_cm_response_timeout);
        let (kind, extended) = self.transport.bits();
        to.put_bits(43, 5, 2, kind);
        to.put_bits(43, 7, 1, self.flow_control.into());
        to.put_u24(44, self.starting_psn);
        to.put_bits(47, 0, 5, self.local_cm_response_timeout);
        to.put_bits(47, 5, 3, self.retry_count);
        to.put(48, &self.pkey.to_be_bytes());
        to.put_bits(50, 0, 4, self.path_mtu);
        to.put_bits(50, 5, 3, self.rnr_retry_count);
        to.put_bits(51, 0, 4, self.max_cm_retries);
        to.put_bits(51, 4, 1, self.srq.into());
        to.put_bits(51, 5, 3, extended);
        self.primary.encode(to);
        to.put(140, &self.private_data);
        Req::ATTRIBUTE
    }
}

impl ReqPath {
    fn decode(from: &Buffer) -> ReqPath {
        ReqPath {
            local_lid: from.u16(52),
            remote_lid: from.u16(54),
            local_gid: from.array(56),
            remote_gid: from.array(72),
            flow_label: from.u32(88) >> 12,
            packet_rate: from.bits(91, 2, 6),
            traffic_class: from.u8(92),
            hop_limit: from.u8(93),
            service_level: from.bits(94, 0, 4),
            subnet_local: from.bits(94, 4, 1) != 0,
            local_ack_timeout: from.bits(95, 0, 5),
        }
    }

    fn encode(&self, to: &mut Buffer) {
        to.put(52, &self.local_lid.to_be_bytes());
        to.put(54, &self.remote_lid.to_be_bytes());
        to.put(56, &self.local_gid);
        to.put(72, &self.remote_gid);
        to.put(88, &(self.flow_label << 12).to_be_bytes());
        to.put_bits(91, 2, 6, self.packet_rate);
        to.put(92, &[self.traffic_class, self.hop_limit]);
        to.put_bits(94, 0, 4, self.service_level);
        to.put_bits(94, 4, 1, self.subnet_local.into());
        to.put_bits(95, 0, 5, self.local_ack_timeout);
    }
}

/// REP: accepts a connection (12.6.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep {
    /// The passive side's communication ID.
    pub local_comm_id: u32,
    /// The active side's communication ID.
    pub remote_comm_id: u32,
    /// Not used by connected services.
    pub local_qkey: u32,
    /// The passive side's queue pair, 24 bits. Of an XRC connection `local_eecn` has it.
    pub local_qpn: u32,
    /// The passive side's end-to-end context, 24 bits: of an XRC connection its target queue pair.
    pub local_eecn: u32,
    /// The first PSN that the passive side expects, 24 bits.
    pub starting_psn: u32,
    /// Outstanding READs and atomics that the passive side can serve as responder.
    pub responder_resources: u8,
    /// Outstanding READs and atomics that the passive side will have as initiator.
    pub initiator_depth: u8,
    /// The passive side's delay before acknowledging: 4.096 µs · 2^n, 5 bits.
    pub target_ack_delay: u8,
    /// Whether end-to-end credits are requested.
    pub flow_control: bool,
    /// RNR retries of the active side's queue pair, 3 bits.
    pub rnr_retry_count: u8,
    /// Whether the passive side has a shared receive queue.
    pub srq: bool,
    /// The passive side's node GUID.
    pub local_ca_guid: u64,
    /// Private data of the program.
    pub private_data: [u8; Rep::PRIVATE_BYTES],
}

impl Rep {
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 196;
    pub(super) const ATTRIBUTE: u16 = 0x0013;

    pub(super) fn decode(from: &Buffer) -> Rep {
        Rep {
            local_comm_id: from.u32(0),
            remote_comm_id: from.u32(4),
            local_qkey: from.u32(8),
            local_qpn: from.u24(12),
            local_eecn: from.u24(16),
            starting_psn: from.u24(20),
            responder_resources: from.u8(24),
            initiator_depth: from.u8(25),
            target_ack_delay: from.bits(26, 0, 5),
            flow_control: from.bits(26, 7, 1) != 0,
            rnr_retry_count: from.bits(27, 0, 3),
            srq: from.bits(27, 3, 1) != 0,
            local_ca_guid: from.u64(28),
            private_data: from.array(36),
        }
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.local_comm_id.to_be_bytes());
        to.put(4, &self.remote_comm_id.to_be_bytes());
        to.put(8, &self.local_qkey.to_be_bytes());
        to.put_u24(12, self.local_qpn);
        to.put_u24(16, self.local_eecn);
        to.put_u24(20, self.starting_psn);
        to.put(24, &[self.responder_resources, self.initiator_depth]);
        to.put_bits(26, 0, 5, self.target_ack_delay);
        to.put_bits(26, 7, 1, self.flow_control.into());
        to.put_bits(27, 0, 3, self.rnr_retry_count);
        to.put_bits(27, 3, 1, self.srq.into());
        to.put(28, &self.local_ca_guid.to_be_bytes());
        to.put(36, &self.private_data);
        Rep::ATTRIBUTE
    }
}

/// RTU: the active side is ready (12.6.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rtu {
    /// The active side's communication ID.
    pub local_comm_id: u32,
    /// The passive side's communication ID.
    pub remote_comm_id: u32,
    /// Private data of the program.
    pub private_data: [u8; Rtu::PRIVATE_BYTES],
}

impl Rtu {
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 224;
    pub(super) const ATTRIBUTE: u16 = 0x0014;

    pub(super) fn decode(from: &Buffer) -> Rtu {
        Rtu { local_comm_id: from.u32(0), remote_comm_id: from.u32(4), private_data: from.array(8) }
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.local_comm_id.to_be_bytes());
        to.put(4, &self.remote_comm_id.to_be_bytes());
        to.put(8, &self.private_data);
        Rtu::ATTRIBUTE
    }
}

/// MRA: the answer will be delayed (12.6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra {
    /// The sender's communication ID.
    pub local_comm_id: u32,
    /// The receiver's communication ID.
    pub remote_comm_id: u32,
    /// The answered message.
    pub answered: Answered,
    /// Additional time: 4.096 µs · 2^n, 5 bits.
    pub service_timeout: u8,
    /// Private data of the program.
    pub private_data: [u8; Mra::PRIVATE_BYTES],
}

impl Mra {
    /// Bytes of private data.
    pub const PRIVATE_BYTES: usize = 222;
    pub(super) const ATTRIBUTE: u16 = 0x0011;

    pub(super) fn decode(from: &Buffer) -> Result<Mra, MadError> {
        Ok(Mra {
            local_comm_id: from.u32(0),
            remote_comm_id: from.u32(4),
            answered: Answered::from_bits(from.bits(8, 0, 2))?,
            service_timeout: from.bits(9, 0, 5),
            private_data: from.array(10),
        })
    }

    pub(super) fn encode(&self, to: &mut Buffer) -> u16 {
        to.put(0, &self.local_comm_id.to_be_bytes());
        to.put(4, &self.remote_comm_id.to_be_bytes());
        to.put_bits(8, 0, 2, self.answered as u8);
        to.put_bits(9, 0, 5, self.service_timeout);
        to.put(10, &self.private_data);
        Mra::ATTRIBUTE
    }
}
