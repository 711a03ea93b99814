//! The client's end of a baseline: READs and WRITEs of memory that the node has given, and messages to its processor.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use terrace_access::proto::Endpoint;
use terrace_nic::{
    Buffer, Error, Path, Payload, QpCap, QueuePair, RecvWr, SendFlags, SendOp, SendWr, Sge, SgeList, Wc,
    WcOpcode, rc,
};

use super::slabs::{Slabs, Taken};
use super::transport::{Asked, Call, Finished, Transport, request};
use crate::messages::{MESSAGE_BYTES, Message, Operation, Outcome, REPLY_BYTES, Reply, SlabKey};
use crate::owned::Owned;
use crate::page_store::PAGE_BYTES;
use crate::protocol::{Function, Grant};
use crate::scheme::Scheme;

/// `ibv_access_flags` of the headers' memory.
const LOCAL_WRITE: u32 = 1;
/// Bytes of memory for each message: its header, and that of its reply.
const SLOT_BYTES: usize = 64;
const _: () = assert!(MESSAGE_BYTES + REPLY_BYTES <= SLOT_BYTES);

/// What a message is for.
#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// The node's processor carries a call out.
    Call { function: Function, call: Call },
    /// Stores wait for a slab.
    Reserve { slab: u64 },
    /// An invalidation has given the last page of a slab back.
    Release { slab: u64, call: Call },
}

impl Purpose {
    fn operation(self) -> (Operation, u64) {
        match self {
            Purpose::Call { function, call } => {
                let operation = match function {
                    Function::Load => Operation::Load,
                    Function::MappedStore | Function::UnmappedStore => Operation::Store,
                    Function::Invalidate => Operation::Invalidate,
                };
                (operation, call.index)
            }
            Purpose::Reserve { slab } => (Operation::Reserve, slab),
            Purpose::Release { slab, .. } => (Operation::Release, slab),
        }
    }

    fn call(self) -> Option<Call> {
        match self {
            Purpose::Call { call, .. } | Purpose::Release { call, .. } => Some(call),
            Purpose::Reserve { .. } => None,
        }
    }

    /// Bytes of the reply.
    fn reply_bytes(self) -> u32 {
        let has_page = self.operation().0 == Operation::Load;
        (REPLY_BYTES + if has_page { PAGE_BYTES } else { 0 }) as u32
    }

    /// Whether the node may answer that it has no page to give.
    fn is_refusable(self) -> bool {
        matches!(self, Purpose::Reserve { .. } | Purpose::Call { function: Function::UnmappedStore, .. })
    }
}

/// A READ or WRITE in flight.
#[derive(Clone, Copy, Debug)]
struct Access {
    function: Function,
    call: Call,
    since: Instant,
}

/// A connection to the node of a baseline.
pub(super) struct Baseline {
    scheme: Scheme,
    qp: Owned<QueuePair>,
    endpoint: Endpoint,
    /// Messages in flight at most, and accesses.
    depth: usize,
    headers: Buffer,
    /// The number of the next message.
    number: u32,
    messages: VecDeque<(Purpose, Instant)>,
    waiting_messages: VecDeque<Purpose>,
    /// They complete in their order.
    accesses: VecDeque<Access>,
    waiting_accesses: VecDeque<(Function, Call)>,
    slabs: Slabs,
    /// Requests to be posted.
    batch: Vec<SendWr>,
    finished: VecDeque<Finished>,
}

impl Baseline {
    pub fn new(scheme: Scheme, asked: &Asked<'_>) -> Result<Baseline, Error> {
        let cap = QpCap {
            // Messages and accesses, and as many again whose acknowledgements are on their way.
            max_send_wr: 4 * asked.depth,
            max_recv_wr: asked.depth,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 0,
        };
        let headers = Buffer::new(asked.pd, asked.depth as usize * SLOT_BYTES, LOCAL_WRITE)?;
        let (qp, endpoint) = rc::new_pair(asked.pd, asked.cq, cap)?;
        let baseline = Baseline {
            scheme,
            qp: Owned(qp),
            endpoint,
            depth: asked.depth as usize,
            headers,
            number: 0,
            messages: VecDeque::new(),
            waiting_messages: VecDeque::new(),
            accesses: VecDeque::new(),
            waiting_accesses: VecDeque::new(),
            slabs: Slabs::new(scheme.slab_pages()),
            batch: Vec::new(),
            finished: VecDeque::new(),
        };
        rc::initialize(&baseline.qp, 0)?;
        Ok(baseline)
    }

    fn slot_at(&self, number: u32) -> usize {
        number as usize % self.depth * SLOT_BYTES
    }

    /// Prepares a message, and posts the receive of its reply: replies come in the order of messages.
    fn ask(&mut self, purpose: Purpose, now: Instant) -> Result<(), Error> {
        if self.messages.len() >= self.depth {
            self.waiting_messages.push_back(purpose);
            return Ok(());
        }
        let (operation, index) = purpose.operation();
        let (at, page) = (self.slot_at(self.number), purpose.call().and_then(|call| call.page));
        self.headers.write(at, &Message { operation, number: self.number, index }.emit())?;
        let mut receive = SgeList::from_slice(&[self.headers.sge(at + MESSAGE_BYTES, REPLY_BYTES as u32)]);
        receive.extend(page.filter(|_| operation == Operation::Load));
        let mut sges = SgeList::from_slice(&[self.headers.sge(at, MESSAGE_BYTES as u32)]);
        sges.extend(page.filter(|_| operation == Operation::Store));
        self.qp.post_recv([Ok(RecvWr { wr_id: 0, sges: receive })]).map_err(|(_, error)| error)?;
        self.batch.push(request(SendOp::Send, Payload::Sges(sges), SendFlags::empty()));
        self.messages.push_back((purpose, now));
        self.number = self.number.wrapping_add(1);
        Ok(())
    }

    /// Takes the reply to the oldest message, of `byte_len` bytes. If it is wrong, the message stays in flight: its call ends
    /// when the node is given up.
    fn take_reply(&mut self, byte_len: u32, now: Instant) -> Result<(), &'static str> {
        const WRONG: &str = "its reply is of another request";
        let oldest = self.number.wrapping_sub(self.messages.len() as u32);
        let (purpose, _) = *self.messages.front().ok_or(WRONG)?;
        let mut bytes = [0; REPLY_BYTES];
        self.headers.read(self.slot_at(oldest) + MESSAGE_BYTES, &mut bytes).map_err(|_| WRONG)?;
        let reply = Reply::parse(&bytes).ok_or(WRONG)?;
        let is_permitted = reply.outcome == Outcome::Done || purpose.is_refusable();
        if reply.number != oldest || byte_len != purpose.reply_bytes() || !is_permitted {
            return Err(WRONG);
        }
        self.messages.pop_front();
        match purpose {
            Purpose::Call { function, call } => self.finish(function, call, reply.outcome),
            Purpose::Release { call, .. } => self.finish(Function::Invalidate, call, reply.outcome),
            Purpose::Reserve { slab } => self.end_reservation(slab, &reply, now)?,
        }
        let Some(next) = self.waiting_messages.pop_front() else { return Ok(()) };
        self.ask(next, now).map_err(|_| {
            self.waiting_messages.push_front(next);
            "no message can be made"
        })
    }

    fn end_reservation(&mut self, slab: u64, reply: &Reply, now: Instant) -> Result<(), &'static str> {
        let key = (reply.outcome == Outcome::Done).then_some(reply.key);
        let mut result = Ok(());
        for call in self.slabs.reserved(slab, key) {
            match reply.outcome {
                Outcome::Done => result = result.and(self.access_or_keep(Function::UnmappedStore, call, now)),
                refusal => self.finish(Function::UnmappedStore, call, refusal),
            }
        }
        result
    }

    /// Prepares a READ or WRITE. If that fails, the call waits until the node is given up.
    fn access_or_keep(&mut self, function: Function, call: Call, now: Instant) -> Result<(), &'static str> {
        self.access(function, call, now).map_err(|_| {
            self.waiting_accesses.push_front((function, call));
            "its memory cannot be accessed"
        })
    }

    /// Prepares a READ or WRITE.
    fn access(&mut self, function: Function, call: Call, now: Instant) -> Result<(), Error> {
        if self.accesses.len() >= self.depth {
            self.waiting_accesses.push_back((function, call));
            return Ok(());
        }
        let place = self.slabs.locate(call.index).ok_or(Error::Invalid("the page has no slab"))?;
        let page: Sge = call.page.ok_or(Error::Invalid("the call has no page"))?;
        let SlabKey { addr: va, rkey } = place;
        let op =
            if function == Function::Load { SendOp::Read { va, rkey } } else { SendOp::Write { va, rkey } };
        self.batch.push(request(op, Payload::Sge(page), SendFlags::SIGNALED));
        self.accesses.push_back(Access { function, call, since: now });
        Ok(())
    }

    fn end_access(&mut self, now: Instant) -> Result<(), &'static str> {
        // Only signaled requests complete.
        let Some(Access { function, call, .. }) = self.accesses.pop_front() else { return Ok(()) };
        self.finish(function, call, Outcome::Done);
        match self.waiting_accesses.pop_front() {
            Some((function, call)) => self.access_or_keep(function, call, now),
            None => Ok(()),
        }
    }

    fn finish(&mut self, function: Function, call: Call, outcome: Outcome) {
        self.finished.push_back(Finished { function, call, outcome });
    }
}

impl Transport for Baseline {
    fn endpoints(&self) -> Vec<Endpoint> {
        vec![self.endpoint]
    }

    fn connect(&mut self, peers: &[(Path, Endpoint)], grant: Grant) -> Result<(), Error> {
        match (self.scheme, grant) {
            (Scheme::Static, Grant::Reserved(key)) => self.slabs.add_slab(0, key),
            (Scheme::Dynamic1M | Scheme::Dynamic4K | Scheme::TwoSided, Grant::Messages) => {}
            _ => return Err(Error::Invalid("the node grants what is none of its scheme")),
        }
        let mut peers = peers.iter();
        peers.try_for_each(|(path, peer)| rc::connect_persistently(&self.qp, self.endpoint, *path, *peer))
    }

    fn begin(&mut self, function: Function, call: Call, now: Instant) -> Result<(), Error> {
        if self.scheme == Scheme::TwoSided {
            return self.ask(Purpose::Call { function, call }, now);
        }
        match function {
            Function::Load | Function::MappedStore => self.access(function, call, now),
            Function::UnmappedStore => match self.slabs.take_page(call) {
                Taken::Held => self.access(function, call, now),
                Taken::Reserve { slab } => self.ask(Purpose::Reserve { slab }, now).inspect_err(|_| {
                    // The store is the only one that waits, and the caller ends it.
                    self.slabs.reserved(slab, None);
                }),
                Taken::Waits => Ok(()),
            },
            Function::Invalidate => match self.slabs.return_page(call.index) {
                Some(slab) => self.ask(Purpose::Release { slab, call }, now),
                None => {
                    self.finish(function, call, Outcome::Done);
                    Ok(())
                }
            },
        }
    }

    fn post(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() {
            return Ok(());
        }
        self.qp.post_send(self.batch.drain(..).map(Ok)).map_err(|(_, error)| error)
    }

    fn has_qp(&self, qpn: u32) -> bool {
        self.qp.qpn() == qpn
    }

    fn handle(&mut self, wc: &Wc, now: Instant) -> Result<(), &'static str> {
        match wc.opcode {
            WcOpcode::Recv => self.take_reply(wc.byte_len, now),
            WcOpcode::RdmaRead | WcOpcode::RdmaWrite => self.end_access(now),
            _ => Err("it sends what is none of the scheme"),
        }
    }

    fn take_finished(&mut self) -> Option<Finished> {
        self.finished.pop_front()
    }

    fn delay(&mut self, time: Duration, now: Instant) {
        let messages = self.messages.iter_mut().map(|(_, since)| since);
        for since in messages.chain(self.accesses.iter_mut().map(|access| &mut access.since)) {
            *since = (*since + time).min(now);
        }
    }

    fn oldest(&self) -> Option<Instant> {
        let message = self.messages.front().map(|(_, since)| *since);
        message.into_iter().chain(self.accesses.front().map(|access| access.since)).min()
    }

    #[cfg(test)]
    fn first_slab(&self) -> Option<(std::sync::Arc<QueuePair>, SlabKey)> {
        self.slabs.locate(0).map(|slab| (self.qp.clone(), slab))
    }

    fn abandon(&mut self) -> Vec<Call> {
        self.batch.clear();
        // It fails only if it was destroyed before.
        let _ = self.qp.destroy();
        let messages = self.messages.drain(..).map(|(purpose, _)| purpose);
        let asked = messages.chain(self.waiting_messages.drain(..)).filter_map(Purpose::call);
        let accesses = self.accesses.drain(..).map(|access| access.call);
        let waiting = self.waiting_accesses.drain(..).map(|(_, call)| call);
        let finished = self.finished.drain(..).map(|finished| finished.call);
        asked.chain(self.slabs.abandon()).chain(accesses).chain(waiting).chain(finished).collect()
    }
}
