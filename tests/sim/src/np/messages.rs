//! The control queue pairs: lists of messages that arrive later, and whose answers may be lost.

use std::collections::VecDeque;

use terrace_access::proto::{Body, MESSAGE_BYTES_MAX, Message, Opened, Table};
use terrace_nic::Time;

use super::World;
use super::side::VERSIONS;
use crate::world::{Checked, Failure, ensure};

/// Longest delay of a message, in nanoseconds.
const MESSAGE_NS_MAX: u64 = 20_000;

impl World {
    /// Sends an initiator's message to its target.
    pub(super) fn send_to_target(&mut self, index: usize, message: Box<[u8]>) -> Checked {
        let decoded = decode(&message)?;
        self.say(|| format!("pair {index}: {:x} {:?}", decoded.id, decoded.body));
        let delay_ns = self.rng.spread(500..=MESSAGE_NS_MAX);
        let pair = &mut self.pairs[index];
        if !matches!(decoded.body, Body::Release) {
            pair.unanswered.insert(decoded.id, message.clone());
        }
        let at = (self.net.now() + delay_ns).max(pair.to_target.back().map_or(0, |(at, _)| *at));
        pair.to_target.push_back((at, message));
        Ok(())
    }

    /// Sends a target's answer, or loses it; then the initiator's owner sends the request again.
    pub(super) fn answer(&mut self, index: usize, message: Box<[u8]>) -> Checked {
        let id = decode(&message)?.id;
        let delay_ns = self.rng.spread(500..=MESSAGE_NS_MAX);
        let is_lost = self.rng.chance(self.plan.lost_answer);
        let now = self.now();
        let pair = &mut self.pairs[index];
        if let (true, Some(request)) = (is_lost, pair.unanswered.get(&id)) {
            let at = (now + delay_ns).max(pair.to_target.back().map_or(0, |(at, _)| *at));
            pair.to_target.push_back((at, request.clone()));
            self.tally.add("NP-RDMA answers lost", 1);
            return Ok(());
        }
        let at = (now + delay_ns).max(pair.to_initiator.back().map_or(0, |(at, _)| *at));
        pair.to_initiator.push_back((at, message));
        Ok(())
    }

    pub(super) fn deliver_messages(&mut self) -> Checked {
        let now = self.now();
        for index in 0..self.pairs.len() {
            while let Some(bytes) = pop_due(&mut self.pairs[index].to_target, now) {
                let message = decode(&bytes)?;
                if let Body::Open(_) = message.body {
                    let answer = self.opened(message.id)?;
                    self.answer(index, answer)?;
                    continue;
                }
                let (pairs, mut side) = self.remote_side(index);
                let is_taken = pairs[index].target.handle_message(Time(now), &message, &mut side);
                ensure!(is_taken, "pair {index}: the target does not take {:?}", message.body);
            }
            while let Some(bytes) = pop_due(&mut self.pairs[index].to_initiator, now) {
                let message = decode(&bytes)?;
                self.say(|| format!("pair {index}: answer {:x} {:?}", message.id, message.body));
                self.pairs[index].unanswered.remove(&message.id);
                let (pairs, mut side) = self.local_side(index);
                pairs[index].initiator.handle_message(Time(now), &message, &mut side);
            }
        }
        Ok(())
    }

    /// The answer to a request for the tables of the region.
    fn opened(&self, id: u64) -> Checked<Box<[u8]>> {
        let length_bytes = self.memory.remote.pages.versions.len() as u64 * 4;
        let versions = Table { va: VERSIONS, length_bytes, rkey: self.memory.versions_key };
        let bitmap = Table { va: 0, length_bytes: 0, rkey: 0 };
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let body = Body::Opened(Opened { bitmap, versions });
        let length = Message { id, body }.encode(&mut bytes).map_err(|error| Failure(error.to_string()))?;
        Ok(bytes[..length].into())
    }
}

/// Takes the first message, if it has arrived.
fn pop_due(messages: &mut VecDeque<(u64, Box<[u8]>)>, now: u64) -> Option<Box<[u8]>> {
    let is_due = messages.front().is_some_and(|(at, _)| *at <= now);
    if is_due { messages.pop_front().map(|(_, message)| message) } else { None }
}

fn decode(bytes: &[u8]) -> Checked<Message<'_>> {
    Message::decode(bytes).map_err(|error| Failure(format!("a message that cannot be decoded: {error}")))
}
