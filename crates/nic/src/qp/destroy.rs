//! The end of a queue pair.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use terrace_shm::GracePeriod;
use terrace_transport::{QpAttr, QpAttrMask, QpState, Time};

use super::QueuePair;
use super::create::others;
use crate::error::{Error, reader_timeout};
use crate::holders::Leaving;
use crate::schedule::NEVER;
use crate::use_count::UseCount;

/// Tries at most to send a deferred ACK before the queue pair ends. Another thread that is sending for the queue pair
/// takes microseconds; a blocked network is not waited for.
const DEFERRED_ACK_TRIES_MAX: u32 = 64;

impl QueuePair {
    /// Gives up the hold with this cookie on a target of XRC; with the last hold it is destroyed, as any other queue
    /// pair is. Waits until the asynchronous events that were delivered to this holder are acknowledged.
    pub fn release(self: &Arc<Self>, cookie: u64) -> Result<(), Error> {
        match self.holders.leave(cookie) {
            Leaving::Last => self.destroy(),
            Leaving::Another => Ok(()),
            Leaving::First => {
                // The delivered events name this holder.
                self.async_account.wait_acknowledged();
                Ok(())
            }
        }
    }

    /// Withdraws the queue pair from same-host peers until it is modified. Packets still arrive. False if it was not
    /// published.
    pub fn withdraw(&self) -> bool {
        let mut core = self.lock();
        let was_published = core.nic.local.withdraw();
        if was_published {
            self.device().memory.set_queue_pair(self.qpn(), None);
        }
        was_published
    }

    /// Waits until same-host peers have finished all accesses through this queue pair that they began before it was
    /// last modified or withdrawn. EBUSY when a peer does not within ten seconds: it may be stopped.
    pub fn await_readers(&self) -> Result<(), Error> {
        GracePeriod::of_queue_pair(self.qpn()).wait_long().map_err(reader_timeout)
    }

    /// Destroys the queue pair: nothing is sent or received for it any more, its completions are discarded, its type 2
    /// windows are unbound, pagers change no memory for its peer. Waits until delivered asynchronous events are acknowledged, but
    /// not for same-host peers: see [`QueuePair::await_readers`].
    pub fn destroy(self: &Arc<Self>) -> Result<(), Error> {
        self.users.end()?;
        let device = self.device();
        self.send_deferred_ack();
        device.table.remove(self.qpn());
        self.stop();
        self.changes.cancel();
        if let Some(stage) = self.stage.get() {
            stage.state_changed(QpState::Reset);
            self.forget_stage_work();
        }
        if self.schedule.is_on_ack_list.swap(false, Ordering::Relaxed) {
            match device.rx.try_lock() {
                Some(mut rx) => rx.acks.forget_destroyed(),
                // The next pass does.
                None => {
                    device.has_deferred_acks.store(true, Ordering::SeqCst);
                    device.engine.wake();
                }
            }
        }
        if device.in_flight.can_grant() {
            device.engine.wake_by(Time(0));
        }
        device.numbered_qps.remove(self.qpn());
        device.memory.invalidate_windows_of(self.qpn());
        device.events.withdraw(&self.async_account);
        self.remove_from_users_of_others();
        device.quotas.qp.give_back();
        Ok(())
    }

    /// Sends a deferred ACK: the program has had the message, and after this the peer's retransmissions get no answer.
    pub(crate) fn send_deferred_ack(self: &Arc<Self>) {
        for _ in 0..DEFERRED_ACK_TRIES_MAX {
            let core = self.lock();
            if core.nic.dead || !core.qp.holds_ack() {
                return;
            }
            self.device().after_change(self, core);
            // Another thread may be sending for this queue pair. It sends the ACK before it is done.
            std::thread::yield_now();
        }
    }

    /// Stops all activity, without an event.
    pub(crate) fn stop(&self) {
        let mut core = self.lock();
        core.nic.dead = true;
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        let (transport, host) = core.parts(self, None);
        // RESET can be reached from every state.
        let _ = transport.modify(&reset, QpAttrMask::STATE, &host);
        self.update_source(&core);
        self.device().choose_budget(self, &mut core);
        self.device().note_modified(self, &mut core);
        // Its entry in the timers is no longer live, and goes with the next sweep.
        self.schedule.timer_at.store(NEVER.0, Ordering::Relaxed);
        self.purge_completions();
    }

    pub(super) fn purge_completions(&self) {
        self.init.send_cq.purge(self.qpn());
        if !Arc::ptr_eq(&self.init.send_cq, &self.init.recv_cq) {
            self.init.recv_cq.purge(self.qpn());
        }
    }

    /// The stage has been reset. Until then another thread may have permitted READs of a table, or completed a request.
    pub(super) fn forget_stage_work(&self) {
        self.table_keys.clear();
        self.purge_completions();
    }

    fn remove_from_users_of_others(&self) {
        let others = others(&self.pd, &self.init, self.xrcd.as_ref());
        others.into_iter().flatten().for_each(UseCount::remove);
    }
}
