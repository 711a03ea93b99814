//! Posting. The device gets the work request, and the model executes it immediately, in posting order. The model is the
//! reference.

use terrace_nic::{Error, QpType, RecvWr, SendFlags, SendOp, SendWr, WcOpcode};

use crate::end::{Draft, Effect, Intent, Message, Outcome, Phase, Receive, Request, Step};
use crate::memory::Span;
use crate::node::{SRQ_DEPTH, SRQ_SGES};
use crate::window::Stage;
use crate::world::{Checked, World, ensure, trace};

/// Limit of work requests in a posted list.
const BATCH_MAX: usize = 6;

/// Probability at each tick that a program with drains left starts a drain of its send queue.
const DRAINS: f64 = 0.05;

impl World {
    pub fn new_wr_id(&mut self) -> u64 {
        self.next_wr_id += 1;
        self.next_wr_id
    }

    /// Posts a few send work requests. Returns whether the send queue accepted any.
    pub fn post_sends(&mut self, index: usize) -> Checked<bool> {
        let before_count = self.ends[index].steps.len();
        let count = 1 + self.rng.index(BATCH_MAX);
        while self.ends[index].drafts.len() < count && self.ends[index].budget > 0 {
            self.draw(index)?;
        }
        let count = count.min(self.ends[index].drafts.len());
        let free_count =
            (self.ends[index].plan.max_send_wr as usize).saturating_sub(self.ends[index].posted.len());
        if free_count >= count {
            self.post_batch(index, count)?
        } else {
            self.post_singly(index, count)?
        }
        Ok(self.ends[index].steps.len() > before_count)
    }

    /// Takes the next draft, unless the peer lacks a receive for it.
    fn next_draft(&mut self, index: usize) -> Checked<Option<Draft>> {
        let Some(draft) = self.ends[index].drafts.front() else { return Ok(None) };
        let consumes = consumes_receive(&draft.intent);
        if consumes && self.is_perfect() && !self.receive_is_ready(index ^ 1)? {
            return Ok(None);
        }
        let mut draft = self.ends[index].drafts.pop_front();
        if let Some(draft) = &mut draft {
            draft.wr.wr_id = self.new_wr_id();
        }
        Ok(draft)
    }

    /// Posts a list of work requests, for which the queue must have free entries.
    fn post_batch(&mut self, index: usize, count: usize) -> Checked {
        let mut wrs = Vec::new();
        for _ in 0..count {
            let Some(draft) = self.next_draft(index)? else { break };
            wrs.push(draft.wr.clone());
            self.note_posted(index, draft)?;
        }
        let posted = self.ends[index].qp.post_send(wrs.into_iter().map(Ok));
        posted.map_err(|(at, error)| {
            crate::world::Failure(format!(
                "end {index}: post_send failed at work request {at} of a list: {error}"
            ))
        })
    }

    /// Posts one by one until the queue is full, which it must not report earlier.
    fn post_singly(&mut self, index: usize, count: usize) -> Checked {
        for _ in 0..count {
            let Some(draft) = self.next_draft(index)? else { break };
            match self.ends[index].qp.post_send([Ok(draft.wr.clone())]) {
                Ok(()) => self.note_posted(index, draft)?,
                Err((_, Error::NoMemory(_))) => {
                    let end = &mut self.ends[index];
                    ensure!(
                        end.posted.len() >= end.plan.max_send_wr as usize,
                        "end {index}: the send queue reports that it is full, with {} of {} entries",
                        end.posted.len(),
                        end.plan.max_send_wr
                    );
                    end.drafts.push_front(draft);
                    self.tally.add("send queue full", 1);
                    return Ok(());
                }
                Err((_, error)) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Executes a work request on the model.
    pub fn note_posted(&mut self, index: usize, draft: Draft) -> Checked {
        let Draft { wr, intent, window } = draft;
        trace!(self, "end {index} posts {} {} {:?}", wr.wr_id, describe(&wr), wr.flags);
        if wr.flags.contains(SendFlags::FENCE) {
            self.ends[index].fences += 1;
        }
        let consumes = consumes_receive(&intent);
        let solicited = wr.flags.contains(SendFlags::SOLICITED);
        let (outcome, effect) = self.execute_on_model(index, intent, solicited);
        let end = &mut self.ends[index];
        if let Some(effect) = &effect {
            record_later_write(end.posted.iter_mut(), end.fences, effect);
        }
        let signaled = end.plan.sig_all || wr.flags.contains(SendFlags::SIGNALED);
        let (opcode, byte_len) = completion_of(&wr);
        let number = end.steps.len() as u64;
        end.steps.push(Step { consumes, effect });
        let request = Request { number, wr_id: wr.wr_id, opcode, signaled, byte_len, window, outcome };
        self.tally.add(format!("posted {:?} {opcode:?}", end.kind), 1);
        end.posted.push_back(request);
        Ok(())
    }

    fn execute_on_model(
        &mut self,
        index: usize,
        intent: Intent,
        solicited: bool,
    ) -> (Outcome, Option<Effect>) {
        let message = |payload, written_to, imm, invalidates| Message {
            payload,
            written_to,
            imm,
            invalidates,
            solicited,
            too_long: false,
        };
        match intent {
            Intent::Send { payload, imm, invalidates } => {
                let payload = payload.unwrap_or_else(|| self.ends[index].last_read.clone());
                self.ends[index ^ 1].inbound.push_back(message(payload, None, imm, invalidates));
                (Outcome::Nothing, None)
            }
            Intent::Write { span, payload, imm } => {
                if imm.is_some() {
                    let message = message(payload.clone(), Some(span), imm, None);
                    self.ends[index ^ 1].inbound.push_back(message);
                }
                if self.ends[index].kind == QpType::Uc {
                    self.ends[index].uncertain.push((span, payload));
                    return (Outcome::Nothing, None);
                }
                (Outcome::Stored, Some(self.change(index, span, payload)))
            }
            Intent::Read { span, result_buffers } => {
                let expected = self.peer_model(index, span);
                self.ends[index].last_read.clone_from(&expected);
                let fences = self.ends[index].fences;
                (Outcome::Fetched { span, fences, result_buffers, expected, later_writes: Vec::new() }, None)
            }
            Intent::CompareSwap { span, compare, swap, result_buffers } => {
                let before = self.peer_word(index, span);
                let after = if before == compare { swap } else { before };
                let effect = self.change(index, span, after.to_ne_bytes().to_vec());
                (Outcome::Swapped { result_buffers, before }, Some(effect))
            }
            Intent::FetchAdd { span, add, result_buffers } => {
                let before = self.peer_word(index, span);
                let after = before.wrapping_add(add);
                let effect = self.change(index, span, after.to_ne_bytes().to_vec());
                (Outcome::Swapped { result_buffers, before }, Some(effect))
            }
            Intent::AtomicWrite { span, value } => {
                (Outcome::Stored, Some(self.change(index, span, value.to_ne_bytes().to_vec())))
            }
            Intent::Count { counter, add, result_buffers } => {
                (Outcome::Counted { counter, add, result_buffers }, None)
            }
            Intent::Append { record, result } => {
                let log = &mut self.nodes[1 - (index & 1)].log;
                let (number, floor) = (record.as_ref().map(|(number, _)| *number), log.begin());
                if let Some((number, bytes)) = record {
                    log.note_posted(index, number, bytes);
                }
                (Outcome::Appended { number, floor, result }, None)
            }
            Intent::Nothing => (Outcome::Nothing, None),
            Intent::Bind { window } => (Outcome::Bound { window }, None),
            Intent::Unbind { window } => (Outcome::Unbound { window }, None),
            Intent::Mistake { status, message: long } => {
                if let Some(payload) = long {
                    let too_long = Message { too_long: true, ..message(payload, None, None, None) };
                    self.ends[index ^ 1].inbound.push_back(too_long);
                }
                (Outcome::Mistaken { status }, None)
            }
        }
    }

    fn peer_model(&self, index: usize, span: Span) -> Vec<u8> {
        self.nodes[1 - (index & 1)].memory.model(span).to_vec()
    }

    fn peer_word(&self, index: usize, span: Span) -> u64 {
        u64::from_ne_bytes(self.peer_model(index, span).try_into().expect("8 bytes"))
    }

    /// Changes the model of the peer's memory.
    fn change(&mut self, index: usize, span: Span, after: Vec<u8>) -> Effect {
        let before = self.peer_model(index, span);
        self.nodes[1 - (index & 1)].memory.expect(span, &after);
        Effect { span, before, after }
    }

    /// Perfect runs send only messages for which the peer has a receive. Posts a receive if one is needed. Returns
    /// false if the queue is full.
    fn receive_is_ready(&mut self, index: usize) -> Checked<bool> {
        if !self.ends[index].connected {
            return Ok(false);
        }
        if self.ends[index].plan.uses_srq {
            let sharing: Vec<usize> =
                self.ends_of(index & 1).filter(|end| self.ends[*end].plan.uses_srq).collect();
            let promised: usize = sharing.iter().map(|end| self.ends[*end].inbound.len()).sum();
            if self.nodes[index & 1].shared.posted.len() <= promised {
                self.post_shared_receive(index & 1)?;
            }
            return Ok(self.nodes[index & 1].shared.posted.len() > promised);
        }
        let promised = self.ends[index].inbound.len();
        if self.ends[index].receives.len() <= promised {
            self.post_receive(index)?;
        }
        Ok(self.ends[index].receives.len() > promised)
    }

    /// Posts a receive to the end's own queue, unless the queue is full.
    pub fn post_receive(&mut self, index: usize) -> Checked {
        let waiting = self.ends[index].receives.len();
        if waiting >= self.ends[index].plan.max_recv_wr as usize {
            return Ok(());
        }
        let mut capacity = self.receive_bytes(index);
        // A reliable connection consumes receives in order, so this receive gets that message, and can have its length.
        if self.ends[index].is_reliable()
            && let Some(message) = self.ends[index].inbound.get(waiting)
            && !message.too_long
            && self.rng.chance(0.5)
        {
            capacity = if message.written_to.is_some() { 0 } else { message.payload.len() };
        }
        let pieces_max = self.ends[index].plan.max_sge;
        let (receive, wr) = self.draw_receive(index & 1, capacity, pieces_max)?;
        trace!(self, "end {index} posts receive {} of {capacity} bytes: {:x?}", receive.wr_id, wr.sges);
        self.ends[index].qp.post_recv([Ok(wr)]).map_err(|(_, error)| error)?;
        self.ends[index].receives.push_back(receive);
        Ok(())
    }

    /// Posts a receive to the node's shared queue, unless the queue is full or no end uses it.
    pub fn post_shared_receive(&mut self, node: usize) -> Checked {
        let users = self.ends_of(node).filter(|end| self.ends[*end].plan.uses_srq);
        let Some(capacity) = users.map(|end| self.receive_bytes(end)).max() else { return Ok(()) };
        if self.nodes[node].shared.posted.len() >= SRQ_DEPTH as usize {
            return Ok(());
        }
        let (receive, wr) = self.draw_receive(node, capacity, SRQ_SGES)?;
        trace!(
            self,
            "node {node} posts shared receive {} of {capacity} bytes: {:x?}", receive.wr_id, wr.sges
        );
        self.nodes[node].shared.srq.post([Ok(wr)]).map_err(|(_, error)| error)?;
        let shared = &mut self.nodes[node].shared;
        shared.posted.insert(receive.wr_id, receive);
        if shared.limit.is_none() && self.rng.chance(0.1) {
            // All posted receives may still be in the queue, so the limit is not reached yet.
            let limit = self.rng.within(1..=shared.posted.len() as u64) as u32;
            shared.srq.modify(None, Some(limit))?;
            shared.limit = Some(limit);
        }
        Ok(())
    }

    fn draw_receive(&mut self, node: usize, capacity: usize, pieces_max: u32) -> Checked<(Receive, RecvWr)> {
        let spans = self.private_spans(node, capacity, pieces_max)?;
        let wr_id = self.new_wr_id();
        let sges = spans.iter().map(|span| self.nodes[node].memory.sge(*span)).collect();
        Ok((Receive { wr_id, spans }, RecvWr { wr_id, sges }))
    }

    /// Sets a window's stage, unless the window is lost.
    pub fn set_window_stage(&mut self, window: usize, stage: Stage) {
        if self.windows[window].stage != Stage::Unknown {
            self.windows[window].stage = stage;
        }
    }

    /// Starts a drain of the send queue at random, and ends a finished one.
    pub fn drain_or_resume(&mut self, index: usize) -> Checked {
        let qp = (index & 1, self.ends[index].qp.qpn());
        match self.ends[index].phase {
            Phase::Running if self.ends[index].drains > 0 && self.rng.chance(DRAINS) => {
                self.ends[index].drains -= 1;
                self.drained.remove(&qp);
                self.modify_state(index, terrace_nic::QpState::Sqd)?;
                self.ends[index].phase = Phase::Draining;
                self.tally.add("send queue drains begun", 1);
            }
            Phase::Draining if self.drained.contains(&qp) => {
                self.modify_state(index, terrace_nic::QpState::Rts)?;
                self.ends[index].phase = Phase::Running;
                self.tally.add("send queue drains finished", 1);
            }
            _ => {}
        }
        Ok(())
    }
}

fn consumes_receive(intent: &Intent) -> bool {
    matches!(intent, Intent::Send { .. } | Intent::Write { imm: Some(_), .. })
}

/// Records the data of a later request. The repetition of an outstanding READ may return it, unless a fence is between
/// them.
fn record_later_write<'a>(posted: impl Iterator<Item = &'a mut Request>, fences_now: u64, effect: &Effect) {
    for request in posted {
        if let Outcome::Fetched { span, fences, later_writes, .. } = &mut request.outcome
            && *fences == fences_now
            && let Some(range) = span.overlap(effect.span)
        {
            let skipped = effect.span.overlap(*span).map_or(0, |there| there.start);
            later_writes.push((range.start, effect.after[skipped..skipped + range.len()].to_vec()));
        }
    }
}

/// Returns the opcode and the byte count of the completion.
fn completion_of(wr: &SendWr) -> (WcOpcode, Option<u32>) {
    match wr.op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInvalidate(_) => (WcOpcode::Send, None),
        SendOp::Write { .. } | SendOp::WriteImm { .. } => (WcOpcode::RdmaWrite, None),
        SendOp::Read { .. } => (WcOpcode::RdmaRead, Some(wr.payload.len() as u32)),
        SendOp::CompareSwap { .. } | SendOp::MaskedCompareSwap { .. } => (WcOpcode::CompSwap, Some(8)),
        SendOp::FetchAdd { .. } | SendOp::MaskedFetchAdd { .. } => (WcOpcode::FetchAdd, Some(8)),
        SendOp::AtomicWrite { .. } => (WcOpcode::AtomicWrite, None),
        SendOp::Flush { .. } => (WcOpcode::Flush, None),
        SendOp::Append { .. } => (WcOpcode::Append, Some(wr.payload.len() as u32 - 8)),
        SendOp::LocalInvalidate(_) => (WcOpcode::LocalInv, None),
        SendOp::BindWindow(_) => (WcOpcode::BindMw, None),
        SendOp::Nop => (WcOpcode::Nop, None),
    }
}

fn describe(wr: &SendWr) -> String {
    format!("{:x?} of {} bytes, {:x?}", wr.op, wr.payload.len(), wr.payload)
}
