//! The entries of the chains (figure 6 of the ODRP paper).
//!
//! An entry of the control queue is read when it is executed, so what an earlier entry of the same round has written into
//! it is in force. An ENABLE with a fence starts when all entries before it are complete: it is the barrier between an
//! entry that writes into another and that other. So a round cannot pass on stale addresses, whatever indexes a client
//! sends: they only say when a round may start.
//!
//! | chain | entries of a round, but for NOPs that fill up blocks |
//! |---|---|
//! | load | WAIT; READ the table's entry; *ENABLE*; READ the page into the round's buffer; *ENABLE* the reply: WRITE the buffer |
//! | mapped store | WAIT; READ the table's entry; *ENABLE*; WRITE the buffer into the page; *ENABLE* the reply |
//! | unmapped store | WAIT; add to `head`; swap its bytes; *ENABLE*; take the element; swap its bytes; *ENABLE*; WRITE the page; map it; *ENABLE* the reply: WRITE its address |
//! | invalidate | WAIT; take the table's entry; *ENABLE*; READ the page, which fails if it is none; add to `tail`; swap its bytes; *ENABLE*; WRITE the element; *ENABLE* the reply |
//!
//! A page is written before it is mapped, and all of it: no client sees what another has left there. Elements and table
//! entries that must be in one place only are taken by a masked compare-and-swap that compares nothing. It needs alignment,
//! too, which a WRITE would not.

use terrace_nic::wqe_format::SendEntry;
use terrace_nic::{InlineData, Masked, Payload, SendFlags, SendOp, Sge, SgeList};

use super::chain::Shared;
use crate::page_store::PAGE_BYTES;
use crate::protocol::{Function, Rounds};

const FENCE: SendFlags = SendFlags::FENCE;
const NONE: SendFlags = SendFlags::empty();

/// Offsets in entries: immediate data; address in the remote address segment; the index of WAIT and ENABLE; address in the
/// data segment behind the remote address; the value to swap in.
const IMMEDIATE: u64 = 12;
const REMOTE: u64 = 16;
const INDEX: u64 = 24;
const SWAP: u64 = 32;

/// Numbers that WAIT and ENABLE name.
#[derive(Clone, Copy)]
pub(crate) struct Objects {
    pub messages: u32,
    pub control: u32,
    pub reply: u32,
}

/// Where a chain's queues and buffers are.
pub(crate) struct Places {
    /// Key of their memory for local elements, and for the chain's own READs.
    pub lkey: u32,
    pub rkey: u32,
    pub control: u64,
    pub reply: u64,
    pub doorbell: u64,
    pub scratch: u64,
    pub pages: u64,
    pub rounds: Rounds,
}

impl Places {
    fn block(&self, slot: u32, block: u64) -> u64 {
        self.control + (u64::from(slot) * u64::from(self.rounds.function.blocks()) + block) * 64
    }

    fn reply(&self, slot: u32) -> u64 {
        self.reply + u64::from(slot) * 64
    }

    fn scratch(&self, slot: u32) -> u64 {
        self.scratch + u64::from(slot) * 64
    }

    fn page(&self, slot: u32) -> Sge {
        self.sge(self.pages + u64::from(self.rounds.page(slot)) * PAGE_BYTES as u64, PAGE_BYTES as u32)
    }

    fn sge(&self, addr: u64, length: u32) -> Sge {
        Sge { addr, length, lkey: self.lkey }
    }
}

/// Blocks of the round at which entries are that others name.
struct Blocks {
    wait: u64,
    /// The entry whose remote address is that of the table's entry.
    entry: u64,
    enables: &'static [u64],
    reply: u64,
}

impl Blocks {
    const fn of(function: Function) -> Blocks {
        match function {
            Function::Load | Function::MappedStore => Blocks { wait: 3, entry: 4, enables: &[5], reply: 7 },
            Function::UnmappedStore => Blocks { wait: 0, entry: 13, enables: &[5, 11], reply: 15 },
            Function::Invalidate => Blocks { wait: 4, entry: 5, enables: &[7, 13], reply: 15 },
        }
    }
}

/// The block of a round's WAIT. A round that has not passed it has done nothing.
pub(crate) fn wait_block(function: Function) -> u32 {
    Blocks::of(function).wait as u32
}

type Entries = Vec<(SendEntry, SendFlags)>;

/// The entries of a round of the control queue.
pub(crate) fn control(shared: &Shared<'_>, places: &Places, objects: Objects, slot: u32) -> Entries {
    let (rounds, program) = (places.rounds, Program { shared, places, slot });
    let wait = (SendEntry::Wait { cqn: objects.messages, index: rounds.wait(slot) }, NONE);
    let barrier = || (SendEntry::EnableSend { qpn: objects.control, index: rounds.enable(slot) }, FENCE);
    let reply = (SendEntry::EnableSend { qpn: objects.reply, index: rounds.reply(slot) }, FENCE);
    let body = match rounds.function {
        Function::Load => vec![
            filler(3),
            wait,
            program.look_up(6),
            barrier(),
            program.read(0, PAGE_BYTES as u32, places.page(slot)),
        ],
        Function::MappedStore => {
            vec![filler(3), wait, program.look_up(6), barrier(), program.write_page()]
        }
        Function::UnmappedStore => vec![
            wait,
            program.advance(shared.pool.counters().0),
            program.swap_bytes(places.scratch(slot), places.block(slot, 6) + REMOTE),
            barrier(),
            program.exchange(
                shared.keys.ring.rkey(),
                shared.pool.empty().swap_bytes(),
                places.block(slot, 12) + REMOTE,
            ),
            program.swap_bytes(places.block(slot, 12) + REMOTE, places.block(slot, 13) + SWAP),
            barrier(),
            program.write_page(),
            program.exchange(shared.table_rkey, 0, places.scratch(slot) + 8),
        ],
        Function::Invalidate => vec![
            filler(4),
            wait,
            program.exchange(shared.table_rkey, 0, places.block(slot, 8) + REMOTE),
            barrier(),
            program.read(0, 8, places.sge(places.scratch(slot) + 8, 8)),
            program.advance(shared.pool.counters().1),
            program.swap_bytes(places.scratch(slot), places.block(slot, 14) + REMOTE),
            barrier(),
            program.return_page(8),
        ],
    };
    body.into_iter().chain([reply]).collect()
}

/// The entry by which the client learns that its round is done.
pub(crate) fn reply(places: &Places, slot: u32) -> (SendEntry, SendFlags) {
    let payload = match places.rounds.function {
        Function::Load => Payload::Sge(places.page(slot)),
        Function::UnmappedStore => Payload::Sge(places.sge(places.block(slot, 12) + REMOTE, 8)),
        Function::MappedStore | Function::Invalidate => Payload::Inline(InlineData::new()),
    };
    // The immediate, the address and the key come with the message.
    (request(SendOp::WriteImm { va: 0, rkey: 0, imm: 0 }, payload), NONE)
}

/// Where a message of the slot goes.
pub(crate) fn receive(places: &Places, slot: u32) -> SgeList {
    let rounds = places.rounds;
    let blocks = Blocks::of(rounds.function);
    let ahead = rounds.slot(slot + rounds.depth);
    let mut sges = SgeList::from_slice(&[
        places.sge(places.block(slot, blocks.entry) + REMOTE, 8),
        // Immediate data, address and key lie side by side.
        places.sge(places.reply(slot) + IMMEDIATE, 16),
        places.sge(places.block(ahead, blocks.wait) + INDEX, 4),
        places.sge(places.block(slot, blocks.enables[0]) + INDEX, 4),
        places.sge(places.block(slot, blocks.reply) + INDEX, 4),
        places.sge(places.doorbell, 4),
    ]);
    let others = blocks.enables[1..].iter();
    sges.extend(others.map(|enable| places.sge(places.block(slot, *enable) + INDEX, 4)));
    if rounds.function.takes_page() {
        sges.push(places.page(slot));
    }
    sges
}

/// What the entries of a round refer to.
struct Program<'a> {
    shared: &'a Shared<'a>,
    places: &'a Places,
    slot: u32,
}

impl Program<'_> {
    /// READs the table's entry into the remote address of the entry at `block`.
    fn look_up(&self, block: u64) -> (SendEntry, SendFlags) {
        let into = self.places.sge(self.places.block(self.slot, block) + REMOTE, 8);
        let op = SendOp::Read { va: 0, rkey: self.shared.table_rkey };
        (request(op, Payload::Sge(into)), NONE)
    }

    /// READs from a page.
    fn read(&self, va: u64, length: u32, into: Sge) -> (SendEntry, SendFlags) {
        let op = SendOp::Read { va, rkey: self.shared.keys.read.rkey() };
        (request(op, Payload::Sge(Sge { length, ..into })), NONE)
    }

    /// WRITEs the round's buffer into a page.
    fn write_page(&self) -> (SendEntry, SendFlags) {
        let op = SendOp::Write { va: 0, rkey: self.shared.keys.write.rkey() };
        (request(op, Payload::Sge(self.places.page(self.slot))), NONE)
    }

    /// Adds an element to `head` or `tail`. What it was goes to the slot's scratch memory, in the host's byte order.
    fn advance(&self, counter: u64) -> (SendEntry, SendFlags) {
        let op = SendOp::MaskedFetchAdd {
            va: counter,
            rkey: self.shared.keys.counters.rkey(),
            add: 8,
            boundary: self.shared.pool.boundary(),
        };
        (request(op, Payload::Sge(self.places.sge(self.places.scratch(self.slot), 8))), NONE)
    }

    /// Copies 8 bytes in reverse order: a READ whose elements have one byte each.
    fn swap_bytes(&self, from: u64, to: u64) -> (SendEntry, SendFlags) {
        let op = SendOp::Read { va: from, rkey: self.places.rkey };
        let sges: SgeList = (0..8).rev().map(|byte| self.places.sge(to + byte, 1)).collect();
        (request(op, Payload::Sges(sges)), FENCE)
    }

    /// Stores `swap` in a place of a region, and what was there at `old`.
    fn exchange(&self, rkey: u32, swap: u64, old: u64) -> (SendEntry, SendFlags) {
        let masked = Masked { result: self.places.sge(old, 8), compare_mask: 0, swap_mask: u64::MAX };
        let op = SendOp::MaskedCompareSwap { va: 0, rkey, compare: 0, swap };
        (request(op, Payload::Masked(Box::new(masked))), NONE)
    }

    /// WRITEs the address that the entry at `block` has into an element of the ring.
    fn return_page(&self, block: u64) -> (SendEntry, SendFlags) {
        let op = SendOp::Write { va: 0, rkey: self.shared.keys.ring.rkey() };
        let address = self.places.sge(self.places.block(self.slot, block) + REMOTE, 8);
        (request(op, Payload::Sge(address)), NONE)
    }
}

fn request(op: SendOp, payload: Payload) -> SendEntry {
    SendEntry::Request { op, payload }
}

/// A NOP of so many blocks.
fn filler(blocks: usize) -> (SendEntry, SendFlags) {
    // The control segment, and the length of the data.
    let data = InlineData::from_elem(0, blocks * 64 - 16 - 4);
    (request(SendOp::Nop, Payload::Inline(data)), NONE)
}
