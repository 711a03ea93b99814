//! Processes that are killed while they reach into their neighbour, and are reached into: nothing stays locked, nothing is left, and
//! others do not notice. `TERRACE_KILL_ROUNDS=1000` for more rounds.

mod common;
#[path = "common/shared.rs"]
mod shared;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use shared::{SharedRegion, register};
use terrace_nic::*;

const LEN: usize = 1 << 20;
/// The longest that a child lives, in microseconds, once it is reached into.
const LIFE_US: u64 = 3000;
/// The longest that it lives if it never is.
const LIFE_MAX: Duration = Duration::from_millis(300);
const RECEIVES: u64 = 64;

/// What one end has to know of the other.
#[derive(Clone, Copy)]
struct End {
    qpn: u32,
    /// Ordinary memory, and memory that can be mapped.
    regions: [(u64, u32); 2],
}

impl End {
    fn to_line(self) -> String {
        let [(a, k), (b, l)] = self.regions;
        format!("end {} {a} {k} {b} {l}", self.qpn)
    }

    fn from_line(line: &str) -> Option<End> {
        let numbers = line.trim().strip_prefix("end ")?.split(' ').map(|word| word.parse::<u64>().ok());
        let [qpn, a, k, b, l] = numbers.collect::<Option<Vec<u64>>>()?.try_into().ok()?;
        Some(End { qpn: qpn as u32, regions: [(a, k as u32), (b, l as u32)] })
    }
}

/// A random work request towards a peer's regions.
fn any_request(node: &Node, rng: &mut StdRng, peer: &End) -> SendWr {
    let (addr, rkey) = peer.regions[rng.random_range(0..2)];
    let len = [8, 64, 4096, 60_000][rng.random_range(0..4)];
    let va = addr + 8 * rng.random_range(0..(LEN as u64 - u64::from(len)) / 8);
    let op = match rng.random_range(0..5) {
        0 => SendOp::Read { va, rkey },
        1 => SendOp::Write { va, rkey },
        2 => return node.wr(1, SendOp::FetchAdd { va, rkey, add: 1 }, 0, 8),
        3 => return node.wr(1, SendOp::Send, 0, len.min(4096)),
        _ => SendOp::WriteImm { va, rkey, imm: 5 },
    };
    node.wr(1, op, 0, len)
}

/// Keeps a queue pair at work, and its peer's messages received, until something goes wrong or it is over.
fn work(node: &Node, qp: &Arc<QueuePair>, peer: &End, rng: &mut StdRng, mut is_over: impl FnMut() -> bool) {
    let (mut outstanding, mut depth, mut is_well) = (0, 1, true);
    while is_well && !is_over() {
        // What is alone may need no packets.
        if outstanding == 0 {
            depth = [1, 1, 1, 8][rng.random_range(0..4)];
        }
        while outstanding < depth && qp.post_send([Ok(any_request(node, rng, peer))]).is_ok() {
            outstanding += 1;
        }
        let mut received = 0;
        let polled = node.cq.poll(16, &mut |wc| {
            is_well &= wc.status == WcStatus::Success;
            match wc.opcode {
                WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => received += 1,
                _ => outstanding -= 1,
            }
        });
        is_well &= polled.is_ok() && qp.post_recv((0..received).map(|_| node.recv(2, 0, 4096))).is_ok();
    }
}

fn begin(node: &Node, qp: &Arc<QueuePair>, peer: &End) {
    // A peer that is gone is given up soon.
    connect(qp, node, peer.qpn, &Tuning { mtu: 4096, timeout: 10, retry_cnt: 1, ..Tuning::default() });
    qp.post_recv((0..RECEIVES).map(|_| node.recv(2, 0, 4096))).expect("posted");
}

/// What the test starts in processes of their own; nothing by itself.
#[test]
#[ignore = "started by the test"]
fn child() {
    let Some(peer) = std::env::var("KILL_PARENT").ok().and_then(|line| End::from_line(&line)) else { return };
    let node = Node::local();
    let region = SharedRegion::new(&node, LEN);
    let qp = node.qp(QpType::Rc);
    let regions = [(node.memory.addr(), node.mr.rkey()), (region.addr, region.mr.rkey())];
    println!("\n{}", End { qpn: qp.qpn(), regions }.to_line());
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).expect("a line");
    begin(&node, &qp, &peer);
    println!("\nbegun");
    work(&node, &qp, &peer, &mut StdRng::seed_from_u64(u64::from(std::process::id())), || false);
    // Not before it is killed: the parent tells an end of its own accord from one that was asked for.
    std::thread::sleep(Duration::from_secs(60));
}

struct Victim {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Victim {
    fn start(parent: &End) -> Victim {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .args(["child", "--exact", "--ignored", "--nocapture"])
            .env("KILL_PARENT", parent.to_line())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Victim { child, lines }
    }

    /// The next line that means something.
    fn hear<T>(&mut self, meaning: impl Fn(&str) -> Option<T>) -> T {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).expect("a line"), 0, "the child has ended");
            if let Some(meant) = meaning(line.trim()) {
                return meant;
            }
        }
    }

    fn say_go(&mut self) {
        self.child.stdin.as_mut().expect("a pipe").write_all(b"go\n").expect("written");
    }

    fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }
}

/// For how long a child is left alive.
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

/// A pair of ends that nobody kills: what is written is read, and messages arrive.
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
fn whoever_is_killed_leaves_nothing_locked_and_nothing_behind() {
    let rounds = std::env::var("TERRACE_KILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let node = Node::local();
    let region = SharedRegion::new(&node, LEN);
    let bystander = Bystander::new();
    let mut rng = StdRng::seed_from_u64(11);
    let (mut before, mut direct) = (0, 0);
    for round in 0..rounds {
        let qp = node.qp(QpType::Rc);
        // Taken away while the child is dead or dying.
        let mr = register(&node, node.memory.addr(), LEN as u64);
        let regions = [(node.memory.addr(), mr.rkey()), (region.addr, region.mr.rkey())];
        let mut victim = Victim::start(&End { qpn: qp.qpn(), regions });
        let peer = victim.hear(End::from_line);
        begin(&node, &qp, &peer);
        victim.say_go();
        victim.hear(|line| (line == "begun").then_some(()));
        let (mut life, started) = (Life::new(&mut rng), Instant::now());
        work(&node, &qp, &peer, &mut rng, || life.is_over(&qp, started));
        victim.kill();
        mr.dereg().expect("nobody holds it up");
        direct += qp.counters().direct;
        qp.destroy().expect("nobody holds it up");
        // What this end still had under way is forgotten with the queue pair.
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
