//! One chain of a client: its queue pairs, its queues in memory, and their connection to the client.
//!
//! ```text
//!   client --SEND--> reply   (receive queue: scatters arguments into the entries below)
//!                    control (send queue in memory, to the node's own memory)   WAIT, look up, copy, ENABLE reply
//!   client <--WRITE with immediate-- reply (send queue in memory)
//! ```
//!
//! Both queue pairs execute managed queues without a processor. The far end of `control` is `echo`, which only answers.

use std::sync::Arc;
use std::time::Duration;

use terrace_access::proto::Endpoint;
use terrace_nic::{
    Buffer, Cq, CqInit, Device, Error, Mr, MrRequest, Path, Pd, QpCap, QpInit, QpState, QpType, QueuePair,
    RecvWr, WorkQueueInit, WorkQueuesInit, rc,
};

use super::access;
use super::pool::{Pool, PoolKeys};
use super::program::{self, Places};
use crate::messages::SlabKey;
use crate::owned::Owned;
use crate::page_store::PAGE_BYTES;
use crate::protocol::{Function, Rounds};

/// Bytes of an entry of the receive queue: 16 elements.
const RECV_STRIDE: u64 = 256;
/// Entries of completion queues, which nobody polls: their completions are counted.
const CQ_DEPTH: u32 = 64;
/// Requests of a control queue in the transport.
const CONTROL_DEPTH: u32 = 64;
const SGES_MAX: u32 = 16;
/// Address of the first round's page, for the client's WRITEs.
const PAGES_BASE: u64 = 1 << 57;
/// How long a client may take to finish what it WRITEs. One that is stopped takes longer.
const PAGES_WAIT: Duration = Duration::from_millis(50);

/// What all chains of a client share.
pub(crate) struct Shared<'a> {
    pub device: &'a Arc<Device>,
    /// Of the queue pairs to the client, and of what its requests may name.
    pub pd: &'a Arc<Pd>,
    /// Of the table and the pool, which the node's own chains alone may name.
    pub pool_pd: &'a Arc<Pd>,
    /// Where completions go that only failures have.
    pub cq: &'a Arc<Cq>,
    pub pool: &'a Pool,
    pub keys: &'a PoolKeys,
    /// Key of the translation table.
    pub table_rkey: u32,
}

/// A chain.
pub(crate) struct Chain {
    pub rounds: Rounds,
    reply: Owned<QueuePair>,
    control: Owned<QueuePair>,
    echo: Owned<QueuePair>,
    messages: Owned<Cq>,
    endpoint: Endpoint,
    /// The rounds' pages, which the client WRITEs before its messages.
    pages: Option<Owned<Mr>>,
    /// The same memory for the chain's own READs.
    readable: Owned<Mr>,
    /// Freed after the queue pairs.
    _queues: Buffer,
}

impl Chain {
    /// Makes a chain and connects it to the client's end. It serves messages from now on.
    pub fn new(shared: &Shared<'_>, rounds: Rounds, path: Path, peer: Endpoint) -> Result<Chain, Error> {
        let size = Regions::new(rounds, 0);
        let queues = Buffer::new(shared.pd, size.end as usize, access::LOCAL_WRITE)?;
        let readable = Owned(shared.pool_pd.reg_mr(MrRequest {
            addr: queues.addr(),
            length: size.end,
            iova: queues.addr(),
            access: access::REMOTE_READ,
            paging: None,
        })?);
        let regions = Regions::new(rounds, queues.addr());
        let messages = CqInit { depth: CQ_DEPTH, channel: None, cookie: 0 };
        let messages = Owned(shared.device.create_cq(messages)?);
        messages.ignore_overrun();
        let lkey = queues.mr().lkey();
        let control = new_qp(shared, &messages, regions.control_init(lkey, rounds), CONTROL_DEPTH)?;
        let reply = new_qp(shared, &messages, regions.reply_init(lkey, rounds), rounds.slots())?;
        let (echo, echo_end) = rc::new_pair(shared.pool_pd, shared.cq, QpCap::default())?;
        let (echo, endpoint) = (Owned(echo), rc::endpoint_of(&reply));
        let pages =
            if rounds.function.takes_page() { Some(regions.register_pages(shared.pd)?) } else { None };
        let chain =
            Chain { rounds, reply, control, echo, messages, endpoint, pages, readable, _queues: queues };
        chain.connect_control(shared, echo_end)?;
        rc::initialize(&chain.reply, if chain.pages.is_some() { access::REMOTE_WRITE } else { 0 })?;
        chain.post(shared, &regions.places(lkey, chain.readable.rkey(), rounds))?;
        rc::connect_persistently(&chain.reply, endpoint, path, peer)?;
        // The first rounds wait for messages; each enables the round that the message has made ready.
        chain.control.enable_send(rounds.depth * rounds.function.blocks())?;
        Ok(chain)
    }

    /// Connects the control queue pair to the node itself.
    fn connect_control(&self, shared: &Shared<'_>, echo_end: Endpoint) -> Result<(), Error> {
        let own = rc::endpoint_of(&self.control);
        let address = shared.device.gids().first().ok_or(Error::Invalid("the device has no address"))?.addr;
        let path_to = |qpn| {
            rc::path_to(shared.device, address, qpn)?.ok_or(Error::Invalid("no path to the device itself"))
        };
        rc::initialize(&self.control, 0)?;
        rc::initialize(&self.echo, access::REMOTE_ALL)?;
        rc::connect_persistently(&self.echo, echo_end, path_to(own.qpn)?, own)?;
        rc::connect_persistently(&self.control, own, path_to(echo_end.qpn)?, echo_end)
    }

    /// Writes the entries of all rounds.
    fn post(&self, shared: &Shared<'_>, places: &Places) -> Result<(), Error> {
        let objects = program::Objects {
            messages: self.messages.number(),
            control: self.control.qpn(),
            reply: self.reply.qpn(),
        };
        for slot in 0..self.rounds.slots() {
            let control = program::control(shared, places, objects, slot);
            let posted = control.into_iter().map(|(entry, flags)| Ok((entry, flags, 0)));
            self.control.post_entries(posted).map_err(|(_, error)| error)?;
            let (entry, flags) = program::reply(places, slot);
            self.reply.post_entries([Ok((entry, flags, 0))]).map_err(|(_, error)| error)?;
        }
        let receives = (0..self.rounds.slots())
            .map(|slot| Ok(RecvWr { wr_id: 0, sges: program::receive(places, slot) }));
        self.reply.post_receive_entries(receives).map_err(|(_, error)| error)?;
        Ok(())
    }

    /// What the client's end connects to.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The rounds' pages, if the client may WRITE them.
    pub fn pages(&self) -> Option<SlabKey> {
        self.pages.as_ref().map(|pages| SlabKey { addr: pages.iova(), rkey: pages.rkey() })
    }

    /// Blocks of the control queue that were executed, modulo 2^32.
    pub fn executed(&self) -> u32 {
        self.control.send_indexes().map_or(0, |(_, _, executed)| executed)
    }

    /// Ends the queue pairs: no round goes on. A client of this host that is in the middle of a WRITE may go on with that.
    pub fn stop(&self) {
        for qp in [&self.reply, &self.control, &self.echo] {
            // It fails only if the device has closed.
            let _ = qp.destroy();
        }
    }

    /// Ends the client's access to the rounds' pages, after [`Chain::stop`].
    ///
    /// # Errors
    /// EBUSY if the client is in the middle of a WRITE and does not go on.
    pub fn close_pages(&mut self) -> Result<(), Error> {
        if let Some(pages) = &self.pages {
            pages.dereg_within(PAGES_WAIT)?;
        }
        self.pages = None;
        Ok(())
    }

    /// Whether it waits for a message, so that no round is half done.
    pub fn is_at_rest(&self) -> bool {
        self.is_between_rounds(self.executed())
    }

    fn is_between_rounds(&self, executed: u32) -> bool {
        executed % self.rounds.function.blocks() <= program::wait_block(self.rounds.function)
    }

    /// Whether it has stopped in the middle of a round, for ever: only its own entries enable it, and there is none left. A
    /// client that follows the protocol enables whole rounds.
    fn is_cut(&self) -> bool {
        // One look at both: a round may begin at any time.
        self.control.send_indexes().is_some_and(|(_, enabled, executed)| {
            let is_idle = enabled.wrapping_sub(executed) as i32 <= 0;
            is_idle && !self.is_between_rounds(executed)
        })
    }

    /// Why it serves no messages any more, if so.
    pub fn failure(&self) -> Option<&'static str> {
        let is_failed = |qp: &Arc<QueuePair>| qp.state() != QpState::Rts;
        match () {
            () if is_failed(&self.control) || is_failed(&self.echo) => Some(match self.rounds.function {
                Function::Load => "a load of a page that is not stored, or out of range",
                Function::MappedStore => "a mapped store to a page that is not stored, or out of range",
                Function::UnmappedStore => "an unmapped store out of range, or misaligned",
                Function::Invalidate => {
                    "an invalidation of a page that is not stored, out of range, or misaligned"
                }
            }),
            () if is_failed(&self.reply) => {
                Some("a request that is not permitted, or the client does not answer")
            }
            () if self.is_cut() => Some("an index that enables a part of a round"),
            () => None,
        }
    }
}

fn new_qp(
    shared: &Shared<'_>,
    messages: &Arc<Cq>,
    queues: WorkQueuesInit,
    depth: u32,
) -> Result<Owned<QueuePair>, Error> {
    let cap = QpCap {
        max_send_wr: depth,
        max_recv_wr: depth,
        max_send_sge: SGES_MAX,
        max_recv_sge: SGES_MAX,
        max_inline_data: 0,
    };
    let init = QpInit {
        qp_type: QpType::Rc,
        send_cq: shared.cq.clone(),
        recv_cq: messages.clone(),
        srq: None,
        cap,
        sq_sig_all: false,
        blocks_own_multicast: false,
        raises_events: true,
        cookie: 0,
    };
    shared.pd.create_qp_in_memory(init, queues).map(Owned)
}

/// Where the parts of a chain's memory are.
struct Regions {
    control: u64,
    reply: u64,
    recv: u64,
    /// The receive queue of the control queue pair, which gets no messages.
    unused: u64,
    doorbell: u64,
    scratch: u64,
    pages: u64,
    end: u64,
}

impl Regions {
    fn new(rounds: Rounds, base: u64) -> Regions {
        let slots = u64::from(rounds.slots());
        let mut end = base;
        let mut take = |bytes| {
            let start = end;
            end += bytes;
            start
        };
        let control = take(slots * u64::from(rounds.function.blocks()) * 64);
        let reply = take(slots * 64);
        let recv = take(slots * RECV_STRIDE);
        let unused = take(RECV_STRIDE);
        let doorbell = take(2 * 64);
        let scratch = take(slots * 64);
        let has_pages = rounds.function != Function::Invalidate;
        let pages = take(if has_pages { u64::from(rounds.pages()) * PAGE_BYTES as u64 } else { 0 });
        Regions { control, reply, recv, unused, doorbell, scratch, pages, end }
    }

    fn register_pages(&self, pd: &Arc<Pd>) -> Result<Owned<Mr>, Error> {
        let (addr, length) = (self.pages, self.end - self.pages);
        let access = access::LOCAL_WRITE | access::REMOTE_WRITE;
        pd.reg_mr(MrRequest { addr, length, iova: PAGES_BASE, access, paging: None }).map(Owned)
    }

    fn control_init(&self, lkey: u32, rounds: Rounds) -> WorkQueuesInit {
        WorkQueuesInit {
            send: queue(self.control, lkey, rounds.slots() * rounds.function.blocks(), 64, true),
            recv: Some(queue(self.unused, lkey, 1, RECV_STRIDE as u32, false)),
            doorbell_record: self.doorbell + 64,
            doorbell_lkey: lkey,
        }
    }

    fn reply_init(&self, lkey: u32, rounds: Rounds) -> WorkQueuesInit {
        WorkQueuesInit {
            send: queue(self.reply, lkey, rounds.slots(), 64, true),
            recv: Some(queue(self.recv, lkey, rounds.slots(), RECV_STRIDE as u32, false)),
            doorbell_record: self.doorbell,
            doorbell_lkey: lkey,
        }
    }

    fn places(&self, lkey: u32, rkey: u32, rounds: Rounds) -> Places {
        let Regions { control, reply, doorbell, scratch, pages, .. } = *self;
        Places { lkey, rkey, control, reply, doorbell, scratch, pages, rounds }
    }
}

fn queue(addr: u64, lkey: u32, len: u32, stride: u32, is_managed: bool) -> WorkQueueInit {
    WorkQueueInit { addr, lkey, len, stride, is_managed, ignores_overflow: true }
}
