//! Pages that clients access become resident, in every mode of Terrace's own; the accesses are counted; a restarted
//! server finds the pages in memory.

mod common;

use std::time::{Duration, Instant};

use common::*;
use terrace_nic::{PathChoice, PortConfig};
use terrace_node::*;

const PAGE: u64 = 4096;
const DRAM_PAGES: u64 = 1024;

fn counted(server: &Server) -> (u64, u64) {
    let stats = &server.stats().regions[0];
    (stats.hits, stats.misses)
}

/// Reads pages; returns the hits and misses that the server counted meanwhile.
fn read_all(
    server: &Server,
    client: &Client,
    region: &Region<'_>,
    pages: std::ops::Range<u64>,
) -> (u64, u64) {
    let before = counted(server);
    let buffer = client.buffer(PAGE as usize).expect("a buffer");
    for page in pages {
        region.read(page * PAGE, &buffer, 0, PAGE as u32, page).expect("begun");
        wait_for(client, 1);
    }
    let after = counted(server);
    (after.0 - before.0, after.1 - before.1)
}

/// Accesses move from some pages to others, which become resident with their first access.
fn accessed_pages_become_resident(mode: ServeMode) {
    let node = Node::new(&format!("residency-{mode}"), mode, 32 * MIB, 4 * MIB);
    let client = node.client();
    let region = client.open("data").expect("the region");
    for pages in [0..200, 5000..5200] {
        let (_, misses) = read_all(&node.server, &client, &region, pages.clone());
        assert!(misses >= 200, "{mode}: {misses} misses of 200 pages that nobody has read");
        // A client that knows the bitmap of an earlier time sends an RPC for pages that are there.
        let (hits, misses) = read_all(&node.server, &client, &region, pages);
        assert!(hits >= 200 && misses == 0, "{mode}: {hits} hits and {misses} misses of 200");
    }
    read_all(&node.server, &client, &region, 0..2 * DRAM_PAGES);
    let stats = node.server.stats();
    assert!(stats.regions[0].evictions >= DRAM_PAGES / 2, "{stats:?}");
    assert!(stats.resident_bytes <= 4 * MIB && stats.resident_bytes > 3 * MIB, "{stats:?}");
}

#[test]
fn pages_that_clients_fetch_become_resident() {
    accessed_pages_become_resident(ServeMode::Term);
}

#[test]
fn pages_that_the_nic_fetches_become_resident() {
    accessed_pages_become_resident(ServeMode::Wait);
}

#[test]
fn pages_that_clients_access_by_rpc_become_resident() {
    accessed_pages_become_resident(ServeMode::RpcTieringPromote);
}

#[test]
fn hits_of_same_host_peers_are_counted() {
    let node = Node::over(PathChoice::Local, "peer-hits", ServeMode::Term, 32 * MIB, 4 * MIB);
    let client = node.client();
    let region = client.open("data").expect("the region");
    let received = || -> u64 {
        let pairs = node.server.device().snapshot().queue_pairs;
        pairs.iter().map(|pair| pair.counts["rx_packets"]).sum()
    };
    let started = Instant::now();
    // Until the peer is known, accesses go by packets, which the server counts itself.
    loop {
        let before = received();
        let (hits, misses) = read_all(&node.server, &client, &region, 0..200);
        if received() - before < 20 {
            assert_eq!((hits, misses), (200, 0));
            break;
        }
        assert!(hits + misses >= 200, "{hits} hits and {misses} misses of 200");
        assert!(started.elapsed() < Duration::from_secs(20), "the accesses go by packets");
    }
}

#[test]
fn a_restarted_server_is_warm_if_frames_are_kept() {
    let path = std::env::temp_dir().join(format!("terrace-node-{}-warm", std::process::id()));
    for (keeps_frames, adopted) in [(true, 0), (false, 200), (false, 0)] {
        let config = ServerConfig {
            regions: vec![RegionConfig { name: "data".into(), path: path.clone(), size: Some(32 * MIB) }],
            dram_bytes: 4 * MIB,
            mode: ServeMode::Wait,
            threads: 1,
            port: PortConfig { address: Some(LOOPBACK), ..PortConfig::default() },
            keeps_frames,
            frames_directory: None,
        };
        let server = Server::open(&config).expect("a server");
        assert_eq!(server.stats().regions[0].pages_adopted, adopted);
        let instance = server.device().snapshot().slot;
        let client =
            Client::connect(&ClientConfig { instance, ..ClientConfig::new(LOOPBACK) }).expect("a client");
        let region = client.open("data").expect("the region");
        let buffer = client.buffer(PAGE as usize).expect("a buffer");
        for page in 0..200 {
            let written = content(page * PAGE, PAGE as usize, 1);
            if keeps_frames {
                buffer.write(0, &written).expect("within");
                region.write(page * PAGE, &buffer, 0, PAGE as u32, page).expect("begun");
                wait_for(&client, 1);
            }
            region.read(page * PAGE, &buffer, 0, PAGE as u32, page).expect("begun");
            wait_for(&client, 1);
            let mut found = vec![0; PAGE as usize];
            buffer.read(0, &mut found).expect("within");
            assert_eq!(found, written, "page {page}");
        }
        let (_, misses) = counted(&server);
        assert_eq!(misses == 0, adopted > 0, "{misses} misses with {adopted} pages taken over");
    }
    let _ = std::fs::remove_file(&path);
}
