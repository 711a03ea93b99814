//! Helpers of the tests: a memory node and its clients, within the host and by UDP.
#![allow(dead_code)] // Every test file uses some of the helpers.

use std::time::{Duration, Instant};

use terrace_far_memory::*;
use terrace_nic::{PathChoice, PortConfig};

pub const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A node on the loopback whose clients use this path.
pub fn node_over(path: PathChoice, memory_bytes: u64, change: impl FnOnce(&mut NodeConfig)) -> MemoryNode {
    let mut config = NodeConfig::new(memory_bytes, "127.0.0.1:0".parse().expect("an address"));
    config.port.path = path;
    change(&mut config);
    MemoryNode::open(&config).expect("a memory node")
}

pub fn config_of(node: &MemoryNode, path: PathChoice, page_count: u64) -> ClientConfig {
    let config = ClientConfig::new(vec![node.listens_at()], page_count);
    let port = PortConfig { path, ..config.port.clone() };
    ClientConfig { port, ..config }
}

pub fn client_of(node: &MemoryNode, path: PathChoice, page_count: u64) -> Client {
    Client::connect(&config_of(node, path, page_count)).expect("a client")
}

/// Runs a test by each path to the node. The node's chains use its memory without packets, and by packets.
pub fn on_each_path(test: impl Fn(PathChoice, PathChoice)) {
    for (node, client) in [
        (PathChoice::Local, PathChoice::Local),
        (PathChoice::Local, PathChoice::Udp),
        (PathChoice::Udp, PathChoice::Udp),
    ] {
        test(node, client);
    }
}

/// A page whose bytes depend on its number and the version.
pub fn content(page: u64, version: u64) -> Page {
    let mut state =
        page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version.wrapping_mul(0xd1b5_4a32_d192_ed03) | 1;
    std::array::from_fn(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    })
}

pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
