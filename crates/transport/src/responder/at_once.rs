//! The shortest way for what connections mostly carry: a message in one packet, in its turn, for a receive of the queue pair's own. What
//! is done here is what is done elsewhere in the responder; where anything is out of the ordinary, nothing is done here.

use terrace_wire::Packet;

use super::{Responder, receive_completion};
use crate::common::Common;
use crate::host::Host;
use crate::types::{Wc, WcOpcode};

impl Responder {
    /// Takes a SEND of one packet, if nothing is in its way; nothing but its receive's memory has changed otherwise.
    #[inline]
    pub(crate) fn receive_at_once(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Option<Wc> {
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
            host.scatter(&receive.sges, 0, packet.payload).ok()?;
        }
        let wr_id = receive.wr_id;
        self.receives.pop_front();
        self.nak_out = false;
        let info = packet.bth.opcode.info();
        let wc = receive_completion(common, packet, info, wr_id, len, WcOpcode::Recv);
        self.finish_packet(common, packet, info);
        Some(wc)
    }
}
