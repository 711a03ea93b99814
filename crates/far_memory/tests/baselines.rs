//! The baselines that ODRP is compared with: pages are what was stored last, and limits hold, as with chains.

mod common;

use std::collections::HashMap;
use std::time::Instant;

use common::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use terrace_far_memory::*;
use terrace_nic::PathChoice;

/// Runs a test with each baseline, within the host and by UDP.
fn on_each_baseline(test: impl Fn(Scheme, PathChoice)) {
    for scheme in BASELINES {
        for path in [PathChoice::Local, PathChoice::Udp] {
            test(scheme, path);
        }
    }
}

fn baseline(scheme: Scheme, path: PathChoice, memory_bytes: u64) -> MemoryNode {
    node_over(path, memory_bytes, |config| config.scheme = scheme)
}

/// Polls until so many operations have ended.
fn poll_until(client: &Client, count: usize, done: &mut Vec<Completion>) {
    let started = Instant::now();
    while done.len() < count {
        assert!(started.elapsed() < PATIENCE, "{} of {count} operations have ended", done.len());
        client.poll(done);
    }
}

/// Pages that clients have on a node of this scheme for so many pages that are stored from page 0.
fn reserved(scheme: Scheme, stored_pages: u64, space_pages: u64) -> u64 {
    match scheme {
        Scheme::Static => space_pages,
        Scheme::Dynamic1M => stored_pages.next_multiple_of(256),
        _ => stored_pages,
    }
}

#[test]
fn a_page_is_loaded_as_it_was_stored_last() {
    on_each_baseline(|scheme, path| {
        let node = baseline(scheme, path, 4 * MIB);
        let client = client_of(&node, path, 1000);
        let (mut rng, mut known, mut page) = (SmallRng::seed_from_u64(7), HashMap::new(), [0; PAGE_BYTES]);
        for version in 0..2000 {
            let number = rng.random_range(0..1000) / 7;
            match rng.random_range(0..10) {
                0..5 => {
                    client.store(number, &content(number, version)).expect("stored");
                    known.insert(number, version);
                }
                5..8 => match (client.load(number, &mut page), known.get(&number)) {
                    (Ok(()), Some(version)) => {
                        assert!(page == content(number, *version), "{scheme} {number}")
                    }
                    (result, known) => assert_eq!((result, known), (Err(PageError::NotStored(number)), None)),
                },
                _ => {
                    client.invalidate(number).expect("invalidated");
                    known.remove(&number);
                }
            }
        }
        assert_eq!(client.stored_pages(), known.len() as u64);
        known.keys().for_each(|number| client.invalidate(*number).expect("invalidated"));
        assert_eq!(node.status().clients[0].pages, reserved(scheme, 0, 1000), "{scheme}");
    });
}

#[test]
fn many_operations_are_in_flight_and_those_of_a_page_are_in_order() {
    on_each_baseline(|scheme, path| {
        let node = baseline(scheme, path, 4 * MIB);
        // More than a queue pair has in flight.
        let config = ClientConfig { depth: 600, ..config_of(&node, path, 600) };
        let client = Client::connect(&config).expect("a client");
        let buffer = client.buffer(601).expect("a buffer");
        (0..600).for_each(|at| buffer.write(at, &content(at as u64, 1)).expect("within the buffer"));
        let store = |page: u64| Request::Store { page, from: (buffer.clone(), page as usize), tag: page };
        let (mut done, submitted) = (Vec::new(), client.submit((0..600).map(store)).expect("begun"));
        poll_until(&client, submitted, &mut done);
        assert!(done.iter().all(|end| end.result.is_ok()), "{scheme}");
        buffer.write(0, &content(7, 2)).expect("within the buffer");
        done.clear();
        let requests = [
            Request::Store { page: 7, from: (buffer.clone(), 0), tag: 1 },
            Request::Load { page: 7, into: (buffer.clone(), 600), tag: 2 },
            Request::Invalidate { page: 7, tag: 3 },
            Request::Load { page: 7, into: (buffer.clone(), 1), tag: 4 },
        ];
        client.submit(requests).expect("begun");
        poll_until(&client, 4, &mut done);
        let results: Vec<_> = done.iter().map(|end| (end.tag, end.result)).collect();
        assert_eq!(results, [(1, Ok(())), (2, Ok(())), (3, Ok(())), (4, Err(PageError::NotStored(7)))]);
        let mut page = [0; PAGE_BYTES];
        buffer.read(600, &mut page).expect("within the buffer");
        assert!(page == content(7, 2), "{scheme}");
        for number in (0..600).filter(|number| *number != 7) {
            client.load(number, &mut page).expect("loaded");
            assert!(page == content(number, 1), "{scheme} {number}");
        }
    });
}

#[test]
fn an_empty_pool_refuses_stores_until_memory_is_free() {
    for scheme in [Scheme::Dynamic1M, Scheme::Dynamic4K, Scheme::TwoSided] {
        let node = baseline(scheme, PathChoice::Local, 2 * MIB);
        let [one, other] = [0; 2].map(|_| client_of(&node, PathChoice::Local, 1024));
        (0..512).for_each(|page| one.store(page, &content(page, 1)).expect("stored"));
        assert_eq!(node.status().free_pages, 0);
        assert_eq!(other.store(0, &content(0, 2)), Err(PageError::PoolEmpty), "{scheme}");
        assert!(!other.is_stored(0));
        // Pages that were stored may still be stored anew.
        one.store(3, &content(3, 3)).expect("stored");
        (0..256).for_each(|page| one.invalidate(page).expect("invalidated"));
        other.store(0, &content(0, 2)).expect("stored");
        let mut page = [0; PAGE_BYTES];
        other.load(0, &mut page).expect("loaded");
        assert!(page == content(0, 2), "{scheme}");
        one.load(300, &mut page).expect("loaded");
        assert!(page == content(300, 1), "{scheme}");
    }
}

#[test]
fn a_space_that_does_not_fit_is_refused_by_a_static_node() {
    let node = baseline(Scheme::Static, PathChoice::Local, 2 * MIB);
    let one = client_of(&node, PathChoice::Local, 300);
    let refused = Client::connect(&config_of(&node, PathChoice::Local, 300)).err().expect("refused");
    assert!(refused.to_string().contains("212 are free"), "{refused}");
    drop(one);
    wait_until("the space is free", || node.status().free_pages == 512);
    drop(client_of(&node, PathChoice::Local, 300));
}

#[test]
fn a_node_without_a_slab_is_refused() {
    let mut config = NodeConfig::new(MIB - 1, "127.0.0.1:0".parse().expect("an address"));
    config.scheme = Scheme::Dynamic1M;
    let refused = MemoryNode::open(&config).err().expect("refused");
    assert!(refused.to_string().contains("at least 1048576 bytes"), "{refused}");
}

#[test]
fn a_client_has_no_more_than_its_budget() {
    for (scheme, budget_pages) in [(Scheme::Dynamic1M, 256), (Scheme::Dynamic4K, 4), (Scheme::TwoSided, 4)] {
        let node = node_over(PathChoice::Local, 4 * MIB, |config| {
            (config.scheme, config.budget_pages) = (scheme, Some(budget_pages));
        });
        let client = client_of(&node, PathChoice::Local, 1024);
        (0..budget_pages).for_each(|page| client.store(page, &content(page, 1)).expect("stored"));
        assert_eq!(client.store(600, &content(600, 1)), Err(PageError::BudgetExhausted), "{scheme}");
        (0..budget_pages).for_each(|page| client.invalidate(page).expect("invalidated"));
        client.store(600, &content(600, 1)).expect("stored");
    }
    // A slab of 1 MiB counts as a whole.
    let node = node_over(PathChoice::Local, 4 * MIB, |config| {
        (config.scheme, config.budget_pages) = (Scheme::Dynamic1M, Some(256));
    });
    let client = client_of(&node, PathChoice::Local, 1024);
    client.store(0, &content(0, 1)).expect("stored");
    assert_eq!(client.store(256, &content(256, 1)), Err(PageError::BudgetExhausted));
}

#[test]
fn what_a_client_leaves_behind_is_free() {
    on_each_baseline(|scheme, path| {
        let node = baseline(scheme, path, 2 * MIB);
        let before = node.device().snapshot().objects;
        for round in 0..3 {
            let client = client_of(&node, path, 512);
            let buffer = client.buffer(1).expect("a buffer");
            (0..512).for_each(|page| client.store(page, &content(page, round)).expect("stored"));
            // Whatever is in flight is cut off.
            let load = |page| Request::Load { page, into: (buffer.clone(), 0), tag: page };
            client.submit((0..16).map(load)).expect("begun");
            drop(client);
            wait_until("its memory is free", || node.status().free_pages == 512);
            wait_until("its objects are gone", || node.device().snapshot().objects == before);
        }
    });
}

#[test]
fn a_mirrored_page_outlives_its_node() {
    for scheme in BASELINES {
        let mut nodes = vec![baseline(scheme, PathChoice::Udp, MIB), baseline(scheme, PathChoice::Udp, MIB)];
        let config = ClientConfig {
            nodes: nodes.iter().map(MemoryNode::listens_at).collect(),
            copies: 2,
            ..config_of(&nodes[0], PathChoice::Udp, 64)
        };
        let client = Client::connect(&config).expect("a client");
        (0..64).for_each(|page| client.store(page, &content(page, 1)).expect("stored"));
        drop(nodes.pop());
        let mut bytes = [0; PAGE_BYTES];
        for page in 0..64 {
            client.load(page, &mut bytes).expect("loaded");
            assert!(bytes == content(page, 1), "{scheme} {page}");
            client.store(page, &content(page, 2)).expect("stored");
        }
    }
}

#[test]
fn pages_use_all_memory_that_clients_have_and_slabs_and_static_spaces_do_not() {
    let share = Scheme::ALL.map(|scheme| (scheme, utilisation(scheme)));
    let [odrp, fixed, slabs, pages, two_sided] = share.map(|(_, share)| share);
    assert_eq!([odrp, pages, two_sided], [1.0; 3], "{share:?}");
    assert!(fixed < slabs && slabs < 0.9, "{share:?}");
}
