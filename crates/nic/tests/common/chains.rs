//! Queue pairs whose work queues are in the memory of a node.
#![allow(dead_code)] // Every test file uses its own part of this.

use std::sync::Arc;

use terrace_nic::wqe_format::{EntryBytes, SendEntry, encode_send};
use terrace_nic::*;

use crate::common::{Node, Tuning, connect, poll_for, wait_until};

/// Bytes of memory that a chain takes: its queues and its doorbell record.
pub const CHAIN_BYTES: u64 = 64 << 10;
/// Blocks of a chain's send queue.
pub const BLOCKS: u32 = 256;
/// Entries of its receive queue, each of 16 elements.
pub const RECEIVES: u32 = 16;
const RECV_AT: u64 = 32 << 10;
const RECV_STRIDE: u32 = 256;
const DOORBELL_AT: u64 = 60 << 10;

pub const NONE: SendFlags = SendFlags::empty();
pub const SIGNALED: SendFlags = SendFlags::SIGNALED;

/// A queue pair with its work queues in the node's memory, and completion queues of its own.
pub struct Chain {
    pub qp: Arc<QueuePair>,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    /// Place of its queues in the node's memory.
    at: u64,
    blocks: u32,
}

/// What a test may choose.
#[derive(Clone, Copy)]
pub struct Options {
    pub blocks: u32,
    pub is_managed: bool,
    pub cq_depth: u32,
    pub max_send_wr: u32,
}

pub const MANAGED: Options = Options { blocks: BLOCKS, is_managed: true, cq_depth: 1024, max_send_wr: 256 };
/// Executes what is posted: where a chain begins.
pub const CONTROL: Options = Options { is_managed: false, ..MANAGED };

impl Chain {
    pub fn new(node: &Node, at: u64, options: Options) -> Chain {
        let Options { blocks, is_managed, cq_depth, max_send_wr } = options;
        let cq =
            || node.device.create_cq(CqInit { depth: cq_depth, channel: None, cookie: 0 }).expect("a queue");
        let (send_cq, recv_cq) = (cq(), cq());
        let mut init = QpInit { send_cq: send_cq.clone(), recv_cq: recv_cq.clone(), ..node.init(QpType::Rc) };
        init.cap.max_send_sge = 16;
        init.cap.max_recv_sge = 16;
        init.cap.max_send_wr = max_send_wr;
        let base = node.memory.addr() + at;
        let queue = |at, len, stride| WorkQueueInit {
            addr: base + at,
            lkey: node.mr.lkey(),
            len,
            stride,
            is_managed,
            ignores_overflow: true,
        };
        let queues = WorkQueuesInit {
            send: queue(0, blocks, 64),
            recv: Some(queue(RECV_AT, RECEIVES, RECV_STRIDE)),
            doorbell_record: base + DOORBELL_AT,
            doorbell_lkey: node.mr.lkey(),
        };
        let qp = node.pd.create_qp_in_memory(init, queues).expect("a queue pair");
        Chain { qp, send_cq, recv_cq, at, blocks }
    }

    /// A chain whose requests go to the node's own memory, and the other end of its connection.
    pub fn loopback(node: &Node, at: u64, options: Options) -> (Chain, Arc<QueuePair>) {
        let chain = Chain::new(node, at, options);
        let other = node.qp(QpType::Rc);
        connect(&chain.qp, node, other.qpn(), &Tuning::default());
        connect(&other, node, chain.qp.qpn(), &Tuning::default());
        (chain, other)
    }

    /// Posts entries, whose cookies are their indexes, and returns one past the last block.
    pub fn post(&self, entries: impl IntoIterator<Item = (SendEntry, SendFlags)>) -> u32 {
        entries.into_iter().fold(self.posted(), |index, (entry, flags)| {
            let posted = self.qp.post_entries([Ok((entry, flags, index.into()))]);
            posted.expect("posted")
        })
    }

    /// Writes receive entries, and returns one past the last.
    pub fn post_recv(&self, wrs: impl IntoIterator<Item = RecvWr>) -> u32 {
        self.qp.post_receive_entries(wrs.into_iter().map(Ok)).expect("posted")
    }

    pub fn posted(&self) -> u32 {
        self.qp.send_indexes().expect("in memory").0
    }

    pub fn executed(&self) -> u32 {
        self.qp.send_indexes().expect("in memory").2
    }

    /// Offset of a block, or of a segment of it, in the node's memory.
    pub fn place(&self, index: u32, segment: u64) -> u64 {
        self.at + u64::from(index % self.blocks) * 64 + segment * 16
    }

    pub fn recv_place(&self, index: u32) -> u64 {
        self.at + RECV_AT + u64::from(index % RECEIVES * RECV_STRIDE)
    }

    pub fn doorbell_place(&self) -> u64 {
        self.at + DOORBELL_AT
    }

    /// Waits until everything before `index` is executed.
    pub fn wait_executed(&self, index: u32) {
        wait_until("the entries are executed", || self.executed() == index);
    }

    pub fn sent(&self, count: usize) -> Vec<Wc> {
        poll_for(&self.send_cq, count)
    }
}

pub fn request(op: SendOp, payload: Payload) -> SendEntry {
    SendEntry::Request { op, payload }
}

pub fn nop() -> SendEntry {
    request(SendOp::Nop, Payload::Inline(InlineData::new()))
}

pub fn wait(cq: &Cq, index: u32) -> SendEntry {
    SendEntry::Wait { cqn: cq.number(), index }
}

pub fn enable(qp: &QueuePair, index: u32) -> SendEntry {
    SendEntry::EnableSend { qpn: qp.qpn(), index }
}

/// A WRITE of `len` bytes within a node's memory.
pub fn copy(node: &Node, from: u64, to: u64, len: u32) -> SendEntry {
    let op = SendOp::Write { va: node.memory.addr() + to, rkey: node.mr.rkey() };
    request(op, Payload::Sge(node.sge(from, len)))
}

/// A WRITE of these bytes to a node's memory.
pub fn store(node: &Node, to: u64, bytes: &[u8]) -> SendEntry {
    let op = SendOp::Write { va: node.memory.addr() + to, rkey: node.mr.rkey() };
    request(op, Payload::Inline(bytes.into()))
}

/// A READ of `len` bytes within a node's memory.
pub fn read(node: &Node, from: u64, to: u64, len: u32) -> SendEntry {
    let op = SendOp::Read { va: node.memory.addr() + from, rkey: node.mr.rkey() };
    request(op, Payload::Sge(node.sge(to, len)))
}

/// A compare and swap on a node's memory; the result goes to `result`.
pub fn compare_swap(node: &Node, at: u64, compare: u64, swap: u64, result: u64) -> SendEntry {
    let op = SendOp::CompareSwap { va: node.memory.addr() + at, rkey: node.mr.rkey(), compare, swap };
    request(op, Payload::Sge(node.sge(result, 8)))
}

/// A masked fetch and add on a node's memory; the result goes to `result`.
pub fn masked_add(node: &Node, at: u64, add: u64, boundary: u64, result: u64) -> SendEntry {
    let op = SendOp::MaskedFetchAdd { va: node.memory.addr() + at, rkey: node.mr.rkey(), add, boundary };
    request(op, Payload::Sge(node.sge(result, 8)))
}

/// The bytes that an entry has in memory, but for its place.
pub fn bytes(entry: &SendEntry) -> EntryBytes {
    encode_send(entry, NONE).expect("it has a form")
}
