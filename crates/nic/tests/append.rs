//! APPEND: each acknowledged record is there once and whole, at the offset that its client got, whatever the network
//! loses and whichever client disappears; and what refuses a record.

mod common;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use common::cells::Bytes;
use common::pager::TestPager;
use common::units::UNIT_BYTES;
use common::*;
use terrace_fabric::sim::{SimConfig, SimNet};
use terrace_hostmem::HostRange;
use terrace_memory::AccessError;
use terrace_nic::*;

/// Bytes of the region that grows. Records lie elsewhere: the test's pager keeps them.
const LEN: usize = 64 << 10;
/// Where a client's memory has the offsets of its records.
const OFFSETS: u64 = 1 << 19;
/// First bytes of a record: who appended it, and its length.
const HEAD: usize = 12;

/// A region to which peers append.
struct Log {
    _cells: Arc<[AtomicU8]>,
    pager: Arc<TestPager>,
    mr: Arc<Mr>,
}

impl Log {
    fn new(node: &Node, access: u32) -> Log {
        let cells: Arc<[AtomicU8]> = (0..LEN).map(|_| AtomicU8::new(0)).collect();
        let memory = HostRange { addr: cells.as_ptr() as u64, len: LEN as u64 };
        let pager = TestPager::new(memory, UNIT_BYTES / 2, Box::new(Bytes(cells.clone())));
        let policy = RegionPolicy::Wait;
        let paging = Paging { pager: pager.clone(), pattern: Arc::new([0xa5; 4096]), policy };
        let request =
            MrRequest { addr: memory.addr, length: memory.len, iova: 0, access, paging: Some(paging) };
        Log { mr: node.pd.reg_mr(request).expect("a region"), pager, _cells: cells }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.mr.dereg().expect("nothing is bound to it");
    }
}

/// A record of `len` bytes, which all depend on its identity.
fn record(id: u64, len: usize) -> Vec<u8> {
    let mut bytes = id.to_le_bytes().to_vec();
    bytes.extend((len as u32).to_le_bytes());
    bytes.extend(pattern(len - HEAD, (id ^ id >> 8) as u8));
    bytes
}

/// An APPEND of a record that lies at `from`; its offset goes to the `id`th word behind [`OFFSETS`].
fn append(node: &Node, wr_id: u64, rkey: u32, (from, len): (u64, usize)) -> SendWr {
    let sges = [node.sge(from, len as u32), node.sge(OFFSETS + 8 * wr_id, 8)];
    SendWr {
        wr_id,
        op: SendOp::Append { rkey, commit: wr_id.is_multiple_of(3) },
        payload: Payload::Sges(SgeList::from_slice(&sges)),
        flags: SendFlags::SIGNALED,
        target: None,
    }
}

/// The identities of the records in a log, by their offsets. Panics if the log has anything but whole records.
fn parse(log: &[u8]) -> BTreeMap<u64, u64> {
    let mut records = BTreeMap::new();
    let mut at = 0;
    while at < log.len() {
        let id = u64::from_le_bytes(log[at..at + 8].try_into().expect("a head"));
        let len = u32::from_le_bytes(log[at + 8..at + HEAD].try_into().expect("a head")) as usize;
        assert_eq!(log[at..at + len], record(id, len), "the record at {at} is torn");
        records.insert(at as u64, id);
        at += len;
    }
    records
}

/// A client: its records, and when each was posted and completed.
struct Client {
    node: Node,
    qp: Arc<QueuePair>,
    /// The server's end.
    theirs: Arc<QueuePair>,
    number: u64,
    posted: Vec<Time>,
    completed: Vec<Time>,
    /// Where the next record lies in the client's memory.
    next_at: usize,
    is_dead: bool,
}

impl Client {
    fn record(&self, index: u64) -> Vec<u8> {
        // Around the packet boundaries, and some long ones.
        let len = [HEAD, 64, 1012, 1024, 1025, 2048, 5000, 20_000][(index * 7 + self.number) as usize % 8];
        record(self.number << 32 | index, len)
    }

    /// Posts the next record.
    fn post(&mut self, now: Time, rkey: u32) {
        let index = self.posted.len() as u64;
        let bytes = self.record(index);
        self.node.memory.fill(self.next_at, &bytes);
        let wr = append(&self.node, index, rkey, (self.next_at as u64, bytes.len()));
        self.qp.post_send([Ok(wr)]).expect("posted");
        self.next_at += bytes.len();
        assert!(self.next_at <= OFFSETS as usize);
        self.posted.push(now);
    }

    /// Takes completions, which must come in order.
    fn poll(&mut self, now: Time) {
        let completed = &mut self.completed;
        let take = &mut |wc: &Wc| {
            assert_eq!((wc.wr_id, wc.status), (completed.len() as u64, WcStatus::Success));
            assert_eq!(wc.opcode, WcOpcode::Append);
            completed.push(now);
        };
        self.node.cq.poll(64, take).expect("a healthy queue");
    }

    fn offset_of(&self, index: usize) -> u64 {
        self.node.memory.u64_at(OFFSETS as usize + 8 * index)
    }
}

/// A server with a log, and clients, on a simulated network.
struct World {
    net: SimNet,
    clock: Arc<ManualClock>,
    log: Log,
    server: Node,
    clients: Vec<Client>,
}

impl World {
    fn new(seed: u64, config: SimConfig, clients: u64) -> World {
        let net = SimNet::new(seed, config);
        let clock = Arc::new(ManualClock::new());
        let open = |number: u64| {
            let port = net.port(IpAddr::V4(Ipv4Addr::new(10, 0, (number >> 8) as u8, number as u8 + 1)));
            let config = DeviceConfig::simulated(Box::new(port), clock.clone(), seed ^ number << 32);
            Node::with(config, 1 << 20)
        };
        let server = open(0);
        let log = Log::new(&server, REMOTE_ALL);
        let (mut draws, drawn_at) = (seed | 1, clock.clone());
        let schedule = move || {
            draws = draws.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            drawn_at.now().0 + (draws >> 33) % 300_000
        };
        log.pager.set_habits(6, Box::new(schedule));
        let tuning = Tuning { max_rd_atomic: 8, ..Tuning::default() };
        let clients = (1..=clients).map(|number| {
            let node = open(number);
            let (qp, theirs) = pair_on(&node, &server, QpType::Rc, &tuning);
            let (posted, completed) = (Vec::new(), Vec::new());
            Client { node, qp, theirs, number, posted, completed, next_at: 0, is_dead: false }
        });
        let clients = clients.collect();
        World { net, clock, log, server, clients }
    }

    /// Steps the pager and the devices, then advances the time to the next event.
    fn turn(&self) {
        let now = Time(self.net.now());
        self.log.pager.complete_due(now.0);
        let alive = self.clients.iter().filter(|client| !client.is_dead).map(|client| &client.node.device);
        let devices: Vec<_> = alive.chain([&self.server.device]).collect();
        for device in &devices {
            device.step(now);
        }
        let deadlines = devices.iter().filter_map(|device| device.next_deadline());
        let next =
            deadlines.map(|time| time.0).chain(self.net.next_delivery()).chain(self.log.pager.next_due());
        self.net.advance_to(next.min().expect("something will happen").max(now.0));
        self.clock.set(Time(self.net.now()));
    }

    /// Has each client that lives append `count` records, 8 at a time. At some turns a client dies.
    fn run(&mut self, count: usize, deaths: &[(usize, usize)]) {
        let rkey = self.log.mr.rkey();
        for turn in 0..1_000_000 {
            if let Some((_, victim)) = deaths.iter().find(|(at, _)| *at == turn) {
                self.clients[*victim].is_dead = true;
            }
            let now = Time(self.net.now());
            let mut is_done = true;
            for client in self.clients.iter_mut().filter(|client| !client.is_dead) {
                client.poll(now);
                while client.posted.len() < count.min(client.completed.len() + 8) {
                    client.post(now, rkey);
                }
                is_done &= client.completed.len() == count;
            }
            if is_done {
                return;
            }
            self.turn();
        }
        panic!("too many turns");
    }

    /// Checks the log: whole records without holes, each once, each acknowledged one at its offset, in an order that
    /// agrees with the order of the requests and with the times at which they began and ended.
    fn check(&self) {
        let log = self.log.pager.records();
        let records = parse(&log);
        let mut latest_start = Time(0);
        for (at, id) in &records {
            let client = &self.clients[(id >> 32) as usize - 1];
            let index = *id as u32 as usize;
            let length = client.record(index as u64).len();
            assert_eq!(client.record(index as u64), log[*at as usize..][..length]);
            if let Some(end) = client.completed.get(index) {
                assert_eq!(client.offset_of(index), *at, "record {index} of client {}", client.number);
                assert!(*end >= latest_start, "a record that had ended lies behind one that began later");
            }
            latest_start = latest_start.max(client.posted[index]);
        }
        let mut latest = BTreeMap::new();
        for id in records.values() {
            let before = latest.insert(id >> 32, *id);
            assert!(
                before.is_none_or(|before| before < *id),
                "a client's records are not in its order, or not once"
            );
        }
        let acknowledged: usize = self.clients.iter().map(|client| client.completed.len()).sum();
        let posted: usize = self.clients.iter().map(|client| client.posted.len()).sum();
        assert!((acknowledged..=posted).contains(&records.len()));
    }

    fn count(&self, name: &str) -> u64 {
        let snapshot = self.server.device.snapshot();
        snapshot.queue_pairs.iter().map(|queue_pair| queue_pair.counts[name]).sum()
    }
}

#[test]
fn each_acknowledged_record_is_there_once_through_a_bad_network() {
    let (mut duplicates, mut waits) = (0, 0);
    for seed in 0..12 {
        println!("seed {seed}");
        let mut world = World::new(seed, bad_weather(), 4);
        world.run(30, &[]);
        world.check();
        duplicates += world.count("duplicates");
        waits += world.count("rnr_naks_sent");
    }
    assert!(duplicates > 0 && waits > 0, "{duplicates} duplicates, {waits} RNR NAKs");
}

#[test]
fn clients_that_die_leave_whole_records_or_none() {
    for seed in 0..12 {
        println!("seed {seed}");
        let mut world = World::new(100 + seed, bad_weather(), 6);
        world.run(24, &[(20 + 7 * seed as usize, 0), (60, 3), (90 + 5 * seed as usize, 5)]);
        let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
        for client in world.clients.iter().filter(|client| client.is_dead) {
            client.theirs.modify(&error, QpAttrMask::STATE).expect("the error state");
        }
        world.check();
    }
}

#[test]
fn sixty_four_clients_append_to_one_log() {
    let mut world = World::new(7, SimConfig { loss: 0.02, ..SimConfig::default() }, 64);
    world.run(4, &[]);
    world.check();
    assert_eq!(parse(&world.log.pager.records()).len(), 256);
}

/// Two nodes with one connection, and a log at the second one.
struct Pair {
    a: Node,
    qa: Arc<QueuePair>,
    log: Log,
    _b: Node,
}

fn pair(nodes: [Node; 2], access: u32) -> Pair {
    let [a, b] = nodes;
    let (qa, _) = rc_pair(&a, &b);
    Pair { a, qa, log: Log::new(&b, access), _b: b }
}

/// Appends a record of `len` bytes, and returns the status of its completion.
fn append_one(pair: &Pair, len: usize) -> WcStatus {
    let bytes = record(1, len);
    pair.a.memory.fill(0, &bytes);
    let wr = append(&pair.a, 0, pair.log.mr.rkey(), (0, len));
    pair.qa.post_send([Ok(wr)]).expect("posted");
    let done = std::cell::Cell::new(None);
    wait_until("it completes", || {
        pair.log.pager.complete_one(Ok(()));
        pair.a.cq.poll(1, &mut |wc| done.set(Some(wc.status))).expect("a healthy queue");
        done.get().is_some()
    });
    done.get().expect("it is complete")
}

#[test]
fn records_of_up_to_1_mib_are_appended_over_udp_and_within_the_host() {
    for nodes in [[Node::udp(), Node::udp()], [Node::local(), Node::local()]] {
        let pair = pair(nodes, REMOTE_ALL);
        let mut end = 0;
        for len in [HEAD, 100, 4096, 100_000, APPEND_LEN_MAX as usize / 2] {
            assert_eq!(append_one(&pair, len), WcStatus::Success, "{len} bytes");
            assert_eq!(pair.a.memory.u64_at(OFFSETS as usize), end);
            end += len as u64;
        }
        assert_eq!(parse(&pair.log.pager.records()).len(), 5);
    }
}

#[test]
fn a_key_without_write_access_and_an_ordinary_region_take_no_records() {
    let read_only = pair([Node::udp(), Node::udp()], 4);
    assert_eq!(append_one(&read_only, 100), WcStatus::RemoteAccess);
    let (a, b) = (Node::udp(), Node::udp());
    let (qa, _qb) = rc_pair(&a, &b);
    qa.post_send([Ok(append(&a, 0, b.mr.rkey(), (0, 100)))]).expect("posted");
    assert_eq!(a.completion().status, WcStatus::RemoteAccess);
}

#[test]
fn a_full_device_is_a_remote_operation_error() {
    let pair = pair([Node::udp(), Node::udp()], REMOTE_ALL);
    pair.qa.post_send([Ok(append(&pair.a, 0, pair.log.mr.rkey(), (0, 100)))]).expect("posted");
    wait_until("the pager is asked", || pair.log.pager.counts().1 > 0);
    assert!(pair.log.pager.complete_one(Err(AccessError::NoSpace)));
    assert_eq!(pair.a.completion().status, WcStatus::RemoteOperation);
}
