//! Sending: the buffers that packets wait in, and the lists of queue pairs that have something to send.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;
use terrace_fabric::{RxBatch, TxBatch};
use terrace_transport::Sink;
use terrace_wire::Path;

use crate::local::PeerRxSet;
use crate::schedule::Schedule;
use crate::sync::{AtomicBool, Mutex, Ordering};

/// Size of one batch: two full GSO sends.
const BATCH_BYTES: usize = 128 << 10;

/// Spare units that are kept at most.
const SPARE_UNITS_MAX: usize = 4;

/// Queue pairs to handle.
pub(crate) type WorkList<Q> = VecDeque<Arc<Q>>;

/// The state of one sender: packets, the queue pairs whose tokens it holds for them, and those it has yet to handle.
pub(crate) struct TxUnit<Q> {
    pub batch: TxBatch,
    pub owners: SmallVec<[Arc<Q>; 4]>,
    pub work: WorkList<Q>,
}

impl<Q> TxUnit<Q> {
    /// Boxed, because it is passed around.
    fn new() -> Box<TxUnit<Q>> {
        Box::new(TxUnit { batch: TxBatch::new(BATCH_BYTES), owners: SmallVec::new(), work: VecDeque::new() })
    }

    /// Whether there is nothing to send and no queue pair to handle.
    pub fn is_idle(&self) -> bool {
        self.batch.is_empty() && self.work.is_empty() && self.owners.is_empty()
    }
}

/// The state under the receive lock.
pub(crate) struct Receiver<Q> {
    pub batch: RxBatch,
    /// The receiver's unit, unless it is in use.
    pub unit: Option<Box<TxUnit<Q>>>,
    pub acks: AckList<Q>,
    pub peer_rx: PeerRxSet,
}

impl<Q: AsRef<Schedule>> Receiver<Q> {
    pub fn new() -> Receiver<Q> {
        Receiver { batch: RxBatch::new(), unit: None, acks: AckList::new(), peer_rx: PeerRxSet::default() }
    }

    /// Drops everything, when the device closes.
    pub fn clear(&mut self) {
        self.acks.0.clear();
        self.peer_rx.clear();
        self.unit = None;
    }
}

/// Beyond this length, the list keeps only queue pairs with deferred ACKs.
const KEPT_MAX: usize = 8;

/// Queue pairs that have deferred an ACK. Most of them will again, so they stay for a while. Protected by the receive
/// lock.
pub(crate) struct AckList<Q>(Vec<Arc<Q>>);

impl<Q: AsRef<Schedule>> AckList<Q> {
    pub fn new() -> AckList<Q> {
        AckList(Vec::new())
    }

    /// The queue pair with this number, if it is one of the first. The mark excludes a destroyed queue pair, whose number
    /// another one may have by now.
    #[inline(always)]
    pub fn find(&self, qpn: u32) -> Option<&Arc<Q>> {
        self.0.iter().take(KEPT_MAX).find(|qp| {
            let schedule = (***qp).as_ref();
            schedule.qpn == qpn && schedule.is_on_ack_list.load(Ordering::Relaxed)
        })
    }

    /// Adds a queue pair whose mark the caller has set.
    #[inline(never)]
    pub fn add(&mut self, qp: Arc<Q>) {
        self.0.push(qp);
    }

    /// Moves queue pairs with held ACKs to the work list. Removes destroyed queue pairs and, if the list is too long, those
    /// without a held ACK.
    pub fn release_into(&mut self, work: &mut WorkList<Q>) {
        let is_long = self.0.len() > KEPT_MAX;
        self.0.retain(|qp| {
            let Schedule { ack, is_on_ack_list, .. } = (**qp).as_ref();
            let is_released = ack.release();
            if is_released {
                work.push_back(qp.clone());
            }
            let stays = is_on_ack_list.load(Ordering::Relaxed) && (is_released || !is_long);
            if !stays {
                is_on_ack_list.store(false, Ordering::Relaxed);
            }
            stays
        });
    }

    /// Removes destroyed queue pairs.
    pub fn forget_destroyed(&mut self) {
        self.0.retain(|qp| (**qp).as_ref().is_on_ack_list.load(Ordering::Relaxed));
    }
}

/// Spare units, and units whose packets the network did not take yet.
pub(crate) struct TxPool<Q> {
    // Units come and leave boxed.
    #[expect(clippy::vec_box)]
    spare: Mutex<Vec<Box<TxUnit<Q>>>>,
    blocked: Mutex<Blocked<Q>>,
    is_blocked: AtomicBool,
}

struct Blocked<Q> {
    units: VecDeque<Box<TxUnit<Q>>>,
    /// Units that are being retried. They count as blocked meanwhile: an engine that went to sleep just then would not
    /// wait for the network.
    retried_count: usize,
    /// The source GID of the first packet that the network has refused last.
    gid_index: u8,
}

impl<Q> Blocked<Q> {
    /// Notes the source GID of a unit's first packet. False if it is the same as before.
    fn note_gid(&mut self, unit: &TxUnit<Q>) -> bool {
        let gid_index = unit.batch.packets().next().map_or(0, |packet| packet.path.source_gid_index);
        std::mem::replace(&mut self.gid_index, gid_index) != gid_index
    }
}

impl<Q> Default for TxPool<Q> {
    fn default() -> TxPool<Q> {
        let blocked = Blocked { units: VecDeque::new(), retried_count: 0, gid_index: 0 };
        TxPool { spare: Mutex::default(), blocked: Mutex::new(blocked), is_blocked: AtomicBool::new(false) }
    }
}

impl<Q> TxPool<Q> {
    pub fn take(&self) -> Box<TxUnit<Q>> {
        let spare = self.spare.lock().pop();
        spare.unwrap_or_else(TxUnit::new)
    }

    /// Takes back a unit that has nothing left to do.
    pub fn give_back(&self, unit: Box<TxUnit<Q>>) {
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_UNITS_MAX {
            spare.push(unit);
        }
    }

    /// Keeps a unit until the network takes packets again.
    pub fn block(&self, unit: Box<TxUnit<Q>>) {
        let mut blocked = self.blocked.lock();
        if !self.is_blocked() {
            blocked.note_gid(&unit);
        }
        blocked.units.push_back(unit);
        self.is_blocked.store(true, Ordering::SeqCst);
    }

    /// Whether packets wait for the network. While they do, no thread makes more of them.
    pub fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::SeqCst)
    }

    /// The index of the GID from which the network takes no packets; `None` if no packets wait.
    pub fn blocked_gid(&self) -> Option<u8> {
        self.is_blocked().then(|| self.blocked.lock().gid_index)
    }

    /// Takes the unit that has waited longest, for a retry; `put_back` or `note_unblocked` must follow.
    pub fn take_blocked(&self) -> Option<Box<TxUnit<Q>>> {
        let mut blocked = self.blocked.lock();
        let unit = blocked.units.pop_front()?;
        blocked.retried_count += 1;
        Some(unit)
    }

    /// Returns a unit that the network still does not take. True if it now refuses packets from another GID than before,
    /// for which an engine that sleeps does not wait.
    pub fn put_back(&self, unit: Box<TxUnit<Q>>) -> bool {
        let mut blocked = self.blocked.lock();
        blocked.retried_count -= 1;
        let is_other_gid = blocked.note_gid(&unit);
        blocked.units.push_front(unit);
        is_other_gid
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

/// Queue pairs for the next pass: they keep a small message for a batch, could not send because the network was full, or
/// were woken.
pub(crate) struct Pending<Q> {
    list: Mutex<Vec<Arc<Q>>>,
    any: AtomicBool,
}

impl<Q> Default for Pending<Q> {
    fn default() -> Pending<Q> {
        Pending { list: Mutex::default(), any: AtomicBool::new(false) }
    }
}

impl<Q: AsRef<Schedule>> Pending<Q> {
    /// Adds a queue pair, unless it is there already.
    pub fn add(&self, qp: &Arc<Q>) {
        if (**qp).as_ref().mark_pending() {
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
    pub fn take_into(&self, work: &mut WorkList<Q>, handled: Option<&Arc<Q>>) {
        if self.is_empty() {
            return;
        }
        let mut list = self.list.lock();
        self.any.store(false, Ordering::SeqCst);
        for qp in list.drain(..) {
            let schedule = (*qp).as_ref();
            schedule.is_pending.store(false, Ordering::SeqCst);
            // A wakeup may have come after the queue pair was handled.
            if schedule.is_woken() || !handled.is_some_and(|other| Arc::ptr_eq(other, &qp)) {
                work.push_back(qp);
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
