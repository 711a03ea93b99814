//! The checks at the end of an epoch and of a run.

use terrace_nic::{QpState, QpType};

use crate::end::Effect;
use crate::memory::Place;
use crate::plan::Waiting;
use crate::world::{Checked, World, ensure};

impl World {
    /// The checks of an idle world: the network is silent, the devices have no deadlines, the programs have no work.
    pub fn check_quiet(&mut self) -> Checked {
        self.check_nothing_unheard()?;
        self.check_queues()?;
        self.count_counters();
        self.ends.iter_mut().for_each(|end| end.broke = !end.is_open());
        Ok(())
    }

    /// The checks of an epoch whose work requests have all succeeded, failed or been flushed.
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

    /// A program that waits for events has got an event for each completion.
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

    /// Where no connection broke, everything is done and the device reports empty queues.
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
            // The queue is empty, so unsignaled requests are done.
            self.succeed_unheard(index)?;
        }
        Ok(())
    }

    /// Requests without a completion have succeeded: a failure would have been reported.
    pub fn succeed_unheard(&mut self, index: usize) -> Checked {
        while let Some(request) = self.ends[index].posted.pop_front() {
            let wr_id = request.wr_id;
            ensure!(!request.signaled, "end {index}: request {wr_id} never completed");
            ensure!(!self.ends[index].send_failed, "end {index}: request {wr_id} was never flushed");
            self.succeed(index, request)?;
        }
        Ok(())
    }

    /// A reliable connection has executed a prefix of its requests, with at least those that succeeded, and at most the
    /// beginning of the next one.
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
            // Effects after a message that waited for absent memory stay, although the message's receive never
            // succeeded.
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
        // The request in progress may have been executed in part.
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

    /// Whether the memory equals the model, except that the first packets of `begun` may have been written.
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

    /// Each packet of an unreliable connection's WRITE has either arrived or not.
    fn settle_unreliable(&mut self, index: usize) -> Checked {
        let there = 1 - (index & 1);
        let all = self.is_calm();
        for (place, payload) in std::mem::take(&mut self.ends[index].uncertain) {
            let memory = &self.nodes[there].memory;
            let (actual, noise) = (memory.actual(place), memory.model(place).to_vec());
            // When no access slot is free for absent memory, the present part of a packet may be written all the same.
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

    /// Every addition to a shared counter was executed once: some order of the additions explains the returned values.
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

    /// Adds the devices' counters to the tally.
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
            // Absent memory makes a responder send RNR NAKs.
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
