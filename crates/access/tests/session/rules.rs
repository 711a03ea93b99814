//! One rule of the session per test, with every action checked.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_access::layout::Layout;
use terrace_access::proto::{Body, Mode, Read, RegionDescription, Source, Status};
use terrace_access::region::{Knowledge, Region};
use terrace_access::session::{Action, Call, Config, Session};
use terrace_transport::{Payload, PostError, SendFlags, SendOp, SendWr, Sge, Time, Wc, WcStatus};

use crate::server::{LKEY, LOCAL_BASE, Local};

/// A length at which a WRITE never uses an RPC in one-sided mode.
const LONG: u32 = 5000;
const BASE_VA: u64 = 0x10_0000;
const UNIT: u64 = 0x4000;
const RKEY: u32 = 0x99;

/// A session whose queue pair and peer each test plays itself.
struct Stage {
    session: Session,
    local: Local,
    region: Arc<Region>,
    known: Knowledge,
    now: Time,
    posted: usize,
}

/// A post: its offset in the peer's region, and its list.
type Posted = (u64, Vec<(u64, u32)>);

impl Stage {
    /// A session that has not been started.
    fn new() -> Stage {
        Stage::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut Config)) -> Stage {
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
        let layout = Layout::new(BASE_VA, 64 * UNIT, 0, UNIT as u32).expect("it makes sense");
        let description =
            RegionDescription { layout, pattern_key: [3; 32], region_id: 6, mode: Mode::OneSided };
        let region = Arc::new(Region::new(RKEY, description));
        let local = Local { bytes: vec![0x55; 1 << 20], is_gone: false };
        let known = Knowledge::Extended(Arc::clone(&region));
        Stage { session: Session::new(config), local, region, known, now: Time(1), posted: 0 }
    }

    /// A session to which the server has granted the region.
    fn granted(mode: Mode) -> Stage {
        let mut stage = Stage::new();
        stage.session.start(mode, 0x88);
        stage.read(0, 1, 0);
        let actions = stage.actions();
        let (posts, calls) = sort(&actions);
        assert_eq!((posts.len(), calls.len()), (1, 1));
        stage.bring(&posts[0]);
        assert!(stage.session.handle_done(stage.now, calls[0].id, Status::Ok));
        let actions = stage.actions();
        assert!(matches!(&actions[..], [Action::Granted(_), Action::Complete(_)]), "{actions:?}");
        stage
    }

    /// Marks units absent, all others present.
    fn absent(&self, units: &[usize]) {
        let mut bytes = [0xff; 8];
        units.iter().for_each(|unit| bytes[unit / 8] &= !(1 << (unit % 8)));
        self.region.bitmap().store(self.now, &bytes);
    }

    fn post(&mut self, op: SendOp, sges: &[(u64, u32)], flags: SendFlags) {
        let sges = sges.iter().map(|&(at, length)| Sge { addr: LOCAL_BASE + at, length, lkey: LKEY });
        let wr_id = 1000 + self.posted as u64;
        self.posted += 1;
        let payload = Payload::Sges(sges.collect());
        let known = if matches!(op, SendOp::Send) { &Knowledge::Plain } else { &self.known };
        self.session.post(SendWr { wr_id, op, payload, flags, target: None }, known).expect("there is room");
    }

    /// A signaled READ of a place in the region.
    fn read(&mut self, offset: u64, length: u32, at: u64) {
        let op = SendOp::Read { va: BASE_VA + offset, rkey: RKEY };
        self.post(op, &[(at, length)], SendFlags::SIGNALED);
    }

    fn write(&mut self, offset: u64, length: u32, at: u64) {
        let op = SendOp::Write { va: BASE_VA + offset, rkey: RKEY };
        self.post(op, &[(at, length)], SendFlags::SIGNALED);
    }

    fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.session.poll_action(self.now, &self.local)).collect()
    }

    /// Fills a READ's buffers: with the signature page for the given pages of the region, with other data elsewhere.
    fn fill(&mut self, wr: &SendWr, absent_pages: &[u64]) {
        let SendOp::Read { va, .. } = wr.op else { panic!("{wr:?} is no READ") };
        let Payload::Sges(sges) = &wr.payload else { panic!("a READ has a list") };
        let mut offset = va - BASE_VA;
        for sge in sges {
            for index in 0..u64::from(sge.length) {
                let absent = absent_pages.contains(&(offset / 4096));
                let pattern = self.region.pattern().bytes()[(offset % 4096) as usize];
                self.local.slice(sge.addr + index, 1)[0] = if absent { pattern } else { !pattern };
                offset += 1;
            }
        }
    }

    /// Completes a post.
    fn bring(&mut self, wr: &SendWr) {
        self.end(wr, WcStatus::Success);
    }

    fn end(&mut self, wr: &SendWr, status: WcStatus) {
        let wc = Wc { wr_id: wr.wr_id, status, ..Wc::default() };
        assert!(self.session.handle_completion(&wc, &self.local));
    }

    fn done(&mut self, call: &Call, status: Status) {
        assert!(self.session.handle_done(self.now, call.id, status));
    }

    /// The next actions, which must all be completions.
    fn completions(&mut self) -> Vec<(u64, WcStatus)> {
        let actions = self.actions();
        let completions = actions.iter().map(|action| match action {
            Action::Complete(wc) => (wc.wr_id, wc.status),
            other => panic!("{other:?}"),
        });
        completions.collect()
    }
}

fn sort(actions: &[Action]) -> (Vec<SendWr>, Vec<Call>) {
    let (mut posts, mut calls) = (Vec::new(), Vec::new());
    for action in actions {
        match action {
            Action::Post(wr) => posts.push(wr.clone()),
            Action::Call(call) => calls.push(call.clone()),
            other => panic!("{other:?}"),
        }
    }
    (posts, calls)
}

fn place(wr: &SendWr) -> Posted {
    let (SendOp::Read { va, .. } | SendOp::Write { va, .. }, Payload::Sges(sges)) = (&wr.op, &wr.payload)
    else {
        panic!("{wr:?}");
    };
    (va - BASE_VA, sges.iter().map(|sge| (sge.addr - LOCAL_BASE, sge.length)).collect())
}

fn read_of(call: &Call) -> Read {
    match call.message().body {
        Body::Read(read) => read,
        other => panic!("{other:?}"),
    }
}

/// A call's offset in the region, its length, the pages that it requests, and their local offset.
fn fetched(call: &Call) -> (u64, u32, Vec<usize>, u64) {
    let read = read_of(call);
    let pages = read.pages.expect("the grid is known").wanted.runs().flatten().collect();
    (read.va - BASE_VA, read.length, pages, read.dest_va - LOCAL_BASE)
}

#[test]
fn before_the_start_everything_is_passed_on() {
    let mut stage = Stage::new();
    let op = SendOp::Read { va: BASE_VA, rkey: RKEY };
    stage.post(op, &[(0, 100_000)], SendFlags::FENCE);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!(calls.len(), 0);
    assert_eq!(place(&posts[0]), (0, vec![(0, 100_000)]));
    assert_eq!(posts[0].flags, SendFlags::FENCE | SendFlags::SIGNALED);
    stage.bring(&posts[0]);
    assert_eq!(stage.completions(), [], "it was not signaled");
}

#[test]
fn present_units_are_read_in_runs_and_absent_pages_asked_for_in_one_call() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[2, 4, 5]);
    // From the middle of a page of unit 1 to the middle of one of unit 6.
    let (start, end) = (2 * UNIT - 4096 - 100, 6 * UNIT + 5000);
    stage.read(start, (end - start) as u32, 64);
    let (posts, calls) = sort(&stage.actions());
    let at = |offset: u64| offset - start + 64;
    let places: Vec<Posted> = posts.iter().map(place).collect();
    // The first post does not begin at a chunk's boundary, so it ends with its first packet.
    let head_end = (start).next_multiple_of(1024);
    assert_eq!(
        places,
        [
            (start, vec![(at(start), (head_end - start) as u32)]),
            (head_end, vec![(at(head_end), (2 * UNIT - head_end) as u32)]),
            (3 * UNIT, vec![(at(3 * UNIT), UNIT as u32)]),
            (6 * UNIT, vec![(at(6 * UNIT), 5000)]),
        ]
    );
    assert_eq!(calls.len(), 1);
    // Pages 0 to 3 of unit 2, and all of units 4 and 5, from the first wanted page to the last.
    let wanted: Vec<usize> = (0..4).chain(8..16).collect();
    assert_eq!(fetched(&calls[0]), (2 * UNIT, 4 * UNIT as u32, wanted, at(2 * UNIT)));

    posts.iter().for_each(|wr| stage.fill(wr, &[]));
    posts.iter().for_each(|wr| stage.bring(wr));
    assert_eq!(stage.completions(), []);
    stage.done(&calls[0], Status::Ok);
    assert_eq!(stage.completions(), [(1001, WcStatus::Success)]);
}

#[test]
fn what_is_all_absent_is_not_read() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[3]);
    stage.read(3 * UNIT + 10, 20, 0);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!(posts, []);
    assert_eq!(fetched(&calls[0]), (3 * UNIT + 10, 20, vec![0], 0));
}

#[test]
fn suspects_are_asked_for_by_one_call_when_all_is_back() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[1]);
    stage.read(0, 3 * UNIT as u32, 0);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (2, 1));
    // Page 2 of unit 0, page 1 of unit 2.
    posts.iter().for_each(|wr| stage.fill(wr, &[2, 9]));
    stage.bring(&posts[0]);
    assert_eq!(stage.actions().len(), 0);
    stage.bring(&posts[1]);
    let (_, later) = sort(&stage.actions());
    assert_eq!(later.len(), 1);
    assert_eq!(fetched(&later[0]), (2 * 4096, 8 * 4096, vec![0, 7], 2 * 4096));
    // Units with an absent page are requested by call from now on, without a READ.
    stage.read(2 * UNIT, 8, 0x40_000);
    let (posts, more) = sort(&stage.actions());
    assert_eq!((posts.len(), more.len()), (0, 1));
    stage.done(&more[0], Status::Ok);
    stage.done(&later[0], Status::Ok);
    assert_eq!(stage.completions(), []);
    stage.done(&calls[0], Status::Ok);
    assert_eq!(stage.completions(), [(1001, WcStatus::Success), (1002, WcStatus::Success)]);
}

#[test]
fn lists_are_split_by_element_for_calls_only() {
    let mut stage = Stage::granted(Mode::OneSided);
    let op = SendOp::Read { va: BASE_VA, rkey: RKEY };
    let list = [(100, 5000), (0x9000, 4000), (0x20_000, 3288)];
    stage.post(op, &list, SendFlags::SIGNALED);
    let (posts, _) = sort(&stage.actions());
    assert_eq!(place(&posts[0]), (0, list.to_vec()));
    stage.fill(&posts[0], &[1]);
    stage.bring(&posts[0]);
    let (_, calls) = sort(&stage.actions());
    let calls: Vec<_> = calls.iter().map(fetched).collect();
    assert_eq!(calls, [(4096, 904, vec![0], 100 + 4096), (5000, 3192, vec![0], 0x9000)]);
}

#[test]
fn many_calls_are_under_way_and_no_more_than_the_server_takes() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&(0..64).collect::<Vec<_>>());
    (0..40).for_each(|index| stage.read(index * 4096, 4096, index * 4096));
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (0, 32));
    assert_eq!(stage.session.calls_in_flight(), 32);
    stage.done(&calls[7], Status::Ok);
    stage.done(&calls[9], Status::Ok);
    let (_, more) = sort(&stage.actions());
    assert_eq!(more.len(), 2);
}

#[test]
fn reads_into_one_buffer_do_not_wait_for_each_other_while_all_is_present() {
    let mut stage = Stage::granted(Mode::OneSided);
    (0..10).for_each(|index| stage.read(index * 4096, 4096, 0));
    let (posts, _) = sort(&stage.actions());
    assert_eq!(posts.len(), 10);
    stage.fill(&posts[0], &[0]);
    stage.bring(&posts[0]);
    let (_, calls) = sort(&stage.actions());
    assert_eq!(calls.len(), 1);
    // The call's page overwrites the data of the later READs, so they are read again, one by one.
    for wr in &posts[1..] {
        stage.fill(wr, &[]);
        stage.bring(wr);
    }
    assert_eq!(stage.actions().len(), 0);
    let mut call = calls[0].clone();
    for index in 1..10 {
        stage.done(&call, Status::Ok);
        let mut actions = stage.actions();
        assert_eq!(actions.len(), 2);
        let Some(Action::Call(next)) = actions.pop() else { panic!("a call") };
        assert_eq!(fetched(&next).0, index * 4096);
        call = next;
    }
}

#[test]
fn a_fence_waits_for_reads_and_a_send_without_one_does_not() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[0]);
    stage.read(0, 100, 0);
    stage.post(SendOp::Send, &[(0x9000, 10)], SendFlags::empty());
    stage.post(SendOp::Send, &[(0x9000, 11)], SendFlags::FENCE);
    stage.post(SendOp::Send, &[(0x9000, 12)], SendFlags::empty());
    let (posts, calls) = sort(&stage.actions());
    assert_eq!(posts.iter().map(|wr| wr.payload.len()).collect::<Vec<_>>(), [10]);
    stage.done(&calls[0], Status::Ok);
    let actions = stage.actions();
    assert!(matches!(actions[0], Action::Complete(_)));
    let (posts, _) = sort(&actions[1..]);
    assert_eq!(posts.iter().map(|wr| wr.payload.len()).collect::<Vec<_>>(), [11, 12]);
}

#[test]
fn writes_wait_for_reads_of_the_same_bytes_only() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[0]);
    stage.read(0, 4096, 0);
    stage.write(4096, LONG, 0x9000);
    stage.write(4095, LONG, 0x9000);
    stage.write(0x4000, LONG, 0x9000);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!(posts.iter().map(|wr| place(wr).0).collect::<Vec<_>>(), [4096]);
    stage.done(&calls[0], Status::Ok);
    let (posts, _) = sort(&stage.actions()[1..]);
    assert_eq!(posts.iter().map(|wr| place(wr).0).collect::<Vec<_>>(), [4095, 0x4000]);
}

#[test]
fn calls_wait_for_writes_of_the_same_bytes_and_others_pass() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[0, 1]);
    stage.write(0, LONG, 0x9000);
    stage.read(0, 100, 0);
    stage.read(UNIT, 100, 0x1000);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (1, 1));
    assert_eq!(fetched(&calls[0]).0, UNIT);
    stage.bring(&posts[0]);
    let actions = stage.actions();
    let (_, calls) = sort(&actions[1..]);
    assert_eq!(fetched(&calls[0]).0, 0);
}

#[test]
fn until_the_server_agrees_nothing_is_asked_for() {
    let mut stage = Stage::new();
    // An unchecked READ in flight keeps the signature page off.
    stage.read(0, 100, 0);
    let (unchecked, _) = sort(&stage.actions());
    stage.session.start(Mode::OneSided, 0x88);
    stage.absent(&[0]);
    stage.read(0, 100, 0x1000);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (1, 0));
    stage.bring(&unchecked[0]);
    let actions = stage.actions();
    let (_, calls) = sort(&actions[1..]);
    let Body::Magic(magic) = calls[0].message().body else { panic!("{calls:?}") };
    assert_eq!((magic.client_qpn, magic.server_qpn, magic.rkey, magic.region_id), (0x77, 0x88, RKEY, 6));
    assert!(magic.on);

    // The peer's NIC may already answer with signature pages: a suspect page waits for the answer.
    stage.fill(&posts[0], &[0]);
    stage.bring(&posts[0]);
    assert_eq!(stage.actions().len(), 0);
    stage.done(&calls[0], Status::AccessDenied);
    assert_eq!(stage.completions(), [(1001, WcStatus::Success)], "it was data");
    let deadline = stage.session.deadline().expect("it is asked for again");
    assert!(deadline > stage.now);
    stage.now = deadline;

    let (_, calls) = sort(&stage.actions());
    stage.read(0, 100, 0x1000);
    let (posts, none) = sort(&stage.actions());
    assert_eq!(none.len(), 0);
    stage.fill(&posts[0], &[0]);
    stage.bring(&posts[0]);
    assert_eq!(stage.actions().len(), 0);
    stage.done(&calls[0], Status::Ok);
    let actions = stage.actions();
    assert!(matches!(&actions[..], [Action::Granted(_), Action::Call(_)]), "{actions:?}");
    assert_eq!(stage.session.deadline(), None);
}

#[test]
fn a_registration_that_is_no_more_is_a_plain_region() {
    let mut stage = Stage::new();
    stage.session.start(Mode::OneSided, 0x88);
    stage.read(0, 100, 0);
    let (posts, calls) = sort(&stage.actions());
    stage.fill(&posts[0], &[0]);
    stage.bring(&posts[0]);
    stage.done(&calls[0], Status::NoSuchRegion);
    let actions = stage.actions();
    assert!(matches!(&actions[..], [Action::Outdated(RKEY), Action::Complete(_)]), "{actions:?}");
    stage.read(0, 0x8001, 0);
    let (posts, _) = sort(&stage.actions());
    assert_eq!(posts.len(), 1, "it is passed on as it is");
    assert_eq!(stage.session.deadline(), None);
}

#[test]
fn a_server_without_room_is_asked_again_later() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[0]);
    stage.read(0, 100, 0);
    let (_, calls) = sort(&stage.actions());
    let mut call = calls[0].clone();
    let mut delay_ns = 0;
    for _ in 0..5 {
        stage.done(&call, Status::Busy);
        assert_eq!(stage.actions().len(), 0);
        let deadline = stage.session.deadline().expect("there is a time for that");
        assert!(deadline.0 - stage.now.0 > delay_ns, "it waits longer each time");
        delay_ns = deadline.0 - stage.now.0;
        stage.now = Time(deadline.0 - 1);
        assert_eq!(stage.actions().len(), 0);
        stage.now = deadline;
        let (_, again) = sort(&stage.actions());
        assert_ne!(again[0].id, call.id);
        call = again[0].clone();
    }
    stage.done(&call, Status::Ok);
    assert_eq!(stage.completions(), [(1001, WcStatus::Success)]);
    assert!(!stage.session.handle_done(stage.now, call.id, Status::Ok), "an answer counts once");
}

#[test]
fn a_region_that_turns_out_to_be_plain_is_read_one_sidedly() {
    let mut stage = Stage::granted(Mode::RpcOnly);
    stage.read(10, 100, 0);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!(posts.len(), 0);
    stage.done(&calls[0], Status::Plain);
    let (posts, _) = sort(&stage.actions());
    assert_eq!(place(&posts[0]), (10, vec![(0, 100)]));
    stage.bring(&posts[0]);
    assert_eq!(stage.completions(), [(1001, WcStatus::Success)]);
}

#[test]
fn small_writes_by_rpc_carry_their_data() {
    let mut stage = Stage::granted(Mode::RpcOnly);
    let op = SendOp::Write { va: BASE_VA + 7, rkey: RKEY };
    stage.local.slice(LOCAL_BASE, 3).copy_from_slice(b"abc");
    stage.local.slice(LOCAL_BASE + 100, 2).copy_from_slice(b"de");
    stage.post(op, &[(0, 3), (100, 2)], SendFlags::SIGNALED);
    stage.write(0x1000, 4096, 0x2000);
    stage.write(0x2000, 4097, 0x3000);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (0, 3));
    let write = |call: &Call| match call.message().body {
        Body::Write(write) => (write.va - BASE_VA, write.length, matches!(write.source, Source::Inline(_))),
        other => panic!("{other:?}"),
    };
    assert_eq!(write(&calls[0]), (7, 5, true));
    assert_eq!(write(&calls[1]), (0x1000, 4096, true));
    assert_eq!(write(&calls[2]), (0x2000, 4097, false));
    let Body::Write(first) = calls[0].message().body else { panic!("{calls:?}") };
    assert_eq!(first.source, Source::Inline(b"abcde"));
    let Body::Write(last) = calls[2].message().body else { panic!("{calls:?}") };
    assert_eq!(last.source, Source::Remote { va: LOCAL_BASE + 0x3000, rkey: LKEY });
    calls.iter().for_each(|call| stage.done(call, Status::Ok));
    assert_eq!(stage.completions().len(), 3);
}

#[test]
fn small_writes_of_what_is_absent_go_by_rpc_and_hold_nothing_up() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[1]);
    stage.write(UNIT, 4096, 0);
    stage.write(0, 4096, 0x1000);
    stage.write(UNIT - 8, 8, 0x2000);
    stage.write(2 * UNIT - 8, 16, 0x3000);
    stage.write(UNIT + 0x8000, LONG, 0x4000);
    let (posts, calls) = sort(&stage.actions());
    let posts: Vec<_> = posts.iter().map(|wr| place(wr).0).collect();
    assert_eq!(posts, [0, UNIT - 8, UNIT + 0x8000]);
    let stored = |call: &Call| match call.message().body {
        Body::Write(write) => (write.va - BASE_VA, write.length),
        other => panic!("{other:?}"),
    };
    assert_eq!(calls.iter().map(stored).collect::<Vec<_>>(), [(UNIT, 4096), (2 * UNIT - 8, 16)]);
    // A READ waits for earlier writes of the same bytes.
    stage.read(UNIT + 1, 8, 0x8000);
    let (posts, more) = sort(&stage.actions());
    assert_eq!((posts.len(), more.len()), (0, 0));
    stage.done(&calls[0], Status::Ok);
    let (_, more) = sort(&stage.actions()[1..]);
    assert_eq!(more.len(), 1);
}

#[test]
fn whoever_hears_of_a_write_by_rpc_finds_it_written() {
    let mut stage = Stage::granted(Mode::RpcOnly);
    stage.write(0, 10, 0);
    stage.post(SendOp::Send, &[(0x9000, 10)], SendFlags::empty());
    stage.read(0x4000, 8, 0x8000);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (0, 1));
    stage.done(&calls[0], Status::Ok);
    let (posts, calls) = sort(&stage.actions()[1..]);
    assert_eq!((posts.len(), calls.len()), (1, 1));
}

#[test]
fn writes_by_rpc_wait_for_what_the_queue_pair_has_yet_to_do_there() {
    let mut stage = Stage::granted(Mode::RpcOnly);
    let add = SendOp::FetchAdd { va: BASE_VA + 8, rkey: RKEY, add: 1 };
    stage.post(add, &[(0x8000, 8)], SendFlags::SIGNALED);
    stage.write(16, 8, 0);
    stage.write(8, 8, 0);
    stage.write(24, 8, 0);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (1, 1), "only the first write touches nothing of it");
    stage.bring(&posts[0]);
    let (posts, calls) = sort(&stage.actions()[1..]);
    assert_eq!((posts.len(), calls.len()), (0, 2));
}

#[test]
fn what_is_not_under_way_when_something_fails_is_not_begun() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[1]);
    stage.write(UNIT, LONG, 0x3000);
    stage.read(UNIT, 100, 0x1000);
    stage.read(0, 100, 0x2000);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (2, 0), "the call waits for the write");
    stage.end(&posts[0], WcStatus::RemoteAccess);
    stage.end(&posts[1], WcStatus::Flushed);
    let flushed = WcStatus::Flushed;
    let expected = [(1001, WcStatus::RemoteAccess), (1002, flushed), (1003, flushed)];
    assert_eq!(stage.completions(), expected);
}

#[test]
fn each_access_counts_once_for_each_unit() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[1]);
    stage.read(UNIT - 1, 2 + UNIT as u32, 0);
    stage.write(UNIT, 1, 0x9000);
    stage.post(SendOp::FetchAdd { va: BASE_VA + 8, rkey: RKEY, add: 1 }, &[(0, 8)], SendFlags::empty());
    let flush = SendOp::Flush { va: BASE_VA, rkey: RKEY, length: 8, placement: 2, selectivity: 0 };
    stage.post(flush, &[], SendFlags::empty());
    while !stage.session.is_empty() {
        let actions = stage.actions();
        let wanted = actions.iter().filter(|action| !matches!(action, Action::Complete(_))).cloned();
        let (posts, calls) = sort(&wanted.collect::<Vec<_>>());
        posts.iter().for_each(|wr| stage.bring(wr));
        calls.iter().for_each(|call| stage.done(call, Status::Ok));
    }
    let counts: Vec<u32> =
        stage.region.counts().table()[..4].iter().map(|count| count.load(Ordering::Relaxed)).collect();
    // One READ was for the region's grant.
    assert_eq!(counts, [1 + 1 + 1, 1 + 1, 1, 0]);
}

#[test]
fn memory_that_cannot_be_looked_at_is_a_local_error() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.read(0, 100, 0);
    stage.read(0, 100, 200);
    let (posts, _) = sort(&stage.actions());
    stage.local.is_gone = true;
    stage.bring(&posts[0]);
    let actions = stage.actions();
    let [Action::Break, Action::Complete(wc)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!((wc.wr_id, wc.status), (1001, WcStatus::LocalProtection));
    stage.end(&posts[1], WcStatus::Flushed);
    assert_eq!(stage.completions(), [(1002, WcStatus::Flushed)]);
    stage.read(0, 100, 0);
    assert_eq!(stage.completions(), [(1003, WcStatus::Flushed)]);
}

#[test]
fn each_refusal_has_its_status() {
    let statuses = [
        (Status::NoSuchRegion, WcStatus::RemoteAccess),
        (Status::AccessDenied, WcStatus::RemoteAccess),
        (Status::OutOfRange, WcStatus::RemoteAccess),
        (Status::Invalid, WcStatus::RemoteInvalidRequest),
        (Status::DeviceError, WcStatus::RemoteOperation),
        (Status::NoSpace, WcStatus::RemoteOperation),
        (Status::ClientMemory, WcStatus::LocalProtection),
        (Status::Unsupported, WcStatus::RemoteInvalidRequest),
    ];
    for (status, expected) in statuses {
        let mut stage = Stage::granted(Mode::OneSided);
        stage.absent(&[0]);
        stage.read(0, 100, 0);
        let (_, calls) = sort(&stage.actions());
        stage.done(&calls[0], status);
        let actions = stage.actions();
        let [Action::Break, Action::Complete(wc)] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((wc.status, wc.vendor_err, wc.qpn), (expected, status as u32, 0x77));
    }
}

#[test]
fn a_flushed_request_completes_when_the_server_can_no_longer_touch_its_memory() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[1]);
    stage.read(0, 100, 0);
    stage.read(UNIT, 100, 0x1000);
    stage.read(0, 100, 0x2000);
    let (posts, calls) = sort(&stage.actions());
    stage.end(&posts[0], WcStatus::RemoteAccess);
    assert_eq!(stage.completions(), [(1001, WcStatus::RemoteAccess)]);
    stage.end(&posts[1], WcStatus::Flushed);
    assert_eq!(stage.completions(), [], "the second one's call may still bring data");
    stage.done(&calls[0], Status::Ok);
    assert_eq!(stage.completions(), [(1002, WcStatus::Flushed), (1003, WcStatus::Flushed)]);
}

#[test]
fn work_requests_that_cannot_be_posted_are_flushed() {
    let mut stage = Stage::granted(Mode::OneSided);
    (0..3).for_each(|index| stage.read(index * 4096, 100, index * 100));
    let (posts, _) = sort(&stage.actions());
    assert!(stage.session.handle_refused(posts[1].wr_id));
    assert!(stage.session.handle_refused(posts[2].wr_id));
    assert!(!stage.session.handle_refused(posts[2].wr_id));
    stage.fill(&posts[0], &[]);
    stage.bring(&posts[0]);
    let actions = stage.actions();
    assert!(matches!(actions[0], Action::Break));
    let statuses = actions[1..].iter().map(|action| match action {
        Action::Complete(wc) => (wc.wr_id, wc.status),
        other => panic!("{other:?}"),
    });
    let flushed = WcStatus::Flushed;
    let expected = [(1001, WcStatus::Success), (1002, flushed), (1003, flushed)];
    assert_eq!(statuses.collect::<Vec<_>>(), expected);
}

#[test]
fn after_reset_nothing_is_left_but_what_the_server_may_still_do() {
    let mut stage = Stage::granted(Mode::OneSided);
    stage.absent(&[1]);
    stage.read(0, 100, 0);
    stage.read(UNIT, 100, 0x1000);
    let (posts, calls) = sort(&stage.actions());
    stage.session.reset();
    assert!(stage.session.is_empty());
    assert_eq!(stage.session.mode(), None);
    assert_eq!(stage.session.calls_in_flight(), 1);
    let wc = Wc { wr_id: posts[0].wr_id, ..Wc::default() };
    assert!(!stage.session.handle_completion(&wc, &stage.local), "it is of the time before");
    stage.done(&calls[0], Status::DeviceError);
    assert_eq!(stage.session.calls_in_flight(), 0);
    stage.read(0, 100, 0);
    let (posts, _) = sort(&stage.actions());
    stage.bring(&posts[0]);
    assert_eq!(stage.completions(), [(1003, WcStatus::Success)]);
}

#[test]
fn queues_are_no_longer_than_they_may_be() {
    let mut stage = Stage::with(|config| (config.request_count_max, config.post_count_max) = (3, 2));
    stage.session.start(Mode::OneSided, 0x88);
    (0..3).for_each(|index| stage.read(index * 4096, 100, index * 100));
    let wr = SendWr {
        wr_id: 9,
        op: SendOp::Send,
        payload: Payload::Sges(Default::default()),
        flags: SendFlags::empty(),
        target: None,
    };
    assert_eq!(stage.session.post(wr, &Knowledge::Plain), Err(PostError::QueueFull));
    let (posts, _) = sort(&stage.actions());
    assert_eq!(posts.len(), 2);
    stage.fill(&posts[0], &[]);
    stage.bring(&posts[0]);
    let actions = stage.actions();
    assert!(matches!(&actions[..], [Action::Complete(_), Action::Post(_)]), "{actions:?}");
}

#[test]
fn regions_that_the_server_wants_to_be_plain_are_passed_on() {
    let mut stage = Stage::new();
    let description = RegionDescription { mode: Mode::Plain, ..*stage.region.description() };
    stage.known = Knowledge::Extended(Arc::new(Region::new(RKEY, description)));
    stage.session.start(Mode::OneSided, 0x88);
    stage.read(100, 100_000, 0);
    let (posts, calls) = sort(&stage.actions());
    assert_eq!((posts.len(), calls.len()), (1, 0));
}
