//! The data of a request packet, or of a run of them.

use terrace_wire::{Operation, Packet, Service};

/// Longest packet in bytes: the largest MTU and every header, generously. A run has more data than that, so that the two
/// can be told apart by their length.
pub const PACKET_BYTES_MAX: u64 = 4096 + 512;

/// The data that a packet or a run of packets brings.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// So many bytes: those of the run that the call is about, which the host has.
    Run(u64),
}

impl Data<'_> {
    /// Whether a packet can have the headers of a run: of a SEND, WRITE or APPEND over a connection. A datagram is one packet.
    pub(crate) fn may_be_run(packet: &Packet<'_>) -> bool {
        let info = packet.bth.opcode.info();
        matches!(info.operation, Operation::Send | Operation::Write | Operation::Append)
            && info.service != Service::Ud
    }

    #[inline(always)]
    pub(crate) fn is_run(&self) -> bool {
        matches!(self, Data::Run(_))
    }

    /// Length in bytes.
    #[inline(always)]
    pub(crate) fn len(&self) -> u64 {
        match self {
            Data::Bytes(bytes) => bytes.len() as u64,
            Data::Run(len) => *len,
        }
    }

    /// The packets that have them.
    #[inline(always)]
    pub(crate) fn packets(&self, mtu: u64) -> u32 {
        match self {
            Data::Bytes(_) => 1,
            Data::Run(len) => len.div_ceil(mtu) as u32,
        }
    }
}
