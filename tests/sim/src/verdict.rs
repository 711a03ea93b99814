//! The checks at the end of an epoch and of a run.

use terrace_nic::{QpState, QpType};

use crate::end::Effect;
use crate::memory::Span;
use crate::node::Node;
use crate::plan::Waiting;
use crate::world::{Checked, Failure, World, ensure};

impl World {
    /// Checks an idle world: the network has no packets, the devices have no deadlines, and the programs have no work.
    pub fn check_quiet(&mut self) -> Checked {
        self.check_no_event_is_missing()?;
        self.check_queues()?;
        self.count_counters();
        self.ends.iter_mut().for_each(|end| end.broke = !end.is_open());
        Ok(())
    }

    /// Checks an epoch whose work requests have all succeeded, failed or been flushed.
    pub fn check_epoch(&mut self) -> Checked {
        for index in 0..self.ends.len() {
            if self.ends[index].kind == QpType::Rc {
                self.check_executed_prefix(index)?;
            } else {
                self.check_unreliable_writes(index)?;
            }
        }
        self.check_counters()?;
        self.check_logs()?;
        for node in 0..self.nodes.len() {
            if let Some(difference) = self.nodes[node].memory.difference() {
                return Err(Failure(format!("node {node}: the memory is wrong: {difference:x?}")));
            }
        }
        Ok(())
    }

    /// Checks that a program that waits for events has got an event for each completion.
    fn check_no_event_is_missing(&mut self) -> Checked {
        for node in 0..self.nodes.len() {
            self.take_async_events(node)?;
            self.poll_node(node)?;
            for cq_index in 0..2 {
                let left = self.poll_all(node, cq_index)?;
                let waiting = self.nodes[node].completions[cq_index].waiting;
                ensure!(
                    waiting != Waiting::Events || left.is_empty(),
                    "node {node}: {} completions raised no event",
                    left.len()
                );
            }
            let shared = &self.nodes[node].shared;
            let is_low = shared.limit.is_some_and(|limit| shared.posted.len() < limit as usize);
            ensure!(!is_low, "node {node}: a shared receive queue fell below its limit without an event");
        }
        Ok(())
    }

    /// Checks that all requests of intact connections are done, and that the device reports empty queues.
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
            self.complete_unsignaled(index)?;
        }
        Ok(())
    }

    /// Completes unsignaled requests, which have succeeded, because a failure would have been reported.
    pub fn complete_unsignaled(&mut self, index: usize) -> Checked {
        while let Some(request) = self.ends[index].posted.pop_front() {
            let wr_id = request.wr_id;
            ensure!(!request.signaled, "end {index}: request {wr_id} never completed");
            ensure!(!self.ends[index].send_failed, "end {index}: request {wr_id} was never flushed");
            self.succeed(index, request)?;
        }
        Ok(())
    }

    /// Checks that a reliable connection has executed a prefix of its requests: at least those that succeeded, and at
    /// most a part of the next one.
    fn check_executed_prefix(&mut self, index: usize) -> Checked {
        let there = 1 - (index & 1);
        let spans = self.spans_of(index);
        let succeeded = self.ends[index].succeeded as usize;
        let received = self.ends[index ^ 1].received;
        let healthy = !self.ends[index].broke && !self.ends[index ^ 1].broke;
        let defers = self.nodes[there].defers();
        let mut count = self.ends[index].steps.len();
        let mut undone: Option<Effect> = None;
        loop {
            let steps = &self.ends[index].steps[..count];
            let consumed = steps.iter().filter(|step| step.consumes).count() as u64;
            // Requests after a message that waited for absent memory have an effect, although the message's receive
            // never succeeded.
            let messages_agree = consumed == received || (!healthy && defers && consumed > received);
            if messages_agree && self.memory_agrees(index, &spans, undone.as_ref()) {
                break;
            }
            ensure!(
                count > succeeded && !healthy,
                "end {index}: {succeeded} requests succeeded and {received} messages were received, but the peer's \
                 memory does not match any number of executed requests"
            );
            count -= 1;
            undone = self.ends[index].steps[count].effect.take();
            if let Some(effect) = &undone {
                self.nodes[there].memory.expect(effect.span, &effect.before);
            }
        }
        // The request in progress may have been executed in part.
        spans.iter().for_each(|span| self.nodes[there].memory.accept(*span));
        if !healthy {
            self.tally.add("failed connections", 1);
        }
        Ok(())
    }

    /// Returns the parts of the peer's memory that only this end changes.
    fn spans_of(&self, index: usize) -> Vec<Span> {
        let windows = self.windows.iter().filter(|window| window.owner == index ^ 1);
        std::iter::once(self.ends[index].target).chain(windows.map(|window| window.range)).collect()
    }

    /// Returns whether the memory equals the model, except that the first packets of `begun` may have been written.
    fn memory_agrees(&self, index: usize, spans: &[Span], begun: Option<&Effect>) -> bool {
        let memory = &self.nodes[1 - (index & 1)].memory;
        spans.iter().all(|span| {
            let (actual, model) = (memory.actual(*span), memory.model(*span));
            if actual == model {
                return true;
            }
            let Some(effect) = begun.filter(|effect| span.overlap(effect.span).is_some()) else {
                return false;
            };
            let start = span.offset_of(effect.span);
            (self.ends[index].mtu..effect.after.len()).step_by(self.ends[index].mtu).any(|written| {
                let mut partial = model.to_vec();
                partial[start..start + written].copy_from_slice(&effect.after[..written]);
                partial == actual
            })
        })
    }

    /// Checks that each packet of an unreliable connection's WRITE was either written as a whole or not at all.
    fn check_unreliable_writes(&mut self, index: usize) -> Checked {
        let there = 1 - (index & 1);
        let all = self.is_perfect();
        for (span, payload) in std::mem::take(&mut self.ends[index].uncertain) {
            let memory = &self.nodes[there].memory;
            let (actual, initial) = (memory.actual(span), memory.model(span).to_vec());
            // When no access slot is free for absent memory, the present part of a packet may still be written.
            let is_paged = self.nodes[there].pagers.is_some();
            let packet_len = if is_paged { 1 } else { self.ends[index].mtu };
            let pieces = actual.chunks(packet_len);
            let is_explained = pieces.zip(payload.chunks(packet_len)).zip(initial.chunks(packet_len));
            let mut is_explained =
                is_explained.map(|((actual, sent), initial)| (actual == sent, actual == initial));
            ensure!(
                is_explained.all(|(arrived, unchanged)| arrived || (unchanged && !all)),
                "end {index}: an unreliable WRITE left bytes that are neither old nor new"
            );
            self.nodes[there].memory.accept(span);
        }
        if all {
            let lost = self.ends[index ^ 1].inbound.len();
            ensure!(lost == 0, "end {index}: {lost} messages were lost in a perfect network");
        }
        Ok(())
    }

    /// Checks that every addition to a shared counter was executed once, so that some order of the additions gives the
    /// returned values.
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
                let end = u64::from_ne_bytes(memory.actual(counter.span).try_into().expect("8 bytes"));
                let sum: u64 = returned.iter().map(|(_, add)| add).sum();
                let exact = !broken && !counter.unclear;
                ensure!(
                    end == counter.start + sum || (!exact && end > counter.start + sum),
                    "node {node}: a shared counter is {end}, but {} + {sum} were added",
                    counter.start
                );
                memory.accept(counter.span);
            }
        }
        Ok(())
    }

    fn check_logs(&mut self) -> Checked {
        for node in 0..self.nodes.len() {
            let ends = &self.ends;
            let checked = self.nodes[node].log.check(|end| ends[end].broke || ends[end ^ 1].broke);
            let count = checked.map_err(|reason| Failure(format!("node {node}: {reason}")))?;
            self.tally.add("records in logs", count);
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
            ensure!(
                objects.values().all(|count| *count == 0),
                "node {node}: objects are not destroyed: {objects:?}"
            );
            ensure!(
                self.nodes[node].device.next_deadline().is_none(),
                "node {node}: an idle device has a deadline"
            );
            self.nodes[node].device.close();
        }
        Ok(())
    }

    fn check_plausible(&mut self) -> Checked {
        for node in 0..self.nodes.len() {
            let snapshot = self.nodes[node].device.snapshot();
            self.tally.add("packets with a bad ICRC", snapshot.port["bad_icrc"]);
            for (reason, count) in &snapshot.dropped {
                ensure!(*count == 0, "node {node}: {count} packets were dropped: {reason}");
            }
            let network = &self.plan.network;
            ensure!(
                snapshot.port["bad_icrc"] == 0 || network.faulty.corrupt > 0.0,
                "node {node}: packets had bad ICRCs"
            );
            if !self.is_perfect() {
                continue;
            }
            // A responder whose requests wait may send RNR NAKs.
            let defers = self.nodes.iter().any(Node::defers);
            let repetitions: &[&str] = if defers { &[] } else { &["retransmits", "rnr_naks_sent"] };
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
