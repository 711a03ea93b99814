//! The control queue pairs: messages, whose answers may be lost, and the transfers that a target makes for its peer.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use terrace_access::optimistic::{Move, TargetMemory};
use terrace_access::proto::{Body, MESSAGE_BYTES_MAX, Message, Opened, Table};
use terrace_nic::{
    Buffer, Payload, Provided, QueuePair, RecvWr, SendFlags, SendOp, SendWr, Time, Wc, WcOpcode, WcStatus,
};

use super::World;
use super::pair::Pair;
use super::plan::Plan;
use super::setup::{self, Node};
use super::side::VERSIONS;
use crate::world::{Checked, Failure, ensure};

/// Receives of each end.
const RECEIVE_COUNT: usize = 32;
/// Bytes of a receive. The longest message of a run has 1 KiB of data.
const RECEIVE_BYTES: usize = 2048;
/// Longest time until an end takes a message that has arrived, in nanoseconds: its thread may be doing something else.
const DELAY_NS_MAX: u64 = 20_000;
/// `ibv_access_flags` of what an end receives and READs into.
const LOCAL_WRITE: u32 = 1;

/// The control queue pair of a pair. Its packets are lost and reordered as all others are.
pub(super) struct Control {
    qps: [Arc<QueuePair>; 2],
    received: [Buffer; 2],
    /// What the target has READ from the initiator's memory, a slot for each call.
    fetched: Buffer,
    slot_bytes: usize,
    slot_count: u64,
    /// Transfers from the initiator, by the ids of their calls.
    fetching: BTreeMap<u64, Move>,
    /// Messages that have not arrived.
    under_way: usize,
    /// Those that have, and when each end takes them.
    arrived: [VecDeque<(u64, Vec<u8>)>; 2],
}

impl Control {
    /// A connected queue pair with posted receives.
    pub fn new(plan: &Plan, nodes: &[Node; 2]) -> Checked<Control> {
        let qps = setup::connect(plan, nodes, |node| &node.control_cq)?;
        let receive_bytes = RECEIVE_COUNT * RECEIVE_BYTES;
        let received = [
            Buffer::new(&nodes[0].pd, receive_bytes, LOCAL_WRITE)?,
            Buffer::new(&nodes[1].pd, receive_bytes, LOCAL_WRITE)?,
        ];
        let (slot_bytes, slot_count) = (plan.lent_bytes(), u64::from(plan.call_count_max));
        let fetched = Buffer::new(&nodes[1].pd, slot_bytes * slot_count as usize, LOCAL_WRITE)?;
        let control = Control {
            qps,
            received,
            fetched,
            slot_bytes,
            slot_count,
            fetching: BTreeMap::new(),
            under_way: 0,
            arrived: Default::default(),
        };
        for node in 0..2 {
            (0..RECEIVE_COUNT as u64).try_for_each(|index| control.post_receive(node, index))?;
        }
        Ok(control)
    }

    /// Whether all messages have been taken.
    pub fn is_quiet(&self) -> bool {
        self.under_way == 0 && self.next_message().is_none()
    }

    /// When an end takes the next message that has arrived.
    pub fn next_message(&self) -> Option<u64> {
        self.arrived.iter().filter_map(|arrived| Some(arrived.front()?.0)).min()
    }

    fn post_receive(&self, node: usize, index: u64) -> Checked {
        let sge = self.received[node].sge(index as usize * RECEIVE_BYTES, RECEIVE_BYTES as u32);
        let wr = RecvWr { wr_id: index, sges: [sge].into_iter().collect() };
        Ok(self.qps[node].post_recv([Ok(wr)]).map_err(|(_, error)| error)?)
    }

    fn post(&self, node: usize, wr: SendWr) -> Checked {
        Ok(self.qps[node].post_send([Ok(wr)]).map_err(|(_, error)| error)?)
    }

    fn send(&mut self, node: usize, message: &[u8]) -> Checked {
        self.under_way += 1;
        self.post(node, with_bytes(0, SendOp::Send, message.to_vec()))
    }

    /// The bytes of a received message, whose receive is posted again.
    fn take_message(&mut self, node: usize, wc: &Wc) -> Checked<Vec<u8>> {
        self.under_way -= 1;
        let mut bytes = vec![0; wc.byte_len as usize];
        self.received[node].read(wc.wr_id as usize * RECEIVE_BYTES, &mut bytes)?;
        self.post_receive(node, wc.wr_id)?;
        Ok(bytes)
    }

    fn slot(&self, id: u64) -> usize {
        (id % self.slot_count) as usize * self.slot_bytes
    }
}

impl World {
    /// Sends an initiator's message to its target.
    pub(super) fn send_to_target(&mut self, index: usize, message: Box<[u8]>) -> Checked {
        let decoded = decode(&message)?;
        self.say(|| format!("pair {index}: {:x} {:?}", decoded.id, decoded.body));
        let (id, is_answered) = (decoded.id, !matches!(decoded.body, Body::Release));
        let pair = &mut self.pairs[index];
        pair.control.send(0, &message)?;
        if is_answered {
            pair.unanswered.insert(id, message);
        }
        Ok(())
    }

    /// Sends a target's answer, or loses it; then the initiator's owner sends the request again.
    pub(super) fn answer(&mut self, index: usize, message: &[u8]) -> Checked {
        let id = decode(message)?.id;
        let is_lost = self.rng.chance(self.plan.lost_answer);
        let pair = &mut self.pairs[index];
        if let (true, Some(request)) = (is_lost, pair.unanswered.get(&id)) {
            self.tally.add("NP-RDMA answers lost", 1);
            return pair.control.send(0, request);
        }
        pair.control.send(1, message)
    }

    /// Begins a transfer for the peer. The target copies from its region to a WRITE, and the answer follows that.
    pub(super) fn transfer(&mut self, index: usize, transfer: Move) -> Checked {
        let Move { token, to_peer, region, peer: (rkey, va), length } = transfer;
        let (pairs, mut side) = self.remote_side(index);
        let Pair { control, target, .. } = &mut pairs[index];
        if !to_peer {
            control.fetching.insert(token, transfer);
            let sge = control.fetched.sge(control.slot(token), length);
            let wr = SendWr::with_sge(token, SendOp::Read { va, rkey }, sge, SendFlags::SIGNALED);
            return control.post(1, wr);
        }
        let mut data = vec![0; length as usize];
        match side.read(region.0, region.1, &mut data) {
            Ok(()) => {
                control.post(1, with_bytes(token, SendOp::Write { va, rkey }, data))?;
                target.handle_copied(token, &mut side);
            }
            Err(status) => target.handle_moved(token, Err(status), &mut side),
        }
        Ok(())
    }

    /// Takes the end of a transfer.
    fn take_transferred(&mut self, index: usize, token: u64) -> Checked {
        self.tally.add("NP-RDMA transfers by the peer", 1);
        let (pairs, mut side) = self.remote_side(index);
        let Pair { control, target, .. } = &mut pairs[index];
        let moved = match control.fetching.remove(&token) {
            Some(Move { region: (rkey, va), length, .. }) => {
                let mut data = vec![0; length as usize];
                control.fetched.read(control.slot(token), &mut data)?;
                side.write(rkey, va, &data)
            }
            None => Ok(()),
        };
        target.handle_moved(token, moved, &mut side);
        Ok(())
    }

    /// Takes what has arrived on the control queue pairs.
    pub(super) fn handle_control(&mut self) -> Checked {
        for node in 0..2 {
            let mut wcs = Vec::new();
            self.nodes[node].control_cq.poll(setup::CQ_DEPTH, &mut |wc| wcs.push(*wc))?;
            for wc in wcs {
                ensure!(wc.status == WcStatus::Success, "a control queue pair has failed: {:?}", wc.status);
                let is_of = |pair: &Pair| pair.control.qps[node].qpn() == wc.qpn;
                let index = self.pairs.iter().position(is_of).expect("a control queue pair of a pair");
                match wc.opcode {
                    WcOpcode::Recv => {
                        let due = self.now() + self.rng.spread(1..=DELAY_NS_MAX);
                        let control = &mut self.pairs[index].control;
                        let bytes = control.take_message(node, &wc)?;
                        let after = control.arrived[node].back().map_or(0, |(at, _)| *at);
                        control.arrived[node].push_back((due.max(after), bytes));
                    }
                    WcOpcode::Send => {}
                    _ => self.take_transferred(index, wc.wr_id)?,
                }
            }
            let now = self.now();
            for index in 0..self.pairs.len() {
                while let Some(bytes) = pop_due(&mut self.pairs[index].control.arrived[node], now) {
                    self.take_message(index, node, &bytes)?;
                }
            }
        }
        Ok(())
    }

    fn take_message(&mut self, index: usize, node: usize, bytes: &[u8]) -> Checked {
        let (now, message) = (Time(self.now()), decode(bytes)?);
        if node == 0 {
            self.say(|| format!("pair {index}: answer {:x} {:?}", message.id, message.body));
            self.pairs[index].unanswered.remove(&message.id);
            let (pairs, mut side) = self.local_side(index);
            pairs[index].initiator.handle_message(now, &message, &mut side);
            return Ok(());
        }
        if let Body::Open(_) = message.body {
            let answer = self.opened(message.id)?;
            return self.answer(index, &answer);
        }
        let (pairs, mut side) = self.remote_side(index);
        let is_taken = pairs[index].target.handle_message(now, &message, &mut side);
        ensure!(is_taken, "pair {index}: the target does not take {:?}", message.body);
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

/// A work request that sends these bytes.
fn with_bytes(wr_id: u64, op: SendOp, bytes: Vec<u8>) -> SendWr {
    let len = bytes.len() as u32;
    let payload = Payload::Provided(Box::new(Provided { source: Arc::new(bytes), offset: 0, len }));
    SendWr { wr_id, op, payload, flags: SendFlags::SIGNALED, target: None }
}

/// Takes the first message, if it is due.
fn pop_due(arrived: &mut VecDeque<(u64, Vec<u8>)>, now: u64) -> Option<Vec<u8>> {
    let is_due = arrived.front().is_some_and(|(at, _)| *at <= now);
    if is_due { arrived.pop_front().map(|(_, bytes)| bytes) } else { None }
}

fn decode(bytes: &[u8]) -> Checked<Message<'_>> {
    Message::decode(bytes).map_err(|error| Failure(format!("a message that cannot be decoded: {error}")))
}
