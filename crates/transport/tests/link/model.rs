//! The expected result of a plan: work requests with memory of their own, and the memory after in-order execution.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::smallvec;
use terrace_transport::{
    BindWindow, Payload, Provided, RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList, WcOpcode,
};

use crate::plan::{Op, Plan};
use crate::random::Random;

/// The key of all memory, on either side.
pub const KEY: u32 = 1;
/// Keys of windows that a peer may invalidate begin here.
pub const WINDOW_KEYS: u32 = 0x1000;
/// Keys that binds make begin here.
pub const BOUND_KEYS: u32 = 0x2000;

/// A receive as its completion must show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    pub wr_id: u64,
    pub opcode: WcOpcode,
    pub len: u32,
    /// Immediate data or the invalidated key.
    pub imm: u32,
}

/// One side: its work requests, and the expected final content of its memory.
#[derive(Debug, Default)]
pub struct Side {
    pub sends: VecDeque<SendWr>,
    pub receives: VecDeque<RecvWr>,
    pub initial: Vec<u8>,
    pub expected: Vec<u8>,
    /// Ids of the work requests that must complete with an entry, in order.
    pub completions: Vec<u64>,
    pub arrivals: Vec<Arrival>,
    /// Keys of windows on this side that the other side invalidates.
    pub windows: Vec<u32>,
    /// Expected region operations of the peer's requests, in order; and of this side's work requests.
    pub deeds_of_peer: Vec<String>,
    pub deeds_of_self: Vec<String>,
    /// What is appended to this side's region.
    pub records: Vec<u8>,
    counter: Option<u64>,
}

pub struct Model {
    pub sides: [Side; 2],
    random: Random,
    mtu: u32,
}

impl Model {
    pub fn new(plan: &Plan) -> Model {
        let random = Random::new(plan.seed ^ 0x5eed);
        let mut model = Model { sides: Default::default(), random, mtu: plan.attributes.mtu };
        for (side, work) in plan.work.iter().enumerate() {
            for op in work {
                model.add(side, *op);
            }
            if let Some(last) = model.sides[side].sends.back_mut() {
                last.flags |= SendFlags::SIGNALED;
            }
        }
        for side in &mut model.sides {
            let signaled = side.sends.iter().filter(|wr| wr.flags.contains(SendFlags::SIGNALED));
            side.completions = signaled.map(|wr| wr.wr_id).collect();
        }
        model
    }

    /// Allocates fresh memory of a side, with random content.
    fn allocate(&mut self, side: usize, len: u32) -> u64 {
        let misaligned = self.random.below(8);
        self.reserve(side, misaligned);
        let addr = self.sides[side].initial.len() as u64;
        self.reserve(side, len.into());
        addr
    }

    fn allocate_aligned(&mut self, side: usize) -> u64 {
        let len = self.sides[side].initial.len() as u64;
        self.reserve(side, len.next_multiple_of(8) - len);
        let addr = self.sides[side].initial.len() as u64;
        self.reserve(side, 8);
        addr
    }

    fn reserve(&mut self, side: usize, len: u64) {
        for _ in 0..len {
            let byte = self.random.next() as u8;
            self.sides[side].initial.push(byte);
            self.sides[side].expected.push(byte);
        }
    }

    fn get(&self, side: usize, addr: u64, len: u32) -> Vec<u8> {
        self.sides[side].expected[addr as usize..][..len as usize].to_vec()
    }

    fn set(&mut self, side: usize, addr: u64, data: &[u8]) {
        self.sides[side].expected[addr as usize..][..data.len()].copy_from_slice(data);
    }

    /// Cuts memory into up to three elements.
    fn pieces(&mut self, addr: u64, len: u32) -> SgeList {
        let mut sges = smallvec![];
        let mut at = 0;
        for _ in 0..self.random.below(3) {
            let here = self.random.below(u64::from(len - at) + 1) as u32;
            sges.push(Sge { addr: addr + u64::from(at), length: here, lkey: KEY });
            at += here;
        }
        sges.push(Sge { addr: addr + u64::from(at), length: len - at, lkey: KEY });
        sges
    }

    fn post(&mut self, side: usize, op: SendOp, payload: Payload, mut flags: SendFlags) {
        flags.set(SendFlags::SIGNALED, self.random.percent(70));
        let wr_id = self.sides[side].sends.len() as u64;
        self.sides[side].sends.push_back(SendWr { wr_id, op, payload, flags, target: None });
    }

    /// Adds a receive on the side, long enough for `data`, which it will hold.
    fn expect_receive(&mut self, side: usize, data: Option<&[u8]>, len: u32, opcode: WcOpcode, imm: u32) {
        let slack = self.random.below(40) as u32;
        let room = data.map_or(0, |data| data.len() as u32) + slack;
        let addr = self.allocate(side, room);
        let sges = self.pieces(addr, room);
        let wr_id = 1000 + self.sides[side].receives.len() as u64;
        self.sides[side].receives.push_back(RecvWr { wr_id, sges });
        self.sides[side].arrivals.push(Arrival { wr_id, opcode, len, imm });
        if let Some(data) = data {
            self.set(side, addr, data);
        }
    }

    fn add(&mut self, side: usize, op: Op) {
        let plain = SendFlags::empty();
        match op {
            Op::Send { len, imm, inline } => {
                let addr = self.allocate(side, len.bytes(self.mtu));
                let len = if inline { len.bytes(self.mtu).min(64) } else { len.bytes(self.mtu) };
                self.add_send(side, addr, len, imm, inline, plain);
            }
            Op::SendInvalidate { len } => self.add_invalidating_send(side, len.bytes(self.mtu)),
            Op::Write { len, imm } => {
                let len = len.bytes(self.mtu);
                let (from, to) = (self.allocate(side, len), self.allocate(1 - side, len));
                self.add_write(side, from, to, len, imm);
            }
            Op::Read { len } => {
                let len = len.bytes(self.mtu);
                let (to, from) = (self.allocate(side, len), self.allocate(1 - side, len));
                self.add_read(side, to, from, len);
            }
            Op::CompareSwap | Op::FetchAdd => self.add_atomic(side, matches!(op, Op::FetchAdd)),
            Op::AtomicWrite => {
                let (from, to) = (self.allocate(side, 8), self.allocate_aligned(1 - side));
                let (data, sges) = (self.get(side, from, 8), self.pieces(from, 8));
                self.set(1 - side, to, &data);
                self.post(side, SendOp::AtomicWrite { va: to, rkey: KEY }, Payload::Sges(sges), plain);
            }
            Op::Flush => {
                let va = self.allocate(1 - side, 16);
                let deed = format!("flush key={KEY:#x} va={va:#x} len=16 placement=1 selectivity=0");
                self.sides[1 - side].deeds_of_peer.push(deed);
                let op = SendOp::Flush { va, rkey: KEY, length: 16, placement: 1, selectivity: 0 };
                self.post(side, op, Payload::Sges(smallvec![]), plain);
            }
            Op::Append { len, commit } => self.add_append(side, len.bytes(self.mtu), commit),
            Op::Bind => drop(self.add_bind(side)),
            Op::ReadThenSend { len } => {
                let len = len.bytes(self.mtu);
                let (to, from) = (self.allocate(side, len), self.allocate(1 - side, len));
                self.add_read(side, to, from, len);
                self.add_send(side, to, len, false, false, SendFlags::FENCE);
            }
            Op::WriteThenRead { len } => {
                let len = len.bytes(self.mtu);
                let (from, there) = (self.allocate(side, len), self.allocate(1 - side, len));
                let back = self.allocate(side, len);
                self.add_write(side, from, there, len, false);
                self.add_read(side, back, there, len);
            }
            Op::BindThenInvalidate => {
                let key = self.add_bind(side);
                self.sides[side].deeds_of_self.push(format!("invalidate key={key:#x}"));
                self.post(side, SendOp::LocalInvalidate(key), Payload::Sges(smallvec![]), plain);
            }
        }
    }

    fn add_send(&mut self, side: usize, addr: u64, len: u32, imm: bool, inline: bool, flags: SendFlags) {
        let (data, sges) = (self.get(side, addr, len), self.pieces(addr, len));
        let payload = match (inline, imm) {
            (true, false) => Payload::Inline(data.clone().into()),
            // Bytes that a service provides, after others that do not belong to the message.
            (true, true) => {
                let source = Arc::new([b"other".as_slice(), &data].concat());
                Payload::Provided(Box::new(Provided { source, offset: 5, len }))
            }
            (false, _) => Payload::Sges(sges),
        };
        let imm = imm.then(|| self.random.next() as u32 | 1);
        let op = imm.map_or(SendOp::Send, SendOp::SendImm);
        self.expect_receive(1 - side, Some(&data), len, WcOpcode::Recv, imm.unwrap_or(0));
        self.post(side, op, payload, flags);
    }

    fn add_invalidating_send(&mut self, side: usize, len: u32) {
        let addr = self.allocate(side, len);
        let (data, sges) = (self.get(side, addr, len), self.pieces(addr, len));
        let key = WINDOW_KEYS + self.sides[1 - side].windows.len() as u32;
        self.sides[1 - side].windows.push(key);
        self.sides[1 - side].deeds_of_peer.push(format!("invalidate key={key:#x}"));
        self.expect_receive(1 - side, Some(&data), len, WcOpcode::Recv, key);
        self.post(side, SendOp::SendInvalidate(key), Payload::Sges(sges), SendFlags::empty());
    }

    fn add_write(&mut self, side: usize, from: u64, to: u64, len: u32, imm: bool) {
        let (data, sges) = (self.get(side, from, len), self.pieces(from, len));
        self.set(1 - side, to, &data);
        let imm = imm.then(|| self.random.next() as u32 | 1);
        let op = match imm {
            Some(imm) => SendOp::WriteImm { va: to, rkey: KEY, imm },
            None => SendOp::Write { va: to, rkey: KEY },
        };
        if let Some(imm) = imm {
            self.expect_receive(1 - side, None, len, WcOpcode::RecvRdmaWithImm, imm);
        }
        self.post(side, op, Payload::Sges(sges), SendFlags::empty());
    }

    fn add_read(&mut self, side: usize, to: u64, from: u64, len: u32) {
        let (data, sges) = (self.get(1 - side, from, len), self.pieces(to, len));
        self.set(side, to, &data);
        self.post(side, SendOp::Read { va: from, rkey: KEY }, Payload::Sges(sges), SendFlags::empty());
    }

    /// An atomic on the one counter that all atomics of this side work on.
    fn add_atomic(&mut self, side: usize, add: bool) {
        let va = match self.sides[1 - side].counter {
            Some(va) => va,
            None => self.allocate_aligned(1 - side),
        };
        self.sides[1 - side].counter = Some(va);
        let before = u64::from_ne_bytes(self.get(1 - side, va, 8).try_into().expect("8 bytes"));
        let (operand, hit) = (self.random.next(), self.random.percent(70));
        let (op, after) = if add {
            (SendOp::FetchAdd { va, rkey: KEY, add: operand }, before.wrapping_add(operand))
        } else {
            let compare = if hit { before } else { before ^ 1 };
            (
                SendOp::CompareSwap { va, rkey: KEY, compare, swap: operand },
                if hit { operand } else { before },
            )
        };
        self.set(1 - side, va, &after.to_ne_bytes());
        let to = self.allocate(side, 8);
        self.set(side, to, &before.to_ne_bytes());
        let sges = self.pieces(to, 8);
        self.post(side, op, Payload::Sges(sges), SendFlags::empty());
    }

    /// A record for the peer's region, and memory for its offset.
    fn add_append(&mut self, side: usize, len: u32, commit: bool) {
        let (from, to) = (self.allocate(side, len), self.allocate(side, 8));
        let (record, end) = (self.get(side, from, len), self.sides[1 - side].records.len() as u64);
        self.sides[1 - side].records.extend(record);
        self.set(side, to, &end.to_ne_bytes());
        let name = if commit { "commit-append" } else { "append" };
        let deed = format!("{name} key={KEY:#x} va={end:#x} len={len}");
        self.sides[1 - side].deeds_of_peer.push(deed);
        // With the offset's, three elements: as many as a request may have.
        let half = len / 2;
        let sges = smallvec![
            Sge { addr: from, length: half, lkey: KEY },
            Sge { addr: from + u64::from(half), length: len - half, lkey: KEY },
            Sge { addr: to, length: 8, lkey: KEY },
        ];
        self.post(side, SendOp::Append { rkey: KEY, commit }, Payload::Sges(sges), SendFlags::empty());
    }

    fn add_bind(&mut self, side: usize) -> u32 {
        let key = BOUND_KEYS + self.sides[side].sends.len() as u32;
        self.sides[side].deeds_of_self.push(format!("bind key={key:#x}"));
        let bind =
            BindWindow { window_rkey: 0, new_rkey: key, region_lkey: KEY, addr: 0, length: 0, access: 0 };
        self.post(side, SendOp::BindWindow(bind), Payload::Sges(smallvec![]), SendFlags::empty());
        key
    }
}
