//! A network that accepts no packets for a while, or takes its time: receiving goes on, nothing is lost, nothing is sent
//! out of order, and no thread spins.

mod common;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use common::*;
use terrace_fabric::sim::{SimConfig, SimNet, SimPort};
use terrace_fabric::{PortCounters, RxBatch, TxBatch};
use terrace_nic::*;

/// Holds one call of `transmit` up.
struct Pause {
    is_due: AtomicBool,
    /// The call and the test meet here when it is held up, and when it goes on.
    begun: Barrier,
    ended: Barrier,
}

/// A port whose sending can be blocked, or paused.
struct GatedPort {
    inner: SimPort,
    shut: Arc<AtomicBool>,
    pause: Arc<Pause>,
    /// Calls of `transmit`.
    tries: Arc<AtomicU64>,
    /// One for each address, if an engine is to wait for them.
    sockets: Vec<UnixDatagram>,
}

impl GatedPort {
    fn new(inner: SimPort, shut: Arc<AtomicBool>) -> GatedPort {
        let pause = Pause { is_due: AtomicBool::new(false), begun: Barrier::new(2), ended: Barrier::new(2) };
        GatedPort { inner, shut, pause: Arc::new(pause), tries: Arc::default(), sockets: Vec::new() }
    }
}

impl Port for GatedPort {
    fn gids(&self) -> &[Gid] {
        self.inner.gids()
    }
    fn instance(&self) -> u8 {
        self.inner.instance()
    }
    fn mtu_limit(&self) -> u32 {
        self.inner.mtu_limit()
    }
    fn receive_buffer_bytes(&self) -> usize {
        self.inner.receive_buffer_bytes()
    }
    fn counters(&self) -> &PortCounters {
        self.inner.counters()
    }
    fn transmit(&self, tx: &mut TxBatch) -> bool {
        self.tries.fetch_add(1, Ordering::Relaxed);
        if self.pause.is_due.swap(false, Ordering::SeqCst) {
            self.pause.begun.wait();
            self.pause.ended.wait();
        }
        !self.shut.load(Ordering::SeqCst) && self.inner.transmit(tx)
    }
    fn receive(&self, rx: &mut RxBatch) -> usize {
        self.inner.receive(rx)
    }
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().map(|socket| socket.as_fd()).chain(self.inner.descriptors()).collect()
    }
    fn sending_descriptor(&self, gid_index: u8) -> Option<BorrowedFd<'_>> {
        self.sockets.get(usize::from(gid_index)).map(|socket| socket.as_fd())
    }
    fn activate(&self, gid_index: u8) {
        self.inner.activate(gid_index);
    }
    fn join(&self, group: IpAddr) -> io::Result<()> {
        self.inner.join(group)
    }
    fn leave(&self, group: IpAddr) {
        self.inner.leave(group);
    }
}

struct World {
    net: SimNet,
    clock: Arc<ManualClock>,
    a: Node,
    b: Node,
    /// Blocks sending at `a`.
    shut: Arc<AtomicBool>,
    /// Pauses it.
    pause: Arc<Pause>,
}

fn world() -> World {
    let net = SimNet::new(1, SimConfig::default());
    let clock = Arc::new(ManualClock::new());
    let shut = Arc::new(AtomicBool::new(false));
    let port = |last| net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
    let gated = GatedPort::new(port(1), shut.clone());
    let pause = gated.pause.clone();
    let a = Node::with(DeviceConfig::simulated(Box::new(gated), clock.clone(), 1), 1 << 18);
    let b = Node::with(DeviceConfig::simulated(Box::new(port(2)), clock.clone(), 2), 1 << 18);
    World { net, clock, a, b, shut, pause }
}

impl World {
    /// Advances the time by a millisecond, far less than an ACK timeout.
    fn run(&self) {
        self.run_nodes(&[&self.a, &self.b]);
    }

    /// The same with progress at these nodes only.
    fn run_nodes(&self, nodes: &[&Node]) {
        for _ in 0..1000 {
            let now = self.net.now() + 1000;
            self.net.advance_to(now);
            self.clock.set(Time(now));
            for node in nodes {
                node.device.step(Time(now));
            }
        }
    }
}

#[test]
fn packets_that_the_network_did_not_take_leave_later_and_in_order() {
    let world = world();
    let (a, b) = (&world.a, &world.b);
    let (qa, qb) = rc_pair(a, b);
    world.shut.store(true, Ordering::SeqCst);
    for index in 0..20u8 {
        a.memory.fill(usize::from(index) * 8, &[index; 8]);
        qb.post_recv([b.recv(index.into(), u64::from(index) * 8, 8)]).expect("posted");
        qa.post_send([Ok(a.wr(index.into(), SendOp::Send, u64::from(index) * 8, 8))]).expect("posted");
    }
    world.run();
    assert_eq!(b.cq.poll(64, &mut |_| ()), Ok(0), "nothing has left");
    assert!(!a.device.progress(), "there is nothing to do while the network takes nothing");

    world.shut.store(false, Ordering::SeqCst);
    world.run();
    let mut received = Vec::new();
    b.cq.poll(64, &mut |wc| received.push((wc.wr_id, wc.status))).expect("healthy");
    let expected: Vec<_> = (0..20).map(|index| (index, WcStatus::Success)).collect();
    assert_eq!(received, expected);
    assert_eq!(a.cq.poll(64, &mut |wc| assert_eq!(wc.status, WcStatus::Success)), Ok(20));
    assert_eq!((qa.counters().retransmits, qb.counters().sequence_naks_sent), (0, 0));
}

/// While one thread has a queue pair's packets under way, another one leaves what it has posted to it.
#[test]
fn a_request_posted_while_another_thread_sends_leaves_with_that_thread() {
    let world = world();
    let (a, b) = (&world.a, &world.b);
    let (qa, qb) = rc_pair(a, b);
    for wr_id in 0..2 {
        qb.post_recv([b.recv(wr_id, wr_id * 8, 8)]).expect("posted");
    }
    world.pause.is_due.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| qa.post_send([Ok(a.wr(0, SendOp::Send, 0, 8))]).expect("posted"));
        world.pause.begun.wait();
        qa.post_send([Ok(a.wr(1, SendOp::Send, 8, 8))]).expect("posted");
        world.pause.ended.wait();
    });
    // Without progress at `a`, nobody else sends it.
    world.run_nodes(&[b]);
    let mut received = Vec::new();
    b.cq.poll(2, &mut |wc| received.push((wc.wr_id, wc.status))).expect("healthy");
    assert_eq!(received, [(0, WcStatus::Success), (1, WcStatus::Success)]);
}

#[test]
fn receiving_never_waits_for_sending() {
    let world = world();
    let (a, b) = (&world.a, &world.b);
    let (_qa, qb) = rc_pair(a, b);
    world.shut.store(true, Ordering::SeqCst);
    b.memory.fill(0, b"arrives!");
    let write = SendOp::Write { va: a.memory.addr() + 100, rkey: a.mr.rkey() };
    qb.post_send([Ok(b.wr(1, write, 0, 8))]).expect("posted");
    world.run();
    assert_eq!(a.memory.bytes(100, 8), b"arrives!");
    assert_eq!(b.cq.poll(1, &mut |_| ()), Ok(0), "the acknowledgement has not left");
    world.shut.store(false, Ordering::SeqCst);
    world.run();
    assert_eq!(b.cq.poll(1, &mut |wc| assert_eq!(wc.status, WcStatus::Success)), Ok(1));
}

/// A packet that the network has not taken cannot be lost: the peer's answer is waited for when it has left.
#[test]
fn a_long_blockage_uses_no_retries() {
    for retry_cnt in [0, 7] {
        let world = world();
        let (a, b) = (&world.a, &world.b);
        let tuning = Tuning { timeout: 14, retry_cnt, ..Tuning::default() };
        let (qa, _qb) = pair_on(a, b, QpType::Rc, &tuning);
        a.memory.fill(0, b"in time!");
        let write = SendOp::Write { va: b.memory.addr() + 100, rkey: b.mr.rkey() };
        world.shut.store(true, Ordering::SeqCst);
        qa.post_send([Ok(a.wr(1, write, 0, 8))]).expect("posted");
        for _ in 0..500 {
            let now = world.net.now() + 10_000_000;
            world.net.advance_to(now);
            world.clock.set(Time(now));
            a.device.step(Time(now));
        }
        assert_eq!(a.cq.poll(1, &mut |wc| panic!("{:?}", wc.status)), Ok(0));
        world.shut.store(false, Ordering::SeqCst);
        world.run();
        assert_eq!(a.cq.poll(1, &mut |wc| assert_eq!(wc.status, WcStatus::Success)), Ok(1));
        assert_eq!(b.memory.bytes(100, 8), b"in time!");
    }
}

/// The answer is waited for from the time at which the packet has left.
#[test]
fn a_blockage_that_ends_just_before_the_timeout_uses_no_retry() {
    let world = world();
    let (a, b) = (&world.a, &world.b);
    let (qa, _qb) = pair_on(a, b, QpType::Rc, &Tuning { timeout: 14, retry_cnt: 0, ..Tuning::default() });
    let write = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    world.shut.store(true, Ordering::SeqCst);
    qa.post_send([Ok(a.wr(1, write, 0, 8))]).expect("posted");
    // The timeout is 67 ms.
    (0..66).for_each(|_| world.run_nodes(&[a]));
    world.shut.store(false, Ordering::SeqCst);
    (0..5).for_each(|_| world.run_nodes(&[a]));
    world.run();
    assert_eq!(a.cq.poll(1, &mut |wc| assert_eq!(wc.status, WcStatus::Success)), Ok(1));
}

/// Otherwise a program hangs on an interface that takes nothing for hours.
#[test]
fn a_blockage_without_end_fails_the_requests() {
    let world = world();
    let (a, b) = (&world.a, &world.b);
    let tuning = Tuning { timeout: 14, ..Tuning::default() };
    let (qa, _qb) = pair_on(a, b, QpType::Rc, &tuning);
    let write = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    world.shut.store(true, Ordering::SeqCst);
    qa.post_send([Ok(a.wr(1, write, 0, 8))]).expect("posted");
    for _ in 0..1500 {
        let now = world.net.now() + 10_000_000;
        world.net.advance_to(now);
        world.clock.set(Time(now));
        a.device.step(Time(now));
    }
    assert_eq!(a.cq.poll(1, &mut |wc| assert_eq!(wc.status, WcStatus::RetryExceeded)), Ok(1));
}

/// A socket that takes no more, and its receiver, which takes nothing.
fn full_socket() -> [UnixDatagram; 2] {
    let (socket, receiver) = UnixDatagram::pair().expect("sockets");
    socket.set_nonblocking(true).expect("nonblocking");
    while socket.send(&[0; 1024]).is_ok() {}
    [socket, receiver]
}

/// The other address's socket takes packets.
#[test]
fn an_engine_does_not_spin_while_one_address_is_blocked() {
    let net = SimNet::new(1, SimConfig::default());
    let port = |last| net.port(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)));
    let ([full, _receiver], (free, _other)) = (full_socket(), UnixDatagram::pair().expect("sockets"));
    let shut = Arc::new(AtomicBool::new(true));
    let gated = GatedPort { sockets: vec![full, free], ..GatedPort::new(port(1), shut) };
    let tries = gated.tries.clone();
    let a = Node::with(DeviceConfig::new(Box::new(gated)), 1 << 12);
    let clock = Arc::new(ManualClock::new());
    let b = Node::with(DeviceConfig::simulated(Box::new(port(2)), clock, 2), 1 << 12);
    let (qa, _qb) = rc_pair(&a, &b);
    let write = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send([Ok(a.wr(1, write, 0, 8))]).expect("posted");
    std::thread::sleep(Duration::from_millis(500));
    let tries = tries.load(Ordering::Relaxed);
    assert!(tries < 5000, "{tries} tries in half a second");
}

#[test]
fn a_queue_pair_is_destroyed_while_its_packets_wait() {
    let world = world();
    let (a, b) = (&world.a, &world.b);
    let (qa, _qb) = rc_pair(a, b);
    let (other, _other_b) = rc_pair(a, b);
    world.shut.store(true, Ordering::SeqCst);
    let write = SendOp::Write { va: b.memory.addr(), rkey: b.mr.rkey() };
    qa.post_send([Ok(a.wr(1, write, 0, 8))]).expect("posted");
    other.post_send([Ok(a.wr(2, write, 0, 8))]).expect("posted");
    qa.destroy().expect("destroyed");
    world.shut.store(false, Ordering::SeqCst);
    world.run();
    let mut done = Vec::new();
    a.cq.poll(8, &mut |wc| done.push(wc.wr_id)).expect("healthy");
    assert_eq!(done, [2]);
}
