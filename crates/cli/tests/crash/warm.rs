//! A killed node's successor has the same pages in memory: the hit ratio of a Zipf load is what it was.

use std::path::Path;
use std::time::{Duration, Instant};

use terrace_bench::keys::{Distribution, Keys};
use terrace_nic::{Buffer, WcStatus, stat};
use terrace_node::Region;

use super::MIB;
use super::node::{Frames, Node, REGION};

const PAGE_BYTES: usize = 4096;
const REGION_BYTES: usize = 128 * MIB;
/// A fifth of the region is in memory, so that a lost frame is missed soon.
const DRAM: &str = "26M";
const DEPTH: usize = 32;
/// Accesses until the pages in memory are the hot ones, and for how long a ratio is measured.
const WARM_UP_ACCESSES: u64 = 150_000;
const MEASURED: Duration = Duration::from_secs(1);
/// Share of WRITEs, in percent.
const WRITES: u32 = 30;
/// The hit ratio after a restart, at least, as a share of that before.
const KEPT_MIN: f64 = 0.95;

fn start(path: &Path, frames: &Frames) -> Node {
    let region = format!("{REGION}={}:{REGION_BYTES}", path.display());
    Node::start_with(&["--region", &region, "--dram", DRAM], frames)
}

/// The misses that a node has counted.
fn misses(node: &Node) -> u64 {
    let device = stat::fetch(node.pid()).expect("the node runs").into_iter().next().expect("a device");
    device.reports["memory"]["regions"][0]["misses"].as_u64().expect("a number")
}

/// A client's accesses, up to `DEPTH` at a time.
struct Load<'a> {
    region: Region<'a>,
    client: &'a terrace_node::Client,
    buffer: Buffer,
    keys: Keys,
    idle: Vec<usize>,
}

impl<'a> Load<'a> {
    fn new(client: &'a terrace_node::Client, round: u64) -> Load<'a> {
        Load {
            region: client.open(REGION).expect("the region"),
            client,
            buffer: client.buffer(DEPTH * PAGE_BYTES).expect("a buffer"),
            // The thread's number seeds the accesses, and does not change which pages are hot.
            keys: Keys::new(Distribution::Zipf, 0.99, (REGION_BYTES / PAGE_BYTES) as u64, round, round + 1),
            idle: (0..DEPTH).collect(),
        }
    }

    /// Makes accesses until `is_over` says so of their number; some of them are in flight then. Returns the number.
    fn run(&mut self, is_over: impl Fn(u64) -> bool) -> u64 {
        let (mut count, mut done) = (0, Vec::new());
        while !is_over(count) {
            while let Some(slot) = self.idle.pop() {
                let (offset, at) = (self.keys.next(false) * PAGE_BYTES as u64, slot * PAGE_BYTES);
                let (len, tag) = (PAGE_BYTES as u32, slot as u64);
                let begun = match self.keys.chance(WRITES) {
                    true => self.region.write(offset, &self.buffer, at, len, tag),
                    false => self.region.read(offset, &self.buffer, at, len, tag),
                };
                begun.expect("begun");
            }
            self.client.poll(&mut done).expect("a healthy connection");
            count += done.len() as u64;
            for completion in done.drain(..) {
                assert_eq!(completion.status, WcStatus::Success);
                self.idle.push(completion.tag as usize);
            }
        }
        count
    }

    /// The hit ratio of the next second.
    fn hit_ratio(&mut self, node: &Node) -> f64 {
        let (before, begun) = (misses(node), Instant::now());
        let count = self.run(|_| begun.elapsed() >= MEASURED);
        1.0 - (misses(node) - before) as f64 / count as f64
    }
}

/// Kills and restarts a node `rounds` times under load. The first second after a restart has almost the hit ratio of the
/// last one before the kill.
pub fn kill_warm_nodes(path: &Path, rounds: u64) {
    let frames = Frames::new();
    let mut node = start(path, &frames);
    Load::new(&node.connect(), rounds).run(|count| count >= WARM_UP_ACCESSES);
    for round in 0..rounds {
        let before = {
            let client = node.connect();
            let mut load = Load::new(&client, round);
            let before = load.hit_ratio(&node);
            // Accesses are in flight.
            node.kill();
            before
        };
        node = start(path, &frames);
        let client = node.connect();
        let after = Load::new(&client, round + rounds).hit_ratio(&node);
        println!("hit ratio {before:.4} before the kill, {after:.4} in the first second after the restart");
        assert!(before > 0.5, "{before}: the load does not fit");
        assert!(after >= KEPT_MIN * before, "{before} before the kill, {after} after it");
    }
}
