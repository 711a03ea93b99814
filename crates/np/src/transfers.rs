//! Transfers that the peer asks for: its initiator lends memory of its control queue pair, and this end moves the bytes by READs and
//! WRITEs of its own on that queue pair. Both ends copy to and from the program's memory as they do for bytes in messages,
//! with the rights of the request: so no key to the program's memory is made, and nothing accesses it behind a
//! deregistration.

use std::sync::Arc;

use terrace_access::optimistic::{Move, TargetMemory};
use terrace_nic::{QueuePair, Time, Wc, WcOpcode};

use crate::session::Session;
use crate::state::State;

impl State {
    /// Begins a transfer.
    pub fn transfer(&mut self, session: &Session, qp: &Arc<QueuePair>, transfer: Move) {
        let (token, (rkey, va)) = (transfer.token, transfer.region);
        if !transfer.to_peer {
            self.fetching.insert(token, transfer);
            if let Some(control) = &mut self.control {
                control.fetch(token, transfer.peer, transfer.length);
            }
            return;
        }
        let mut data = vec![0; transfer.length as usize];
        match self.with_target(session, qp, |_, side| side.read(rkey, va, &mut data)) {
            Ok(()) => {
                if let Some(control) = &mut self.control {
                    control.store(token, transfer.peer, data);
                }
                self.with_target(session, qp, |target, side| target.handle_copied(token, side));
            }
            Err(status) => {
                self.with_target(session, qp, |target, side| target.handle_moved(token, Err(status), side));
            }
        }
    }

    /// Takes the end of a transfer.
    pub fn handle_transferred(&mut self, session: &Session, qp: &Arc<QueuePair>, now: Time, wc: &Wc) {
        let token = wc.wr_id;
        let fetched = self.fetching.remove(&token).filter(|_| wc.opcode == WcOpcode::RdmaRead);
        let data = match (&self.control, &fetched) {
            (Some(control), Some(transfer)) => control.take_fetched(token, transfer.length),
            _ => Ok(Vec::new()),
        };
        let Ok(data) = data else { return self.fail_link(session, qp, now) };
        self.with_target(session, qp, |target, side| {
            let written =
                fetched.map_or(Ok(()), |Move { region: (rkey, va), .. }| side.write(rkey, va, &data));
            target.handle_moved(token, written, side);
        });
    }
}
