//! The NP-RDMA protocol (`terrace_access::optimistic`) on NICs that know nothing of absence, against a plain memory model.
//!
//! A node's programs READ, WRITE, count and send on one or two queue pairs to another node, of whose memory pages come and
//! go at any time, between the packets of a request, too. Pages of their own memory come and go as well, unless a request
//! holds them. Packets are lost, duplicated and reordered; answers are lost with the control queue pair, and requests sent
//! again. The devices, their transport and the absent pages are real, and so are the control queue pairs, on which targets move the
//! bytes of long repetitions to and from slots that they are lent.
//!
//! Checked are: each READ and each atomic brings what the model has; messages arrive in order, with all that was written
//! before; a WRITE with an ordering bit is seen behind what it follows; at the end all memory is that of the model, and no addition to a shared counter was lost or made twice; nothing
//! stays held.

mod messages;
mod model;
mod pages;
mod pair;
mod plan;
mod program;
mod setup;
mod side;

use std::sync::Arc;

use terrace_access::optimistic::{Action, TargetAction};
use terrace_fabric::sim::SimNet;
use terrace_nic::{ManualClock, RecvWr, Sge, Time, Wc};

use crate::cells;
use crate::rng::{SimRng, Stream, stream_seed};
use crate::tally::Tally;
use crate::world::{Checked, Failure, ensure};
use messages::Control;
use pages::PAGE;
use pair::Pair;
use plan::Plan;
use setup::{Memory, Node, RECEIVE_BYTES};
use side::{LocalSide, RECEIVED, RemoteSide};

/// Limits of a run: virtual time, rounds of the main loop, rounds at one time.
const NS_MAX: u64 = 60_000_000_000;
const ROUNDS_MAX: u64 = 2_000_000;
const ROUNDS_AT_ONE_TIME_MAX: u32 = 10_000;

/// How long the network is faulty at a time, and intact: shorter than the retries of a queue pair last.
const FAULTY_NS_MAX: u64 = 2_000_000;
const INTACT_NS: u64 = 2_000_000;

pub(crate) struct World {
    plan: Plan,
    net: SimNet,
    clock: Arc<ManualClock>,
    rng: SimRng,
    nodes: [Node; 2],
    memory: Memory,
    pairs: Vec<Pair>,
    /// What the shared counter had at the start.
    counter_start: u64,
    ticks_at: u64,
    network_changes_at: u64,
    network_is_faulty: bool,
    tally: Tally,
    trace: bool,
}

/// Devices refer to their queue pairs, and these to them.
impl Drop for World {
    fn drop(&mut self) {
        self.nodes.iter().for_each(|node| node.device.close());
    }
}

/// Runs one seed, optionally with a trace on standard output.
///
/// # Errors
/// When the run deviates from the model.
pub fn run(seed: u64, trace: bool) -> Result<Tally, Failure> {
    let mut world = World::new(seed, trace)?;
    world.say(|| format!("{:#?}", world.plan));
    world.run()?;
    for pair in &world.pairs {
        let counters = pair.initiator.counters();
        for (name, count) in [
            ("NP-RDMA one-sided", counters.optimistic),
            ("NP-RDMA signature pages", counters.signatures),
            ("NP-RDMA versions changed", counters.version_changes),
            ("NP-RDMA pages known to be absent", counters.absent),
            ("NP-RDMA repeated behind a repeated WRITE", counters.chained),
            ("NP-RDMA calls", counters.calls),
            ("NP-RDMA ranges held for a peer", counters.holds),
        ] {
            world.tally.add(name, count);
        }
    }
    Ok(std::mem::take(&mut world.tally))
}

impl World {
    fn new(seed: u64, trace: bool) -> Checked<World> {
        let mut rng = SimRng::new(seed, Stream::Plan);
        let plan = Plan::draw(&mut rng);
        let net = SimNet::new(stream_seed(seed, Stream::Network), plan.intact.clone());
        let clock = Arc::new(ManualClock::new());
        let nodes = [Node::open(seed, 0, &net, &clock)?, Node::open(seed, 1, &net, &clock)?];
        let memory = Memory::new(&plan, &nodes, &mut rng)?;
        let mut pairs = Vec::new();
        let pages = [&memory.local.pages, &memory.remote.pages];
        let bytes = pages.map(|pages| pages.page_count() * PAGE);
        // The shared counter is behind the pairs' memory.
        let ranges = [0..bytes[0], plan.lead..bytes[1] - 8];
        for index in 0..plan.pair_count {
            let areas = [0, 1].map(|node| {
                let whole = &ranges[node];
                let share = (whole.len() / plan.pair_count) & !7;
                let start = whole.start + index * share;
                (&**pages[node], start..start + share)
            });
            let described_at = rng.pick(&[0, 50_000]);
            let qps = setup::connect(&plan, &nodes, |node| &node.cq)?;
            let control = Control::new(&plan, &nodes)?;
            pairs.push(Pair::new(&plan, index, qps, control, memory.scratch_key, areas, described_at));
        }
        let mut counter = [0; 8];
        memory.remote.pages.peek(bytes[1] - 8, &mut counter);
        Ok(World {
            counter_start: u64::from_ne_bytes(counter),
            plan,
            net,
            clock,
            rng: SimRng::new(seed, Stream::Program),
            nodes,
            memory,
            pairs,
            ticks_at: 0,
            network_changes_at: 0,
            network_is_faulty: false,
            tally: Tally::default(),
            trace,
        })
    }

    fn say(&self, line: impl FnOnce() -> String) {
        if self.trace {
            println!("{:>12} {}", self.net.now(), line());
        }
    }

    fn now(&self) -> u64 {
        self.net.now()
    }

    fn counter_va(&self) -> u64 {
        side::REMOTE + (self.memory.remote.pages.page_count() * PAGE - 8 - self.plan.lead) as u64
    }

    fn run(&mut self) -> Checked {
        let (mut rounds, mut rounds_here) = (0, 0);
        while !self.pairs.iter().all(Pair::is_quiet) {
            let before = self.now();
            self.nodes.iter().for_each(|node| _ = node.device.step(Time(before)));
            self.poll_initiators()?;
            self.poll_targets()?;
            let Memory { local, remote, .. } = &self.memory;
            self.pairs.iter_mut().try_for_each(|pair| pair.check_order([&local.pages, &remote.pages]))?;
            self.bring_pages();
            self.handle_control()?;
            if self.ticks_at <= before {
                self.tick()?;
            }
            for index in 0..self.pairs.len() {
                self.act(index)?;
            }
            let next = self.next_time();
            self.net.advance_to(next);
            self.clock.set(Time(next));
            if self.network_changes_at <= next {
                self.change_network();
            }
            rounds += 1;
            rounds_here = if next == before { rounds_here + 1 } else { 0 };
            if rounds > ROUNDS_MAX || rounds_here > ROUNDS_AT_ONE_TIME_MAX || next > NS_MAX {
                return Err(Failure(format!("not finished at {next} ns: {:?}", self.unfinished())));
            }
        }
        self.check()
    }

    /// What each pair waits for.
    fn unfinished(&self) -> Vec<String> {
        let pairs = self.pairs.iter().map(|pair| {
            format!(
                "budget {}, initiator {}, calls {}, target {}, inbound {}",
                pair.budget,
                pair.initiator.len(),
                pair.initiator.calls_in_flight(),
                pair.target.len(),
                pair.inbound.len()
            )
        });
        pairs.collect()
    }

    fn next_time(&self) -> u64 {
        let now = self.now();
        let pairs = self.pairs.iter().flat_map(|pair| {
            [
                pair.initiator.deadline().map(|at| at.0),
                pair.target.deadline().map(|at| at.0),
                pair.control.next_message(),
            ]
        });
        let nodes = self.nodes.iter().map(|node| node.device.next_deadline().map(|at| at.0));
        let pages =
            [self.memory.local.next_arrival(), self.memory.remote.next_arrival(), self.net.next_delivery()];
        let others = [Some(self.ticks_at), Some(self.network_changes_at)];
        pairs.chain(nodes).chain(pages).chain(others).flatten().min().map_or(now, |at| at.max(now))
    }

    fn change_network(&mut self) {
        self.network_is_faulty = !self.network_is_faulty;
        let (config, lasts_ns) = match self.network_is_faulty {
            true => (&self.plan.faulty, self.rng.spread(50_000..=FAULTY_NS_MAX)),
            false => (&self.plan.intact, INTACT_NS),
        };
        self.net.set_config(config.clone());
        self.network_changes_at = self.now() + lasts_ns;
    }

    /// The program posts requests and receives; pages come and go.
    fn tick(&mut self) -> Checked {
        self.ticks_at = self.now() + self.rng.within(1..=self.plan.tick_ns_max);
        for node in 0..2 {
            let holds = if node == 0 { &self.memory.local } else { &self.memory.remote };
            if self.rng.chance(self.plan.churn) {
                let page = self.rng.index(holds.pages.page_count());
                let has_changed = holds.churn(page);
                self.tally.add("NP-RDMA pages that came or went", has_changed.into());
                self.say(|| format!("node {node}: page {page} comes or goes: {has_changed}"));
            }
        }
        for index in 0..self.pairs.len() {
            let now = self.now();
            let pair = &mut self.pairs[index];
            if !pair.is_described && pair.described_at <= now {
                pair.is_described = true;
                pair.initiator.handle_described(self.memory.remote_key, &self.memory.known);
            }
            if self.rng.chance(0.5) {
                self.post_receive(index)?;
            }
            let count = self.rng.index(4);
            for _ in 0..count {
                if self.pairs[index].budget > 0 && self.pairs[index].initiator.len() < 32 {
                    self.post(index)?;
                }
            }
        }
        Ok(())
    }

    fn post_receive(&mut self, index: usize) -> Checked {
        let pair = &mut self.pairs[index];
        let Some(buffer) = pair.free_receives.pop() else { return Ok(()) };
        let addr = RECEIVED + (buffer * RECEIVE_BYTES) as u64;
        let sge = Sge { addr, length: RECEIVE_BYTES as u32, lkey: self.memory.received_key };
        let wr = RecvWr { wr_id: buffer as u64, sges: [sge].into_iter().collect() };
        pair.qps[1].post_recv([Ok(wr)]).map_err(|(_, error)| error)?;
        pair.receives.push_back(buffer);
        Ok(())
    }

    fn pair_of(&self, node: usize, qpn: u32) -> usize {
        self.pairs.iter().position(|pair| pair.qps[node].qpn() == qpn).expect("a queue pair of a pair")
    }

    fn completions(&self, node: usize) -> Checked<Vec<Wc>> {
        let mut wcs = Vec::new();
        self.nodes[node].cq.poll(64, &mut |wc| wcs.push(*wc))?;
        Ok(wcs)
    }

    fn poll_initiators(&mut self) -> Checked {
        for wc in self.completions(0)? {
            let pair = self.pair_of(0, wc.qpn);
            let now = Time(self.now());
            self.say(|| format!("pair {pair}: completion {} {:?}", wc.wr_id, wc.status));
            let (pairs, mut side) = self.local_side(pair);
            let is_taken = pairs[pair].initiator.handle_completion(now, &wc, &mut side);
            ensure!(is_taken, "pair {pair}: nobody waits for completion {}", wc.wr_id);
        }
        Ok(())
    }

    fn poll_targets(&mut self) -> Checked {
        for wc in self.completions(1)? {
            let pair = self.pair_of(1, wc.qpn);
            let buffer = wc.wr_id as usize;
            let mut data = vec![0; RECEIVE_BYTES];
            cells::load(&self.memory.received, buffer * RECEIVE_BYTES, &mut data);
            self.say(|| format!("pair {pair}: message {:?} of {} B", wc.opcode, wc.byte_len));
            let (pair, remote) = (&mut self.pairs[pair], &self.memory.remote.pages);
            ensure!(pair.receives.pop_front() == Some(buffer), "a receive has completed too early");
            pair.free_receives.push(buffer);
            pair.receive(&wc, &data, remote)?;
        }
        Ok(())
    }

    fn local_side(&mut self, pair: usize) -> (&mut [Pair], LocalSide<'_>) {
        let now = self.now();
        let Memory { local, scratch, scratch_key, lent, .. } = &mut self.memory;
        let side = LocalSide {
            pair,
            now,
            rng: &mut self.rng,
            holds: local,
            scratch,
            scratch_key: *scratch_key,
            lent,
        };
        (&mut self.pairs, side)
    }

    fn remote_side(&mut self, pair: usize) -> (&mut [Pair], RemoteSide<'_>) {
        let now = self.now();
        let Memory { remote, remote_key, .. } = &mut self.memory;
        let (lead, busy) = (self.plan.lead, self.plan.busy);
        let side = RemoteSide { pair, now, rng: &mut self.rng, holds: remote, key: *remote_key, lead, busy };
        (&mut self.pairs, side)
    }

    /// Brings the pages that requests wait for.
    fn bring_pages(&mut self) {
        let now = self.now();
        for (pair, token) in self.memory.local.arrive(now) {
            self.pairs[pair].initiator.handle_held(Time(now), token, true);
        }
        for (pair, token) in self.memory.remote.arrive(now) {
            let (pairs, mut side) = self.remote_side(pair);
            pairs[pair].target.handle_held(Time(now), token, Ok(()), &mut side);
        }
    }

    /// Executes the actions of a pair's initiator and of its target.
    fn act(&mut self, index: usize) -> Checked {
        let now = Time(self.now());
        loop {
            let (pairs, mut side) = self.local_side(index);
            let Some(action) = pairs[index].initiator.poll_action(now, &mut side) else { break };
            match action {
                Action::Post(wr) => {
                    self.say(|| format!("pair {index}: post {} {:?}", wr.wr_id, wr.op));
                    self.pairs[index].qps[0].post_send([Ok(wr)]).map_err(|(_, error)| error)?;
                }
                Action::Send(message) => self.send_to_target(index, message)?,
                Action::Complete(wc) => {
                    let Memory { local, .. } = &self.memory;
                    self.pairs[index].complete(&wc, &local.pages)?;
                }
                Action::Break => return Err(Failure(format!("pair {index}: the initiator has given up"))),
            }
        }
        while let Some(action) = self.pairs[index].target.poll_action(now) {
            match action {
                TargetAction::Send(message) => self.answer(index, &message)?,
                TargetAction::Move(transfer) => self.transfer(index, transfer)?,
                TargetAction::Break => return Err(Failure(format!("pair {index}: the target has given up"))),
            }
        }
        Ok(())
    }

    /// Checks all memory, the shared counter, and that nothing is held.
    fn check(&self) -> Checked {
        let Memory { local, remote, .. } = &self.memory;
        ensure!(local.is_empty() && remote.is_empty(), "pages are still held");
        self.pairs.iter().try_for_each(|pair| pair.check([&local.pages, &remote.pages]))?;
        let mut returned: Vec<(u64, u64)> =
            self.pairs.iter().flat_map(|pair| pair.returned.clone()).collect();
        // In the order in which they were executed, each addition returns the sum of all before it.
        returned.sort_unstable_by_key(|(value, _)| value.wrapping_sub(self.counter_start));
        let mut sum = self.counter_start;
        for (value, add) in returned {
            ensure!(value == sum, "the shared counter returned {value:#x} instead of {sum:#x}");
            sum = sum.wrapping_add(add);
        }
        let mut counter = [0; 8];
        remote.pages.peek(remote.pages.page_count() * PAGE - 8, &mut counter);
        ensure!(
            u64::from_ne_bytes(counter) == sum,
            "an addition to the shared counter was lost or made twice"
        );
        Ok(())
    }
}
