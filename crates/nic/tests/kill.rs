//! Processes that are killed during accesses to and from a same-host peer: no lock stays held, nothing leaks, and other
//! peers do not notice. `TERRACE_KILL_ROUNDS=1000` for more rounds.

mod common;
#[path = "common/shared.rs"]
mod shared;
#[path = "common/victim.rs"]
mod victim;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shared::{SharedRegion, register};
use terrace_nic::*;
use victim::{End, Load, SHORT_RETRIES, Victim, begin, work};

const LEN: usize = 1 << 20;
/// The longest life of a child, in microseconds, after the first access without packets.
const LIFE_US: u64 = 3000;
/// The longest life of a child without such an access.
const LIFE_MAX: Duration = Duration::from_millis(300);

/// The body of the child processes; does nothing by itself.
#[test]
#[ignore = "started by the test"]
fn child() {
    victim::child(LEN);
}

/// How long a child may live.
struct Life {
    length: Duration,
    until: Option<Instant>,
}

impl Life {
    fn new(rng: &mut StdRng) -> Life {
        Life { length: Duration::from_micros(rng.random_range(0..LIFE_US)), until: None }
    }

    fn is_over(&mut self, qp: &QueuePair, started: Instant) -> bool {
        let now = Instant::now();
        if self.until.is_none() && qp.counters().direct > 0 {
            self.until = Some(now + self.length);
        }
        now > self.until.unwrap_or(started + LIFE_MAX)
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a list").count()
}

/// Two connected nodes that are not killed: they check WRITEs, READs and messages.
struct Bystander {
    a: Node,
    b: Node,
    qa: Arc<QueuePair>,
    qb: Arc<QueuePair>,
}

impl Bystander {
    fn new() -> Bystander {
        let (a, b) = (Node::local(), Node::local());
        let (qa, qb) = rc_pair(&a, &b);
        Bystander { a, b, qa, qb }
    }

    fn check(&self, round: u64) {
        let (va, rkey) = (self.b.memory.addr(), self.b.mr.rkey());
        let data = pattern(9000, round as u8);
        self.a.memory.fill(0, &data);
        self.qb.post_recv([self.b.recv(round, 20_000, 64)]).expect("posted");
        let write = self.a.wr(1, SendOp::Write { va, rkey }, 0, 9000);
        let read = self.a.wr(2, SendOp::Read { va, rkey }, 10_000, 9000);
        self.qa.post_send([Ok(write), Ok(read), Ok(self.a.wr(3, SendOp::Send, 0, 64))]).expect("posted");
        assert!(self.a.completions(3).iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!(self.b.completion().wr_id, round);
        assert_eq!(self.a.memory.bytes(10_000, 9000), data);
    }
}

#[test]
fn a_killed_process_leaves_no_lock_and_no_resource() {
    let rounds = std::env::var("TERRACE_KILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let node = Node::local();
    let region = SharedRegion::new(&node, LEN);
    let bystander = Bystander::new();
    let mut rng = StdRng::seed_from_u64(11);
    let (mut before, mut direct) = (0, 0);
    for round in 0..rounds {
        let qp = node.qp(QpType::Rc);
        // Deregistered while the child is dead or dying.
        let mr = register(&node, node.memory.addr(), LEN as u64);
        let regions = vec![(node.memory.addr(), mr.rkey()), (region.addr, region.mr.rkey())];
        let mut victim = Victim::start(&End { qpn: qp.qpn(), regions }, Load::Mixed);
        let peer = victim.read_line(End::from_line);
        begin(&node, &qp, &peer, &SHORT_RETRIES);
        victim.say_go();
        victim.read_line(|line| (line == "begun").then_some(()));
        let (mut life, started) = (Life::new(&mut rng), Instant::now());
        work(&node, &qp, &peer, Load::Mixed, &mut rng, || life.is_over(&qp, started));
        victim.kill();
        mr.dereg().expect("nobody holds it up");
        direct += qp.counters().direct;
        qp.destroy().expect("nobody holds it up");
        // Discards the completions of the destroyed queue pair.
        while node.cq.poll(64, &mut |_| ()).expect("healthy") > 0 {}
        bystander.check(round);
        if round == 0 {
            wait_until("the child is missed", || node.device.snapshot().same_host["peers"] == 0);
            before = descriptors();
        }
    }
    assert!(direct > rounds, "{direct} accesses needed no packets");
    wait_until("all are missed", || node.device.snapshot().same_host["peers"] == 0);
    wait_until("their descriptors are closed", || descriptors() <= before);
}
