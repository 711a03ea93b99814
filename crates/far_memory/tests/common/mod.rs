//! Helpers of the tests: a memory node and its clients, within the host and by UDP.
#![allow(dead_code)] // Every test file uses some of the helpers.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use terrace_far_memory::*;
use terrace_nic::{PathChoice, PortConfig};

pub const MIB: u64 = 1 << 20;
pub const PATIENCE: Duration = Duration::from_secs(20);

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

/// What ODRP is compared with.
pub const BASELINES: [Scheme; 4] = [Scheme::Static, Scheme::Dynamic1M, Scheme::Dynamic4K, Scheme::TwoSided];

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

/// The utilisation of remote memory, as in figure 7 of the ODRP paper: pages that are stored over those that clients have, on
/// average while 4 clients store and invalidate runs of 16 pages in spaces of 4 MiB. The same for each scheme.
pub fn utilisation(scheme: Scheme) -> f64 {
    let node = node_over(PathChoice::Local, 16 * MIB, |config| config.scheme = scheme);
    let clients = [0; 4].map(|_| client_of(&node, PathChoice::Local, 1024));
    let (mut rng, mut shares) = (SmallRng::seed_from_u64(26), Vec::new());
    for _ in 0..400 {
        let (client, first) = (&clients[rng.random_range(0..4)], rng.random_range(0..64) * 16);
        let is_store = rng.random_range(0..10) < 6;
        for page in first..first + 16 {
            match is_store {
                true => client.store(page, &content(page, 1)).expect("stored"),
                false => client.invalidate(page).expect("invalidated"),
            }
        }
        let stored: u64 = clients.iter().map(Client::stored_pages).sum();
        let had: u64 = node.status().clients.iter().map(|client| client.pages).sum();
        if had > 0 {
            shares.push(stored as f64 / had as f64);
        }
    }
    shares.iter().sum::<f64>() / shares.len() as f64
}
