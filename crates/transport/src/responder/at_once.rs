//! The shortest way for what connections mostly carry: a message in one packet, in its turn, for a receive of the queue pair's own. What
//! is done here is what is done elsewhere in the responder; where anything is out of the ordinary, nothing is done here.

use terrace_wire::Packet;

use super::{Incoming, Refusal, Responder, receive_completion, require_receive};
use crate::common::{Common, Verdict};
use crate::host::Host;
use crate::types::WcOpcode;

impl Responder {
    /// Takes a SEND of one packet, or refuses it for now, if nothing is in its way; `None` if something is.
    #[inline]
    pub(crate) fn receive_at_once(
        &mut self,
        common: &mut Common,
        packet: &Packet<'_>,
        host: &impl Host,
    ) -> Option<Verdict> {
        let len = packet.payload.len() as u64;
        let is_usual = packet.bth.psn == self.expected
            && self.incoming.is_none()
            && self.owed.len() <= 1
            && !self.is_unsettled()
            && !common.config.has_srq
            && len <= common.mtu();
        let receive = self.receives.front().filter(|_| is_usual)?;
        let capacity: u64 = receive.sges.iter().map(|sge| u64::from(sge.length)).sum();
        if len > capacity {
            return None;
        }
        // Asked once: a plan of faults counts how often.
        if let Err(refusal) = require_receive(common, host) {
            return Some(self.refuse(common, refusal));
        }
        let is_there = len == 0 || host.scatter(&receive.sges, 0, packet.payload).is_ok();
        let wr_id = receive.wr_id;
        let receive = self.receives.pop_front()?;
        self.nak_out = false;
        if !is_there {
            self.incoming = Some(Incoming::Send { receive, capacity, offset: 0 });
            return Some(self.refuse(common, Refusal::ReceiveProtection));
        }
        let info = packet.bth.opcode.info();
        common.complete_receive(receive_completion(common, packet, info, wr_id, len, WcOpcode::Recv));
        self.finish_packet(common, packet, info);
        Some(Verdict::Fine)
    }
}
