//! Clients of a region of 4 KiB pages in frames: what they learn of its residency, and what that costs.

mod common;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LOOPBACK, content, wait_for};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use terrace_access::residency::{PULL_BYTES_MAX, PULL_INTERVAL_NS};
use terrace_access::signature::SignaturePage;
use terrace_memory::Translation;
use terrace_nic::*;
use terrace_node::*;
use terrace_pages::{BackingFile, PagedRegion, Pages, PagesConfig};

/// `ibv_access_flags`: everything but windows.
const ACCESS: u32 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 8 | 1 << 9;
const PAGE: u64 = 4096;
const GIB: u64 = 1 << 30;

struct Progress(Arc<Pages>);

impl ProgressCallback for Progress {
    fn advance(&self) -> bool {
        self.0.advance()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.descriptor())
    }
}

/// A node with one region.
struct Node {
    device: Arc<Device>,
    region: Arc<PagedRegion>,
    _agent: Arc<Agent>,
    _directory: tempfile::TempDir,
}

impl Node {
    fn new(region_bytes: u64, frames: u64) -> Node {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let name = directory.path().file_name().and_then(|name| name.to_str()).expect("a name");
        let budget_bytes = frames * (PAGE + 15) + (144 << 10);
        let pages = Pages::open(PagesConfig { is_kept: false, ..PagesConfig::new(name, budget_bytes) });
        let pages = pages.expect("a pool");
        let file = BackingFile::open(&directory.path().join("region"), Some(region_bytes)).expect("a file");
        let region = pages.add(file).expect("a region");
        let port = PortConfig { address: Some(LOOPBACK), path: PathChoice::Udp, ..PortConfig::default() };
        let device = Device::open(port.device().expect("a port")).expect("a device");
        let agent = Agent::attach(&device, pages.quota_bytes()).expect("an agent");
        device.attach(Arc::new(Progress(pages)));
        let signature_key = [7; 32];
        let paging = Paging {
            pager: region.clone(),
            pattern: SignaturePage::derive(&signature_key).shared(),
            policy: RegionPolicy::Wait,
        };
        let range = region.range();
        let request =
            MrRequest { addr: range.addr, length: range.len, iova: 0, access: ACCESS, paging: Some(paging) };
        let mr = device.alloc_pd().expect("a domain").reg_mr(request).expect("registered");
        let name = Some("data".into());
        let pager = region.clone();
        agent
            .export(Exported { mr, access: ACCESS, pager, signature_key, mode: Mode::OneSided, name })
            .expect("exported");
        Node { device, region, _agent: agent, _directory: directory }
    }

    fn client(&self) -> Client {
        let config = ClientConfig::new(LOOPBACK);
        let port = PortConfig { path: PathChoice::Udp, ..config.port };
        let instance = self.device.snapshot().slot;
        Client::connect(&ClientConfig { instance, port, ..config }).expect("a client")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.device.close();
    }
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
    let node = Node::new(400 * PAGE, 100);
    let client = node.client();
    let region = client.open("data").expect("the region");
    let buffer = client.buffer(PAGE as usize).expect("a buffer");
    // The first accesses request the grant; until then the NIC waits for absent pages.
    let mut granted =
        (50..400).map(|page| requests_of(&client, || check_page(&client, &region, &buffer, page, 0)));
    assert!(granted.any(|requests| requests > 0));
    for page in 0..50 {
        let read = || check_page(&client, &region, &buffer, page, 0);
        assert_eq!(requests_of(&client, read), 1, "page {page} is absent");
        let read_again = || (0..5).for_each(|_| check_page(&client, &region, &buffer, page, 0));
        assert_eq!(requests_of(&client, read_again), 0, "page {page} is present");
    }
}

#[test]
fn a_page_that_another_client_brings_is_read_one_sidedly_after_a_few_pulls() {
    let node = Node::new(400 * PAGE, 100);
    let (client, other) = (node.client(), node.client());
    let (region, same) = (client.open("data").expect("the region"), other.open("data").expect("the region"));
    let (buffer, others) = (client.buffer(PAGE as usize).unwrap(), other.buffer(PAGE as usize).unwrap());
    let pull_some = || {
        let (before, started) = (client.counters().pulled_bytes, Instant::now());
        while client.counters().pulled_bytes < before + 2 * 56 {
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
    let node = Node::new(400 * PAGE, 100);
    let (client, other) = (node.client(), node.client());
    let (region, same) = (client.open("data").expect("the region"), other.open("data").expect("the region"));
    let (buffer, others) = (client.buffer(PAGE as usize).unwrap(), other.buffer(PAGE as usize).unwrap());
    let (mut random, mut versions) = (StdRng::seed_from_u64(5), vec![0; 400]);
    let mut requests = 0;
    for step in 1..1500 {
        // The other client's accesses evict pages, and the client's view does not follow.
        let written = random.random_range(0..400);
        versions[written as usize] = step;
        write_page(&other, &same, &others, written, step);
        let page = [written, random.random_range(0..20), random.random_range(0..400)][step as usize % 3];
        let read = || check_page(&client, &region, &buffer, page, versions[page as usize]);
        requests += requests_of(&client, read);
    }
    let stats = node.region.stats();
    assert!(stats.evictions > 500, "{stats:?}");
    assert!((250..1250).contains(&requests), "{requests} of 1500 reads by RPC");
}

#[test]
fn a_client_of_256_gib_pulls_little_of_the_bitmap() {
    let node = Node::new(256 * GIB, 1000);
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
    assert!(node.region.stats().misses > 1000);
}
