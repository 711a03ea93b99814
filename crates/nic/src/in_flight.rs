//! The in-flight budgets of a device, one for each peer.
//!
//! A window bounds what one queue pair has in flight. A thousand queue pairs could still have so much in flight that a
//! peer takes longer to answer than they wait before they retransmit. Retransmissions delay the peer further, and in
//! the end nothing else moves. So a device has a limit for each peer, by the address and UDP port of that peer's socket.
//! Beyond it, queue pairs with nothing in flight get grants, first come, first served. Those with something in flight
//! wait for its answer: each of them moves on by a packet at a time. A peer that does not answer holds only its own
//! budget.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use crate::schedule::Schedule;
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};
use crate::tx::WorkList;

/// Bytes that one grant brings into flight at most, if the queue pairs that wait get no more in equal shares: a full
/// packet.
pub(crate) const GRANT_BYTES_MIN: u64 = 4608;

/// What is in flight to a peer.
pub(crate) struct InFlightBudget {
    peer: SocketAddr,
    /// Bytes in flight, as the queue pairs have reported them, and those of the grants that are not taken yet.
    bytes: AtomicU64,
    /// Whether queue pairs with nothing in flight wait for a grant. Changed with the queues locked.
    is_awaited: AtomicBool,
}

impl InFlightBudget {
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }
}

/// The queue pairs that wait for grants of a budget.
struct Waiting<Q> {
    budget: Arc<InFlightBudget>,
    queue: VecDeque<Arc<Q>>,
}

/// The budgets that all queue pairs of a device share.
pub(crate) struct InFlightBudgets<Q> {
    limit_bytes: u64,
    of_peers: Mutex<HashMap<SocketAddr, Weak<InFlightBudget>>>,
    waiting: Mutex<Vec<Waiting<Q>>>,
    /// Whether queue pairs may wait for a budget that permits a grant.
    can_grant: AtomicBool,
}

impl<Q: AsRef<Schedule>> InFlightBudgets<Q> {
    pub fn new(limit_bytes: u64) -> InFlightBudgets<Q> {
        InFlightBudgets {
            limit_bytes,
            of_peers: Mutex::default(),
            waiting: Mutex::default(),
            can_grant: AtomicBool::new(false),
        }
    }

    /// The budget of the peer with that address and UDP port.
    pub fn of_peer(&self, peer: SocketAddr) -> Arc<InFlightBudget> {
        let mut of_peers = self.of_peers.lock();
        if let Some(known) = of_peers.get(&peer).and_then(Weak::upgrade) {
            return known;
        }
        of_peers.retain(|_, budget| budget.strong_count() > 0);
        let (bytes, is_awaited) = (AtomicU64::new(0), AtomicBool::new(false));
        let added = Arc::new(InFlightBudget { peer, bytes, is_awaited });
        of_peers.insert(peer, Arc::downgrade(&added));
        added
    }

    /// Replaces what is counted in flight for a queue pair.
    #[inline]
    pub fn update(&self, budget: &InFlightBudget, before_bytes: u64, now_bytes: u64) {
        if before_bytes != now_bytes {
            budget.bytes.fetch_add(now_bytes.wrapping_sub(before_bytes), Ordering::SeqCst);
            self.note_room(budget);
        }
    }

    /// Bytes that a queue pair may bring into flight, of which `counted_bytes` are counted, and `own_bytes` are in flight.
    /// A packet may exceed what is left of a budget.
    #[inline]
    pub fn left(&self, budget: &InFlightBudget, counted_bytes: u64, own_bytes: u64) -> u64 {
        let others_bytes = budget.bytes.load(Ordering::Relaxed).wrapping_sub(counted_bytes);
        match budget.is_awaited.load(Ordering::Relaxed) {
            true => 0,
            false => self.limit_bytes.saturating_sub(others_bytes.saturating_add(own_bytes)),
        }
    }

    /// Notes that a grant can be given, if the budget has room and a queue pair waits for it.
    #[inline]
    fn note_room(&self, budget: &InFlightBudget) {
        if budget.is_awaited.load(Ordering::SeqCst) && budget.bytes.load(Ordering::SeqCst) < self.limit_bytes
        {
            self.can_grant.store(true, Ordering::SeqCst);
        }
    }

    /// Queues a queue pair for a grant, once.
    pub fn wait(&self, qp: &Arc<Q>, budget: &Arc<InFlightBudget>) {
        if (**qp).as_ref().mark_waiting() {
            let mut waiting = self.waiting.lock();
            match waiting.iter_mut().find(|known| Arc::ptr_eq(&known.budget, budget)) {
                Some(known) => known.queue.push_back(qp.clone()),
                None => waiting.push(Waiting { budget: budget.clone(), queue: [qp.clone()].into() }),
            }
            budget.is_awaited.store(true, Ordering::SeqCst);
            self.note_room(budget);
        }
    }

    /// Ends a queue pair's part of a budget, `counted_bytes`, its grant and its place in the queue: its path leads to that
    /// peer no more. The caller holds the queue pair's lock.
    pub fn leave(&self, qp: &Schedule, budget: &InFlightBudget, counted_bytes: u64) {
        if qp.is_waiting() {
            let mut waiting = self.waiting.lock();
            for known in &mut *waiting {
                known.queue.retain(|other| !std::ptr::eq((**other).as_ref(), qp));
                known.budget.is_awaited.store(!known.queue.is_empty(), Ordering::SeqCst);
            }
            waiting.retain(|Waiting { queue, .. }| !queue.is_empty());
            qp.stop_waiting();
        }
        // Behind the queue: from here on no thread gives it a grant.
        self.update(budget, counted_bytes + qp.take_grant(), 0);
    }

    /// Whether queue pairs may wait for a budget that permits a grant. True while one does.
    #[inline]
    pub fn can_grant(&self) -> bool {
        self.can_grant.load(Ordering::SeqCst)
    }

    /// Grants queue pairs as the budgets permit, and moves them to the work list.
    pub fn give_grants(&self, work: &mut WorkList<Q>) {
        if !self.can_grant() {
            return;
        }
        let mut waiting = self.waiting.lock();
        // First: a thread that frees budget from now on sets it again.
        self.can_grant.store(false, Ordering::SeqCst);
        for Waiting { budget, queue } in &mut *waiting {
            let room_bytes = self.limit_bytes.saturating_sub(budget.bytes.load(Ordering::SeqCst));
            let share_bytes = (room_bytes / queue.len().max(1) as u64).max(GRANT_BYTES_MIN);
            for _ in 0..room_bytes.div_ceil(share_bytes) {
                let Some(qp) = queue.pop_front() else { break };
                // First: the queue pair may take the grant at once.
                budget.bytes.fetch_add(share_bytes, Ordering::SeqCst);
                let before_bytes = (*qp).as_ref().give_grant(share_bytes);
                budget.bytes.fetch_sub(before_bytes, Ordering::SeqCst);
                work.push_back(qp);
            }
            budget.is_awaited.store(!queue.is_empty(), Ordering::SeqCst);
            // A queue pair may have taken its grant in between, and sent less.
            self.note_room(budget);
        }
        waiting.retain(|Waiting { queue, .. }| !queue.is_empty());
    }

    /// Drops the queues, when the device closes.
    pub fn clear(&self) {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        self.can_grant.store(false, Ordering::SeqCst);
        waiting.iter().for_each(|Waiting { budget, .. }| budget.is_awaited.store(false, Ordering::SeqCst));
        drop(waiting);
    }
}
