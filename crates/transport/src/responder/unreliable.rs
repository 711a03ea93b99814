//! The responder of unreliable connections: no answers, and a message that lost a packet is dropped whole
//! (IBTA volume 1, 9.8).

use terrace_wire::{Operation, Packet};

use super::refusal::{INVALID_REQUEST, Refusal};
use super::{Incoming, Responder};
use crate::common::{Call, Verdict};
use crate::data::Data;
use crate::host::Host;
use crate::types::{QpEvent, WcStatus};

impl Responder {
    pub(crate) fn handle_unreliable(
        &mut self,
        call: &mut Call<'_, impl Host>,
        packet: &Packet<'_>,
        data: Data<'_>,
    ) -> Verdict {
        let info = packet.bth.opcode.info();
        let in_sequence = packet.bth.psn == self.expected;
        self.expected = packet.bth.psn.plus(data.packets(call.mtu()));
        if info.position.is_first() {
            self.abandon(call);
        } else if !in_sequence {
            return self.skip(call);
        }
        let result = match info.operation {
            Operation::Send | Operation::Write => self.receive_data(call, packet, data, info),
            _ => Err(INVALID_REQUEST),
        };
        match result {
            Ok(()) => Verdict::Fine,
            // The program's own error, so it is reported.
            Err(Refusal::ReceiveProtection) => {
                // Messages that wait for memory have earlier receives.
                self.stop_reading(call);
                self.fail_receive(call, WcStatus::LocalProtection);
                Verdict::ResponderFatal(QpEvent::Fatal)
            }
            Err(
                Refusal::Nak(_)
                | Refusal::NotReady
                | Refusal::Rnr { .. }
                | Refusal::ReceiveTooShort
                | Refusal::Invalidation,
            ) => self.skip(call),
        }
    }

    /// Drops this packet and its message; the remaining packets lack their beginning and are dropped, too.
    fn skip(&mut self, call: &mut Call<'_, impl Host>) -> Verdict {
        call.counters.dropped += 1;
        self.abandon(call);
        Verdict::Fine
    }

    /// Gives the receive of a broken message back to the queue.
    fn abandon(&mut self, call: &Call<'_, impl Host>) {
        if let Some(Incoming::Send { receive, .. }) = self.incoming.take() {
            self.give_back(call, receive);
        }
    }
}
