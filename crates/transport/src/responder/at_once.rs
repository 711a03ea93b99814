//! Fast path for the common case: an in-order message of one packet, for a receive of the queue pair's own queue. It
//! has the same effects as the full responder. In all other cases it changes nothing.

use terrace_wire::Packet;

use super::{Responder, receive_completion};
use crate::common::Common;
use crate::host::Host;
use crate::types::{Wc, WcOpcode};

/// An accepted message: the part of its completion that is not in the packet.
#[derive(Debug)]
#[must_use = "the receive completes with it"]
pub struct Taken {
    wr_id: u64,
    len: u64,
}

impl Taken {
    #[inline(always)] // Built in its destination.
    pub(crate) fn completion(&self, common: &Common, packet: &Packet<'_>) -> Wc {
        let info = packet.bth.opcode.info();
        receive_completion(common, packet, info, self.wr_id, self.len, WcOpcode::Recv)
    }
}

impl Responder {
    /// Accepts a SEND of one packet on the fast path. Otherwise it changes nothing but the memory of the receive.
    #[inline]
    pub(crate) fn receive_at_once(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Option<Taken> {
        let len = packet.payload.len() as u64;
        let is_usual = packet.bth.psn == self.expected
            && self.incoming.is_none()
            && self.owed.len() <= 1
            && !self.is_unsettled()
            && !common.config.has_srq
            && len <= common.mtu()
            && !host.may_withhold_receives();
        let receive = self.receives.front().filter(|_| is_usual)?;
        let capacity: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if len > capacity {
            return None;
        }
        if len > 0 {
            // The full responder finds the error again and reports it.
            host.scatter_to_receive(&receive.sges, 0, packet.payload).ok()?;
        }
        let wr_id = receive.wr_id;
        self.receives.pop_front();
        self.nak_out = false;
        self.finish_packet(common, packet, packet.bth.opcode.info());
        Some(Taken { wr_id, len })
    }
}
