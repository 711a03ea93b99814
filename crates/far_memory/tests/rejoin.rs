//! Nodes that were lost and are started again, of clients with two copies of each page.

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use terrace_far_memory::*;
use terrace_nic::{PathChoice, PortConfig};

const PAGES: u64 = 2000;
const NODE_BYTES: u64 = 16 * MIB;

/// A node at the address of one that has ended.
fn restart(address: SocketAddr, memory_bytes: u64) -> MemoryNode {
    node_over(PathChoice::Udp, memory_bytes, |config| config.listen = address)
}

fn mirror(nodes: &[Option<MemoryNode>; 2]) -> (Client, [SocketAddr; 2]) {
    let addresses = nodes.each_ref().map(|node| node.as_ref().expect("a node").listens_at());
    let config = ClientConfig::new(addresses.to_vec(), PAGES);
    let port = PortConfig { path: PathChoice::Udp, ..config.port.clone() };
    (Client::connect(&ClientConfig { copies: 2, port, ..config }).expect("a client"), addresses)
}

fn check(client: &Client, version: impl Fn(u64) -> u64) {
    let mut bytes = [0; PAGE_BYTES];
    for page in 0..PAGES {
        client.load(page, &mut bytes).expect("loaded");
        assert!(bytes == content(page, version(page)), "{page}");
    }
}

fn has_all_copies(client: &Client) -> bool {
    client.nodes().iter().all(|node| node.lost.is_none() && node.missing_pages == 0)
}

#[test]
fn a_node_that_is_started_again_gets_copies_and_the_other_one_may_end_then() {
    let mut nodes = [0; 2].map(|_| Some(node_over(PathChoice::Udp, NODE_BYTES, |_| ())));
    let (client, addresses) = mirror(&nodes);
    let mut versions = vec![1; PAGES as usize];
    (0..PAGES).for_each(|page| client.store(page, &content(page, 1)).expect("stored"));
    let mut rng = SmallRng::seed_from_u64(6);
    for round in 0..4 {
        let place = round % 2;
        drop(nodes[place].take());
        // Found although nothing is in flight.
        wait_until("the loss is found", || client.nodes()[place].lost.is_some());
        nodes[place] = Some(restart(addresses[place], NODE_BYTES));
        // Stores, and pages that leave and come, meanwhile.
        let mut version = 10 * (round as u64 + 1);
        let started = Instant::now();
        while !has_all_copies(&client) {
            assert!(started.elapsed() < PATIENCE, "waited in vain for copies: {:?}", client.nodes());
            let page = rng.random_range(0..PAGES);
            version += 1;
            if rng.random_range(0..4) == 0 {
                client.invalidate(page).expect("invalidated");
            }
            client.store(page, &content(page, version)).expect("stored");
            versions[page as usize] = version;
        }
        let state = &client.nodes()[place];
        // A loaded machine may lose a node once more.
        assert!(state.pages == PAGES && state.losses > round as u64 / 2, "{state:?}");
        assert_eq!(state.rejoins, state.losses);
        assert!(state.copied_pages > 0, "{state:?}");
        check(&client, |page| versions[page as usize]);
    }
}

#[test]
fn a_node_that_has_less_room_than_before_gets_what_fits() {
    let mut nodes = [0; 2].map(|_| Some(node_over(PathChoice::Udp, NODE_BYTES, |_| ())));
    let (client, addresses) = mirror(&nodes);
    (0..PAGES).for_each(|page| client.store(page, &content(page, 1)).expect("stored"));
    drop(nodes[1].take());
    wait_until("the loss is found", || client.nodes()[1].lost.is_some());
    nodes[1] = Some(restart(addresses[1], MIB));
    wait_until("the node is full", || client.nodes()[1].pages == 256);
    // Pages that are stored can be stored anew, with a copy on that node or without.
    for page in 0..PAGES {
        assert!(client.accepts(page), "{page}");
        client.store(page, &content(page, 2)).expect("stored");
    }
    check(&client, |_| 2);
    assert_eq!(client.nodes()[1].missing_pages, PAGES - 256);
    // The node is not asked for pages that it does not have: a store into an empty pool has it repair its queue.
    let repairs = || nodes[1].as_ref().expect("a node").status().repairs;
    let (started, before) = (Instant::now(), repairs());
    while started.elapsed() < Duration::from_secs(4) {
        (256..PAGES).for_each(|page| client.store(page, &content(page, 2)).expect("stored"));
    }
    assert!(repairs() - before <= 4, "{}", repairs() - before);
    // Room comes, and copies with it.
    (256..PAGES).for_each(|page| client.invalidate(page).expect("invalidated"));
    wait_until("all pages have two copies", || client.nodes().iter().all(|node| node.missing_pages == 0));
    drop(nodes[0].take());
    let mut bytes = [0; PAGE_BYTES];
    for page in 0..256 {
        client.load(page, &mut bytes).expect("loaded");
        assert!(bytes == content(page, 2), "{page}");
    }
}

#[test]
fn a_node_that_refuses_the_client_says_why() {
    let mut nodes = [0; 2].map(|_| Some(node_over(PathChoice::Udp, NODE_BYTES, |_| ())));
    let (client, addresses) = mirror(&nodes);
    drop(nodes[1].take());
    wait_until("the loss is found", || client.nodes()[1].lost.is_some());
    // A space has at most 64 times as many pages as its node.
    nodes[1] = Some(restart(addresses[1], 16 * PAGE_BYTES as u64));
    let says = |what: &str| client.nodes()[1].lost.as_ref().is_some_and(|lost| lost.contains(what));
    wait_until("the reason is shown", || says("a space has 1 to 1024 pages"));
    drop(nodes[1].take());
    wait_until("the reason is gone", || !says("a space has"));
    nodes[1] = Some(restart(addresses[1], NODE_BYTES));
    wait_until("the node is used", || client.nodes()[1].lost.is_none());
}

#[test]
fn a_client_ends_at_once_while_it_has_lost_a_node() {
    let mut nodes = [0; 2].map(|_| Some(node_over(PathChoice::Udp, NODE_BYTES, |_| ())));
    let (client, addresses) = mirror(&nodes);
    client.store(1, &content(1, 1)).expect("stored");
    drop(nodes[1].take());
    wait_until("the loss is found", || client.nodes()[1].lost.is_some());
    // Something that accepts connections and never answers.
    let _silent = std::net::TcpListener::bind(addresses[1]).expect("the address is free");
    std::thread::sleep(Duration::from_millis(1500));
    let started = Instant::now();
    drop(client);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}
