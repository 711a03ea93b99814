//! The peer's messages, and where they go: questions to this end's regions, answers to the initiator, and requests to the
//! target.

use std::sync::Arc;

use terrace_access::proto::{Body, Done, Message, Status};
use terrace_access::region::{Knowledge, Region};
use terrace_nic::{QueuePair, Time, Wc, WcOpcode, WcStatus};

use crate::memory::LocalSide;
use crate::session::Session;
use crate::state::State;

impl State {
    /// Takes a completion of the control queue pair.
    pub fn handle_control(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time, wc: &Wc) {
        let Some(control) = self.control.as_mut().filter(|control| control.qpn() == wc.qpn) else {
            return;
        };
        if wc.status != WcStatus::Success {
            tracing::debug!(qpn = qp.qpn(), status = ?wc.status, "a control queue pair has failed");
            return self.fail_link(session, qp, now);
        }
        if wc.opcode != WcOpcode::Recv {
            return control.note_sent();
        }
        let taken = control.take_message(wc);
        let is_handled = match taken.as_ref().map(|bytes| Message::decode(bytes)) {
            Ok(Ok(message)) => self.handle_message(session, qp, now, &message),
            _ => false,
        };
        if !is_handled {
            tracing::warn!(qpn = qp.qpn(), "a message that is none of the protocol");
            self.fail_link(session, qp, now);
        }
    }

    /// False for a message that the peer should not have sent.
    fn handle_message(
        &mut self,
        session: &Session,
        qp: &Arc<QueuePair>,
        now: Time,
        message: &Message<'_>,
    ) -> bool {
        match &message.body {
            Body::Describe(rkey) => {
                let body = self.regions.describe(session, qp, *rkey);
                self.reply(message.id, body);
            }
            Body::Open(open) => {
                let body = match self.regions.open(session, qp, open) {
                    Ok(opened) => Body::Opened(opened),
                    Err(status) => Body::Done(Done::one(status)),
                };
                self.reply(message.id, body);
            }
            Body::Found(found) => {
                let knowledge = Knowledge::Extended(Arc::new(Region::new(found.rkey, found.region)));
                return self.note_described(found.rkey, &knowledge, true);
            }
            Body::Done(done) if message.id >> 32 == 0 => {
                // The NIC reports a key that the peer does not have.
                let is_kept = done.status == Status::Plain;
                return self.note_described(message.id as u32, &Knowledge::Plain, is_kept);
            }
            Body::Opened(_) | Body::Done(_) | Body::Data(_) | Body::Value(_) => {
                let Some(outgoing) = &mut self.outgoing else { return false };
                return outgoing.initiator.handle_message(
                    now,
                    message,
                    &mut LocalSide { qp, is_registered_late: self.settings.is_two_sided },
                );
            }
            _ => {
                return self
                    .with_target(session, qp, |target, side| target.handle_message(now, message, side));
            }
        }
        true
    }

    fn reply(&mut self, id: u64, body: Body<'_>) {
        if let Some(control) = &mut self.control {
            control.send(&Message { id, body }, true);
        }
    }

    fn note_described(&mut self, rkey: u32, knowledge: &Knowledge, is_kept: bool) -> bool {
        let is_asked = self.keys.note(rkey, knowledge, is_kept);
        if let (true, Some(outgoing)) = (is_asked, &mut self.outgoing) {
            outgoing.initiator.handle_described(rkey, knowledge);
        }
        is_asked
    }
}
