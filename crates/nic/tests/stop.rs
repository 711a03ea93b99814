//! Processes that are stopped during accesses to a same-host peer's memory: other peers do not notice, and only the
//! withdrawal of a region waits, if a stopped process is accessing it. `TERRACE_STOP_ROUNDS=200` for more rounds.

mod common;
#[path = "common/paged.rs"]
mod paged;
#[path = "common/shared.rs"]
mod shared;
#[path = "common/victim.rs"]
mod victim;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::finally::Finally;
use common::*;
use paged::Paged;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shared::{Files, SharedRegion, register};
use terrace_hostmem::{HostRange, PAGE_BYTES};
use terrace_memory::{Pager, Translation, Waker};
use terrace_nic::*;
use terrace_shm::GracePeriod;
use victim::{End, Load, SHORT_RETRIES, Victim, begin, work};

const LEN: usize = 1 << 20;
/// Length of the region that is larger than its memory, twice as long.
const PAGED_BYTES: u64 = 8 << 20;
/// The longest time, in microseconds, that a child works before it is stopped.
const LIFE_US: u64 = 2000;
/// How long the bystanders' rate is measured while a child is stopped.
const WATCHED: Duration = Duration::from_millis(40);
/// Limit for an operation that waits for no other process, on a loaded machine. The test prints the time that it took.
const SOON: Duration = Duration::from_secs(10);

/// The body of the child processes; does nothing by itself.
#[test]
#[ignore = "started by the test"]
fn child() {
    victim::child(LEN);
}

/// Has pages leave and come until `stop`. Counts those that have left.
fn churn(paged: &Paged, stop: &AtomicBool, left: &AtomicU64) {
    let mut rng = StdRng::seed_from_u64(3);
    let waker: Waker = Arc::new(|| ());
    while !stop.load(Ordering::Relaxed) {
        left.fetch_add(paged.pages.evict(64) as u64, Ordering::Relaxed);
        for _ in 0..64 {
            let range = paged.region.range();
            let offset = rng.random_range(0..range.len / PAGE_BYTES) * PAGE_BYTES;
            let page = HostRange { addr: range.addr + offset, len: PAGE_BYTES };
            // Without room: the next round makes some.
            let Ok(read) = Pager::read(&*paged.region, page, &waker) else { break };
            wait_until("a page is there", || {
                paged.pages.advance();
                read.outcome().is_some()
            });
        }
    }
}

/// A queue pair of another node, connected to the target, and its count of operations.
struct Bystander {
    node: Node,
    own: Arc<QueuePair>,
    target: Arc<QueuePair>,
    /// The queue pair's own completion queue at the target.
    target_cq: Arc<Cq>,
    done: AtomicU64,
}

impl Bystander {
    fn new(target: &Node) -> Bystander {
        let node = Node::local();
        let target_cq =
            target.device.create_cq(CqInit { depth: 64, channel: None, cookie: 0 }).expect("a queue");
        let init = QpInit { recv_cq: target_cq.clone(), ..target.init(QpType::Rc) };
        let (own, there) = (node.qp(QpType::Rc), target.pd.create_qp(init).expect("a queue pair"));
        connect(&own, target, there.qpn(), &Tuning::default());
        connect(&there, &node, own.qpn(), &Tuning::default());
        Bystander { node, own, target: there, target_cq, done: AtomicU64::new(0) }
    }

    /// READs and WRITEs its own part of the target's memory, sends messages, and checks each.
    fn work(&self, target: &Node, region: (u64, u32), number: u64, stop: &AtomicBool) {
        let (own, slice) = (&self.node, number as usize * 4096);
        let (va, rkey) = (region.0 + slice as u64, region.1);
        let sent = |wr| {
            self.own.post_send([Ok(wr)]).expect("posted");
            own.completion()
        };
        for round in 0.. {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            own.memory.fill(0, &pattern(512, round as u8));
            assert_eq!(sent(own.wr(1, SendOp::Write { va, rkey }, 0, 512)).status, WcStatus::Success);
            assert_eq!(sent(own.wr(2, SendOp::Read { va, rkey }, 4096, 512)).status, WcStatus::Success);
            assert_eq!(own.memory.bytes(4096, 512), pattern(512, round as u8));
            let receive = target.recv(number, (LEN - 4096 * (number as usize + 1)) as u64, 64);
            self.target.post_recv([receive]).expect("posted");
            assert_eq!(sent(own.wr(3, SendOp::Send, 0, 64)).status, WcStatus::Success);
            assert_eq!(poll_for(&self.target_cq, 1)[0].wr_id, number);
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Results of all rounds.
#[derive(Default)]
struct Tally {
    /// Rounds in which the child was stopped in the middle of an access.
    in_access: u64,
    /// The bystanders' rate while a child is stopped, and before it begins.
    stopped: Rate,
    idle: Rate,
    /// The longest withdrawal that had no access to wait for.
    ended: Duration,
}

#[derive(Default)]
struct Rate {
    done: u64,
    took: Duration,
}

impl Rate {
    fn watch(&mut self, others: &[Bystander], act: impl FnOnce()) {
        let count = || others.iter().map(|other| other.done.load(Ordering::Relaxed)).sum::<u64>();
        let (before, started) = (count(), Instant::now());
        act();
        self.done += count() - before;
        self.took += started.elapsed();
    }

    fn per_second(&self) -> f64 {
        self.done as f64 / self.took.as_secs_f64()
    }
}

struct Round<'a> {
    node: &'a Node,
    regions: &'a [(u64, u32)],
    others: &'a [Bystander],
    /// Pages that have left the paged region.
    left: &'a AtomicU64,
    number: u64,
}

impl Round<'_> {
    fn run(&self, rng: &mut StdRng, tally: &mut Tally) {
        let Round { node, regions, others, left, number } = *self;
        let qp = node.qp(QpType::Rc);
        // Deregistered while the child is stopped.
        let own = HostRange { addr: node.memory.addr(), len: LEN as u64 };
        let mr = register(node, own.addr, own.len);
        let all = [&[(own.addr, mr.rkey())], regions].concat();
        let load = if number % 4 < 3 { Load::Long } else { Load::Mixed };
        let mut victim = Victim::start(&End { qpn: qp.qpn(), regions: all }, load);
        let peer = victim.read_line(End::from_line);
        begin(node, &qp, &peer, &SHORT_RETRIES);
        let done = |other: &Bystander| other.done.load(Ordering::Relaxed);
        for other in others {
            let before = done(other);
            wait_until("others are at work", || done(other) > before + 2);
        }
        tally.idle.watch(others, || std::thread::sleep(WATCHED));
        victim.say_go();
        victim.read_line(|line| (line == "reaching").then_some(()));
        let until = Instant::now() + Duration::from_micros(rng.random_range(0..LIFE_US));
        work(node, &qp, &peer, Load::Mixed, rng, || Instant::now() > until);
        victim.stop();
        tally.in_access += u64::from(!GracePeriod::of_queue_pair(qp.qpn()).is_over());
        let before: Vec<_> = others.iter().map(done).collect();
        // Until the retries run out.
        work(node, &qp, &peer, Load::Mixed, rng, || false);
        tally.stopped.watch(others, || std::thread::sleep(WATCHED));
        for (other, before) in others.iter().zip(before) {
            wait_until("others work while one is stopped", || done(other) > before);
        }
        let before = left.load(Ordering::Relaxed);
        wait_until("pages leave while one is stopped", || left.load(Ordering::Relaxed) > before);
        let started = Instant::now();
        let is_at_own = !GracePeriod::of_pages(own).is_over();
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                mr.dereg().expect("nobody holds it up for ever");
                ended.store(true, Ordering::SeqCst);
            });
            if is_at_own {
                std::thread::sleep(Duration::from_millis(20));
                assert!(!ended.load(Ordering::SeqCst), "round {number}: it is still accessed");
            } else {
                wait_until("a region that nobody accesses is deregistered", || ended.load(Ordering::SeqCst));
            }
            qp.destroy().expect("nobody holds it up");
            if !is_at_own {
                tally.ended = tally.ended.max(started.elapsed());
            }
            assert!(started.elapsed() < SOON, "round {number}");
            // Half of the stopped processes continue, the others are killed.
            if number.is_multiple_of(2) {
                victim.go_on();
            }
            let went_on = Instant::now();
            if number.is_multiple_of(2) {
                wait_until("what was accessed is deregistered", || ended.load(Ordering::SeqCst));
            }
            victim.kill();
            wait_until("what was accessed is deregistered", || ended.load(Ordering::SeqCst));
            tally.ended = tally.ended.max(went_on.elapsed());
            assert!(tally.ended < SOON, "round {number}");
        });
        // Discards the completions of the destroyed queue pair.
        while node.cq.poll(64, &mut |_| ()).expect("healthy") > 0 {}
    }
}

#[test]
fn a_process_stopped_in_an_access_blocks_no_other() {
    let rounds = std::env::var("TERRACE_STOP_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let node = Node::local();
    let files = Files::on(&node);
    let region = files.region(&node, LEN);
    let paged = Paged::new(&node, PAGED_BYTES, PAGED_BYTES / 2, REMOTE_ALL);
    let regions = [
        (region.addr, region.mr.rkey()),
        (paged.mr.addr(), paged.mr.rkey()),
        (node.memory.addr(), node.mr.rkey()),
    ];
    // Only bystanders write this region.
    let quiet = files.region(&node, LEN);
    let mut rng = StdRng::seed_from_u64(12);
    let (mut tally, left) = (Tally::default(), AtomicU64::new(0));
    let others: Vec<_> = (0..4).map(|_| Bystander::new(&node)).collect();
    for number in 0..rounds {
        let others = &others[..=number as usize % 4];
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stop = Finally(&stop);
            scope.spawn(|| churn(&paged, &stop, &left));
            for (index, other) in (0..).zip(others) {
                let quiet = (quiet.addr, quiet.mr.rkey());
                let (node, stop) = (&node, &stop);
                scope.spawn(move || other.work(node, quiet, index, stop));
            }
            Round { node: &node, regions: &regions, others, left: &left, number }.run(&mut rng, &mut tally);
        });
    }
    println!(
        "{rounds} rounds, {} of them stopped in the middle of an access; others: {:.0} a second while one is stopped, {:.0} before: {:.3}; ends took {} ms at most",
        tally.in_access,
        tally.stopped.per_second(),
        tally.idle.per_second(),
        tally.stopped.per_second() / tally.idle.per_second(),
        tally.ended.as_millis()
    );
}

/// A process that was stopped in the middle of an access to a region.
fn stopped_in_access(node: &Node, region: &SharedRegion) -> Victim {
    let mut rng = StdRng::seed_from_u64(13);
    let pages = HostRange { addr: region.addr, len: LEN as u64 };
    for _ in 0..100 {
        let qp = node.qp(QpType::Rc);
        let regions = vec![(region.addr, region.mr.rkey())];
        let mut victim = Victim::start(&End { qpn: qp.qpn(), regions }, Load::Long);
        let peer = victim.read_line(End::from_line);
        begin(node, &qp, &peer, &SHORT_RETRIES);
        victim.say_go();
        victim.read_line(|line| (line == "reaching").then_some(()));
        std::thread::sleep(Duration::from_micros(rng.random_range(0..LIFE_US)));
        victim.stop();
        if !GracePeriod::of_pages(pages).is_over() {
            return victim;
        }
    }
    panic!("no process was stopped in the middle of an access");
}

#[test]
fn memory_that_a_stopped_process_is_accessing_stays_until_it_continues() {
    let node = Node::local();
    let region = Files::on(&node).region(&node, LEN);
    let victim = stopped_in_access(&node, &region);
    let refused = region.mr.dereg().expect_err("it is still accessed");
    assert!(matches!(refused, Error::Busy(_)), "{refused}");
    // The region is still registered.
    let other = Bystander::new(&node);
    let read = SendOp::Read { va: region.addr, rkey: region.mr.rkey() };
    other.own.post_send([Ok(other.node.wr(1, read, 0, 512))]).expect("posted");
    assert_eq!(other.node.completion().status, WcStatus::Success);
    victim.go_on();
    region.mr.dereg().expect("nobody is stopped");
}
