//! Clients of a region of 4 KiB pages in frames: what they learn of its residency, and what that costs.

mod common;

use std::time::{Duration, Instant};

use common::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_access::residency::{PULL_BYTES_MAX, PULL_INTERVAL_NS};
use terrace_nic::Buffer;
use terrace_node::*;

const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;
/// The bitmap of 16 MiB.
const BITMAP_BYTES: u64 = 16 * MIB / PAGE / 8;

/// A node whose clients fetch absent pages.
fn node(name: &str, region_bytes: u64, dram_bytes: u64) -> Node {
    Node::new(&format!("pages-{name}"), ServeMode::Term, region_bytes, dram_bytes)
}

/// Reads a page, and compares its bytes.
fn check_page(client: &Client, region: &Region<'_>, buffer: &Buffer, page: u64, version: u64) {
    region.read(page * PAGE, buffer, 0, PAGE as u32, 1).expect("begun");
    wait_for(client, 1);
    let mut bytes = vec![0; PAGE as usize];
    buffer.read(0, &mut bytes).expect("within");
    let expected =
        if version == 0 { vec![0; PAGE as usize] } else { content(page * PAGE, PAGE as usize, version) };
    assert!(bytes == expected, "page {page}, version {version}");
}

fn write_page(client: &Client, region: &Region<'_>, buffer: &Buffer, page: u64, version: u64) {
    buffer.write(0, &content(page * PAGE, PAGE as usize, version)).expect("within");
    region.write(page * PAGE, buffer, 0, PAGE as u32, 1).expect("begun");
    wait_for(client, 1);
}

/// The requests of a client by which it reads a page.
fn requests_of(client: &Client, read: impl FnOnce()) -> u64 {
    let before = client.counters().requests;
    read();
    client.counters().requests - before
}

#[test]
fn a_page_that_was_fetched_is_read_one_sidedly() {
    let node = node("fetched", 16 * MIB, 4 * MIB);
    let client = node.client();
    let region = client.open("data").expect("the region");
    let buffer = client.buffer(PAGE as usize).expect("a buffer");
    // The first accesses request the grant; until then the NIC waits for absent pages.
    let mut granted =
        (50..400).map(|page| requests_of(&client, || check_page(&client, &region, &buffer, page, 0)));
    assert!(granted.any(|requests| requests > 0));
    for page in 0..50 {
        let pulled_before = client.counters().pulled_bytes;
        let read = || check_page(&client, &region, &buffer, page, 0);
        assert_eq!(requests_of(&client, read), 1, "page {page} is absent");
        let read_again = || (0..5).for_each(|_| check_page(&client, &region, &buffer, page, 0));
        let requests = requests_of(&client, read_again);
        // A pull that began before the fetch has found the page absent, which costs one request.
        let pulls = (client.counters().pulled_bytes - pulled_before) / BITMAP_BYTES;
        assert!(requests <= pulls, "page {page} is present: {requests} requests, {pulls} pulls");
    }
}

#[test]
fn a_page_that_another_client_brings_is_read_one_sidedly_after_a_few_pulls() {
    let node = node("brought", 16 * MIB, 4 * MIB);
    let (client, other) = (node.client(), node.client());
    let (region, same) = (client.open("data").expect("the region"), other.open("data").expect("the region"));
    let (buffer, others) = (client.buffer(PAGE as usize).unwrap(), other.buffer(PAGE as usize).unwrap());
    let pull_some = || {
        let (before, started) = (client.counters().pulled_bytes, Instant::now());
        while client.counters().pulled_bytes < before + 2 * BITMAP_BYTES {
            check_page(&client, &region, &buffer, 0, 0);
            assert!(started.elapsed() < Duration::from_secs(10), "nothing is pulled");
        }
        started.elapsed()
    };
    // The first access requests the grant. Afterwards absent pages are requested without a READ.
    pull_some();
    let read_absent = || check_page(&client, &region, &buffer, 5, 0);
    assert_eq!(requests_of(&client, read_absent), 1);
    check_page(&other, &same, &others, 7, 0);
    pull_some();
    assert_eq!(requests_of(&client, || check_page(&client, &region, &buffer, 7, 0)), 0);
}

#[test]
fn a_client_with_an_old_view_reads_what_was_written() {
    let node = node("old", 16 * MIB, 4 * MIB);
    let (client, other) = (node.client(), node.client());
    let (region, same) = (client.open("data").expect("the region"), other.open("data").expect("the region"));
    let (buffer, others) = (client.buffer(PAGE as usize).unwrap(), other.buffer(PAGE as usize).unwrap());
    let (mut random, mut versions) = (StdRng::seed_from_u64(5), vec![0; 2000]);
    let mut requests = 0;
    for step in 1..1500 {
        // The other client's accesses evict pages, and the client's view does not follow.
        let written = random.random_range(0..2000);
        versions[written as usize] = step;
        write_page(&other, &same, &others, written, step);
        let page = [written, random.random_range(0..20), random.random_range(0..2000)][step as usize % 3];
        let read = || check_page(&client, &region, &buffer, page, versions[page as usize]);
        requests += requests_of(&client, read);
    }
    let stats = &node.server.stats().regions[0];
    assert!(stats.evictions > 200, "{stats:?}");
    assert!((200..1250).contains(&requests), "{requests} of 1500 reads by fetches");
}

#[test]
fn a_client_of_256_gib_pulls_little_of_the_bitmap() {
    let node = node("large", 256 * GIB, 4 * MIB);
    let client = node.client();
    let region = client.open("data").expect("the region");
    let buffer = client.buffer(64 * PAGE as usize).expect("a buffer");
    let (mut random, started) = (StdRng::seed_from_u64(6), Instant::now());
    let last_page = 256 * GIB / PAGE - 1;
    write_page(&client, &region, &buffer, last_page, 9);
    while started.elapsed() < Duration::from_secs(2) {
        let spans: Vec<Span> = (0..64)
            .map(|tag| Span {
                offset: random.random_range(0..last_page) * PAGE,
                at: (tag * PAGE) as usize,
                len: PAGE as u32,
                tag,
            })
            .collect();
        region.read_many(&buffer, &spans).expect("begun");
        wait_for(&client, 64);
        let mut bytes = vec![1; 64 * PAGE as usize];
        buffer.read(0, &mut bytes).expect("within");
        assert!(bytes.iter().all(|&byte| byte == 0), "a hole of the file");
    }
    check_page(&client, &region, &buffer, last_page, 9);
    let pulled_bytes = client.counters().pulled_bytes;
    let periods = started.elapsed().as_nanos() as u64 / PULL_INTERVAL_NS + 1;
    println!("{pulled_bytes} bytes of 8 MiB pulled in {periods} periods");
    assert!(pulled_bytes > 0 && pulled_bytes <= periods * PULL_BYTES_MAX as u64);
    assert!(node.server.stats().regions[0].misses > 100);
}

/// Reads pages that are absent, all in one call or one by one. Returns what the client has requested.
fn read_absent(mode: ServeMode, at_once: bool) -> ClientCounters {
    let name = if at_once { "pages-at-once" } else { "pages-one-by-one" };
    let node = Node::new(name, mode, 16 * MIB, 20 * MIB);
    let client = node.client();
    let region = client.open("data").expect("the region");
    let buffer = client.buffer(64 * PAGE as usize).expect("a buffer");
    // The first accesses request the grant; until then the NIC waits for absent pages.
    let mut granted =
        (3000..4000).map(|page| requests_of(&client, || check_page(&client, &region, &buffer, page, 0)));
    assert!(granted.any(|requests| requests > 0));
    let before = client.counters();
    for round in 0..10 {
        let span = |tag: u64| Span {
            offset: (round * 64 + tag) * PAGE,
            at: (tag * PAGE) as usize,
            len: PAGE as u32,
            tag,
        };
        let spans: Vec<Span> = (0..64).map(span).collect();
        for group in spans.chunks(if at_once { 64 } else { 1 }) {
            region.read_many(&buffer, group).expect("begun");
            wait_for(&client, group.len());
        }
    }
    let after = client.counters();
    ClientCounters {
        requests: after.requests - before.requests,
        messages: after.messages - before.messages,
        answers: after.answers - before.answers,
        pulled_bytes: 0,
    }
}

#[test]
fn absent_pages_are_fetched_without_messages() {
    for at_once in [false, true] {
        let ClientCounters { requests, messages, answers, .. } = read_absent(ServeMode::Term, at_once);
        assert_eq!((requests, messages, answers), (640, 0, 0));
    }
}

#[test]
fn reads_of_one_poll_share_messages() {
    let one_by_one = read_absent(ServeMode::RpcDirect, false);
    assert_eq!((one_by_one.requests, one_by_one.messages, one_by_one.answers), (640, 640, 640));
    let at_once = read_absent(ServeMode::RpcDirect, true);
    println!("64 accesses at a time: {at_once:?}");
    assert_eq!(at_once.requests, 640);
    assert!(at_once.messages <= 320 && at_once.answers <= 320, "{at_once:?}");
}
