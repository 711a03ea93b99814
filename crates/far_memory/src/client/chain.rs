//! The client's end of a chain.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_access::proto::Endpoint;
use terrace_nic::{
    Buffer, Cq, Error, Path, Payload, Pd, QpCap, QueuePair, RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList,
    Wc, rc,
};

use super::transport::{Call, request};
use crate::messages::SlabKey;
use crate::owned::Owned;
use crate::page_store::PAGE_BYTES;
use crate::protocol::{ARGS_BYTES_MAX, Args, ENTRY_BYTES, Function, Rounds};

/// `ibv_access_flags`.
const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE: u32 = 1 << 1;
/// Bytes of memory for each slot: arguments, and what an unmapped store returns.
const SLOT_BYTES: usize = 64;
const RETURNED: usize = SLOT_BYTES - 8;
const _: () = assert!(ARGS_BYTES_MAX <= RETURNED);

/// A round that waits for its reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub call: Call,
    pub since: Instant,
}

/// A message that has not been posted.
#[derive(Clone, Copy, Debug)]
struct Message {
    round: u32,
    args: Sge,
    /// The page of a store.
    page: Option<Sge>,
}

/// The client's end of a chain.
pub(super) struct ChainClient {
    rounds: Rounds,
    qp: Owned<QueuePair>,
    endpoint: Endpoint,
    /// Address of the table's first entry.
    table: u64,
    /// The node's pages of the rounds, which take those of stores.
    pages: SlabKey,
    /// The next round.
    round: u32,
    sent: VecDeque<Sent>,
    waiting: VecDeque<Call>,
    /// Messages to be posted.
    batch: Vec<Message>,
    slots: Buffer,
}

impl ChainClient {
    /// Makes an end, whose endpoint the node connects to.
    pub fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, rounds: Rounds) -> Result<ChainClient, Error> {
        let cap = QpCap {
            // A message, and its page.
            max_send_wr: if rounds.function.takes_page() { 2 * rounds.slots() } else { rounds.slots() },
            max_recv_wr: rounds.slots(),
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let slots = Buffer::new(pd, rounds.slots() as usize * SLOT_BYTES, LOCAL_WRITE | REMOTE_WRITE)?;
        let (qp, endpoint) = rc::new_pair(pd, cq, cap)?;
        let chain = ChainClient {
            rounds,
            qp: Owned(qp),
            endpoint,
            table: 0,
            pages: SlabKey::default(),
            round: 0,
            sent: VecDeque::new(),
            waiting: VecDeque::new(),
            batch: Vec::new(),
            slots,
        };
        rc::initialize(&chain.qp, REMOTE_WRITE)?;
        (0..rounds.slots()).try_for_each(|_| chain.post_receive())?;
        Ok(chain)
    }

    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The queue pair, for requests that are none of the protocol.
    #[cfg(test)]
    pub fn qp(&self) -> &Arc<QueuePair> {
        &self.qp
    }

    /// The node's pages of the rounds.
    #[cfg(test)]
    pub fn pages(&self) -> SlabKey {
        self.pages
    }

    pub fn qpn(&self) -> u32 {
        self.qp.qpn()
    }

    pub fn function(&self) -> Function {
        self.rounds.function
    }

    /// Connects to the node's end, whose table and rounds' pages these are.
    pub fn connect(&mut self, path: Path, peer: Endpoint, table: u64, pages: SlabKey) -> Result<(), Error> {
        (self.table, self.pages) = (table, pages);
        rc::connect_persistently(&self.qp, self.endpoint, path, peer)
    }

    /// A receive for the immediate of a reply.
    fn post_receive(&self) -> Result<(), Error> {
        let receive = RecvWr { wr_id: 0, sges: SgeList::new() };
        self.qp.post_recv([Ok(receive)]).map_err(|(_, error)| error)
    }

    /// Begins a round, or queues it until one of those in flight has ended. [`ChainClient::post`] sends what has begun.
    pub fn begin(&mut self, call: Call, now: Instant) -> Result<(), Error> {
        if self.sent.len() >= self.rounds.depth as usize {
            self.waiting.push_back(call);
            return Ok(());
        }
        let (args, length) = (self.args(&call), self.rounds.function.args_bytes());
        self.send(call, &args.emit()[..length], now)
    }

    /// The arguments of the next round.
    pub fn args(&self, call: &Call) -> Args {
        let (round, rounds) = (self.round, self.rounds);
        let (reply_addr, reply_rkey) = match (rounds.function, call.page) {
            (Function::Load, Some(page)) => (page.addr, page.lkey),
            _ => (self.slots.addr() + (self.slot_at(round) + RETURNED) as u64, self.slots.mr().rkey()),
        };
        Args {
            entry: self.table.wrapping_add(call.index.wrapping_mul(ENTRY_BYTES)),
            cookie: round.to_be(),
            reply_addr,
            reply_rkey,
            wait: rounds.wait(round.wrapping_add(rounds.depth)),
            enable: rounds.enable(round),
            reply: rounds.reply(round),
            doorbell: rounds.doorbell(round),
        }
    }

    /// Begins a round with these bytes of arguments.
    pub fn send(&mut self, call: Call, args: &[u8], now: Instant) -> Result<(), Error> {
        let at = self.slot_at(self.round);
        self.slots.write(at, args)?;
        self.batch.push(Message {
            round: self.round,
            args: self.slots.sge(at, args.len() as u32),
            page: call.page.filter(|_| self.rounds.function.takes_page()),
        });
        self.sent.push_back(Sent { call, since: now });
        self.round = self.round.wrapping_add(1);
        Ok(())
    }

    /// Where a round's slot begins in the slots' memory.
    fn slot_at(&self, round: u32) -> usize {
        self.rounds.slot(round) as usize * SLOT_BYTES
    }

    /// Sends the messages of rounds that have begun.
    pub fn post(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        // A page and arguments are two packets, of which only those of equal length leave together. So all pages go first.
        let pages_first = self.qp.sends_to_network();
        let pages = batch
            .iter()
            .filter(|_| pages_first)
            .filter_map(|message| message.write_page(self.rounds, self.pages));
        let messages = batch.iter().map(|message| message.send(!pages_first));
        let posted = self.qp.post_send(pages.chain(messages).map(Ok));
        posted.map_err(|(_, error)| error)
    }

    /// Takes a reply: the oldest round has ended. Returns its call, and the page's address of an unmapped store. `None` if the
    /// reply is of another round, or no round has begun.
    pub fn finish(&mut self, wc: &Wc, now: Instant) -> Option<(Call, u64)> {
        let oldest = self.round.wrapping_sub(self.sent.len() as u32);
        if u32::from_be(wc.imm) != oldest {
            return None;
        }
        let Sent { call, .. } = self.sent.pop_front()?;
        let mut returned = [0; 8];
        if self.rounds.function == Function::UnmappedStore {
            self.slots.read(self.slot_at(oldest) + RETURNED, &mut returned).ok()?;
        }
        self.post_receive().ok()?;
        if let Some(next) = self.waiting.pop_front() {
            self.begin(next, now).ok()?;
        }
        Some((call, u64::from_be_bytes(returned)))
    }

    /// Counts the time for which nobody looked as no time of the node's.
    pub fn delay(&mut self, time: Duration, now: Instant) {
        for sent in &mut self.sent {
            sent.since = (sent.since + time).min(now);
        }
    }

    /// Since when the oldest round is in flight.
    pub fn oldest(&self) -> Option<Instant> {
        self.sent.front().map(|sent| sent.since)
    }

    /// Takes all rounds back, because the node is lost.
    pub fn abandon(&mut self) -> Vec<Call> {
        self.batch.clear();
        // It fails only if it was destroyed before.
        let _ = self.qp.destroy();
        self.sent.drain(..).map(|sent| sent.call).chain(self.waiting.drain(..)).collect()
    }
}

impl Message {
    /// Brings the page of a store to its round's page at the node.
    fn write_page(&self, rounds: Rounds, pages: SlabKey) -> Option<SendWr> {
        let va = pages.addr.wrapping_add(u64::from(rounds.page(self.round)) * PAGE_BYTES as u64);
        let op = SendOp::Write { va, rkey: pages.rkey };
        Some(request(op, Payload::Sge(self.page?), SendFlags::empty()))
    }

    /// Sends the arguments, and perhaps the page behind them.
    fn send(&self, with_page: bool) -> SendWr {
        let sges = std::iter::once(self.args).chain(self.page.filter(|_| with_page)).collect();
        request(SendOp::Send, Payload::Sges(sges), SendFlags::empty())
    }
}
