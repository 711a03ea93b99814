//! What the program of a pair posts, and what the model makes of it.

use std::ops::Range;

use terrace_access::optimistic::OrderBits;
use terrace_access::region::Knowledge;
use terrace_nic::{Payload, SendFlags, SendOp, SendWr, Sge, SgeList};

use super::World;
use super::pair::{Message, Posted, SLOTS_BYTES};
use super::setup::RECEIVE_BYTES;
use super::side::{LOCAL, REMOTE};
use crate::world::{Checked, Failure};

/// The longest data inside a work request, in bytes.
const INLINE_BYTES_MAX: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Read,
    Write,
    WriteImm,
    Send,
    CompareSwap,
    FetchAdd,
    /// An addition to the counter that all pairs share.
    Count,
}

impl World {
    /// Posts a request of a pair, if its initiator takes it.
    pub(super) fn post(&mut self, index: usize) -> Checked {
        use Operation::{CompareSwap, Count, FetchAdd, Read, Send, Write, WriteImm};
        let operation = self.rng.pick(&[
            Read,
            Read,
            Read,
            Write,
            Write,
            Write,
            Write,
            Write,
            WriteImm,
            Send,
            CompareSwap,
            FetchAdd,
            Count,
        ]);
        let longest = match operation {
            CompareSwap | FetchAdd | Count => 8,
            Send => self.plan.bytes_max.min(RECEIVE_BYTES as u64),
            _ => self.plan.bytes_max,
        };
        let is_atomic = longest == 8;
        let shortest = if is_atomic { 8 } else { 1 };
        let areas = [0, 1].map(|node| self.pairs[index].area_bytes(node));
        let longest = longest.min((areas[0] - SLOTS_BYTES) as u64).min(areas[1] as u64);
        let length = self.rng.spread(shortest..=longest) as usize;
        let local = self.range(SLOTS_BYTES, areas[0], length, is_atomic);
        let remote = self.range(0, areas[1], length, is_atomic);
        let number = self.pairs[index].next_number;
        let is_last = self.pairs[index].budget == 1;
        let is_signaled = is_last || self.rng.chance(self.plan.signaled);
        let is_source = matches!(operation, Write | WriteImm | Send);
        let inline = is_source && length as u64 <= INLINE_BYTES_MAX && self.rng.chance(0.2);
        let is_new = inline || !self.pairs[index].is_used(&local);
        if is_source && !inline && is_new {
            let data = self.rng.bytes(length);
            let pair = &mut self.pairs[index];
            self.memory.local.pages.poke(pair.starts[0] + local.start, &data);
            pair.models[0].fill(local.start, &data);
        }
        let slot = number as usize % (SLOTS_BYTES / 8) * 8;
        let local = if operation == Count { slot..slot + 8 } else { local };
        if operation == Count && self.pairs[index].is_used(&local) {
            return Ok(());
        }
        let data =
            if inline { self.rng.bytes(length) } else { self.pairs[index].models[0].get(local.clone()) };
        let payload = match inline {
            true => Payload::Inline(data.iter().copied().collect()),
            false => Payload::Sges(self.list(index, &local)),
        };
        let (start, rkey) = (self.pairs[index].starts[1] + remote.start, self.memory.remote_key);
        let va = REMOTE + (start - self.plan.lead) as u64;
        let (compare, swap, add) =
            (self.compare(index, &remote), self.rng.word(), self.rng.within(1..=1 << 30));
        let imm = self.rng.word() as u32;
        let op = match operation {
            Read => SendOp::Read { va, rkey },
            Write => SendOp::Write { va, rkey },
            WriteImm => SendOp::WriteImm { va, rkey, imm },
            Send => SendOp::Send,
            CompareSwap => SendOp::CompareSwap { va, rkey, compare, swap },
            FetchAdd => SendOp::FetchAdd { va, rkey, add },
            Count => SendOp::FetchAdd { va: self.counter_va(), rkey, add },
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, is_signaled);
        flags.set(SendFlags::FENCE, self.rng.chance(0.1));
        let mut bits = OrderBits::empty();
        bits.set(OrderBits::BEFORE, self.rng.chance(0.05));
        bits.set(OrderBits::AFTER, self.rng.chance(0.05));
        let wr = SendWr { wr_id: number.into(), op, payload, flags, target: None };
        self.say(|| format!("pair {index} posts {number}: {operation:?} {length} B, local {local:?}, remote {remote:?} {flags:?} {bits:?}"));
        let pair = &mut self.pairs[index];
        let known = match (operation, pair.is_described) {
            (Send, _) => Knowledge::Plain,
            (_, true) => self.memory.known.clone(),
            (_, false) => Knowledge::Unknown,
        };
        if pair.initiator.post(wr, &known, bits).is_err() {
            return Err(Failure(format!("pair {index}: the initiator is full")));
        }
        pair.budget -= 1;
        pair.next_number += 1;
        let used = if inline { Vec::new() } else { vec![local.clone()] };
        let add_to_counter = (operation == Count).then_some(add);
        pair.posted.push_back(Posted {
            number,
            is_signaled,
            local: used,
            add: add_to_counter,
            is_followed: false,
        });
        let old = pair.models[1].get(remote.clone());
        // Data that an earlier request sends, too, do not tell that this one has been executed.
        let is_telling = is_new && matches!(operation, Write | WriteImm);
        let write = is_telling.then_some((remote.start, &old[..], &data[..]));
        pair.note_order(number, bits, write);
        let word = || u64::from_ne_bytes(old[..8].try_into().expect("8 bytes"));
        let byte_len = length as u32;
        match operation {
            Read => pair.models[0].set(number, local.start, &old),
            Write => pair.models[1].set(number, remote.start, &data),
            WriteImm => {
                pair.models[1].set(number, remote.start, &data);
                pair.inbound.push_back(Message { number, data: None, imm: Some(imm), byte_len });
            }
            Send => pair.inbound.push_back(Message { number, data: Some(data), imm: None, byte_len }),
            CompareSwap => {
                let new = if word() == compare { swap } else { word() };
                pair.models[1].set(number, remote.start, &new.to_ne_bytes());
                pair.models[0].set(number, local.start, &old);
            }
            FetchAdd => {
                pair.models[1].set(number, remote.start, &word().wrapping_add(add).to_ne_bytes());
                pair.models[0].set(number, local.start, &old);
            }
            Count => {}
        }
        self.tally.add(format!("NP-RDMA {operation:?}"), 1);
        Ok(())
    }

    /// A range of a pair's memory; an aligned one for atomics.
    fn range(&mut self, first: usize, end: usize, length: usize, is_aligned: bool) -> Range<usize> {
        let last =
            if self.rng.chance(self.plan.overlap) { (first + 16).min(end - length) } else { end - length };
        let start = self.rng.within(first as u64..=last as u64) as usize;
        let start = if is_aligned { start & !7 } else { start };
        start..start + length
    }

    /// The list for a range of the pair's local memory, sometimes of two elements.
    fn list(&mut self, index: usize, local: &Range<usize>) -> SgeList {
        let (start, lkey) = (self.pairs[index].starts[0], self.memory.local_key);
        let cut = if self.rng.chance(0.2) { self.rng.index(local.len() + 1) } else { 0 };
        let parts = [local.start..local.start + cut, local.start + cut..local.end];
        let elements = parts.into_iter().filter(|part| !part.is_empty());
        let sge = |part: Range<usize>| Sge {
            addr: LOCAL + (start + part.start) as u64,
            length: part.len() as u32,
            lkey,
        };
        elements.map(sge).collect()
    }

    /// What to compare with: often what is there.
    fn compare(&mut self, index: usize, remote: &Range<usize>) -> u64 {
        let here = self.pairs[index].models[1].get(remote.clone());
        match here[..].first_chunk() {
            Some(word) if self.rng.chance(0.7) => u64::from_ne_bytes(*word),
            _ => self.rng.word(),
        }
    }
}
