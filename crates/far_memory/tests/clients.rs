//! Many clients of one node: no page is lost and none is in two tables, in whatever order they end; the pool may be empty.

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use terrace_far_memory::*;
use terrace_nic::PathChoice;

const CLIENTS: u64 = 8;
const OPERATIONS: u32 = 1250;
/// Fewer pages than the clients want.
const POOL_PAGES: u64 = 500;
const SPACE_PAGES: u64 = 100;

/// One client after another, each ended in the middle of what it does.
fn random_client(node: &MemoryNode, path: PathChoice, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let (mut client, mut known) = (client_of(node, path, SPACE_PAGES), HashMap::new());
    for operation in 0..OPERATIONS {
        let (page, version) = (rng.random_range(0..SPACE_PAGES), u64::from(operation) << 8 | seed);
        match rng.random_range(0..100) {
            0..50 => match client.store(page, &content(page, version)) {
                Ok(()) => drop(known.insert(page, version)),
                Err(PageError::PoolEmpty) => assert!(!known.contains_key(&page), "the page has memory"),
                Err(error) => panic!("{error}"),
            },
            50..80 => {
                let mut bytes = [0; PAGE_BYTES];
                match (client.load(page, &mut bytes), known.get(&page)) {
                    (Ok(()), Some(version)) => assert!(bytes == content(page, *version), "page {page}"),
                    (Err(PageError::NotStored(_)), None) => {}
                    (result, known) => panic!("{result:?} {known:?}"),
                }
            }
            80..99 => {
                client.invalidate(page).expect("invalidated");
                known.remove(&page);
            }
            _ => {
                // Whatever is in flight is cut off.
                let buffer = client.buffer(1).expect("a buffer");
                let store = |page| Request::Store { page, from: (buffer.clone(), 0), tag: page };
                let _ = client.submit((0..16).map(store));
                drop(client);
                (client, known) = (client_of(node, path, SPACE_PAGES), HashMap::new());
            }
        }
    }
}

#[test]
fn no_page_is_lost_and_none_is_in_two_tables() {
    for path in [PathChoice::Local, PathChoice::Udp] {
        let node = node_over(path, POOL_PAGES * PAGE_BYTES as u64, |_| ());
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let node = &node;
                scope.spawn(move || random_client(node, path, client));
            }
        });
        wait_until("the pool is whole again", || {
            let status = node.status();
            status.clients.is_empty() && status.free_pages == POOL_PAGES
        });
        // Each page once: another client gets all of them, and they differ.
        let client = client_of(&node, path, POOL_PAGES + 1);
        for page in 0..POOL_PAGES {
            client.store(page, &content(page, 9)).expect("stored");
        }
        assert_eq!(client.store(POOL_PAGES, &[1; PAGE_BYTES]), Err(PageError::BudgetExhausted));
        let mut bytes = [0; PAGE_BYTES];
        for page in 0..POOL_PAGES {
            client.load(page, &mut bytes).expect("loaded");
            assert!(bytes == content(page, 9), "{page}");
        }
    }
}

#[test]
fn an_empty_pool_refuses_stores_until_a_page_is_free() {
    on_each_path(|node_path, client_path| {
        let node = node_over(node_path, 16 * PAGE_BYTES as u64, |_| ());
        let (one, other) = (client_of(&node, client_path, 32), client_of(&node, client_path, 32));
        for page in 0..16 {
            one.store(page, &content(page, 1)).expect("stored");
        }
        for page in 0..8 {
            assert_eq!(other.store(page, &content(page, 2)), Err(PageError::PoolEmpty));
            assert!(!other.is_stored(page));
        }
        // The client knows that for some time, and that pages which it has may be stored anew.
        let is_refused = || other.store(8, &content(8, 2)).is_err() && !other.accepts(9);
        wait_until("the pool counts as empty", is_refused);
        assert!(one.accepts(3));
        // Pages that were stored may still be stored anew.
        one.store(3, &content(3, 3)).expect("stored");
        one.invalidate(5).expect("invalidated");
        wait_until("the page is available", || other.store(7, &content(7, 2)).is_ok());
        assert!(other.accepts(9), "the store found a page");
        let mut bytes = [0; PAGE_BYTES];
        other.load(7, &mut bytes).expect("loaded");
        assert!(bytes == content(7, 2));
        one.load(3, &mut bytes).expect("loaded");
        assert!(bytes == content(3, 3));
        drop((one, other));
        wait_until("the pool is whole again", || node.status().free_pages == 16);
    });
}

#[test]
fn a_client_has_no_more_than_its_budget() {
    let node = node_over(PathChoice::Local, MIB, |config| config.budget_pages = Some(4));
    let client = client_of(&node, PathChoice::Local, 100);
    for page in 0..4 {
        client.store(page, &content(page, 1)).expect("stored");
    }
    assert_eq!(client.store(4, &content(4, 1)), Err(PageError::BudgetExhausted));
    client.invalidate(0).expect("invalidated");
    client.store(4, &content(4, 1)).expect("stored");
}

#[test]
fn a_store_that_fails_on_one_node_leaves_no_page_on_the_other() {
    let small = node_over(PathChoice::Local, MIB, |config| config.budget_pages = Some(4));
    let large = node_over(PathChoice::Local, MIB, |_| ());
    let config = ClientConfig {
        nodes: vec![small.listens_at(), large.listens_at()],
        copies: 2,
        ..config_of(&small, PathChoice::Local, 64)
    };
    let client = Client::connect(&config).expect("a client");
    for page in 0..4 {
        client.store(page, &content(page, 1)).expect("stored");
    }
    for page in 4..16 {
        assert_eq!(client.store(page, &content(page, 1)), Err(PageError::BudgetExhausted));
    }
    client.invalidate(0).expect("invalidated");
    // The page waits until its stray copy is gone, and is stored on both nodes.
    client.store(15, &content(15, 2)).expect("stored");
    wait_until("the copies are gone", || {
        assert_eq!(client.poll(&mut Vec::new()), 0, "nobody has asked for what is in flight");
        client.nodes().iter().all(|node| node.pages == 4)
    });
    assert_eq!(client.stored_pages(), 4);
}

#[test]
fn nothing_of_a_client_stays_on_a_node() {
    let node = node_over(PathChoice::Local, MIB, |_| ());
    let before = node.device().snapshot().objects;
    for page in 0..3 {
        client_of(&node, PathChoice::Local, 16).store(page, &content(page, 1)).expect("stored");
    }
    wait_until("its objects are gone", || node.device().snapshot().objects == before);
}

#[test]
fn a_client_that_was_stopped_goes_on_with_its_nodes() {
    let node = node_over(PathChoice::Udp, MIB, |_| ());
    let timeout = Duration::from_millis(200);
    let config = ClientConfig { depth: 128, timeout, ..config_of(&node, PathChoice::Udp, 128) };
    let client = Client::connect(&config).expect("a client");
    let buffer = client.buffer(1).expect("a buffer");
    let store = |page| Request::Store { page, from: (buffer.clone(), 0), tag: page };
    let (submitted, mut done) = (client.submit((0..128).map(store)).expect("begun"), Vec::new());
    std::thread::sleep(3 * timeout);
    while done.len() < submitted {
        client.poll(&mut done);
    }
    assert!(done.iter().all(|end| end.result.is_ok()), "{:?}", client.nodes());
}

#[test]
fn pages_are_spread_over_nodes() {
    let nodes = [0; 3].map(|_| node_over(PathChoice::Local, MIB, |_| ()));
    let config = ClientConfig {
        nodes: nodes.iter().map(MemoryNode::listens_at).collect(),
        ..config_of(&nodes[0], PathChoice::Local, 300)
    };
    let client = Client::connect(&config).expect("a client");
    for page in 0..300 {
        client.store(page, &content(page, 1)).expect("stored");
    }
    assert!(nodes.iter().all(|node| node.status().free_pages == 156));
    let mut bytes = [0; PAGE_BYTES];
    for page in 0..300 {
        client.load(page, &mut bytes).expect("loaded");
        assert!(bytes == content(page, 1), "{page}");
    }
}

#[test]
fn a_mirrored_page_outlives_its_node_and_another_one_does_not() {
    for copies in [1, 2] {
        let mut nodes =
            vec![node_over(PathChoice::Udp, MIB, |_| ()), node_over(PathChoice::Udp, MIB, |_| ())];
        let config = ClientConfig {
            nodes: nodes.iter().map(MemoryNode::listens_at).collect(),
            copies,
            ..config_of(&nodes[0], PathChoice::Udp, 64)
        };
        let client = Client::connect(&config).expect("a client");
        for page in 0..64 {
            client.store(page, &content(page, 1)).expect("stored");
        }
        drop(nodes.pop());
        let mut bytes = [0; PAGE_BYTES];
        for page in 0..64 {
            let is_left = copies == 2 || page % 2 == 0;
            match client.load(page, &mut bytes) {
                Ok(()) => assert!(is_left && bytes == content(page, 1), "{page}"),
                Err(error) => assert_eq!((is_left, error), (false, PageError::NodeLost(page))),
            }
            let stored = client.store(page, &content(page, 2));
            assert_eq!(stored.is_ok(), is_left, "{stored:?}");
            if is_left {
                client.load(page, &mut bytes).expect("loaded");
                assert!(bytes == content(page, 2), "{page}");
            }
        }
        let lost: Vec<bool> = client.nodes().iter().map(|node| node.lost.is_some()).collect();
        assert_eq!(lost, [false, true]);
    }
}

#[test]
fn what_a_node_does_not_grant_is_refused_with_a_reason() {
    let node = node_over(PathChoice::Local, 16 * PAGE_BYTES as u64, |config| config.clients_max = 1);
    let refused = |change: &dyn Fn(&mut ClientConfig)| {
        let mut config = config_of(&node, PathChoice::Local, 16);
        change(&mut config);
        Client::connect(&config).err().expect("refused").to_string()
    };
    assert!(refused(&|config| config.page_count = 16 * 64 + 1).contains("1 to 1024 pages"));
    assert!(refused(&|config| config.name = "x".repeat(65)).contains("name"));
    let client = client_of(&node, PathChoice::Local, 16);
    assert!(refused(&|_| ()).contains("1 clients already"));
    assert_eq!(node_status(node.listens_at()).expect("an answer").clients.len(), 1);
    let mut bytes = [0; PAGE_BYTES];
    assert_eq!(client.load(16, &mut bytes), Err(PageError::OutOfRange { page: 16, page_count: 16 }));
    drop(client);
    wait_until("the client is gone", || node.status().clients.is_empty());
    drop(client_of(&node, PathChoice::Local, 16));
}

/// The node reads all tables when it makes the free-page queue anew.
#[test]
fn a_client_with_the_largest_space_leaves_room_for_others() {
    const POOL: u64 = 16;
    let node = node_over(PathChoice::Local, POOL * PAGE_BYTES as u64, |_| ());
    let connect = |pages| Client::connect(&config_of(&node, PathChoice::Local, pages));
    let largest = connect(64 * POOL).expect("a client");
    let others = [POOL, 2 * POOL].map(|pages| connect(pages).expect("a client"));
    let refused = connect(2 * POOL).err().expect("refused").to_string();
    assert!(refused.contains("up to 16 pages has room"), "{refused}");
    others[0].store(0, &content(0, 1)).expect("stored");
    drop(largest);
    wait_until("there is room", || connect(2 * POOL).is_ok());
}

#[test]
fn lines_that_are_no_requests_disturb_nobody() {
    use std::io::{Read, Write};
    let node = node_over(PathChoice::Local, MIB, |_| ());
    let client = client_of(&node, PathChoice::Local, 16);
    let long = vec![b'x'; 10_000];
    let deep = [b"[".repeat(4000), b"\n".to_vec()].concat();
    for bytes in
        [b"\n".to_vec(), b"GET / HTTP/1.0\r\n\r\n".to_vec(), b"{\"connect\":{}}\n".to_vec(), long, deep]
    {
        let mut stream = std::net::TcpStream::connect(node.listens_at()).expect("a connection");
        let _ = stream.write_all(&bytes);
        let mut answer = Vec::new();
        // The node answers, or only closes.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.starts_with(b"{\"refused\":"), "{answer:?}");
    }
    client.store(1, &content(1, 1)).expect("stored");
}
