//! A client of a baseline's node: its connection, and the memory that it has.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use terrace_access::proto::Endpoint;
use terrace_nic::{
    Buffer, CompChannel, Cq, CqInit, Device, Error, Mr, Path, Payload, Pd, QpCap, QpState, QueuePair, RecvWr,
    SendFlags, SendOp, SendWr, SgeList, Wc, WcOpcode, WcStatus, rc,
};

use super::frames::{self, Frames, SlabMemory};
use crate::messages::{MESSAGE_BYTES, Message, Operation, Outcome, REPLY_BYTES, Reply, SlabKey};
use crate::node::access;
use crate::owned::Owned;
use crate::page_store::PAGE_BYTES;
use crate::protocol::{ChainEnd, Connect, Connected, Function, Grant};
use crate::scheme::Scheme;
use crate::status::ClientPages;

/// Why a client is disconnected.
const BAD_MESSAGE: &str = "a message that is none of the scheme";
const BAD_PAGE: &str = "a load, an invalidation or a release of a page that it does not have";
const IN_USE: &str = "a release of memory that it accesses";
const OUT_OF_RANGE: &str = "a page out of range, or a slab that it has";

/// How long an access of a client of this host may take. Other clients wait as long if a client releases what it accesses.
const ACCESS_TIME_MAX: Duration = Duration::from_millis(10);

/// A slab that a client has.
struct Held {
    slab: u32,
    /// Its key, if the client accesses it.
    region: Option<Arc<Mr>>,
}

impl Held {
    /// Ends the client's access by `end`, and overwrites what the client has stored. If that fails, the slab is still the client's.
    fn release(&self, memory: &SlabMemory, end: impl Fn(&Mr) -> Result<(), Error>) -> Result<(), Error> {
        let Some(region) = &self.region else { return Ok(()) };
        end(region)?;
        memory.clear(self.slab)
    }
}

/// A connected client.
pub(super) struct Tenant {
    pub id: u64,
    name: String,
    pub address: IpAddr,
    page_count: u64,
    budget_pages: u64,
    scheme: Scheme,
    depth: u32,
    qp: Owned<QueuePair>,
    /// The slabs, or pages, by their index in the client's space.
    held: HashMap<u64, Held>,
    /// The whole space, if it is reserved.
    reserved: Option<Buffer>,
    /// Messages, and behind them replies: twice as many, because an acknowledgement may come after the next message.
    slots: Buffer,
    free_replies: Vec<u32>,
    /// Messages, by slot and length, that wait for memory for their replies.
    pending: VecDeque<(u32, u32)>,
    /// Calls of each function that were carried out.
    counts: [u64; 4],
    failure: Option<&'static str>,
    cq: Owned<Cq>,
    /// Of everything above.
    pd: Owned<Pd>,
}

impl Tenant {
    /// Connects a client. Its space is reserved if the scheme is static.
    pub fn new(
        id: u64,
        (device, channel): (&Arc<Device>, &Arc<CompChannel>),
        scheme: Scheme,
        budget_pages: u64,
        connect: &Connect,
    ) -> Result<(Tenant, Connected), Error> {
        let end = connect.ends.first().ok_or(Error::Invalid("the client has no queue pair"))?;
        let path = rc::path_to(device, connect.address, end.qpn)?
            .ok_or(Error::Invalid("the client's address is of another family"))?;
        let (pd, depth) = (Owned(device.alloc_pd()?), connect.depth);
        // Messages, and replies and their completions.
        let cq = CqInit { depth: 4 * depth, channel: Some(channel.clone()), cookie: 0 };
        let cq = Owned(device.create_cq(cq)?);
        let reserved = match scheme {
            Scheme::Static => Some(frames::reserve(&pd, connect.page_count)?),
            _ => None,
        };
        let slots = Buffer::new(&pd, 3 * depth as usize * slot_bytes(scheme), access::LOCAL_WRITE)?;
        let cap = QpCap {
            max_send_wr: 2 * depth,
            max_recv_wr: depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let (qp, endpoint) = rc::new_pair(&pd, &cq, cap)?;
        let tenant = Tenant {
            id,
            name: connect.name.clone(),
            address: connect.address,
            page_count: connect.page_count,
            budget_pages,
            scheme,
            depth,
            qp: Owned(qp),
            held: HashMap::new(),
            reserved,
            slots,
            free_replies: (depth..3 * depth).collect(),
            pending: VecDeque::new(),
            counts: [0; 4],
            failure: None,
            cq,
            pd,
        };
        tenant.open(endpoint, path, end.endpoint(connect.mtu_bytes))?;
        let reserved =
            tenant.reserved.as_ref().map(|space| SlabKey { addr: space.addr(), rkey: space.mr().rkey() });
        let connected = Connected {
            address: device.gids().first().ok_or(Error::Invalid("the device has no address"))?.addr,
            mtu_bytes: device.port_attributes().active_mtu as u16,
            ends: vec![ChainEnd::of(endpoint)],
            budget_pages,
            grant: reserved.map_or(Grant::Messages, Grant::Reserved),
        };
        Ok((tenant, connected))
    }

    /// Connects the queue pair to the client's.
    fn open(&self, endpoint: Endpoint, path: Path, peer: Endpoint) -> Result<(), Error> {
        let is_one_sided = self.scheme != Scheme::TwoSided;
        rc::initialize(&self.qp, if is_one_sided { access::REMOTE_READ | access::REMOTE_WRITE } else { 0 })?;
        (0..self.depth).try_for_each(|slot| self.post_receive(slot))?;
        self.cq.request_notify(false)?;
        rc::connect_persistently(&self.qp, endpoint, path, peer)
    }

    fn post_receive(&self, slot: u32) -> Result<(), Error> {
        let bytes = slot_bytes(self.scheme);
        let sges = SgeList::from_slice(&[self.slots.sge(slot as usize * bytes, bytes as u32)]);
        self.qp.post_recv([Ok(RecvWr { wr_id: slot.into(), sges })]).map_err(|(_, error)| error)
    }

    /// Takes up to `completions_max` completions, and carries out what messages ask for. Returns how many there were.
    pub fn serve(&mut self, frames: &mut Frames, completions_max: usize, taken: &mut Vec<Wc>) -> usize {
        let polled = self.cq.poll(completions_max, &mut |wc| taken.push(*wc));
        for wc in taken.drain(..).filter(|wc| wc.status == WcStatus::Success) {
            match wc.opcode {
                WcOpcode::Recv => self.pending.push_back((wc.wr_id as u32, wc.byte_len)),
                WcOpcode::Send => self.free_replies.push(wc.wr_id as u32),
                _ => self.failure = Some(BAD_MESSAGE),
            }
        }
        while self.failure.is_none()
            && !self.free_replies.is_empty()
            && let Some((slot, length)) = self.pending.pop_front()
        {
            if let Err(reason) = self.answer(frames, slot, length) {
                self.failure = Some(reason);
            }
        }
        match polled {
            Ok(count) => count,
            Err(_) => {
                self.failure = Some("it overruns its completion queue");
                0
            }
        }
    }

    /// Has the channel report the next completion.
    pub fn request_notify(&self) {
        // It fails only if the device has closed.
        let _ = self.cq.request_notify(false);
    }

    /// Carries out a message, and sends the reply.
    fn answer(&mut self, frames: &mut Frames, slot: u32, length: u32) -> Result<(), &'static str> {
        const NIC: &str = "the NIC refuses a reply";
        let (begin, mut header) = (slot as usize * slot_bytes(self.scheme), [0; MESSAGE_BYTES]);
        self.slots.read(begin, &mut header).map_err(|_| NIC)?;
        let message = Message::parse(&header).ok_or(BAD_MESSAGE)?;
        let has_page = message.operation == Operation::Store;
        if length as usize != MESSAGE_BYTES + if has_page { PAGE_BYTES } else { 0 } {
            return Err(BAD_MESSAGE);
        }
        let reply_slot = self.free_replies.pop().ok_or(NIC)?;
        let reply_at = reply_slot as usize * slot_bytes(self.scheme);
        let mut page = [0; PAGE_BYTES];
        if has_page {
            self.slots.read(begin + MESSAGE_BYTES, &mut page).map_err(|_| NIC)?;
        }
        let (outcome, key) = self.carry_out(frames, &message, &mut page)?;
        // The page is loaded.
        let mut reply_bytes = REPLY_BYTES;
        if message.operation == Operation::Load {
            self.slots.write(reply_at + REPLY_BYTES, &page).map_err(|_| NIC)?;
            reply_bytes += PAGE_BYTES;
        }
        let reply = Reply { number: message.number, outcome, key };
        self.slots.write(reply_at, &reply.emit()).map_err(|_| NIC)?;
        self.post_receive(slot).map_err(|_| NIC)?;
        let wr = SendWr {
            wr_id: reply_slot.into(),
            op: SendOp::Send,
            payload: Payload::Sge(self.slots.sge(reply_at, reply_bytes as u32)),
            flags: SendFlags::SIGNALED,
            target: None,
        };
        self.qp.post_send([Ok(wr)]).map_err(|_| NIC)
    }

    /// Does what a message asks for. `page` is the page that is stored, or becomes the one that is loaded.
    fn carry_out(
        &mut self,
        frames: &mut Frames,
        message: &Message,
        page: &mut [u8; PAGE_BYTES],
    ) -> Result<(Outcome, SlabKey), &'static str> {
        const MEMORY: &str = "its memory cannot be accessed";
        let (index, none) = (message.index, SlabKey::default());
        match (self.scheme, message.operation) {
            (Scheme::TwoSided, Operation::Load) => {
                let held = self.held.get(&index).ok_or(BAD_PAGE)?;
                frames.memory().read(held.slab, page).map_err(|_| MEMORY)?;
                self.count(Function::Load);
                Ok((Outcome::Done, none))
            }
            (Scheme::TwoSided, Operation::Store) => {
                let (slab, function) = match self.held.get(&index) {
                    Some(held) => (held.slab, Function::MappedStore),
                    None => match self.take_slab(frames, index, false)? {
                        Ok((slab, _)) => (slab, Function::UnmappedStore),
                        Err(refusal) => return Ok((refusal, none)),
                    },
                };
                frames.memory().write(slab, page).map_err(|_| MEMORY)?;
                self.count(function);
                Ok((Outcome::Done, none))
            }
            (Scheme::TwoSided, Operation::Invalidate) => {
                // The next store overwrites the whole page.
                frames.put_back(self.held.remove(&index).ok_or(BAD_PAGE)?.slab);
                self.count(Function::Invalidate);
                Ok((Outcome::Done, none))
            }
            (Scheme::Dynamic1M | Scheme::Dynamic4K, Operation::Reserve)
                if !self.held.contains_key(&index) =>
            {
                let taken = self.take_slab(frames, index, true)?;
                if taken.is_ok() {
                    self.count(Function::UnmappedStore);
                }
                Ok(taken.map_or_else(|refusal| (refusal, none), |(_, key)| (Outcome::Done, key)))
            }
            (Scheme::Dynamic1M | Scheme::Dynamic4K, Operation::Reserve) => Err(OUT_OF_RANGE),
            (Scheme::Dynamic1M | Scheme::Dynamic4K, Operation::Release) => {
                let held = self.held.get(&index).ok_or(BAD_PAGE)?;
                let end = |region: &Mr| region.dereg_within(ACCESS_TIME_MAX);
                held.release(frames.memory(), end).map_err(|_| IN_USE)?;
                frames.put_back(held.slab);
                self.held.remove(&index);
                self.count(Function::Invalidate);
                Ok((Outcome::Done, none))
            }
            _ => Err(BAD_MESSAGE),
        }
    }

    /// Gives the client a slab as this one of its space, with a key if it accesses it.
    fn take_slab(
        &mut self,
        frames: &mut Frames,
        index: u64,
        is_accessed: bool,
    ) -> Result<Result<(u32, SlabKey), Outcome>, &'static str> {
        if index >= self.page_count.div_ceil(frames.slab_pages()) {
            return Err(OUT_OF_RANGE);
        }
        if self.pages(frames.slab_pages()) + frames.slab_pages() > self.budget_pages {
            return Ok(Err(Outcome::BudgetExhausted));
        }
        let Some(slab) = frames.take_slab() else { return Ok(Err(Outcome::PoolEmpty)) };
        let mut held = Held { slab, region: None };
        let mut key = SlabKey::default();
        if is_accessed {
            let Ok(region) = frames.memory().register(&self.pd, slab, index) else {
                // The NIC has no key left.
                frames.put_back(slab);
                return Ok(Err(Outcome::PoolEmpty));
            };
            key = SlabKey { addr: region.iova(), rkey: region.rkey() };
            held.region = Some(region);
        }
        self.held.insert(index, held);
        Ok(Ok((slab, key)))
    }

    fn count(&mut self, function: Function) {
        self.counts[function.index()] += 1;
    }

    /// Pages that the client has.
    pub fn pages(&self, slab_pages: u64) -> u64 {
        if self.reserved.is_some() { self.page_count } else { self.held.len() as u64 * slab_pages }
    }

    /// Why the client is to be disconnected, if so.
    pub fn failure(&self) -> Option<&'static str> {
        let is_failed = self.qp.state() != QpState::Rts;
        self.failure.or(is_failed.then_some("a request that is not permitted, or the client does not answer"))
    }

    pub fn status(&self, slab_pages: u64) -> ClientPages {
        let count = |function: Function| self.counts[function.index()];
        ClientPages {
            name: self.name.clone(),
            address: self.address,
            page_count: self.page_count,
            pages: self.pages(slab_pages),
            loads: count(Function::Load),
            mapped_stores: count(Function::MappedStore),
            unmapped_stores: count(Function::UnmappedStore),
            invalidations: count(Function::Invalidate),
        }
    }

    /// Ends the connection, and takes slabs back. Returns those that were; the client keeps those whose regions cannot end yet.
    pub fn release_all(&mut self, memory: &SlabMemory) -> Vec<u32> {
        // It fails if the device has closed, or for the second time. No request is to come while memory changes its owner.
        let _ = self.qp.destroy();
        let mut slabs = Vec::new();
        self.held.retain(|_, held| match held.release(memory, Mr::dereg) {
            Ok(()) => {
                slabs.push(held.slab);
                false
            }
            Err(error) => {
                tracing::warn!(%error, client = self.name, "memory of a client that has gone is still in use");
                true
            }
        });
        slabs
    }

    /// Whether the client has slabs.
    pub fn has_slabs(&self) -> bool {
        !self.held.is_empty()
    }

    /// Pages of its space, if that is reserved as a whole.
    pub fn reserved_pages(&self) -> u64 {
        if self.reserved.is_some() { self.page_count } else { 0 }
    }
}

/// Bytes of memory for a message, or a reply.
fn slot_bytes(scheme: Scheme) -> usize {
    let page = if scheme == Scheme::TwoSided { PAGE_BYTES } else { 0 };
    MESSAGE_BYTES.max(REPLY_BYTES).next_power_of_two() + page
}

#[cfg(test)]
mod tests {
    use terrace_nic::PortConfig;

    use super::*;

    #[test]
    fn a_slab_whose_region_does_not_end_is_not_taken_back() {
        let port = PortConfig { address: Some([127, 0, 0, 1].into()), ..PortConfig::default() };
        let device = Device::open(port.device().expect("a port")).expect("a device");
        let pd = device.alloc_pd().expect("a protection domain");
        let mut frames = Frames::new(&pd, 2, 1).expect("memory");
        let slab = frames.take_slab().expect("a slab");
        let region = frames.memory().register(&pd, slab, 0).expect("registered");
        let held = Held { slab, region: Some(region.clone()) };
        frames.memory().write(slab, &[7; PAGE_BYTES]).expect("within the memory");
        region.dereg().expect("not in use");
        // A region that has ended already does not end.
        assert!(held.release(frames.memory(), Mr::dereg).is_err());
        let mut page = [0; PAGE_BYTES];
        frames.memory().read(slab, &mut page).expect("within the memory");
        assert!(page == [7; PAGE_BYTES], "it is overwritten while others may have it");
        device.close();
    }
}
