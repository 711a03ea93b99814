//! An initiator whose queue pair and peer are the test.

use std::collections::BTreeMap;
use std::sync::Arc;

use terrace_access::layout::Layout;
use terrace_access::optimistic::{
    Action, Config, Held, HeldMemory, Initiator, Lent, Order, OrderBits, Scratch,
};
use terrace_access::proto::{Access, Body, Message, Mode, Opened, RegionDescription, Table};
use terrace_access::region::{Knowledge, Region};
use terrace_access::session::LocalMemory;
use terrace_transport::{LocalError, Payload, SendFlags, SendOp, SendWr, Sge, Time, Wc, WcStatus};

pub const BASE_VA: u64 = 0x10_0000;
pub const RKEY: u32 = 0x99;
pub const TABLE_KEY: u32 = 0x77;
pub const TABLE_VA: u64 = 0x9000;
pub const PAGE: u64 = 4096;
const LOCAL: u64 = 0x50_0000;
const SCRATCH: u64 = 0x70_0000;
pub const LENT: u64 = 0x80_0000;

/// The program's memory, and the initiator's scratch memory.
pub struct Local {
    pub bytes: Vec<u8>,
    pub scratch: Vec<u8>,
    pub held: BTreeMap<u64, bool>,
    /// What the peer may access, by calls.
    pub lent: BTreeMap<u64, Vec<u8>>,
    pub answer: Held,
    /// Whether nothing can be copied to the program's memory any more.
    pub is_unmapped: bool,
}

impl Local {
    fn place(&self, sge: &Sge) -> (&Vec<u8>, usize) {
        match sge.addr {
            SCRATCH.. => (&self.scratch, (sge.addr - SCRATCH) as usize),
            addr => (&self.bytes, (addr - LOCAL) as usize),
        }
    }
}

impl LocalMemory for Local {
    fn read(&self, sge: &Sge, offset: u64, out: &mut [u8]) -> Result<(), LocalError> {
        let (bytes, start) = self.place(sge);
        let start = start + offset as usize;
        out.copy_from_slice(&bytes[start..start + out.len()]);
        Ok(())
    }
}

impl HeldMemory for Local {
    fn hold(&mut self, token: u64, _sges: &[Sge], writes: bool) -> Result<Held, LocalError> {
        assert!(self.held.insert(token, writes).is_none(), "request {token} is held once");
        Ok(self.answer)
    }

    fn release(&mut self, token: u64) {
        assert!(self.held.remove(&token).is_some(), "request {token} was held");
    }

    fn write(&mut self, sge: &Sge, offset: u64, data: &[u8]) -> Result<(), LocalError> {
        let start = (sge.addr - LOCAL + offset) as usize;
        self.bytes[start..start + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn lend(&mut self, id: u64, sge: &Sge, by_peer: Access) -> Result<Lent, LocalError> {
        let mut data = vec![0; sge.length as usize];
        if by_peer == Access::Read {
            self.read(sge, 0, &mut data)?;
        }
        assert!(self.lent.insert(id, data).is_none(), "call {id} is lent memory once");
        Ok(Lent { va: LENT, rkey: 8 })
    }

    fn take_back(&mut self, id: u64, into: Option<&Sge>) -> Result<(), LocalError> {
        let data = self.lent.remove(&id).expect("what is taken back was lent");
        if self.is_unmapped {
            return Err(LocalError::Protection);
        }
        into.map_or(Ok(()), |sge| self.write(sge, 0, &data))
    }
}

/// A registration of the peer's memory.
pub fn region(rkey: u32, region_id: u64) -> Arc<Region> {
    let layout = Layout::new(BASE_VA, 64 * PAGE, 0, PAGE as u32).expect("a valid layout");
    let description = RegionDescription { layout, signature_key: [3; 32], region_id, mode: Mode::OneSided };
    Arc::new(Region::new(rkey, description))
}

pub struct Harness {
    pub initiator: Initiator,
    pub local: Local,
    pub region: Arc<Region>,
    pub known: Knowledge,
    pub now: Time,
}

/// What an initiator does next.
#[derive(Debug)]
pub enum Next {
    Post(SendWr),
    /// The id and the bytes of a message.
    Send(u64, Box<[u8]>),
    Complete(u64, WcStatus),
    Break,
}

impl Harness {
    pub fn new() -> Harness {
        Harness::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Harness {
        let mut config = Config {
            qpn: 5,
            tag: 3,
            request_count_max: 64,
            post_count_max: 64,
            call_count_max: 16,
            mtu_bytes: 1024,
            signal_all: false,
            order: Order::Default,
            is_two_sided: false,
            inline_bytes_max: 1024,
            call_bytes_max: 1 << 20,
            is_reverse_allowed: true,
            unchecked_count_max: 16,
            check_delay_ns: 1000,
            omits_ack_requests: true,
            version_age_ns: 1_000_000,
            scratch: Scratch { addr: SCRATCH, lkey: 2, slot_bytes: 64, slot_count: 4 },
        };
        change(&mut config);
        let region = region(RKEY, 6);
        let local = Local {
            bytes: vec![0x55; 1 << 16],
            scratch: vec![0; 256],
            held: BTreeMap::new(),
            lent: BTreeMap::new(),
            answer: Held::Now,
            is_unmapped: false,
        };
        let known = Knowledge::Extended(region.clone());
        Harness { initiator: Initiator::new(config), local, region, known, now: Time(1) }
    }

    /// One that knows where the versions are.
    pub fn opened() -> Harness {
        Harness::opened_with(|_| {})
    }

    pub fn opened_with(change: impl FnOnce(&mut Config)) -> Harness {
        let mut harness = Harness::with(change);
        harness.write(999, 63 * PAGE, 8, 0xf000, true);
        let id = harness.sent_id(|body| matches!(body, Body::Open(_)));
        harness.answer_open(id);
        harness.versions(1);
        let post = harness.post();
        harness.succeed(&post);
        harness.versions(1);
        assert_eq!(harness.completed(), 999);
        harness
    }

    pub fn answer_open(&mut self, id: u64) {
        let versions = Table { va: TABLE_VA, length_bytes: 64 * 4, rkey: TABLE_KEY };
        self.answer(id, Body::Opened(Opened { bitmap: versions, versions }));
    }

    pub fn submit(
        &mut self,
        wr_id: u64,
        op: SendOp,
        at: u64,
        length: u32,
        flags: SendFlags,
        order: OrderBits,
    ) {
        let sge = Sge { addr: LOCAL + at, length, lkey: 1 };
        let known = if matches!(op, SendOp::Send) { &Knowledge::Plain } else { &self.known };
        self.initiator
            .post(SendWr::with_sge(wr_id, op, sge, flags), known, order)
            .expect("the queue is not full");
    }

    pub fn read(&mut self, wr_id: u64, offset: u64, length: u32, at: u64) {
        let op = SendOp::Read { va: BASE_VA + offset, rkey: RKEY };
        self.submit(wr_id, op, at, length, SendFlags::SIGNALED, OrderBits::empty());
    }

    pub fn write(&mut self, wr_id: u64, offset: u64, length: u32, at: u64, is_signaled: bool) {
        let op = SendOp::Write { va: BASE_VA + offset, rkey: RKEY };
        let flags = if is_signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
        self.submit(wr_id, op, at, length, flags, OrderBits::empty());
    }

    pub fn next(&mut self) -> Option<Next> {
        let action = self.initiator.poll_action(self.now, &mut self.local)?;
        Some(match action {
            Action::Post(wr) => Next::Post(wr),
            Action::Send(bytes) => Next::Send(Message::decode(&bytes).expect("a valid message").id, bytes),
            Action::Complete(wc) => Next::Complete(wc.wr_id, wc.status),
            Action::Break => Next::Break,
        })
    }

    /// The next action, which is a post.
    pub fn post(&mut self) -> SendWr {
        match self.next() {
            Some(Next::Post(wr)) => wr,
            other => panic!("{other:?}"),
        }
    }

    /// The id of the message that is the next action.
    pub fn sent_id(&mut self, is_expected: impl Fn(&Body<'_>) -> bool) -> u64 {
        match self.next() {
            Some(Next::Send(id, bytes)) => {
                let message = Message::decode(&bytes).expect("a valid message");
                assert!(is_expected(&message.body), "{message:?}");
                id
            }
            other => panic!("{other:?}"),
        }
    }

    /// The request whose successful completion is the next action.
    pub fn completed(&mut self) -> u64 {
        match self.next() {
            Some(Next::Complete(wr_id, WcStatus::Success)) => wr_id,
            other => panic!("{other:?}"),
        }
    }

    pub fn idle(&mut self) {
        let next = self.next();
        assert!(next.is_none(), "{next:?}");
    }

    pub fn answer(&mut self, id: u64, body: Body<'_>) {
        assert!(self.initiator.handle_message(self.now, &Message { id, body }, &mut self.local));
    }

    pub fn complete(&mut self, wr: &SendWr, status: WcStatus) {
        let wc = Wc { wr_id: wr.wr_id, status, ..Wc::default() };
        assert!(self.initiator.handle_completion(self.now, &wc, &mut self.local));
    }

    pub fn succeed(&mut self, wr: &SendWr) {
        self.complete(wr, WcStatus::Success);
    }

    /// The next action is a READ of versions; all of them are `version`.
    pub fn versions(&mut self, version: u32) {
        let wr = self.post();
        self.bring_versions(&wr, version);
    }

    pub fn bring_versions(&mut self, wr: &SendWr, version: u32) {
        let SendOp::Read { rkey: TABLE_KEY, va: TABLE_VA.. } = wr.op else { panic!("{wr:?}") };
        let Payload::Sge(sge) = wr.payload else { panic!("{wr:?}") };
        let start = (sge.addr - SCRATCH) as usize;
        for bytes in self.local.scratch[start..start + sge.length as usize].chunks_exact_mut(4) {
            bytes.copy_from_slice(&version.to_le_bytes());
        }
        self.succeed(wr);
    }

    /// Fills local memory from the signature page.
    pub fn fill_absent(&mut self, offset: u64, length: usize, at: usize) {
        let signature = self.region.signature_page().clone();
        for index in 0..length {
            self.local.bytes[at + index] = signature.bytes()[(offset as usize + index) % 4096];
        }
    }
}
