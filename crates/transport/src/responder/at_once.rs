//! The shortest way for what connections mostly carry: a message in one packet, in its turn, for a receive of the queue pair's own. What
//! is done here is what is done elsewhere in the responder; where anything is out of the ordinary, nothing is done here.

use terrace_wire::Packet;

use super::{Responder, receive_completion};
use crate::common::Common;
use crate::host::Host;
use crate::types::{Wc, WcOpcode};

/// A message that was taken: what its completion says beside what the packet says.
#[derive(Debug)]
#[must_use = "the receive completes with it"]
pub struct Taken {
    wr_id: u64,
    len: u64,
}

impl Taken {
    #[inline(always)] // Made where it goes.
    pub(crate) fn completion(&self, common: &Common, packet: &Packet<'_>) -> Wc {
        let info = packet.bth.opcode.info();
        receive_completion(common, packet, info, self.wr_id, self.len, WcOpcode::Recv)
    }
}

impl Responder {
    /// Takes a SEND of one packet, if nothing is in its way; nothing but its receive's memory has changed otherwise.
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
            // What is wrong will be found again, and told.
            host.scatter_to_receive(&receive.sges, 0, packet.payload).ok()?;
        }
        let wr_id = receive.wr_id;
        self.receives.pop_front();
        self.nak_out = false;
        self.finish_packet(common, packet, packet.bth.opcode.info());
        Some(Taken { wr_id, len })
    }
}
