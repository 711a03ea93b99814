//! Regions with absent memory: peers wait, get the signature page, or get an RNR NAK, as the region and the queue pair
//! are configured. Nothing completes before its data is there.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use common::cells::Bytes;
use common::finally::Finally;
use common::pager::TestPager;
use common::units::UNIT_BYTES;
use common::*;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_hostmem::{AtomicOp, HostRange};
use terrace_memory::{AccessError, Pager, Transfer, Translation, Waker, WholeRange};
use terrace_nic::*;

/// Bytes of the paged region: a border between two units lies in the middle.
const LEN: usize = 512 << 10;
const BORDER: usize = LEN / 2;
const MAGIC: u8 = 0xa5;
const FLUSH: u32 = 1 << 8 | 1 << 9;

/// A paged region of a node.
struct Paged {
    cells: Arc<[AtomicU8]>,
    pager: Arc<TestPager>,
    mr: Arc<Mr>,
}

impl Paged {
    /// All absent; the content is a pattern of bytes.
    fn new(node: &Node, policy: RegionPolicy) -> Paged {
        let cells: Arc<[AtomicU8]> = pattern(LEN, 1).into_iter().map(AtomicU8::new).collect();
        let addr = cells.as_ptr() as u64;
        let memory = HostRange { addr, len: LEN as u64 };
        let pager = TestPager::new(memory, UNIT_BYTES - BORDER as u64, Box::new(Bytes(cells.clone())));
        let paging = Paging { pager: pager.clone(), pattern: Arc::new([MAGIC; 4096]), policy };
        let request = MrRequest {
            addr,
            length: LEN as u64,
            iova: 0x10_0000,
            access: REMOTE_ALL | FLUSH,
            paging: Some(paging),
        };
        let mr = node.pd.reg_mr(request).expect("a region");
        Paged { cells, pager, mr }
    }

    fn read(&self, offset: usize) -> SendOp {
        SendOp::Read { va: 0x10_0000 + offset as u64, rkey: self.mr.rkey() }
    }

    fn write(&self, offset: usize) -> SendOp {
        SendOp::Write { va: 0x10_0000 + offset as u64, rkey: self.mr.rkey() }
    }

    fn content(&self, offset: usize, len: usize) -> Vec<u8> {
        self.pager.peek(self.cells.as_ptr() as u64 + offset as u64, len)
    }

    fn wait_for_accesses(&self, count: u64) {
        wait_until("the pager is asked", || self.pager.counts().1 >= count);
    }

    fn complete_all(&self) {
        while self.pager.complete_one(Ok(())) {}
    }
}

impl Drop for Paged {
    fn drop(&mut self) {
        if self.mr.dereg().is_err() {
            std::mem::forget(self.cells.clone());
        }
    }
}

/// Two nodes over UDP, connected, with a paged region at the second one.
struct Pair {
    a: Node,
    qa: Arc<QueuePair>,
    qb: Arc<QueuePair>,
    paged: Paged,
    b: Node,
}

fn pair(policy: RegionPolicy) -> Pair {
    pair_with(Node::udp(), Node::udp(), policy)
}

fn pair_with(a: Node, b: Node, policy: RegionPolicy) -> Pair {
    let (qa, qb) = pair_on(&a, &b, QpType::Rc, &Tuning { timeout: 18, ..Tuning::default() });
    allow(&qb, REMOTE_ALL | FLUSH);
    let paged = Paged::new(&b, policy);
    Pair { a, qa, qb, paged, b }
}

/// Sets the access rights of a queue pair's peer.
fn allow(qp: &Arc<QueuePair>, access: u32) {
    let attr = QpAttr { state: QpState::Rts, access, ..QpAttr::default() };
    qp.modify(&attr, QpAttrMask::STATE | QpAttrMask::ACCESS_FLAGS).expect("RTS to RTS");
}

/// Checks that nothing completes for a while.
fn expect_silence(cq: &Cq) {
    for _ in 0..2000 {
        cq.poll(1, &mut |wc| panic!("completed too early: {wc:?}")).expect("a healthy queue");
    }
}

fn ok(wcs: &[Wc], ids: impl IntoIterator<Item = u64>) {
    let got: Vec<_> = wcs.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    let expected: Vec<_> = ids.into_iter().map(|id| (id, WcStatus::Success)).collect();
    assert_eq!(got, expected);
}

#[test]
fn a_read_of_absent_memory_waits_for_its_data() {
    let Pair { a, qa, paged, b: _b, .. } = pair(RegionPolicy::Wait);
    qa.post_send([Ok(a.wr(1, paged.read(100), 0, 8000))]).expect("posted");
    paged.wait_for_accesses(1);
    expect_silence(&a.cq);
    paged.complete_all();
    ok(&a.completions(1), [1]);
    assert_eq!(a.memory.bytes(0, 8000), pattern(LEN, 1)[100..8100]);
}

#[test]
fn a_long_read_across_present_and_absent_units_brings_all_of_it() {
    let Pair { a, qa, paged, b: _b, .. } = pair(RegionPolicy::Wait);
    assert!(paged.pager.admit(1));
    qa.post_send([Ok(a.wr(1, paged.read(1000), 0, (LEN - 1000) as u32))]).expect("posted");
    let done = std::cell::Cell::new(false);
    wait_until("the READ is complete", || {
        paged.pager.complete_latest();
        a.cq.poll(1, &mut |wc| done.set(wc.status == WcStatus::Success)).expect("a healthy queue");
        done.get()
    });
    assert_eq!(a.memory.bytes(0, LEN - 1000), pattern(LEN, 1)[1000..]);
}

#[test]
fn sixteen_reads_are_fetched_together_and_answered_in_order() {
    let Pair { a, qa, paged, b: _b, .. } = pair(RegionPolicy::Wait);
    let wrs = (0..16).map(|id| Ok(a.wr(id, paged.read(id as usize * 5000), id * 4096, 4096)));
    qa.post_send(wrs).expect("posted");
    // All READs reach the pager before any of them is answered.
    paged.wait_for_accesses(16);
    assert_eq!(paged.pager.counts().0, 16);
    // In reverse order.
    for _ in 0..15 {
        assert!(paged.pager.complete_latest());
    }
    expect_silence(&a.cq);
    paged.complete_all();
    ok(&a.completions(16), 0..16);
    for id in 0..16 {
        assert_eq!(a.memory.bytes(id * 4096, 4096), pattern(LEN, 1)[id * 5000..][..4096], "READ {id}");
    }
}

#[test]
fn a_write_is_acknowledged_when_it_is_done_and_a_read_behind_it_sees_it() {
    let Pair { a, qa, paged, b: _b, .. } = pair(RegionPolicy::Wait);
    let data = pattern(10_000, 77);
    a.memory.fill(0, &data);
    let (write, read) =
        (a.wr(1, paged.write(BORDER - 5000), 0, 10_000), a.wr(2, paged.read(BORDER - 5000), 20_000, 10_000));
    qa.post_send([Ok(write), Ok(read)]).expect("posted");
    paged.wait_for_accesses(11);
    expect_silence(&a.cq);
    paged.complete_all();
    ok(&a.completions(2), [1, 2]);
    assert_eq!(a.memory.bytes(20_000, 10_000), data);
    assert_eq!(paged.content(BORDER - 5000, 10_000), data);
}

#[test]
fn a_message_behind_a_write_completes_when_the_write_is_done() {
    let Pair { a, qa, qb, paged, b } = pair(RegionPolicy::Wait);
    qb.post_recv([b.recv(7, 0, 100), b.recv(8, 0, 0)]).expect("posted");
    let immediate = SendOp::WriteImm { va: 0x10_0000 + 9000, rkey: paged.mr.rkey(), imm: 5 };
    let wrs = [a.wr(1, paged.write(0), 0, 3000), a.wr(2, SendOp::Send, 0, 100), a.wr(3, immediate, 0, 3000)];
    qa.post_send(wrs.map(Ok)).expect("posted");
    paged.wait_for_accesses(6);
    expect_silence(&b.cq);
    expect_silence(&a.cq);
    for _ in 0..3 {
        assert!(paged.pager.complete_one(Ok(())));
    }
    ok(&b.completions(1), [7]);
    ok(&a.completions(2), [1, 2]);
    expect_silence(&b.cq);
    paged.complete_all();
    let reported = b.completion();
    assert_eq!((reported.wr_id, reported.opcode, reported.imm), (8, WcOpcode::RecvRdmaWithImm, 5));
    ok(&a.completions(1), [3]);
}

#[test]
fn atomics_and_flushes_are_carried_out_by_the_pager_after_the_writes_before_them() {
    let Pair { a, qa, paged, b: _b, .. } = pair(RegionPolicy::Wait);
    let (va, rkey) = (0x10_0000 + 4096, paged.mr.rkey());
    a.memory.fill(0, &41u64.to_ne_bytes());
    let flush = SendOp::Flush { va, rkey, length: 8, placement: 2, selectivity: 0 };
    let mut flush = a.wr(4, flush, 0, 0);
    flush.payload = Payload::Sges(SgeList::new());
    let wrs = [
        a.wr(1, SendOp::Write { va, rkey }, 0, 8),
        a.wr(2, SendOp::FetchAdd { va, rkey, add: 1 }, 8, 8),
        a.wr(3, SendOp::CompareSwap { va, rkey, compare: 42, swap: 99 }, 16, 8),
        flush,
        a.wr(5, paged.read(4096), 24, 8),
    ];
    qa.post_send(wrs.map(Ok)).expect("posted");
    let done = std::cell::RefCell::new(Vec::new());
    wait_until("everything is complete", || {
        paged.pager.complete_one(Ok(()));
        a.cq.poll(8, &mut |wc| done.borrow_mut().push(*wc)).expect("a healthy queue");
        done.borrow().len() == 5
    });
    ok(&done.borrow(), 1..=5);
    assert_eq!([8, 16, 24].map(|at| a.memory.u64_at(at)), [41, 42, 99]);
}

#[test]
fn a_failed_transfer_is_the_peers_error() {
    let failures = [
        (AccessError::Flush, WcStatus::RemoteOperation),
        (AccessError::Device, WcStatus::RemoteOperation),
        (AccessError::NoSpace, WcStatus::RemoteOperation),
        (AccessError::Fault, WcStatus::RemoteAccess),
    ];
    for (error, status) in failures {
        for reads in [true, false] {
            let Pair { a, qa, paged, b: _b, .. } = pair(RegionPolicy::Wait);
            let op = if reads { paged.read(0) } else { paged.write(0) };
            qa.post_send([Ok(a.wr(1, op, 0, 100))]).expect("posted");
            paged.wait_for_accesses(1);
            assert!(paged.pager.complete_one(Err(error)));
            let wc = a.completion();
            assert_eq!((wc.wr_id, wc.status), (1, status), "{error}, reads: {reads}");
        }
    }
}

#[test]
fn magic_answers_at_once_with_the_pattern() {
    let Pair { a, qa, qb, paged, b: _b } = pair(RegionPolicy::Wait);
    qb.set_absence(paged.mr.rkey(), Absence::Magic);
    assert!(paged.pager.admit(1));
    qa.post_send([Ok(a.wr(1, paged.read(BORDER - 3000), 0, 6000))]).expect("posted");
    ok(&a.completions(1), [1]);
    assert_eq!(a.memory.bytes(0, 3000), vec![MAGIC; 3000]);
    assert_eq!(a.memory.bytes(3000, 3000), pattern(LEN, 1)[BORDER..BORDER + 3000]);
    assert_eq!(paged.pager.counts().1, 0);
    // Writes wait for the pager all the same.
    qa.post_send([Ok(a.wr(2, paged.write(0), 3000, 100))]).expect("posted");
    paged.wait_for_accesses(1);
    paged.complete_all();
    ok(&a.completions(1), [2]);
    assert_eq!(paged.content(0, 100), pattern(LEN, 1)[BORDER..BORDER + 100]);
}

#[test]
fn a_commodity_nic_returns_signature_pages_and_has_a_black_hole() {
    let port = PortConfig {
        address: Some(LOOPBACK),
        path: PathChoice::Udp,
        model: NicModel::Commodity,
        ..PortConfig::default()
    };
    let b = Node::with(port.device().expect("a port on the loopback"), 1 << 20);
    let Pair { a, qa, paged, b: _b, .. } = pair_with(Node::udp(), b, RegionPolicy::Wait);
    assert!(paged.pager.admit(1));
    qa.post_send([Ok(a.wr(1, paged.read(BORDER - 3000), 0, 6000))]).expect("posted");
    ok(&a.completions(1), [1]);
    assert_eq!(a.memory.bytes(0, 3000), vec![MAGIC; 3000]);
    assert_eq!(a.memory.bytes(3000, 3000), pattern(LEN, 1)[BORDER..BORDER + 3000]);
    let before = paged.content(BORDER - 1000, 1000);
    qa.post_send([Ok(a.wr(2, paged.write(BORDER - 1000), 0, 3000))]).expect("posted");
    let add = SendOp::FetchAdd { va: 0x10_0000, rkey: paged.mr.rkey(), add: 1 };
    qa.post_send([Ok(a.wr(3, add, 8192, 8))]).expect("posted");
    ok(&a.completions(2), [2, 3]);
    assert_eq!(a.memory.bytes(8192, 8), vec![MAGIC; 8]);
    assert_eq!(paged.content(BORDER - 1000, 1000), before);
    assert_eq!(paged.content(BORDER, 2000), a.memory.bytes(1000, 2000));
    assert_eq!(paged.pager.counts().1, 0, "the pager is not asked");
}

/// The next peer may not know signature pages.
#[test]
fn reset_forgets_that_the_peer_wanted_patterns() {
    let Pair { a, qa, qb, paged, b } = pair(RegionPolicy::Wait);
    qb.set_absence(paged.mr.rkey(), Absence::Magic);
    let tuning = Tuning { timeout: 18, ..Tuning::default() };
    for (qp, peer, peer_qpn) in [(&qa, &b, qb.qpn()), (&qb, &a, qa.qpn())] {
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        qp.modify(&reset, QpAttrMask::STATE).expect("RESET");
        connect(qp, peer, peer_qpn, &tuning);
    }
    qa.post_send([Ok(a.wr(1, paged.read(0), 0, 100))]).expect("posted");
    paged.wait_for_accesses(1);
    paged.complete_all();
    ok(&a.completions(1), [1]);
    assert_eq!(a.memory.bytes(0, 100), pattern(LEN, 1)[..100]);
}

#[test]
fn a_faulting_region_answers_rnr_until_the_memory_is_present() {
    let Pair { a, qa, qb, paged, b: _b } = pair(RegionPolicy::Fault);
    qa.post_send([Ok(a.wr(1, paged.read(0), 0, 4096)), Ok(a.wr(2, paged.write(8192), 8192, 100))])
        .expect("posted");
    paged.wait_for_accesses(2);
    expect_silence(&a.cq);
    assert!(qb.counters().rnr_naks_sent >= 2);
    assert_eq!(qb.counters().fetches + qb.counters().puts, 0);
    paged.complete_all();
    assert!(paged.pager.admit(0));
    ok(&a.completions(2), [1, 2]);
    assert_eq!(a.memory.bytes(0, 4096), pattern(LEN, 1)[..4096]);
    assert_eq!(paged.content(8192, 100), a.memory.bytes(8192, 100));
}

#[test]
fn a_pager_without_memory_is_called_again_when_it_has_some() {
    let Pair { a, qa, paged, b: _b, .. } = pair(RegionPolicy::Wait);
    paged.pager.set_habits(2, Box::new(|| 0));
    let wrs = (0..16u64).map(|id| {
        let op = if id % 3 == 0 { paged.write(id as usize * 5000) } else { paged.read(id as usize * 5000) };
        Ok(a.wr(id, op, id * 4096, 4096))
    });
    qa.post_send(wrs).expect("posted");
    let done = std::cell::RefCell::new(Vec::new());
    wait_until("everything is complete", || {
        paged.pager.complete_one(Ok(()));
        a.cq.poll(16, &mut |wc| done.borrow_mut().push(*wc)).expect("a healthy queue");
        done.borrow().len() == 16
    });
    ok(&done.borrow(), 0..16);
    for id in (0..16).filter(|id| id % 3 != 0) {
        assert_eq!(a.memory.bytes(id * 4096, 4096), pattern(LEN, 1)[id * 5000..][..4096], "READ {id}");
    }
}

#[test]
fn queue_pairs_and_devices_end_while_transfers_are_under_way() {
    for ends_device in [false, true] {
        let Pair { a, qa, qb, paged, b } = pair(RegionPolicy::Wait);
        qb.post_recv([b.recv(9, 0, 10)]).expect("posted");
        let wrs =
            [a.wr(1, paged.read(0), 0, 100), a.wr(2, paged.write(0), 0, 100), a.wr(3, SendOp::Send, 0, 10)];
        qa.post_send(wrs.map(Ok)).expect("posted");
        paged.wait_for_accesses(2);
        let weak = Arc::downgrade(&qb);
        if ends_device {
            b.device.close();
        } else {
            qb.destroy().expect("no events");
        }
        drop(qb);
        paged.complete_all();
        assert_eq!(paged.pager.counts(), (0, 2));
        if ends_device {
            assert!(weak.upgrade().is_none(), "nobody keeps the queue pair");
        }
    }
}

#[test]
fn messages_that_wait_for_writes_are_flushed_in_order_when_the_queue_pair_fails() {
    let Pair { a, qa, qb, paged, b } = pair(RegionPolicy::Wait);
    qb.post_recv([b.recv(1, 0, 100), b.recv(2, 0, 100), b.recv(3, 0, 100)]).expect("posted");
    let wrs = [a.wr(1, paged.write(0), 0, 100), a.wr(2, SendOp::Send, 0, 100), a.wr(3, SendOp::Send, 0, 100)];
    qa.post_send(wrs.map(Ok)).expect("posted");
    paged.wait_for_accesses(1);
    wait_until("all have arrived", || qb.counters().rx_packets >= 3);
    expect_silence(&b.cq);
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    qb.modify(&error, QpAttrMask::STATE).expect("ERR");
    let flushed = b.completions(3);
    assert_eq!(
        [0, 1, 2].map(|at| (flushed[at].wr_id, flushed[at].status)),
        [1, 2, 3].map(|id| (id, WcStatus::Flushed))
    );
    paged.complete_all();
    expect_silence(&b.cq);
}

/// Ends a pager's accesses whenever the device makes progress.
struct Server {
    pager: Arc<TestPager>,
    calls: AtomicUsize,
}

impl ProgressCallback for Server {
    fn advance(&self) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.pager.complete_due(0) > 0
    }
}

/// Two nodes on a network without loss, and their clock.
fn simulated() -> (SimNet, Arc<ManualClock>, [Node; 2]) {
    let net = SimNet::new(5, SimConfig::default());
    let clock = Arc::new(ManualClock::new());
    let nodes = [1, 2].map(|last| {
        let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
        let config = DeviceConfig::simulated(Box::new(port), clock.clone(), u64::from(last));
        Node::with(config, 1 << 20)
    });
    (net, clock, nodes)
}

#[test]
fn a_callback_serves_misses_in_a_simulation() {
    let (net, clock, [a, b]) = simulated();
    let (qa, _qb) = rc_pair(&a, &b);
    let paged = Paged::new(&b, RegionPolicy::Wait);
    let server = Arc::new(Server { pager: paged.pager.clone(), calls: AtomicUsize::new(0) });
    b.device.attach(server.clone());
    a.memory.fill(0, &pattern(9000, 3));
    let wrs = [a.wr(1, paged.write(50), 0, 9000), a.wr(2, paged.read(50), 10_000, 9000)];
    qa.post_send(wrs.map(Ok)).expect("posted");
    let mut done = Vec::new();
    while done.len() < 2 {
        for node in [&a, &b] {
            node.device.step(Time(net.now()));
        }
        a.cq.take(2, &mut |wc| done.push(*wc)).expect("a healthy queue");
        let deadlines = [&a, &b].into_iter().filter_map(|node| node.device.next_deadline().map(|at| at.0));
        let next = deadlines.chain(net.next_delivery()).min().expect("something happens");
        assert!(net.now() < 1_000_000_000, "too late");
        net.advance_to(next.max(net.now()));
        clock.set(Time(net.now()));
    }
    ok(&done, [1, 2]);
    assert_eq!(a.memory.bytes(10_000, 9000), pattern(9000, 3));
    assert!(server.calls.load(Ordering::Relaxed) > 0);
    b.device.close();
    assert_eq!(Arc::strong_count(&server), 1, "a closed device lets its callbacks go");
}

/// A pager of zeros. The first access ends when the test says so; each later one ends right after a check that finds it
/// still under way.
#[derive(Debug)]
struct Sly {
    range: WholeRange,
    asked: AtomicUsize,
    first: Arc<AtomicBool>,
    wakers: Mutex<Wakers>,
}

#[derive(Default)]
struct Wakers(Vec<Waker>);

impl std::fmt::Debug for Wakers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wakers")
    }
}

struct SlyTransfer {
    done: Arc<AtomicBool>,
    ends_when_looked_at: bool,
    waker: Waker,
}

impl std::fmt::Debug for SlyTransfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SlyTransfer")
    }
}

impl Transfer for SlyTransfer {
    fn outcome(&self) -> Option<Result<(), AccessError>> {
        if self.done.load(Ordering::SeqCst) {
            return Some(Ok(()));
        }
        if self.ends_when_looked_at {
            self.done.store(true, Ordering::SeqCst);
            (self.waker)();
        }
        None
    }

    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), AccessError> {
        out.fill(0);
        Ok(())
    }
}

impl Pager for Sly {
    fn translation(&self) -> &dyn Translation {
        &self.range
    }

    fn read(&self, _: HostRange, waker: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.wakers.lock().unwrap().0.push(waker.clone());
        let is_first = self.asked.fetch_add(1, Ordering::SeqCst) == 0;
        let done = if is_first { self.first.clone() } else { Arc::default() };
        Ok(Arc::new(SlyTransfer { done, ends_when_looked_at: !is_first, waker: waker.clone() }))
    }

    fn write(&self, _: u64, _: &[u8], _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Fault)
    }

    fn atomic(&self, _: u64, _: AtomicOp, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Fault)
    }

    fn flush(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Fault)
    }
}

#[test]
fn a_wakeup_while_the_program_posts_is_not_lost() {
    let (net, clock, [a, b]) = simulated();
    let (qa, qb) = pair_on(&a, &b, QpType::Rc, &Tuning { mtu: 4096, ..Tuning::default() });
    let sly = Arc::new(Sly {
        range: WholeRange::absent(HostRange { addr: b.memory.addr(), len: 1 << 20 }),
        asked: AtomicUsize::new(0),
        first: Arc::default(),
        wakers: Mutex::default(),
    });
    let paging = Paging { pager: sly.clone(), pattern: Arc::new([MAGIC; 4096]), policy: RegionPolicy::Wait };
    b.mr.rereg(None, None, None, Some(Some(paging))).expect("the pager covers the region");
    let step = || {
        while let Some(next) = net.next_delivery() {
            net.advance_to(next);
            clock.set(Time(net.now()));
            a.device.step(Time(net.now()));
            b.device.step(Time(net.now()));
        }
    };
    // Two segments: sixteen packets, and one.
    let read = SendOp::Read { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send([Ok(a.wr(1, read, 0, 17 << 12))]).expect("posted");
    step();
    assert_eq!(sly.asked.load(Ordering::SeqCst), 1);
    // The first segment ends and its waker is called; before the device handles the wake, the program posts.
    sly.first.store(true, Ordering::SeqCst);
    let waker = sly.wakers.lock().unwrap().0[0].clone();
    waker();
    let write = SendOp::Write { va: a.memory.addr() + (512 << 10), rkey: a.mr.rkey() };
    qb.post_send([Ok(b.wr(2, write, 0, 8))]).expect("posted");
    assert_eq!(sly.asked.load(Ordering::SeqCst), 2, "the answer goes on with what is posted");
    // No packet arrives that would schedule the queue pair.
    b.device.step(Time(net.now()));
    assert_eq!(qb.counters().tx_packets, 1 + 17, "it sleeps through a wake");
    step();
    let mut done = Vec::new();
    a.cq.take(4, &mut |wc| done.push(*wc)).expect("a healthy queue");
    ok(&done, [1]);
}

/// Where a thread stops, like one that was preempted.
#[derive(Debug)]
struct Halt {
    entered: Barrier,
    resumed: Barrier,
}

impl Halt {
    fn new() -> Arc<Halt> {
        Arc::new(Halt { entered: Barrier::new(2), resumed: Barrier::new(2) })
    }

    fn pass(&self) {
        self.entered.wait();
        self.resumed.wait();
    }
}

/// A pager that refuses accesses, and stops the thread that READs, or that drops it.
#[derive(Debug)]
struct Halting {
    range: WholeRange,
    read: Option<Arc<Halt>>,
    end: Option<Arc<Halt>>,
}

impl Halting {
    /// The pager of a node's memory.
    fn paging(node: &Node, read: Option<Arc<Halt>>, end: Option<Arc<Halt>>) -> Paging {
        let range = WholeRange::absent(HostRange { addr: node.memory.addr(), len: 1 << 20 });
        let pager = Arc::new(Halting { range, read, end });
        Paging { pager, pattern: Arc::new([MAGIC; 4096]), policy: RegionPolicy::Wait }
    }
}

impl Drop for Halting {
    fn drop(&mut self) {
        self.end.iter().for_each(|halt| halt.pass());
    }
}

impl Pager for Halting {
    fn translation(&self) -> &dyn Translation {
        &self.range
    }

    fn read(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        self.read.iter().for_each(|halt| halt.pass());
        Err(AccessError::Fault)
    }

    fn write(&self, _: u64, _: &[u8], _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Fault)
    }

    fn atomic(&self, _: u64, _: AtomicOp, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Fault)
    }

    fn flush(&self, _: HostRange, _: &Waker) -> Result<Arc<dyn Transfer>, AccessError> {
        Err(AccessError::Fault)
    }
}

/// The ACK is in the socket, but the thread that holds the receive lock is preempted.
#[test]
fn no_timer_fires_while_no_thread_can_receive() {
    let (net, clock, [a, b]) = simulated();
    let (reading, _read) = pair_on(&a, &b, QpType::Rc, &Tuning::default());
    let (taking, sending) = pair_on(&a, &b, QpType::Rc, &Tuning { retry_cnt: 0, ..Tuning::default() });
    let halt = Halt::new();
    let paging = Halting::paging(&b, Some(halt.clone()), None);
    b.mr.rereg(None, None, None, Some(Some(paging))).expect("the pager covers the region");
    let deliver = || {
        while let Some(next) = net.next_delivery() {
            net.advance_to(next);
        }
        Time(net.now())
    };
    taking.post_recv([a.recv(1, 0, 64)]).expect("posted");
    sending.post_send([Ok(b.wr(2, SendOp::Send, 0, 0))]).expect("posted");
    let read = SendOp::Read { va: b.memory.addr(), rkey: b.mr.rkey() };
    reading.post_send([Ok(a.wr(3, read, 0, 8))]).expect("posted");
    let before = deliver();
    let timeouts = std::thread::scope(|scope| {
        scope.spawn(|| b.device.step(before));
        halt.entered.wait();
        a.device.step(before);
        let late = deliver().after_ns(10_000_000_000);
        clock.set(late);
        b.device.step(late);
        let timeouts = sending.counters().timeouts;
        halt.resumed.wait();
        timeouts
    });
    assert_eq!(timeouts, 0);
    b.device.step(clock.now());
    assert_eq!(sending.counters().timeouts, 0);
    ok(&b.completions(1), [2]);
}

#[test]
fn an_idle_engine_serves_a_callback_by_its_descriptor() {
    let Pair { a, qa, paged, b, .. } = pair(RegionPolicy::Wait);
    let doorbell = Arc::new(Ringing {
        fd: rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("a descriptor"),
        pager: paged.pager.clone(),
    });
    b.device.attach(doorbell.clone());
    qa.post_send([Ok(a.wr(1, paged.read(0), 0, 100))]).expect("posted");
    paged.wait_for_accesses(1);
    // Only the second node's engine can notice the descriptor.
    rustix::io::write(&doorbell.fd, &1u64.to_ne_bytes()).expect("rung");
    ok(&a.completions(1), [1]);
}

/// Ends a pager's accesses when its descriptor is signalled.
struct Ringing {
    fd: std::os::fd::OwnedFd,
    pager: Arc<TestPager>,
}

impl ProgressCallback for Ringing {
    fn advance(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&self.fd, &mut count).is_ok() && self.pager.complete_due(0) > 0
    }

    fn descriptor(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        Some(std::os::fd::AsFd::as_fd(&self.fd))
    }
}

#[test]
fn a_region_must_lie_within_its_pagers_range() {
    let node = Node::udp();
    let paged = Paged::new(&node, RegionPolicy::Wait);
    let paging =
        Paging { pager: paged.pager.clone(), pattern: Arc::new([0; 4096]), policy: RegionPolicy::Wait };
    let range = paged.pager.translation().range();
    let end = range.addr + range.len;
    let request = MrRequest { addr: end - 8, length: 9, iova: 0, access: 1, paging: Some(paging) };
    assert!(matches!(node.pd.reg_mr(request), Err(Error::Invalid(_) | Error::Fault)));
}

/// Accesses end on another thread while units come and go: no queue pair misses its wake, and every byte is right.
#[test]
fn no_wakeup_is_lost_while_another_thread_ends_accesses() {
    const SLOTS: usize = 16;
    const SLOT_LEN: usize = 6000;
    const ROUNDS: u64 = 300;
    let (a, b) = (Node::udp(), Node::udp());
    // A missed wake shows as a timeout, or as a test that takes too long.
    let (qa, _qb) = pair_on(&a, &b, QpType::Rc, &Tuning { timeout: 22, ..Tuning::default() });
    let paged = Paged::new(&b, RegionPolicy::Wait);
    paged.pager.set_habits(12, Box::new(|| 0));
    // Slots lie on both sides of the border, and one across it.
    let place = |slot: usize| BORDER - SLOTS / 2 * SLOT_LEN + slot * SLOT_LEN - 100;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _finally = Finally(&done);
        scope.spawn(|| {
            for round in 0.. {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                if !paged.pager.complete_latest() {
                    std::thread::yield_now();
                }
                match round % 64 {
                    16 => _ = paged.pager.admit(0),
                    32 => _ = paged.pager.admit(1),
                    48 => _ = paged.pager.expel(round / 64 % 2),
                    _ => {}
                }
            }
        });
        for round in 0..ROUNDS {
            let mut wrs = Vec::new();
            for slot in 0..SLOTS {
                let from = slot * SLOT_LEN;
                a.memory.fill(from, &pattern(SLOT_LEN, (round as u8).wrapping_mul(7) ^ slot as u8));
                let (write, read) = (slot as u64 * 2, slot as u64 * 2 + 1);
                let into = (SLOTS * SLOT_LEN + from) as u64;
                wrs.push(Ok(a.wr(write, paged.write(place(slot)), from as u64, SLOT_LEN as u32)));
                wrs.push(Ok(a.wr(read, paged.read(place(slot)), into, SLOT_LEN as u32)));
            }
            qa.post_send(wrs).expect("posted");
            ok(&a.completions(2 * SLOTS), 0..2 * SLOTS as u64);
            for slot in 0..SLOTS {
                let (sent, got) = (slot * SLOT_LEN, SLOTS * SLOT_LEN + slot * SLOT_LEN);
                let same = a.memory.bytes(got, SLOT_LEN) == a.memory.bytes(sent, SLOT_LEN);
                assert!(same, "round {round}, slot {slot}");
            }
        }
    });
    assert_eq!(qa.counters().timeouts, 0);
    assert!(paged.pager.counts().1 > 0);
}

/// A change may wait for same-host peers, too.
#[test]
fn nothing_waits_for_a_region_that_is_being_changed() {
    let (_net, _clock, [a, _b]) = simulated();
    let halt = Halt::new();
    let paging = Halting::paging(&a, None, Some(halt.clone()));
    a.mr.rereg(None, None, None, Some(Some(paging))).expect("the pager covers the region");
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| a.mr.rereg(None, None, None, Some(None)));
        halt.entered.wait();
        let (sender, receiver) = channel();
        let mr = &a.mr;
        scope.spawn(move || sender.send((mr.addr(), mr.dereg())));
        let seen = receiver.recv_timeout(Duration::from_secs(10));
        let limit = Duration::from_millis(100);
        let begin = Instant::now();
        let limited = a.mr.dereg_within(limit);
        let waited = begin.elapsed();
        let patient = scope.spawn(|| a.mr.dereg_within(Duration::from_secs(60)));
        halt.resumed.wait();
        assert_eq!(changing.join().expect("no panic"), Ok(()));
        let (addr, dereg) = seen.expect("no wait");
        assert_eq!(addr, a.memory.addr());
        for refused in [dereg, limited] {
            assert!(matches!(refused, Err(Error::Busy(_))), "{refused:?}");
        }
        assert!(waited >= limit, "a caller that tries again would spin: {waited:?}");
        assert_eq!(patient.join().expect("no panic"), Ok(()));
    });
}
