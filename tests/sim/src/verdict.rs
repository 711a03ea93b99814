//! What must be true once nothing moves any more.

use terrace_nic::{QpState, QpType};

use crate::end::Effect;
use crate::memory::Place;
use crate::plan::Waiting;
use crate::world::{Checked, World, ensure};

impl World {
    /// The network is silent, the devices have no deadlines, the programs have nothing left to do.
    pub fn check_quiet(&mut self) -> Checked {
        self.check_nothing_unheard()?;
        self.check_queues()?;
        self.count_counters();
        self.ends.iter_mut().for_each(|end| end.broke = !end.is_open());
        Ok(())
    }

    /// All work requests have completed, one way or the other.
    pub fn check_epoch(&mut self) -> Checked {
        for index in 0..self.ends.len() {
            if self.ends[index].kind == QpType::Rc {
                self.settle(index)?;
            } else {
                self.settle_unreliable(index)?;
            }
        }
        self.check_counters()?;
        for node in 0..self.nodes.len() {
            if let Some(difference) = self.nodes[node].memory.difference() {
                return Err(crate::world::Failure(format!(
                    "node {node}: the memory is wrong: {difference:x?}"
                )));
            }
        }
        Ok(())
    }

    /// Programs that wait for events have been told of everything.
    fn check_nothing_unheard(&mut self) -> Checked {
        for node in 0..self.nodes.len() {
            self.take_async_events(node)?;
            self.poll_node(node)?;
            for which in 0..2 {
                let left = self.poll_all(node, which)?;
                let waiting = self.nodes[node].completions[which].waiting;
                ensure!(
                    waiting != Waiting::Events || left.is_empty(),
                    "node {node}: {} completions came without an event",
                    left.len()
                );
            }
            let shared = &self.nodes[node].shared;
            let is_low = shared.limit.is_some_and(|limit| shared.posted.len() < limit as usize);
            ensure!(!is_low, "node {node}: a shared receive queue fell below its limit in silence");
        }
        Ok(())
    }

    /// Where no connection broke, everything is done, and the device knows.
    fn check_queues(&mut self) -> Checked {
        for index in 0..self.ends.len() {
            let snapshot = self.nodes[index & 1].device.snapshot();
            let end = &self.ends[index];
            let peer_is_open = self.ends[index ^ 1].is_open();
            if !end.is_open() || !end.connected {
                continue;
            }
            ensure!(end.qp.state() == QpState::Rts, "end {index} is in {:?}", end.qp.state());
            let qp = snapshot.queue_pairs.iter().find(|qp| qp.qpn == end.qp.qpn());
            let queued = qp.map_or(0, |qp| qp.send_queue_len);
            ensure!(queued == 0, "end {index}: {queued} requests are still in the queue");
            ensure!(
                !end.is_reliable() || !peer_is_open || end.inbound.is_empty(),
                "end {index}: {} messages never arrived",
                end.inbound.len()
            );
            // Those without a completion of their own are done: the queue is empty.
            self.succeed_unheard(index)?;
        }
        Ok(())
    }

    /// Requests that nothing was heard of, and nothing will be, have succeeded: a failure would have been reported.
    pub fn succeed_unheard(&mut self, index: usize) -> Checked {
        while let Some(request) = self.ends[index].posted.pop_front() {
            let wr_id = request.wr_id;
            ensure!(!request.signaled, "end {index}: request {wr_id} never completed");
            ensure!(!self.ends[index].send_failed, "end {index}: request {wr_id} was never flushed");
            self.succeed(index, request)?;
        }
        Ok(())
    }

    /// A reliable connection has carried out the first so many requests, all those that succeeded among them, and of
    /// the next one at most a beginning.
    fn settle(&mut self, index: usize) -> Checked {
        let there = 1 - (index & 1);
        let places = self.places_of(index);
        let succeeded = self.ends[index].succeeded as usize;
        let received = self.ends[index ^ 1].received;
        let healthy = !self.ends[index].broke && !self.ends[index ^ 1].broke;
        let is_paged = self.nodes[there].pagers.is_some();
        let mut count = self.ends[index].steps.len();
        let mut undone: Option<Effect> = None;
        loop {
            let steps = &self.ends[index].steps[..count];
            let consumed = steps.iter().filter(|step| step.consumes).count() as u64;
            // What has gone beyond a message that waited for absent memory stays, though nobody was told of that one.
            let told = consumed == received || (!healthy && is_paged && consumed > received);
            if told && self.memory_agrees(index, &places, undone.as_ref()) {
                break;
            }
            ensure!(
                count > succeeded && !healthy,
                "end {index}: {succeeded} requests succeeded and {received} messages were received, but the peer's \
                 memory is not what any number of requests would have left"
            );
            count -= 1;
            undone = self.ends[index].steps[count].effect.take();
            if let Some(effect) = &undone {
                self.nodes[there].memory.expect(effect.place, &effect.before);
            }
        }
        // The beginning of the request that was under way is no mistake.
        places.iter().for_each(|place| self.nodes[there].memory.accept(*place));
        if !healthy {
            self.tally.add("connections that broke", 1);
        }
        Ok(())
    }

    /// The parts of the peer's memory that only this end changes.
    fn places_of(&self, index: usize) -> Vec<Place> {
        let windows = self.windows.iter().filter(|window| window.owner == index ^ 1);
        std::iter::once(self.ends[index].target).chain(windows.map(|window| window.room)).collect()
    }

    /// Whether the memory is what the model says, except that of `begun` the first packets may have been written.
    fn memory_agrees(&self, index: usize, places: &[Place], begun: Option<&Effect>) -> bool {
        let memory = &self.nodes[1 - (index & 1)].memory;
        places.iter().all(|place| {
            let (actual, model) = (memory.actual(*place), memory.model(*place));
            if actual == model {
                return true;
            }
            let Some(effect) = begun.filter(|effect| place.overlap(effect.place).is_some()) else {
                return false;
            };
            let start = place.offset_of(effect.place);
            (self.ends[index].mtu..effect.after.len()).step_by(self.ends[index].mtu).any(|written| {
                let mut partial = model.to_vec();
                partial[start..start + written].copy_from_slice(&effect.after[..written]);
                partial == actual
            })
        })
    }

    /// WRITEs of unreliable connections have arrived, or have not, packet by packet.
    fn settle_unreliable(&mut self, index: usize) -> Checked {
        let there = 1 - (index & 1);
        let all = self.is_calm();
        for (place, payload) in std::mem::take(&mut self.ends[index].uncertain) {
            let memory = &self.nodes[there].memory;
            let (actual, noise) = (memory.actual(place), memory.model(place).to_vec());
            // Where there is no room to write to absent memory, the present part of a packet may be written all the same.
            let is_paged = self.nodes[there].pagers.is_some();
            let grain = if is_paged { 1 } else { self.ends[index].mtu };
            let pieces = actual.chunks(grain);
            let explained = pieces.zip(payload.chunks(grain)).zip(noise.chunks(grain));
            let mut explained = explained.map(|((actual, sent), noise)| (actual == sent, actual == noise));
            ensure!(
                explained.all(|(arrived, untouched)| arrived || (untouched && !all)),
                "end {index}: an unreliable WRITE has left something that is neither old nor new"
            );
            self.nodes[there].memory.accept(place);
        }
        if all {
            let lost = self.ends[index ^ 1].inbound.len();
            ensure!(lost == 0, "end {index}: {lost} messages were lost in a perfect network");
        }
        Ok(())
    }

    /// Every addition to a shared counter happened once: the values returned are those of some order of them.
    fn check_counters(&mut self) -> Checked {
        let broken = self.ends.iter().any(|end| end.broke);
        for node in 0..self.nodes.len() {
            for counter in 0..self.counters[node].len() {
                let Self { counters, nodes, .. } = self;
                let counter = &mut counters[node][counter];
                let memory = &mut nodes[node].memory;
                counter.returned.sort_unstable();
                let returned = &counter.returned;
                ensure!(
                    returned.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0),
                    "node {node}: an addition to a shared counter was not atomic, or happened twice"
                );
                let end = u64::from_ne_bytes(memory.actual(counter.place).try_into().expect("8 bytes"));
                let sum: u64 = returned.iter().map(|(_, add)| add).sum();
                let exact = !broken && !counter.unclear;
                ensure!(
                    end == counter.start + sum || (!exact && end > counter.start + sum),
                    "node {node}: a shared counter is {end}, but {} + {sum} were added",
                    counter.start
                );
                memory.accept(counter.place);
            }
        }
        Ok(())
    }

    /// What the devices have counted fits what has happened.
    fn count_counters(&mut self) {
        for index in 0..self.ends.len() {
            let counters = self.ends[index].qp.counters();
            for (name, count) in [
                ("packets sent", counters.tx_packets),
                ("retransmits", counters.retransmits),
                ("timeouts", counters.timeouts),
                ("RNR NAKs", counters.rnr_naks_received),
                ("sequence NAKs", counters.sequence_naks_received),
                ("error NAKs", counters.error_naks_received),
                ("duplicates", counters.duplicates),
                ("packets dropped", counters.dropped),
                ("CNPs", counters.cnps_received),
                ("fetches of absent memory", counters.fetches),
                ("puts to absent memory", counters.puts),
            ] {
                self.tally.add(name, count);
            }
        }
    }

    /// After the last epoch: the counters are plausible, and everything can be destroyed.
    pub fn check_end(&mut self) -> Checked {
        self.check_plausible()?;
        for end in std::mem::take(&mut self.ends) {
            end.qp.destroy()?;
            if let Some(ah) = end.ah {
                ah.destroy()?;
            }
        }
        self.windows.drain(..).try_for_each(|window| window.mw.dealloc())?;
        for node in 0..self.nodes.len() {
            self.nodes[node].close()?;
            let objects = self.nodes[node].device.snapshot().objects;
            ensure!(objects.values().all(|count| *count == 0), "node {node}: objects are left: {objects:?}");
            ensure!(
                self.nodes[node].device.next_deadline().is_none(),
                "node {node}: there is a deadline for nobody"
            );
            self.nodes[node].device.close();
        }
        Ok(())
    }

    fn check_plausible(&mut self) -> Checked {
        for node in 0..self.nodes.len() {
            let snapshot = self.nodes[node].device.snapshot();
            self.tally.add("packets with a bad ICRC", snapshot.port["bad_icrc"]);
            for (why, count) in &snapshot.dropped {
                ensure!(*count == 0, "node {node}: {count} packets were dropped: {why}");
            }
            let weather = &self.plan.weather;
            ensure!(
                snapshot.port["bad_icrc"] == 0 || weather.bad.corrupt > 0.0,
                "node {node}: packets had bad ICRCs"
            );
            if !self.is_calm() {
                continue;
            }
            // Absent memory is a reason to tell peers to come back.
            let is_paged = self.nodes.iter().any(|node| node.pagers.is_some());
            let repetitions: &[&str] = if is_paged { &[] } else { &["retransmits", "rnr_naks_sent"] };
            for qp in &snapshot.queue_pairs {
                for name in
                    ["timeouts", "sequence_naks_sent", "duplicates", "dropped"].iter().chain(repetitions)
                {
                    ensure!(
                        qp.counts[*name] == 0,
                        "QP {:#x} counts {} {name} in a perfect network",
                        qp.qpn,
                        qp.counts[*name]
                    );
                }
            }
            let (sent, received) =
                (snapshot.port["tx_packets"], self.nodes[1 - node].device.snapshot().port["rx_packets"]);
            ensure!(sent == received, "node {node} has sent {sent} packets, its peer received {received}");
        }
        Ok(())
    }
}
