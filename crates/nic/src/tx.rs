//! Sending: the right to send for a queue pair, and the buffers that packets wait in.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use smallvec::SmallVec;
use terrace_fabric::{RxBatch, TxBatch};
use terrace_sync::Mutex;
use terrace_transport::{AckPolicy, Sink};
use terrace_wire::Path;

use crate::local::PeerRxSet;
use crate::qp::QueuePair;

/// Size of one batch: two full GSO sends.
const BATCH_BYTES: usize = 128 << 10;

/// Spare units that are kept at most.
const SPARE_UNITS_MAX: usize = 4;

/// The right to send for a queue pair. Packets of one queue pair must leave in order. So from filling a batch until the
/// batch has left, no other thread takes packets from that queue pair. It leaves a note instead, and the holder fills
/// again.
#[derive(Debug, Default)]
pub(crate) struct TxToken(AtomicU8);

const FREE: u8 = 0;
const TAKEN: u8 = 1;
const TAKEN_LOOK_AGAIN: u8 = 2;

impl TxToken {
    /// Takes the token, or leaves a note for its holder.
    pub fn take(&self) -> bool {
        let was = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            Some(if state == FREE { TAKEN } else { TAKEN_LOOK_AGAIN })
        });
        was == Ok(FREE)
    }

    /// Whether no thread holds the token. Under the queue pair's lock it stays so.
    pub fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == FREE
    }

    /// Releases the token; true when another thread left a note.
    pub fn give_back(&self) -> bool {
        self.0.swap(FREE, Ordering::AcqRel) == TAKEN_LOOK_AGAIN
    }
}

/// Queue pairs to handle, and the policy for their ACKs.
pub(crate) type WorkList = VecDeque<(Arc<QueuePair>, AckPolicy)>;

/// The state of one sender: packets, the queue pairs whose tokens it holds for them, and those it has yet to handle.
pub(crate) struct TxUnit {
    pub batch: TxBatch,
    pub owners: SmallVec<[Arc<QueuePair>; 4]>,
    pub work: WorkList,
    /// Queue pairs with deferred ACKs that are not on the receiver's list yet.
    pub holders: SmallVec<[Arc<QueuePair>; 4]>,
    /// Whether an ACK was deferred since the pass began.
    pub has_held: bool,
}

impl TxUnit {
    /// Boxed, because it is passed around.
    fn new() -> Box<TxUnit> {
        Box::new(TxUnit {
            batch: TxBatch::new(BATCH_BYTES),
            owners: SmallVec::new(),
            work: VecDeque::new(),
            holders: SmallVec::new(),
            has_held: false,
        })
    }

    /// Whether there is nothing to send and no queue pair to handle.
    pub fn is_idle(&self) -> bool {
        self.batch.is_empty() && self.work.is_empty() && self.owners.is_empty()
    }
}

/// Beyond this length, the receiver's list keeps only queue pairs with deferred ACKs.
pub(crate) const HOLDERS_KEPT: usize = 8;

/// The state under the receive lock.
pub(crate) struct Receiver {
    pub batch: RxBatch,
    /// The receiver's unit, unless it is in use.
    pub unit: Option<Box<TxUnit>>,
    /// Queue pairs that have deferred an ACK: most of them will again, so they stay for a while.
    pub holders: Vec<Arc<QueuePair>>,
    pub peer_rx: PeerRxSet,
}

impl Receiver {
    pub fn new() -> Receiver {
        Receiver { batch: RxBatch::new(), unit: None, holders: Vec::new(), peer_rx: PeerRxSet::default() }
    }

    /// Adds queue pairs with deferred ACKs.
    #[inline]
    pub fn know(&mut self, holders: &mut SmallVec<[Arc<QueuePair>; 4]>) {
        if !holders.is_empty() {
            self.holders.extend(holders.drain(..));
        }
    }

    /// Moves queue pairs with deferred ACKs to the work list. Removes destroyed queue pairs and, if the list is too
    /// long, those without a deferred ACK. Afterwards they can defer an ACK again.
    pub fn release(&mut self, work: &mut WorkList) {
        let is_long = self.holders.len() > HOLDERS_KEPT;
        self.holders.retain(|qp| {
            let held = qp.holds_ack.load(Ordering::Relaxed) && qp.holds_ack.swap(false, Ordering::Relaxed);
            if held {
                work.push_back((qp.clone(), AckPolicy::Now));
            }
            let stays = qp.is_known_holder.load(Ordering::Relaxed) && (held || !is_long);
            if !stays {
                qp.is_known_holder.store(false, Ordering::Relaxed);
            }
            stays
        });
    }

    /// Removes destroyed queue pairs.
    pub fn forget_destroyed(&mut self) {
        self.holders.retain(|qp| qp.is_known_holder.load(Ordering::Relaxed));
    }

    /// Drops everything, when the device closes.
    pub fn clear(&mut self) {
        self.holders.clear();
        self.peer_rx.clear();
        self.unit = None;
    }
}

/// Spare units, and units whose packets the network did not take yet.
#[derive(Default)]
pub(crate) struct TxPool {
    // Units come and leave boxed.
    #[expect(clippy::vec_box)]
    spare: Mutex<Vec<Box<TxUnit>>>,
    blocked: Mutex<Blocked>,
    is_blocked: AtomicBool,
}

#[derive(Default)]
struct Blocked {
    units: VecDeque<Box<TxUnit>>,
    /// Units that are being retried. They count as blocked meanwhile: an engine that went to sleep just then would not
    /// wait for the network.
    retried_count: usize,
}

impl TxPool {
    pub fn take(&self) -> Box<TxUnit> {
        let spare = self.spare.lock().pop();
        spare.unwrap_or_else(TxUnit::new)
    }

    /// Takes back a unit that has nothing left to do.
    pub fn give_back(&self, unit: Box<TxUnit>) {
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_UNITS_MAX {
            spare.push(unit);
        }
    }

    /// Keeps a unit until the network takes packets again.
    pub fn block(&self, unit: Box<TxUnit>) {
        let mut blocked = self.blocked.lock();
        blocked.units.push_back(unit);
        self.is_blocked.store(true, Ordering::SeqCst);
    }

    /// Whether packets wait for the network. While they do, no thread makes more of them.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::SeqCst)
    }

    /// Takes the unit that has waited longest, for a retry; `put_back` or `note_unblocked` must follow.
    pub fn take_blocked(&self) -> Option<Box<TxUnit>> {
        let mut blocked = self.blocked.lock();
        let unit = blocked.units.pop_front()?;
        blocked.retried_count += 1;
        Some(unit)
    }

    /// Returns a unit that the network still does not take.
    pub fn put_back(&self, unit: Box<TxUnit>) {
        let mut blocked = self.blocked.lock();
        blocked.retried_count -= 1;
        blocked.units.push_front(unit);
    }

    /// Notes that the network has taken a unit.
    pub fn note_unblocked(&self) {
        let mut blocked = self.blocked.lock();
        blocked.retried_count -= 1;
        if blocked.units.is_empty() && blocked.retried_count == 0 {
            self.is_blocked.store(false, Ordering::SeqCst);
        }
    }

    /// Drops what could not be sent, when the device closes.
    pub fn clear(&self) {
        let units = std::mem::take(&mut self.blocked.lock().units);
        drop(units);
    }
}

/// Queue pairs for the next pass: they defer an ACK beside what they have sent, keep a small message for a batch, could
/// not send because the network was full, or were woken.
#[derive(Default)]
pub(crate) struct Pending {
    list: Mutex<Vec<Arc<QueuePair>>>,
    any: AtomicBool,
}

impl Pending {
    /// Adds a queue pair, unless it is there already.
    pub fn add(&self, qp: &Arc<QueuePair>) {
        if qp.mark_listed() {
            let mut list = self.list.lock();
            list.push(qp.clone());
            self.any.store(true, Ordering::SeqCst);
        }
    }

    /// Drops everything, when the device closes.
    pub fn clear(&self) {
        let list = std::mem::take(&mut *self.list.lock());
        drop(list);
    }

    /// Does not take the lock.
    pub fn is_empty(&self) -> bool {
        !self.any.load(Ordering::SeqCst)
    }

    /// Moves all of them to the work list, except for the one that has just been handled.
    pub fn take_into(&self, work: &mut WorkList, looked_at: Option<&Arc<QueuePair>>) {
        if self.is_empty() {
            return;
        }
        let mut list = self.list.lock();
        self.any.store(false, Ordering::SeqCst);
        for qp in list.drain(..) {
            qp.listed.store(false, Ordering::SeqCst);
            // A wakeup may have come after the queue pair was handled.
            if qp.is_woken() || !looked_at.is_some_and(|other| Arc::ptr_eq(other, &qp)) {
                work.push_back((qp, AckPolicy::Now));
            }
        }
    }
}

/// A batch as the transport's sink.
pub(crate) struct BatchSink<'a>(pub &'a mut TxBatch);

impl Sink for BatchSink<'_> {
    #[inline]
    fn push(&mut self, path: &Path, len: usize) -> Option<&mut [u8]> {
        self.0.push(path, len)
    }

    fn cancel(&mut self) {
        self.0.cancel();
    }
}
