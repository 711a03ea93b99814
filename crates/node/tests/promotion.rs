//! Pages that clients access become resident, in every serve mode, and the accesses are counted.

mod common;

use std::time::{Duration, Instant};

use common::*;
use terrace_node::*;

/// Reads one page of each of these units many times; returns the hits and misses that the server counted meanwhile.
fn read_all(node: &Node, client: &Client, region: &Region<'_>, units: std::ops::Range<u64>) -> (u64, u64) {
    let counted = || {
        let stats = &node.server.stats().regions[0];
        (stats.hits, stats.misses)
    };
    let buffer = client.buffer(4096).expect("a buffer");
    let before = counted();
    for round in 0..20 {
        for unit in units.clone() {
            region.read(unit * MIB + round * 4096, &buffer, 0, 4096, unit).expect("begun");
            wait_for(client, 1);
        }
    }
    // Counts are published at the end of their period. Concurrent threads may lose counts.
    let deadline = Instant::now() + Duration::from_secs(10);
    while counted().0 + counted().1 < before.0 + before.1 + 76 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(25));
    let after = counted();
    (after.0 - before.0, after.1 - before.1)
}

/// Accesses move from some units to others, which become resident.
fn accessed_units_become_resident(mode: ServeMode) {
    let node = Node::new(&format!("promotion-{mode}"), mode, 32 * MIB, 4 * MIB);
    let client = node.client();
    let region = client.open("data").expect("the region");
    for units in [0..4, 20..24] {
        let started = Instant::now();
        loop {
            let (hits, misses) = read_all(&node, &client, &region, units.clone());
            assert!((76..=80).contains(&(hits + misses)), "{mode}: {hits} hits and {misses} misses of 80");
            if misses == 0 {
                break;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "{mode}: {misses} misses after 20 s");
        }
    }
    let stats = node.server.stats();
    assert!(stats.regions[0].promotions >= 8 && stats.regions[0].demotions >= 4, "{stats:?}");
    assert!(stats.locked_bytes <= 4 * MIB);
}

#[test]
fn units_that_clients_fetch_become_resident() {
    accessed_units_become_resident(ServeMode::Term);
}

#[test]
fn units_that_the_nic_fetches_become_resident() {
    accessed_units_become_resident(ServeMode::Wait);
}

#[test]
fn units_that_clients_access_by_rpc_become_resident() {
    accessed_units_become_resident(ServeMode::RpcTieringPromote);
}
