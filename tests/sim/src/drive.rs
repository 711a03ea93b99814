//! The main loop: virtual time, device steps, program ticks, and changes of the network's faults.

use terrace_nic::{AsyncEvent, QpState, WcStatus};

use crate::end::Phase;
use crate::plan::Profile;
use crate::world::{Checked, Failure, World, ensure, trace};

/// Limit of an epoch's virtual time, in nanoseconds.
const EPOCH_NS_MAX: u64 = 60_000_000_000;

/// Limit of an epoch's rounds of the main loop.
const ROUNDS_MAX: u64 = 3_000_000;

/// Limit of rounds at one virtual time.
const ROUNDS_AT_ONE_TIME_MAX: u32 = 10_000;

/// Probabilities at each tick that an end's program connects, and that it posts.
const CONNECTS: f64 = 0.5;
const POSTS: f64 = 0.6;

impl World {
    /// Runs all epochs.
    pub fn run(&mut self) -> Checked {
        for epoch in 0..self.plan.epochs {
            self.epoch = epoch;
            self.begin_epoch()?;
            self.run_until_quiet()?;
            self.check_quiet()?;
            self.closing = true;
            self.end_connections()?;
            self.closing = false;
            self.check_epoch()?;
        }
        self.tally.add("virtual milliseconds", self.now() / 1_000_000);
        self.check_end()
    }

    fn begin_epoch(&mut self) -> Checked {
        for index in 0..self.ends.len() {
            self.ends[index].begin_epoch();
            if self.is_perfect() {
                self.connect(index)?;
            }
        }
        let now = self.now();
        self.nodes.iter_mut().for_each(|node| node.ticks_at = now);
        self.network_is_faulty = false;
        self.network_changes_at = (self.plan.profile == Profile::Lossy).then_some(now);
        if self.plan.profile != Profile::Lossy {
            self.net.set_config(self.plan.network.faulty.clone());
        }
        Ok(())
    }

    fn run_until_quiet(&mut self) -> Checked {
        let deadline = self.now() + EPOCH_NS_MAX;
        let (mut rounds, mut rounds_here) = (0, 0);
        loop {
            let before = self.now();
            self.run_devices()?;
            self.run_programs()?;
            let Some(next) = self.next_time() else { return Ok(()) };
            self.advance(next);
            rounds += 1;
            rounds_here = if self.now() == before { rounds_here + 1 } else { 0 };
            if rounds > ROUNDS_MAX || rounds_here > ROUNDS_AT_ONE_TIME_MAX || self.now() > deadline {
                return Err(Failure(format!("not finished at {} ns; {}", self.now(), self.unfinished())));
            }
        }
    }

    fn unfinished(&self) -> String {
        let waits = |index: &usize| self.end_is_busy(*index);
        let ends: Vec<String> = (0..self.ends.len())
            .filter(waits)
            .map(|index| {
                let end = &self.ends[index];
                let (posted, inbound) = (end.posted.len(), end.inbound.len());
                format!(
                    "end {index} ({:?}, budget {}, drafts {}, posted {posted}, inbound {inbound})",
                    end.qp.state(),
                    end.budget,
                    end.drafts.len()
                )
            })
            .collect();
        format!("waiting: {}", ends.join(", "))
    }

    /// Steps the devices that are due.
    fn run_devices(&mut self) -> Checked {
        let now = self.now();
        for node in 0..self.nodes.len() {
            if self.nodes[node].wakes_at.is_none_or(|at| at > now) {
                continue;
            }
            self.nodes[node].wakes_at = None;
            self.nodes[node].device.step(self.time());
        }
        Ok(())
    }

    /// Schedules a step of the device within its lag, unless one is scheduled.
    fn wake(&mut self, node: usize) {
        let lag_ns = match self.nodes[node].plan.lag_ns_max {
            0 => 0,
            lag_ns_max => self.rng.within(0..=lag_ns_max),
        };
        let at = self.now() + lag_ns;
        self.nodes[node].wakes_at.get_or_insert(at);
    }

    fn run_programs(&mut self) -> Checked {
        for node in 0..self.nodes.len() {
            if self.nodes[node].ticks_at <= self.now() {
                self.tick(node)?;
            }
        }
        Ok(())
    }

    /// Runs one tick of a node's program, which polls for completions and posts work requests.
    fn tick(&mut self, node: usize) -> Checked {
        let churned = self.nodes[node].pagers.as_ref().is_some_and(|pagers| pagers.churn());
        self.tally.add("units mapped or unmapped", churned.into());
        let mut acted = self.poll_node(node)?;
        self.take_async_events(node)?;
        for index in self.ends_of(node) {
            acted |= self.tick_end(index)?;
        }
        let (shortest_ns, longest_ns) = self.nodes[node].plan.tick_ns;
        let tick_ns_max = self.nodes[node].tick_ns_max;
        let tick_ns_max = if acted { shortest_ns } else { (tick_ns_max * 2).min(longest_ns) };
        self.nodes[node].tick_ns_max = tick_ns_max;
        self.nodes[node].ticks_at = self.now() + 1 + self.rng.within(0..=tick_ns_max);
        Ok(())
    }

    /// Runs one tick of an end's program. Returns whether it posted a send.
    fn tick_end(&mut self, index: usize) -> Checked<bool> {
        if !self.ends[index].connected {
            if !self.rng.chance(CONNECTS) {
                return Ok(false);
            }
            self.connect(index)?;
        }
        if self.ends[index].qp.state() == QpState::Err {
            self.note_broken(index, WcStatus::Flushed)?;
        }
        if !self.ends[index].is_open() {
            return Ok(false);
        }
        self.receive_some(index)?;
        self.change_windows(index)?;
        self.drain_or_resume(index)?;
        if !self.ends[index].has_plans() || !self.rng.chance(POSTS) {
            return Ok(false);
        }
        self.post_sends(index)
    }

    /// Posts a few receives, before or after messages need them.
    fn receive_some(&mut self, index: usize) -> Checked {
        let probability = self.ends[index].plan.receive_probability;
        let expects = !self.ends[index].inbound.is_empty() || self.ends[index ^ 1].has_plans();
        for _ in 0..4 {
            if !expects || !self.rng.chance(probability) {
                continue;
            }
            match self.ends[index].plan.uses_srq {
                true => self.post_shared_receive(index & 1)?,
                false => self.post_receive(index)?,
            }
        }
        Ok(())
    }

    pub fn take_async_events(&mut self, node: usize) -> Checked {
        while let Some(event) = self.nodes[node].async_event()? {
            trace!(self, "node {node}: asynchronous event {}", event.code());
            self.tally.add(format!("asynchronous event {}", event.code()), 1);
            match event {
                AsyncEvent::CommunicationEstablished(_) => {}
                AsyncEvent::SqDrained(qp) => {
                    self.drained.insert((node, qp.qpn()));
                }
                AsyncEvent::SrqLimitReached(_) => {
                    let armed = self.nodes[node].shared.limit.take();
                    ensure!(
                        armed.is_some(),
                        "node {node}: the limit of a shared receive queue was not armed"
                    );
                }
                AsyncEvent::QpRequestError(_)
                | AsyncEvent::QpAccessError(_)
                | AsyncEvent::QpFatal(_)
                | AsyncEvent::LastWqeReached(_)
                    if self.is_failing() || self.closing => {}
                other => return Err(Failure(format!("node {node}: asynchronous event {}", other.code()))),
            }
        }
        Ok(())
    }

    /// Returns whether an end's program has work left, or waits for a completion, a message or a drain.
    fn end_is_busy(&self, index: usize) -> bool {
        let (end, peer) = (&self.ends[index], &self.ends[index ^ 1]);
        if !end.is_open() {
            return false;
        }
        let awaits_message = end.is_reliable() && peer.is_open() && !end.inbound.is_empty();
        end.has_plans() || end.awaits_completion() || awaits_message || end.phase == Phase::Draining
    }

    /// Returns the time of the next event; `None` if there is none.
    fn next_time(&mut self) -> Option<u64> {
        let now = self.now();
        let busy = (0..self.ends.len()).any(|index| self.end_is_busy(index));
        for node in 0..self.nodes.len() {
            let deadlines =
                [self.nodes[node].device.next_deadline().map(|at| at.0), self.nodes[node].next_due()];
            if deadlines.into_iter().flatten().any(|at| at <= now) {
                self.wake(node);
            }
        }
        let nodes = self.nodes.iter().flat_map(|node| {
            let deadline = node.device.next_deadline().map(|at| at.0).filter(|at| *at > now);
            let due = node.next_due().filter(|at| *at > now);
            [node.wakes_at, deadline, due, node.unblocks_at(), busy.then_some(node.ticks_at)]
        });
        let next = nodes.flatten().chain(self.net.next_delivery()).min()?;
        // A change of the network's faults alone does not continue a run.
        Some(self.network_changes_at.map_or(next, |until| until.min(next)))
    }

    fn advance(&mut self, next: u64) {
        let arrives = self.net.next_delivery().is_some_and(|at| at <= next);
        self.net.advance_to(next);
        self.clock.set(self.time());
        for node in 0..self.nodes.len() {
            if arrives {
                self.wake(node);
            }
            if self.nodes[node].unblocks_at().is_some_and(|at| at <= next) {
                self.nodes[node].blocked_until.store(0, std::sync::atomic::Ordering::Relaxed);
                self.wake(node);
            }
        }
        if self.network_changes_at.is_some_and(|until| until <= next) {
            self.change_network();
        }
    }

    fn change_network(&mut self) {
        self.network_is_faulty = !self.network_is_faulty;
        let network = &self.plan.network;
        let (config, lasts_ns) = match self.network_is_faulty {
            true => (&network.faulty, self.rng.spread(50_000..=network.faulty_ns_max.unwrap_or(50_000))),
            false => (&network.intact, network.intact_ns),
        };
        self.net.set_config(config.clone());
        self.network_changes_at = Some(self.now() + lasts_ns);
        trace!(self, "the network is {}", if self.network_is_faulty { "faulty" } else { "intact" });
    }

    /// Moves all queue pairs to the error state, which must flush all outstanding requests, and then to RESET.
    fn end_connections(&mut self) -> Checked {
        let connected: Vec<usize> =
            (0..self.ends.len()).filter(|index| self.ends[*index].connected).collect();
        connected.iter().try_for_each(|index| self.modify_state(*index, QpState::Err))?;
        for node in 0..self.nodes.len() {
            self.nodes[node].device.step(self.time());
            for cq_index in 0..2 {
                self.poll_all(node, cq_index)?;
                if self.nodes[node].completions[cq_index].take_event()? {
                    self.nodes[node].completions[cq_index].arm()?;
                }
            }
            self.take_async_events(node)?;
        }
        let pagers = self.nodes.iter().flat_map(|node| node.pagers.iter().chain([&node.log.pagers]));
        pagers.for_each(|pagers| pagers.finish());
        for index in 0..self.ends.len() {
            self.complete_unsignaled(index)?;
            let end = &self.ends[index];
            ensure!(end.receives.is_empty(), "end {index}: {} receives were not flushed", end.receives.len());
        }
        // Packets still in flight must not reach the next epoch.
        while let Some(next) = self.net.next_delivery() {
            self.advance(next);
            for node in 0..self.nodes.len() {
                self.nodes[node].device.step(self.time());
            }
        }
        (0..self.ends.len()).try_for_each(|index| self.modify_state(index, QpState::Reset))
    }
}
