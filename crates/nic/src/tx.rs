//! Sending: who may send for a queue pair, and the buffers that packets wait in.

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

/// Room of one batch: two full GSO sends.
const BATCH_BYTES: usize = 128 << 10;

/// Batches that are kept for the next sender.
const SPARE_UNITS_MAX: usize = 4;

/// The right to send for a queue pair. Packets of one queue pair must leave in order, so from the moment that
/// packets are put into a batch until the batch has left, nobody else takes packets from that queue pair; whoever
/// would, leaves a note instead, and the holder looks again.
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

    /// Whether nobody has it. Under the queue pair's lock it stays so.
    pub fn is_free(&self) -> bool {
        self.0.load(Ordering::Acquire) == FREE
    }

    /// Gives the token back; true when somebody left a note.
    pub fn give_back(&self) -> bool {
        self.0.swap(FREE, Ordering::AcqRel) == TAKEN_LOOK_AGAIN
    }
}

/// Queue pairs to look at, and what to do with their acknowledgements.
pub(crate) type WorkList = VecDeque<(Arc<QueuePair>, AckPolicy)>;

/// One sender's things: packets, the queue pairs whose tokens it holds for them, and those it has yet to look at.
pub(crate) struct TxUnit {
    pub batch: TxBatch,
    pub owners: SmallVec<[Arc<QueuePair>; 4]>,
    pub work: WorkList,
    /// Those that hold an acknowledgement back, and are not known to whoever receives yet.
    pub holders: SmallVec<[Arc<QueuePair>; 4]>,
    /// Whether anybody holds one back since the look began.
    pub has_held: bool,
}

impl TxUnit {
    /// In a box, because it is handed around.
    fn new() -> Box<TxUnit> {
        Box::new(TxUnit {
            batch: TxBatch::new(BATCH_BYTES),
            owners: SmallVec::new(),
            work: VecDeque::new(),
            holders: SmallVec::new(),
            has_held: false,
        })
    }

    /// Whether there is nothing to send and nobody to look at.
    pub fn is_idle(&self) -> bool {
        self.batch.is_empty() && self.work.is_empty() && self.owners.is_empty()
    }
}

/// So many queue pairs stay known to whoever receives although they hold no acknowledgement back just now.
pub(crate) const HOLDERS_KEPT: usize = 8;

/// What whoever has the right to receive needs for it.
pub(crate) struct Receiver {
    pub batch: RxBatch,
    /// Its unit, unless that is under way.
    pub unit: Option<Box<TxUnit>>,
    /// Queue pairs that have held an acknowledgement back: most of them will again, so they stay for a while.
    pub holders: Vec<Arc<QueuePair>>,
    pub peer_rx: PeerRxSet,
}

impl Receiver {
    pub fn new() -> Receiver {
        Receiver { batch: RxBatch::new(), unit: None, holders: Vec::new(), peer_rx: PeerRxSet::default() }
    }

    /// Gets to know these.
    #[inline]
    pub fn know(&mut self, holders: &mut SmallVec<[Arc<QueuePair>; 4]>) {
        if !holders.is_empty() {
            self.holders.extend(holders.drain(..));
        }
    }

    /// Moves those that still hold one to the work list, and forgets those that are destroyed, or too many. From now on they can hold
    /// one again.
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

    /// Forgets those that are destroyed.
    pub fn forget_destroyed(&mut self) {
        self.holders.retain(|qp| qp.is_known_holder.load(Ordering::Relaxed));
    }

    /// Forgets everything, when the device closes.
    pub fn clear(&mut self) {
        self.holders.clear();
        self.peer_rx.clear();
        self.unit = None;
    }
}

/// Units that nobody uses just now, and those whose packets the network did not take yet.
#[derive(Default)]
pub(crate) struct TxPool {
    // They come in boxes and leave in them.
    #[expect(clippy::vec_box)]
    spare: Mutex<Vec<Box<TxUnit>>>,
    blocked: Mutex<Blocked>,
    is_blocked: AtomicBool,
}

#[derive(Default)]
struct Blocked {
    units: VecDeque<Box<TxUnit>>,
    /// Units that somebody is trying to send again. They count as blocked meanwhile: an engine that went to sleep just
    /// then would not wait for the network.
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

    /// Puts a unit aside until the network takes packets again.
    pub fn block(&self, unit: Box<TxUnit>) {
        let mut blocked = self.blocked.lock();
        blocked.units.push_back(unit);
        self.is_blocked.store(true, Ordering::SeqCst);
    }

    /// Whether packets wait for the network. While they do, nobody makes more of them.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::SeqCst)
    }

    /// The unit that has waited longest, to be tried again; then comes `put_back` or `note_unblocked`.
    pub fn take_blocked(&self) -> Option<Box<TxUnit>> {
        let mut blocked = self.blocked.lock();
        let unit = blocked.units.pop_front()?;
        blocked.retried_count += 1;
        Some(unit)
    }

    /// The network still does not take it.
    pub fn put_back(&self, unit: Box<TxUnit>) {
        let mut blocked = self.blocked.lock();
        blocked.retried_count -= 1;
        blocked.units.push_front(unit);
    }

    /// The network has taken it.
    pub fn note_unblocked(&self) {
        let mut blocked = self.blocked.lock();
        blocked.retried_count -= 1;
        if blocked.units.is_empty() && blocked.retried_count == 0 {
            self.is_blocked.store(false, Ordering::SeqCst);
        }
    }

    /// Forgets what could not be sent, when the device closes.
    pub fn clear(&self) {
        let units = std::mem::take(&mut self.blocked.lock().units);
        drop(units);
    }
}

/// Queue pairs that want to be looked at by whoever makes progress next: they hold an ACK back beside what they have sent, wait for
/// company for a small message, could not send because the network was full, or were woken.
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

    /// Forgets everything, when the device closes.
    pub fn clear(&self) {
        let list = std::mem::take(&mut *self.list.lock());
        drop(list);
    }

    /// A look without the lock.
    pub fn is_empty(&self) -> bool {
        !self.any.load(Ordering::SeqCst)
    }

    /// Moves all of them to the work list, but for the one that has just been looked at.
    pub fn take_into(&self, work: &mut WorkList, looked_at: Option<&Arc<QueuePair>>) {
        if self.is_empty() {
            return;
        }
        let mut list = self.list.lock();
        self.any.store(false, Ordering::SeqCst);
        for qp in list.drain(..) {
            qp.listed.store(false, Ordering::SeqCst);
            // One that was woken may have been so after it was looked at.
            if qp.is_woken() || !looked_at.is_some_and(|other| Arc::ptr_eq(other, &qp)) {
                work.push_back((qp, AckPolicy::Now));
            }
        }
    }
}

/// A batch, as the transport wants to see it.
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
