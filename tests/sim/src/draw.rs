//! Generates the programs' work requests.

use terrace_nic::{Payload, QpType, SendFlags, SendOp, SendWr, Sge, SgeList, WcStatus};

use crate::end::{Draft, Intent};
use crate::log::{self, HEAD_BYTES};
use crate::memory::{Purpose, Span};
use crate::window::{Stage, Window};
use crate::world::{ADD_MAX, COUNTERS, Checked, World};

/// Limit of a scatter/gather list's elements, even if the queue allows more.
const SGES_MAX: usize = 6;

/// A work request without data.
pub(crate) fn plain_wr(op: SendOp, signaled: bool) -> SendWr {
    SendWr {
        wr_id: 0,
        op,
        payload: Payload::Sges(SgeList::new()),
        flags: if signaled { SendFlags::SIGNALED } else { SendFlags::empty() },
        target: None,
    }
}

/// A part of the peer's memory, with its address and key on the wire.
#[derive(Clone, Copy)]
struct Target {
    span: Span,
    va: u64,
    rkey: u32,
    window: Option<usize>,
}

impl World {
    /// Draws the program's next work request, or two that depend on each other.
    pub fn draw(&mut self, index: usize) -> Checked {
        self.ends[index].budget -= 1;
        let kind = self.ends[index].kind;
        let mistake_probability = self.ends[index].plan.mistake_probability;
        if kind == QpType::Rc && self.rng.chance(mistake_probability) {
            return self.draw_mistake(index);
        }
        let mix = self.ends[index].plan.mix;
        let reliable_only = |weight: u32| if kind == QpType::Rc { weight } else { 0 };
        let writes = if kind == QpType::Ud { 0 } else { mix.write };
        let weights = [
            mix.send,
            writes,
            reliable_only(mix.read),
            reliable_only(mix.atomic),
            reliable_only(mix.flush),
            reliable_only(mix.append),
        ];
        let total: u32 = weights.iter().sum();
        let mut drawn = self.rng.index(total as usize) as u32;
        let choice = weights.iter().position(|weight| {
            let here = drawn < *weight;
            drawn = drawn.saturating_sub(*weight);
            here
        });
        match choice {
            Some(1) => self.draw_write(index),
            Some(2) => self.draw_read(index),
            Some(3) => self.draw_atomic(index),
            Some(4) => self.draw_flush(index),
            Some(5) => self.draw_append(index),
            _ => self.draw_send(index),
        }
    }

    /// Draws a length up to the end's longest message, most often at a boundary.
    fn draw_len(&mut self, index: usize) -> usize {
        let (mtu, longest) = (self.ends[index].mtu, self.ends[index].plan.message_bytes_max);
        let around_packets = mtu * (1 + self.rng.index(4)) + self.rng.index(3) - 1;
        let rng = &mut self.rng;
        let small = rng.index(9);
        let any = rng.index(longest + 1);
        let up_to_a_packet = rng.index(mtu + 1);
        rng.pick(&[small, around_packets, around_packets, up_to_a_packet, any, longest]).min(longest)
    }

    fn flags(&mut self, index: usize) -> SendFlags {
        let mix = self.ends[index].plan.mix;
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, self.rng.chance(mix.signaled));
        flags.set(SendFlags::FENCE, self.rng.chance(mix.fenced));
        flags.set(SendFlags::SOLICITED, self.rng.chance(0.3));
        flags
    }

    /// Splits a length into the pieces of a scatter/gather list, some of them empty.
    fn split_len(&mut self, len: usize, pieces_max: u32) -> Vec<usize> {
        let count = 1 + self.rng.index((pieces_max as usize).min(SGES_MAX));
        if len == 0 && self.rng.chance(0.5) {
            return Vec::new();
        }
        let mut cuts: Vec<usize> = (1..count).map(|_| self.rng.index(len + 1)).collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Allocates private memory in pieces.
    pub fn private_spans(&mut self, node: usize, len: usize, pieces_max: u32) -> Checked<Vec<Span>> {
        let pieces = self.split_len(len, pieces_max);
        let memory = &mut self.nodes[node].memory;
        Ok(pieces
            .into_iter()
            .map(|len| memory.take(Purpose::Private, len, false))
            .collect::<Result<_, _>>()?)
    }

    fn sges(&self, node: usize, spans: &[Span]) -> SgeList {
        spans.iter().map(|span| self.nodes[node].memory.sge(*span)).collect()
    }

    /// Puts a work request's data into memory, or inline into the request.
    fn payload(&mut self, index: usize, bytes: &[u8]) -> Checked<Payload> {
        let plan = &self.ends[index].plan;
        let (pieces_max, inline) = (plan.max_sge, plan.mix.inline);
        if bytes.len() <= plan.max_inline as usize && self.rng.chance(inline) {
            return Ok(Payload::Inline(bytes.into()));
        }
        let spans = self.private_spans(index & 1, bytes.len(), pieces_max)?;
        let mut rest = bytes;
        for span in &spans {
            let (piece, after) = rest.split_at(span.len());
            self.nodes[index & 1].memory.store(*span, piece);
            rest = after;
        }
        Ok(Payload::Sges(self.sges(index & 1, &spans)))
    }

    /// Allocates the buffers of a result.
    fn result_buffers(&mut self, index: usize, len: usize) -> Checked<(Vec<Span>, Payload)> {
        let pieces_max = self.ends[index].plan.max_sge;
        let mut spans = self.private_spans(index & 1, len, pieces_max)?;
        if spans.is_empty() && len > 0 {
            spans = vec![self.nodes[index & 1].memory.take(Purpose::Private, len, false)?];
        }
        let payload = Payload::Sges(self.sges(index & 1, &spans));
        Ok((spans, payload))
    }

    /// Draws a part of at most `len` bytes of the peer's memory that only this end writes to.
    fn target(&mut self, index: usize, len: usize, aligned: bool) -> Target {
        let windows = self.open_windows(index);
        let through = !windows.is_empty() && self.rng.chance(0.4);
        let (whole, base, rkey, window) = if through {
            let window = self.rng.pick(&windows);
            let open = &self.windows[window];
            (open.bound, open.base, open.rkey, Some(window))
        } else {
            let whole = self.ends[index].target;
            let memory = &self.nodes[1 - (index & 1)].memory;
            (whole, memory.address(whole), memory.key(whole), None)
        };
        let len = len.min(whole.len());
        let mut offset = self.rng.index(whole.len() - len + 1);
        if aligned {
            offset &= !7;
        }
        Target { span: whole.part(offset, len), va: base + offset as u64, rkey, window }
    }

    fn push(&mut self, index: usize, wr: SendWr, intent: Intent, window: Option<usize>) {
        self.ends[index].drafts.push_back(Draft { wr, intent, window });
    }

    fn draw_send(&mut self, index: usize) -> Checked {
        let len = self.draw_len(index);
        let bytes = self.rng.bytes(len);
        let imm = self.rng.chance(0.4).then(|| self.rng.word() as u32);
        let op = imm.map_or(SendOp::Send, SendOp::SendImm);
        let (flags, payload) = (self.flags(index), self.payload(index, &bytes)?);
        let peer = self.ends[index ^ 1].qp.qpn();
        // Datagrams with a wrong Q_Key are dropped.
        let has_wrong_qkey = self.ends[index].ah.is_some() && !self.is_perfect() && self.rng.chance(0.1);
        let end = &self.ends[index];
        let qkey = if has_wrong_qkey { end.qkey + 1 } else { end.qkey };
        let target = end.ah.as_ref().map(|ah| ah.target(peer, qkey));
        let wr = SendWr { wr_id: 0, op, payload, flags, target };
        let intent = match has_wrong_qkey {
            true => Intent::Nothing,
            false => Intent::Send { payload: Some(bytes), imm, invalidates: None },
        };
        self.push(index, wr, intent, None);
        Ok(())
    }

    /// Adds a SEND that invalidates a window. It waits for READs through the window, which must not be repeated
    /// afterwards.
    pub fn draft_send_invalidate(&mut self, index: usize, rkey: u32) {
        let mut wr = plain_wr(SendOp::SendInvalidate(rkey), self.rng.chance(0.5));
        wr.flags |= SendFlags::FENCE;
        let intent = Intent::Send { payload: Some(Vec::new()), imm: None, invalidates: Some(rkey) };
        self.push(index, wr, intent, None);
    }

    fn draw_write(&mut self, index: usize) -> Checked {
        let len = self.draw_len(index);
        let imm = self.rng.chance(0.3).then(|| self.rng.word() as u32);
        let target = if self.ends[index].kind == QpType::Uc {
            // A message that lost a packet may be written in part, so each has its own span.
            let memory = &mut self.nodes[1 - (index & 1)].memory;
            let span = memory.take(Purpose::Open, len, false)?;
            Target { span, va: memory.address(span), rkey: memory.key(span), window: None }
        } else {
            self.target(index, len, false)
        };
        let bytes = self.rng.bytes(target.span.len());
        let Target { span, va, rkey, window } = target;
        let op = match imm {
            Some(imm) => SendOp::WriteImm { va, rkey, imm },
            None => SendOp::Write { va, rkey },
        };
        let (flags, payload) = (self.flags(index), self.payload(index, &bytes)?);
        let wr = SendWr { wr_id: 0, op, payload, flags, target: None };
        self.push(index, wr, Intent::Write { span, payload: bytes, imm }, window);
        Ok(())
    }

    /// Draws a READ, and at times a fenced SEND of the data that it fetched.
    fn draw_read(&mut self, index: usize) -> Checked {
        let len = self.draw_len(index);
        let target = self.target(index, len, false);
        let len = target.span.len();
        let (result_buffers, payload) = self.result_buffers(index, len)?;
        let Target { span, va, rkey, window } = target;
        let op = SendOp::Read { va, rkey };
        let wr = SendWr { wr_id: 0, op, payload: payload.clone(), flags: self.flags(index), target: None };
        let forwards = len > 0 && len <= self.ends[index].plan.message_bytes_max && self.rng.chance(0.2);
        self.push(index, wr, Intent::Read { span, result_buffers }, window);
        if forwards {
            let flags = self.flags(index) | SendFlags::FENCE;
            let wr = SendWr { wr_id: 0, op: SendOp::Send, payload, flags, target: None };
            self.push(index, wr, Intent::Send { payload: None, imm: None, invalidates: None }, None);
        }
        Ok(())
    }

    fn draw_atomic(&mut self, index: usize) -> Checked {
        let flags = self.flags(index);
        if self.rng.chance(0.3) {
            let value = self.rng.word();
            let Target { span, va, rkey, window } = self.target(index, 8, true);
            let payload = self.payload(index, &value.to_ne_bytes())?;
            let wr = SendWr { wr_id: 0, op: SendOp::AtomicWrite { va, rkey }, payload, flags, target: None };
            self.push(index, wr, Intent::AtomicWrite { span, value }, window);
            return Ok(());
        }
        let (result_buffers, payload) = self.result_buffers(index, 8)?;
        let (op, intent, window) = if self.rng.chance(0.3) {
            self.draw_count(index, result_buffers)
        } else {
            self.draw_private_atomic(index, result_buffers)
        };
        let wr = SendWr { wr_id: 0, op, payload, flags, target: None };
        self.push(index, wr, intent, window);
        Ok(())
    }

    /// Adds to a counter that all connections share.
    fn draw_count(&mut self, index: usize, result_buffers: Vec<Span>) -> (SendOp, Intent, Option<usize>) {
        let counter = self.rng.index(COUNTERS);
        let add = self.rng.within(1..=ADD_MAX);
        let span = self.counters[1 - (index & 1)][counter].span;
        let memory = &self.nodes[1 - (index & 1)].memory;
        let op = SendOp::FetchAdd { va: memory.address(span), rkey: memory.key(span), add };
        (op, Intent::Count { counter, add, result_buffers }, None)
    }

    fn draw_private_atomic(
        &mut self,
        index: usize,
        result_buffers: Vec<Span>,
    ) -> (SendOp, Intent, Option<usize>) {
        let Target { span, va, rkey, window } = self.target(index, 8, true);
        let there = self.nodes[1 - (index & 1)].memory.model(span);
        let there = u64::from_ne_bytes(there.try_into().expect("8 bytes"));
        if self.rng.chance(0.5) {
            let add = self.rng.word();
            let op = SendOp::FetchAdd { va, rkey, add };
            return (op, Intent::FetchAdd { span, add, result_buffers }, window);
        }
        let compare = if self.rng.chance(0.7) { there } else { self.rng.word() };
        let swap = self.rng.word();
        let op = SendOp::CompareSwap { va, rkey, compare, swap };
        (op, Intent::CompareSwap { span, compare, swap, result_buffers }, window)
    }

    fn draw_flush(&mut self, index: usize) -> Checked {
        let len = self.draw_len(index).max(1);
        let span = self.ends[index].target;
        let memory = &self.nodes[1 - (index & 1)].memory;
        let (va, rkey) = (memory.address(span), memory.key(span));
        let (placement, selectivity) = (self.rng.pick(&[1, 2, 3]), self.rng.pick(&[0, 0, 1]));
        let op = SendOp::Flush { va, rkey, length: len.min(span.len()) as u32, placement, selectivity };
        let mut wr = plain_wr(op, false);
        wr.flags = self.flags(index);
        self.push(index, wr, Intent::Nothing, None);
        Ok(())
    }

    /// Draws a record to append to the peer's log, or a request without one, which returns the log's end.
    fn draw_append(&mut self, index: usize) -> Checked {
        // The last element is the memory of the offset.
        let pieces_max = self.ends[index].plan.max_sge - 1;
        let longest = if pieces_max == 0 { 0 } else { self.draw_len(index) };
        let number = (longest >= HEAD_BYTES).then(|| self.new_wr_id());
        let bytes = number.map_or(Vec::new(), |number| log::record(number, self.rng.bytes(longest)));
        let mut spans = self.private_spans(index & 1, bytes.len(), pieces_max.max(1))?;
        spans.truncate(pieces_max as usize);
        let memory = &mut self.nodes[index & 1].memory;
        let mut rest = &bytes[..];
        for span in &spans {
            let (piece, after) = rest.split_at(span.len());
            memory.store(*span, piece);
            rest = after;
        }
        let result = memory.take(Purpose::Private, 8, false)?;
        spans.push(result);
        let op =
            SendOp::Append { rkey: self.nodes[1 - (index & 1)].log.rkey(), commit: self.rng.chance(0.3) };
        let payload = Payload::Sges(self.sges(index & 1, &spans));
        let wr = SendWr { wr_id: 0, op, payload, flags: self.flags(index), target: None };
        let record = number.map(|number| (number, bytes));
        self.push(index, wr, Intent::Append { record, result }, None);
        Ok(())
    }

    /// Draws a request that must fail.
    fn draw_mistake(&mut self, index: usize) -> Checked {
        let span = self.ends[index].target;
        let memory = &self.nodes[1 - (index & 1)].memory;
        let (va, rkey, end) = (memory.address(span), memory.key(span), memory.region_end(span));
        let wrong = self.closed_window(index).unwrap_or(rkey ^ 0x0055_5500);
        let (_, good) = self.result_buffers(index, 8)?;
        let nowhere = Payload::Sges(SgeList::from_slice(&[Sge { addr: va, length: 8, lkey: 0x00ab_cd00 }]));
        let too_long = self.ends[index].plan.message_bytes_max + 1;
        let long = self.rng.bytes(too_long);
        let long_payload = Payload::Sges(SgeList::from_slice(&[self.long_sge(index, &long)?]));
        let (denied, invalid, local) =
            (WcStatus::RemoteAccess, WcStatus::RemoteInvalidRequest, WcStatus::LocalProtection);
        let choices = if self.ends[index ^ 1].plan.uses_srq { 7 } else { 8 };
        let (op, payload, status, message) = match self.rng.index(choices) {
            0 => (SendOp::Write { va, rkey: wrong }, good, denied, None),
            1 => (SendOp::Read { va: end - 4, rkey }, good, denied, None),
            2 => (SendOp::CompareSwap { va: va + 4, rkey, compare: 0, swap: 1 }, good, invalid, None),
            3 => (SendOp::Send, nowhere, local, None),
            4 => (SendOp::Read { va, rkey }, nowhere, local, None),
            5 => (SendOp::FetchAdd { va: end, rkey, add: 1 }, good, denied, None),
            6 => (SendOp::Write { va: va.wrapping_sub(1 << 40), rkey }, good, denied, None),
            _ => (SendOp::Send, long_payload, invalid, Some(long)),
        };
        let wr = SendWr { wr_id: 0, op, payload, flags: self.flags(index), target: None };
        self.push(index, wr, Intent::Mistake { status, message }, None);
        Ok(())
    }

    /// Returns the key of a window that is not bound. Binding changes the key, so this key stays invalid.
    fn closed_window(&mut self, index: usize) -> Option<u32> {
        let closed = |window: &&Window| window.owner == index ^ 1 && window.stage == Stage::Unbound;
        let keys: Vec<u32> = self.windows.iter().filter(closed).map(|window| window.rkey).collect();
        (!keys.is_empty()).then(|| self.rng.pick(&keys))
    }

    fn long_sge(&mut self, index: usize, bytes: &[u8]) -> Checked<Sge> {
        let memory = &mut self.nodes[index & 1].memory;
        let span = memory.take(Purpose::Private, bytes.len(), false)?;
        memory.store(span, bytes);
        Ok(memory.sge(span))
    }
}
