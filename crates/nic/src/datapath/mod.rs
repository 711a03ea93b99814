//! The device's data path: packets, work requests and timers. Nothing here knows threads or a clock of its own: the
//! time is passed in, and the calling thread does the work.
//!
//! A burst is received and handled queue pair by queue pair; then the queue pairs on the work list fill one batch with
//! what they have to send. Locks are taken in the order queue pair, TX ring, shared receive queue, completion queue,
//! channel. None is held while the network is called, except for the receive lock.
//!
//! | module | content |
//! |---|---|
//! | here | a progress pass; timers; what follows a change of a queue pair |
//! | `receive` | packets from the network and from rings, to their queue pairs |
//! | `send` | packets of queue pairs, to rings and into batches for the network |

mod receive;
mod send;

use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use receive::ReceivePass;
use terrace_sync::Guard;
use terrace_transport::{QpAttr, QpAttrMask, QpState, Time};

use crate::ack::AtPassEnd;
use crate::clock::LazyTimestamp;
use crate::cq::Cq;
use crate::cq::poll::CompletionBypass;
use crate::device::Device;
use crate::events::AsyncEvent;
use crate::local::RxPending;
use crate::qp::{QpCore, QueuePair};
use crate::tx::{Receiver, WorkList};

/// Fruitless polls between two reads of the clock, which would cost a tenth of each.
const POLLS_PER_CLOCK: u32 = 8;

/// Passes at most for what has arrived, however fast more arrives.
const ARRIVED_PASSES_MAX: u32 = 16;

impl Device {
    /// One progress pass: received packets, expired timers, pending queue pairs. Without a time the timers are left to
    /// the next pass, and a pass that finds nothing does not read the clock. `acks` says what becomes of the ACKs that
    /// this pass defers, and is called once the packets have been handled. With `is_fed`, the caller has completions
    /// already, and the network can wait. Returns whether there was anything to do.
    pub(crate) fn advance(
        &self,
        now: Option<Time>,
        bypass: Option<&CompletionBypass<'_>>,
        is_fed: bool,
        acks: impl FnOnce() -> AtPassEnd,
    ) -> bool {
        let was_active = self.callbacks.advance();
        if self.tx.is_blocked() {
            self.retry_blocked(&LazyTimestamp::new(&*self.clock, now));
        }
        let mut rx = self.rx.try_lock();
        let rings =
            rx.as_mut().map_or_else(RxPending::default, |rx| rx.peer_rx.poll(bypass.is_none(), is_fed));
        let received =
            rx.as_mut().filter(|_| rings.network_is_due).map_or(0, |rx| self.receive(&mut rx.batch));
        if rx.is_some() && self.is_receive_probed.load(Ordering::Relaxed) {
            self.is_receive_probed.store(false, Ordering::Relaxed);
        }
        // A packet that a timer takes for lost may have arrived, and only the receive lock's holder can find out.
        // Without the lock the timer is left to a later pass of the engine.
        let due = rx.is_some() && now.is_some_and(|now| self.timers.is_due(now));
        if received == 0 && !rings.have_packets && !due && !self.wants_pass() {
            return was_active;
        }
        let now = &LazyTimestamp::new(&*self.clock, now);
        let own_unit = rx.as_mut().and_then(|rx| rx.unit.take());
        let mut unit = own_unit.unwrap_or_else(|| self.tx.take());
        // Pending work and ACKs of earlier passes leave now; only ACKs of this pass may be deferred.
        if self.wants_pass() {
            self.pending.take_into(&mut unit.work, None);
            if let Some(rx) = rx.as_mut() {
                self.release_acks(rx, &mut unit.work);
            }
        }
        let mut has_deferred = false;
        if let Some(rx) = rx.as_mut().filter(|_| received > 0 || rings.have_packets || due) {
            let Receiver { batch, acks, peer_rx, .. } = &mut **rx;
            let (table, early) = (OnceCell::new(), Vec::new());
            let mut pass =
                ReceivePass { now, acks, has_deferred, table, work: &mut unit.work, bypass, early };
            if received > 0 {
                self.handle_burst(batch, &mut pass);
            }
            if due {
                self.catch_up_with_network(batch, &mut pass);
            }
            if rings.have_packets {
                self.handle_rx_rings(peer_rx, batch, &mut pass);
            }
            if !pass.early.is_empty() {
                self.handle_early(peer_rx, batch, &mut pass);
            }
            has_deferred = pass.has_deferred;
        }
        if due {
            self.handle_timers(now.get(), &mut unit.work);
        }
        self.run_work_queues(&mut unit.work);
        let acks = acks();
        if let Some(rx) = rx.as_mut() {
            match (has_deferred, acks) {
                (false, _) => {}
                // The engine announces that it sleeps before it reads this.
                (true, AtPassEnd::Keep) => self.has_deferred_acks.store(true, Ordering::SeqCst),
                (true, AtPassEnd::Release) => rx.acks.release_into(&mut unit.work),
            }
            if self.is_closed() {
                // Closing clears the waiting lists once, and no pass follows this one.
                rx.acks.release_into(&mut unit.work);
                rx.clear();
            }
        }
        self.in_flight.give_grants(&mut unit.work);
        match rx.as_mut() {
            Some(rx) if unit.is_idle() => rx.unit = Some(unit),
            _ => {
                drop(rx.take());
                self.flush(unit, now);
            }
        }
        drop(rx);
        self.fail_overrun_qps();
        self.management.deliver();
        self.callbacks.advance();
        true
    }

    /// Handles what has arrived and sends what waits, once. Returns whether there was anything to do.
    pub fn progress(&self) -> bool {
        self.advance(Some(self.clock.now()), None, false, || AtPassEnd::Release)
    }

    /// Handles what has arrived before this call, as far as a few passes do: requests whose ACKs are among it end with
    /// success, though they are flushed right afterwards. The program may know by another way that the peer has had
    /// them, such as a message of the connection manager, which has a socket of its own.
    pub(crate) fn receive_arrived(&self) {
        for _ in 0..ARRIVED_PASSES_MAX {
            // A pass of another thread may have begun before. Passes do not wait, and none calls the program with this lock.
            drop(self.rx.lock());
            if !self.advance(None, None, false, || AtPassEnd::Release) {
                break;
            }
        }
        drop(self.rx.lock());
    }

    /// Sends everything deferred, and receives nothing: for a process that ends. In a forked child that has not used
    /// the device all of that is the parent's.
    pub fn send_deferred(&self) {
        if !self.engine.is_missing() && self.has_waiting() {
            let mut unit = self.tx.take();
            self.pending.take_into(&mut unit.work, None);
            // Otherwise the thread that is receiving sends the deferred ACKs.
            if let Some(mut rx) = self.rx.try_lock() {
                self.release_acks(&mut rx, &mut unit.work);
            }
            self.flush(unit, &LazyTimestamp::new(&*self.clock, None));
        }
    }

    /// Makes progress for a program that polls a completion queue. When that brings something, the program is likely to
    /// post next, and ACKs wait to leave with that.
    pub(crate) fn progress_for(&self, cq: &Cq, polls: u32, bypass: Option<&CompletionBypass<'_>>) {
        let now = polls.is_multiple_of(POLLS_PER_CLOCK).then(|| self.clock.now());
        let active = self.advance(now, bypass, !cq.is_empty(), || {
            let is_in_vain = cq.is_empty() && !bypass.is_some_and(CompletionBypass::has_bypassed);
            if is_in_vain || !self.engine.sends_deferred_acks() {
                AtPassEnd::Release
            } else {
                AtPassEnd::Keep
            }
        });
        // The engine may have left standby just then.
        if active && !self.engine.sends_deferred_acks() && self.has_waiting() {
            self.engine.wake();
        }
    }

    /// Moves queue pairs with deferred ACKs to the work list.
    pub(crate) fn release_acks(&self, rx: &mut Receiver<QueuePair>, work: &mut WorkList<QueuePair>) {
        if self.has_deferred_acks.load(Ordering::Relaxed) {
            self.has_deferred_acks.store(false, Ordering::Relaxed);
            rx.acks.release_into(work);
        }
    }

    /// Does all work that is due at `now`, until there is none left: for simulations, in which no other thread makes
    /// progress. Returns whether there was anything to do.
    pub fn step(&self, now: Time) -> bool {
        let mut active = false;
        while self.advance(Some(now), None, false, || AtPassEnd::Release) {
            active = true;
        }
        active
    }

    /// Whether queue pairs are pending or can get a grant, and a pass is of use to them: while the network is blocked
    /// it is not.
    pub(crate) fn wants_pass(&self) -> bool {
        (self.has_waiting() || self.in_flight.can_grant()) && !self.tx.is_blocked()
    }

    /// Whether queue pairs are pending, including those with deferred ACKs and with entries to execute.
    pub(crate) fn has_waiting(&self) -> bool {
        !self.pending.is_empty() || self.has_deferred_acks.load(Ordering::SeqCst) || !self.runnable.is_empty()
    }

    /// When [`Device::step`] has something to do if no packet arrives before; 0 means at once.
    pub fn next_deadline(&self) -> Option<Time> {
        if self.wants_pass() { Some(Time(0)) } else { self.timers.next() }
    }

    fn handle_timers(&self, now: Time, work: &mut WorkList<QueuePair>) {
        for qp in self.timers.take_due(now) {
            let mut core = qp.lock();
            if core.nic.dead {
                continue;
            }
            // The entry may be of an earlier deadline.
            let is_due = core.qp.deadline().is_some_and(|deadline| deadline <= now);
            if is_due && self.waits_for_network(&qp, &core) {
                core.qp.postpone_ack_timeout(now);
            }
            let (transport, host) = core.parts(&qp, None);
            transport.handle_timeout(now, &host);
            self.publish_state(&qp, &mut core);
            self.arm(&qp, &core);
            add_to_work_list(&qp, &mut core, work);
        }
    }

    /// Whether the network has not taken the queue pair's latest packets, or its retransmissions: a blocked unit holds its
    /// token, or nothing was sent since it went back.
    fn waits_for_network(&self, qp: &QueuePair, core: &QpCore) -> bool {
        self.tx.is_blocked()
            && !core.nic.local.has_tx_ring()
            && (!qp.token.is_free() || core.qp.in_flight_bytes() == 0)
    }

    /// Releases a queue pair that the program has used and that has nothing to send.
    #[inline(always)]
    pub(crate) fn unlock_idle(&self, core: Guard<'_, QpCore>) {
        drop(core);
        self.fail_overrun_qps();
        self.callbacks.call_if_requested();
    }

    /// Does what a change by the program requires: packets, timers. Over the network, packets of pending queue pairs
    /// leave along with it.
    pub(crate) fn after_change(&self, qp: &Arc<QueuePair>, mut core: Guard<'_, QpCore>) {
        if core.qp.wants_transmit() {
            return self.transmit(qp, core);
        }
        self.publish_state(qp, &mut core);
        self.arm(qp, &core);
        drop(core);
        self.after_unlock();
    }

    /// Does what may not be done under a queue pair's lock.
    #[inline]
    pub(crate) fn after_unlock(&self) {
        if self.in_flight.can_grant() {
            self.engine.wake_by(Time(0));
        }
        self.fail_overrun_qps();
        self.callbacks.call_if_requested();
    }

    /// Counts a queue pair in the budget of the peer that its path leads to. Called when the path may have changed.
    pub(crate) fn choose_budget(&self, qp: &QueuePair, core: &mut QpCore) {
        let peer = core.qp.attr().path.map(|path| path.remote);
        if peer != core.nic.budget.as_ref().map(|budget| budget.peer()) {
            let counted_bytes = std::mem::take(&mut core.nic.counted_bytes);
            if let Some(budget) = core.nic.budget.take() {
                self.in_flight.leave(&qp.schedule, &budget, counted_bytes);
            }
            core.nic.budget = peer.map(|peer| self.in_flight.of_peer(peer));
        }
        self.update_in_flight(core);
    }

    /// Updates a queue pair's part of its peer's in-flight budget. Called whenever that may have changed.
    #[inline]
    fn update_in_flight(&self, core: &mut QpCore) {
        let Some(budget) = &core.nic.budget else { return };
        // Packets in a ring do not count as in flight.
        let now_bytes = if core.nic.local.has_tx_ring() { 0 } else { core.qp.in_flight_bytes() };
        let before_bytes = std::mem::replace(&mut core.nic.counted_bytes, now_bytes);
        self.in_flight.update(budget, before_bytes, now_bytes);
    }

    /// Updates what depends on a queue pair's state after a call into the transport: the in-flight budget, what same-host
    /// peers see of it, and whether the executor of entries in memory can go on.
    #[inline]
    pub(crate) fn publish_state(&self, qp: &QueuePair, core: &mut QpCore) {
        self.update_in_flight(core);
        self.publish_queue_pair(qp, core, false);
        if core.nic.entries.exist {
            self.note_room(qp, core);
        }
    }

    pub(crate) fn arm(&self, qp: &Arc<QueuePair>, core: &QpCore) {
        if let Some(deadline) = core.qp.deadline()
            && self.timers.arm(qp, deadline)
        {
            self.engine.wake_by(deadline);
        }
    }

    /// A completion queue has overrun: the program gets an event, and the queue pairs that complete to it stop (IBTA
    /// volume 1, 11.6.3.1). The caller holds locks, so the latter is left to [`Device::fail_overrun_qps`].
    pub(crate) fn note_overrun(&self, cq: Arc<Cq>) {
        self.events.raise(AsyncEvent::CqError(cq.clone()));
        self.overrun.add(cq);
    }

    /// Moves the queue pairs of overrun completion queues to the error state. Takes locks.
    #[inline]
    pub(crate) fn fail_overrun_qps(&self) {
        if !self.overrun.is_empty() {
            self.fail_all_overrun_qps();
        }
    }

    #[cold]
    fn fail_all_overrun_qps(&self) {
        let overrun = self.overrun.take();
        for qp in self.table.all() {
            if overrun.iter().any(|cq| qp.completes_to(cq)) {
                self.fail(&qp);
            }
        }
    }

    fn fail(&self, qp: &Arc<QueuePair>) {
        let mut core = qp.lock();
        if core.nic.dead || matches!(core.qp.state(), QpState::Reset | QpState::Err) {
            return;
        }
        let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
        let (transport, host) = core.parts(qp, None);
        // The error state can be reached from every state.
        let _ = transport.modify(&error, QpAttrMask::STATE, &host);
        self.publish_state(qp, &mut core);
        if qp.init.raises_events {
            self.events.raise(AsyncEvent::QpFatal(qp.clone()));
        }
    }
}

/// Puts a queue pair on the work list, once.
pub(crate) fn add_to_work_list(qp: &Arc<QueuePair>, core: &mut QpCore, work: &mut WorkList<QueuePair>) {
    if !std::mem::replace(&mut core.nic.is_on_work_list, true) {
        work.push_back(qp.clone());
    }
}
