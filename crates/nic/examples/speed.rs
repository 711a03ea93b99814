//! Two processes on this machine: round trips and message rates of the NIC without the C ABI.
//!
//! `cargo run --release -p terrace-nic --example speed [PART]`; with `TERRACE_PATH=udp` over UDP loopback instead of
//! shared memory. PART is `read-4096-1` (length and depth), `write-...`, `pingpong` or `sendrecv`, or a prefix of
//! these; or `alone`: messages between two devices of one thread, whose cost includes no wait for another processor.
//! `SPEED_MS` is the time for which a READ or WRITE is measured, `SPEED_ROUNDS` the number of round trips. Their target
//! is a file in memory, which a same-host peer can map, or ordinary memory with `SPEED_TARGET=ordinary`.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/shared.rs"]
mod shared;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::*;
use shared::SharedRegion;
use terrace_nic::*;

const LEN: usize = 1 << 24;

/// Sent by each process to the other.
struct Peer {
    qpn: u32,
    addr: u64,
    rkey: u32,
    /// The word that the process polls for WRITEs.
    flag_addr: u64,
    flag_rkey: u32,
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("serve") => return serve(),
        Some("alone") => return alone(),
        _ => {}
    }
    let mut child = Command::new(std::env::current_exe().expect("a path"))
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a second process");
    let mut to = child.stdin.take().expect("a pipe");
    let mut from = BufReader::new(child.stdout.take().expect("a pipe"));
    let (node, qp) = node();
    let (addr, rkey) = (node.memory.addr(), node.mr.rkey());
    writeln!(to, "{} {addr} {rkey} {addr} {rkey}", qp.qpn()).expect("written");
    let peer = read_peer(&mut from);
    bring_up(&node, &qp, &peer);
    let only = std::env::args().nth(1).unwrap_or_default();
    let wanted = |name: &str| name.starts_with(&only);
    for depth in [1usize, 16, 64] {
        for len in [8u32, 4096, 65536] {
            let read = SendOp::Read { va: peer.addr, rkey: peer.rkey };
            let write = SendOp::Write { va: peer.addr, rkey: peer.rkey };
            if wanted(&format!("read-{len}-{depth}")) {
                stream("read", &node, &qp, read, len, depth);
            }
            if wanted(&format!("write-{len}-{depth}")) {
                stream("write", &node, &qp, write, len, depth);
            }
        }
    }
    if wanted("pingpong") {
        writeln!(to, "pingpong").expect("written");
        let times = ping_pong(&node, &qp, &peer, true);
        report("write pingpong (half round trip)", times.iter().map(|ns| ns / 2).collect());
    }
    if wanted("sendrecv") {
        writeln!(to, "sendrecv").expect("written");
        let times = send_recv(&node, &qp, true);
        report("send/recv (half round trip)", times.iter().map(|ns| ns / 2).collect());
    }
    writeln!(to, "end").expect("written");
    let counters = node.device.snapshot();
    println!("client {:?}\n{:?}", counters.port, counters.queue_pairs[0].counts);
    child.wait().expect("ended");
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut from, &mut rest).expect("read");
    println!("server {rest}");
}

fn node() -> (Node, Arc<QueuePair>) {
    let port = PortConfig { address: Some(LOOPBACK), ..PortConfig::from_env().expect("good variables") };
    let node = Node::with(port.device().expect("a port"), LEN);
    let qp = node.qp(QpType::Rc);
    (node, qp)
}

fn read_peer(from: &mut impl BufRead) -> Peer {
    let mut line = String::new();
    from.read_line(&mut line).expect("a line");
    let mut words = line.split_whitespace().map(|word| word.parse::<u64>().expect("a number"));
    let mut next = || words.next().expect("five words");
    Peer {
        qpn: next() as u32,
        addr: next(),
        rkey: next() as u32,
        flag_addr: next(),
        flag_rkey: next() as u32,
    }
}

fn bring_up(node: &Node, qp: &Arc<QueuePair>, peer: &Peer) {
    connect(qp, node, peer.qpn, &Tuning { mtu: 4096, ..Tuning::default() });
}

fn serve() {
    let (node, qp) = node();
    let shared = SharedRegion::new(&node, LEN);
    let target = match std::env::var("SPEED_TARGET").as_deref() {
        Ok("ordinary") => (node.memory.addr(), node.mr.rkey()),
        _ => (shared.addr, shared.mr.rkey()),
    };
    println!("{} {} {} {} {}", qp.qpn(), target.0, target.1, node.memory.addr(), node.mr.rkey());
    let mut from = std::io::stdin().lock();
    let peer = read_peer(&mut from);
    bring_up(&node, &qp, &peer);
    for command in from.lines() {
        match command.expect("a line").as_str() {
            "pingpong" => drop(ping_pong(&node, &qp, &peer, false)),
            "sendrecv" => drop(send_recv(&node, &qp, false)),
            _ => break,
        }
    }
    let counters = node.device.snapshot();
    println!("{:?}\n{:?}", counters.port, counters.queue_pairs[0].counts);
}

fn stream(name: &str, node: &Node, qp: &Arc<QueuePair>, op: SendOp, len: u32, depth: usize) {
    let started = Instant::now();
    let mut times = Vec::new();
    let (mut posted, mut done) = (0u64, 0u64);
    let duration = Duration::from_millis(duration_ms());
    let mut last = started;
    while started.elapsed() < duration || done < posted {
        while posted - done < depth as u64 && started.elapsed() < duration {
            qp.post_send(std::iter::once_with(|| Ok(node.wr(posted, op, 0, len)))).expect("posted");
            posted += 1;
        }
        let count = node.cq.poll(16, &mut |wc| assert_eq!(wc.status, WcStatus::Success)).expect("healthy");
        done += count as u64;
        if depth == 1 && count == 1 {
            let now = Instant::now();
            times.push((now - last).as_nanos() as u64);
            last = now;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let rate = done as f64 / seconds;
    println!("{name} {len} B depth {depth}: {:.0} k/s, {:.2} GB/s", rate / 1e3, rate * f64::from(len) / 1e9);
    if depth == 1 {
        report(&format!("{name} {len} B"), times);
    }
}

fn duration_ms() -> u64 {
    std::env::var("SPEED_MS").ok().and_then(|text| text.parse().ok()).unwrap_or(250)
}

fn rounds() -> u32 {
    std::env::var("SPEED_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20_000)
}

fn ping_pong(node: &Node, qp: &Arc<QueuePair>, peer: &Peer, leads: bool) -> Vec<u64> {
    let (va, rkey) = (peer.flag_addr + 4096, peer.flag_rkey);
    let mut times = Vec::new();
    let mut last = Instant::now();
    for round in 1..=rounds() {
        let wanted = if leads { round - 1 } else { round } as u8;
        while node.memory.0[4096].load(Ordering::Acquire) != wanted {
            std::hint::spin_loop();
        }
        node.memory.0[0].store(round as u8, Ordering::Release);
        qp.post_send([Ok(node.wr(1, SendOp::Write { va, rkey }, 0, 1))]).expect("posted");
        assert_eq!(node.completion().status, WcStatus::Success);
        let now = Instant::now();
        times.push((now - last).as_nanos() as u64);
        last = now;
    }
    times
}

fn send_recv(node: &Node, qp: &Arc<QueuePair>, leads: bool) -> Vec<u64> {
    let mut times = Vec::new();
    let mut last = Instant::now();
    qp.post_recv((0..64).map(|id| node.recv(id, 8192, 64))).expect("posted");
    // The first message may arrive before its receive is posted; the retry is not measured.
    for round in 0..rounds() {
        if leads || round > 0 {
            qp.post_send([Ok(send(node, 8))]).expect("posted");
        }
        let mut received = false;
        while !received {
            node.cq.poll(4, &mut |wc| received |= wc.opcode == WcOpcode::Recv).expect("healthy");
        }
        qp.post_recv([node.recv(1, 8192, 64)]).expect("posted");
        let now = Instant::now();
        times.push((now - last).as_nanos() as u64);
        last = now;
    }
    if !leads {
        qp.post_send([Ok(send(node, 8))]).expect("posted");
    }
    times
}

fn send(node: &Node, length: u32) -> SendWr {
    let sge = Sge { addr: node.memory.addr(), length, lkey: node.mr.lkey() };
    SendWr::with_sge(1000, SendOp::Send, sge, SendFlags::SIGNALED)
}

/// Messages back and forth between two devices of this process.
fn alone() {
    const LEN: u32 = 64;
    let ends = [node(), node()];
    for (this, other) in [(0, 1), (1, 0)] {
        let (node, qp) = &ends[this];
        connect(qp, node, ends[other].1.qpn(), &Tuning { mtu: 4096, ..Tuning::default() });
        qp.post_recv((0..64).map(|id| node.recv(id, 8192, LEN))).expect("posted");
    }
    let pass = |from: usize| {
        let ((sender, sending), (receiver, receiving)) = (&ends[from], &ends[1 - from]);
        sending.post_send([Ok(send(sender, LEN))]).expect("posted");
        let mut received = false;
        while !received {
            let mut take = |wc: &Wc| {
                assert_eq!(wc.status, WcStatus::Success, "{:?}", wc);
                received |= wc.opcode == WcOpcode::Recv;
            };
            receiver.cq.poll(4, &mut take).expect("healthy");
        }
        receiving.post_recv([receiver.recv(1, 8192, LEN)]).expect("posted");
    };
    // Until the devices have connected.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(100) {
        pass(0);
        pass(1);
    }
    let mut times = Vec::new();
    for _ in 0..20 {
        let started = Instant::now();
        for _ in 0..rounds() / 20 {
            pass(0);
            pass(1);
        }
        times.push(started.elapsed().as_nanos() as u64 / u64::from(rounds() / 20 * 2));
    }
    report(&format!("message of {LEN} B, within a thread"), times);
    println!("{:?}", ends[0].0.device.snapshot().queue_pairs[0].counts);
}

fn report(name: &str, mut times: Vec<u64>) {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1e3;
    let mean = times.iter().sum::<u64>() as f64 / times.len() as f64 / 1e3;
    println!("{name}: median {:.2} us, p10 {:.2}, p99 {:.2}, mean {mean:.2}", at(0.5), at(0.1), at(0.99));
}
