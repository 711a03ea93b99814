//! Completions. Each signaled work request must have exactly one, in posting order and with the right content.

use terrace_nic::{Cq, Error, QpType, Wc, WcFlags, WcOpcode, WcStatus};

use crate::end::{Message, Outcome, Receive, Request};
use crate::memory::Span;
use crate::plan::Waiting;
use crate::window::Stage;
use crate::world::{Checked, Failure, World, ensure, trace};

/// Limit of entries per poll.
const POLL_MAX: usize = 16;

/// Length of the routing header before a datagram.
const GRH_BYTES: usize = 40;

impl World {
    /// The program polls its completion queues. Returns whether it found a completion.
    pub fn poll_node(&mut self, node: usize) -> Checked<bool> {
        let mut found = false;
        for cq_index in 0..2 {
            found |= match self.nodes[node].completions[cq_index].waiting {
                Waiting::Polls => {
                    let count = 1 + self.rng.index(POLL_MAX);
                    !self.poll(node, cq_index, count)?.is_empty()
                }
                Waiting::Events => self.poll_after_event(node, cq_index)?,
                Waiting::Solicited => self.poll_with_solicited_events(node, cq_index)?,
            };
        }
        Ok(found)
    }

    /// Takes up to `count` completions and checks them.
    fn poll(&mut self, node: usize, cq_index: usize, count: usize) -> Checked<Vec<Wc>> {
        let completions = poll(&self.nodes[node].completions[cq_index].cq, count)?;
        for wc in &completions {
            self.note_completion(node, cq_index, wc)?;
        }
        Ok(completions)
    }

    /// Takes completions until the queue is empty.
    pub fn poll_all(&mut self, node: usize, cq_index: usize) -> Checked<Vec<Wc>> {
        let mut all = Vec::new();
        loop {
            let some = self.poll(node, cq_index, POLL_MAX)?;
            if some.is_empty() {
                return Ok(all);
            }
            all.extend(some);
        }
    }

    /// The program waits for an event, re-arms the queue and then empties it.
    fn poll_after_event(&mut self, node: usize, cq_index: usize) -> Checked<bool> {
        if !self.nodes[node].completions[cq_index].take_event()? {
            return Ok(false);
        }
        self.tally.add("completion events", 1);
        self.nodes[node].completions[cq_index].arm()?;
        self.poll_all(node, cq_index)?;
        Ok(true)
    }

    /// An event must be raised if, and only if, a completion since the last event was solicited or an error.
    fn poll_with_solicited_events(&mut self, node: usize, cq_index: usize) -> Checked<bool> {
        let completions = self.poll_all(node, cq_index)?;
        let wanted = completions.iter().any(|wc| wc.solicited || wc.status != WcStatus::Success);
        let raised = self.nodes[node].completions[cq_index].take_event()?;
        ensure!(wanted == raised, "node {node}: solicited completions: {wanted}; an event: {raised}");
        if raised {
            self.tally.add("solicited events", 1);
            self.nodes[node].completions[cq_index].arm()?;
        }
        Ok(!completions.is_empty())
    }

    fn note_completion(&mut self, node: usize, cq_index: usize, wc: &Wc) -> Checked {
        // Devices on different hosts may use the same numbers.
        let found = self.ends_of(node).find(|index| self.ends[*index].qp.qpn() == wc.qpn);
        let Some(index) = found else {
            return Err(Failure(format!("a completion for a queue pair that does not exist: {wc:?}")));
        };
        trace!(self, "end {index} completes {} {:?} {:?}", wc.wr_id, wc.opcode, wc.status);
        let checked = match cq_index {
            0 => self.note_send_completion(index, wc),
            _ => self.note_receive_completion(index, wc),
        };
        checked.map_err(|Failure(reason)| Failure(format!("end {index}: {reason}, at {wc:x?}")))
    }

    fn note_send_completion(&mut self, index: usize, wc: &Wc) -> Checked {
        self.tally.add(format!("completed {:?} {:?}", wc.opcode, wc.status), 1);
        let is_receive = wc.opcode as u32 & 128 != 0 && wc.opcode != WcOpcode::Append;
        ensure!(!is_receive, "a receive completed in the queue of the sends");
        loop {
            let Some(request) = self.ends[index].posted.pop_front() else {
                return Err(Failure("a completed send was not posted, or has completed twice".into()));
            };
            if request.wr_id == wc.wr_id {
                return self.finish(index, request, wc);
            }
            // After an error every request completes, so requests without a completion have succeeded.
            ensure!(!request.signaled, "request {} is signaled, but has no completion", request.wr_id);
            ensure!(
                !self.ends[index].send_failed,
                "request {} was not flushed, but its neighbours were",
                request.wr_id
            );
            self.succeed(index, request)?;
        }
    }

    fn finish(&mut self, index: usize, request: Request, wc: &Wc) -> Checked {
        ensure!(wc.opcode == request.opcode, "the opcode should be {:?}", request.opcode);
        if wc.status == WcStatus::Success {
            ensure!(request.signaled, "a completion of an unsignaled request");
            ensure!(!self.ends[index].send_failed, "success after an error");
            if let Some(byte_len) = request.byte_len {
                ensure!(wc.byte_len == byte_len, "the byte count should be {byte_len}");
            }
            return self.succeed(index, request);
        }
        self.check_error(index, &request, wc.status)?;
        self.ends[index].send_failed = true;
        self.note_broken(index, wc.status)?;
        self.accept_partial_result(index, request)
    }

    /// Checks that the request may fail with this status.
    fn check_error(&self, index: usize, request: &Request, status: WcStatus) -> Checked {
        if status == WcStatus::Flushed {
            return Ok(());
        }
        ensure!(!self.ends[index].send_failed, "a second error that is not a flush");
        let retries_exceeded = matches!(status, WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded);
        let mistaken =
            matches!(request.outcome, Outcome::Mistaken { status: expected } if expected == status);
        ensure!(retries_exceeded || mistaken, "this request cannot fail like that");
        Ok(())
    }

    /// Checks the outcome of a request that has succeeded.
    pub fn succeed(&mut self, index: usize, request: Request) -> Checked {
        let end = &mut self.ends[index];
        ensure!(
            request.number == end.succeeded,
            "request {} succeeded after {} others",
            request.number,
            end.succeeded
        );
        end.succeeded += 1;
        let (here, there) = (index & 1, 1 - (index & 1));
        match request.outcome {
            Outcome::Nothing => {}
            Outcome::Mistaken { .. } => return Err(Failure("a request succeeded that must fail".into())),
            Outcome::Stored => self.check_stored(index, request.number as usize)?,
            Outcome::Fetched { result_buffers, expected, later_writes, .. } => {
                self.check_fetched(index, &result_buffers, &expected, &later_writes)?;
            }
            Outcome::Swapped { result_buffers, before } => {
                let result = self.accept_result(here, &result_buffers);
                ensure!(
                    result == before.to_ne_bytes(),
                    "the atomic returned {result:x?} instead of {:x?}",
                    before.to_ne_bytes()
                );
            }
            Outcome::Counted { counter, add, result_buffers } => {
                let result = self.accept_result(here, &result_buffers);
                let value = u64::from_ne_bytes(result.try_into().expect("8 bytes"));
                self.counters[there][counter].returned.push((value, add));
            }
            Outcome::Appended { number, floor, result } => {
                let offset = self.accept_result(here, &[result]);
                let offset = u64::from_ne_bytes(offset.try_into().expect("8 bytes"));
                ensure!(
                    offset >= floor,
                    "the record lies at {offset}, before the end {floor} of one that was acknowledged"
                );
                if let Some(number) = number {
                    self.nodes[there].log.note_acknowledged(number, offset);
                }
                self.tally.add("records acknowledged", 1);
            }
            Outcome::Bound { window } => self.set_window_stage(window, Stage::Open),
            Outcome::Unbound { window } => self.set_window_stage(window, Stage::Unbound),
        }
        Ok(())
    }

    /// Checks that the data of a completed WRITE is in the peer's memory, unless a later request has overwritten it.
    fn check_stored(&self, index: usize, number: usize) -> Checked {
        let end = &self.ends[index];
        let Some(effect) = &end.steps[number].effect else { return Ok(()) };
        let later = end.steps[number + 1..].iter().filter_map(|step| step.effect.as_ref());
        if later.into_iter().any(|later| later.span.overlap(effect.span).is_some()) {
            return Ok(());
        }
        let actual = self.nodes[1 - (index & 1)].memory.actual(effect.span);
        ensure!(actual == effect.after, "request {number} has completed, but its data is not in memory");
        Ok(())
    }

    /// Copies the content of these spans into the model, and returns it.
    fn accept_result(&mut self, node: usize, result_buffers: &[Span]) -> Vec<u8> {
        let memory = &mut self.nodes[node].memory;
        result_buffers.iter().for_each(|span| memory.accept(*span));
        result_buffers.iter().flat_map(|span| memory.model(*span).to_vec()).collect()
    }

    fn check_fetched(
        &mut self,
        index: usize,
        result_buffers: &[Span],
        expected: &[u8],
        later_writes: &[(usize, Vec<u8>)],
    ) -> Checked {
        let result = self.accept_result(index & 1, result_buffers);
        let wrong = (0..expected.len()).find(|at| {
            let is_later_write = |(start, bytes): &(usize, Vec<u8>)| {
                at.checked_sub(*start).and_then(|offset| bytes.get(offset)) == Some(&result[*at])
            };
            result[*at] != expected[*at] && !later_writes.iter().any(is_later_write)
        });
        match wrong {
            None => Ok(()),
            Some(at) => Err(Failure(format!(
                "the READ returned wrong data from byte {at} of {} on: {:x?} instead of {:x?}",
                expected.len(),
                &result[at..(at + 8).min(result.len())],
                &expected[at..(at + 8).min(expected.len())]
            ))),
        }
    }

    /// A failed READ may have returned a part of its data, which must be right.
    fn accept_partial_result(&mut self, index: usize, request: Request) -> Checked {
        let node = index & 1;
        match request.outcome {
            Outcome::Fetched { result_buffers, expected, later_writes, .. } => {
                let mut offset = 0;
                for span in result_buffers {
                    let memory = &self.nodes[node].memory;
                    let (actual, initial) = (memory.actual(span), memory.model(span));
                    for (at, byte) in actual.iter().enumerate() {
                        let position = offset + at;
                        let is_later_write = later_writes.iter().any(|(start, bytes)| {
                            position.checked_sub(*start).and_then(|skip| bytes.get(skip)) == Some(byte)
                        });
                        ensure!(
                            *byte == initial[at] || *byte == expected[position] || is_later_write,
                            "the failed READ returned wrong data"
                        );
                    }
                    offset += span.len();
                    self.nodes[node].memory.accept(span);
                }
            }
            Outcome::Swapped { result_buffers, .. } => {
                // The result may have arrived just before the flush.
                result_buffers.iter().for_each(|span| self.nodes[node].memory.accept(*span));
            }
            Outcome::Counted { counter, result_buffers, .. } => {
                self.counters[1 - node][counter].unclear = true;
                result_buffers.iter().for_each(|span| self.nodes[node].memory.accept(*span));
            }
            Outcome::Appended { result, .. } => self.nodes[node].memory.accept(result),
            _ => {}
        }
        Ok(())
    }

    fn note_receive_completion(&mut self, index: usize, wc: &Wc) -> Checked {
        self.tally.add(format!("received {:?} {:?} {:?}", self.ends[index].kind, wc.opcode, wc.status), 1);
        let receive = self.take_receive(index, wc)?;
        if wc.status != WcStatus::Success {
            return self.note_failed_receive(index, receive, wc.status);
        }
        ensure!(self.ends[index].receives_failed == 0, "a receive succeeded after an error");
        self.ends[index].received += 1;
        match self.ends[index].kind {
            // No plan draws XRC; crates/nic/tests/xrc.rs covers it.
            QpType::Rc | QpType::XrcSend | QpType::XrcRecv => {
                let Some(message) = self.ends[index].inbound.pop_front() else {
                    return Err(Failure("received a message that was not sent".into()));
                };
                self.check_message(index, &receive, &message, wc).map_err(Failure)?;
                self.accept_message(index, &receive, &message)
            }
            QpType::Uc | QpType::Ud => self.match_message(index, &receive, wc),
        }
    }

    /// An end's own receives complete in posting order. A shared receive may be any posted one.
    fn take_receive(&mut self, index: usize, wc: &Wc) -> Checked<Receive> {
        let taken = match self.ends[index].plan.uses_srq {
            true => self.nodes[index & 1].shared.posted.remove(&wc.wr_id),
            false => self.ends[index].receives.pop_front(),
        };
        match taken {
            Some(receive) if receive.wr_id == wc.wr_id => Ok(receive),
            Some(receive) => Err(Failure(format!("receive {} should complete first", receive.wr_id))),
            None => Err(Failure("a completed receive was not posted, or has completed twice".into())),
        }
    }

    /// A flushed receive may contain the start of a message.
    fn note_failed_receive(&mut self, index: usize, receive: Receive, status: WcStatus) -> Checked {
        let defers = self.nodes[index & 1].defers();
        let nth = if defers { self.ends[index].receives_failed as usize } else { 0 };
        let begun = self.ends[index].inbound.get(nth).cloned();
        if status == WcStatus::LocalLength {
            ensure!(begun.as_ref().is_some_and(|message| message.too_long), "the message was not too long");
        } else {
            ensure!(status == WcStatus::Flushed, "a receive cannot fail like that");
        }
        // Only the oldest receive can have been in progress, or one whose message waited for absent memory. No other
        // receive of a shared queue can be consumed.
        let is_first = self.ends[index].receives_failed == 0 || defers;
        self.ends[index].receives_failed += 1;
        ensure!(is_first || !self.ends[index].plan.uses_srq, "several shared receives were flushed");
        let begun = begun.filter(|_| is_first);
        self.note_broken(index, status)?;
        let node = index & 1;
        let mut offset = 0;
        for span in receive.spans {
            let memory = &self.nodes[node].memory;
            let (actual, initial) = (memory.actual(span), memory.model(span));
            for (at, byte) in actual.iter().enumerate() {
                let sent = begun.as_ref().and_then(|message| message.payload.get(offset + at));
                // A receive of an unreliable connection may contain parts of several incomplete messages.
                let is_explained =
                    *byte == initial[at] || Some(byte) == sent || !self.ends[index].is_reliable();
                ensure!(is_explained, "the flushed receive contains data that was not sent");
            }
            offset += span.len();
            self.nodes[node].memory.accept(span);
        }
        Ok(())
    }

    /// Checks that a completion and its receive's data are this message. The error names the difference.
    fn check_message(
        &self,
        index: usize,
        receive: &Receive,
        message: &Message,
        wc: &Wc,
    ) -> Result<(), String> {
        let is_datagram = self.ends[index].kind == QpType::Ud;
        let header_bytes = if is_datagram { GRH_BYTES } else { 0 };
        let mut flags = if is_datagram { WcFlags::GRH } else { WcFlags::empty() };
        flags.set(WcFlags::WITH_IMM, message.imm.is_some());
        flags.set(WcFlags::WITH_INV, message.invalidates.is_some());
        let opcode = if message.written_to.is_some() { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        let peer = self.ends[index ^ 1].qp.qpn();
        let claims = [
            ("opcode", wc.opcode as u64, opcode as u64),
            ("byte count", wc.byte_len.into(), (header_bytes + message.payload.len()) as u64),
            ("flags", wc.flags.bits().into(), flags.bits().into()),
            ("immediate", wc.imm.into(), message.imm.or(message.invalidates).unwrap_or(0).into()),
            ("solicited", wc.solicited.into(), message.solicited.into()),
            ("source", wc.src_qp.into(), peer.into()),
        ];
        if let Some((what, is, should)) = claims.into_iter().find(|(_, is, should)| is != should) {
            return Err(format!("the {what} is {is:#x} instead of {should:#x}"));
        }
        let (node, spans) = match message.written_to {
            Some(span) => (index & 1, vec![span]),
            None => (index & 1, receive.spans.clone()),
        };
        let memory = &self.nodes[node].memory;
        let actual: Vec<u8> = spans.iter().flat_map(|span| memory.actual(*span)).collect();
        // A later request may have overwritten a WRITE's place; the model then differs from the payload.
        let is_same = match message.written_to {
            Some(span) if self.ends[index].is_reliable() => {
                let whole = memory.model(span);
                whole != message.payload || actual == message.payload
            }
            Some(_) => actual == message.payload,
            None => actual[header_bytes..header_bytes + message.payload.len()] == message.payload,
        };
        if is_same { Ok(()) } else { Err("the data is not what was sent".to_string()) }
    }

    /// Updates the model with a message that has been checked.
    fn accept_message(&mut self, index: usize, receive: &Receive, message: &Message) -> Checked {
        let memory = &mut self.nodes[index & 1].memory;
        if !self.ends[index].is_reliable() {
            // Incomplete messages may have left data in the receive.
            receive.spans.iter().chain(&message.written_to).for_each(|span| memory.accept(*span));
        } else if message.written_to.is_none() {
            // No byte beyond the message has changed.
            let mut rest = &message.payload[..];
            for span in &receive.spans {
                let (piece, after) = rest.split_at(rest.len().min(span.len()));
                memory.expect(span.part(0, piece.len()), piece);
                rest = after;
            }
        }
        if let Some(rkey) = message.invalidates {
            self.note_invalidated(index, rkey)?;
        }
        Ok(())
    }

    /// Unreliable messages may be lost. They arrive in order if the network keeps the order, and once if it duplicates
    /// no packets. A received message must be complete.
    fn match_message(&mut self, index: usize, receive: &Receive, wc: &Wc) -> Checked {
        let network = &self.plan.network.faulty;
        let (reorders, doubles) = (network.reorder > 0.0, network.duplicate > 0.0);
        let mut reason = "no message was sent".to_string();
        for at in 0..self.ends[index].inbound.len() {
            let message = self.ends[index].inbound[at].clone();
            match self.check_message(index, receive, &message, wc) {
                Err(difference) => reason = difference,
                Ok(()) => {
                    self.accept_message(index, receive, &message)?;
                    if !doubles && !reorders {
                        self.ends[index].inbound.drain(..=at);
                    } else if !doubles {
                        self.ends[index].inbound.remove(at);
                    }
                    return Ok(());
                }
            }
        }
        Err(Failure(format!("received a message that was not sent; the last candidate: {reason}")))
    }
}

fn poll(cq: &Cq, count: usize) -> Result<Vec<Wc>, Error> {
    let mut completions = Vec::new();
    cq.poll(count, &mut |wc| completions.push(*wc))?;
    Ok(completions)
}
