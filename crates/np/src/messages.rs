//! The peer's messages, and where they go: questions to this end's regions, answers to the initiator, and requests to the
//! target.

use std::sync::Arc;

use terrace_access::proto::{Body, Done, Message, Status};
use terrace_access::region::{Knowledge, Region};
use terrace_nic::{QueuePair, Time, Wc, WcOpcode, WcStatus};

use crate::link::Forgetting;
use crate::memory::LocalSide;
use crate::session::Session;
use crate::state::State;

/// The upper half of the ids of `Forget`. The lower one is the key.
const FORGET_TAG: u32 = 2;
/// The most keys that the peer may ask to forget at a time.
const FORGETTING_MAX: usize = 4096;

fn forget_id(rkey: u32) -> u64 {
    u64::from(FORGET_TAG) << 32 | u64::from(rkey)
}

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
            if control.note_sent(wc) {
                self.handle_transferred(session, qp, now, wc);
            }
            return;
        }
        let taken = control.take_message(wc);
        self.probe_at = None;
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
            Body::Forget(rkey) if message.id == forget_id(*rkey) => return self.forget(*rkey),
            Body::Probe => {}
            Body::Done(_) if message.id >> 32 == u64::from(FORGET_TAG) => {
                return self.regions.note_forgotten(qp, message.id as u32);
            }
            Body::Open(open) => {
                let body = match self.regions.open(qp, open) {
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
                let memory = &mut LocalSide::new(qp, self.control.as_ref(), &self.settings);
                return outgoing.initiator.handle_message(now, message, memory);
            }
            _ => {
                return self
                    .with_target(session, qp, |target, side| target.handle_message(now, message, side));
            }
        }
        true
    }

    /// Asks the peer to forget keys whose regions have ended.
    pub fn ask_to_forget(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time) {
        let Some(control) = &mut self.control else { return };
        while let Some(rkey) = self.regions.forgets.ask(now) {
            control.send(&Message { id: forget_id(rkey), body: Body::Forget(rkey) }, false);
        }
        if self.regions.forgets.deadline().is_some_and(|at| at <= now) {
            tracing::warn!(qpn = qp.qpn(), "the peer does not forget regions that have ended");
            self.fail_link(session, qp, now);
        }
    }

    /// Forgets a key. False if the peer asks so often that it cannot keep to the protocol.
    fn forget(&mut self, rkey: u32) -> bool {
        let region_id = self.keys.forget(rkey);
        self.forgetting.push(Forgetting { rkey, region_id });
        self.forgetting.len() <= FORGETTING_MAX
    }

    /// Tells the peer of keys that no request names any more.
    pub fn confirm_forgotten(&mut self) {
        if self.forgetting.is_empty() {
            return;
        }
        let Some(control) = &mut self.control else { return };
        let initiator = &mut self.outgoing.as_mut().map(|outgoing| &mut outgoing.initiator);
        self.forgetting.retain(|Forgetting { rkey, region_id }| {
            if let Some(initiator) = initiator {
                if initiator.names(*rkey) {
                    return true;
                }
                region_id.iter().for_each(|id| initiator.forget_region(*id));
            }
            let body = Body::Done(Done::one(Status::Ok));
            control.send(&Message { id: forget_id(*rkey), body }, true);
            false
        });
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
