//! Packets of queue pairs: to rings, and into batches for the network.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_sync::Guard;
use terrace_transport::{AckPolicy, QpState, SendWr, Time, Transmit};

use crate::ack::{AckEvent, AckState};
use crate::clock::LazyTimestamp;
use crate::device::Device;
use crate::error::Error;
use crate::host::QpHost;
use crate::local::rings::fill::deadline_clock;
use crate::local::{Carrier, Filled};
use crate::qp::{QpCore, QueuePair};
use crate::tx::{BatchSink, TxUnit};

/// Batches that one pass sends at most. Otherwise a peer that READs gigabytes at once is served to the end before the
/// next packet is received and before the next timer expires.
const BATCHES_PER_PASS: usize = 8;

impl Device {
    /// Sends for a queue pair. Over the network, packets of pending queue pairs leave along with it.
    pub(crate) fn transmit(&self, qp: &Arc<QueuePair>, core: Guard<'_, QpCore>) {
        self.transmit_first(qp, core);
        self.after_unlock();
    }

    #[inline]
    fn transmit_first(&self, qp: &Arc<QueuePair>, mut core: Guard<'_, QpCore>) {
        let now = &LazyTimestamp::new(&*self.clock, None);
        match self.fill_by_ring(qp, &mut core, now) {
            Filled::Sent => return,
            Filled::Full(retry_at) => return self.retry_ring(qp, core, retry_at),
            Filled::NotHere => {}
        }
        if self.tx.is_blocked() {
            self.publish_state(qp, &mut core);
            self.arm(qp, &core);
            drop(core);
            self.defer_until_unblocked(qp);
            return;
        }
        let mut unit = self.tx.take();
        let outcome = self.fill_batch(qp, &mut core, now, &mut unit);
        // Still under the lock: an entry that is added after this fill must not be dropped as already handled.
        self.pending.take_into(&mut unit.work, Some(qp));
        drop(core);
        if self.has_deferred_acks.load(Ordering::SeqCst)
            && let Some(mut rx) = self.rx.try_lock()
        {
            self.release_acks(&mut rx, &mut unit.work);
        }
        if outcome == Transmit::SinkFull {
            unit.work.push_front(qp.clone());
        }
        self.flush(unit, now);
    }

    /// Leaves a queue pair to the pass that finds the network unblocked. The network may just have been unblocked, so
    /// this wakes the engine.
    fn defer_until_unblocked(&self, qp: &Arc<QueuePair>) {
        self.pending.add(qp);
        if !self.tx.is_blocked() {
            self.engine.wake();
        }
    }

    /// Sends for the queue pairs on the work list until nothing is left, the network blocks, or [`BATCHES_PER_PASS`]
    /// batches have left: the rest is for the next pass.
    pub(crate) fn flush(&self, mut unit: Box<TxUnit<QueuePair>>, now: &LazyTimestamp<'_>) {
        for batch in 1.. {
            if self.tx.is_blocked() {
                unit.work.drain(..).for_each(|qp| self.defer_until_unblocked(&qp));
            }
            self.fill_from_work(&mut unit, now);
            if !self.port.transmit(&mut unit.batch) {
                unit.work.drain(..).for_each(|qp| self.pending.add(&qp));
                self.tx.block(unit);
                self.engine.wake();
                return;
            }
            for owner in unit.owners.drain(..) {
                if owner.token.give_back() {
                    unit.work.push_back(owner);
                }
            }
            // Checked after the last queue pair has joined the queue for grants: a thread that frees budget from now on
            // sees it there.
            self.in_flight.give_grants(&mut unit.work);
            if batch == BATCHES_PER_PASS && !unit.work.is_empty() {
                unit.work.drain(..).for_each(|qp| self.schedule_pass(&qp));
            }
            if unit.work.is_empty() {
                self.tx.give_back(unit);
                return;
            }
        }
    }

    /// Fills the batch from the work list. A queue pair that has more to send than fits goes to the end of the list.
    fn fill_from_work(&self, unit: &mut TxUnit<QueuePair>, now: &LazyTimestamp<'_>) {
        while let Some(qp) = unit.work.pop_front() {
            let mut core = qp.lock();
            if core.nic.dead {
                continue;
            }
            match self.fill_by_ring(&qp, &mut core, now) {
                Filled::Sent => {}
                Filled::Full(retry_at) => self.retry_ring(&qp, core, retry_at),
                Filled::NotHere => {
                    let outcome = self.fill_batch(&qp, &mut core, now, unit);
                    drop(core);
                    if outcome == Transmit::SinkFull {
                        return unit.work.push_back(qp);
                    }
                }
            }
        }
    }

    /// Fills the batch from a queue pair, as far as it fits, unless another thread holds the queue pair's token.
    fn fill_batch(
        &self,
        qp: &Arc<QueuePair>,
        core: &mut QpCore,
        now: &LazyTimestamp<'_>,
        unit: &mut TxUnit<QueuePair>,
    ) -> Transmit {
        if !qp.token.take() {
            // The thread that holds it fills again; what the caller has changed counts now.
            self.publish_state(qp, core);
            self.arm(qp, core);
            return Transmit::Idle;
        }
        let before_count = unit.batch.len();
        self.begin_to_fill(qp, core);
        // A woken program may send its response before the ACK of the message that woke it. A peer that sleeps on one
        // channel for both of its queues may rely on the completion of its message before that of the response:
        // perftest does, up to 4.5-0.17.
        let is_urgent = qp.schedule.ack.state() == AckState::Urgent;
        let acks = if is_urgent { AckPolicy::First } else { AckPolicy::Now };
        let (transport, host) = core.parts(qp, None);
        let outcome = transport.poll_transmit(|| now.get(), &host, &mut BatchSink(&mut unit.batch), acks);
        self.end_to_fill(qp, core);
        if unit.batch.len() > before_count {
            unit.owners.push(qp.clone());
        } else {
            // There can be no note: leaving one takes the queue pair's lock.
            qp.token.give_back();
        }
        outcome
    }

    /// Fills the queue pair's ring, if that is its route and none of its packets is under way over the network: no thread
    /// can take the token while this one has the lock.
    #[inline]
    pub(super) fn fill_by_ring(
        &self,
        qp: &Arc<QueuePair>,
        core: &mut QpCore,
        now: &LazyTimestamp<'_>,
    ) -> Filled {
        core.nic.is_on_work_list = false;
        self.update_route(qp, core);
        let Carrier::Ring(peer_tx) = &core.nic.local.route.packets else { return Filled::NotHere };
        if !self.may_use(peer_tx) {
            self.choose_route(qp, core);
            return Filled::NotHere;
        }
        if !qp.token.is_free() {
            return Filled::NotHere;
        }
        self.begin_to_fill(qp, core);
        let QpCore { qp: transport, nic } = core;
        let Carrier::Ring(peer_tx) = &nic.local.route.packets else { return Filled::NotHere };
        let filled = self.fill_ring(transport, &QpHost::new(qp, nic, None), peer_tx, now);
        self.end_to_fill(qp, core);
        filled
    }

    /// Queues a send work request with the transport. An ordinary message leaves at once if the queue pair's route is a
    /// ring; over the network, messages leave in batches.
    #[inline]
    pub(crate) fn queue_send(
        self: &Arc<Self>,
        qp: &Arc<QueuePair>,
        core: &mut QpCore,
        wr: &mut SendWr,
    ) -> Result<(), Error> {
        let QpCore { qp: transport, nic } = core;
        let (now, host) = (&LazyTimestamp::new(&*self.clock, None), &QpHost::new(qp, nic, None));
        // In other states nothing leaves, and completions need not be made under the ring's lock.
        let is_rts = transport.state() == QpState::Rts;
        match &nic.local.route.packets {
            Carrier::Ring(peer_tx) if is_rts && self.may_use(peer_tx) && qp.token.is_free() => {
                self.ensure_engine();
                let mut sink = self.ring_sink(peer_tx);
                transport.post_send(deadline_clock(transport, now), wr, host, &mut sink)?;
                drop(sink);
                self.note_filled(qp, core);
            }
            _ => transport.post_send(|| now.get(), wr, host, &mut ())?,
        }
        Ok(())
    }

    /// Schedules a queue pair whose ring is full: for `at`, or for the next pass.
    fn retry_ring(&self, qp: &Arc<QueuePair>, core: Guard<'_, QpCore>, at: Option<Time>) {
        match at {
            None => {
                drop(core);
                self.schedule_pass(qp);
            }
            Some(at) if self.timers.arm(qp, at) => self.engine.wake_by(at),
            Some(_) => {}
        }
    }

    #[inline]
    fn begin_to_fill(&self, qp: &QueuePair, core: &mut QpCore) {
        if qp.schedule.take_woken() {
            core.qp.wake();
        }
        core.nic.granted_bytes = qp.schedule.take_grant();
        // The budget counts them already.
        core.nic.counted_bytes += core.nic.granted_bytes;
    }

    /// Updates timer and deferred ACK after packets of a queue pair were, or may have been, sent.
    #[inline]
    pub(crate) fn note_filled(&self, qp: &Arc<QueuePair>, core: &mut QpCore) {
        self.arm(qp, core);
        if !core.qp.holds_ack() {
            qp.schedule.ack.note(AckEvent::Sent);
        }
    }

    #[inline]
    fn end_to_fill(&self, qp: &Arc<QueuePair>, core: &mut QpCore) {
        self.publish_state(qp, core);
        if core.qp.is_blocked_by_budget()
            && let Some(budget) = &core.nic.budget
        {
            self.in_flight.wait(qp, budget);
        }
        self.note_filled(qp, core);
    }

    /// Retries what the network did not take.
    pub(super) fn retry_blocked(&self, now: &LazyTimestamp<'_>) {
        while self.tx.is_blocked() {
            let Some(mut unit) = self.tx.take_blocked() else { return };
            if !self.port.transmit(&mut unit.batch) {
                if self.tx.put_back(unit) {
                    self.engine.wake();
                }
                return;
            }
            self.tx.note_unblocked();
            self.postpone_ack_timeouts(&unit.owners, now.get());
            self.flush(unit, now);
        }
    }

    /// Restarts the ACK timers of queue pairs whose packets have left later than they were made.
    fn postpone_ack_timeouts(&self, owners: &[Arc<QueuePair>], now: Time) {
        for owner in owners {
            owner.lock().qp.postpone_ack_timeout(now);
        }
    }
}
