//! The device's data path: packets, work requests and timers. Nothing here knows threads or a clock of its own: the
//! time is passed in, and the calling thread does the work.
//!
//! A burst is received and handled queue pair by queue pair; then the queue pairs on the work list fill one batch with
//! what they have to send. Locks are taken in the order queue pair, TX ring, shared receive queue, completion queue,
//! channel. None is held while the network is called, except for the receive lock.

use std::cell::OnceCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_fabric::RxBatch;
use terrace_hostmem::{CopySource, SharedBytes};
use terrace_shm::RxPacket;
use terrace_sync::Guard;
use terrace_transport::{AckPolicy, QpAttr, QpAttrMask, QpState, SendWr, Time, Transmit};
use terrace_wire::{Packet, Psn, Reth, RxMeta};

use crate::ack::{AckEvent, AckState, AtPassEnd};
use crate::clock::LazyTimestamp;
use crate::cq::Cq;
use crate::cq::poll::CompletionBypass;
use crate::device::Device;
use crate::error::Error;
use crate::events::AsyncEvent;
use crate::host::QpHost;
use crate::local::rings::fill::deadline_clock;
use crate::local::{Carrier, Filled, PeerRxSet, RxPending};
use crate::management::is_management;
use crate::qp::{QpCore, QueuePair, RxPath};
use crate::table::TableReader;
use crate::tx::{AckList, BatchSink, Receiver, TxUnit, WorkList};

/// Batches that one pass sends at most. Otherwise a peer that READs gigabytes at once is served to the end before the
/// next packet is received and before the next timer expires.
const BATCHES_PER_PASS: usize = 8;

/// Receive calls at most before a ring is used or a timer expires. Each call brings up to 32 datagrams.
const RECEIVES_TO_CATCH_UP: u32 = 64;

/// After so many passes everything is read that was in a ring at the start: a ring holds 8192 of the shortest packets,
/// and a pass reads 64.
const PASSES_PER_RING: u32 = 128;

/// Packets from the network that are kept at most until the rings are read.
const EARLY_MAX: usize = 1024;

/// Fruitless polls between two reads of the clock, which would cost a tenth of each.
const POLLS_PER_CLOCK: u32 = 8;

/// The default partition, and the mask that leaves the membership bit out (IBTA volume 1, 10.9.3).
const DEFAULT_PARTITION: u16 = 0x7fff;

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

    /// Receives from the network and returns the number of datagrams.
    fn receive(&self, rx: &mut RxBatch) -> usize {
        let received = self.port.receive(rx);
        self.engine.note_burst(received);
        received
    }

    fn handle_burst<'a>(&'a self, rx: &mut RxBatch, pass: &mut ReceivePass<'a, '_>) {
        while let Some(packet) = rx.next() {
            if let Some(reth) = Reth::of_unverified(packet.following) {
                self.memory.prefetch_announced(reth.rkey, reth.va);
            }
            let (meta, bytes) = (&packet.meta, packet.bytes);
            if meta.destination.is_multicast() {
                self.deliver_to_group(meta, bytes);
                continue;
            }
            // A flooding peer may not fill the memory: beyond the limit its packets are handled out of order.
            let is_next = pass.early.len() >= EARLY_MAX;
            let packet = Arrived::from_network(meta, bytes, is_next);
            if self.handle_packet(packet, pass) == Arrival::TooEarly {
                pass.early.push(EarlyPacket { meta: *meta, bytes: bytes.into() });
            }
        }
    }

    fn handle_rx_rings<'a>(
        &'a self,
        peer_rx: &mut PeerRxSet,
        rx: &mut RxBatch,
        pass: &mut ReceivePass<'a, '_>,
    ) {
        self.read_peer_rx(peer_rx, |meta, RxPacket { acknowledged, bytes, run, .. }| {
            let (ack, run) = (acknowledged.map(Psn::new), run.as_ref());
            let mut packet = Arrived { meta, ack, bytes, run, path: RxPath::Ring, is_next: false };
            while self.handle_packet(packet, pass) == Arrival::TooEarly {
                self.catch_up_with_network(rx, pass);
                packet.is_next = true;
            }
        });
    }

    /// Handles packets from the network for queue pairs whose previous packets came through rings. The packets in the
    /// rings come first: their peers have written them before.
    #[cold]
    fn handle_early<'a>(&'a self, peer_rx: &mut PeerRxSet, rx: &mut RxBatch, pass: &mut ReceivePass<'a, '_>) {
        for _ in 0..PASSES_PER_RING {
            if !peer_rx.poll(true, false).have_packets {
                break;
            }
            self.handle_rx_rings(peer_rx, rx, pass);
        }
        for EarlyPacket { meta, bytes } in std::mem::take(&mut pass.early) {
            self.handle_packet(Arrived::from_network(&meta, &bytes, true), pass);
        }
    }

    /// Handles everything that has arrived over the network: before timers take it for lost, or before a queue pair's
    /// packets come through a ring, because unreliable services take overtaken packets for lost.
    #[cold]
    fn catch_up_with_network<'a>(&'a self, rx: &mut RxBatch, pass: &mut ReceivePass<'a, '_>) {
        for _ in 0..RECEIVES_TO_CATCH_UP {
            if self.receive(rx) == 0 {
                return;
            }
            self.handle_burst(rx, pass);
        }
    }

    /// No bytes do harm: a bad packet only increments a counter.
    fn handle_packet<'a>(&'a self, arrived: Arrived<'_>, pass: &mut ReceivePass<'a, '_>) -> Arrival {
        let Arrived { meta, bytes, .. } = arrived;
        let mut packet = Packet::default();
        if !self.read(meta, bytes, &mut packet) {
            return Arrival::Done;
        }
        let arrival = self.deliver(arrived, &packet, pass);
        // A run is for this process: its sender has found the queue pair's process.
        if arrival == Arrival::Nowhere && (arrived.run.is_some() || !self.forward(meta, &packet, bytes)) {
            self.counters.unknown_qp.fetch_add(1, Ordering::Relaxed);
        }
        arrival
    }

    /// Parses a packet. False if it is malformed or of another partition.
    #[inline]
    pub(crate) fn read<'a>(&self, meta: &RxMeta, bytes: &'a [u8], packet: &mut Packet<'a>) -> bool {
        if let Err(error) = packet.read(bytes) {
            self.counters.malformed.fetch_add(1, Ordering::Relaxed);
            tracing::trace!(%error, source = %meta.source, "malformed packet dropped");
            return false;
        }
        let is_ours = packet.bth.pkey & DEFAULT_PARTITION == DEFAULT_PARTITION;
        if !is_ours {
            self.counters.wrong_partition.fetch_add(1, Ordering::Relaxed);
        }
        is_ours
    }

    /// Delivers a packet to its queue pair.
    fn deliver<'a>(
        &'a self,
        arrived: Arrived<'_>,
        packet: &Packet<'_>,
        pass: &mut ReceivePass<'a, '_>,
    ) -> Arrival {
        let Arrived { meta, ack, run, path, is_next, .. } = arrived;
        if is_management(packet.bth.qpn) && !self.is_for_other_instance(packet.bth.qpn) {
            self.management.take(pass.now.get(), self.port.instance(), meta, packet);
            return Arrival::Done;
        }
        let known = pass.acks.find(packet.bth.qpn);
        let found = known.or_else(|| pass.table.get_or_init(|| self.table.read()).get(packet.bth.qpn));
        let Some(qp) = found else { return Arrival::Nowhere };
        // Packets of other senders than the peer are dropped before they take the lock or change `last_path`.
        if !qp.source.admits(meta.source) {
            return Arrival::Done;
        }
        let mut core = qp.lock();
        if core.nic.dead {
            return Arrival::Nowhere;
        }
        if core.nic.last_path != path && !is_next {
            return Arrival::TooEarly;
        }
        core.nic.last_path = path;
        match run {
            None => {
                let (transport, host) = core.parts(qp, pass.bypass);
                transport.handle_packet(|| pass.now.get(), meta, packet, ack, &host);
            }
            Some(run) => handle_run(qp, &mut core, arrived, run, packet, pass),
        }
        self.publish_state(qp, &mut core);
        self.arm(qp, &core);
        if qp.schedule.ack.state() == AckState::Urgent && path == RxPath::Ring && core.qp.holds_ack() {
            // The program is waking, and may answer before this pass is over: through another queue pair, if this one is
            // an XRC target. Then a peer that sleeps would find the answer's completion before its message's.
            self.fill_by_ring(qp, &mut core, pass.now);
        }
        if core.qp.wants_only_to_acknowledge() && !core.nic.is_on_work_list {
            qp.schedule.ack.note(AckEvent::Deferred);
            pass.has_deferred = true;
            if !qp.schedule.is_on_ack_list.load(Ordering::Relaxed) {
                qp.schedule.is_on_ack_list.store(true, Ordering::Relaxed);
                let added = qp.clone();
                drop(core);
                pass.acks.add(added);
            }
        } else if core.qp.wants_transmit() {
            add_to_work_list(qp, &mut core, pass.work);
        }
        Arrival::Done
    }

    fn handle_timers(&self, now: Time, work: &mut WorkList<QueuePair>) {
        for qp in self.timers.take_due(now) {
            let mut core = qp.lock();
            if core.nic.dead {
                continue;
            }
            let (transport, host) = core.parts(&qp, None);
            transport.handle_timeout(now, &host);
            self.publish_state(&qp, &mut core);
            self.arm(&qp, &core);
            add_to_work_list(&qp, &mut core, work);
        }
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

    /// Sends for a queue pair. Over the network, packets of pending queue pairs leave along with it.
    pub(crate) fn transmit(&self, qp: &Arc<QueuePair>, core: Guard<'_, QpCore>) {
        self.transmit_first(qp, core);
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
    fn fill_by_ring(&self, qp: &Arc<QueuePair>, core: &mut QpCore, now: &LazyTimestamp<'_>) -> Filled {
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
        core.nic.has_grant = qp.schedule.take_grant();
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
        if core.qp.is_blocked_by_budget() {
            self.in_flight.wait(qp);
        }
        self.note_filled(qp, core);
    }

    /// Retries what the network did not take.
    fn retry_blocked(&self, now: &LazyTimestamp<'_>) {
        while self.tx.is_blocked() {
            let Some(mut unit) = self.tx.take_blocked() else { return };
            if !self.port.transmit(&mut unit.batch) {
                self.tx.put_back(unit);
                return;
            }
            self.tx.note_unblocked();
            self.flush(unit, now);
        }
    }

    /// Updates a queue pair's part of the in-flight budget. Called whenever that may have changed.
    #[inline]
    pub(crate) fn update_in_flight(&self, core: &mut QpCore) {
        // Packets in a ring do not count as in flight.
        let now_bytes = if core.nic.local.has_tx_ring() { 0 } else { core.qp.in_flight_bytes() };
        let before_bytes = std::mem::replace(&mut core.nic.counted_bytes, now_bytes);
        self.in_flight.update(before_bytes, now_bytes);
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

/// The state of one receive pass.
struct ReceivePass<'a, 'b> {
    now: &'b LazyTimestamp<'b>,
    /// Queue pairs with deferred ACKs: most packets are for the first of them.
    acks: &'b mut AckList<QueuePair>,
    /// Whether the pass has deferred an ACK.
    has_deferred: bool,
    /// The table of all queue pairs, read on first use.
    table: OnceCell<TableReader<'a, QueuePair>>,
    work: &'b mut WorkList<QueuePair>,
    bypass: Option<&'b CompletionBypass<'b>>,
    /// Packets from the network that are handled after those in rings.
    early: Vec<EarlyPacket>,
}

/// A packet that is kept for [`Device::handle_early`].
struct EarlyPacket {
    meta: RxMeta,
    bytes: Box<[u8]>,
}

/// A received packet.
#[derive(Clone, Copy)]
struct Arrived<'a> {
    meta: &'a RxMeta,
    /// The PSN up to which a ring's entry acknowledges beside the packet itself.
    ack: Option<Psn>,
    /// All of it, or the first bytes of a run.
    bytes: &'a [u8],
    /// All of a run.
    run: Option<&'a SharedBytes<'a>>,
    path: RxPath,
    /// Whether everything that had arrived by the other path was handled before.
    is_next: bool,
}

impl<'a> Arrived<'a> {
    fn from_network(meta: &'a RxMeta, bytes: &'a [u8], is_next: bool) -> Arrived<'a> {
        Arrived { meta, ack: None, bytes, run: None, path: RxPath::Network, is_next }
    }
}

/// The outcome of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Done,
    /// There is no such queue pair.
    Nowhere,
    /// It came by another path than the packet before it and was not handled: packets may still wait on the previous
    /// path.
    TooEarly,
}

/// Handles a run, whose data are still in the ring.
#[inline(never)]
fn handle_run(
    qp: &QueuePair,
    core: &mut QpCore,
    Arrived { meta, ack, .. }: Arrived<'_>,
    run: &SharedBytes<'_>,
    packet: &Packet<'_>,
    pass: &ReceivePass<'_, '_>,
) {
    let data_at = packet.bth.opcode.info().header_len;
    let len = run.bytes().saturating_sub(data_at + usize::from(packet.bth.pad));
    let (transport, host) = core.parts(qp, pass.bypass);
    let host = host.with_run(run.part(data_at, len));
    transport.handle_run(|| pass.now.get(), meta, packet, len as u64, ack, &host);
}

/// Puts a queue pair on the work list, once.
pub(crate) fn add_to_work_list(qp: &Arc<QueuePair>, core: &mut QpCore, work: &mut WorkList<QueuePair>) {
    if !std::mem::replace(&mut core.nic.is_on_work_list, true) {
        work.push_back(qp.clone());
    }
}
