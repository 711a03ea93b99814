//! A session whose queue pair and peer are the test.

use std::sync::Arc;

use terrace_access::layout::Layout;
use terrace_access::proto::{Body, Message, Mode, Read, RegionDescription, Status};
use terrace_access::region::{Knowledge, Region};
use terrace_access::session::{Action, Call, Config, Session};
use terrace_transport::{Payload, SendFlags, SendOp, SendWr, Sge, Time, Wc, WcStatus};

use crate::server::{LKEY, LOCAL_BASE, Local};

/// A length at which a WRITE never uses an RPC in one-sided mode.
pub const LONG: u32 = 5000;
pub const BASE_VA: u64 = 0x10_0000;
pub const UNIT: u64 = 0x4000;
pub const RKEY: u32 = 0x99;

/// A session; each test acts as its queue pair and its peer.
pub struct Harness {
    pub session: Session,
    pub local: Local,
    pub region: Arc<Region>,
    pub known: Knowledge,
    pub now: Time,
    pub posted: usize,
}

/// A post: its offset in the peer's region, and its scatter/gather list.
pub type Posted = (u64, Vec<(u64, u32)>);

impl Harness {
    /// A session that has not been started.
    pub fn new() -> Harness {
        Harness::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut Config)) -> Harness {
        let mut config = Config {
            qpn: 0x77,
            tag: 5,
            request_count_max: 64,
            post_count_max: 64,
            call_count_max: 32,
            mtu_bytes: 1024,
            signal_all: false,
            in_order: true,
        };
        change(&mut config);
        let layout = Layout::new(BASE_VA, 64 * UNIT, 0, UNIT as u32).expect("a valid layout");
        let description =
            RegionDescription { layout, signature_key: [3; 32], region_id: 6, mode: Mode::OneSided };
        let region = Arc::new(Region::new(RKEY, description));
        let local = Local { bytes: vec![0x55; 1 << 20], is_gone: false };
        let known = Knowledge::Extended(Arc::clone(&region));
        Harness { session: Session::new(config), local, region, known, now: Time(1), posted: 0 }
    }

    /// A session to which the server has granted the region.
    pub fn granted(mode: Mode) -> Harness {
        let mut harness = Harness::new();
        harness.session.start(mode, 0x88);
        harness.read(0, 1, 0);
        let actions = harness.actions();
        let (posts, calls) = sort(&actions);
        assert_eq!((posts.len(), calls.len()), (1, 1));
        harness.complete_post(&posts[0]);
        assert!(harness.session.handle_done(harness.now, calls[0].id, Status::Ok));
        let actions = harness.actions();
        assert!(matches!(&actions[..], [Action::Granted(_), Action::Complete(_)]), "{actions:?}");
        harness
    }

    /// Marks units absent, all others present.
    pub fn absent(&self, units: &[usize]) {
        let mut bytes = [0xff; 8];
        units.iter().for_each(|unit| bytes[unit / 8] &= !(1 << (unit % 8)));
        self.region.residency().store(0, &bytes);
    }

    pub fn post(&mut self, op: SendOp, sges: &[(u64, u32)], flags: SendFlags) {
        let sges = sges.iter().map(|&(at, length)| Sge { addr: LOCAL_BASE + at, length, lkey: LKEY });
        let wr_id = 1000 + self.posted as u64;
        self.posted += 1;
        let payload = Payload::Sges(sges.collect());
        let known = if matches!(op, SendOp::Send) { &Knowledge::Plain } else { &self.known };
        self.session
            .post(SendWr { wr_id, op, payload, flags, target: None }, known)
            .expect("the queue is not full");
    }

    /// Posts a signaled READ at an offset of the region.
    pub fn read(&mut self, offset: u64, length: u32, at: u64) {
        let op = SendOp::Read { va: BASE_VA + offset, rkey: RKEY };
        self.post(op, &[(at, length)], SendFlags::SIGNALED);
    }

    pub fn write(&mut self, offset: u64, length: u32, at: u64) {
        let op = SendOp::Write { va: BASE_VA + offset, rkey: RKEY };
        self.post(op, &[(at, length)], SendFlags::SIGNALED);
    }

    pub fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.session.poll_action(self.now, &self.local)).collect()
    }

    /// Fills a READ's buffers: with the signature page for the given pages of the region, with other data elsewhere.
    pub fn fill(&mut self, wr: &SendWr, absent_pages: &[u64]) {
        let SendOp::Read { va, .. } = wr.op else { panic!("{wr:?} is no READ") };
        let Payload::Sges(sges) = &wr.payload else { panic!("a READ has a list") };
        let mut offset = va - BASE_VA;
        for sge in sges {
            for index in 0..u64::from(sge.length) {
                let absent = absent_pages.contains(&(offset / 4096));
                let signature = self.region.signature_page().bytes()[(offset % 4096) as usize];
                self.local.slice(sge.addr + index, 1)[0] = if absent { signature } else { !signature };
                offset += 1;
            }
        }
    }

    /// Completes a post.
    pub fn complete_post(&mut self, wr: &SendWr) {
        self.complete_post_with(wr, WcStatus::Success);
    }

    pub fn complete_post_with(&mut self, wr: &SendWr, status: WcStatus) {
        let wc = Wc { wr_id: wr.wr_id, status, ..Wc::default() };
        assert!(self.session.handle_completion(&wc, &self.local));
    }

    pub fn done(&mut self, call: &Sent, status: Status) {
        assert!(self.session.handle_done(self.now, call.id, status));
    }

    /// The next actions, which must all be completions.
    pub fn completions(&mut self) -> Vec<(u64, WcStatus)> {
        let actions = self.actions();
        let completions = actions.iter().map(|action| match action {
            Action::Complete(wc) => (wc.wr_id, wc.status),
            other => panic!("{other:?}"),
        });
        completions.collect()
    }
}

/// A request of a call.
#[derive(Clone, Debug)]
pub struct Sent {
    pub id: u64,
    pub call: Call,
    index: usize,
}

impl Sent {
    pub fn message(&self) -> Message<'_> {
        self.call.message()
    }
}

/// The posts, and the requests of all calls.
pub fn sort(actions: &[Action]) -> (Vec<SendWr>, Vec<Sent>) {
    let (mut posts, mut calls) = (Vec::new(), Vec::new());
    for action in actions {
        match action {
            Action::Post(wr) => posts.push(wr.clone()),
            Action::Call(call) => {
                let requests = 0..call.request_count().max(1);
                calls.extend(requests.map(|index| Sent {
                    id: call.id + index as u64,
                    call: call.clone(),
                    index,
                }));
            }
            other => panic!("{other:?}"),
        }
    }
    (posts, calls)
}

pub fn target_of(wr: &SendWr) -> Posted {
    let (SendOp::Read { va, .. } | SendOp::Write { va, .. }, Payload::Sges(sges)) = (&wr.op, &wr.payload)
    else {
        panic!("{wr:?}");
    };
    (va - BASE_VA, sges.iter().map(|sge| (sge.addr - LOCAL_BASE, sge.length)).collect())
}

pub fn read_of(call: &Sent) -> Read {
    match call.message().body {
        Body::Read(reads) => reads[call.index].clone(),
        other => panic!("{other:?}"),
    }
}

/// A call's offset in the region, its length, the pages that it requests, and their local offset.
pub fn fetched(call: &Sent) -> (u64, u32, Vec<usize>, u64) {
    let read = read_of(call);
    let pages = read.pages.expect("the grid is known").wanted.runs().flatten().collect();
    (read.va - BASE_VA, read.length, pages, read.dest_va - LOCAL_BASE)
}
