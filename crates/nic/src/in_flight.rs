//! The in-flight budget of a device.
//!
//! A window bounds what one queue pair has in flight. A thousand queue pairs could still have so much in flight that a
//! peer takes longer to answer than they wait before they retransmit. Retransmissions delay the peer further, and in
//! the end nothing else moves. So a device has a limit of its own. Beyond it, queue pairs with nothing in flight get
//! grants, first come, first served. Those with something in flight wait for its answer: each of them moves on by a
//! packet at a time.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::schedule::Schedule;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::tx::WorkList;

/// Bytes that one grant brings into flight, roughly: a full packet.
const GRANT_BYTES: u64 = 4608;

/// The budget that all queue pairs of a device share.
pub(crate) struct InFlightBudget<Q> {
    limit_bytes: u64,
    /// Bytes in flight, as the queue pairs have reported them.
    bytes: AtomicU64,
    /// Queue pairs with nothing in flight that wait for a grant.
    waiting: Mutex<VecDeque<Arc<Q>>>,
    /// Whether there are any, for a check without the lock.
    any: AtomicBool,
}

impl<Q: AsRef<Schedule>> InFlightBudget<Q> {
    pub fn new(limit_bytes: u64) -> InFlightBudget<Q> {
        InFlightBudget {
            limit_bytes,
            bytes: AtomicU64::new(0),
            waiting: Mutex::default(),
            any: AtomicBool::new(false),
        }
    }

    /// Replaces what is counted in flight for a queue pair.
    #[inline]
    pub fn update(&self, before_bytes: u64, now_bytes: u64) {
        if before_bytes != now_bytes {
            self.bytes.fetch_add(now_bytes.wrapping_sub(before_bytes), Ordering::SeqCst);
        }
    }

    /// Whether a queue pair of which `counted_bytes` are counted may send another packet beside `own_bytes` in flight.
    #[inline]
    pub fn admits(&self, counted_bytes: u64, own_bytes: u64) -> bool {
        let others_bytes = self.bytes.load(Ordering::Relaxed).wrapping_sub(counted_bytes);
        !self.any.load(Ordering::Relaxed) && others_bytes.saturating_add(own_bytes) < self.limit_bytes
    }

    /// Queues a queue pair for a grant, once.
    pub fn wait(&self, qp: &Arc<Q>) {
        if (**qp).as_ref().mark_waiting() {
            self.waiting.lock().push_back(qp.clone());
            self.any.store(true, Ordering::SeqCst);
        }
    }

    /// Whether a queue pair waits for a grant.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// Whether a queue pair waits for a grant, and the budget permits one.
    #[inline]
    pub fn can_grant(&self) -> bool {
        self.is_awaited() && self.bytes.load(Ordering::SeqCst) < self.limit_bytes
    }

    /// Grants queue pairs as the budget permits, and moves them to the work list.
    pub fn give_grants(&self, work: &mut WorkList<Q>) {
        if !self.can_grant() {
            return;
        }
        let room_bytes = self.limit_bytes.saturating_sub(self.bytes.load(Ordering::SeqCst));
        let mut waiting = self.waiting.lock();
        for _ in 0..room_bytes.div_ceil(GRANT_BYTES) {
            let Some(qp) = waiting.pop_front() else { break };
            (*qp).as_ref().give_grant();
            work.push_back(qp);
        }
        self.any.store(!waiting.is_empty(), Ordering::SeqCst);
    }

    /// Drops the queue, when the device closes.
    pub fn clear(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        self.any.store(false, Ordering::SeqCst);
        drop(waiting);
    }
}
