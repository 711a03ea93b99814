//! Random work requests on a random world, and the checks of their results.

use std::collections::{HashSet, VecDeque};

use smallvec::SmallVec;
use terrace_access::proto::{Mode, Status};
use terrace_access::region::Knowledge;
use terrace_access::session::{Config, Session};
use terrace_access::signature::SignaturePage;
use terrace_transport::{Payload, SendFlags, SendOp, SendWr, Sge, SgeList, Wc, WcStatus};

use crate::reference::Reference;
use crate::rng::Rng;
use crate::server::{Key, LKEY, LOCAL_BASE, Local, Memory, RKEY_BASE, Server, extended_key};
use crate::world::World;

/// A request's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    WriteInline,
    /// A fenced WRITE from memory into which READs put their data.
    WriteBack,
    WriteImm,
    Send,
    SendBack,
    FetchAdd,
    CompareSwap,
    Flush,
}

pub const OPERATIONS: [Operation; 10] = [
    Operation::Read,
    Operation::Write,
    Operation::WriteInline,
    Operation::WriteBack,
    Operation::WriteImm,
    Operation::Send,
    Operation::SendBack,
    Operation::FetchAdd,
    Operation::CompareSwap,
    Operation::Flush,
];

/// A request independent of a world: offsets are taken modulo the world's sizes.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub operation: Operation,
    pub key: usize,
    pub offset: usize,
    pub length: usize,
    pub local: usize,
    pub sge_count: usize,
    pub fence: bool,
    pub signaled: bool,
    pub content: u8,
}

impl Spec {
    pub fn random(rng: &mut Rng, longest: usize) -> Spec {
        let operation = if rng.one_in(2) { Operation::Read } else { rng.pick(&OPERATIONS) };
        let length = match rng.below(4) {
            0 => rng.within(1, 64),
            1 => rng.pick(&[256, 1024, 4095, 4096, 4097, 8192]),
            2 => rng.within(1, 9000),
            _ => rng.within(1, longest),
        };
        Spec {
            operation,
            key: rng.below(100),
            // Some random offsets, some page boundaries, and many of a few offsets, where requests overlap.
            offset: match rng.below(4) {
                0 => rng.below(1 << 24),
                1 => rng.below(1 << 12) << 12,
                _ => rng.below(3) << 12,
            },
            length,
            local: rng.below(1 << 24),
            sge_count: rng.pick(&[1, 1, 1, 2, 3, 7]),
            fence: rng.one_in(12),
            signaled: !rng.one_in(3),
            content: rng.below(4) as u8,
        }
    }
}

/// The failures of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    CallFails(usize, Status),
    PostFails(usize, WcStatus),
    PeerGone(usize),
    Flush(usize),
}

/// A world's parameters and its requests.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub mode: Option<Mode>,
    pub mtu: usize,
    /// Bytes of an extended memory, and of its units.
    pub memory_bytes: usize,
    pub unit_bytes: usize,
    pub specs: Vec<Spec>,
    pub busy_one_in: usize,
    pub in_order: bool,
    pub fault: Fault,
}

impl Scenario {
    pub fn random(seed: u64) -> Scenario {
        let mut rng = Rng(seed);
        let is_large = rng.one_in(100);
        let (memory_bytes, unit_bytes, longest, count) = if is_large {
            (6 << 20, rng.pick(&[1 << 20, 1 << 16]), 4 << 20, 6)
        } else {
            (rng.within(10, 40) * 4096, rng.pick(&[4096, 8192, 32768]), 40_000, 40)
        };
        let mode = rng.pick(&[Some(Mode::OneSided), Some(Mode::OneSided), Some(Mode::RpcOnly), None]);
        let count = rng.within(1, count);
        let specs = (0..count).map(|_| Spec::random(&mut rng, longest)).collect();
        Scenario {
            seed: rng.next(),
            mode,
            mtu: if is_large { 4096 } else { rng.pick(&[256, 1024, 4096]) },
            memory_bytes,
            unit_bytes,
            specs,
            busy_one_in: rng.pick(&[0, 0, 3]),
            in_order: rng.one_in(2),
            fault: Fault::None,
        }
    }
}

/// A work request of the program.
struct Posted {
    wr: SendWr,
    known: Knowledge,
}

pub struct Run {
    pub world: World,
    reference: Reference,
    posted: Vec<Posted>,
    /// Offset of the next data to send; the memory before it is for received data.
    next_source: usize,
    dest_bytes: usize,
    received_count: usize,
    in_order: bool,
    /// In order: the number of requests up to the last completion.
    completed_count: usize,
    /// Out of order: the completed requests.
    completed: HashSet<usize>,
    /// Requests that completed before an older one.
    pub overtaking_count: usize,
}

const SIGNATURE_SEEDS: [u8; 2] = [7, 8];

fn contents(rng: &mut Rng, kind: u8, signature: &SignaturePage, offset: usize, out: &mut [u8]) {
    match kind {
        0 => out.chunks_mut(8).for_each(|word| word.copy_from_slice(&rng.next().to_le_bytes()[..word.len()])),
        1 => out.fill(0),
        2 => out.fill(0xfd),
        _ => {
            let bytes = signature.bytes();
            out.iter_mut().zip(offset..).for_each(|(byte, at)| *byte = bytes[at % 4096]);
        }
    }
}

fn memory(rng: &mut Rng, length: usize, unit_bytes: usize, seed: Option<u8>) -> Memory {
    let signature = SignaturePage::derive(&[seed.unwrap_or(1); 32]);
    let mut bytes = vec![0; length];
    for (page, out) in bytes.chunks_mut(4096).enumerate() {
        let kind = rng.below(4) as u8;
        contents(rng, kind, &signature, page * 4096, out);
    }
    let present = (0..length.div_ceil(unit_bytes)).map(|_| rng.one_in(2)).collect();
    Memory { bytes, unit_bytes, paging: seed.map(|_| (signature, present)) }
}

fn server(rng: &mut Rng, scenario: &Scenario) -> Server {
    let (length, unit) = (scenario.memory_bytes, scenario.unit_bytes);
    let memories = vec![
        memory(rng, length, unit, Some(SIGNATURE_SEEDS[0])),
        memory(rng, length / 2, unit, None),
        memory(rng, length, unit, Some(SIGNATURE_SEEDS[1])),
    ];
    let lead = rng.pick(&[0, 4096, 123]);
    let plain = |memory: usize, base_va| Key {
        memory,
        base_va,
        length: length / 2,
        lead: 0,
        knowledge: Knowledge::Plain,
        truth: Knowledge::Plain,
    };
    let mut keys = vec![
        extended_key(0, 0, SIGNATURE_SEEDS[0], 0x7000_0000 + lead as u64, lead, length - lead, unit as u32),
        // A window on the same memory, at other addresses.
        extended_key(1, 0, SIGNATURE_SEEDS[0], 0, 9000, length / 2, unit as u32),
        plain(1, 0x9000_0000),
        extended_key(3, 2, SIGNATURE_SEEDS[1], 0x1_0000_0001, 1, length - 1, unit as u32),
        plain(1, 0xa000_0000),
        // Another window on the first memory.
        extended_key(5, 0, SIGNATURE_SEEDS[0], 0xb000_0000, 4096, length / 2, unit as u32),
    ];
    // The client learns of these later, or never.
    keys[3..].iter_mut().for_each(|key| key.knowledge = Knowledge::Unknown);
    Server {
        memories,
        keys,
        magic: HashSet::new(),
        granted: HashSet::new(),
        mode: scenario.mode,
        busy_one_in: scenario.busy_one_in,
        fail_after: None,
        fetched_pages: 0,
        calls: 0,
    }
}

impl Run {
    pub fn new(scenario: &Scenario) -> Run {
        let mut rng = Rng(scenario.seed);
        let mut server = server(&mut rng, scenario);
        let dest_bytes = scenario.specs.iter().map(|spec| spec.length).max().unwrap_or(0) + 20_000;
        let source_bytes: usize = scenario.specs.iter().map(|spec| spec.length + 64).sum();
        let local = Local { bytes: vec![0xaa; dest_bytes + source_bytes], is_gone: false };
        let config = Config {
            qpn: 0x77,
            tag: 5,
            request_count_max: rng.within(1, 50),
            post_count_max: rng.within(1, 20),
            call_count_max: rng.within(1, 8),
            mtu_bytes: scenario.mtu as u32,
            signal_all: false,
            in_order: scenario.in_order,
        };
        let reference = Reference::new(&server, &local);
        let mut fail_post = None;
        match scenario.fault {
            Fault::CallFails(count, status) => server.fail_after = Some((count, status)),
            Fault::PostFails(count, status) => fail_post = Some((count, status)),
            _ => {}
        }
        let mut world = World::new(Session::new(config), server, local, rng, scenario.mtu);
        world.fail_post = fail_post;
        Run {
            world,
            reference,
            posted: Vec::new(),
            next_source: dest_bytes,
            dest_bytes,
            received_count: 0,
            in_order: scenario.in_order,
            completed_count: 0,
            completed: HashSet::new(),
            overtaking_count: 0,
        }
    }

    fn dest(&mut self, spec: &Spec, length: usize) -> u64 {
        LOCAL_BASE + (spec.local % (self.dest_bytes - length + 1)) as u64
    }

    /// Local memory with data to send, valid for that remote offset.
    fn source(&mut self, spec: &Spec, memory: usize, offset: usize) -> u64 {
        let mut data = vec![0; spec.length];
        let signature = SignaturePage::derive(&[SIGNATURE_SEEDS[memory / 2]; 32]);
        contents(&mut self.world.rng, spec.content, &signature, offset, &mut data);
        let addr = LOCAL_BASE + self.next_source as u64;
        self.next_source += spec.length;
        self.world.local.slice(addr, data.len()).copy_from_slice(&data);
        self.reference.fill(addr, &data);
        addr
    }

    /// The work request for a specification.
    fn work_request(&mut self, spec: &Spec) -> (SendWr, Knowledge) {
        let index = spec.key % self.world.server.keys.len();
        let key = self.world.server.keys[index].clone();
        let is_atomic = matches!(spec.operation, Operation::FetchAdd | Operation::CompareSwap);
        let length = if is_atomic { 8 } else { spec.length.min(key.length) };
        let spec = &Spec { length, ..*spec };
        let start = spec.offset % (key.length - length + 1);
        let va = key.base_va + if is_atomic { start & !7 } else { start } as u64;
        let rkey = RKEY_BASE + index as u32;
        let is_back = matches!(spec.operation, Operation::WriteBack | Operation::SendBack);
        let receives =
            matches!(spec.operation, Operation::Read | Operation::FetchAdd | Operation::CompareSwap)
                || is_back;
        let addr =
            if receives { self.dest(spec, length) } else { self.source(spec, key.memory, key.offset(va)) };
        let expected = if is_atomic && spec.content > 0 { self.reference.load(rkey, va) } else { 3 };
        let op = match spec.operation {
            Operation::Read => SendOp::Read { va, rkey },
            Operation::Write | Operation::WriteInline | Operation::WriteBack => SendOp::Write { va, rkey },
            Operation::WriteImm => SendOp::WriteImm { va, rkey, imm: 5 },
            Operation::Send | Operation::SendBack => SendOp::Send,
            Operation::FetchAdd => SendOp::FetchAdd { va, rkey, add: 0x0101_0101 },
            Operation::CompareSwap => SendOp::CompareSwap { va, rkey, compare: expected, swap: !expected },
            Operation::Flush => {
                SendOp::Flush { va, rkey, length: length as u32, placement: 2, selectivity: 0 }
            }
        };
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::FENCE, spec.fence || is_back);
        flags.set(SendFlags::SIGNALED, spec.signaled);
        let payload = match spec.operation {
            Operation::WriteInline => {
                Payload::Inline(SmallVec::from_slice(self.world.local.slice(addr, length)))
            }
            Operation::Flush => Payload::Sges(SmallVec::new()),
            _ => Payload::Sges(split(addr, length, if is_atomic { 1 } else { spec.sge_count }, spec.local)),
        };
        let wr = SendWr { wr_id: u64::MAX - self.posted.len() as u64, op, payload, flags, target: None };
        let known = if op == SendOp::Send { Knowledge::Plain } else { key.knowledge };
        (wr, known)
    }

    /// Posts the next request, if the session takes it.
    fn post(&mut self, specs: &mut VecDeque<Spec>) {
        if self.world.session.len() >= 40 {
            return;
        }
        let Some(spec) = specs.pop_front() else { return };
        let (wr, known) = self.work_request(&spec);
        // Meanwhile the peer may get requests that the session had deferred.
        while self.world.session.post(wr.clone(), &known).is_err() {
            self.step();
        }
        self.reference.post(self.posted.len() as u32, &wr);
        self.posted.push(Posted { wr, known });
    }

    fn step(&mut self) {
        if let Some(wc) = self.world.step() {
            self.check_completion(&wc);
        }
        while self.world.received.len() > self.received_count {
            let received = &self.world.received[self.received_count];
            let (number, data) = &self.reference.received[self.received_count];
            assert_eq!(&received.data, data, "the message of request {number}");
            self.reference.check_visible(*number, &self.world.server);
            self.received_count += 1;
        }
    }

    /// Checks that a completion is in order and skips no signaled request, and the data of the requests up to it.
    fn check_completion(&mut self, wc: &Wc) {
        let number = (u64::MAX - wc.wr_id) as usize;
        if !self.in_order {
            return self.check_completion_in_any_order(number, wc);
        }
        assert!(number >= self.completed_count, "request {number} completes after {}", self.completed_count);
        let has_failed = wc.status != WcStatus::Success;
        for earlier in self.completed_count..number {
            let signaled = self.posted[earlier].wr.flags.contains(SendFlags::SIGNALED);
            assert!(!signaled, "request {earlier} has no completion");
        }
        assert!(has_failed || self.posted[number].wr.flags.contains(SendFlags::SIGNALED));
        let delivered = self.completed_count..number + usize::from(!has_failed);
        for index in delivered {
            let wr = &self.posted[index].wr;
            if matches!(wr.op, SendOp::Read { .. } | SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. }) {
                self.reference.check_delivered(index as u32, wr, &self.world.local);
            }
        }
        self.completed_count = number + 1;
    }

    /// Checks that a completion comes once and its request is done. An error completion must come in order.
    fn check_completion_in_any_order(&mut self, number: usize, wc: &Wc) {
        assert!(self.completed.insert(number), "request {number} completes again");
        let signaled = |index: usize| self.posted[index].wr.flags.contains(SendFlags::SIGNALED);
        let mut earlier = (0..number).filter(|&index| signaled(index));
        let overtakes = earlier.any(|index| !self.completed.contains(&index));
        if wc.status != WcStatus::Success {
            assert!(!overtakes, "the failure of request {number} completes before earlier requests");
            return;
        }
        assert!(signaled(number));
        self.overtaking_count += usize::from(overtakes);
        let wr = &self.posted[number].wr;
        if matches!(wr.op, SendOp::Read { .. } | SendOp::FetchAdd { .. } | SendOp::CompareSwap { .. }) {
            self.reference.check_delivered(number as u32, wr, &self.world.local);
        }
    }

    /// Runs the scenario to its end, with all checks.
    pub fn run(mut self, scenario: &Scenario) -> Run {
        let mut specs: VecDeque<Spec> = scenario.specs.iter().copied().collect();
        let total = specs.len();
        let start_at = if self.world.rng.one_in(2) { 0 } else { self.world.rng.below(200) };
        let mut steps = 0;
        while !specs.is_empty() || !self.world.session.is_empty() {
            if steps == start_at
                && !self.world.is_peer_gone
                && let Some(mode) = scenario.mode
            {
                self.world.session.start(mode, 0x88);
            }
            steps += 1;
            assert!(
                steps < 400_000,
                "no end after 400000 steps, with {} requests left",
                self.world.session.len()
            );
            match self.world.rng.below(16) {
                0..=1 => self.post(&mut specs),
                2 => self.world.toggle_residency(),
                3 if self.world.rng.one_in(4) => self.world.pull(),
                4 if self.world.rng.one_in(16) => {
                    let key = &mut self.world.server.keys[3];
                    key.knowledge = key.truth.clone();
                }
                _ => self.step(),
            }
            self.fault(scenario.fault, steps);
        }
        // No request waits for the answer to a call about the signature page, but the answer comes.
        while self.world.session.calls_in_flight() > 0 && !self.world.is_peer_gone {
            self.step();
        }
        assert_eq!(self.posted.len(), total);
        self
    }

    fn fault(&mut self, fault: Fault, steps: usize) {
        match fault {
            Fault::PeerGone(at) if at == steps => self.world.lose_peer(),
            Fault::Flush(at) if at == steps => {
                self.world.in_error = true;
                self.world.session.flush();
            }
            _ => {}
        }
    }

    /// Checks that all requests succeeded as in in-order execution.
    pub fn check_success(&self) {
        assert!(self.world.completions.iter().all(|wc| wc.status == WcStatus::Success));
        let signaled = self.posted.iter().filter(|posted| posted.wr.flags.contains(SendFlags::SIGNALED));
        assert_eq!(self.world.completions.len(), signaled.count());
        let mut completions: Vec<&Wc> = self.world.completions.iter().collect();
        if !self.in_order {
            completions.sort_by_key(|wc| std::cmp::Reverse(wc.wr_id));
        }
        let signaled = self.posted.iter().filter(|posted| posted.wr.flags.contains(SendFlags::SIGNALED));
        for (wc, posted) in completions.into_iter().zip(signaled) {
            assert_eq!(wc.wr_id, posted.wr.wr_id);
            let expected = posted.wr.payload.len();
            assert!(
                u64::from(wc.byte_len) == expected || !matches!(posted.wr.op, SendOp::Read { .. }),
                "a READ of {expected} B completes with {}",
                wc.byte_len
            );
        }
        assert_eq!(self.received_count, self.reference.received.len());
        assert_eq!(self.world.breaks, 0);
        assert_eq!(self.world.session.calls_in_flight(), 0);
        self.reference.check_all(&self.world.local, &self.world.server);
    }

    /// Checks that after the first failure all requests were flushed, and all have completed.
    pub fn check_failure(&self) -> Option<WcStatus> {
        let first = self.world.completions.iter().position(|wc| wc.status != WcStatus::Success)?;
        let (before, after) = self.world.completions.split_at(first);
        let number = (u64::MAX - after[0].wr_id) as usize;
        let (before, sooner): (Vec<&Wc>, Vec<&Wc>) =
            before.iter().partition(|wc| (u64::MAX - wc.wr_id) < number as u64);
        assert!(sooner.is_empty() || !self.in_order);
        let completed = sooner.len() + after.len();
        assert_eq!(completed, self.posted.len() - number, "every request from the failed one on completes");
        assert!(after[1..].iter().all(|wc| wc.status == WcStatus::Flushed));
        let signaled = |posted: &&Posted| posted.wr.flags.contains(SendFlags::SIGNALED);
        assert_eq!(before.len(), self.posted[..number].iter().filter(signaled).count());
        assert!(self.world.in_error);
        Some(after[0].status)
    }

    /// The number of requests on extended regions that the session knew of.
    pub fn extended_count(&self) -> usize {
        self.posted.iter().filter(|posted| matches!(posted.known, Knowledge::Extended(_))).count()
    }
}

/// A list of `count` elements over a range of memory, not in address order.
fn split(addr: u64, length: usize, count: usize, shuffle: usize) -> SgeList {
    let count = count.min(length).max(1);
    let mut sges: SgeList = SmallVec::new();
    let mut at = 0;
    for index in 0..count {
        let end = if index + 1 == count { length } else { (length * (index + 1)) / count };
        sges.push(Sge { addr: addr + at as u64, length: (end - at) as u32, lkey: LKEY });
        at = end;
    }
    sges.rotate_left(shuffle % count);
    sges
}
