//! A client of the node's host that is stopped in the middle of a WRITE to the pages of its rounds, or to a slab that it
//! releases: the node cannot take these back, and others do not notice.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use terrace_nic::{PathChoice, Payload, PortConfig, QueuePair, SendFlags, SendOp, SendWr, Sge};

use super::transport::Call;
use super::*;
use crate::messages::SlabKey;
use crate::protocol::{Args, Function, Rounds};
use crate::scheme::Scheme;
use crate::{MemoryNode, NodeConfig};

/// The node's address, for the child process.
const NODE: &str = "FAR_MEMORY_STOPPED_CLIENT_OF";
/// Of the longest chains: a WRITE to all pages takes long.
const DEPTH: u32 = DEPTH_MAX;
const PATIENCE: Duration = Duration::from_secs(60);
/// A process that keeps memory for longer is in the middle of a WRITE.
const STUCK: Duration = Duration::from_secs(2);
/// Pages of a slab of 1 MiB.
const SLAB_PAGES: usize = 256;
/// Slabs of the client that releases them.
const SLABS: usize = 64;
/// The time in which a client is disconnected, and its memory taken back unless the client is in the middle of a WRITE.
const SHORT: Duration = Duration::from_millis(200);
/// Attempts to stop the child in the middle of a WRITE.
const ATTEMPTS: u32 = 100;

fn client_of(node: SocketAddr) -> Client {
    client_with(node, 64)
}

fn client_with(node: SocketAddr, page_count: u64) -> Client {
    let config = ClientConfig::new(vec![node], page_count);
    let port = PortConfig { path: PathChoice::Local, ..config.port.clone() };
    Client::connect(&ClientConfig { port, depth: DEPTH, ..config }).expect("a client")
}

/// Not a test: the child process. It breaks the rules, so that the node disconnects it, and goes on to WRITE.
#[test]
fn child() {
    let Ok(node) = std::env::var(NODE) else { return };
    let client = client_of(node.parse().expect("an address"));
    let page_count = Rounds { function: Function::MappedStore, depth: DEPTH }.pages() as usize;
    let buffer = client.buffer(page_count).expect("a buffer");
    let (qp, pages) = {
        let mut operations = client.operations.lock();
        let chain = operations.links[0].transport.chain(Function::MappedStore).expect("a chain");
        (chain.qp().clone(), chain.pages())
    };
    write_and(&client, &buffer, &qp, pages, || {
        let mut operations = client.operations.lock();
        let chain = operations.links[0].transport.chain(Function::UnmappedStore).expect("a chain");
        let call = Call { operation: 0, index: 0, page: buffer.sge(0) };
        let args = chain.args(&call);
        let misaligned = Args { entry: args.entry + 1, ..args }.emit();
        chain.send(call, &misaligned, Instant::now()).expect("within the buffer");
        chain.post().expect("posted");
        println!("forged");
    });
}

/// The same, for a client of slabs. It releases them, the first one last, and goes on to WRITE there. The node overwrites each of the
/// others first, so that there is time to stop the process.
#[test]
fn child_of_slabs() {
    let Ok(node) = std::env::var(NODE) else { return };
    let client = client_with(node.parse().expect("an address"), (SLABS * SLAB_PAGES) as u64);
    let first_pages = || (0..SLABS).rev().map(|slab| (slab * SLAB_PAGES) as u64);
    first_pages().for_each(|page| client.store(page, &[1; PAGE_BYTES]).expect("stored"));
    let buffer = client.buffer(SLAB_PAGES).expect("a buffer");
    let (qp, slab) = client.operations.lock().links[0].transport.first_slab().expect("a slab");
    write_and(&client, &buffer, &qp, slab, || {
        let (mut operations, now) = (client.operations.lock(), Instant::now());
        for page in first_pages() {
            let release = Operation { kind: Kind::Invalidate, page, buffer: None, sink: Sink::Nobody };
            operations.begin(release, now).expect("within the space");
        }
        operations.post(now);
        println!("forged");
    });
}

/// WRITEs a whole buffer again and again by the path within the host, and does something else meanwhile.
fn write_and(client: &Client, buffer: &PageBuffer, qp: &Arc<QueuePair>, pages: SlabKey, act: impl FnOnce()) {
    let length = (buffer.page_count() * PAGE_BYTES) as u32;
    let all = buffer.sge(0).map(|first| Sge { length, ..first }).expect("a page");
    let write = || {
        let op = SendOp::Write { va: pages.addr, rkey: pages.rkey };
        let flags = SendFlags::SIGNALED;
        let posted =
            qp.post_send([Ok(SendWr { wr_id: 1, op, payload: Payload::Sge(all), flags, target: None })]);
        while posted.is_ok() && client.cq.poll(1, &mut |_| ()).expect("healthy") == 0 {
            std::thread::yield_now();
        }
    };
    while qp.sends_to_network() {
        write();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                write();
            }
        });
        act();
    });
}

/// A process that WRITEs, and is about to be disconnected.
struct Attacker(Child);

impl Attacker {
    fn start(node: &MemoryNode, child: &str) -> Attacker {
        let mut command = Command::new(std::env::current_exe().expect("it runs"));
        command.args(["--exact", &format!("client::stopped_tests::{child}"), "--nocapture"]);
        command.env(NODE, node.listens_at().to_string()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let is_forged = lines.any(|line| line.is_ok_and(|line| line.contains("forged")));
        assert!(is_forged, "it ended early: {:?}", child.wait());
        Attacker(child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it runs");
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a condition holds within this time.
fn holds_within(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

#[test]
fn a_client_that_is_stopped_in_a_write_keeps_these_pages_and_nothing_of_others() {
    let mut config = NodeConfig::new(256 * PAGE_BYTES as u64, "127.0.0.1:0".parse().expect("an address"));
    config.port.path = PathChoice::Local;
    let node = MemoryNode::open(&config).expect("a memory node");
    let other = client_of(node.listens_at());
    other.store(0, &[1; PAGE_BYTES]).expect("stored");
    let objects = node.device().snapshot().objects;
    for _ in 0..ATTEMPTS {
        let attacker = Attacker::start(&node, "child");
        attacker.signal(Signal::STOP);
        // It is disconnected soon. Chains run meanwhile, and clients come and go.
        let mut page = [0; PAGE_BYTES];
        for index in 0..20 {
            other.load(0, &mut page).expect("loaded");
            client_of(node.listens_at()).store(index, &page).expect("stored");
        }
        let has_gone = || node.status().clients.len() == 1 && node.status().free_pages == 255;
        assert!(holds_within(PATIENCE, has_gone), "{:?}", node.status());
        let is_whole = || node.device().snapshot().objects == objects;
        if !holds_within(STUCK, is_whole) {
            attacker.signal(Signal::CONT);
            assert!(holds_within(PATIENCE, is_whole), "{:?}", node.device().snapshot().objects);
            return;
        }
    }
    panic!("it was never in the middle of a WRITE");
}

#[test]
fn a_client_that_is_stopped_in_a_write_to_what_it_releases_stops_no_others() {
    let mut config =
        NodeConfig::new((SLABS * SLAB_PAGES * PAGE_BYTES) as u64, "127.0.0.1:0".parse().expect("an address"));
    (config.scheme, config.port.path) = (Scheme::Dynamic1M, PathChoice::Local);
    let node = MemoryNode::open(&config).expect("a memory node");
    for _ in 0..ATTEMPTS {
        let attacker = Attacker::start(&node, "child_of_slabs");
        attacker.signal(Signal::STOP);
        std::thread::sleep(Duration::from_millis(20));
        let started = Instant::now();
        let has_gone = || node.status().clients.is_empty();
        // The node disconnects it for that, or for a WRITE after the release.
        let is_disconnected = holds_within(SHORT, has_gone);
        assert!(started.elapsed() < Duration::from_secs(1), "others wait for {:?}", started.elapsed());
        let is_whole = || has_gone() && node.status().free_pages == (SLABS * SLAB_PAGES) as u64;
        if is_disconnected && !holds_within(SHORT, is_whole) {
            attacker.signal(Signal::CONT);
            assert!(holds_within(PATIENCE, is_whole), "{:?}", node.status());
            return;
        }
        drop(attacker);
        assert!(holds_within(PATIENCE, is_whole), "{:?}", node.status());
    }
    panic!("it was never in the middle of a WRITE");
}
