//! A child process that accesses the test's memory, and whose memory the test accesses, until the test kills or
//! stops it.
#![allow(dead_code)] // Every test file uses its own part of this.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use terrace_nic::*;

use crate::common::*;
use crate::shared::SharedRegion;

const RECEIVES: u64 = 64;
/// After this many accesses without packets the child prints "reaching".
const REACHES: u64 = 10;

/// The address of one end, for the other.
#[derive(Clone)]
pub struct End {
    pub qpn: u32,
    /// Address and rkey of each region.
    pub regions: Vec<(u64, u32)>,
}

impl End {
    fn to_line(&self) -> String {
        let regions = self.regions.iter().map(|(addr, key)| format!(" {addr} {key}"));
        format!("end {}{}", self.qpn, regions.collect::<String>())
    }

    pub fn from_line(line: &str) -> Option<End> {
        let numbers = line.trim().strip_prefix("end ")?.split(' ').map(|word| word.parse::<u64>().ok());
        let numbers = numbers.collect::<Option<Vec<u64>>>()?;
        let (qpn, regions) = numbers.split_first()?;
        let regions = regions.chunks_exact(2).map(|region| (region[0], region[1] as u32)).collect();
        Some(End { qpn: *qpn as u32, regions })
    }
}

/// The kind of requests to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// All operations, one at a time or several.
    Mixed,
    /// Long READs and WRITEs, one at a time: most of the time one is under way.
    Long,
}

/// A random work request towards a peer's regions.
fn any_request(node: &Node, rng: &mut StdRng, peer: &End, load: Load) -> SendWr {
    let len_max = node.memory.0.len() as u64;
    let (addr, rkey) = peer.regions[rng.random_range(0..peer.regions.len())];
    let (lengths, kinds) = match load {
        Load::Mixed => ([8, 64, 4096, 60_000], 5),
        Load::Long => ([250_000; 4], 2),
    };
    let len = lengths[rng.random_range(0..4)];
    let va = addr + 8 * rng.random_range(0..(len_max - u64::from(len)) / 8);
    let op = match rng.random_range(0..kinds) {
        0 => SendOp::Read { va, rkey },
        1 => SendOp::Write { va, rkey },
        2 => return node.wr(1, SendOp::FetchAdd { va, rkey, add: 1 }, 0, 8),
        3 => return node.wr(1, SendOp::Send, 0, len.min(4096)),
        _ => SendOp::WriteImm { va, rkey, imm: 5 },
    };
    node.wr(1, op, 0, len)
}

/// Keeps requests outstanding, and receives posted for the peer's messages, until an error or `is_over`.
pub fn work(
    node: &Node,
    qp: &Arc<QueuePair>,
    peer: &End,
    load: Load,
    rng: &mut StdRng,
    mut is_over: impl FnMut() -> bool,
) {
    let (mut outstanding, mut depth, mut is_well) = (0, 1, true);
    while is_well && !is_over() {
        // A request that is alone may need no packets.
        if outstanding == 0 && load == Load::Mixed {
            depth = [1, 1, 1, 8][rng.random_range(0..4)];
        }
        while outstanding < depth && qp.post_send([Ok(any_request(node, rng, peer, load))]).is_ok() {
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

/// Short timeout and one retry, for a peer that may be stopped or killed: its queue pair fails soon.
pub const SHORT_RETRIES: Tuning =
    Tuning { mtu: 4096, timeout: 10, retry_cnt: 1, rnr_retry: 7, max_rd_atomic: 16 };

/// Connects to the peer.
pub fn begin(node: &Node, qp: &Arc<QueuePair>, peer: &End, tuning: &Tuning) {
    connect(qp, node, peer.qpn, tuning);
    qp.post_recv((0..RECEIVES).map(|_| node.recv(2, 0, 4096))).expect("posted");
}

/// The child's body: the test has a function of this name.
pub fn child(len: usize) {
    let Some(peer) = std::env::var("VICTIM_PARENT").ok().and_then(|line| End::from_line(&line)) else {
        return;
    };
    let node = Node::local();
    let region = SharedRegion::new(&node, len);
    let qp = node.qp(QpType::Rc);
    let regions = vec![(node.memory.addr(), node.mr.rkey()), (region.addr, region.mr.rkey())];
    println!("\n{}", End { qpn: qp.qpn(), regions }.to_line());
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).expect("a line");
    begin(&node, &qp, &peer, &Tuning { mtu: 4096, ..Tuning::default() });
    println!("\nbegun");
    let rng = &mut StdRng::seed_from_u64(u64::from(std::process::id()));
    // Without messages, which would need the parent to poll.
    work(&node, &qp, &peer, Load::Long, rng, || qp.counters().direct > REACHES);
    println!("\nreaching");
    let load = if std::env::var_os("VICTIM_LONG").is_some() { Load::Long } else { Load::Mixed };
    work(&node, &qp, &peer, load, rng, || false);
    // Exits only when killed: any earlier exit is a failure.
    std::thread::sleep(Duration::from_secs(60));
}

/// The child process, as the test sees it.
pub struct Victim {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Victim {
    pub fn start(parent: &End, load: Load) -> Victim {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command.args(["child", "--exact", "--ignored", "--nocapture"]).env("VICTIM_PARENT", parent.to_line());
        if load == Load::Long {
            command.env("VICTIM_LONG", "1");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Victim { child, lines }
    }

    /// The next line that `meaning` accepts.
    pub fn read_line<T>(&mut self, meaning: impl Fn(&str) -> Option<T>) -> T {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).expect("a line"), 0, "the child has ended");
            if let Some(meant) = meaning(line.trim()) {
                return meant;
            }
        }
    }

    pub fn say_go(&mut self) {
        self.child.stdin.as_mut().expect("a pipe").write_all(b"go\n").expect("written");
    }

    /// Returns when all of the child's threads have stopped.
    pub fn stop(&self) {
        self.send(Signal::STOP);
        wait_until("it has stopped", || self.states().iter().all(|&state| state == 'T'));
    }

    pub fn go_on(&self) {
        self.send(Signal::CONT);
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("sent");
    }

    /// The state letters of the child's threads in /proc.
    fn states(&self) -> Vec<char> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("a list");
        let state = |task: std::fs::DirEntry| {
            let text = std::fs::read_to_string(task.path().join("stat")).ok()?;
            // The state follows the name, which may contain anything, in parentheses.
            text.rsplit(") ").next()?.chars().next()
        };
        tasks.filter_map(|task| state(task.ok()?)).collect()
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
